//! When there is memory for a newcomer: promised, foreseen, and what comes of it.

use std::ops::ControlFlow;

use chairlift_core::config::Settings;
use chairlift_core::config::memory::{Backfill, MemoryAdmission, MemorySettings};
use chairlift_core::config::policy::{ClassSettings, Policy};
use chairlift_core::request::NewRequest;
use chairlift_core::sim::{
    Cause, CostProfile, Random as Stream, Record, SimConfig, SimRequest, Workload, simulate,
};

use super::gate::SECOND;
use super::harness::{Harness, Random, exact, request, ticket, ticket_for};
use super::levels::two_levels;
use super::scenarios::settings;

fn policy(admission: MemoryAdmission, overflow: f64) -> Policy {
    Policy {
        memory: MemorySettings {
            admission,
            overflow,
            // What a head sends away again was no error of the forecast.
            backfill: Backfill::Off,
            ..MemorySettings::default()
        },
        ..Policy::default()
    }
}

/// A small pool with room for many rows.
fn tight(admission: MemoryAdmission, num_kv_blocks: u32) -> Settings {
    Settings {
        max_num_seqs: 16,
        num_kv_blocks,
        policy: policy(admission, 0.05),
        ..settings()
    }
}

/// A request whose answers all fit the pool at once; prefixes are often shared.
fn random_request(random: &mut Random, id: u64) -> NewRequest {
    let length = random.within(1, 20);
    let alphabet = random.within(1, 3);
    let prompt = (0..length).map(|_| random.within(1, alphabet)).collect();
    let mut new = request(id, prompt, random.within(1, 25));
    new.sampling.n = random.within(1, 3);
    new.stop.ignore_eos = random.chance(50);
    new
}

/// Random arrivals and aborts; (preemptions, overflowed admissions, all admissions).
fn random_load(admission: MemoryAdmission, seed: u64) -> (u64, u64, u64) {
    let mut random = Random(seed);
    let mut harness = Harness::new(Settings {
        enable_prefix_caching: seed.is_multiple_of(2),
        ..tight(admission, 40)
    });
    harness.most_tokens_per_sample = random.within(1, 3);
    for id in 0..200 {
        let new = random_request(&mut random, id);
        harness.try_submit(ticket(&new), new).expect("a place");
        for _ in 0..random.within(0, 4) {
            harness.step();
        }
        if random.chance(10) {
            harness.abort(id.saturating_sub(random.within(0, 9).into()));
        }
        harness.engine.audit().expect("consistent books");
    }
    harness.run_to_end();
    let memory = harness.engine.memory_metrics();
    let preemptions = harness.engine.metrics().preemptions;
    (preemptions, memory.overflowed, memory.ended)
}

#[test]
fn who_reserves_is_never_preempted_and_the_forecast_seldom_is() {
    let mut totals = [0; 3];
    for seed in 0..20 {
        let modes = [
            MemoryAdmission::Optimistic,
            MemoryAdmission::Reserve,
            MemoryAdmission::Forecast,
        ];
        for (total, mode) in totals.iter_mut().zip(modes) {
            let (preemptions, overflowed, ended) = random_load(mode, seed);
            assert!(ended >= 200 + preemptions, "seed {seed}, {mode:?}: {ended}");
            assert!(
                overflowed >= preemptions,
                "a victim's life is one that overflowed"
            );
            *total += preemptions;
        }
    }
    let [optimistic, reserve, forecast] = totals;
    assert_eq!(reserve, 0, "{totals:?}");
    assert!(optimistic > 500 && forecast < optimistic / 4, "{totals:?}");
}

#[test]
fn answers_that_together_exceed_the_pool_get_it_to_themselves() {
    // Three answers of 4 + 40 tokens need 31 blocks with their prompt shared; there are 16.
    let mut harness = Harness::new(Settings {
        max_model_len: 48,
        ..tight(MemoryAdmission::Reserve, 16)
    });
    let mut large = exact(1, 4, 40, 1_000);
    large.sampling.n = 3;
    harness.submit(exact(2, 4, 4, 1_000));
    harness.step();
    harness.try_submit(ticket(&large), large).expect("a place");
    harness.submit(exact(3, 4, 4, 1_000));
    harness.step();
    assert_eq!(harness.client(1).scheduled, 0, "somebody runs");
    assert_eq!(harness.client(3).scheduled, 0, "it is not its turn");
    harness.run_to_end();
    assert!(harness.engine.metrics().preemptions > 0);
    assert_eq!(harness.client(1).answers[2].tokens.len(), 40);
}

