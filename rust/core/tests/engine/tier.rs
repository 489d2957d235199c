//! Blocks on the host: what is evicted comes back instead of being computed again, where that is sooner.

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Policy, Price, TenantSettings};
use chairlift_core::error::ConfigError;
use chairlift_core::predict::iteration_time::Coefficients;
use chairlift_core::request::NewRequest;

use super::harness::Harness;
use super::plan_checks::num_host_copies;
use super::scenarios::{plain, settings};

/// A pool of 16 blocks of 4 tokens, and as many on the host.
fn tiered() -> Settings {
    Settings {
        num_kv_blocks: 16,
        num_host_kv_blocks: 16,
        ..settings()
    }
}

/// Serves a request alone; what came back from the host for it, in tokens.
fn serve(harness: &mut Harness, request: NewRequest) -> u64 {
    let before = harness.engine.metrics().restored_tokens;
    harness.submit(request);
    harness.run_to_end();
    harness.engine.metrics().restored_tokens - before
}

/// The beginning of request 1's prompt, in a request of another id.
fn again(id: u64, length: u32) -> NewRequest {
    NewRequest {
        prompt: plain(1, length, 1).prompt,
        ..plain(id, 1, 1)
    }
}

/// Serves request 1, of 33 tokens, and another that needs all of the pool.
fn evicted() -> Harness {
    let mut harness = Harness::new(tiered());
    serve(&mut harness, plain(1, 33, 1));
    assert_eq!(serve(&mut harness, plain(2, 63, 1)), 0);
    harness
}

/// A step that takes what a model says, so that the model stays as it is.
fn step_in_time(harness: &mut Harness, costs: &Coefficients) -> bool {
    let scheduled = harness.schedule();
    if scheduled {
        harness.now.0 += costs.time(&harness.plan.shape()) as u64 - 10;
        harness.commit();
    }
    scheduled
}

#[test]
fn a_prefix_that_was_evicted_comes_back() {
    let mut harness = evicted();
    let metrics = harness.engine.metrics();
    assert_eq!(
        (metrics.offloaded_blocks, metrics.host_cached_blocks),
        (8, 8)
    );
    assert_eq!(metrics.host_free_blocks, 8);
    harness.submit(again(3, 33));
    assert!(harness.schedule());
    assert_eq!(
        num_host_copies(&harness.plan),
        (8, 8),
        "what makes room goes first"
    );
    assert_eq!(
        harness.plan.positions,
        [32],
        "its last token alone is computed"
    );
    harness.run_to_end();
    let metrics = harness.engine.metrics();
    assert_eq!(metrics.restored_tokens, 32);
    assert_eq!(metrics.cached_tokens, 32, "it counts as cached");
    assert_eq!(
        harness.client(3).answers[0].tokens,
        harness.client(1).answers[0].tokens
    );
    // It is on the device again, and still on the host.
    harness.submit(again(4, 33));
    assert!(harness.schedule());
    assert_eq!(num_host_copies(&harness.plan), (0, 0));
    harness.run_to_end();
    let offloaded = harness.engine.metrics().offloaded_blocks;
    serve(&mut harness, plain(5, 63, 1));
    let metrics = harness.engine.metrics();
    assert!(
        metrics.offloaded_blocks < offloaded + 16,
        "the prefix is not copied again"
    );
    assert_eq!(serve(&mut harness, again(6, 33)), 32);
}

#[test]
fn a_preempted_sequence_goes_on_where_it_was() {
    let run = |num_host_kv_blocks| {
        let mut harness = Harness::new(Settings {
            num_host_kv_blocks,
            ..tiered()
        });
        for id in 1..=4 {
            harness.submit(plain(id, 12, 40));
        }
        harness.run_to_end();
        harness.engine.metrics()
    };
    let (without, with) = (run(0), run(64));
    assert!(with.preemptions > 3, "{with:?}");
    assert!(with.restored_tokens > 20, "{with:?}");
    let (lost, left) = (without.recomputed_tokens, with.recomputed_tokens);
    assert!(2 * left < lost, "{left} recomputed, {lost} without a host");
}

