//! Backfill: who goes ahead of a head that does not fit, and what the head was promised.

use std::collections::BTreeMap;

use chairlift_core::config::Settings;
use chairlift_core::config::memory::{Backfill, MemoryAdmission};
use chairlift_core::config::policy::{Policy, Sharing, TenantSettings};
use chairlift_core::request::{NewRequest, RequestId, WaitReason};

use super::harness::{Harness, Random, exact, runs_ahead};
use super::levels::two_levels;
use super::scenarios::settings;

/// Output tokens that every answer is expected to have, once [`taught`].
const EXPECTED: u32 = 8;
/// The request that does not fit.
const HEAD: u64 = 1;

fn engine(mode: Backfill, mut policy: Policy) -> Harness {
    policy.memory.backfill = mode;
    for tenant in ["ann", "bob", "long"] {
        // Those that are named are remembered, and their lengths with them.
        policy.tenants.entry(tenant.into()).or_default();
    }
    Harness::new(Settings {
        max_num_seqs: 16,
        max_num_batched_tokens: 1_024,
        num_kv_blocks: 20,
        enable_prefix_caching: false,
        policy,
        ..settings()
    })
}

fn plain(id: u64, prompt_tokens: u32, output_tokens: u32) -> NewRequest {
    exact(id, prompt_tokens, output_tokens, 1_000)
}

/// Submits a request of the first class. Tenants ann and bob are to keep to [`EXPECTED`].
fn submit(harness: &mut Harness, tenant: &str, id: u64, prompt_tokens: u32, output_tokens: u32) {
    let class = harness.settings.policy.classes[0].name.clone();
    harness.submit_for(tenant, &class, plain(id, prompt_tokens, output_tokens));
}

/// Answers of a tenant after which nobody else's matter.
const TAUGHT: u64 = 20;

/// So many answers of [`EXPECTED`] tokens have been seen of ann and of bob; the clients are forgotten.
fn taught(mut harness: Harness) -> Harness {
    for round in 0..TAUGHT {
        for (id, tenant) in (9_000 + 2 * round..).zip(["ann", "bob"]) {
            submit(&mut harness, tenant, id, 4, EXPECTED);
        }
        harness.run_to_end();
    }
    harness.clients.clear();
    harness
}

fn has_started(harness: &Harness, id: u64) -> bool {
    harness.client(id).scheduled > 0
}

/// Tenant ann's request 0 holds 5 of 20 blocks for 8 iterations, the first of which is over. Its request
/// 1, the head, needs 16.
fn with_blocked_head(mode: Backfill, policy: Policy) -> Harness {
    let mut harness = taught(engine(mode, policy));
    submit(&mut harness, "ann", 0, 20, EXPECTED);
    harness.step();
    submit(&mut harness, "ann", HEAD, 60, 1);
    harness
}

/// Steps until a request is first scheduled; how many it took.
fn steps_until(harness: &mut Harness, id: u64) -> u32 {
    let mut steps = 0;
    while !has_started(harness, id) {
        assert!(harness.step(), "{id} never starts");
        steps += 1;
    }
    steps
}

#[test]
fn who_is_out_of_the_way_in_time_goes_ahead() {
    for mode in [Backfill::Easy, Backfill::Off, Backfill::Unprotected] {
        let mut harness = with_blocked_head(mode, Policy::default());
        // It outlives the head's start, and its 3 blocks at most are not missed then.
        submit(&mut harness, "bob", 2, 4, EXPECTED);
        // With one more of that kind, they would be.
        submit(&mut harness, "bob", 3, 4, EXPECTED);
        // Gone after one iteration.
        submit(&mut harness, "brief", 4, 4, 1);
        harness.step();
        let ahead = [2, 3, 4].map(|id| has_started(&harness, id));
        let expected = match mode {
            Backfill::Easy => [true, false, true],
            Backfill::Off => [false; 3],
            Backfill::Unprotected => [true; 3],
        };
        assert_eq!(ahead, expected, "{mode:?}");
        let count = ahead.iter().filter(|&&ahead| ahead).count();
        assert_eq!(harness.engine.metrics().backfilled, count as u64);
        let steps = steps_until(&mut harness, HEAD);
        match mode {
            Backfill::Easy | Backfill::Off => assert_eq!(steps, 7, "{mode:?}"),
            Backfill::Unprotected => assert!(steps > 7, "{steps}"),
        }
        assert_eq!(harness.engine.metrics().preemptions, 0);
        assert_eq!(harness.engine.metrics().forecast_slips, 0);
        harness.run_to_end();
    }
}