/// An engine that has learned that answers have 40 tokens, with nobody in it.
fn learned(admission: MemoryAdmission, num_kv_blocks: u32) -> Harness {
    let mut harness = Harness::new(Settings {
        max_model_len: 128,
        enable_prefix_caching: false,
        ..tight(admission, num_kv_blocks)
    });
    for id in 0..1_500 {
        harness.submit(ending(id));
        harness.run_to_end();
    }
    harness.clients.clear();
    harness
}

/// Four tokens, and 40 more though it may have 100.
fn ending(id: u64) -> NewRequest {
    let mut new = exact(10_000 + id, 4, 100, 1_000);
    let prompt = new.prompt.clone();
    let mut history = prompt.clone();
    let answer: Vec<u32> = (0..40)
        .map(|_| {
            let token = super::harness::next_token(&history, 0, 1_000);
            history.push(token);
            token
        })
        .collect();
    // Its last token ends it, and is no earlier one.
    if answer[..39].contains(&answer[39]) || answer.contains(&0) {
        return ending(id + 5_000);
    }
    new.stop.stop_token_ids = vec![answer[39]];
    new
}

#[test]
fn the_forecast_admits_as_many_as_the_future_peak_holds() {
    // The bin of 40 holds 40 to 43, so answers are foreseen to have 43. Five that have 21 of them hold
    // 25 tokens each and have 22 to write; n newcomers hold 4 and have 43 to write. Each counts 3 more
    // for its last block. When the five end, all hold 5 * (25 + 3) + n * (4 + 3) + (5 + n) * 22 tokens:
    // 308 for two newcomers, 337 for three. 80 blocks hold 320.
    let mut harness = learned(MemoryAdmission::Forecast, 80);
    for id in 0..5 {
        harness.submit(ending(20_000 + id));
    }
    for _ in 0..21 {
        harness.step();
    }
    for id in 0..9 {
        harness.submit(ending(30_000 + id));
    }
    harness.step();
    let running = harness.engine.metrics().running_sequences;
    assert_eq!(running, 5 + 2);
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().preemptions, 0);
    // Who promises all of max_tokens holds 26 blocks for each.
    let mut harness = learned(MemoryAdmission::Reserve, 80);
    for id in 0..5 {
        harness.submit(ending(20_000 + id));
    }
    harness.step();
    assert_eq!(harness.engine.metrics().running_sequences, 3);
}

/// Requests whose output has a geometric distribution, all there at time 0. Every third is a brief one of
/// another tenant.
fn geometric(random: &mut Stream, count: u32, mean: f64) -> Vec<SimRequest> {
    let requests = (0..count).map(|number| {
        let is_brief = number % 3 == 2;
        let size = if is_brief { 0.2 } else { 1.0 };
        let length = -size * mean * (1.0 - random.uniform()).ln();
        SimRequest {
            arrival_us: 0,
            input_tokens: (size * (50.0 + random.uniform() * 150.0)) as u32,
            output_tokens: (1.0 + length).min(1_000.0) as u32,
            tenant: u32::from(is_brief),
            class: 0,
            priority: 0,
            deadline_us: None,
            abort_us: None,
            prefix: 0..0,
        }
    });
    requests.collect()
}

