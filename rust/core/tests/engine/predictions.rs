//! What the gate predicts, and what it does about it: rejections, promises, shedding.

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, OnTimeout, Policy, Shedding};
use chairlift_core::request::{Finish, Time};

use super::gate::{SECOND, engine};
use super::harness::{Harness, exact, runs_ahead, ticket_for};
use super::levels::two_levels;
use super::scenarios::settings;

/// Ten tokens of prefill a second were measured, and so many prompts of 40 tokens wait.
fn slow(policy: Policy, waiting: u64) -> Harness {
    let mut harness = engine(policy, 100);
    for id in 0..4 {
        harness.submit_for("ann", "low", exact(id, 40, 1, 1_000));
    }
    while harness.step_in(SECOND) {}
    for id in 0..waiting {
        harness.submit_for("ann", "low", exact(10 + id, 40, 1, 1_000));
    }
    harness
}

#[test]
fn what_would_miss_its_ttft_target_is_rejected_with_the_time_to_come_again() {
    let mut policy = two_levels();
    let mut asking = ClassSettings::new("asking");
    asking.ttft_target_us = Some(20 * SECOND);
    policy.classes.push(asking);
    for waiting in [0, 3, 10] {
        let mut harness = slow(policy.clone(), waiting);
        let new = exact(99, 40, 1, 1_000);
        let submitted = harness.try_submit(ticket_for("bob", "asking", &new), new);
        // 4 seconds for each prompt, its own included.
        let least = 4 * waiting + 4;
        if least <= 20 {
            submitted.expect("it will be in time");
            continue;
        }
        let error = submitted.unwrap_err();
        assert_eq!(error.code(), "ttft_unreachable");
        let after = error.retry_after_us().expect("later") / SECOND;
        assert!(after.abs_diff(least - 20) <= 3, "{error}: {after} s");
        let new = exact(98, 40, 1, 1_000);
        let urgent = harness.try_submit(ticket_for("bob", "high", &new), new);
        urgent.expect("no target");
    }
}

#[test]
fn what_would_miss_its_own_deadline_is_rejected_whatever_its_class_promises() {
    let mut policy = two_levels();
    policy.classes[1].ttft_target_us = Some(60 * SECOND);
    for (class, within, is_in_time) in [
        ("low", 10, false),
        ("high", 10, true), // nobody is ahead of it
        ("high", 3, false),
        ("low", 60, true),
    ] {
        // 4 seconds for each of ten prompts of class "low", and 4 for its own.
        let mut harness = slow(policy.clone(), 10);
        let mut new = exact(99, 40, 1, 1_000);
        new.deadline = Some(Time(harness.now.0 + within * SECOND));
        let submitted = harness.try_submit(ticket_for("bob", class, &new), new);
        let Err(error) = submitted else {
            assert!(is_in_time, "{class}, {within} s");
            continue;
        };
        assert!(!is_in_time, "{class}, {within} s: {error}");
        assert_eq!(error.code(), "ttft_unreachable");
        assert!(error.to_string().contains("its deadline is"), "{error}");
        assert!(error.retry_after_us() >= Some(SECOND));
    }
}

#[test]
fn an_idle_engine_lets_in_whoever_comes_however_slow_it_was() {
    let mut policy = two_levels();
    policy.classes[0].ttft_target_us = Some(SECOND);
    let mut harness = engine(policy, 100);
    harness.submit_for("ann", "low", exact(1, 4, 1, 1_000));
    harness.step_in(60 * SECOND);
    harness.submit_for("ann", "low", exact(2, 4, 30, 1_000));
    let new = exact(3, 4, 1, 1_000);
    let busy = harness.try_submit(ticket_for("ann", "low", &new), new.clone());
    assert_eq!(busy.unwrap_err().code(), "ttft_unreachable");
    harness.run_to_end();
    harness.submit_for("ann", "low", new);
    harness.run_to_end();
}

#[test]
fn a_prefill_that_was_aborted_is_no_work_ahead() {
    if runs_ahead() {
        return;
    }
    let mut policy = two_levels();
    policy.classes[0].ttft_target_us = Some(4 * SECOND);
    let mut harness = slow(policy, 0);
    harness.submit_for("ann", "high", exact(20, 60, 1, 1_000));
    harness.step_in(SECOND);
    harness.abort(20);
    assert!(!harness.step());
    harness.submit_for("ann", "high", exact(21, 1, 1, 1_000));
    let new = exact(22, 4, 1, 1_000);
    let submitted = harness.try_submit(ticket_for("ann", "low", &new), new);
    submitted.expect("a second or two, not six more");
}

