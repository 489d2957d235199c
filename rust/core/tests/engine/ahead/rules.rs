//! What holds of a step that is planned before the results of the one before it are known.

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Join, Policy, Sharing, TenantSettings};
use chairlift_core::iteration::plan::{SOURCE_ID, SOURCE_LAST_SAMPLED};
use chairlift_core::request::{Finish, NewRequest};

use super::harness::{Harness, Random, next_token, request, ticket_for};
use super::scenarios::{plain, settings};

/// A request that a stop token ends after `tokens` of its `max_tokens`.
fn stopped(id: u64, length: u32, tokens: usize, max_tokens: u32) -> NewRequest {
    let mut new = plain(id, length, max_tokens);
    let mut history = new.prompt.clone();
    for _ in 0..tokens {
        history.push(next_token(&history, 0, 1_000));
    }
    new.stop.stop_token_ids = vec![history[history.len() - 1]];
    new
}

#[test]
fn the_next_step_takes_what_this_one_samples() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 9));
    assert!(harness.schedule());
    assert!(harness.schedule());
    let plan = &harness.plan;
    assert_eq!((plan.step, plan.num_decodes), (2, 1));
    assert_eq!(plan.token_sources, [SOURCE_LAST_SAMPLED]);
    assert_eq!((plan.token_ids[0], plan.positions[0]), (0, 6));
    assert_eq!(plan.sample_output_indices, [1]);
    assert!(!harness.schedule(), "two are in flight");
    harness.commit();
    harness.submit(plain(2, 5, 9));
    assert!(harness.schedule());
    let sources = &harness.plan.token_sources;
    assert_eq!(
        sources[..],
        [&[SOURCE_LAST_SAMPLED][..], &[SOURCE_ID; 5]].concat()
    );
    harness.run_to_end();
}

#[test]
fn a_prompt_s_chunks_follow_one_another_without_a_wait() {
    let mut harness = Harness::new(Settings {
        long_prefill_token_threshold: Some(4),
        ..settings()
    });
    let mut new = plain(1, 10, 3);
    new.sampling.prompt_logprobs = Some(1);
    harness.submit(new);
    let mut chunks = Vec::new();
    while harness.step() {
        chunks.push((harness.landed.seq_lens[0], harness.landed.num_scores()));
    }
    assert_eq!(chunks, [(4, 4), (8, 4), (10, 1), (11, 0), (12, 0)]);
}

#[test]
fn who_ends_by_length_is_never_planned_beyond_its_end() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 1));
    assert!(harness.schedule());
    assert!(!harness.schedule(), "its only token is on its way");
    harness.commit();
    assert_eq!(harness.client(1).answers[0].finish, Some(Finish::Length));
    assert_eq!(harness.engine.metrics().used_blocks, 0);

    // The end of the context is an end by length, too.
    let mut new = plain(2, 60, 4);
    new.stop.max_tokens = None;
    new.stop.ignore_eos = true;
    harness.submit(new);
    let mut samples = 0;
    while harness.step() {
        samples += harness.landed.num_samples();
    }
    assert_eq!(samples, 4, "and no sample was dropped");
    assert_eq!(harness.client(2).answers[0].finish, Some(Finish::Length));
}

#[test]
fn memory_of_who_has_stopped_is_free_when_its_last_step_has_landed() {
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 4,
        max_model_len: 16,
        enable_prefix_caching: false,
        ..settings()
    });
    harness.submit(stopped(1, 7, 2, 9));
    harness.step();
    assert!(harness.schedule());
    harness.commit();
    assert!(harness.client(1).ended == 1, "its client is told at once");
    assert_eq!(harness.in_flight.len(), 1);
    let metrics = harness.engine.metrics();
    assert_eq!((metrics.live, metrics.used_blocks), (0, 3));
    // Whoever needs that memory waits for it.
    harness.submit(plain(2, 12, 2));
    assert!(!harness.schedule());
    harness.commit();
    assert!(harness.schedule());
    assert_eq!(harness.plan.num_tokens(), 12);
    harness.run_to_end();
}

#[test]
fn an_abort_waits_for_both_its_steps() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 20));
    harness.submit(plain(2, 6, 20));
    harness.step();
    assert!(harness.schedule());
    assert_eq!(harness.in_flight.len(), 2);
    harness.abort(1);
    for used_blocks in [4, 4, 2] {
        harness.engine.audit().expect("consistent books");
        assert_eq!(harness.engine.metrics().used_blocks, used_blocks);
        if !harness.in_flight.is_empty() {
            harness.commit();
        }
    }
    harness.run_to_end();
}

