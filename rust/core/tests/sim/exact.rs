//! A few requests, of which everything can be told beforehand: times, cached tokens, capacity, refusals.

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Policy};
use chairlift_core::request::Finish;
use chairlift_core::sim::{
    CostProfile, Outcome, SimConfig, SimError, SimRequest, Stretch, Workload, capacity, simulate,
};

use crate::{request, run, to_the_end, workload};

/// Every term of the cost counts, and noise does not.
const EXACT: CostProfile = CostProfile {
    t0_s: 1e-3,
    t_seq_s: 0.5e-3,
    t_w_s: 2e-3,
    t_tok_s: 1e-3,
    t_ctx_s: 0.1e-3,
    t_pair_s: 0.01e-3,
    t_sample_s: 0.0,
    t_copy_s: 0.0,
    noise_sigma: 0.0,
    slow_sigma: 0.0,
    slow_s: 0.0,
};

#[test]
fn a_scenario_computed_by_hand() {
    let settings = Settings {
        max_num_seqs: 2,
        max_num_batched_tokens: 4,
        max_model_len: 64,
        ..Settings::default()
    };
    let config = SimConfig {
        keep_gaps: true,
        ..SimConfig::new(settings, EXACT)
    };
    let requests = vec![
        request(0, 3, 2),
        request(2_000, 2, 1),
        request(20_000, 1, 1),
    ];
    let outcome = run(&config, &workload(requests));

    // 1: prefill of 3: 1 + 0.5 + 3 + 0.01 * 3 * 1.5 ms.
    // 2: a decode at context 4, a prefill of 2: 1 + 2 * 0.5 + 3 + 0.1 * 4 + 0.01 * 2 * 1 ms.
    // 3: a prompt of one token counts as a decode: 1 + 0.5 + 2 + 0.1 ms.
    let lines: Vec<_> = outcome
        .iterations
        .iter()
        .map(|line| {
            (
                line.start_us,
                line.duration_us,
                line.num_decodes,
                line.prefill_tokens,
            )
        })
        .collect();
    let expected = [
        (0, 4_545, 0, 3),
        (4_545, 5_420, 1, 2),
        (20_000, 3_600, 1, 0),
    ];
    assert_eq!(lines, expected);
    let times: Vec<_> = outcome
        .records
        .iter()
        .map(|record| {
            (
                record.first_scheduled_us,
                record.first_token_us,
                record.finished_us,
            )
        })
        .collect();
    let at = |a, b, c| (Some(a), Some(b), Some(c));
    let expected = [
        at(0, 4_545, 9_965),
        at(4_545, 9_965, 9_965),
        at(20_000, 23_600, 23_600),
    ];
    assert_eq!(times, expected);
    let ends = outcome.records.iter().map(|record| record.outcome);
    assert!(ends.eq([Outcome::Ended(Finish::Eos); 3]));
    assert_eq!(outcome.gaps.len(), 1);
    assert_eq!((outcome.gaps[0].request, outcome.gaps[0].us), (0, 5_420));
    assert_eq!(outcome.records[0].max_gap_us, 5_420);
    assert_eq!(outcome.end_us, 23_600);
}

#[test]
fn prompts_share_what_the_trace_says() {
    let settings = Settings {
        max_num_batched_tokens: 4_096,
        ..Settings::default()
    };
    let config = SimConfig::new(settings, CostProfile::GPU_8B);
    let sharing = |at: u64, prefix| SimRequest {
        prefix,
        ..request(at * 1_000_000, 1_300, 2)
    };
    let workload = Workload {
        // Blocks of 512: 7 8 9, then 7 8 10, then 8 7 with a rest of its own, then nothing.
        prefix_hashes: vec![7, 8, 9, 7, 8, 10, 8, 7],
        prefix_block_tokens: 512,
        ..workload(vec![
            sharing(0, 0..3),
            sharing(1, 3..6),
            sharing(2, 6..8),
            sharing(3, 0..0),
            sharing(4, 0..3),
        ])
    };
    let outcome = run(&config, &workload);
    let cached: Vec<u32> = outcome
        .records
        .iter()
        .map(|record| record.cached_tokens)
        .collect();
    // The last: all full blocks of 16.
    assert_eq!(cached, [0, 1_024, 0, 0, 1_296]);
}