#[test]
fn what_a_failed_step_was_to_copy_is_not_there() {
    let mut harness = Harness::new(tiered());
    serve(&mut harness, plain(1, 33, 1));
    harness.submit(plain(2, 63, 1));
    assert!(harness.schedule());
    assert_eq!(num_host_copies(&harness.plan).0, 8);
    harness.fail_step();
    let metrics = harness.engine.metrics();
    assert_eq!(
        (metrics.offloaded_blocks, metrics.host_free_blocks),
        (0, 16)
    );
    assert_eq!(serve(&mut harness, again(3, 33)), 0);

    // Nor is what was to come back; the host still has it.
    let mut harness = evicted();
    harness.submit(again(4, 33));
    assert!(harness.schedule());
    harness.fail_step();
    assert_eq!(harness.client(4).ended, 1);
    harness.engine.audit().expect("consistent books");
    assert_eq!(harness.engine.metrics().restored_tokens, 0);
    assert_eq!(serve(&mut harness, again(5, 33)), 32);
}

/// A decode takes 60 us, a block of four tokens 80 us, and a copy of one 30 us.
const COSTS: Coefficients = Coefficients {
    t0_us: 40.0,
    t_seq_us: 0.0,
    t_weights_us: 0.0,
    t_tok_us: 20.0,
    t_ctx_us: 0.0,
    t_pair_us: 0.0,
    t_sample_us: 0.0,
    t_copy_us: 30.0,
    most_tokens: 64.0,
};

/// An engine with a target that leaves a decode time for three copies, or for a few tokens. Request 1, of 33
/// tokens, was served.
fn with_a_target() -> Harness {
    let mut policy = Policy {
        classes: vec![ClassSettings::new("all")],
        price: PRICE,
        ..Policy::default()
    };
    policy.pace.iteration_target_us = Some(151);
    policy.pace.min_prefill_tokens = Some(6);
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 40,
        num_host_kv_blocks: 64,
        max_model_len: 200,
        max_num_batched_tokens: 200,
        cost_model: Some(COSTS),
        policy,
        ..settings()
    });
    serve_in_time(&mut harness, plain(1, 33, 1));
    harness
}

/// Serves a request beside others, in steps that take what [`COSTS`] say: for each step the blocks that were
/// copied from the host, and where the last sequence's tokens ended.
fn serve_in_time(harness: &mut Harness, request: NewRequest) -> Vec<(usize, u32)> {
    let id = request.id.0;
    harness.submit(request);
    let mut steps = Vec::new();
    while harness.client(id).ended == 0 {
        assert!(step_in_time(harness, &COSTS));
        let (offloads, restores) = num_host_copies(&harness.landed);
        assert!(harness.landed.num_seqs() == 1 || offloads + restores <= 3);
        let ends = harness.landed.seq_lens.iter();
        steps.push((restores, ends.copied().max().unwrap_or_default() as u32));
    }
    steps
}

/// Somebody decodes from now on, so the target counts.
fn begin_to_decode(harness: &mut Harness) {
    harness.submit(plain(4, 4, 120));
    while harness.client(4).answers[0].tokens.is_empty() {
        assert!(step_in_time(harness, &COSTS));
    }
}

#[test]
fn a_short_target_cuts_what_comes_back_at_once() {
    let mut harness = with_a_target();
    serve_in_time(&mut harness, plain(2, 159, 1));
    assert_eq!(
        harness.engine.metrics().offloaded_blocks,
        8,
        "nobody was in a hurry"
    );
    begin_to_decode(&mut harness);
    let steps = serve_in_time(&mut harness, again(5, 33));
    let restores: Vec<usize> = steps.iter().map(|&(restores, _)| restores).collect();
    assert!(
        restores.iter().filter(|&&count| count > 1).count() > 1,
        "{steps:?}"
    );
    assert!(restores.iter().sum::<usize>() >= 6, "{steps:?}");
}

/// Beside somebody who decodes, request 1's blocks were evicted: the host has only its tail.
fn without_a_head() -> Harness {
    let mut harness = with_a_target();
    begin_to_decode(&mut harness);
    for id in 2..=3 {
        serve_in_time(&mut harness, plain(id, 80, 1));
    }
    assert_eq!(harness.client(4).ended, 0, "the target still counts");
    harness
}

