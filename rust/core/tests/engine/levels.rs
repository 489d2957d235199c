//! Levels: strict, with preemption to be admitted, its threshold, and ageing.

use chairlift_core::config::Settings;
use chairlift_core::config::memory::Backfill;
use chairlift_core::config::policy::{ClassSettings, Policy, Sharing};

use super::harness::{Harness, exact, runs_ahead};
use super::scenarios::settings;

/// Classes `low` and `high`, the second of a strictly higher level.
pub fn two_levels() -> Policy {
    let mut high = ClassSettings::new("high");
    high.level = 1;
    Policy {
        classes: vec![ClassSettings::new("low"), high],
        ..Policy::default()
    }
}

fn engine(max_num_seqs: u32, num_kv_blocks: u32, policy: Policy) -> Harness {
    Harness::new(Settings {
        max_num_seqs,
        num_kv_blocks,
        enable_prefix_caching: false,
        policy,
        ..settings()
    })
}

fn num_tokens(harness: &Harness, id: u64) -> usize {
    harness.client(id).answers[0].tokens.len()
}

#[test]
fn a_higher_level_goes_first_however_many_wait_below() {
    let mut policy = two_levels();
    policy.preempt_to_admit = false;
    let mut harness = engine(1, 64, policy);
    for id in 0..5 {
        harness.submit_for("ann", "low", exact(id, 4, 3, 1_000));
    }
    harness.step();
    for id in 5..8 {
        harness.submit_for("bob", "high", exact(id, 4, 3, 1_000));
    }
    let mut order = Vec::new();
    while harness.step() {
        let ended = harness.clients.values().filter(|client| client.ended == 1);
        for id in ended.map(|client| client.request.id.0) {
            if !order.contains(&id) {
                order.push(id);
            }
        }
    }
    assert_eq!(order, [0, 5, 6, 7, 1, 2, 3, 4]);
}

#[test]
fn chunks_of_a_higher_level_go_first_though_they_came_later() {
    if runs_ahead() {
        return;
    }
    let mut harness = Harness::new(Settings {
        max_num_batched_tokens: 10,
        long_prefill_token_threshold: Some(8),
        policy: two_levels(),
        ..settings()
    });
    harness.submit_for("ann", "low", exact(1, 60, 1, 1_000));
    harness.step();
    harness.submit_for("bob", "high", exact(2, 20, 1, 1_000));
    // Eight tokens go to the higher level, two are left for the lower one.
    for _ in 0..2 {
        assert!(harness.schedule());
        assert_eq!(harness.plan.query_start_loc, [0, 8, 10]);
        harness.commit();
    }
    harness.step();
    assert_eq!(num_tokens(&harness, 2), 1, "20 tokens in three iterations");
    harness.run_to_end();
}

/// Case C32.
#[test]
fn a_higher_level_gets_in_within_one_iteration_when_rows_are_full() {
    if runs_ahead() {
        return;
    }
    for allowed in [true, false] {
        let mut policy = two_levels();
        policy.preempt_to_admit = allowed;
        let mut harness = engine(2, 64, policy);
        for id in [1, 2] {
            harness.submit_for("ann", "low", exact(id, 6, 20, 1_000));
        }
        harness.step();
        harness.step();
        harness.submit_for("bob", "high", exact(3, 6, 2, 1_000));
        harness.step();
        assert_eq!(harness.client(3).scheduled, u32::from(allowed));
        let preemptions = harness.engine.metrics().preemptions;
        assert_eq!(preemptions, u64::from(allowed));
        assert_eq!(num_tokens(&harness, 1), 3, "the older one was spared");
        harness.run_to_end();
    }
}

