//! The governor: iterations keep their target, by what is added to the decodes.

use std::ops::ControlFlow;

use chairlift_core::config::Settings;
use chairlift_core::config::pace::Pace;
use chairlift_core::config::policy::{ClassSettings, Policy};
use chairlift_core::predict::iteration_time::Coefficients;
use chairlift_core::request::{RequestId, WaitReason};
use chairlift_core::sim::{CostProfile, SimConfig, SimOutcome, SimRequest, Workload, simulate};

use super::harness::{Harness, exact, ticket_for};

/// A prior that is wrong about everything: an iteration of [`CostProfile::GPU_8B`] takes twice as long.
const WRONG: Coefficients = Coefficients {
    t0_us: 300.0,
    t_seq_us: 2.0,
    t_weights_us: 2_700.0,
    t_tok_us: 16.0,
    t_ctx_us: 0.022,
    t_pair_us: 0.000_65,
    t_sample_us: 0.0,
    t_copy_us: 0.0,
    most_tokens: 8_192.0,
};

/// 32 decodes, each 2,000 tokens long, and after two seconds a prompt of `long` tokens.
fn long_prompt_joins(pace: Pace, budget: u32, long: u32) -> SimOutcome {
    let request = |arrival_us, input_tokens, output_tokens| SimRequest {
        arrival_us,
        input_tokens,
        output_tokens,
        tenant: 0,
        class: 0,
        priority: 0,
        deadline_us: None,
        abort_us: None,
        prefix: 0..0,
    };
    let decodes = (0..32).map(|at| request(at * 20_000, 500, 2_000));
    let workload = Workload {
        requests: decodes.chain([request(2_000_000, long, 8)]).collect(),
        tenants: vec!["a".into()],
        ..Workload::default()
    };
    let settings = Settings {
        max_num_batched_tokens: budget,
        max_model_len: long + 2_000,
        num_kv_blocks: CostProfile::GPU_8B_BLOCKS,
        enable_prefix_caching: false,
        policy: Policy {
            pace,
            ..Policy::default()
        },
        cost_model: Some(WRONG),
        ..Settings::default()
    };
    let config = SimConfig {
        keep_gaps: true,
        max_tokens: 2_000,
        ..SimConfig::new(settings, CostProfile::GPU_8B)
    };
    simulate(&config, &workload, |_, _| ControlFlow::Continue(())).expect("it can be")
}

/// 99th percentile of the decodes' gaps while the long prompt, the last request, is computed.
fn p99_gap_us(outcome: &SimOutcome) -> u32 {
    let long = outcome.records.last().expect("a record");
    let (begin, end) = (long.arrival_us, long.first_token_us.expect("it was served"));
    let during = outcome.iterations.iter().filter(|iteration| {
        iteration.start_us >= begin && iteration.start_us + iteration.duration_us <= end
    });
    let mut gaps: Vec<u32> = during
        .map(|iteration| iteration.duration_us as u32)
        .collect();
    assert!(gaps.len() > 3, "{} iterations", gaps.len());
    gaps.sort_unstable();
    gaps[(gaps.len() - 1) * 99 / 100]
}

#[test]
fn decodes_keep_the_target_while_a_long_prompt_joins_though_the_prior_is_wrong() {
    let target = Pace {
        iteration_target_us: Some(25_000),
        ..Pace::default()
    };
    let governed = long_prompt_joins(target, 8_192, 32_768);
    let p99 = p99_gap_us(&governed);
    assert!(p99 < 1_300 * 25, "{p99}");
    let fixed = long_prompt_joins(Pace::default(), 8_192, 32_768);
    assert!(
        p99_gap_us(&fixed) > 250_000,
        "a budget of tokens does not see it coming"
    );
    // What the target leaves is used: the prompt takes about as long as its work does.
    let ttft = |outcome: &SimOutcome| {
        let long = outcome.records.last().expect("a record");
        long.first_token_us.expect("it was served") - long.arrival_us
    };
    assert!(
        ttft(&governed) < 2 * ttft(&fixed),
        "{} {}",
        ttft(&governed),
        ttft(&fixed)
    );
    // Switched off, the target is only a number.
    let off = Pace {
        governor: false,
        ..target
    };
    assert_eq!(long_prompt_joins(off, 8_192, 32_768), fixed);
}

/// One microsecond a decode, one a token: what iterations cost where nothing else does.
const SIMPLE: Coefficients = Coefficients {
    t0_us: 0.0,
    t_seq_us: 1.0,
    t_weights_us: 0.0,
    t_tok_us: 1.0,
    t_ctx_us: 0.0,
    t_pair_us: 0.0,
    t_sample_us: 0.0,
    t_copy_us: 0.0,
    most_tokens: 1_000.0,
};

/// A class with a target per output token, and one below without.
fn settings(tpot_target_us: u64) -> Settings {
    let mut policy = Policy::default();
    policy.classes[0].tpot_target_us = Some(tpot_target_us);
    policy.classes[0].level = 1;
    policy.classes.push(ClassSettings::new("batch"));
    Settings {
        max_num_seqs: 16,
        max_num_batched_tokens: 256,
        max_model_len: 512,
        num_kv_blocks: 512,
        block_size: 4,
        vocab_size: 50,
        policy,
        cost_model: Some(SIMPLE),
        ..Settings::default()
    }
}

