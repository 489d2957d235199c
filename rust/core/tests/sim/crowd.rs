//! Many requests in too little memory: what holds whatever happens to whom.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{Join, OnTimeout, Order, Policy, Price, Sharing};
use chairlift_core::request::Finish;
use chairlift_core::sim::{
    Cause, CostProfile, GapProbe, Iteration, Outcome, Random, Record, SimConfig, SimOutcome,
    SimRequest, Workload, simulate,
};

use crate::{request, run, workload};

/// 200 requests of two tenants in a pool that is too small for them.
fn crowd(seed: u64) -> (SimConfig, Workload) {
    let mut random = Random::new(seed, Cause::Aborts);
    let mut within = |low: u64, high: u64| low + random.bits() % (high - low + 1);
    let mut arrival_us = 0;
    let requests = (0..200).map(|_| {
        arrival_us += within(0, 110_000);
        SimRequest {
            tenant: within(0, 1) as u32,
            ..request(arrival_us, within(1, 300) as u32, within(1, 200) as u32)
        }
    });
    let workload = workload(requests.collect());
    let settings = Settings {
        max_num_seqs: 16,
        max_num_batched_tokens: 256,
        max_model_len: 1_024,
        num_kv_blocks: 100,
        max_queued_requests: 24,
        enable_prefix_caching: false,
        ..Settings::default()
    };
    let config = SimConfig {
        seed,
        keep_gaps: true,
        service_interval: Some(10),
        ..SimConfig::new(settings, CostProfile::GPU_8B)
    };
    (config, workload)
}

#[test]
fn steps_that_are_planned_ahead_run_one_after_the_other() {
    let (mut config, workload) = crowd(3);
    let alone = run(&config, &workload);
    config.settings.max_in_flight_steps = 2;
    let outcome = run(&config, &workload);
    assert_eq!(outcome, run(&config, &workload));
    for pair in outcome.iterations.windows(2) {
        assert!(pair[1].start_us >= pair[0].start_us + pair[0].duration_us);
    }
    let mut served = 0;
    for (record, request) in outcome.records.iter().zip(&workload.requests) {
        if let Outcome::Ended(_) = record.outcome {
            assert_eq!(record.output_tokens, request.output_tokens);
            served += 1;
        }
    }
    assert!(served > 100, "{served}");
    let tokens = |outcome: &SimOutcome| -> u32 {
        outcome.iterations.iter().map(Iteration::num_tokens).sum()
    };
    assert_ne!(
        tokens(&outcome),
        tokens(&alone),
        "what was dropped ran, too"
    );
}

#[test]
fn the_same_seed_gives_the_same_records() {
    let (config, mut workload) = crowd(5);
    let rehearsal = run(&config, &workload);
    workload.add_aborts(&rehearsal.records, 0.1, 5);
    let first = run(&config, &workload);
    assert_eq!(first, run(&config, &workload));
    let other = SimConfig { seed: 6, ..config };
    assert_ne!(first.iterations, run(&other, &workload).iterations);
}

#[test]
fn slow_seconds_last_and_leave_the_other_noise_be() {
    // One answer at a time with breaks between, so that each iteration has a twin in the steady run.
    let requests = (0..40).map(|at| request(at * 60_000_000, 16, 400));
    let workload = workload(requests.collect());
    let on = |seed, slow_sigma, slow_s| {
        let profile = CostProfile {
            slow_sigma,
            slow_s,
            ..CostProfile::GPU_8B
        };
        let config = SimConfig {
            seed,
            ..SimConfig::new(Settings::default(), profile)
        };
        run(&config, &workload)
    };
    let steady = on(7, 0.0, 0.0);
    assert_eq!(steady, on(7, 0.0, 5.0));
    let slow = on(7, 0.3, 5.0);
    assert_eq!(slow, on(7, 0.3, 5.0));
    assert_ne!(slow, on(8, 0.3, 5.0));

    let logs: Vec<f64> = slow
        .iterations
        .iter()
        .zip(&steady.iterations)
        .map(|(slow, steady)| (slow.duration_us as f64 / steady.duration_us as f64).ln())
        .collect();
    assert_eq!(logs.len(), 40 * 400);
    // Answers are a minute apart, which is long: their means are draws of one distribution.
    let means: Vec<f64> = logs
        .chunks(400)
        .map(|answer| answer.iter().sum::<f64>() / 400.0)
        .collect();
    let spread = (means.iter().map(|mean| mean.powi(2)).sum::<f64>() / 40.0).sqrt();
    assert!((0.18..0.42).contains(&spread), "{spread}");
    // Within one nothing leaps, as the noise of single iterations, the same in both, is not in it.
    for answer in logs.chunks(400) {
        assert!(
            answer
                .windows(2)
                .all(|pair| (pair[1] - pair[0]).abs() < 0.1)
        );
    }
}

