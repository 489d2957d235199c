//! Who is next within a flow, and when newcomers may join.

use std::collections::BTreeMap;

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Join, Order, Policy, TenantSettings};
use chairlift_core::request::{NewRequest, RequestId, Time, WaitReason};

use super::harness::{Harness, exact};
use super::scenarios::settings;

/// One class, one row, which somebody has for a while.
fn occupied(order: Order, ageing: f64) -> Harness {
    let mut harness = Harness::new(Settings {
        max_num_seqs: 1,
        policy: Policy {
            classes: vec![ClassSettings::new("all")],
            order,
            ageing,
            ..Policy::default()
        },
        ..settings()
    });
    harness.submit_for("ann", "all", exact(0, 4, 20, 1_000));
    harness.step();
    harness
}

/// Prompt and most output tokens of requests 1, 2, ...: the order in which they are admitted.
fn order_of(order: Order, requests: &[(u32, u32)]) -> Vec<u64> {
    let mut harness = occupied(order, 0.0);
    for (id, &(prompt, output)) in (1..).zip(requests) {
        harness.submit_for("ann", "all", exact(id, prompt, output, 1_000));
    }
    harness.order_of_admission().split_off(1)
}

#[test]
fn arrival_shortest_and_footprint_each_have_their_own_first() {
    let requests = [(30, 10), (2, 20), (18, 2), (4, 4)];
    assert_eq!(order_of(Order::Arrival, &requests), [1, 2, 3, 4]);
    // 40, 22, 20 and 8 tokens.
    assert_eq!(order_of(Order::Shortest, &requests), [4, 3, 2, 1]);
    // (30 + 5) * 10, (2 + 10) * 20, (18 + 1) * 2 and (4 + 2) * 4 tokens over time.
    assert_eq!(order_of(Order::Footprint, &requests), [4, 3, 2, 1]);
    let crossing = [(2, 20), (30, 2)];
    assert_eq!(order_of(Order::Shortest, &crossing), [1, 2]);
    assert_eq!(order_of(Order::Footprint, &crossing), [2, 1]);
}

#[test]
fn the_predicted_length_is_what_was_seen_of_the_tenant() {
    let tenants = ["terse", "wordy"].map(|name| (name.into(), TenantSettings::default()));
    let mut harness = Harness::new(Settings {
        max_num_seqs: 1,
        policy: Policy {
            classes: vec![ClassSettings::new("all")],
            tenants: BTreeMap::from(tenants),
            order: Order::Shortest,
            ..Policy::default()
        },
        ..settings()
    });
    harness.submit_for("wordy", "all", exact(1, 4, 30, 1_000));
    harness.submit_for("terse", "all", exact(2, 4, 1, 1_000));
    harness.run_to_end();
    harness.clients.clear();
    harness.submit_for("wordy", "all", exact(3, 4, 40, 1_000));
    harness.submit_for("terse", "all", exact(4, 10, 40, 1_000));
    assert_eq!(harness.order_of_admission(), [4, 3]);
}

#[test]
fn ageing_brings_a_long_request_forward_and_without_it_it_starves() {
    for ageing in [1.0, 0.0] {
        let mut harness = occupied(Order::Shortest, ageing);
        harness.submit_for("ann", "all", exact(1, 40, 10, 1_000));
        for id in 2..100 {
            // There is always a short one.
            harness.submit_for("ann", "all", exact(id, 4, 2, 1_000));
            harness.step();
            harness.step();
        }
        let served = (2..100).filter(|&id| harness.client(id).ended == 1);
        assert!(served.count() > 50, "the short ones went on");
        let is_scheduled = harness.client(1).scheduled == 1;
        assert_eq!(is_scheduled, ageing > 0.0, "ageing {ageing}");
    }
}

