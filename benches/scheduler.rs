//! The scheduler alone: schedule + plan + commit + outputs, per iteration.
//!
//! Blocks of 16, prefix cache on, prompts of 512 tokens that share nothing. The executor costs
//! nothing, so every microsecond here is the engine's own.

use std::time::{Duration, Instant};

use chairlift_benches::Bench;
use chairlift_core::config::Settings;
use chairlift_core::config::memory::MemoryAdmission;
use chairlift_core::config::policy::Sharing;
use chairlift_core::memory::prefix::{BlockHash, extend_chain};
use chairlift_core::request::Ticket;
use criterion::{Criterion, criterion_group, criterion_main};

const PROMPT: u32 = 512;

fn settings(running: u32) -> Settings {
    Settings {
        max_num_seqs: running,
        max_num_batched_tokens: 8_192.max(running),
        max_model_len: 4_096,
        num_kv_blocks: running * 100,
        max_queued_requests: 1 << 20,
        vocab_size: chairlift_benches::VOCAB_SIZE,
        ..Settings::default()
    }
}

/// An engine with `running` sequences that all decode.
fn decoding(mut bench: Bench, running: u32) -> Bench {
    for _ in 0..running {
        let request = bench.request(PROMPT, 1_000);
        bench.submit(request);
    }
    while bench.step() != running as usize {}
    bench
}

/// Iterations in which all decode; the engine is made anew when its sequences near their end.
fn steady_decode(c: &mut Criterion) {
    steady(c, "steady_decode", Bench::new);
}

/// The same with a flight recorder: the difference is what recording costs.
fn steady_decode_recorded(c: &mut Criterion) {
    steady(c, "steady_decode_recorded", Bench::recorded);
}

/// Time of so many iterations of `running` decodes, on engines made anew after `most`.
fn timed(iterations: u64, most: u64, running: u32, make: impl Fn() -> Bench) -> Duration {
    let mut spent = Duration::ZERO;
    let mut left = iterations;
    while left > 0 {
        let mut bench = make();
        let round = left.min(most);
        let start = Instant::now();
        for _ in 0..round {
            assert_eq!(bench.step(), running as usize);
        }
        spent += start.elapsed();
        left -= round;
    }
    spent
}

fn steady(c: &mut Criterion, name: &str, make: fn(&Settings) -> Bench) {
    let mut group = c.benchmark_group(name);
    for running in [1, 64, 256, 1_024] {
        group.bench_function(running.to_string(), |b| {
            b.iter_custom(|iterations| {
                timed(iterations, 900, running, || {
                    decoding(make(&settings(running)), running)
                })
            });
        });
    }
    group.finish();
}

/// One newcomer of 512 tokens: submitted, admitted, prefilled in one chunk, finished by its first token.
fn admit(c: &mut Criterion) {
    let mut group = c.benchmark_group("admit");
    group.bench_function("512", |b| {
        let mut bench = Bench::new(&settings(256));
        b.iter_custom(|iterations| {
            let mut spent = std::time::Duration::ZERO;
            for _ in 0..iterations {
                let request = bench.request(PROMPT, 1);
                let start = Instant::now();
                bench.submit(request);
                assert_eq!(bench.step(), PROMPT as usize);
                spent += start.elapsed();
            }
            spent
        });
    });
    group.bench_function("512_hashing_alone", |b| {
        let tokens: Vec<u32> = (0..PROMPT).collect();
        let root = BlockHash::root([None; 3]);
        let mut chain = Vec::with_capacity(32);
        b.iter(|| {
            chain.clear();
            extend_chain(&mut chain, root, &tokens, 16);
            chain.len()
        });
    });
    group.finish();
}

/// 64 rows with a queue behind them: short answers, so that somebody leaves and joins in most iterations.
fn mixed(c: &mut Criterion) {
    c.bench_function("mixed", |b| {
        let mut bench = Bench::new(&settings(64));
        b.iter_custom(|iterations| {
            let mut spent = std::time::Duration::ZERO;
            for at in 0..iterations {
                if bench.engine.metrics().queued < 8 {
                    for extra in 0..32 {
                        let request = bench.request(PROMPT, 16 + (at as u32 + extra) % 64);
                        bench.submit(request);
                    }
                }
                let start = Instant::now();
                assert!(bench.step() > 0);
                spent += start.elapsed();
            }
            spent
        });
    });
}