#[test]
fn capacity_is_the_rate_at_which_a_burst_is_served() {
    let settings = Settings {
        max_num_seqs: 1,
        max_queued_requests: 1,
        ..Settings::default()
    };
    let profile = CostProfile {
        t_sample_s: 0.0,
        t_copy_s: 0.0,
        t0_s: 0.01,
        t_seq_s: 0.0,
        t_w_s: 0.0,
        t_tok_s: 0.0,
        t_ctx_s: 0.0,
        t_pair_s: 0.0,
        noise_sigma: 0.0,
        slow_sigma: 0.0,
        slow_s: 0.0,
    };
    let config = SimConfig::new(settings, profile);
    // Two iterations each: 50 a second, though they come one a second and give up.
    let requests = (0..5_000).map(|at| SimRequest {
        abort_us: Some(1),
        ..request(at * 1_000_000, 8, 2)
    });
    let rate = capacity(&config, &workload(requests.collect()), to_the_end);
    let rate = rate.expect("a simulation that can be").expect("to the end");
    assert!((rate - 50.0).abs() < 1e-9, "{rate}");
}

#[test]
fn timers_fire_in_the_middle_of_a_step() {
    let policy = Policy {
        classes: vec![ClassSettings {
            max_queue_time_us: Some(30_000),
            ..ClassSettings::new("default")
        }],
        ..Policy::default()
    };
    let settings = Settings {
        max_num_seqs: 1,
        policy,
        ..Settings::default()
    };
    let requests = vec![
        request(0, 200, 1), // one step of more than 200 ms
        SimRequest {
            deadline_us: Some(20_000),
            ..request(10_000, 8, 1)
        },
        request(12_000, 8, 1),
    ];
    let outcome = run(&SimConfig::new(settings, EXACT), &workload(requests));
    assert!(outcome.iterations[0].duration_us > 200_000);
    let ends: Vec<_> = outcome
        .records
        .iter()
        .map(|record| (record.outcome.name(), record.finished_us))
        .collect();
    let first_end = Some(outcome.iterations[0].duration_us);
    let expected = [
        ("stop", first_end),
        ("deadline_missed", Some(30_000)),
        ("queue_timeout", Some(42_000)),
    ];
    assert_eq!(ends, expected);
    let scheduled = outcome
        .records
        .iter()
        .map(|record| record.first_scheduled_us);
    assert!(scheduled.eq([Some(0), None, None]));
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    let config = SimConfig::new(Settings::default(), CostProfile::GPU_8B);
    let refused = |config: &SimConfig, workload: &Workload| {
        simulate(config, workload, to_the_end)
            .expect_err("it cannot be")
            .to_string()
    };
    let unsorted = workload(vec![request(5, 1, 1), request(4, 1, 1)]);
    assert_eq!(
        refused(&config, &unsorted),
        "request 1 of the workload: arrival_us is 4; it must be not before the one ahead of it"
    );
    let silent = workload(vec![request(0, 1, 0)]);
    assert_eq!(
        refused(&config, &silent),
        "request 0 of the workload: output_tokens is 0; it must be at least 1"
    );
    let stranger = workload(vec![SimRequest {
        tenant: 2,
        ..request(0, 1, 1)
    }]);
    assert_eq!(
        refused(&config, &stranger),
        "request 0 of the workload: tenant is 2; it must be below their number, 2"
    );
    let endless = SimConfig::new(
        Settings::default(),
        CostProfile {
            t_tok_s: f64::NAN,
            ..EXACT
        },
    );
    let error = simulate(&endless, &workload(Vec::new()), to_the_end);
    assert!(matches!(
        error,
        Err(SimError::Profile {
            field: "t_tok_s",
            ..
        })
    ));
    let unsteady = CostProfile {
        slow_s: 4_000.0,
        ..EXACT
    };
    assert_eq!(
        refused(
            &SimConfig::new(Settings::default(), unsteady),
            &workload(Vec::new())
        ),
        "profile.slow_s is 4000; it must be from 0 to 1 (t0_s, t_w_s and slow_s: to 3600)"
    );
    for (stretches, message) in [
        (
            [(5, 1.0), (4, 1.0)],
            "stretch 1 of the slowness: start_us is 4; it must be not before the one ahead of it",
        ),
        (
            [(5, 0.0), (6, 1.0)],
            "stretch 0 of the slowness: factor is 0; it must be above 0 and at most 1000",
        ),
        (
            [(5, 1.0), (6, f64::NAN)],
            "stretch 1 of the slowness: factor is NaN; it must be above 0 and at most 1000",
        ),
        (
            [(5, 1.0), (6, f64::INFINITY)],
            "stretch 1 of the slowness: factor is inf; it must be above 0 and at most 1000",
        ),
    ] {
        let config = recorded(Settings::default(), EXACT, &stretches);
        let error = simulate(&config, &workload(Vec::new()), to_the_end).expect_err(message);
        assert_eq!(error.to_string(), message);
        assert_eq!(error.code(), "invalid_slowness");
    }
}

