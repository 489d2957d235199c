//! Who gives memory up when a running sequence needs some.

use chairlift_core::config::Settings;
use chairlift_core::config::policy::Policy;
use chairlift_core::request::NewRequest;

use super::harness::{Harness, exact};
use super::levels::two_levels;
use super::scenarios::settings;

fn engine(num_kv_blocks: u32, policy: Policy) -> Harness {
    Harness::new(Settings {
        num_kv_blocks,
        policy,
        ..settings()
    })
}

fn plain(id: u64, prompt_tokens: u32, output_tokens: u32) -> NewRequest {
    exact(id, prompt_tokens, output_tokens, 1_000)
}

/// Steps until somebody is preempted; who did not get a token in that step.
fn victim(harness: &mut Harness) -> u64 {
    loop {
        let before: Vec<usize> = tokens(harness);
        assert!(harness.step(), "nobody was preempted");
        if harness.engine.metrics().preemptions > 0 {
            assert_eq!(harness.engine.metrics().preemptions, 1, "one is enough");
            let after = tokens(harness);
            let stopped = before.iter().zip(&after).position(|(a, b)| a == b);
            return stopped.expect("somebody stopped") as u64;
        }
    }
}

/// Tokens of requests 0, 1, ...
fn tokens(harness: &Harness) -> Vec<usize> {
    let clients = harness.clients.values();
    clients
        .map(|client| client.answers[0].tokens.len())
        .collect()
}

#[test]
fn who_costs_least_to_compute_again_gives_way_and_the_newest_of_equals() {
    // 4, 1 and 5 blocks, and 2 that are free.
    let mut harness = engine(16, Policy::default());
    harness.submit(plain(0, 16, 30));
    harness.submit(plain(1, 4, 30));
    harness.submit(plain(2, 20, 30));
    assert_eq!(victim(&mut harness), 1, "it has the least context");
    harness.run_to_end();

    let mut harness = engine(16, Policy::default());
    for id in 0..3 {
        harness.submit(plain(id, 12, 30));
    }
    assert_eq!(victim(&mut harness), 2);
    harness.run_to_end();
}

#[test]
fn the_lowest_level_gives_way_first_whatever_it_costs() {
    let mut policy = two_levels();
    policy.preempt_to_admit = false;
    let mut harness = engine(16, policy);
    harness.submit_for("bob", "low", plain(0, 20, 30));
    harness.submit_for("ann", "high", plain(1, 16, 30));
    harness.submit_for("ann", "high", plain(2, 4, 30));
    assert_eq!(victim(&mut harness), 0, "though it is the oldest");
    harness.run_to_end();
}

#[test]
fn the_oldest_of_the_highest_level_stays_though_it_costs_least() {
    let mut harness = engine(16, Policy::default());
    harness.submit(plain(0, 4, 30));
    harness.submit(plain(1, 16, 30));
    harness.submit(plain(2, 20, 30));
    assert_eq!(victim(&mut harness), 1);
    harness.run_to_end();
}

#[test]
fn context_that_others_hold_too_costs_nothing() {
    let mut harness = engine(13, Policy::default());
    harness.submit(plain(0, 20, 30));
    harness.step();
    // Of 19 tokens 16 are the oldest's; the newest has 8 of its own.
    let mut shared = plain(1, 19, 30);
    let known = harness.client(0).request.prompt.clone();
    shared.prompt[..16].copy_from_slice(&known[..16]);
    harness.submit(shared);
    harness.submit(plain(2, 8, 30));
    assert_eq!(victim(&mut harness), 1, "most of it is not lost");
    harness.run_to_end();
}

#[test]
fn who_frees_nothing_now_does_not_give_way_first() {
    // Two answers that share their prompt's blocks, before either has written: neither frees one alone.
    let mut harness = engine(11, Policy::default());
    harness.submit(plain(0, 16, 28));
    harness.submit(plain(1, 15, 20));
    let mut two = plain(2, 8, 20);
    two.sampling.n = 2;
    harness.submit(two);
    harness.step();
    let before = harness.engine.metrics().free_blocks;
    while harness.engine.metrics().preemptions == 0 {
        assert!(harness.step());
    }
    assert!(before <= 2, "it was crowded");
    harness.run_to_end();
}

#[test]
fn what_a_victim_had_computed_is_reused_until_it_is_evicted() {
    for enable_prefix_caching in [true, false] {
        let mut harness = Harness::new(Settings {
            num_kv_blocks: 16,
            enable_prefix_caching,
            ..settings()
        });
        harness.submit(plain(0, 20, 9));
        harness.submit(plain(1, 32, 8));
        while harness.engine.metrics().preemptions == 0 {
            assert!(harness.step());
        }
        let lost = harness.client(1).answers[0].tokens.len() as u64 + 31;
        harness.run_to_end();
        let recomputed = harness.engine.metrics().recomputed_tokens;
        assert_eq!(harness.engine.metrics().preemptions, 1);
        if enable_prefix_caching {
            assert!(recomputed < lost / 2, "{recomputed} of {lost}");
        } else {
            assert_eq!(recomputed, lost);
        }
    }
}
