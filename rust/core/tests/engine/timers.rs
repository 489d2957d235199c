//! What time does to those that wait: bounds, promotions, deadlines, doom.

use chairlift_core::config::Settings;
use chairlift_core::config::memory::Backfill;
use chairlift_core::config::policy::{ClassSettings, OnDoomed, OnTimeout, Policy};
use chairlift_core::request::{Finish, Time};

use super::harness::{Harness, exact, runs_ahead};
use super::levels::two_levels;
use super::scenarios::settings;

/// One row; classes of one level: `plain`, and `bound` whose requests wait for 500 us at most.
fn bounded(on_timeout: OnTimeout) -> Policy {
    let mut bound = ClassSettings::new("bound");
    bound.max_queue_time_us = Some(500);
    bound.on_timeout = on_timeout;
    Policy {
        classes: vec![ClassSettings::new("plain"), bound],
        ..Policy::default()
    }
}

fn engine(policy: Policy) -> Harness {
    Harness::new(Settings {
        max_num_seqs: 1,
        enable_prefix_caching: false,
        policy,
        ..settings()
    })
}

/// Somebody has the only row.
fn occupied(policy: Policy) -> Harness {
    let mut harness = engine(policy);
    harness.submit_for("ann", "plain", exact(0, 4, 20, 1_000));
    harness.step();
    harness
}

fn finish(harness: &Harness, id: u64) -> Option<Finish> {
    harness.client(id).answers[0].finish
}

#[test]
fn a_request_expires_at_its_bound_exactly_also_in_the_middle_of_a_step() {
    let mut harness = occupied(bounded(OnTimeout::Expire));
    harness.submit_for("ann", "bound", exact(1, 4, 2, 1_000));
    let bound = Time(harness.now.0 + 500);
    assert_eq!(harness.engine.next_wake(), Some(bound));
    assert!(harness.schedule());
    harness.pass(bound.since_us(harness.now) - 1);
    assert_eq!(finish(&harness, 1), None, "a microsecond is left");
    harness.pass(1);
    assert_eq!(finish(&harness, 1), Some(Finish::QueueTimeout));
    assert_eq!(harness.engine.next_wake(), None, "nothing is due any more");
    harness.commit();
    harness.run_to_end();
    let metrics = harness.engine.metrics();
    assert_eq!((metrics.expired, metrics.finished), (1, 1));
}

#[test]
fn an_expired_request_is_never_in_a_plan_though_the_row_is_free_at_the_bound() {
    let mut harness = engine(bounded(OnTimeout::Expire));
    for (early_us, is_scheduled) in [(1, true), (0, false)] {
        let id = early_us;
        harness.submit_for("ann", "bound", exact(id, 4, 1, 1_000));
        // The harness lets 10 us pass before it plans.
        harness.now.0 += 500 - early_us - 10;
        assert_eq!(harness.step(), is_scheduled);
        assert_eq!(harness.client(id).scheduled, u32::from(is_scheduled));
    }
    assert_eq!(finish(&harness, 0), Some(Finish::QueueTimeout));
}

#[test]
fn who_was_scheduled_in_time_never_expires() {
    let mut harness = engine(bounded(OnTimeout::Expire));
    harness.submit_for("ann", "bound", exact(1, 4, 40, 1_000));
    harness.step();
    assert_eq!(harness.engine.next_wake(), None);
    harness.pass(10_000);
    harness.run_to_end();
    assert_eq!(finish(&harness, 1), Some(Finish::Length));
}

#[test]
fn promoted_requests_go_ahead_of_all_others_in_order_of_arrival() {
    let mut harness = occupied(bounded(OnTimeout::Promote));
    for (id, class) in [(1, "plain"), (2, "bound"), (3, "plain"), (4, "bound")] {
        harness.submit_for("ann", class, exact(id, 4, 1, 1_000));
    }
    harness.pass(500);
    harness.submit_for("ann", "bound", exact(5, 4, 1, 1_000));
    let order = harness.order_of_admission();
    assert_eq!(order, [0, 2, 4, 1, 3, 5]);
}