#[test]
fn a_higher_level_gets_in_within_one_iteration_when_memory_is_full() {
    if runs_ahead() {
        return;
    }
    let mut harness = engine(4, 16, two_levels());
    for id in [1, 2] {
        harness.submit_for("ann", "low", exact(id, 28, 4, 1_000));
    }
    harness.step();
    assert_eq!(harness.engine.metrics().free_blocks, 2);
    harness.submit_for("bob", "high", exact(3, 28, 2, 1_000));
    harness.step();
    assert_eq!(harness.client(3).scheduled, 1);
    assert_eq!(harness.engine.metrics().preemptions, 1, "one is enough");
    harness.run_to_end();
}

#[test]
fn nobody_is_preempted_where_it_would_not_be_enough() {
    // Rows: one of each level runs, two are needed.
    let mut harness = engine(2, 64, two_levels());
    harness.submit_for("ann", "low", exact(1, 6, 9, 1_000));
    harness.submit_for("bob", "high", exact(2, 6, 9, 1_000));
    harness.step();
    let mut two = exact(3, 6, 2, 1_000);
    two.sampling.n = 2;
    harness.submit_for("bob", "high", two);
    harness.step();
    assert_eq!(harness.client(3).scheduled, 0);
    assert_eq!(harness.engine.metrics().preemptions, 0);
    assert_eq!((num_tokens(&harness, 1), num_tokens(&harness, 2)), (2, 2));
    harness.run_to_end();
}

#[test]
fn memory_that_a_victim_shares_with_the_newcomer_is_no_gain() {
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 10,
        policy: two_levels(),
        ..settings()
    });
    // Four blocks of the higher level, soon five of the lower one, and one that is free.
    harness.submit_for("bob", "high", exact(1, 13, 9, 1_000));
    harness.submit_for("ann", "low", exact(2, 16, 9, 1_000));
    harness.step();
    // Seven blocks, four of them the victim's: with it gone, six would be there.
    let mut same = exact(4, 24, 1, 1_000);
    let start = harness.client(2).request.prompt.clone();
    same.prompt[..16].copy_from_slice(&start);
    harness.submit_for("bob", "high", same);
    assert!(harness.schedule());
    assert_eq!(harness.engine.metrics().preemptions, 0);
    assert_eq!(harness.client(4).scheduled, 0);
    harness.commit();
    harness.run_to_end();
}

/// Case C32.
#[test]
fn who_was_just_preempted_is_spared_if_another_victim_is_there() {
    if runs_ahead() {
        return;
    }
    let mut harness = engine(2, 64, two_levels());
    for id in [0, 1] {
        harness.submit_for("ann", "low", exact(id, 4, 30, 1_000));
    }
    harness.step();
    let mut victims = Vec::new();
    for id in 2..5 {
        harness.submit_for("bob", "high", exact(id, 4, 1, 1_000));
        let told = [0, 1].map(|id| num_tokens(&harness, id));
        harness.step();
        assert_eq!(harness.client(id).ended, 1, "it was let in at once");
        victims.extend((0..2).filter(|&id| num_tokens(&harness, id) == told[id as usize]));
        // The victim returns, and both get a token.
        harness.step();
    }
    // First the newest, then the other, then there is nobody else.
    assert_eq!(victims, [1, 0, 1]);
    harness.run_to_end();
}

/// Case C32.
#[test]
fn nobody_is_preempted_for_ever() {
    let mut harness = engine(1, 64, two_levels());
    harness.submit_for("ann", "low", exact(0, 4, 59, 1_000));
    let mut id = 0;
    while harness.client(0).ended == 0 {
        let told = num_tokens(&harness, 0);
        assert!(harness.step());
        let waits = id > 0 && harness.client(id).scheduled == 0;
        if num_tokens(&harness, 0) > told && !waits {
            id += 1;
            harness.submit_for("bob", "high", exact(id, 4, 1, 1_000));
        }
    }
    let preemptions = harness.engine.metrics().preemptions;
    assert_eq!((preemptions, id), (8, 9), "the ninth waited for its end");
}

