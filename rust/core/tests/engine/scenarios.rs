//! Scenarios with a name: what users of such servers have reported, and what the design promises.

use chairlift_core::config::Settings;
use chairlift_core::config::memory::Backfill;
use chairlift_core::config::policy::Policy;
use chairlift_core::request::{Finish, NewRequest, RequestId, SamplingParams, Ticket};
use chairlift_core::text::{StopStrings, StopText};

use super::harness::{EOS, Harness, Random, next_token, request, runs_ahead};

pub fn settings() -> Settings {
    Settings {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        block_size: 4,
        num_kv_blocks: 64,
        watermark_blocks: Some(0),
        vocab_size: 1_000,
        ..Settings::default()
    }
}

/// A prompt whose answer has no end-of-sequence token among its first `tokens`.
/// Nobody goes ahead of the first of the queue.
pub fn strict() -> Policy {
    let mut policy = Policy::default();
    policy.memory.backfill = Backfill::Off;
    policy
}

fn prompt(seed: u64, length: u32, tokens: usize) -> Vec<u32> {
    let mut random = Random(seed);
    loop {
        let prompt: Vec<u32> = (0..length).map(|_| random.within(1, 999)).collect();
        let mut history = prompt.clone();
        for _ in 0..tokens {
            history.push(next_token(&history, 0, 1_000));
        }
        if !history.contains(&EOS) {
            return prompt;
        }
    }
}

pub fn plain(id: u64, length: u32, max_tokens: u32) -> NewRequest {
    request(id, prompt(id, length, max_tokens as usize), max_tokens)
}

#[test]
fn newcomers_join_at_the_next_iteration_and_leavers_free_their_memory_in_the_same_one() {
    if runs_ahead() {
        return;
    }
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 16,
        enable_prefix_caching: false,
        ..settings()
    });
    harness.submit(plain(1, 8, 30));
    harness.step();
    harness.step();
    harness.submit(plain(2, 28, 2));
    assert!(harness.schedule());
    assert_eq!(
        (harness.plan.num_decodes, harness.plan.num_seqs()),
        (1, 2),
        "it joined at once"
    );
    harness.submit(plain(3, 24, 2));
    harness.commit();
    harness.step();
    assert_eq!(harness.client(2).answers[0].finish, Some(Finish::Length));
    let before = harness.engine.metrics();
    assert!(
        before.free_blocks >= 7,
        "the leaver's memory is free: {before:?}"
    );
    harness.step();
    assert_eq!(
        harness.client(3).answers[0].tokens.len(),
        1,
        "and serves the next iteration"
    );
}

#[test]
fn decodes_prefills_and_newcomers_share_the_budget_in_this_order() {
    let mut harness = Harness::new(Settings {
        max_num_batched_tokens: 10,
        long_prefill_token_threshold: Some(6),
        ..settings()
    });
    harness.submit(plain(1, 4, 9));
    harness.step();
    harness.submit(plain(2, 20, 1));
    harness.step();
    harness.submit(plain(3, 20, 1));
    assert!(harness.schedule());
    let lengths: Vec<i32> = harness
        .plan
        .query_start_loc
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .collect();
    assert_eq!(
        lengths,
        [1, 6, 3],
        "a decode, the running prefill's chunk, the newcomer's"
    );
    harness.commit();
    harness.run_to_end();
}

#[test]
fn limits_are_exact() {
    for max_tokens in [1, 2, 5] {
        let mut harness = Harness::new(settings());
        harness.submit(plain(1, 5, max_tokens));
        harness.run_to_end();
        let answer = &harness.client(1).answers[0];
        assert_eq!(answer.tokens.len(), max_tokens as usize);
        assert_eq!(answer.finish, Some(Finish::Length));
        assert_eq!(answer.text.len(), max_tokens as usize);
    }
}