#[test]
fn a_promoted_request_preempts_lower_work_within_one_iteration_of_its_bound() {
    if runs_ahead() {
        return;
    }
    let mut policy = two_levels();
    policy.classes[1].max_queue_time_us = Some(500);
    policy.classes[1].on_timeout = OnTimeout::Promote;
    let mut first = ClassSettings::new("first");
    first.level = 1;
    policy.classes.push(first);
    let mut harness = Harness::new(Settings {
        max_num_seqs: 2,
        policy,
        ..settings()
    });
    harness.submit_for("ann", "low", exact(1, 4, 50, 1_000));
    harness.submit_for("ann", "first", exact(2, 4, 50, 1_000));
    harness.step();
    // Its two answers need both rows, one of which is of its own level: it waits, and all behind it.
    let mut two = exact(3, 4, 2, 1_000);
    two.sampling.n = 2;
    harness.submit_for("ann", "first", two);
    harness.submit_for("ann", "high", exact(4, 4, 2, 1_000));
    let bound = Time(harness.now.0 + 500);
    while harness.now.0 + 10 < bound.0 {
        harness.step();
        assert_eq!(harness.client(4).scheduled, 0);
    }
    harness.step();
    assert_eq!(harness.client(4).scheduled, 1);
    assert_eq!(harness.engine.metrics().preemptions, 1);
    harness.run_to_end();
}

#[test]
fn a_promoted_request_without_lower_work_takes_the_next_memory_that_comes_free() {
    let mut policy = bounded(OnTimeout::Promote);
    policy.memory.backfill = Backfill::Off; // this is about the queue's own order
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 16,
        enable_prefix_caching: false,
        policy,
        ..settings()
    });
    harness.submit_for("ann", "plain", exact(1, 30, 9, 1_000));
    harness.submit_for("ann", "plain", exact(2, 16, 9, 1_000));
    harness.step();
    harness.submit_for("ann", "plain", exact(3, 20, 2, 1_000));
    harness.submit_for("ann", "bound", exact(4, 20, 2, 1_000));
    // It would fit, and does not pass the promoted one.
    harness.submit_for("ann", "plain", exact(5, 1, 2, 1_000));
    harness.pass(500);
    while harness.client(1).ended == 0 {
        harness.step();
        assert_eq!(harness.client(5).scheduled, 0);
    }
    harness.step();
    assert_eq!(harness.client(4).scheduled, 1, "memory came free");
    assert_eq!(harness.engine.metrics().preemptions, 0);
    harness.run_to_end();
}

#[test]
fn a_deadline_ends_whoever_waits_promoted_or_not() {
    let mut harness = occupied(bounded(OnTimeout::Promote));
    let deadline = |id, at| {
        let mut new = exact(id, 4, 1, 1_000);
        new.deadline = Some(Time(at));
        new
    };
    let now = harness.now.0;
    harness.submit_for("ann", "plain", deadline(1, now + 300));
    harness.submit_for("ann", "bound", deadline(2, now + 800));
    harness.submit_for("ann", "plain", deadline(4, now + 5_000));
    harness.pass(300);
    assert_eq!(finish(&harness, 1), Some(Finish::DeadlineMissed));
    harness.pass(499);
    assert_eq!(finish(&harness, 2), None, "it was promoted meanwhile");
    harness.pass(1);
    assert_eq!(finish(&harness, 2), Some(Finish::DeadlineMissed));
    harness.run_to_end();
    assert_eq!(finish(&harness, 4), Some(Finish::Length), "it was in time");
}

/// `plain` is the lowest level, `slow` has a TTFT target of 500 us and is promoted after 300 us.
fn doomed(on_doomed: OnDoomed, promoted: bool) -> Policy {
    let mut slow = ClassSettings::new("slow");
    slow.level = 1;
    slow.ttft_target_us = Some(500);
    slow.on_doomed = on_doomed;
    slow.max_queue_time_us = promoted.then_some(300);
    slow.on_timeout = OnTimeout::Promote;
    Policy {
        classes: vec![ClassSettings::new("plain"), slow],
        preempt_to_admit: false,
        ..Policy::default()
    }
}