#[test]
fn what_is_sampled_after_a_stop_is_charged_to_nobody() {
    let policy = Policy {
        classes: vec![ClassSettings::new("all")],
        tenants: [("ann".to_string(), TenantSettings::default())].into(),
        sharing: Sharing::Fair,
        ..Policy::default()
    };
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 12,
        enable_prefix_caching: false,
        policy,
        ..settings()
    });
    let mut random = Random(5);
    let (mut samples, mut recomputed) = (0, 0);
    for id in 1..=200 {
        let prompt = random.within(1, 20);
        let tokens = random.within(1, 12);
        let new = stopped(id, prompt, tokens as usize, 30);
        let ticket = ticket_for("ann", "all", &new);
        harness.try_submit(ticket, new).expect("accepted");
        for _ in 0..random.within(0, 6) {
            let preemptions = harness.engine.metrics().preemptions;
            if harness.step() {
                samples += harness.landed.num_samples();
            }
            recomputed += harness.engine.metrics().preemptions - preemptions;
        }
    }
    while harness.step() {
        samples += harness.landed.num_samples();
    }
    let clients = harness.clients.values();
    let received: usize = clients.clone().map(|c| c.answers[0].tokens.len()).sum();
    let prompts: usize = clients.map(|c| c.request.prompt.len()).sum();
    assert!(
        samples > received + 100,
        "{samples} of which {received} came"
    );
    assert!(recomputed > 5, "{recomputed} preemptions");
    let share = harness.engine.shares().find(|share| share.tenant == "ann");
    let served = share.expect("a tenant that is named").served;
    assert_eq!(served, (1_000 * prompts + 2_000 * received) as u64);
    assert_eq!(harness.engine.metrics().output_tokens, received as u64);
}

#[test]
fn answers_that_fork_wait_for_their_first_output() {
    let mut harness = Harness::new(settings());
    let mut new = plain(1, 6, 9);
    new.sampling.n = 3;
    harness.submit(new);
    assert!(harness.schedule());
    assert!(!harness.schedule());
    harness.commit();
    assert!(harness.schedule());
    assert!(harness.schedule(), "but not for their second");
    assert_eq!(harness.plan.token_sources, [SOURCE_LAST_SAMPLED; 3]);
    harness.run_to_end();
}

#[test]
fn who_samples_several_tokens_waits_for_them_from_then_on() {
    let mut harness = Harness::new(settings());
    harness.most_tokens_per_sample = 4;
    let new = (1..100)
        .map(|id| plain(id, 5, 20))
        .find(|new| next_token(&new.prompt, 99, 4) > 0)
        .expect("a prompt with several");
    let id = new.id.0;
    harness.submit(new);
    assert!(harness.schedule());
    assert!(harness.schedule());
    harness.commit();
    let known = harness.client(id).answers[0].tokens.len();
    assert!(known > 1);
    assert!(!harness.schedule(), "what the step behind computes is void");
    harness.commit();
    assert_eq!(harness.client(id).answers[0].tokens.len(), known);
    assert!(harness.schedule());
    assert_eq!(harness.plan.positions[0], 5, "it is computed again");
    assert!(!harness.schedule());
    harness.run_to_end();
}

#[test]
fn a_step_that_fails_takes_along_only_its_own() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 9));
    harness.submit(plain(2, 6, 9));
    assert!(harness.schedule());
    harness.submit(plain(3, 6, 9));
    assert!(harness.schedule());
    assert_eq!(harness.plan.num_seqs(), 3);
    harness.fail_step();
    harness.engine.audit().expect("consistent books");
    for id in [1, 2] {
        let finish = harness.client(id).answers[0].finish;
        assert_eq!(finish, Some(Finish::StepFailed));
    }
    harness.run_to_end();
    assert_eq!(harness.client(3).answers[0].finish, Some(Finish::Length));
    let metrics = harness.engine.metrics();
    assert_eq!(
        (metrics.failed, metrics.finished, metrics.used_blocks),
        (2, 1, 0)
    );
}

#[test]
fn a_failed_row_fails_alone_though_a_step_is_behind_it() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 9));
    harness.submit(plain(2, 6, 9));
    harness.step();
    assert!(harness.schedule());
    harness.failing_rows.push(harness.oldest().rows[0]);
    harness.commit();
    assert_eq!(harness.client(1).answers[0].finish, Some(Finish::RowFailed));
    harness.run_to_end();
    assert_eq!(harness.client(2).answers[0].finish, Some(Finish::Length));
}

#[test]
fn who_lacks_memory_preempts_when_nothing_is_in_flight() {
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 8,
        max_model_len: 32,
        enable_prefix_caching: false,
        ..settings()
    });
    harness.submit(plain(1, 7, 20));
    harness.submit(plain(2, 7, 20));
    harness.submit(plain(3, 7, 20));
    let (mut drained, mut ahead) = (0, 0);
    loop {
        let was_ahead = !harness.in_flight.is_empty();
        let before = harness.engine.metrics().preemptions;
        let scheduled = harness.schedule();
        let preempted = harness.engine.metrics().preemptions > before;
        assert!(!(preempted && was_ahead));
        drained += u32::from(preempted);
        ahead += u32::from(was_ahead && scheduled);
        if scheduled && harness.in_flight.len() < 2 {
            continue;
        }
        if harness.in_flight.is_empty() {
            break;
        }
        harness.commit();
    }
    assert!(drained > 0 && ahead > 20, "{drained} {ahead}");
    assert_eq!(harness.engine.metrics().finished, 3);
}

#[test]
fn batches_that_leave_together_do_not_run_ahead() {
    let policy = Policy {
        join: Join::Static,
        ..Policy::default()
    };
    let mut harness = Harness::new(Settings {
        policy,
        ..settings()
    });
    harness.submit(request(1, vec![5; 6], 9));
    assert!(harness.schedule());
    assert!(!harness.schedule());
    harness.commit();
    harness.run_to_end();
}
