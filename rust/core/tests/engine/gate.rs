//! The door: who gets a place, who has to make room, who is told to come later.

use std::collections::BTreeMap;

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, OnDoomed, Policy, Sharing, TenantSettings};
use chairlift_core::error::SubmitError;
use chairlift_core::request::WaitReason;
use chairlift_core::request::{Finish, NewRequest, RequestId, Ticket};

use super::harness::{Harness, exact, ticket_for};
use super::levels::two_levels;
use super::scenarios::settings;

pub const SECOND: u64 = 1_000_000;

/// One row, ten tokens an iteration.
pub fn engine(policy: Policy, max_queued_requests: u32) -> Harness {
    engine_of(Settings {
        max_num_seqs: 1,
        max_queued_requests,
        policy,
        ..settings()
    })
}

fn engine_of(settings: Settings) -> Harness {
    Harness::new(Settings {
        max_num_batched_tokens: 10,
        enable_prefix_caching: false,
        ..settings
    })
}

/// So many rows, all of which a request has.
fn taken(policy: Policy, max_queued_requests: u32, max_num_seqs: u32) -> Harness {
    let mut harness = engine_of(Settings {
        max_num_seqs,
        max_queued_requests,
        policy,
        ..settings()
    });
    let mut all = exact(0, 4, 20, 1_000);
    all.sampling.n = max_num_seqs;
    harness.submit_for("di", "low", all);
    harness.step();
    assert_eq!(harness.client(0).scheduled, 1);
    harness
}

/// Takes places for requests of `n` answers, as many as there are; says why there are no more.
fn burst(
    harness: &mut Harness,
    tenant: &str,
    class: &str,
    n: u32,
) -> (Vec<RequestId>, SubmitError) {
    let mut places = Vec::new();
    loop {
        let before = 1 + harness.engine.metrics().submitted;
        let id = RequestId(1_000 * before + places.len() as u64);
        let ticket = Ticket {
            id,
            n,
            ..ticket_for(tenant, class, &exact(id.0, 1, 1, 10))
        };
        match harness.engine.reserve(harness.now, ticket) {
            Ok(()) => places.push(id),
            Err(full) => return (places, full),
        }
    }
}

#[test]
fn a_burst_gets_exactly_the_places_of_each_door_and_answers_count_each() {
    let mut policy = two_levels();
    policy.classes[0].max_queued_requests = Some(6);
    policy.default_tenant.max_queued = Some(4);
    for (n, of_tenant, of_class, of_engine) in [(1, 4, 2, 3), (2, 2, 1, 1), (3, 1, 1, 1)] {
        let mut harness = taken(policy.clone(), 9, 3);
        for (tenant, class, expected, code) in [
            ("ann", "low", of_tenant, "tenant_full"),
            ("bob", "low", of_class, "class_full"),
            ("cy", "high", of_engine, "queue_full"),
        ] {
            let (places, full) = burst(&mut harness, tenant, class, n);
            assert_eq!(places.len(), expected, "{tenant}, {n} answers each: {full}");
            if n == 1 {
                assert_eq!(full.code(), code);
            }
            assert_eq!(full.retry_after_us(), Some(SECOND));
        }
        let taken = (of_tenant + of_class + of_engine) as u64 * u64::from(n);
        assert_eq!(harness.engine.metrics().queued, taken);
    }
}

#[test]
fn a_free_slot_is_room_for_one_more_whenever_the_engine_takes_who_is_there() {
    let mut policy = two_levels();
    policy.classes[0].max_queued_requests = Some(3);
    policy.classes[1].level = 0; // nobody has to make room
    policy.default_tenant.max_queued = Some(2);
    for (max_num_seqs, max_running, expected) in [
        (1, None, [3, 4, 5]),
        (4, None, [6, 7, 8]),
        (4, Some(1), [3, 6, 8]),
    ] {
        policy.default_tenant.max_running = max_running;
        for steps_before in 0..=9 {
            let mut harness = Harness::new(Settings {
                max_num_seqs,
                max_queued_requests: 4,
                policy: policy.clone(),
                ..settings()
            });
            let mut accepted = 0;
            let mut found = [0; 3];
            for (index, (tenant, class)) in [("ann", "low"), ("bob", "low"), ("cy", "high")]
                .into_iter()
                .enumerate()
            {
                for _ in 0..20 {
                    let new = exact(1 + harness.engine.metrics().submitted, 1, 30, 10);
                    if harness
                        .try_submit(ticket_for(tenant, class, &new), new)
                        .is_err()
                    {
                        continue;
                    }
                    accepted += 1;
                    if accepted == steps_before {
                        harness.step();
                    }
                }
                found[index] = accepted;
            }
            let case = format!("{max_num_seqs} slots, scheduled after {steps_before}");
            assert_eq!(found, expected, "{case}, at most {max_running:?} running");
            harness.engine.audit().expect("sound");
        }
    }
}

