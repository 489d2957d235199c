//! What a step can be asked for and return beyond one token a sample: log-probabilities of the prompt,
//! several tokens, results of the wrong shape; and what its copies hold meanwhile.
//!
//! The harness checks every token, text and log-probability as it comes.

use chairlift_core::config::Settings;
use chairlift_core::iteration::commit::StepResults;
use chairlift_core::output::TokenLogprob;
use chairlift_core::request::{Finish, NewRequest, RequestId, SamplingParams};

use super::harness::{Harness, next_token, runs_ahead};
use super::levels::two_levels;
use super::scenarios::{plain, settings};

#[test]
fn a_prompt_is_scored_once_whatever_its_chunks() {
    for chunk in [1, 3, 4, 7, 64] {
        let mut harness = Harness::new(Settings {
            long_prefill_token_threshold: Some(chunk),
            ..settings()
        });
        let mut new = plain(1, 23, 4);
        new.sampling.prompt_logprobs = Some(2);
        new.sampling.n = 2;
        harness.submit(new);
        harness.submit(plain(2, 9, 4));
        let mut scores = 0;
        while harness.schedule() {
            scores += harness.plan.num_scores();
            harness.commit();
        }
        assert_eq!(scores, 22, "chunks of {chunk}: all but the first token");
        assert_eq!(harness.client(1).scored, 22);
    }
}

#[test]
fn a_prompt_of_one_token_has_nothing_to_score() {
    let mut harness = Harness::new(settings());
    let mut new = plain(1, 1, 2);
    new.sampling.prompt_logprobs = Some(0);
    harness.submit(new);
    assert!(harness.schedule());
    assert_eq!(harness.plan.num_scores(), 0);
    harness.commit();
    harness.run_to_end();
}

#[test]
fn scoring_fills_the_prefix_cache_and_does_not_read_it() {
    let mut harness = Harness::new(settings());
    let mut new = plain(1, 20, 2);
    new.sampling.prompt_logprobs = Some(0);
    for id in 1..=2 {
        new.id = RequestId(id);
        harness.submit(new.clone());
        harness.run_to_end();
        assert_eq!(harness.engine.metrics().cached_tokens, 0);
    }
    new.id = RequestId(3);
    new.sampling.prompt_logprobs = None;
    harness.submit(new);
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().cached_tokens, 16);
}

#[test]
fn a_preempted_prompt_goes_on_being_scored_where_it_was() {
    if runs_ahead() {
        return;
    }
    for enable_prefix_caching in [false, true] {
        let mut harness = Harness::new(Settings {
            long_prefill_token_threshold: Some(3),
            enable_prefix_caching,
            num_kv_blocks: 10,
            max_model_len: 40,
            ..settings()
        });
        harness.submit(plain(1, 7, 20));
        harness.step();
        harness.step();
        let mut new = plain(2, 27, 2);
        new.sampling.prompt_logprobs = Some(1);
        harness.submit(new);
        let mut scores = 0;
        while harness.schedule() {
            scores += harness.plan.num_scores();
            harness.commit();
        }
        let metrics = harness.engine.metrics();
        assert_eq!(metrics.preemptions, 1);
        assert_eq!(scores, 26);
        // Full blocks that were scored before may be found again; the rest is computed again.
        let recomputed = if enable_prefix_caching { 6 } else { 18 };
        assert_eq!(metrics.recomputed_tokens, recomputed);
    }
}

#[test]
fn the_second_token_of_a_step_is_dropped_when_the_first_ends_the_answer() {
    let mut harness = Harness::new(settings());
    harness.most_tokens_per_sample = 2;
    let (mut several, mut dropped) = (0, 0);
    for id in 1..=40 {
        let mut new = plain(id, 6, 8);
        let prompt = new.prompt.clone();
        new.stop.stop_token_ids = vec![next_token(&prompt, 0, 1_000)];
        new.sampling.logprobs = Some(1);
        harness.submit(new);
        assert!(harness.schedule());
        let tokens = harness.execute().token_ids.len();
        harness.commit();
        let answer = &harness.client(id).answers[0];
        assert_eq!(answer.tokens.len(), 1);
        assert!(matches!(answer.finish, Some(Finish::StopToken(_))));
        dropped += tokens - 1;

        // The same without the stop: both arrive, and length cuts the last step to what is allowed.
        let mut new = plain(100 + id, 6, 7);
        new.prompt = prompt;
        new.stop.ignore_eos = true;
        harness.submit(new);
        while harness.schedule() {
            several += harness.execute().token_ids.len() - 1;
            harness.commit();
        }
        let answer = &harness.client(100 + id).answers[0];
        assert_eq!(answer.tokens.len(), 7);
        assert_eq!(answer.finish, Some(Finish::Length));
    }
    assert!(dropped > 10 && several > 50, "{dropped}, {several}");
    assert_eq!(harness.engine.metrics().used_blocks, 0);
}

#[test]
fn several_tokens_cross_block_borders_and_part_from_siblings() {
    let mut harness = Harness::new(Settings {
        block_size: 2,
        enable_prefix_caching: false,
        ..settings()
    });
    harness.most_tokens_per_sample = 5;
    let mut new = plain(1, 7, 30);
    new.sampling.n = 3;
    new.stop.ignore_eos = true;
    harness.submit(new);
    let mut copies = 0;
    let mut steps = 0;
    while harness.step() {
        harness.engine.audit().unwrap();
        copies += harness.landed.block_copies.len();
        steps += 1;
    }
    assert_eq!(copies, 2);
    assert!(steps < 25, "{steps} steps for 30 tokens each");
}

