//! The gate and the fair queue with a crowd in front of them: 256 run, 100,000 wait in 1,000 flows.
//!
//! Every rule is on: weighted tenants in two classes of one level, sharing by service, queue time
//! timers, TTFT targets, predictions. The executor costs nothing; prompts have 16 tokens but where it
//! is said.

use std::time::{Duration, Instant};

use chairlift_benches::{Bench, VOCAB_SIZE};
use chairlift_core::config::Settings;
use chairlift_core::config::policy::{ClassSettings, Policy, Sharing, TenantSettings};
use chairlift_core::request::{NewRequest, Ticket};
use criterion::{Criterion, criterion_group, criterion_main};

const RUNNING: u32 = 256;
const WAITING: u64 = 100_000;
const FLOWS: u64 = 1_000;
const HOUR_US: u64 = 3_600_000_000;

fn settings(prefix_caching: bool) -> Settings {
    let class = |name: &str, weight| ClassSettings {
        weight,
        max_queue_time_us: Some(HOUR_US),
        ttft_target_us: Some(2 * HOUR_US),
        ..ClassSettings::new(name)
    };
    let weight = |at| TenantSettings {
        weight: (1 + at % 4) as f64,
        ..TenantSettings::default()
    };
    Settings {
        max_num_seqs: RUNNING,
        max_num_batched_tokens: 2_048,
        max_model_len: 1_024,
        num_kv_blocks: RUNNING * 40,
        enable_prefix_caching: prefix_caching,
        max_queued_requests: 1 << 20,
        vocab_size: VOCAB_SIZE,
        policy: Policy {
            classes: vec![class("interactive", 3.0), class("batch", 1.0)],
            tenants: (0..FLOWS).map(|at| (tenant(at), weight(at))).collect(),
            sharing: Sharing::Fair,
            ..Policy::default()
        },
        ..Settings::default()
    }
}

fn tenant(at: u64) -> String {
    format!("tenant-{}", at % FLOWS)
}

fn ticket(request: &NewRequest) -> Ticket {
    let number = request.id.0;
    Ticket {
        tenant: tenant(number),
        class: Some(
            if number.is_multiple_of(2) {
                "batch"
            } else {
                "interactive"
            }
            .into(),
        ),
        ..Ticket::new(request.id)
    }
}

/// A full engine with a crowd: about one of those that run ends in each iteration.
fn crowded(prefix_caching: bool) -> Bench {
    let mut bench = Bench::new(&settings(prefix_caching));
    for number in 0..WAITING + u64::from(RUNNING) {
        let request = bench.request(16, 1 + (number % 511) as u32);
        bench.submit_as(ticket(&request), request);
    }
    for _ in 0..256 {
        bench.step();
    }
    bench
}

/// One iteration; who left is replaced at the end of the crowd, which is not counted.
fn iteration(c: &mut Criterion) {
    let mut group = c.benchmark_group("fair");
    let mut bench = crowded(true);
    group.bench_function("256x100k", |b| {
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                let start = Instant::now();
                let tokens = bench.step();
                spent += start.elapsed();
                assert!(tokens >= RUNNING as usize, "{tokens}");
                while bench.engine.metrics().live < WAITING + u64::from(RUNNING) {
                    let request = bench.request(16, 256);
                    bench.submit_as(ticket(&request), request);
                }
            }
            spent
        });
    });
    group.finish();
}

/// Reserve and submit a prompt of 512 tokens into the crowd, without hashing it; and give it up again,
/// which is not counted.
fn submit(c: &mut Criterion) {
    let mut group = c.benchmark_group("gate");
    let mut bench = crowded(false);
    group.bench_function("submit", |b| {
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                let request = bench.request(512, 256);
                let (id, ticket) = (request.id, ticket(&request));
                let start = Instant::now();
                bench.submit_as(ticket, request);
                spent += start.elapsed();
                bench.abort(id);
            }
            spent
        });
    });
    group.finish();
}

criterion_group!(benches, iteration, submit);
criterion_main!(benches);
