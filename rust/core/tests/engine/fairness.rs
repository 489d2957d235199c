//! Who is served how much: shares, bounds, lifts, refunds.
//!
//! Service is counted here from what clients received, not from the engine's own books, which are
//! compared with it.

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Policy, Price, Sharing, TenantSettings};
use chairlift_core::request::{RequestId, Ticket};

use super::harness::{Harness, exact, runs_ahead, ticket_for};
use super::scenarios::settings;

const ITERATIONS: u32 = 10_000;
/// Thousandths of a token's price.
const INPUT: u64 = 1_000;
const CACHED: u64 = 100;
const OUTPUT: u64 = 2_000;

/// A policy of classes and tenants with these weights.
fn fair(classes: &[(&str, f64)], tenants: &[(&str, f64)]) -> Policy {
    let class = |&(name, weight): &(&str, f64)| ClassSettings {
        weight,
        ..ClassSettings::new(name)
    };
    let tenant = |&(name, weight): &(&str, f64)| {
        let settings = TenantSettings {
            weight,
            ..TenantSettings::default()
        };
        (name.to_string(), settings)
    };
    Policy {
        classes: classes.iter().map(class).collect(),
        tenants: tenants.iter().map(tenant).collect(),
        sharing: Sharing::Fair,
        ..Policy::default()
    }
}

fn engine(policy: Policy) -> Harness {
    Harness::new(Settings {
        num_kv_blocks: 32,
        enable_prefix_caching: false,
        policy,
        ..settings()
    })
}

/// Somebody who always has `depth` requests waiting.
struct Source {
    ticket: Ticket,
    prompt_tokens: u32,
    output_tokens: u32,
    depth: usize,
    requests: Vec<u64>,
}

fn source(tenant: &str, class: &str, prompt_tokens: u32, output_tokens: u32) -> Source {
    let any = exact(0, 1, 1, 2);
    Source {
        ticket: ticket_for(tenant, class, &any),
        prompt_tokens,
        output_tokens,
        depth: 8,
        requests: Vec::new(),
    }
}

impl Source {
    fn top_up(&mut self, harness: &mut Harness) {
        let recent = self.requests.iter().rev().take(2 * self.depth);
        let waiting = recent.filter(|&&id| harness.client(id).scheduled == 0);
        for _ in waiting.count()..self.depth {
            let id = harness.clients.len() as u64;
            let new = exact(id, self.prompt_tokens, self.output_tokens, 1_000);
            let ticket = Ticket {
                id: RequestId(id),
                ..self.ticket.clone()
            };
            harness.try_submit(ticket, new).expect("accepted");
            self.requests.push(id);
        }
    }

    /// Tokens served, at their prices.
    fn served(&self, harness: &Harness) -> u64 {
        let clients = self.requests.iter().map(|&id| harness.client(id));
        let scheduled = clients.filter(|client| client.scheduled > 0);
        let price = |client: &super::client::Client| {
            let prompt = client.request.prompt.len() as u64;
            prompt * INPUT + client.answers[0].tokens.len() as u64 * OUTPUT
        };
        scheduled.map(price).sum()
    }
}

/// Runs so many iterations with all sources backlogged; a token takes 3 us.
fn run(
    harness: &mut Harness,
    sources: &mut [Source],
    iterations: u32,
    mut check: impl FnMut(&Harness, &[Source]),
) {
    for _ in 0..iterations {
        for source in &mut *sources {
            source.top_up(harness);
        }
        assert!(harness.schedule());
        harness.now.0 += 3 * harness.plan.num_tokens() as u64;
        harness.commit();
        check(harness, sources);
    }
}

/// What the engine's books say a tenant was served.
fn booked(harness: &Harness, tenant: &str) -> u64 {
    let shares = harness.engine.shares();
    shares
        .filter(|share| share.tenant == tenant)
        .map(|share| share.served)
        .sum()
}