#[test]
fn the_earliest_deadline_is_first_and_a_target_is_a_deadline() {
    let mut target = ClassSettings::new("target");
    target.ttft_target_us = Some(100_000);
    let mut harness = Harness::new(Settings {
        max_num_seqs: 1,
        policy: Policy {
            classes: vec![ClassSettings::new("all"), target],
            order: Order::Deadline,
            ..Policy::default()
        },
        ..settings()
    });
    let now = harness.now.0;
    let mut submit = |id, class, deadline: Option<u64>| {
        let mut new = exact(id, 4, 2, 1_000);
        new.deadline = deadline.map(|us| Time(now + us));
        harness.submit_for("ann", class, new);
    };
    submit(1, "all", None);
    submit(2, "all", Some(200_000));
    submit(3, "target", None);
    submit(4, "all", Some(50_000));
    submit(5, "all", None);
    assert_eq!(harness.order_of_admission(), [4, 3, 2, 1, 5]);
}

#[test]
fn priority_goes_before_every_order_and_lower_is_sooner() {
    let orders = [
        Order::Arrival,
        Order::Shortest,
        Order::Footprint,
        Order::Deadline,
    ];
    for order in orders {
        let mut harness = occupied(order, 0.01);
        for (id, priority, prompt) in [(1, 0, 4), (2, 1, 4), (3, -2, 40), (4, 0, 4)] {
            let mut new = exact(id, prompt, 5, 1_000);
            new.priority = priority;
            new.deadline = Some(Time(1_000_000 + id));
            harness.submit_for("ann", "all", new);
        }
        assert_eq!(harness.order_of_admission(), [0, 3, 1, 4, 2], "{order:?}");
    }
}

/// A request with the prompt of request 0, which the prefix cache has, and one more token.
fn cached(harness: &Harness, id: u64) -> NewRequest {
    let mut new = exact(id, 9, 1, 1_000);
    let known = &harness.client(0).request.prompt;
    new.prompt[..8].copy_from_slice(&known[..8]);
    new
}

/// As [`occupied`], but whoever has the row leaves its prompt in the prefix cache.
fn occupied_by_a_long_prompt() -> Harness {
    let mut harness = occupied(Order::Prefix, 0.0);
    harness.run_to_end();
    harness.clients.clear();
    harness.submit_for("ann", "all", exact(0, 20, 20, 1_000));
    harness.step();
    harness
}

#[test]
fn the_longest_cached_prefix_is_first_but_only_among_the_oldest() {
    let mut harness = occupied_by_a_long_prompt();
    for id in 1..=3 {
        harness.submit_for("ann", "all", exact(id, 9, 1, 1_000));
    }
    let new = cached(&harness, 4);
    harness.submit_for("ann", "all", new);
    assert_eq!(harness.order_of_admission(), [0, 4, 1, 2, 3]);

    let mut harness = occupied_by_a_long_prompt();
    for id in 1..=16 {
        harness.submit_for("ann", "all", exact(id, 9, 1, 1_000));
    }
    let new = cached(&harness, 17);
    harness.submit_for("ann", "all", new);
    let order = harness.order_of_admission();
    assert_eq!(order[..3], [0, 1, 17], "sixteen are looked at");
}

#[test]
fn a_request_is_passed_over_for_a_cached_prefix_a_bounded_number_of_times() {
    let mut harness = occupied_by_a_long_prompt();
    harness.submit_for("ann", "all", exact(1, 9, 1, 1_000));
    for id in 2..80 {
        let new = cached(&harness, id);
        harness.submit_for("ann", "all", new);
    }
    let order = harness.order_of_admission();
    assert_eq!(order.iter().position(|&id| id == 1), Some(33));
}

#[test]
fn the_prefix_order_keeps_to_what_a_tenant_may_run() {
    let mut policy = Policy {
        classes: vec![ClassSettings::new("all")],
        order: Order::Prefix,
        ..Policy::default()
    };
    policy.default_tenant.max_running = Some(3);
    let mut harness = Harness::new(Settings {
        policy,
        ..settings()
    });
    harness.submit_for("ann", "all", exact(0, 20, 30, 1_000));
    harness.submit_for("ann", "all", exact(1, 9, 30, 1_000));
    harness.step();
    harness.submit_for("ann", "all", exact(2, 9, 9, 1_000));
    let mut two = cached(&harness, 3);
    two.sampling.n = 2;
    harness.submit_for("ann", "all", two);
    harness.step();
    let running = harness.engine.shares().map(|share| share.num_running);
    assert_eq!(running.max(), Some(3), "the two did not go ahead");
    harness.run_to_end();
}