#[test]
fn max_tokens_is_cut_to_the_room() {
    for max_tokens in [None, Some(10_000)] {
        let mut harness = Harness::new(settings());
        let mut new = plain(1, 60, 4);
        new.stop.max_tokens = max_tokens;
        harness.submit(new);
        harness.run_to_end();
        let answer = &harness.client(1).answers[0];
        assert_eq!(
            (answer.tokens.len(), answer.finish),
            (4, Some(Finish::Length))
        );
    }
}

#[test]
fn the_last_allowed_token_may_be_a_stop() {
    let mut harness = Harness::new(settings());
    let mut new = plain(1, 5, 8);
    let mut history = new.prompt.clone();
    for _ in 0..3 {
        history.push(next_token(&history, 0, 1_000));
    }
    let third = history[7];
    new.stop.max_tokens = Some(3);
    new.stop.stop_token_ids = vec![third];
    harness.submit(new.clone());
    new.id = RequestId(2);
    new.stop.min_tokens = 3;
    harness.submit(new.clone());
    new.id = RequestId(3);
    new.stop.stop_token_ids.clear();
    new.stop.min_tokens = 0;
    let letter = char::from(b'a' + (third % 26) as u8).to_string();
    new.stop.stop = Some(
        StopStrings::new(&[letter], StopText::Excluded)
            .unwrap()
            .into(),
    );
    harness.submit(new);
    harness.run_to_end();
    for id in [1, 2] {
        let answer = &harness.client(id).answers[0];
        assert_eq!(
            answer.finish,
            Some(Finish::StopToken(third)),
            "request {id}"
        );
        assert_eq!(answer.text.len(), 2, "the stop token has no text");
    }
    let answer = &harness.client(3).answers[0];
    assert!(
        matches!(answer.finish, Some(Finish::StopString(0))),
        "{answer:?}"
    );
    assert_eq!(answer.text.len() + 1, answer.tokens.len());
}

/// Case C29.
#[test]
fn what_can_never_run_is_refused_with_the_numbers() {
    let mut harness = Harness::new(settings());
    let reserve = |harness: &mut Harness| {
        harness
            .engine
            .reserve(harness.now, Ticket::new(RequestId(9)))
            .unwrap();
    };
    let mut refuse = |new: NewRequest| {
        reserve(&mut harness);
        let error = harness.engine.submit(harness.now, new).unwrap_err();
        assert_eq!(
            harness.engine.metrics().queued,
            0,
            "the place is given back"
        );
        (error.code(), error.to_string())
    };
    let (code, message) = refuse(request(9, vec![1; 64], 1));
    assert_eq!(code, "context_length_exceeded");
    assert!(
        message.contains("has 64 tokens") && message.contains("length is 64 tokens"),
        "{message}"
    );
    assert_eq!(refuse(request(9, vec![], 1)).0, "empty_prompt");
    assert_eq!(refuse(request(9, vec![1_000], 1)).0, "token_out_of_range");
    assert_eq!(refuse(request(9, vec![1], 0)).0, "invalid_parameter");
    let broken: [fn(&mut SamplingParams); 9] = [
        |sampling| sampling.temperature = f32::NAN,
        |sampling| sampling.temperature = -1.0,
        |sampling| sampling.temperature = f32::INFINITY,
        |sampling| sampling.top_p = 0.0,
        |sampling| sampling.top_p = f32::NAN,
        |sampling| sampling.presence_penalty = 3.0,
        |sampling| sampling.n = 0,
        |sampling| sampling.n = 5,
        |sampling| sampling.logit_bias = vec![(5, 1e9)],
    ];
    for (position, damage) in broken.into_iter().enumerate() {
        let mut new = request(9, vec![1], 1);
        damage(&mut new.sampling);
        let (code, message) = refuse(new);
        assert_eq!(code, "invalid_parameter", "case {position}: {message}");
    }
    assert_eq!(harness.engine.metrics().rejected, 13);
    assert!(!harness.step(), "nothing of them is left");
}

