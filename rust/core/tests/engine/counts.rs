//! What is counted by class and tenant, and the engine as a picture.

use std::sync::Arc;

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Policy, TenantSettings};
use chairlift_core::error::{REJECTION_CODES, SubmitError};
use chairlift_core::metrics::{GroupMetrics, ITERATION_BOUNDS_US, bucket};
use chairlift_core::request::RequestId;
use chairlift_core::text::{StopStrings, StopText};

use super::harness::{Harness, exact, runs_ahead, ticket, ticket_for};
use super::scenarios::settings;

fn engine() -> Harness {
    let classes = ["chat", "bulk"].map(ClassSettings::new);
    let bounded = TenantSettings {
        max_queued: Some(1),
        ..TenantSettings::default()
    };
    Harness::new(Settings {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        enable_prefix_caching: false,
        policy: Policy {
            classes: classes.into(),
            tenants: [("bounded".to_owned(), bounded)].into(),
            ..Policy::default()
        },
        ..settings()
    })
}

fn class(harness: &Harness, name: &str) -> GroupMetrics {
    let mut all = harness.engine.class_metrics();
    *all.find(|&(class, _)| class == name).expect("the class").1
}

fn tenant(harness: &Harness, name: &str) -> GroupMetrics {
    let mut all = harness.engine.tenant_metrics();
    all.find(|&(tenant, _)| tenant == name)
        .expect("the tenant")
        .1
}

/// Ordinary samples have a short way through commit. With a stop string to look for, all take the long one.
#[test]
fn both_ways_through_commit_count_the_same() {
    let never = StopStrings::new(&["\u{1}"], StopText::Excluded).expect("a stop string");
    let [short, long] = [None, Some(Arc::new(never))].map(|stop| {
        let mut harness = engine();
        for id in 0..12 {
            let mut new = exact(id, 3 + id as u32 % 5, 2 + id as u32 % 7, 1_000);
            new.stop.ignore_eos = id % 2 == 0;
            new.stop.stop.clone_from(&stop);
            let class = ["chat", "bulk"][id as usize / 3 % 2];
            harness.submit_for(["ann", "bob", "eve"][id as usize % 3], class, new);
        }
        let mut served: Vec<u64> = Vec::new();
        while harness.step() {
            served.extend(harness.engine.shares().map(|share| share.served));
        }
        let classes = ["chat", "bulk"].map(|name| class(&harness, name));
        let tenants = ["ann", "bob", "eve"].map(|name| tenant(&harness, name));
        (harness.engine.metrics(), classes, tenants, served)
    });
    assert_eq!(short, long);
    let (metrics, .., served) = short;
    assert!(metrics.output_tokens > 24 && served.iter().any(|&served| served > 0));
}

#[test]
fn each_gap_is_counted_where_it_belongs() {
    if runs_ahead() {
        return;
    }
    let mut harness = engine();
    harness.submit_for("ann", "chat", exact(1, 4, 3, 1_000));
    harness.submit_for("bob", "bulk", exact(2, 4, 2, 1_000));
    for us in [700, 1_500, 30_000] {
        assert!(harness.step_in(us));
    }
    assert!(!harness.step());
    let at = |us| bucket(&ITERATION_BOUNDS_US, us);
    for metrics in [class(&harness, "chat"), tenant(&harness, "ann")] {
        assert_eq!(metrics.work.itl.count(), 2, "three outputs have two gaps");
        // From commit to commit: deciding takes the harness another 10 us.
        assert_eq!(metrics.work.itl.sum, 1_510 + 30_010);
        assert_eq!(
            (
                metrics.work.itl.counts[at(1_510)],
                metrics.work.itl.counts[at(30_010)]
            ),
            (1, 1)
        );
        assert_eq!(metrics.work.output_tokens, 3);
        assert_eq!((metrics.ttft.count(), metrics.ttft.sum), (1, 710));
    }
    let bob = tenant(&harness, "bob");
    assert_eq!((bob.work.itl.count(), bob.work.itl.sum), (1, 1_510));
    assert_eq!(bob.work.output_tokens, 2);
}

