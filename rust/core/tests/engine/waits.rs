//! Why a request waits, for how long it waited for what, and what a reload changes of it.

use std::collections::BTreeMap;

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{
    ClassSettings, Join, OnTimeout, Policy, Sharing, TenantSettings,
};
use chairlift_core::request::{Finish, RequestId, Time};
use chairlift_core::request::{WaitReason, WaitTimes};

use super::harness::{Harness, exact, runs_ahead, ticket_for};
use super::scenarios::settings;

fn policy() -> Policy {
    Policy {
        classes: vec![ClassSettings::new("all")],
        ..Policy::default()
    }
}

fn engine(policy: Policy) -> Harness {
    Harness::new(Settings {
        max_num_seqs: 2,
        max_num_batched_tokens: 20,
        num_kv_blocks: 16,
        enable_prefix_caching: false,
        policy,
        ..settings()
    })
}

fn wait(harness: &Harness, id: u64) -> (WaitReason, WaitTimes) {
    let wait = harness.engine.wait(harness.now, RequestId(id));
    wait.expect("it waits")
}

#[test]
fn a_full_engine_says_whether_rows_memory_or_budget_lack() {
    if runs_ahead() {
        return;
    }
    let none = WaitTimes::default();
    for (running, waiting, reason) in [
        (&[4, 4][..], 4, WaitReason::Slots),
        (&[40], 40, WaitReason::Memory),
        (&[40], 4, WaitReason::Budget),
    ] {
        let mut harness = engine(policy());
        for (id, &prompt) in running.iter().enumerate() {
            harness.submit_for("ann", "all", exact(id as u64, prompt, 9, 1_000));
        }
        // A long prompt takes the budget of two iterations, and then memory is what counts.
        let steps = if reason == WaitReason::Memory { 3 } else { 1 };
        for _ in 0..steps {
            harness.step();
        }
        harness.submit_for("bob", "all", exact(9, waiting, 2, 1_000));
        assert_eq!(wait(&harness, 9).1, none, "it has just come");
        assert!(harness.schedule());
        harness.now.0 += 70;
        let (why, times) = wait(&harness, 9);
        assert_eq!(why, reason);
        // 10 us until the next decision found out why, and 70 since.
        let expected = match reason {
            WaitReason::Slots => WaitTimes {
                slots_us: 70,
                budget_us: 10,
                ..none
            },
            WaitReason::Memory => WaitTimes {
                memory_us: 70,
                budget_us: 10,
                ..none
            },
            _ => WaitTimes {
                budget_us: 80,
                ..none
            },
        };
        assert_eq!(times, expected, "{reason:?}");
        harness.commit();
        harness.run_to_end();
    }
}

#[test]
fn a_window_and_those_that_went_ahead_are_reasons() {
    let mut windowed = policy();
    windowed.join = Join::Window {
        size: 9,
        delay_us: 500,
    };
    let mut harness = engine(windowed);
    harness.submit_for("ann", "all", exact(1, 4, 2, 1_000));
    assert!(!harness.step());
    harness.now.0 += 100;
    let (reason, times) = wait(&harness, 1);
    assert_eq!((reason, times.window_us), (WaitReason::Window, 100));
    harness.run_to_end();

    let mut fair = policy();
    fair.sharing = Sharing::Fair;
    let mut harness = engine(fair);
    for id in 0..6 {
        harness.submit_for("ann", "all", exact(id, 4, 9, 1_000));
    }
    harness.step();
    harness.submit_for("bob", "all", exact(9, 4, 9, 1_000));
    while harness.client(9).scheduled == 0 {
        assert_eq!(wait(&harness, 5).0, WaitReason::Slots);
        harness.step();
    }
    harness.now.0 += 40;
    let (reason, times) = wait(&harness, 5);
    assert_eq!(reason, WaitReason::Fairness);
    assert!(times.fairness_us >= 40 && times.slots_us > 0, "{times:?}");
    harness.run_to_end();
}

#[test]
fn the_times_of_a_held_tenant_are_its_rate_s() {
    let mut limited = policy();
    let ann = TenantSettings {
        tokens_per_second: Some(1_000),
        burst_tokens: Some(1),
        ..TenantSettings::default()
    };
    limited.tenants = BTreeMap::from([("ann".into(), ann)]);
    let mut harness = engine(limited);
    harness.submit_for("ann", "all", exact(1, 4, 2, 1_000));
    while harness.step() {}
    harness.submit_for("ann", "all", exact(2, 4, 2, 1_000));
    assert!(!harness.step());
    harness.now.0 += 1_000;
    let (reason, times) = wait(&harness, 2);
    assert_eq!((reason, times.rate_us), (WaitReason::Rate, 1_000));
    // The harness compares the sum of the parts with the whole when a request ends.
    harness.run_to_end();
}