/// Share of the requests `from..to` during whose life anybody was preempted, as it shows from outside, with
/// guests that go ahead of a head.
fn realised(requests: Vec<SimRequest>, target: f64, parts: &[[usize; 2]]) -> Vec<f64> {
    let mut policy = policy(MemoryAdmission::Forecast, target);
    policy.memory.backfill = Backfill::Easy;
    let settings = Settings {
        max_num_seqs: 128,
        max_num_batched_tokens: 1_024,
        max_model_len: 2_048,
        block_size: 16,
        num_kv_blocks: 400,
        enable_prefix_caching: false,
        max_queued_requests: 100_000,
        policy,
        ..Settings::default()
    };
    let profile = CostProfile {
        t0_s: 1e-3,
        t_seq_s: 0.0,
        t_w_s: 1e-3,
        t_tok_s: 1e-5,
        t_ctx_s: 0.0,
        t_pair_s: 0.0,
        t_sample_s: 0.0,
        t_copy_s: 0.0,
        noise_sigma: 0.0,
        slow_sigma: 0.0,
        slow_s: 0.0,
    };
    let workload = Workload {
        requests,
        tenants: vec!["long".into(), "brief".into()],
        ..Workload::default()
    };
    let config = SimConfig::new(settings, profile);
    let outcome = simulate(&config, &workload, |engine, _| {
        assert!((0.0..=1.0).contains(&engine.memory_metrics().quantile));
        ControlFlow::Continue(())
    })
    .expect("a simulation that can be");
    assert!(outcome.backfilled > 100, "{} guests", outcome.backfilled);
    let with_preemption = outcome.iterations.iter().filter(|i| i.preemptions > 0);
    let preempted_us: Vec<u64> = with_preemption.map(|i| i.start_us).collect();
    let overflowed = |record: &Record| {
        let [from, to] = [record.first_scheduled_us, record.finished_us].map(Option::unwrap);
        let until = |us: u64| preempted_us.partition_point(|&at| at <= us);
        until(from) < until(to - 1)
    };
    let share = |&[from, to]: &[usize; 2]| {
        let records = &outcome.records[from..to];
        let count = records.iter().filter(|&record| overflowed(record)).count();
        count as f64 / records.len() as f64
    };
    parts.iter().map(share).collect()
}

#[test]
fn the_realised_overflow_meets_the_target_and_does_again_after_a_shift() {
    for target in [0.05, 0.1] {
        let mut random = Stream::new(7, Cause::Noise);
        let mut requests = geometric(&mut random, 10_000, 80.0);
        requests.extend(geometric(&mut random, 10_000, 250.0));
        let shares = realised(requests, target, &[[1_000, 10_000], [11_000, 20_000]]);
        for share in shares {
            let error = (share - target).abs();
            assert!(error < 0.02, "target {target}: {share}");
        }
    }
}

#[test]
fn a_higher_level_takes_what_is_only_foreseen_to_be_needed() {
    let mut policy = two_levels();
    policy.memory.admission = MemoryAdmission::Forecast;
    let mut harness = Harness::new(Settings {
        policy,
        ..tight(MemoryAdmission::Forecast, 40)
    });
    // Nothing is known yet, so each may well write all of its 60 tokens: two of them fill 32 blocks.
    for id in 1..=3 {
        harness.submit_for("ann", "low", exact(id, 4, 60, 1_000));
    }
    harness.step();
    assert_eq!(harness.engine.metrics().running_sequences, 2);
    harness.submit_for("ann", "high", exact(4, 4, 60, 1_000));
    harness.step();
    assert_eq!(harness.client(4).scheduled, 1, "there is memory for it now");
    harness.submit_for("ann", "high", exact(5, 4, 60, 1_000));
    harness.step();
    assert_eq!(harness.client(5).scheduled, 1, "the two will fit");
    harness.submit_for("ann", "high", exact(6, 4, 60, 1_000));
    harness.step();
    assert_eq!(harness.client(6).scheduled, 0, "three of them will not");
    harness.run_to_end();
    assert!(harness.engine.metrics().preemptions > 0, "the low gave way");
}

#[test]
fn the_gate_knows_that_memory_is_promised() {
    for (admission, is_rejected) in [
        (MemoryAdmission::Reserve, true),
        (MemoryAdmission::Optimistic, false),
    ] {
        let mut policy = policy(admission, 0.05);
        let mut asking = ClassSettings::new("asking");
        asking.ttft_target_us = Some(30 * SECOND);
        policy.classes.push(asking);
        let mut harness = Harness::new(Settings {
            policy,
            ..tight(admission, 40)
        });
        // Answers of a minute each, of which `reserve` lets two run.
        for id in 1..=5 {
            harness.submit(exact(id, 4, 60, 1_000));
        }
        for _ in 0..70 {
            harness.step_in(SECOND);
        }
        if is_rejected {
            assert_eq!(harness.engine.metrics().running_sequences, 2);
            assert!(harness.engine.metrics().used_blocks < 20);
        }
        let new = exact(9, 4, 60, 1_000);
        let submitted = harness.try_submit(ticket_for("ann", "asking", &new), new);
        let code = submitted.map_err(|error| error.code());
        assert_eq!(code.is_err(), is_rejected, "{admission:?}: {code:?}");
    }
}