#[test]
fn a_gap_holds_what_came_between() {
    // Eight blocks of four: two cannot both grow, so the newer is preempted and computed again.
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 8,
        max_model_len: 32,
        block_size: 4,
        watermark_blocks: Some(0),
        enable_prefix_caching: false,
        ..settings()
    });
    harness.submit(exact(1, 12, 12, 1_000));
    harness.submit(exact(2, 12, 12, 1_000));
    while harness.step_in(1_000) {}
    let metrics = harness.engine.metrics();
    assert!(metrics.preemptions > 0, "memory was short");
    let all = class(&harness, "default");
    assert_eq!(all.work.itl.count(), 22);
    let longest = all.work.itl.counts.iter().rposition(|&count| count > 0);
    assert!(longest > Some(bucket(&ITERATION_BOUNDS_US, 1_000)));
}

#[test]
fn device_time_is_shared_out_by_tokens() {
    if runs_ahead() {
        return;
    }
    let mut harness = engine();
    harness.submit_for("ann", "chat", exact(1, 30, 2, 1_000));
    harness.submit_for("bob", "chat", exact(2, 10, 2, 1_000));
    assert!(harness.step_in(4_000));
    let shares = ["ann", "bob"].map(|name| tenant(&harness, name).work.device_ns);
    assert_eq!(shares, [3_000_000, 1_000_000]);
    // What was computed for a request that was aborted meanwhile is its tenant's all the same.
    assert!(harness.schedule());
    harness.abort(2);
    harness.now.0 += 1_990;
    harness.commit();
    assert_eq!(tenant(&harness, "bob").work.device_ns, 2_000_000);
    assert_eq!(class(&harness, "chat").work.device_ns, 6_000_000);
    assert_eq!(harness.engine.metrics().device_us, 6_000);
}

#[test]
fn a_tenant_that_comes_back_finds_its_counts() {
    let mut harness = engine();
    for id in 1..=3 {
        harness.submit_for("ann", "chat", exact(id, 4, 2, 1_000));
        harness.run_to_end();
    }
    let ann = tenant(&harness, "ann");
    assert_eq!((ann.accepted, ann.finished, ann.live), (3, 3, 0));
}

#[test]
fn tenants_beyond_those_remembered_are_summed_up() {
    let mut harness = engine();
    for id in 0..1_100 {
        harness.submit_for(&format!("tenant {id}"), "chat", exact(id, 4, 1, 1_000));
        harness.run_to_end();
    }
    let others = harness.engine.other_tenant_metrics().finished;
    let known = harness.engine.tenant_metrics();
    let finished: u64 = known.map(|(_, metrics)| metrics.finished).sum();
    assert!(others > 0);
    assert_eq!(finished + others, 1_100);
    harness.engine.audit().expect("nobody is lost");
}

#[test]
fn rejections_are_counted_by_reason() {
    let mut harness = engine();
    let mut all = exact(0, 4, 20, 1_000);
    all.sampling.n = harness.settings.max_num_seqs;
    harness.submit_for("ann", "chat", all);
    assert!(harness.step(), "no slot is free");
    let first = exact(1, 4, 2, 1_000);
    let ticket_of = |request: &_| ticket_for("bounded", "bulk", request);
    harness.submit_for("bounded", "bulk", first);
    for id in 2..4 {
        let request = exact(id, 4, 2, 1_000);
        let refused = harness.try_submit(ticket_of(&request), request);
        assert!(matches!(refused, Err(SubmitError::TenantFull { .. })));
    }
    let unknown = exact(4, 4, 2, 1_000);
    let refused = harness.try_submit(ticket_for("ann", "gold", &unknown), unknown);
    assert!(matches!(refused, Err(SubmitError::UnknownClass { .. })));
    let empty = exact(5, 0, 2, 1_000);
    let refused = harness.try_submit(ticket(&empty), empty);
    assert_eq!(refused, Err(SubmitError::EmptyPrompt));
    let of = |rejections: chairlift_core::metrics::Rejections, code| {
        let mut all = rejections.iter();
        all.find(|&(reason, _)| reason == code)
            .map(|(_, count)| count)
    };
    let all = harness.engine.metrics().rejections;
    assert_eq!(of(all, "tenant_full"), Some(2));
    assert_eq!(of(all, "unknown_class"), Some(1));
    assert_eq!(of(all, "empty_prompt"), Some(1));
    assert_eq!(
        of(class(&harness, "bulk").rejections, "tenant_full"),
        Some(2)
    );
    assert_eq!(
        of(class(&harness, "bulk").rejections, "unknown_class"),
        Some(0)
    );
    assert_eq!(
        of(class(&harness, "chat").rejections, "empty_prompt"),
        Some(1)
    );
    assert_eq!(
        of(tenant(&harness, "bounded").rejections, "tenant_full"),
        Some(2)
    );
    assert!(REJECTION_CODES.is_sorted_by(|a, b| a != b));
}