fn submit(harness: &mut Harness, class: &str, id: u64, prompt: u32, output: u32) {
    let new = exact(id, prompt, output, 50);
    harness
        .try_submit(ticket_for("somebody", class, &new), new)
        .expect("accepted");
}

/// A step that takes what the model says, so that the model stays as it is; its number of decodes and
/// of other tokens.
fn step(harness: &mut Harness) -> (usize, usize) {
    if !harness.schedule() {
        return (0, 0);
    }
    let (decodes, tokens) = (harness.plan.num_decodes, harness.plan.num_tokens());
    harness.now.0 = harness.now.0 + (harness.plan.num_seqs() + tokens) as u64 - 10;
    harness.commit();
    (decodes, tokens - decodes)
}

#[test]
fn a_newcomer_waits_while_it_would_slow_the_decodes_below_their_promise() {
    // At 2 us for a decode, ten fit into 21 us.
    let mut harness = Harness::new(settings(21));
    for id in 0..14 {
        submit(&mut harness, "default", id, 4, 40);
    }
    let mut most = 0;
    let mut held = 0;
    while harness.engine.metrics().live > 0 {
        step(&mut harness);
        most = most.max(harness.engine.metrics().running_sequences);
        let waits = (0..14).filter_map(|id| harness.engine.wait(harness.now, RequestId(id)));
        held += waits
            .filter(|(reason, _)| *reason == WaitReason::Sla)
            .count();
    }
    assert_eq!(most, 10, "as many as the promise allows");
    assert!(held > 50, "the others waited for that, and said so: {held}");
    assert_eq!(harness.engine.metrics().finished, 14);
}

#[test]
fn who_comes_to_an_idle_engine_is_let_in_whatever_it_costs() {
    let mut harness = Harness::new(settings(1));
    submit(&mut harness, "default", 1, 4, 3);
    submit(&mut harness, "default", 2, 4, 3);
    let mut running = Vec::new();
    while harness.engine.metrics().live > 0 {
        step(&mut harness);
        running.push(harness.engine.metrics().running_sequences);
    }
    assert!(running.iter().all(|&running| running <= 1), "{running:?}");
    assert_eq!(harness.engine.metrics().finished, 2);
}

#[test]
fn lower_levels_do_not_hold_up_higher_ones() {
    let mut harness = Harness::new(settings(9));
    for id in 0..12 {
        submit(&mut harness, "batch", id, 4, 60);
    }
    for _ in 0..3 {
        step(&mut harness);
    }
    assert_eq!(
        harness.engine.metrics().running_sequences,
        12,
        "no promise, no bound"
    );
    submit(&mut harness, "default", 100, 4, 10);
    step(&mut harness);
    assert!(
        harness.engine.wait(harness.now, RequestId(100)).is_none(),
        "12 decodes of a lower level take longer than its target, but it goes before them"
    );
    // Now that somebody has a promise, nobody of the lower level joins.
    submit(&mut harness, "batch", 101, 4, 10);
    step(&mut harness);
    let (reason, _) = harness
        .engine
        .wait(harness.now, RequestId(101))
        .expect("it waits");
    assert_eq!(reason, WaitReason::Sla);
}

#[test]
fn prefill_goes_on_though_decodes_alone_exceed_the_target_which_a_reload_may_change() {
    for (least, expected) in [(None, 4), (Some(7), 7)] {
        let mut settings = settings(1_000);
        settings.policy.pace.min_prefill_tokens = least;
        let mut policy = settings.policy.clone();
        let mut harness = Harness::new(settings);
        submit(&mut harness, "default", 1, 4, 200);
        submit(&mut harness, "default", 2, 4, 200);
        step(&mut harness);
        submit(&mut harness, "batch", 3, 500, 5);
        assert_eq!(
            step(&mut harness),
            (2, 254),
            "a target of 1 ms allows all of the budget"
        );
        policy.classes[0].tpot_target_us = Some(3);
        harness
            .engine
            .reload(harness.now, &policy)
            .expect("only numbers");
        for _ in 0..10 {
            assert_eq!(step(&mut harness), (2, expected), "two decodes take 4 us");
        }
        policy.pace.iteration_target_us = Some(36);
        harness
            .engine
            .reload(harness.now, &policy)
            .expect("only numbers");
        // 2 * 2 for the decodes, 1 for the sequence: 31 are left, or a little less by what was learned.
        let (_, prefill) = step(&mut harness);
        assert!(
            (30..=31).contains(&prefill),
            "it overrides the classes': {prefill}"
        );
    }
}

#[test]
fn a_sequence_that_lags_behind_shortens_iterations_but_not_below_half() {
    let mut harness = Harness::new(settings(60));
    submit(&mut harness, "default", 1, 4, 200);
    step(&mut harness);
    submit(&mut harness, "batch", 2, 500, 5);
    // Of 60 us 10 have passed already. 2 for the decode, 1 for the sequence: 47 tokens fit.
    assert_eq!(step(&mut harness), (1, 47));
    harness.now.0 += 5;
    let (_, prefill) = step(&mut harness);
    assert!(
        (40..=42).contains(&prefill),
        "5 us more are missing: {prefill}"
    );
    harness.now.0 += 10_000;
    assert_eq!(step(&mut harness), (1, 27), "hopelessly late");
}