#[test]
fn a_reload_changes_bounds_and_quotas_of_those_that_wait() {
    let mut rules = policy();
    rules.classes[0].max_queue_time_us = Some(100_000);
    rules.default_tenant.max_running = Some(1);
    let mut harness = engine(rules.clone());
    for id in 1..=3 {
        harness.submit_for("ann", "all", exact(id, 4, 20, 1_000));
    }
    harness.step();
    assert_eq!(wait(&harness, 2).0, WaitReason::Rate);
    rules.default_tenant.max_running = None;
    harness.engine.reload(harness.now, &rules).expect("allowed");
    harness.step();
    assert_eq!(harness.client(2).scheduled, 1, "it may run at once");
    harness.pass(500);
    // The new bound is over already for what waits, and says nothing to what runs.
    rules.classes[0].max_queue_time_us = Some(400);
    rules.classes[0].max_queued_requests = Some(1);
    harness.engine.reload(harness.now, &rules).expect("allowed");
    harness.pass(0);
    let finish = harness.client(3).answers[0].finish;
    assert_eq!(finish, Some(Finish::QueueTimeout));
    harness.submit_for("ann", "all", exact(4, 4, 2, 1_000));
    let bound = Time(harness.now.0 + 400);
    assert_eq!(harness.engine.next_wake(), Some(bound));
    let new = exact(5, 4, 2, 1_000);
    let full = harness.try_submit(ticket_for("ann", "all", &new), new);
    assert_eq!(full.unwrap_err().code(), "class_full");
    rules.classes[0].max_queue_time_us = Some(800);
    rules.classes[0].on_timeout = OnTimeout::Promote;
    harness.engine.reload(harness.now, &rules).expect("allowed");
    harness.pass(400);
    assert_eq!(harness.client(4).ended, 0, "it may wait longer now");
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().finished, 3);
}

#[test]
fn a_tenant_is_let_go_when_the_request_it_was_too_busy_for_is_gone() {
    let mut rules = policy();
    rules.default_tenant.max_running = Some(2);
    let mut harness = engine(rules);
    harness.submit_for("ann", "all", exact(1, 4, 20, 1_000));
    harness.step();
    let mut two = exact(2, 4, 20, 1_000);
    two.sampling.n = 2;
    harness.submit_for("ann", "all", two);
    harness.submit_for("ann", "all", exact(3, 4, 20, 1_000));
    harness.step();
    assert_eq!(
        wait(&harness, 3).0,
        WaitReason::Rate,
        "the first is too much"
    );
    harness.abort(2);
    harness.step();
    assert_eq!(harness.client(3).scheduled, 1);
    harness.run_to_end();
}

#[test]
fn a_reload_forgets_tenants_that_are_named_no_more() {
    let mut rules = policy();
    rules.tenants = BTreeMap::from([("ann".into(), TenantSettings::default())]);
    let mut harness = engine(rules);
    harness.submit_for("ann", "all", exact(1, 4, 2, 1_000));
    harness.run_to_end();
    assert_eq!(harness.engine.shares().count(), 1, "named, so remembered");
    harness
        .engine
        .reload(harness.now, &policy())
        .expect("legal");
    assert_eq!(harness.engine.shares().count(), 0);
}

#[test]
fn a_reload_without_the_quota_lets_its_tenant_go() {
    let mut rules = policy();
    rules.default_tenant.tokens_per_second = Some(1);
    rules.default_tenant.burst_tokens = Some(1);
    let mut harness = engine(rules.clone());
    harness.submit_for("ann", "all", exact(1, 4, 2, 1_000));
    while harness.step() {}
    harness.submit_for("ann", "all", exact(2, 4, 2, 1_000));
    assert!(!harness.step());
    assert!(harness.engine.next_wake() > Some(Time(1_000_000)));
    rules.default_tenant = TenantSettings::default();
    harness.engine.reload(harness.now, &rules).expect("allowed");
    assert_eq!(harness.engine.next_wake(), None);
    assert!(harness.step());
    harness.run_to_end();
}

/// A key, and how its value is broken.
type Damage = (&'static str, fn(&mut Policy));

#[test]
fn a_reload_that_is_refused_changes_nothing() {
    let mut rules = policy();
    rules.classes[0].max_queue_time_us = Some(1_000);
    rules.classes[0].max_queued_requests = Some(3);
    let mut harness = engine(rules.clone());
    for id in 1..=4 {
        harness.submit_for("ann", "all", exact(id, 4, 20, 1_000));
        harness.step();
    }
    let wakes = harness.engine.next_wake();
    let metrics = harness.engine.metrics();
    let damages: [Damage; 4] = [
        ("classes", |p| p.classes.push(ClassSettings::new("more"))),
        ("sharing", |p| p.sharing = Sharing::Fair),
        ("classes.all.weight", |p| p.classes[0].weight = 0.0),
        ("tenants.ann.default_class", |p| {
            let lost = TenantSettings {
                default_class: Some("lost".into()),
                ..TenantSettings::default()
            };
            p.tenants.insert("ann".into(), lost);
        }),
    ];
    for (key, damage) in damages {
        let mut broken = rules.clone();
        // These would be allowed.
        broken.classes[0].max_queue_time_us = Some(1);
        broken.classes[0].max_queued_requests = Some(2);
        damage(&mut broken);
        let error = harness.engine.reload(harness.now, &broken).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
        harness.pass(0);
        assert_eq!(harness.engine.metrics(), metrics);
        assert_eq!(harness.engine.next_wake(), wakes);
    }
    harness.submit_for("ann", "all", exact(5, 4, 2, 1_000));
    let new = exact(6, 4, 2, 1_000);
    let full = harness.try_submit(ticket_for("ann", "all", &new), new);
    assert!(full.unwrap_err().to_string().contains("3 of 3"));
}