#[test]
fn a_pool_too_small_for_max_model_len_lowers_it() {
    let harness = Harness::new(Settings {
        num_kv_blocks: 8,
        ..settings()
    });
    let limits = harness.engine.limits();
    assert_eq!(
        (limits.max_model_len(), limits.requested_max_model_len()),
        (32, 64)
    );
    let error = Settings {
        max_num_seqs: 65,
        ..settings()
    }
    .validate()
    .unwrap_err();
    assert!(error.to_string().contains("max_num_seqs (65)"), "{error}");
}

#[test]
fn two_steps_are_in_flight_at_most() {
    assert_eq!(settings().validate().unwrap().max_in_flight_steps(), 1);
    for (max_in_flight_steps, message) in [
        (0, "max_in_flight_steps is 0; it must be at least 1"),
        (3, "max_in_flight_steps is 3; it must be at most 2"),
    ] {
        let error = Settings {
            max_in_flight_steps,
            ..settings()
        }
        .validate()
        .unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

/// Case C29.
#[test]
fn a_sequence_that_grows_to_the_whole_pool_ends_by_length() {
    // vllm#39734: within max_model_len, alone, and as large as the pool.
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 16,
        ..settings()
    });
    harness.submit(plain(1, 30, 34));
    harness.run_to_end();
    assert_eq!(harness.client(1).answers[0].tokens.len(), 34);
    assert_eq!(harness.engine.metrics().preemptions, 0);
}

/// Case C29.
#[test]
fn crowds_beyond_the_pool_all_finish_and_preemptions_are_bounded() {
    let mut harness = Harness::new(Settings {
        max_num_seqs: 8,
        num_kv_blocks: 20,
        enable_prefix_caching: false,
        ..settings()
    });
    for id in 0..30 {
        harness.submit(plain(id, 10, 30));
    }
    let mut oldest = None;
    loop {
        let before: usize = harness
            .clients
            .values()
            .map(|c| c.answers[0].tokens.len())
            .sum();
        if !harness.step() {
            break;
        }
        let live = harness.clients.values().find(|client| client.ended == 0);
        let progress = live.map(|c| (c.request.id, c.answers[0].tokens.len()));
        if harness.plan.num_decodes > 0 && !runs_ahead() {
            assert_ne!(progress, oldest, "the oldest request got on");
        }
        oldest = progress;
        let after: usize = harness
            .clients
            .values()
            .map(|c| c.answers[0].tokens.len())
            .sum();
        assert!(after > before || harness.landed.num_tokens() > 1);
    }
    let metrics = harness.engine.metrics();
    assert_eq!(metrics.finished, 30);
    assert!(
        metrics.preemptions > 10,
        "it really was crowded: {metrics:?}"
    );
    assert!(metrics.preemptions < 30 * 8, "bounded: {metrics:?}");
}

/// Case C29.
#[test]
fn a_preempted_sequence_returns_ahead_of_fresh_ones() {
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 16,
        enable_prefix_caching: false,
        policy: strict(), // this is about the queue's own order
        ..settings()
    });
    harness.submit(plain(1, 20, 30));
    harness.submit(plain(2, 20, 20));
    while harness.engine.metrics().preemptions == 0 {
        assert!(harness.step());
    }
    let told = harness.client(2).answers[0].tokens.len();
    assert!(
        told > 0,
        "the newest was preempted in the middle of its answer"
    );
    harness.submit(plain(3, 4, 1));
    while harness.client(2).answers[0].tokens.len() == told {
        assert_eq!(harness.client(3).scheduled, 0, "a fresh one went first");
        assert!(harness.step());
    }
    harness.run_to_end();
    assert_eq!(
        harness.engine.metrics().recomputed_tokens,
        20 + told as u64 - 1
    );
}