#[test]
fn an_unprotected_head_starves_under_a_stream_and_a_protected_one_does_not() {
    for mode in [Backfill::Easy, Backfill::Unprotected] {
        let mut harness = with_blocked_head(mode, Policy::default());
        for id in 2..150 {
            submit(&mut harness, "bob", id, 4, EXPECTED);
            harness.step();
        }
        assert_eq!(has_started(&harness, HEAD), mode == Backfill::Easy);
        assert!(harness.engine.metrics().backfilled > 0);
        harness.run_to_end();
    }
}

/// Random arrivals: the step of each, its prompt and output.
fn arrivals(random: &mut Random, most_output: u32) -> Vec<(u32, NewRequest)> {
    let mut at = 0;
    let mut all = Vec::new();
    for id in 0..24 {
        at += random.within(0, 2);
        let light = random.chance(70);
        let prompt = if light {
            (1, 12)
        } else {
            (30, 64 - most_output)
        };
        let output = random.within(EXPECTED, most_output);
        all.push((at, plain(id, random.within(prompt.0, prompt.1), output)));
    }
    all
}

/// The step at which each request was first scheduled, and the first one that waited for memory.
fn run(harness: &mut Harness, arrivals: &[(u32, NewRequest)]) -> (BTreeMap<u64, u32>, Option<u64>) {
    let (mut started, mut head) = (BTreeMap::new(), None);
    let mut coming = arrivals.iter().peekable();
    for step in 0.. {
        while let Some((_, new)) = coming.next_if(|(at, _)| *at <= step) {
            harness.submit(new.clone());
        }
        let ran = harness.step();
        for (id, client) in &harness.clients {
            if client.scheduled > 0 {
                started.entry(id.0).or_insert(step);
            } else if head.is_none() && harness.engine.metrics().preemptions == 0 {
                let reason = harness.engine.wait(harness.now, *id).map(|(why, _)| why);
                head = (reason == Some(WaitReason::Memory)).then_some(id.0);
            }
        }
        harness.engine.audit().expect("consistent books");
        if !ran && coming.peek().is_none() {
            break;
        }
    }
    (started, head)
}

#[test]
fn a_head_starts_no_later_than_under_strict_order() {
    if runs_ahead() {
        return;
    }
    for most_output in [EXPECTED, 24] {
        let (mut heads, mut backfilled, mut guests_gone) = (0, 0, 0);
        for seed in 0..400 {
            let arrivals = arrivals(&mut Random(seed), most_output);
            let [mut easy, mut strict] =
                [Backfill::Easy, Backfill::Off].map(|mode| taught(engine(mode, Policy::default())));
            let (by_easy, head) = run(&mut easy, &arrivals);
            let (by_strict, same) = run(&mut strict, &arrivals);
            assert_eq!(
                head, same,
                "seed {seed}: all is the same until somebody waits"
            );
            let Some(head) = head else { continue };
            let starts = (by_easy[&head], by_strict[&head]);
            assert!(starts.0 <= starts.1, "seed {seed}: head {head} {starts:?}");
            let metrics = easy.engine.metrics();
            if most_output == EXPECTED && metrics.preemptions == 0 {
                assert_eq!(metrics.forecast_slips, 0, "seed {seed}: all was predicted");
            }
            heads += 1;
            backfilled += metrics.backfilled;
            let preempted =
                metrics.preemptions - strict.engine.metrics().preemptions.min(metrics.preemptions);
            guests_gone += preempted;
        }
        println!(
            "output up to {most_output}: {heads} heads, {backfilled} guests, {guests_gone} preempted"
        );
        assert!(heads > 300 && backfilled > 500, "{heads} {backfilled}");
        assert!(most_output == EXPECTED || guests_gone > 50, "{guests_gone}");
    }
}