#[test]
fn a_copy_holds_its_source_when_nobody_else_does() {
    let mut harness = Harness::new(Settings {
        max_num_seqs: 2,
        max_num_batched_tokens: 2,
        enable_prefix_caching: false,
        ..settings()
    });
    harness.most_tokens_per_sample = 4;
    // Both answers get more than one token at first, so the budget is for the first of them only.
    let request = (1..100)
        .map(|id| plain(id, 2, 9))
        .find(|new| next_token(&new.prompt, 99, 4) > 0)
        .expect("such a prompt");
    let id = request.id.0;
    harness.submit(NewRequest {
        sampling: SamplingParams {
            n: 2,
            ..request.sampling
        },
        ..request
    });
    harness.step();
    assert!(harness.schedule());
    assert_eq!(harness.plan.num_seqs(), 1);
    let [[source, _]] = harness.plan.block_copies[..] else {
        panic!("one copy: {:?}", harness.plan.block_copies);
    };
    assert!(!harness.plan.block_ids.contains(&source));
    let in_use = harness.engine.metrics().used_blocks;
    harness.abort(id);
    harness.engine.audit().unwrap();
    let in_flight = harness.plan.block_ids.len() as u64;
    assert_eq!(
        harness.engine.metrics().used_blocks,
        in_flight + 1,
        "of {in_use}: the step's own blocks, and the source it copies from"
    );
    harness.commit();
    assert_eq!(harness.engine.metrics().used_blocks, 0);
}

/// Who was to get a copy, and no token, leaves at once when it is aborted, and its name with it.
#[test]
fn a_failed_step_spares_who_has_the_name_of_one_whose_copy_it_was_to_make() {
    let mut harness = Harness::new(Settings {
        max_num_batched_tokens: 8,
        enable_prefix_caching: false,
        policy: two_levels(),
        ..settings()
    });
    harness.most_tokens_per_sample = 4;
    // Both answers get more than one token at first, so their next ones are a chunk, which has to wait.
    let mut siblings = (1..100)
        .map(|id| plain(id, 6, 9))
        .find(|new| next_token(&new.prompt, 99, 4) > 0)
        .expect("such a prompt");
    siblings.sampling.n = 2;
    siblings.stop.ignore_eos = true;
    let id = siblings.id.0;
    harness.submit_for("ann", "low", siblings);
    harness.step();
    harness.submit_for("bob", "high", plain(100, 20, 4));
    assert!(harness.schedule());
    assert_eq!(
        harness.plan.num_seqs(),
        1,
        "the newcomer has all the budget"
    );
    assert_eq!(harness.plan.block_copies.len(), 1);
    harness.abort(id);
    for id in [101, 102] {
        harness.submit_for("ann", "low", plain(id, 6, 4));
    }
    harness.fail_step();
    harness.engine.audit().expect("consistent books");
    let finish = |harness: &Harness, id| harness.client(id).answers[0].finish;
    assert_eq!(finish(&harness, 100), Some(Finish::StepFailed));
    harness.run_to_end();
    for id in [101, 102] {
        assert_eq!(finish(&harness, id), Some(Finish::Length));
    }
}

#[test]
fn a_preempted_sequences_copy_is_withdrawn_and_its_memory_used_at_once() {
    if runs_ahead() {
        return;
    }
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 4,
        max_model_len: 16,
        enable_prefix_caching: false,
        ..settings()
    });
    harness.submit(plain(1, 1, 3));
    let mut new = plain(2, 5, 3);
    new.sampling.n = 3;
    new.stop.ignore_eos = true;
    harness.submit(new);
    harness.step();
    // One block is free. The first answer copies the open block into it; the second needs one too,
    // and only the first has anything to give.
    assert!(harness.schedule());
    harness.engine.audit().unwrap();
    assert_eq!(harness.engine.metrics().preemptions, 1);
    assert_eq!(harness.plan.num_decodes, 3);
    assert_eq!(harness.plan.block_copies.len(), 1);
    harness.commit();
    harness.run_to_end();
}

#[test]
fn results_that_do_not_fit_change_nothing() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 20));
    let mut new = plain(2, 6, 20);
    new.sampling.logprobs = Some(1);
    new.sampling.prompt_logprobs = Some(1);
    harness.submit(new);
    assert!(harness.schedule());
    let good = harness.execute();
    let broken: [fn(&mut StepResults); 12] = [
        |results| results.statuses.truncate(1),
        |results| results.token_offsets.truncate(2),
        |results| results.token_ids.truncate(1),
        |results| results.token_offsets[1] = 0,
        |results| results.token_ids[0] = 1_000,
        |results| results.logprob_offsets = vec![0, 1, 3],
        |results| {
            // Two tokens, three log-probabilities.
            results.token_ids.push(1);
            results.token_offsets[2] += 1;
            results.logprobs.push(results.logprobs[0]);
            results.logprob_offsets[2] += 1;
        },
        |results| results.prompt_logprob_offsets.clear(),
        |results| results.prompt_logprob_offsets.truncate(5),
        |results| results.prompt_logprob_offsets[1] = 3,
        |results| results.prompt_logprobs.truncate(9),
        |results| {
            // One entry too many for the last prompt token.
            let (token, logprob) = (1, -1.0);
            results
                .prompt_logprobs
                .push(TokenLogprob { token, logprob });
            results.prompt_logprob_offsets[5] += 1;
        },
    ];
    for (index, damage) in broken.into_iter().enumerate() {
        let mut results = good.clone();
        damage(&mut results);
        let step = harness.plan.step;
        let error = harness
            .engine
            .commit(harness.now, step, &results)
            .expect_err(&format!("damage {index}"));
        assert_eq!(error.code(), "invalid_step_result");
        harness.engine.audit().unwrap();
    }
    assert!(harness.engine.commit(harness.now, 99, &good).is_err());
    harness.commit();
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().finished, 2);
}