/// Case C32.
#[test]
fn ageing_bounds_the_wait_behind_higher_levels() {
    for bound in [Some(1_000), None] {
        let mut policy = two_levels();
        policy.max_level_wait_us = bound;
        let mut harness = engine(2, 64, policy);
        let mut next = 1;
        for step in 0..150 {
            if step == 9 {
                harness.submit_for("ann", "low", exact(0, 4, 2, 1_000));
            }
            // Two more than can run are always there.
            while harness.engine.metrics().live < 5 {
                harness.submit_for("bob", "high", exact(next, 4, 3, 1_000));
                next += 1;
            }
            harness.step();
        }
        assert_eq!(harness.client(0).scheduled, u32::from(bound.is_some()));
        assert!(next > 50, "the higher level never stopped");
    }
}

#[test]
fn who_was_promoted_is_not_preempted_by_those_it_went_ahead_of() {
    let mut policy = two_levels();
    policy.max_level_wait_us = Some(200);
    let mut harness = engine(1, 64, policy);
    harness.submit_for("ann", "low", exact(0, 4, 30, 1_000));
    for id in 1..100 {
        harness.submit_for("bob", "high", exact(id, 4, 2, 1_000));
    }
    while harness.client(0).ended == 0 {
        assert!(harness.step());
    }
    assert_eq!(harness.engine.metrics().preemptions, 0);
    assert!(harness.client(99).scheduled == 0, "they never stopped");
}

#[test]
fn an_aged_request_is_promoted_at_the_bound_and_takes_the_next_row() {
    let mut policy = two_levels();
    policy.max_level_wait_us = Some(200);
    let mut harness = engine(1, 64, policy);
    harness.submit_for("bob", "high", exact(1, 4, 15, 1_000));
    harness.step();
    harness.submit_for("ann", "low", exact(2, 4, 2, 1_000));
    for id in 3..9 {
        harness.submit_for("bob", "high", exact(id, 4, 2, 1_000));
    }
    while harness.client(1).ended == 0 {
        harness.step();
    }
    harness.step();
    assert_eq!(harness.client(2).scheduled, 1, "it went first of all");
    assert_eq!(harness.engine.metrics().preemptions, 0);
}

#[test]
fn ageing_does_not_turn_the_highest_level_into_a_queue() {
    let mut policy = two_levels();
    policy.sharing = Sharing::Fair;
    policy.max_level_wait_us = Some(100);
    let mut harness = engine(1, 64, policy);
    for id in 0..20 {
        harness.submit_for("ann", "high", exact(id, 4, 2, 1_000));
    }
    harness.step();
    harness.pass(500);
    harness.submit_for("bob", "high", exact(20, 4, 2, 1_000));
    while harness.client(20).scheduled == 0 {
        assert!(harness.step());
    }
    let ann = (0..20).filter(|&id| harness.client(id).scheduled == 1);
    assert_eq!(ann.count(), 1, "its turn was next");
}

#[test]
fn who_was_preempted_returns_ahead_of_its_level_and_not_of_a_higher_one() {
    let mut policy = two_levels();
    policy.memory.backfill = Backfill::Off; // this is about the queue's own order
    policy.preempt_to_admit = false;
    let mut harness = engine(4, 16, policy);
    harness.submit_for("ann", "low", exact(1, 20, 30, 1_000));
    harness.submit_for("ann", "low", exact(2, 20, 20, 1_000));
    while harness.engine.metrics().preemptions == 0 {
        assert!(harness.step());
    }
    let told = num_tokens(&harness, 2);
    harness.submit_for("ann", "low", exact(3, 4, 1, 1_000));
    harness.submit_for("bob", "high", exact(4, 4, 1, 1_000));
    harness.step();
    assert_eq!(harness.client(4).scheduled, 1, "the higher level is first");
    assert_eq!(num_tokens(&harness, 2), told, "it still waits");
    while num_tokens(&harness, 2) == told {
        assert_eq!(harness.client(3).scheduled, 0, "a fresh one went first");
        assert!(harness.step());
    }
    harness.run_to_end();
}