fn assert_ratio(left: u64, right: u64, expected: f64, tolerance: f64) {
    let ratio = left as f64 / right as f64;
    assert!(
        (ratio / expected - 1.0).abs() <= tolerance,
        "{left} to {right} is {ratio}, not {expected}"
    );
}

#[test]
fn backlogged_tenants_are_served_by_their_weights_in_both_prices() {
    for price in [Price::default(), Price::DeviceTime] {
        for weight in [1.0, 3.0] {
            let mut policy = fair(&[("all", 1.0)], &[("ann", 1.0), ("bob", weight)]);
            policy.price = price;
            let mut harness = engine(policy);
            let mut sources = [source("ann", "all", 12, 2), source("bob", "all", 3, 7)];
            run(&mut harness, &mut sources, ITERATIONS, |_, _| {});
            let [ann, bob] = ["ann", "bob"].map(|tenant| booked(&harness, tenant));
            assert!(ann > 1_000_000, "it really was served: {ann}");
            assert_ratio(bob, ann, weight, 0.01);
        }
    }
}

#[test]
fn the_books_agree_with_what_clients_received() {
    let mut harness = engine(fair(&[("all", 1.0)], &[("ann", 1.0), ("bob", 3.0)]));
    let mut sources = [source("ann", "all", 12, 2), source("bob", "all", 3, 7)];
    run(&mut harness, &mut sources, 500, |harness, sources| {
        for source in sources {
            let tenant = &source.ticket.tenant;
            assert_eq!(booked(harness, tenant), source.served(harness), "{tenant}");
        }
    });
    assert_ne!(booked(&harness, "ann"), 0);
}

#[test]
fn device_time_is_shared_out_whole() {
    let mut policy = fair(&[("all", 1.0)], &[("ann", 1.0), ("bob", 1.0)]);
    policy.price = Price::DeviceTime;
    let mut harness = engine(policy);
    let mut sources = [source("ann", "all", 12, 2), source("bob", "all", 3, 7)];
    run(&mut harness, &mut sources, 500, |_, _| {});
    harness.run_to_end();
    let booked = booked(&harness, "ann") + booked(&harness, "bob");
    let device = harness.engine.metrics().device_us * 1_000;
    assert_eq!(harness.engine.metrics().preemptions, 0, "nothing ran twice");
    assert_ratio(booked, device, 1.0, 0.001);
}

#[test]
fn the_gap_between_backlogged_tenants_never_exceeds_the_bound() {
    let mut harness = engine(fair(&[("all", 1.0)], &[("ann", 1.0), ("bob", 1.0)]));
    let mut sources = [source("ann", "all", 30, 1), source("bob", "all", 2, 12)];
    let capacity = u64::from(harness.settings.num_kv_blocks * harness.settings.block_size);
    let bound = 2 * (INPUT * 30).max(OUTPUT * capacity);
    let mut widest = 0;
    run(&mut harness, &mut sources, ITERATIONS, |harness, _| {
        let gap = booked(harness, "ann").abs_diff(booked(harness, "bob"));
        assert!(gap <= bound, "{gap} is above {bound}");
        widest = widest.max(gap);
    });
    assert!(widest > 0 && booked(&harness, "ann") > 20 * bound);
}

#[test]
fn backlogged_classes_are_served_by_their_weights() {
    for price in [Price::default(), Price::DeviceTime] {
        // The tenants' weights count within a class only.
        let mut policy = fair(&[("one", 1.0), ("three", 3.0)], &[("ann", 5.0)]);
        policy.price = price;
        let mut harness = engine(policy);
        let mut sources = [source("ann", "one", 12, 2), source("bob", "three", 3, 7)];
        run(&mut harness, &mut sources, ITERATIONS, |_, _| {});
        let [ann, bob] = ["ann", "bob"].map(|tenant| booked(&harness, tenant));
        assert_ratio(bob, ann, 3.0, 0.01);
    }
}