fn recorded(settings: Settings, profile: CostProfile, stretches: &[(u64, f64)]) -> SimConfig {
    let stretches = stretches
        .iter()
        .map(|&(start_us, factor)| Stretch { start_us, factor });
    SimConfig {
        slowness: Some(stretches.collect()),
        ..SimConfig::new(settings, profile)
    }
}

#[test]
fn iterations_take_as_long_as_the_stretch_says_in_which_they_begin() {
    // The recording stands in place of these slow seconds.
    let profile = CostProfile {
        slow_sigma: 0.5,
        slow_s: 1.0,
        ..EXACT
    };
    let stretches = [(50_000, 2.0), (150_000, 0.5), (190_000, 3.0)];
    let workload = workload(vec![request(0, 1, 60), request(10_000, 3, 50)]);
    for max_in_flight_steps in [1, 2] {
        let settings = Settings {
            max_in_flight_steps,
            ..Settings::default()
        };
        let plain = run(&SimConfig::new(settings.clone(), EXACT), &workload);
        let slow = run(&recorded(settings.clone(), profile, &stretches), &workload);
        assert_eq!(
            plain,
            run(&recorded(settings.clone(), profile, &[]), &workload)
        );

        let mut begun_in = [0; 4];
        let mut last_us = 0;
        // Alike in both, as the second prompt comes before any stretch begins.
        assert_eq!(slow.iterations.len(), plain.iterations.len());
        for (slow, plain) in slow.iterations.iter().zip(&plain.iterations) {
            let stretch = stretches
                .iter()
                .filter(|(start_us, _)| *start_us <= slow.start_us)
                .count();
            begun_in[stretch] += 1;
            let factor = [1.0, 2.0, 0.5, 3.0][stretch];
            // Whole microseconds in both.
            let off_us = slow.duration_us as f64 - factor * plain.duration_us as f64;
            assert!(off_us.abs() <= 2.0, "{slow:?}: {factor} times {plain:?}");
            assert!(slow.start_us >= last_us);
            last_us = slow.start_us + slow.duration_us;
        }
        assert!(begun_in.iter().all(|&count| count > 0), "{begun_in:?}");

        // A burst has no time in common with the recording.
        let steady = SimConfig::new(settings.clone(), EXACT);
        let recorded = recorded(settings, EXACT, &[(0, 2.0)]);
        assert_eq!(
            capacity(&recorded, &workload, to_the_end),
            capacity(&steady, &workload, to_the_end)
        );
    }
}