/// A head waits, and request 2 is expected to be out of its way in time, and is not.
fn with_late_guest(mode: Backfill, policy: Policy) -> Harness {
    let mut harness = taught(engine(mode, policy));
    // Answers of tenant "long" are long, and known to be.
    for id in 8_000..8_020 {
        submit(&mut harness, "long", id, 4, 22);
        harness.run_to_end();
    }
    submit(&mut harness, "long", 0, 20, 22);
    harness.step();
    submit(&mut harness, "ann", HEAD, 60, 1);
    submit(&mut harness, "bob", 2, 4, 50);
    harness
}

#[test]
fn guests_go_when_the_head_would_fit_without_them() {
    if runs_ahead() {
        return;
    }
    let mut starts = Vec::new();
    for mode in [Backfill::Off, Backfill::Easy] {
        let mut harness = with_late_guest(mode, Policy::default());
        starts.push(steps_until(&mut harness, HEAD));
        let metrics = harness.engine.metrics();
        let easy = u64::from(mode == Backfill::Easy);
        assert_eq!((metrics.backfilled, metrics.preemptions), (easy, easy));
        harness.run_to_end();
        assert_eq!(harness.client(2).answers[0].tokens.len(), 50);
    }
    assert_eq!(starts[0], starts[1]);
}

#[test]
fn guests_stay_where_a_forecast_admitted_them() {
    for admission in [MemoryAdmission::Optimistic, MemoryAdmission::Forecast] {
        let mut policy = Policy::default();
        policy.memory.admission = admission;
        let mut harness = with_late_guest(Backfill::Easy, policy);
        steps_until(&mut harness, HEAD);
        let metrics = harness.engine.metrics();
        let goes = admission == MemoryAdmission::Optimistic;
        let preemptions = u64::from(goes);
        assert_eq!((metrics.backfilled, metrics.preemptions), (1, preemptions));
        assert_eq!(
            harness.client(2).ended,
            1 - u32::from(goes),
            "{admission:?}"
        );
        harness.run_to_end();
    }
}

#[test]
fn a_start_that_has_to_be_put_off_is_counted() {
    let mut starts = Vec::new();
    for mode in [Backfill::Off, Backfill::Easy] {
        let mut harness = taught(engine(mode, Policy::default()));
        // It runs for 20 iterations, and is expected to for 8.
        submit(&mut harness, "ann", 0, 20, 20);
        harness.step();
        submit(&mut harness, "ann", HEAD, 60, 1);
        // It fits, and may not go ahead; so the promise is looked at all the time.
        submit(&mut harness, "bob", 2, 24, EXPECTED);
        starts.push(steps_until(&mut harness, HEAD));
        let slips = harness.engine.metrics().forecast_slips;
        assert_eq!(slips > 0, mode == Backfill::Easy, "{slips}");
        harness.run_to_end();
    }
    assert_eq!(starts, [20, 20]);
}

#[test]
fn the_reservation_stays_though_it_is_another_tenants_turn() {
    for mode in [Backfill::Easy, Backfill::Off] {
        let policy = Policy {
            sharing: Sharing::Fair,
            ..Policy::default()
        };
        let mut harness = with_blocked_head(mode, policy);
        // It fits, and would be in the head's way. Soon ann has had more service than bob.
        submit(&mut harness, "bob", 2, 20, EXPECTED);
        let steps = steps_until(&mut harness, HEAD);
        // Without a reservation it goes first, as its turn comes.
        assert_eq!(has_started(&harness, 2), mode == Backfill::Off);
        assert_eq!(steps == 8, mode == Backfill::Easy, "{steps}");
        harness.run_to_end();
    }
}

#[test]
fn no_more_candidates_are_looked_at_than_configured() {
    for (count, goes) in [(1, false), (2, true)] {
        let mut policy = Policy::default();
        policy.memory.backfill_candidates = count;
        let mut harness = with_blocked_head(Backfill::Easy, policy);
        submit(&mut harness, "bob", 2, 24, EXPECTED); // fits, and may not go ahead
        submit(&mut harness, "brief", 3, 4, 1);
        harness.step();
        assert!(!has_started(&harness, 2));
        assert_eq!(has_started(&harness, 3), goes, "{count} candidates");
        harness.run_to_end();
    }
}