#[test]
fn a_reload_changes_the_weights_of_those_that_run_and_wait() {
    let mut harness = engine(fair(&[("all", 1.0)], &[("ann", 1.0), ("bob", 1.0)]));
    let mut sources = [source("ann", "all", 12, 2), source("bob", "all", 3, 7)];
    run(&mut harness, &mut sources, 2_000, |_, _| {});
    let before = ["ann", "bob"].map(|tenant| booked(&harness, tenant));
    assert_ratio(before[1], before[0], 1.0, 0.02);
    let heavier = fair(&[("all", 1.0)], &[("ann", 1.0), ("bob", 3.0)]);
    for source in &mut sources {
        // Nobody comes after the reload.
        source.depth = 300;
        source.top_up(&mut harness);
        source.depth = 0;
    }
    harness.engine.reload(harness.now, &heavier).expect("legal");
    run(&mut harness, &mut sources, 300, |_, _| {});
    assert!(harness.engine.shares().all(|share| share.backlog > 0));
    let after = ["ann", "bob"].map(|tenant| booked(&harness, tenant));
    assert_ratio(after[1] - before[1], after[0] - before[0], 3.0, 0.05);
}

#[test]
fn the_users_of_a_tenant_share_equally_whatever_they_send() {
    let mut harness = engine(fair(&[("all", 1.0)], &[]));
    let mut sources = [source("ann", "all", 12, 2), source("ann", "all", 3, 7)];
    for (source, user) in sources.iter_mut().zip(["eager", "modest"]) {
        source.ticket.user = Some(user.into());
    }
    sources[0].depth = 24;
    sources[1].depth = 4;
    run(&mut harness, &mut sources, ITERATIONS / 4, |_, _| {});
    let [eager, modest] = [0, 1].map(|at| sources[at].served(&harness));
    assert_ratio(eager, modest, 1.0, 0.01);
}

#[test]
fn a_newcomer_is_neither_credited_nor_punished_while_others_wait() {
    let mut harness = engine(fair(&[("all", 1.0)], &[]));
    let mut sources = [source("ann", "all", 8, 4), source("bob", "all", 8, 4)];
    run(&mut harness, &mut sources[..1], 1_500, |_, _| {});
    let before = sources[0].served(&harness);
    run(&mut harness, &mut sources, 400, |_, _| {});
    let ann = sources[0].served(&harness) - before;
    assert!(ann < before / 2, "a credit would show");
    assert_ratio(sources[1].served(&harness), ann, 1.0, 0.1);
}

#[test]
fn a_newcomer_to_an_empty_queue_begins_where_the_last_one_left() {
    // Named tenants stay while they are idle, others are forgotten but for their counter.
    for named in [&[("ann", 1.0), ("bob", 1.0)][..], &[]] {
        let mut harness = engine(fair(&[("all", 1.0)], named));
        let mut sources = [source("bob", "all", 8, 4), source("ann", "all", 8, 4)];
        run(&mut harness, &mut sources[1..], 1_500, |_, _| {});
        harness.run_to_end();
        let before = sources[1].served(&harness);
        run(&mut harness, &mut sources, 400, |_, _| {});
        let ann = sources[1].served(&harness) - before;
        assert!(ann < before / 2, "a credit would show");
        assert_ratio(sources[0].served(&harness), ann, 1.0, 0.1);
    }
}

#[test]
fn cached_prompt_tokens_are_charged_at_a_discount() {
    let mut harness = Harness::new(Settings {
        policy: fair(&[("all", 1.0)], &[("ann", 1.0)]),
        ..settings()
    });
    let first = exact(1, 16, 2, 1_000);
    let mut second = first.clone();
    second.id = RequestId(2);
    harness.submit_for("ann", "all", first);
    harness.run_to_end();
    let before = booked(&harness, "ann");
    assert_eq!(before, 16 * INPUT + 2 * OUTPUT);
    harness.submit_for("ann", "all", second);
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().cached_tokens, 12);
    let second = booked(&harness, "ann") - before;
    assert_eq!(second, 12 * CACHED + 4 * INPUT + 2 * OUTPUT);
}

