//! Steady state allocates nothing.

use chairlift_core::config::Settings;
use chairlift_core::config::memory::MemoryAdmission;
use chairlift_core::config::policy::{Policy, Price, Sharing};
use chairlift_core::output::OutputBatch;
use chairlift_core::predict::iteration_time::Coefficients;

use super::harness::{EOS, Harness, request};

#[test]
fn a_steady_decode_step_allocates_nothing() {
    steady(Harness::new, 64, 1);
}

#[test]
fn nor_do_siblings() {
    steady(Harness::new, 32, 2);
}

#[test]
fn nor_does_a_recorded_one() {
    steady(Harness::recorded, 64, 1);
}

#[test]
fn nor_does_one_with_every_policy_on() {
    let with_policies = |settings: Settings| {
        let mut policy = Policy {
            sharing: Sharing::Fair,
            price: Price::DeviceTime,
            ..Policy::default()
        };
        policy.memory.admission = MemoryAdmission::Forecast;
        policy.pace.iteration_target_us = Some(1_000_000);
        policy.classes[0].max_queue_time_us = Some(1_000_000_000);
        Harness::recorded(Settings {
            policy,
            max_num_seqs: 65,
            num_kv_blocks: 1_025, // 64 sequences of 240 tokens, as forecast, and not one more
            cost_model: Some(Coefficients {
                t_tok_us: 1.0,
                most_tokens: 1_000.0,
                ..Coefficients::default()
            }),
            ..settings
        })
    };
    steady(with_policies, 65, 1);
}

/// Counts allocations while `requests` of `n` answers each decode together.
fn steady(make: fn(Settings) -> Harness, requests: u64, n: u32) {
    let mut harness = make(Settings {
        max_num_seqs: 64,
        num_kv_blocks: 64 * 32,
        max_model_len: 512,
        vocab_size: 1_000,
        ..Settings::default()
    });
    for id in 0..requests {
        let mut new = request(id, vec![7 + id as u32; 40], 200);
        new.stop.ignore_eos = true;
        new.sampling.n = n;
        harness.submit(new);
    }
    while harness.engine.metrics().output_tokens < 64 {
        assert!(harness.step());
    }
    // A few steps so that the output batch has its size and siblings have parted.
    for _ in 0..3 {
        assert!(harness.step());
    }
    let (mut steps, mut tokens) = (0, 0);
    let mut results = harness.execute();
    let mut allocations = 0;
    let mut batch = OutputBatch::default();
    harness.engine.take_outputs(&mut batch);
    let mut log = Vec::with_capacity(1 << 16);
    while steps < 100 {
        let allocated = allocation_counter::measure(|| {
            assert!(harness.engine.schedule(harness.now, &mut harness.plan));
        });
        assert_eq!(harness.plan.num_seqs(), 64);
        // Any tokens will do; the executor's own memory is not what is measured.
        results.token_ids.fill(EOS + 1);
        // The oldest in flight.
        let step = harness.plan.step + 1 - u64::from(super::STEPS_IN_FLIGHT);
        let now = harness.now;
        let committed = allocation_counter::measure(|| {
            harness
                .engine
                .commit(now, step, &results)
                .expect("results that fit");
        });
        let taken = allocation_counter::measure(|| {
            harness.engine.take_outputs(&mut batch);
            if let Some(recorder) = harness.engine.recorder() {
                log = recorder.take(std::mem::take(&mut log));
            }
        });
        tokens += batch.token_ids.len();
        batch.clear();
        if steps >= 2 {
            // The first two give the two output batches their size.
            allocations += allocated.count_total + committed.count_total + taken.count_total;
        }
        steps += 1;
    }
    assert_eq!(
        tokens, 6_400,
        "every step decoded everyone, across block borders"
    );
    assert_eq!(allocations, 0, "allocations in 98 steady steps of 64");
}