#[test]
fn what_is_missing_is_computed_and_what_follows_it_comes_back() {
    let mut harness = without_a_head();
    let steps = serve_in_time(&mut harness, again(5, 33));
    let first = steps.iter().position(|&(restores, _)| restores > 0);
    let first = first.expect("the tail comes back");
    assert!(first > 1, "the head is computed: {steps:?}");
    let [before, border] = [first - 2, first - 1].map(|at| steps[at].1);
    assert_eq!(border % 4, 0, "up to the border of a block: {steps:?}");
    assert!(
        border - before < 6,
        "though there was time for more: {steps:?}"
    );
}

#[test]
fn what_costs_more_than_computing_is_computed() {
    // A block of four tokens takes 40 us to compute.
    for (t_copy_us, pays) in [(19.0, true), (21.0, false)] {
        let costs = Coefficients {
            t0_us: 40.0,
            t_tok_us: 10.0,
            t_copy_us,
            most_tokens: 64.0,
            ..Coefficients::default()
        };
        let mut harness = Harness::new(Settings {
            cost_model: Some(costs),
            ..tiered()
        });
        for request in [plain(1, 33, 1), plain(2, 63, 1), again(3, 33)] {
            harness.submit(request);
            while step_in_time(&mut harness, &costs) {}
        }
        let metrics = harness.engine.metrics();
        assert_eq!(metrics.offloaded_blocks > 0, pays, "{t_copy_us}");
        assert_eq!(metrics.restored_tokens > 0, pays, "{t_copy_us}");
    }
}

#[test]
fn salts_and_scored_prompts_do_not_read_it() {
    let mut harness = evicted();
    let mut salted = again(4, 33);
    salted.cache_salt = Some("another".into());
    assert_eq!(serve(&mut harness, salted), 0);
    let mut harness = evicted();
    let mut scored = again(4, 33);
    scored.sampling.prompt_logprobs = Some(1);
    assert_eq!(serve(&mut harness, scored), 0);
    assert_eq!(harness.client(4).scored, 32);
}

#[test]
fn siblings_share_what_came_back() {
    let mut harness = evicted();
    let mut new = again(4, 33);
    new.sampling.n = 3;
    new.stop.max_tokens = Some(6);
    assert_eq!(serve(&mut harness, new), 32);
}

#[test]
fn two_that_come_together_both_get_it() {
    let mut harness = evicted();
    harness.submit(again(4, 20));
    harness.submit(again(5, 24));
    assert!(harness.schedule());
    assert_eq!(num_host_copies(&harness.plan).1, 4 + 5);
    harness.run_to_end();
}

const PRICE: Price = Price::Tokens {
    input: 1.0,
    cached: 0.25,
    output: 2.0,
};

/// What everybody was served, in thousandths.
fn served(harness: &Harness) -> u64 {
    harness.engine.shares().map(|share| share.served).sum()
}

#[test]
fn what_comes_back_is_charged_as_cached() {
    let mut harness = Harness::new(Settings {
        policy: Policy {
            classes: vec![ClassSettings::new("all")],
            tenants: [("ann".to_string(), TenantSettings::default())].into(),
            price: PRICE,
            ..Policy::default()
        },
        ..tiered()
    });
    let mut services = Vec::new();
    for request in [plain(1, 33, 1), plain(2, 63, 1), again(3, 33)] {
        harness.submit_for("ann", "all", request);
        harness.run_to_end();
        services.push(served(&harness));
    }
    assert_eq!(harness.engine.metrics().restored_tokens, 32);
    assert_eq!(services[2] - services[1], 32 * 250 + 1_000 + 2_000);
}

#[test]
fn so_is_what_comes_back_later() {
    let mut harness = without_a_head();
    let (before, output) = (served(&harness), harness.engine.metrics().output_tokens);
    serve_in_time(&mut harness, again(5, 33));
    let output = harness.engine.metrics().output_tokens - output;
    let restored = harness.engine.metrics().restored_tokens;
    assert!(restored > 0);
    let prompt = served(&harness) - before - 2_000 * output;
    assert_eq!(prompt, restored * 250 + (33 - restored) * 1_000);
}

#[test]
fn without_a_prefix_cache_there_is_no_host_tier() {
    let settings = Settings {
        enable_prefix_caching: false,
        ..tiered()
    };
    let error = settings.validate().expect_err("nothing could be found");
    assert!(matches!(&error, ConfigError::Invalid { key, .. } if key == "num_host_kv_blocks"));
}