/// 64 rows whose sequences outgrow the pool: preemptions and returns all the time.
fn preempt(c: &mut Criterion) {
    c.bench_function("preempt", |b| {
        let mut bench = Bench::new(&Settings {
            num_kv_blocks: 64 * 36,
            ..settings(64)
        });
        b.iter_custom(|iterations| {
            let mut spent = std::time::Duration::ZERO;
            for _ in 0..iterations {
                while bench.engine.metrics().live < 96 {
                    let request = bench.request(PROMPT, 256);
                    bench.submit(request);
                }
                let start = Instant::now();
                assert!(bench.step() > 0);
                spent += start.elapsed();
            }
            spent
        });
        let metrics = bench.engine.metrics();
        let share = metrics.preemptions as f64 / metrics.iterations as f64;
        println!("preempt: {share:.3} preemptions an iteration");
    });
}

/// 256 sequences decode and the forecast holds the next one back: what looking ahead costs while all
/// write.
fn forecast(c: &mut Criterion) {
    let mut settings = settings(257);
    settings.policy.memory.admission = MemoryAdmission::Forecast;
    // What is not known yet is reckoned with to `max_tokens`: 95 blocks each, and no more.
    settings.num_kv_blocks = 256 * 95;
    c.bench_function("forecast", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, 900, 256, || {
                let mut bench = Bench::new(&settings);
                for _ in 0..257 {
                    let request = bench.request(PROMPT, 1_000);
                    bench.submit(request);
                }
                while bench.step() != 256 {}
                bench
            })
        });
    });
}

/// 256 sequences of 16 tenants decode with everything on: fair shares, the forecast that holds the next one
/// back, the governor, blocks on the host and the flight recorder.
fn everything_on(c: &mut Criterion) {
    let mut settings = settings(257);
    settings.policy.sharing = Sharing::Fair;
    settings.policy.memory.admission = MemoryAdmission::Forecast;
    settings.policy.pace.iteration_target_us = Some(60_000_000);
    settings.num_kv_blocks = 256 * 95;
    settings.num_host_kv_blocks = 256;
    c.bench_function("everything_on", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, 900, 256, || {
                let mut bench = Bench::recorded(&settings);
                for at in 0..257 {
                    let request = bench.request(PROMPT, 1_000);
                    let ticket = Ticket {
                        tenant: format!("tenant {}", at % 16),
                        ..Ticket::new(request.id)
                    };
                    bench.submit_as(ticket, request);
                }
                while bench.step() != 256 {}
                bench
            })
        });
    });
}

/// 256 decodes, a head that does not fit, and 16 behind it that fit and may not go ahead of it: they are
/// looked at in every iteration.
fn blocked_head(c: &mut Criterion) {
    const RUNNING: u32 = 256;
    let settings = Settings {
        max_num_seqs: 2 * RUNNING,
        max_model_len: 300_000,
        ..settings(RUNNING)
    };
    c.bench_function("blocked_head", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, 700, RUNNING, || {
                let mut bench = Bench::new(&settings);
                for _ in 0..RUNNING {
                    let request = bench.request(PROMPT, 1_000);
                    bench.submit(request);
                }
                while bench.step() != RUNNING as usize {}
                let head = bench.request(290_000, 1);
                bench.submit(head);
                for _ in 0..16 {
                    let request = bench.request(PROMPT, 3_000);
                    bench.submit(request);
                }
                for _ in 0..200 {
                    bench.step();
                }
                bench
            })
        });
    });
}

criterion_group!(
    benches,
    steady_decode,
    steady_decode_recorded,
    admit,
    mixed,
    preempt,
    forecast,
    everything_on,
    blocked_head
);
criterion_main!(benches);