#[test]
fn predictions_are_held_against_what_came() {
    let mut harness = engine();
    for id in 0..12 {
        harness.submit_for("ann", "chat", exact(id, 8, 4, 1_000));
        harness.step_in(1_000);
    }
    harness.run_to_end();
    let ann = class(&harness, "chat");
    assert_eq!(ann.queue_time.count(), 12);
    // Nothing had been measured when the first came.
    assert_eq!(ann.predicted_queue_time.count(), 11);
    assert_eq!(ann.queue_time_error.count(), 11);
    // The first waited for the 10 us that the harness takes to decide.
    let waited = ann.queue_time.sum - 10;
    let difference = ann.predicted_queue_time.sum.abs_diff(waited);
    assert!(ann.queue_time_error.sum >= difference);
}

#[test]
fn iterations_are_counted_by_time_and_size() {
    if runs_ahead() {
        return;
    }
    let mut harness = engine();
    for id in 0..3 {
        harness.submit_for("ann", "chat", exact(id, 8, 3, 1_000));
    }
    while harness.step_in(6_000) {}
    let iterations = harness.engine.iteration_metrics();
    assert_eq!((iterations.time.count(), iterations.time.sum), (3, 18_000));
    assert_eq!(
        iterations.time.counts[bucket(&ITERATION_BOUNDS_US, 6_000)],
        3
    );
    assert_eq!(
        (iterations.sequences.sum, iterations.tokens.sum),
        (9, 24 + 6)
    );
    assert_eq!(
        (iterations.prefill_tokens, iterations.decode_tokens),
        (24, 6)
    );
}

#[test]
fn seats_and_waits_are_as_the_engine_is() {
    let mut harness = engine();
    for (id, class) in [(1, "chat"), (2, "bulk")] {
        harness.submit_for("ann", class, exact(id, 8, 20, 1_000));
    }
    let mut pair = exact(3, 60, 20, 1_000);
    pair.sampling.n = 2;
    harness.submit_for("bob", "bulk", pair);
    harness.step_in(100);
    harness.submit_for("cat", "bulk", exact(4, 8, 20, 1_000));
    harness.pass(50);
    harness.submit_for("cat", "chat", exact(5, 8, 20, 1_000));
    let seats = harness.engine.seats();
    let seated: Vec<_> = seats
        .iter()
        .map(|seat| seat.map(|seat| (seat.class.0, seat.decodes)))
        .collect();
    // The two answers of the third hold a row each while their one prompt is computed.
    assert_eq!(
        seated,
        [
            Some((0, true)),
            Some((1, true)),
            Some((1, false)),
            Some((1, false))
        ]
    );
    let waits = harness.engine.oldest_waits();
    let by_class: Vec<u64> = waits.classes.values().map(|at| at.0).collect();
    let arrival_of_4 = harness.now.0 - 50;
    assert_eq!(by_class, [harness.now.0, arrival_of_4]);
    assert_eq!(
        waits
            .tenants
            .iter()
            .map(|(&name, at)| (name, at.0))
            .collect::<Vec<_>>(),
        [("cat", arrival_of_4)]
    );
    assert!(harness.engine.wait(harness.now, RequestId(4)).is_some());
}