#[test]
fn a_slot_that_memory_keeps_empty_is_no_room() {
    let mut harness = Harness::new(Settings {
        num_kv_blocks: 16,
        max_queued_requests: 2,
        ..settings()
    });
    harness.submit(exact(1, 40, 20, 1_000));
    harness.submit(exact(2, 40, 20, 1_000));
    harness.step();
    let reason = harness.engine.wait(harness.now, RequestId(2));
    assert_eq!(reason.expect("it waits").0, WaitReason::Memory);
    assert!(harness.engine.has_room(1) && !harness.engine.has_room(2));
    harness.submit(exact(3, 4, 20, 1_000));
    let new = exact(4, 4, 20, 1_000);
    let full = harness.engine.reserve(harness.now, Ticket::new(new.id));
    assert_eq!(full.unwrap_err().code(), "queue_full");
}

/// A way in which a request that has a place, and waits if it says so, leaves the door.
type Exit = (&'static str, fn(&mut Harness));

#[test]
fn a_place_is_given_back_on_every_way_out() {
    fn wait(harness: &mut Harness) {
        harness.submit_reserved(exact(1, 4, 2, 1_000));
    }
    let exits: [Exit; 10] = [
        ("released", |h| h.engine.release(RequestId(1))),
        ("aborted at the door", |h| assert!(h.abort(1))),
        ("rejected", |h| {
            let empty = exact(1, 0, 1, 1_000);
            assert!(h.try_submit_reserved(empty).is_err());
        }),
        ("aborted", |h| {
            wait(h);
            assert!(h.abort(1));
        }),
        ("expired", |h| {
            wait(h);
            h.pass(500);
            assert_eq!(h.client(1).answers[0].finish, Some(Finish::QueueTimeout));
        }),
        ("displaced", |h| {
            wait(h);
            let (mut places, _) = burst(h, "cy", "high", 1);
            let beyond = places.pop().expect("a place");
            h.submit_reserved(exact(beyond.0, 4, 2, 1_000));
            h.receive();
            assert_eq!(h.client(1).answers[0].finish, Some(Finish::Displaced));
            assert!(h.abort(beyond.0));
            for place in places {
                h.engine.release(place);
            }
        }),
        ("scheduled", |h| {
            wait(h);
            assert!(h.step());
            assert_eq!(h.client(1).scheduled, 1);
        }),
        ("failed with the engine, at the door", |h| {
            h.engine.fail_all(h.now);
        }),
        ("failed with the engine", |h| {
            wait(h);
            h.engine.fail_all(h.now);
            h.receive();
            assert_eq!(h.client(1).answers[0].finish, Some(Finish::EngineDead));
        }),
        ("all aborted", |h| {
            wait(h);
            h.engine.abort_all(h.now);
            h.receive();
        }),
    ];
    let mut policy = two_levels();
    policy.classes[0].max_queued_requests = Some(3);
    policy.classes[0].max_queue_time_us = Some(500);
    policy.default_tenant.max_queued = Some(4);
    for (name, exit) in exits {
        let mut harness = engine(policy.clone(), 4);
        let ticket = ticket_for("ann", "low", &exact(1, 4, 2, 1_000));
        harness
            .engine
            .reserve(harness.now, ticket)
            .expect("a place");
        assert_eq!(harness.engine.metrics().queued, 1);
        exit(&mut harness);
        harness.engine.audit().expect(name);
        assert_eq!(harness.engine.metrics().queued, 0, "{name}");
        let free = usize::from(name != "scheduled");
        let places = burst(&mut harness, "ann", "low", 1).0.len();
        assert_eq!(places, 3 + free, "{name}");
        assert_eq!(burst(&mut harness, "ann", "high", 1).0.len(), 1, "{name}");
    }
}

#[test]
fn waiting_tokens_are_bounded_for_the_engine_and_for_a_class() {
    let mut policy = two_levels();
    policy.classes[0].max_queued_tokens = Some(20);
    let mut harness = engine_of(Settings {
        max_num_seqs: 1,
        max_queued_tokens: Some(60),
        policy,
        ..settings()
    });
    harness.submit_for("ann", "low", exact(1, 12, 2, 1_000));
    let submit = |h: &mut Harness, id, class, tokens| {
        let new = exact(id, tokens, 2, 1_000);
        h.try_submit(ticket_for("ann", class, &new), new)
    };
    let full = submit(&mut harness, 2, "low", 9).unwrap_err();
    assert_eq!(full.code(), "queue_full");
    assert!(full.to_string().contains("12 prompt tokens"), "{full}");
    submit(&mut harness, 2, "low", 8).expect("exactly the bound");
    submit(&mut harness, 3, "high", 30).expect("another class");
    let more = submit(&mut harness, 4, "high", 31).unwrap_err();
    assert!(more.to_string().contains("50 prompt tokens"), "{more}");
    harness.step();
    assert_eq!(harness.client(3).scheduled, 1);
    submit(&mut harness, 4, "low", 1).expect_err("those of the class still wait");
    harness.run_to_end();
    submit(&mut harness, 4, "low", 20).expect("nobody waits any more");
}

#[test]
fn the_newest_of_the_lowest_level_makes_room_for_a_higher_one() {
    let mut harness = taken(two_levels(), 4, 3);
    for id in 1..=4 {
        harness.submit_for("ann", "low", exact(id, 4, 2, 1_000));
    }
    let finish = |h: &Harness, id| h.client(id).answers[0].finish;
    let equal = burst(&mut harness, "ann", "low", 1);
    assert_eq!((equal.0.len(), equal.1.code()), (0, "queue_full"));
    // Two places are taken beyond the bound. Who is rejected after all has displaced nobody.
    let new = exact(5, 4, 2, 1_000);
    let ticket = ticket_for("bob", "high", &new);
    let beyond = Ticket {
        id: RequestId(6),
        ..ticket.clone()
    };
    let empty = NewRequest {
        id: beyond.id,
        prompt: Vec::new(),
        ..new.clone()
    };
    for ticket in [ticket, beyond] {
        let reserved = harness.engine.reserve(harness.now, ticket);
        reserved.expect("a place");
    }
    let refused = harness.engine.submit(harness.now, empty).unwrap_err();
    assert_eq!(refused.code(), "empty_prompt");
    assert_eq!(harness.engine.metrics().displaced, 0, "nobody for nothing");
    harness.submit_reserved(new);
    harness.submit_for("bob", "high", exact(7, 4, 2, 1_000));
    for (id, displaced) in [(0, false), (1, false), (2, false), (3, true), (4, true)] {
        let expected = displaced.then_some(Finish::Displaced);
        assert_eq!(finish(&harness, id), expected, "request {id}");
    }
    // Three answers would need a place that only the scheduled one, or one at the door, could give.
    let (places, full) = burst(&mut harness, "bob", "high", 3);
    assert_eq!((places.len(), full.code()), (0, "queue_full"));
    assert_eq!(harness.engine.metrics().displaced, 2, "nobody in vain");
}

#[test]
fn best_effort_makes_room_first_though_its_tenant_is_busy() {
    let mut policy = two_levels();
    policy.classes[0].ttft_target_us = Some(500);
    policy.classes[0].on_doomed = OnDoomed::Relegate;
    policy.classes.push(ClassSettings::new("lasting"));
    policy.default_tenant.max_running = Some(1);
    let mut harness = engine_of(Settings {
        max_num_seqs: 2,
        max_queued_requests: 1,
        policy,
        ..settings()
    });
    for id in 0..2 {
        harness.submit_for("ann", "low", exact(id, 4, 20, 1_000));
    }
    harness.step();
    harness.pass(500);
    harness.step(); // it is its turn, but not its tenant's: it is set aside
    harness.submit_for("ann", "lasting", exact(2, 4, 2, 1_000));
    harness.submit_for("bob", "high", exact(3, 4, 2, 1_000));
    let finish = |id| harness.client(id).answers[0].finish;
    assert_eq!((finish(1), finish(2)), (Some(Finish::Displaced), None));
    harness.engine.audit().expect("consistent books");
    harness.run_to_end();
}

#[test]
fn as_many_tokens_as_it_takes_make_room_for_a_higher_level_or_none_do() {
    let mut harness = engine_of(Settings {
        max_num_seqs: 1,
        max_queued_tokens: Some(60),
        policy: two_levels(),
        ..settings()
    });
    harness.submit_for("di", "low", exact(0, 4, 20, 1_000));
    harness.step();
    for (id, tokens) in [(1, 10), (2, 20), (3, 10)] {
        harness.submit_for("ann", "low", exact(id, tokens, 2, 1_000));
    }
    harness.submit_for("bob", "high", exact(4, 20, 2, 1_000));
    let displaced = |h: &Harness| -> Vec<u64> {
        let displaced = |id: &u64| h.client(*id).answers[0].finish == Some(Finish::Displaced);
        (0..=4).filter(displaced).collect()
    };
    let submit = |h: &mut Harness, id, class, tokens| {
        let new = exact(id, tokens, 2, 1_000);
        h.try_submit(ticket_for("bob", class, &new), new)
    };
    let equal = submit(&mut harness, 5, "low", 1).unwrap_err();
    let beyond = submit(&mut harness, 6, "high", 41).unwrap_err();
    assert_eq!((equal.code(), beyond.code()), ("queue_full", "queue_full"));
    assert_eq!(
        displaced(&harness),
        [],
        "nobody in vain: one token is too much"
    );
    submit(&mut harness, 7, "high", 11).expect("room is made");
    assert_eq!(
        displaced(&harness),
        [2, 3],
        "the newest, as far as it takes"
    );
    assert_eq!(harness.engine.metrics().queued_tokens, 10 + 20 + 11);
    submit(&mut harness, 8, "high", 19).expect("there is room");
    assert_eq!(displaced(&harness), [2, 3], "nobody has to make it");
    submit(&mut harness, 9, "high", 10).expect("room for one and all");
    assert_eq!(displaced(&harness), [1, 2, 3]);
    submit(&mut harness, 10, "high", 1).expect_err("there is nobody less important");
    harness.run_to_end();
}

#[test]
fn a_class_that_nobody_knows_is_refused_and_a_tenant_s_best_class_is_its_best() {
    let mut policy = two_levels();
    policy.sharing = Sharing::Fair;
    let capped = TenantSettings {
        best_class: Some("low".into()),
        ..TenantSettings::default()
    };
    policy.tenants = BTreeMap::from([("ann".into(), capped)]);
    let mut harness = engine(policy, 10);
    let new = exact(1, 4, 2, 1_000);
    let error = harness
        .try_submit(ticket_for("ann", "gold", &new), new)
        .unwrap_err();
    assert_eq!(error.code(), "unknown_class");
    assert!(
        error
            .to_string()
            .contains("gold; the classes are low, high")
    );
    harness.submit_for("ann", "high", exact(1, 4, 2, 1_000));
    harness.submit_for("bob", "high", exact(2, 4, 2, 1_000));
    let levels: Vec<_> = harness
        .engine
        .shares()
        .map(|share| (share.tenant, share.class.map(|class| class.0)))
        .collect();
    assert_eq!(levels, [("ann", Some(0)), ("bob", Some(1))]);
}

#[test]
fn more_answers_than_a_tenant_may_run_are_refused_also_when_they_are_known_late() {
    let mut policy = two_levels();
    policy.default_tenant.max_running = Some(1);
    let mut harness = Harness::new(Settings {
        policy,
        ..settings()
    });
    let mut two = exact(1, 4, 2, 1_000);
    two.sampling.n = 2;
    let honest = ticket_for("ann", "low", &two);
    let modest = Ticket {
        n: 1,
        ..honest.clone()
    };
    for ticket in [honest, modest] {
        let error = harness.try_submit(ticket, two.clone()).unwrap_err();
        assert_eq!(error.code(), "too_many_answers");
        assert_eq!(error.retry_after_us(), None, "it never will");
    }
    assert_eq!(harness.engine.metrics().queued, 0);
}

#[test]
fn a_tenant_above_its_rate_waits_for_it_or_is_told_at_once() {
    let mut policy = two_levels();
    policy.classes[1].max_queue_time_us = Some(SECOND);
    let limited = TenantSettings {
        tokens_per_second: Some(10),
        burst_tokens: Some(10),
        ..TenantSettings::default()
    };
    policy.tenants = BTreeMap::from([("ann".into(), limited)]);
    let mut harness = engine(policy, 100);
    harness.submit_for("ann", "low", exact(1, 30, 10, 1_000));
    while harness.step() {}
    // 40 tokens were used, 10 of them are the burst.
    let idle_since = harness.now;
    harness.submit_for("ann", "low", exact(2, 4, 1, 1_000));
    harness.submit_for("bob", "low", exact(3, 4, 1, 1_000));
    assert!(harness.step(), "others run");
    assert!(!harness.step());
    let wait = harness.engine.wait(harness.now, RequestId(2));
    assert_eq!(wait.expect("it waits").0, WaitReason::Rate);
    let new = exact(4, 4, 1, 1_000);
    let error = harness
        .try_submit(ticket_for("ann", "high", &new), new)
        .unwrap_err();
    assert_eq!(error.code(), "rate_exceeded");
    assert!(error.retry_after_us().expect("later") > SECOND, "{error}");
    let until = harness.engine.next_wake().expect("a timer");
    assert!(until.since_us(idle_since).abs_diff(3 * SECOND) < 1_000);
    harness.now = until;
    assert!(harness.step(), "the rate has caught up");
    assert_eq!(harness.client(2).ended, 1);
}