#[test]
fn the_doomed_are_kept_relegated_or_dropped_as_their_class_says() {
    for (on_doomed, expected) in [
        (OnDoomed::Keep, &[0, 1, 2, 3][..]),
        (OnDoomed::Relegate, &[0, 2, 3, 1]),
        (OnDoomed::Drop, &[0, 2, 3]),
    ] {
        let mut harness = occupied(doomed(on_doomed, false));
        harness.submit_for("ann", "slow", exact(1, 4, 1, 1_000));
        harness.pass(500);
        let dropped = on_doomed == OnDoomed::Drop;
        assert_eq!(
            finish(&harness, 1),
            dropped.then_some(Finish::DeadlineMissed)
        );
        for id in [2, 3] {
            harness.submit_for("ann", "plain", exact(id, 4, 1, 1_000));
        }
        assert_eq!(harness.order_of_admission(), expected);
    }
}

#[test]
fn the_doomed_are_known_as_soon_as_their_prefill_would_take_too_long() {
    let mut policy = doomed(OnDoomed::Drop, false);
    policy.classes[1].ttft_target_us = Some(10_000_000);
    let mut harness = engine(policy);
    harness.submit_for("ann", "plain", exact(0, 40, 3, 1_000));
    // A tenth of a second for each token of the prompt.
    harness.step_in(4_000_000);
    harness.submit_for("ann", "slow", exact(1, 20, 1, 1_000));
    let wakes = harness.engine.next_wake().expect("a timer");
    assert!(wakes.since_us(harness.now).abs_diff(8_000_000) < 100_000);
    harness.pass(wakes.since_us(harness.now));
    assert_eq!(finish(&harness, 1), Some(Finish::DeadlineMissed));
    harness.run_to_end();
}

#[test]
fn who_was_promoted_is_not_relegated_however_late_the_timers_are_looked_at() {
    let mut harness = occupied(doomed(OnDoomed::Relegate, true));
    harness.submit_for("ann", "slow", exact(1, 4, 1, 1_000));
    harness.submit_for("ann", "plain", exact(2, 4, 1, 1_000));
    // Both its bound and its target are over.
    harness.pass(10_000);
    assert_eq!(harness.order_of_admission(), [0, 1, 2]);
}

#[test]
fn best_effort_is_promoted_at_its_bound_all_the_same() {
    let mut policy = doomed(OnDoomed::Relegate, true);
    policy.classes[1].max_queue_time_us = Some(800);
    let mut harness = occupied(policy);
    harness.submit_for("ann", "slow", exact(1, 4, 1, 1_000));
    harness.submit_for("ann", "plain", exact(2, 4, 1, 1_000));
    harness.pass(500);
    harness.pass(300);
    assert_eq!(harness.order_of_admission(), [0, 1, 2]);
}

#[test]
fn best_effort_preempts_nobody_whatever_its_class() {
    let mut policy = doomed(OnDoomed::Relegate, false);
    policy.preempt_to_admit = true;
    policy.classes.push(ClassSettings::new("first"));
    policy.classes[2].level = 2;
    let mut harness = engine(policy);
    harness.submit_for("ann", "first", exact(0, 4, 30, 1_000));
    harness.step();
    harness.submit_for("ann", "slow", exact(1, 4, 1, 1_000));
    harness.submit_for("ann", "plain", exact(2, 4, 30, 1_000));
    harness.pass(500);
    while harness.client(1).ended == 0 {
        assert!(harness.step());
    }
    assert_eq!(harness.client(2).ended, 1);
    assert_eq!(harness.engine.metrics().preemptions, 0);
}

#[test]
fn promoted_requests_of_a_busy_tenant_let_others_pass_and_keep_their_order() {
    let mut policy = bounded(OnTimeout::Promote);
    let mut ann = policy.default_tenant.clone();
    ann.max_running = Some(1);
    policy.tenants.insert("ann".into(), ann);
    let mut harness = Harness::new(Settings {
        max_num_seqs: 2,
        policy,
        ..settings()
    });
    harness.submit_for("ann", "bound", exact(0, 4, 20, 1_000));
    harness.step();
    for id in 1..5 {
        harness.submit_for("ann", "bound", exact(id, 4, 20, 1_000));
    }
    harness.pass(500);
    harness.submit_for("bob", "plain", exact(9, 4, 2, 1_000));
    harness.step();
    assert_eq!(harness.client(9).scheduled, 1, "others pass");
    assert!(harness.abort(2), "one that is set aside");
    harness.engine.audit().expect("consistent books");
    assert_eq!(harness.order_of_admission(), [0, 9, 1, 3, 4]);
}