#[test]
fn a_higher_level_overtakes_the_head_and_a_lower_one_does_not_delay_it() {
    let mut harness = with_blocked_head(Backfill::Easy, two_levels());
    harness.submit_for("brief", "low", plain(2, 4, 1));
    harness.step();
    assert!(has_started(&harness, 2), "the head has a reservation");
    harness.submit_for("bob", "high", plain(3, 24, EXPECTED));
    harness.step();
    assert!(has_started(&harness, 3), "it is more important");
    let steps = steps_until(&mut harness, HEAD);
    assert!(steps > 5, "{steps}");
    assert_eq!(
        harness.engine.metrics().forecast_slips,
        0,
        "no error of the prediction"
    );
    harness.run_to_end();

    // A head of the higher level, and others of the lower one.
    let mut policy = two_levels();
    policy.classes.swap(0, 1);
    let mut harness = with_blocked_head(Backfill::Easy, policy);
    harness.submit_for("bob", "low", plain(2, 24, EXPECTED));
    harness.submit_for("brief", "low", plain(3, 4, 1));
    harness.step();
    assert!(!has_started(&harness, 2) && has_started(&harness, 3));
    assert_eq!(steps_until(&mut harness, HEAD), 7);
    harness.run_to_end();
}

#[test]
fn guests_of_a_tenant_do_not_use_up_what_its_head_may_run() {
    let mut policy = Policy::default();
    let bounded = TenantSettings {
        max_running: Some(2),
        ..TenantSettings::default()
    };
    policy.tenants.insert("ann".into(), bounded);
    let mut harness = with_blocked_head(Backfill::Easy, policy);
    harness.submit_for("ann", "default", plain(2, 4, 1));
    submit(&mut harness, "brief", 3, 4, 1);
    harness.step();
    assert!(!has_started(&harness, 2) && has_started(&harness, 3));
    assert_eq!(steps_until(&mut harness, HEAD), 7);
    harness.run_to_end();
}

#[test]
fn who_lets_others_pass_waits_for_memory_and_not_for_fairness() {
    let mut harness = with_blocked_head(Backfill::Easy, Policy::default());
    submit(&mut harness, "brief", 2, 4, 1);
    harness.step();
    assert!(has_started(&harness, 2));
    let (reason, _) = harness
        .engine
        .wait(harness.now, RequestId(HEAD))
        .expect("it waits");
    assert_eq!(reason, WaitReason::Memory);
    harness.run_to_end();
}

#[test]
fn a_guest_is_charged_as_anybody_is() {
    for mode in [Backfill::Off, Backfill::Easy] {
        let policy = Policy {
            sharing: Sharing::Fair,
            ..Policy::default()
        };
        let mut harness = with_blocked_head(mode, policy);
        for id in 2..8 {
            harness.submit_for("bob", "default", plain(id, 4, EXPECTED + 4));
        }
        harness.run_to_end();
        let metrics = harness.engine.metrics();
        assert_eq!(metrics.backfilled > 0, mode == Backfill::Easy);
        let served = harness.engine.shares().find(|share| share.tenant == "bob");
        let taught = TAUGHT * (4 + 2 * u64::from(EXPECTED));
        let price = (6 * (4 + 2 * u64::from(EXPECTED + 4)) + taught) * 1_000;
        assert_eq!(served.map(|share| share.served), Some(price), "{mode:?}");
    }
}

#[test]
fn candidates_are_looked_at_in_the_queues_order() {
    for (sharing, expected) in [(Sharing::Fair, [2, 5]), (Sharing::Fcfs, [2, 3])] {
        let mut policy = Policy {
            sharing,
            ..Policy::default()
        };
        policy.memory.backfill_candidates = 2;
        let mut harness = with_blocked_head(Backfill::Easy, policy);
        for id in 2..5 {
            submit(&mut harness, "bob", id, 4, 1);
        }
        submit(&mut harness, "long", 5, 4, 1);
        harness.step();
        let ahead: Vec<u64> = (2..6).filter(|&id| has_started(&harness, id)).collect();
        assert_eq!(ahead, expected, "{sharing:?}");
        harness.run_to_end();
    }
}