fn joining(join: Join) -> Harness {
    Harness::new(Settings {
        policy: Policy {
            classes: vec![ClassSettings::new("all")],
            join,
            ..Policy::default()
        },
        ..settings()
    })
}

#[test]
fn nobody_joins_a_static_batch_and_nobody_leaves_it_early() {
    let mut harness = joining(Join::Static);
    harness.submit_for("ann", "all", exact(1, 4, 2, 1_000));
    harness.submit_for("ann", "all", exact(2, 4, 9, 1_000));
    harness.step();
    harness.submit_for("ann", "all", exact(3, 4, 2, 1_000));
    while harness.client(2).answers[0].tokens.len() < 9 {
        assert_eq!(harness.client(1).answers[0].finish, None, "it stays");
        assert_eq!(harness.client(3).scheduled, 0, "it waits for the batch");
        assert_eq!(harness.engine.metrics().running_sequences, 2);
        assert!(harness.step());
    }
    assert_eq!(harness.client(1).answers[0].tokens.len(), 2);
    assert_eq!((harness.client(1).ended, harness.client(2).ended), (1, 1));
    harness.step();
    assert_eq!(harness.client(3).scheduled, 1);
    harness.run_to_end();
}

#[test]
fn a_window_ends_when_its_batch_is_full_or_its_delay_is_over() {
    let window = Join::Window {
        size: 3,
        delay_us: 500,
    };
    let mut harness = joining(window);
    harness.submit_for("ann", "all", exact(1, 4, 2, 1_000));
    let end = harness.now.0 + 500;
    harness.pass(100);
    harness.submit_for("ann", "all", exact(2, 4, 2, 1_000));
    assert!(!harness.step());
    assert_eq!(harness.engine.next_wake(), Some(Time(end)));
    harness.now.0 = end - 11;
    assert!(!harness.step(), "a microsecond too early");
    harness.now.0 = end - 10;
    assert!(harness.step(), "the oldest has waited for the delay");
    harness.submit_for("ann", "all", exact(3, 4, 2, 1_000));
    harness.run_to_end();
    for id in 4..=5 {
        harness.submit_for("ann", "all", exact(id, 4, 2, 1_000));
        assert!(!harness.step(), "{id}");
    }
    harness.submit_for("ann", "all", exact(6, 4, 2, 1_000));
    assert!(harness.step(), "three wait");
    assert_eq!(harness.engine.metrics().running_sequences, 3);
    harness.run_to_end();
    let mut three = exact(7, 4, 2, 1_000);
    three.sampling.n = 3;
    harness.submit_for("ann", "all", three);
    assert!(harness.step(), "three answers fill it, too");
}

#[test]
fn nobody_beyond_its_size_joins_the_batch_of_a_window() {
    let window = Join::Window {
        size: 3,
        delay_us: 500,
    };
    let mut harness = joining(window);
    for id in 1..=5 {
        harness.submit_for("ann", "all", exact(id, 4, 2, 1_000));
    }
    let mut four = exact(6, 4, 2, 1_000);
    four.sampling.n = 4;
    harness.submit_for("ann", "all", four);
    let running = |h: &Harness| h.engine.metrics().running_sequences;
    assert!(harness.step());
    assert_eq!(running(&harness), 3);
    let (why, _) = harness
        .engine
        .wait(harness.now, RequestId(4))
        .expect("it waits");
    assert_eq!(why, WaitReason::Window, "rows are free");
    while harness.client(3).ended == 0 {
        assert_eq!(harness.client(4).scheduled, 0, "nobody joins it later");
        assert!(harness.step());
    }
    assert!(harness.step(), "as many answers wait as fill another one");
    assert_eq!(running(&harness), 2, "but four do not fit beside two");
    while harness.client(6).scheduled == 0 {
        assert!(harness.step());
    }
    assert_eq!(
        running(&harness),
        4,
        "what is larger than a batch is one by itself"
    );
    harness.run_to_end();
}