#[test]
fn every_request_has_one_outcome() {
    for seed in 0..10 {
        let (config, mut workload) = crowd(seed);
        let rehearsal = run(&config, &workload);
        workload.add_aborts(&rehearsal.records, 0.1, seed);
        let outcome = run(&config, &workload);

        let mut counts = BTreeMap::new();
        for (request, record) in workload.requests.iter().zip(&outcome.records) {
            *counts.entry(record.outcome.name()).or_insert(0) += 1;
            assert_eq!(record.arrival_us, request.arrival_us);
            assert!(record.finished_us.is_some(), "seed {seed}: {record:?}");
            let whole = record.output_tokens == request.output_tokens;
            assert_eq!(record.outcome == Outcome::Ended(Finish::Eos), whole);
            let ran = record.first_scheduled_us.is_some();
            assert!(ran || record.output_tokens == 0);
        }
        assert_eq!(counts.values().sum::<i32>(), 200);
        let kinds: Vec<&str> = counts.keys().copied().collect();
        assert_eq!(kinds, ["abort", "queue_full", "stop"], "seed {seed}");

        let records = || outcome.records.iter();
        let came_again = records().any(|record| {
            let later_us = record.submitted_us - record.arrival_us;
            later_us == 1_000_000 && record.outcome == Outcome::Ended(Finish::Eos)
        });
        assert!(came_again, "seed {seed}: no retry succeeded");
        assert!(
            records().any(|record| record.preemptions > 0),
            "seed {seed}: no preemption"
        );
        assert!(outcome.recomputed_tokens > 0);

        let tokens: u32 = records().map(|record| record.output_tokens).sum();
        let answered = records()
            .filter(|record| record.first_token_us.is_some())
            .count();
        assert_eq!(outcome.gaps.len(), tokens as usize - answered);
        let preempted: u32 = outcome.iterations.iter().map(|line| line.preemptions).sum();
        assert_eq!(
            preempted,
            records().map(|record| record.preemptions).sum::<u32>()
        );
    }
}

#[test]
fn who_gives_up_is_gone_at_that_moment() {
    let (config, mut workload) = crowd(3);
    let rehearsal = run(&config, &workload);
    workload.add_aborts(&rehearsal.records, 0.2, 3);
    let outcome = run(&config, &workload);
    let mut phases = [0; 2];
    for (request, record) in workload.requests.iter().zip(&outcome.records) {
        if record.outcome != Outcome::Ended(Finish::Abort) {
            continue;
        }
        let moment = request.arrival_us + request.abort_us.expect("it was to give up");
        assert_eq!(record.finished_us, Some(moment));
        phases[usize::from(record.first_scheduled_us.is_some())] += 1;
    }
    assert!(
        phases.iter().all(|&count| count > 0),
        "waiting, running: {phases:?}"
    );
}

#[test]
fn service_is_counted_once_whatever_is_computed_again() {
    let (config, workload) = crowd(4);
    let config = SimConfig {
        settings: Settings {
            max_queued_requests: 1_000,
            ..config.settings
        },
        ..config
    };
    let outcome = run(&config, &workload);
    assert!(outcome.recomputed_tokens > 0);
    let last = outcome.services.last().expect("samples");
    for tenant in 0..2 {
        let requests = workload
            .requests
            .iter()
            .filter(|request| request.tenant == tenant);
        let due: u32 = requests
            .map(|request| request.input_tokens + 2 * request.output_tokens)
            .sum();
        let got = last.priced_tokens[tenant as usize];
        assert!((got - f64::from(due)).abs() < 1e-6, "{got} of {due}");
    }
    let busy: u64 = outcome.iterations.iter().map(|line| line.duration_us).sum();
    let shared: f64 = last.device_us.iter().sum();
    assert!((shared - busy as f64).abs() < 1.0, "{shared} of {busy}");
    let waves = outcome.iterations.len() / 10;
    assert_eq!(outcome.services.len(), waves + 1);
}