#[test]
fn an_abort_gives_back_exactly_what_did_not_run() {
    if runs_ahead() {
        return;
    }
    for predicted in [false, true] {
        let mut policy = fair(&[("all", 1.0)], &[("ann", 1.0)]);
        policy.charge_predicted_output = predicted;
        let mut harness = Harness::new(Settings {
            max_num_batched_tokens: 10,
            policy,
            ..settings()
        });
        harness.submit_for("ann", "all", exact(1, 35, 9, 1_000));
        assert_eq!(booked(&harness, "ann"), 0, "who waits owes nothing");
        harness.step();
        harness.step();
        assert!(booked(&harness, "ann") >= 35 * INPUT, "charged ahead");
        harness.abort(1);
        assert_eq!(booked(&harness, "ann"), 20 * INPUT, "two chunks ran");
        harness.submit_for("ann", "all", exact(2, 10, 9, 1_000));
        harness.step();
        harness.step();
        assert!(harness.schedule());
        harness.abort(2);
        let expected = 20 * INPUT + 10 * INPUT + 2 * OUTPUT;
        assert_eq!(booked(&harness, "ann"), expected, "with a step in flight");
        harness.commit();
        assert_eq!(booked(&harness, "ann"), expected);
    }
}

#[test]
fn a_preemption_in_the_middle_of_a_prefill_refunds_it_and_nothing_is_charged_twice() {
    if runs_ahead() {
        return;
    }
    let mut policy = fair(
        &[("low", 1.0), ("high", 1.0)],
        &[("ann", 1.0), ("bob", 1.0)],
    );
    policy.classes[1].level = 1;
    let mut harness = Harness::new(Settings {
        max_num_seqs: 1,
        max_num_batched_tokens: 10,
        enable_prefix_caching: false,
        policy,
        ..settings()
    });
    harness.submit_for("ann", "low", exact(1, 35, 4, 1_000));
    harness.step();
    assert_eq!(booked(&harness, "ann"), 35 * INPUT);
    harness.submit_for("bob", "high", exact(2, 5, 1, 1_000));
    harness.step();
    assert_eq!(harness.engine.metrics().preemptions, 1);
    assert_eq!(booked(&harness, "ann"), 10 * INPUT, "one chunk ran");
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().recomputed_tokens, 10);
    assert_eq!(booked(&harness, "ann"), 35 * INPUT + 4 * OUTPUT);
    assert_eq!(booked(&harness, "bob"), 5 * INPUT + OUTPUT);
}

#[test]
fn preemptions_for_memory_and_charges_ahead_leave_the_totals_as_they_are() {
    for caching in [false, true] {
        for predicted in [false, true] {
            let mut policy = fair(&[("all", 1.0)], &[("ann", 1.0)]);
            policy.charge_predicted_output = predicted;
            let mut harness = Harness::new(Settings {
                max_num_seqs: 8,
                max_num_batched_tokens: 12,
                num_kv_blocks: 20,
                enable_prefix_caching: caching,
                policy,
                ..settings()
            });
            for id in 0..30 {
                harness.submit_for("ann", "all", exact(id, 10, 30, 1_000));
            }
            harness.run_to_end();
            let metrics = harness.engine.metrics();
            assert!(metrics.preemptions > 10, "{metrics:?}");
            assert_eq!(booked(&harness, "ann"), 30 * (10 * INPUT + 30 * OUTPUT));
        }
    }
}

#[test]
fn idle_tenants_that_nobody_named_are_forgotten() {
    let mut harness = engine(fair(&[("all", 1.0)], &[("ann", 1.0)]));
    for id in 0..50 {
        let new = exact(id, 4, 2, 1_000);
        let ticket = Ticket {
            user: Some(format!("user {id}")),
            ..ticket_for(&format!("tenant {}", id % 7), "all", &new)
        };
        harness.try_submit(ticket, new).expect("accepted");
    }
    assert_eq!(harness.engine.shares().count(), 7);
    harness.run_to_end();
    assert_eq!(harness.engine.shares().count(), 0);
}