#[test]
fn an_abort_frees_at_once_or_when_its_step_is_committed_and_not_before() {
    if runs_ahead() {
        return;
    }
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 8, 20));
    harness.submit(plain(2, 8, 20));
    assert!(harness.abort(2), "while waiting");
    assert_eq!(harness.engine.metrics().waiting_sequences, 1);
    harness.step();
    assert!(harness.schedule());
    let used = harness.engine.metrics().used_blocks;
    assert!(harness.abort(1), "in flight");
    assert_eq!(
        harness.client(1).answers[0].finish,
        Some(Finish::Abort),
        "told at once"
    );
    assert_eq!(
        harness.engine.metrics().used_blocks,
        used,
        "its step still writes there"
    );
    assert!(!harness.abort(1), "idempotent");
    harness.commit();
    assert_eq!(harness.engine.metrics().used_blocks, 0);
    assert_eq!(
        harness.client(1).answers[0].tokens.len(),
        1,
        "the late token is dropped"
    );
    harness.submit(plain(3, 8, 20));
    harness.step();
    assert!(harness.abort(3), "between steps");
    assert_eq!(harness.engine.metrics().used_blocks, 0);
    assert!(!harness.step());
}

#[test]
fn an_id_may_be_used_again_while_the_old_step_is_in_flight() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 8, 5));
    assert!(
        harness
            .engine
            .reserve(harness.now, Ticket::new(RequestId(1)))
            .is_err(),
        "live"
    );
    assert!(harness.schedule());
    harness.abort(1);
    harness.clients.clear();
    harness.submit(plain(1, 8, 5));
    harness.commit();
    harness.run_to_end();
    assert_eq!(harness.client(1).answers[0].tokens.len(), 5);
}

#[test]
fn a_failed_row_ends_its_own_request_and_a_failed_step_all_of_its() {
    if runs_ahead() {
        return;
    }
    let mut harness = Harness::new(settings());
    for id in 1..=4 {
        harness.submit(plain(id, 6, 20));
    }
    harness.submit(plain(5, 6, 3));
    harness.step();
    assert!(harness.schedule());
    harness.failing_rows.push(harness.plan.rows[1]);
    harness.commit();
    assert_eq!(harness.client(2).answers[0].finish, Some(Finish::RowFailed));
    assert_eq!(
        harness.client(1).answers[0].tokens.len(),
        2,
        "its neighbours go on"
    );
    assert!(harness.schedule());
    harness.fail_step();
    harness.receive();
    for id in [1, 3, 4] {
        assert_eq!(
            harness.client(id).answers[0].finish,
            Some(Finish::StepFailed),
            "request {id}"
        );
    }
    harness.submit(plain(6, 6, 3));
    harness.run_to_end();
    let metrics = harness.engine.metrics();
    // Request 5 had joined in the failed step.
    assert_eq!((metrics.failed, metrics.finished), (5, 1));
}

#[test]
fn a_dead_engine_ends_everything() {
    let mut harness = Harness::new(settings());
    for id in 1..=6 {
        harness.submit(plain(id, 6, 20));
    }
    assert!(harness.schedule());
    harness.fail_all();
    harness.receive();
    for client in harness.clients.values() {
        assert_eq!(client.answers[0].finish, Some(Finish::EngineDead));
    }
    let metrics = harness.engine.metrics();
    assert_eq!(
        (metrics.live, metrics.used_blocks, metrics.queued),
        (0, 0, 0)
    );
}

#[test]
fn everything_can_be_aborted_at_once() {
    let mut harness = Harness::new(settings());
    for id in 1..=6 {
        harness.submit(plain(id, 6, 20));
    }
    assert!(harness.schedule());
    harness.engine.abort_all(harness.now);
    harness.receive();
    for client in harness.clients.values() {
        assert_eq!(client.answers[0].finish, Some(Finish::Abort));
    }
    assert!(
        harness.engine.metrics().used_blocks > 0,
        "the step in flight still writes there"
    );
    harness.commit();
    let metrics = harness.engine.metrics();
    assert_eq!(
        (metrics.aborted, metrics.used_blocks, metrics.queued),
        (6, 0, 0)
    );
}