#[test]
fn lower_work_is_in_nobody_s_way_where_it_can_be_preempted() {
    for allowed in [true, false] {
        let mut policy = two_levels();
        policy.preempt_to_admit = allowed;
        policy.classes[1].ttft_target_us = Some(4 * SECOND);
        let mut harness = slow(policy, 0);
        // One waits for the only row, and so it is known how long a row takes to come free.
        for id in 20..23 {
            harness.submit_for("ann", "low", exact(id, 4, 30, 1_000));
        }
        while harness.client(21).scheduled == 0 {
            harness.step_in(SECOND);
        }
        let new = exact(30, 10, 1, 1_000);
        let submitted = harness.try_submit(ticket_for("bob", "high", &new), new);
        assert_eq!(submitted.is_ok(), allowed, "{submitted:?}");
        harness.run_to_end();
    }
}

#[test]
fn a_prefill_of_a_lower_level_is_not_ahead_of_a_higher_one() {
    if runs_ahead() {
        return;
    }
    let mut policy = two_levels();
    policy.classes[1].ttft_target_us = Some(4 * SECOND);
    let mut harness = Harness::new(Settings {
        max_num_batched_tokens: 10,
        enable_prefix_caching: false,
        policy,
        ..settings()
    });
    harness.submit_for("ann", "low", exact(1, 60, 1, 1_000));
    harness.step_in(SECOND);
    let new = exact(2, 10, 1, 1_000);
    let submitted = harness.try_submit(ticket_for("bob", "high", &new), new);
    submitted.expect("ten tokens, and not fifty more");
    harness.step_in(SECOND);
    assert_eq!(harness.client(2).ended, 1);
    harness.run_to_end();
}

#[test]
fn no_more_promotions_are_promised_than_can_be_kept() {
    let mut policy = two_levels();
    let mut sure = ClassSettings::new("sure");
    sure.max_queue_time_us = Some(20 * SECOND);
    sure.on_timeout = OnTimeout::Promote;
    policy.classes.push(sure);
    // What was promised nothing does not count, for promoted requests pass it.
    let mut harness = slow(policy, 10);
    let mut kept = Vec::new();
    let error = loop {
        let new = exact(100 + kept.len() as u64, 40, 1, 1_000);
        let id = new.id.0;
        match harness.try_submit(ticket_for("bob", "sure", &new), new) {
            Ok(()) => kept.push(id),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "promise_unkeepable");
    assert!((4..=6).contains(&kept.len()), "{} promises", kept.len());
    let promised = harness.now.0 + 20 * SECOND;
    // All of them are promoted at their bound, and one row serves them.
    while harness.step_in(SECOND) && harness.now.0 < promised + 30 * SECOND {}
    for id in kept {
        assert_eq!(harness.client(id).ended, 1, "promise {id}");
    }
    assert!(harness.engine.metrics().live > 0, "others still wait");
}

#[test]
fn overload_is_shed_from_the_newest_and_ends_later_than_it_began() {
    let mut policy = two_levels();
    policy.classes[0].may_be_shed = true;
    policy.shedding = Some(Shedding {
        above_us: 30 * SECOND,
        below_us: 10 * SECOND,
    });
    let mut harness = slow(policy, 7);
    assert_eq!(harness.engine.metrics().shed, 0);
    for id in 20..24 {
        harness.submit_for("bob", "high", exact(id, 40, 1, 1_000));
    }
    // Eight prompts of 4 seconds were too much, two are not; then three more came.
    let metrics = harness.engine.metrics();
    assert_eq!((metrics.shed, metrics.queued), (6, 5));
    let fresh = |h: &mut Harness, id| {
        let new = exact(id, 40, 1, 1_000);
        h.try_submit(ticket_for("ann", "low", &new), new)
    };
    let mut refused = 0;
    while let Err(error) = fresh(&mut harness, 30) {
        assert_eq!(error.code(), "shedding");
        assert!(error.retry_after_us() >= Some(SECOND));
        assert!(harness.step_in(SECOND), "it will be over");
        refused += 1;
    }
    assert!(refused >= 4, "until the wait is below the lower bound");
    assert_eq!(harness.client(30).ended, 0);
    let given_up = |id| harness.client(id).answers[0].finish == Some(Finish::Shed);
    assert!((11..17).all(given_up) && !given_up(10));
}