#[test]
fn an_observer_sees_every_iteration_and_can_break_off() {
    let (config, workload) = crowd(1);
    let mut seen = Vec::new();
    let outcome = simulate(&config, &workload, |engine, view| {
        assert_eq!(engine.metrics().iterations as usize, seen.len() + 1);
        assert_eq!(view.plan.num_tokens(), view.iteration.num_tokens() as usize);
        seen.push(*view.iteration);
        if seen.len() == 100 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    let outcome = outcome.expect("breaking off is no error");
    assert_eq!(outcome.iterations, seen);
    assert_eq!(seen.len(), 100);
    let (done, open): (Vec<_>, Vec<_>) = outcome
        .records
        .iter()
        .partition(|record| record.finished_us.is_some());
    assert!(!done.is_empty());
    assert!(
        open.iter()
            .all(|record| record.outcome == Outcome::Unfinished)
            && !open.is_empty()
    );
}

/// Policies that differ in one thing each.
fn policies() -> Vec<Policy> {
    let with = |change: fn(&mut Policy)| {
        let mut policy = Policy::default();
        change(&mut policy);
        policy
    };
    vec![
        with(|policy| policy.sharing = Sharing::Fair),
        with(|policy| {
            policy.sharing = Sharing::Fair;
            policy.price = Price::DeviceTime;
        }),
        with(|policy| policy.order = Order::Shortest),
        with(|policy| policy.order = Order::Footprint),
        with(|policy| policy.join = Join::Static),
        with(|policy| {
            policy.join = Join::Window {
                size: 8,
                delay_us: 100_000,
            }
        }),
        with(|policy| policy.classes[0].max_queue_time_us = Some(500_000)),
        with(|policy| {
            policy.classes[0].max_queue_time_us = Some(500_000);
            policy.classes[0].on_timeout = OnTimeout::Promote;
        }),
        with(|policy| policy.classes[0].ttft_target_us = Some(700_000)),
    ]
}

#[test]
fn under_every_policy_the_books_agree_and_everybody_has_an_end() {
    let (config, workload) = crowd(7);
    for policy in policies() {
        let told = format!("{policy:?}");
        let config = SimConfig {
            settings: Settings {
                policy,
                ..config.settings.clone()
            },
            ..config.clone()
        };
        let outcome = simulate(&config, &workload, |engine, view| {
            engine.audit().expect("consistent books");
            let tenants = view.services.tenants().iter();
            let waiting: u32 = tenants.map(|tenant| tenant.waiting).sum();
            assert_eq!(u64::from(waiting), engine.metrics().queued, "{told}");
            ControlFlow::Continue(())
        });
        let outcome = outcome.expect("a simulation that can be");
        let open = |record: &&Record| record.outcome == Outcome::Unfinished;
        assert_eq!(outcome.records.iter().find(open), None, "{told}");
        let served = outcome
            .records
            .iter()
            .filter(|record| record.output_tokens > 0);
        assert!(served.count() > 50, "{told}");
    }
}

#[test]
fn fair_queuing_keeps_its_bound_at_every_iteration() {
    let gap = |sharing| {
        let (config, workload) = crowd(8);
        let mut workload = workload;
        for request in &mut workload.requests {
            // One tenant asks for far more.
            request.tenant = u32::from(request.input_tokens > 280);
        }
        let settings = Settings {
            policy: Policy {
                sharing,
                ..Policy::default()
            },
            max_queued_requests: 1_000,
            ..config.settings.clone()
        };
        let pool_tokens = f64::from(settings.num_kv_blocks * settings.block_size);
        let config = SimConfig { settings, ..config };
        let mut probe = GapProbe::new(vec![1.0, 1.0], |tenant| tenant.priced_tokens);
        let bound = 2.0 * f64::max(300.0, 2.0 * pool_tokens);
        simulate(&config, &workload, |_, view| {
            let gap = probe.observe(view.services);
            assert!(
                sharing == Sharing::Fcfs || gap <= bound,
                "{gap} over {bound}"
            );
            ControlFlow::Continue(())
        })
        .expect("a simulation that can be");
        probe.max_gap()
    };
    let (fair, fcfs) = (gap(Sharing::Fair), gap(Sharing::Fcfs));
    assert!(0.0 < fair && 2.0 * fair < fcfs, "fair {fair}, fcfs {fcfs}");
}

/// The same crowd, whose blocks may go to the host, where a copied block takes so long.
fn crowd_with_host(num_host_kv_blocks: u32, t_copy_s: f64) -> (SimConfig, Workload) {
    let (mut config, workload) = crowd(3);
    config.settings.enable_prefix_caching = true;
    config.settings.num_host_kv_blocks = num_host_kv_blocks;
    config.profile.t_copy_s = t_copy_s;
    (config, workload)
}

#[test]
fn blocks_on_the_host_save_computing_under_memory_pressure() {
    let recomputed = |num_host_kv_blocks| {
        let (config, workload) = crowd_with_host(num_host_kv_blocks, 50e-6);
        run(&config, &workload).recomputed_tokens
    };
    let (without, with) = (recomputed(0), recomputed(400));
    assert!(without > 1_000, "{without}");
    assert!(10 * with < without, "{with} with a host, {without} without");
}

#[test]
fn copies_that_cost_too_much_are_learned_and_not_made_any_more() {
    // A block of 16 tokens takes 512 us to compute, and there and back must take less.
    let copies = |t_copy_s| {
        let (config, workload) = crowd_with_host(400, t_copy_s);
        let (mut early, mut late, mut steps) = (0, 0, 0);
        simulate(&config, &workload, |_, view| {
            steps += 1;
            let copies = view.plan.num_host_copies();
            let when = if steps <= 400 { &mut early } else { &mut late };
            *when += copies;
            ControlFlow::Continue(())
        })
        .expect("a simulation that can be");
        assert!(steps > 1_000, "{steps}");
        (early, late)
    };
    let (early, late) = copies(50e-6);
    assert!(early > 0 && late > 100, "{early}, then {late}");
    let (early, late) = copies(5e-3);
    assert!(early > 0, "it has to be tried");
    assert!(late * 20 < early, "{early}, then {late}");
}
