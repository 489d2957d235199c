//! The simulator: simulated iterations, the engine's work, the clients' and the log included.
//!
//! 64 run all the time, on prompts of 512 tokens and answers of 200, so somebody leaves and joins in
//! one iteration of three. The time is that of one iteration: 20 us are 50,000 iterations a second.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use chairlift_core::config::Settings;
use chairlift_core::sim::{CostProfile, SimConfig, SimRequest, Workload, simulate};
use criterion::{Criterion, criterion_group, criterion_main};

const REQUESTS: u32 = 2_000;

fn workload() -> Workload {
    let requests = (0..REQUESTS).map(|at| SimRequest {
        arrival_us: 0,
        input_tokens: 512,
        output_tokens: 100 + at * 7 % 200,
        tenant: 0,
        class: 0,
        priority: 0,
        deadline_us: None,
        abort_us: None,
        prefix: 0..0,
    });
    Workload {
        requests: requests.collect(),
        tenants: vec!["a".into()],
        ..Workload::default()
    }
}

fn simulator(c: &mut Criterion) {
    let settings = Settings {
        max_num_seqs: 64,
        enable_prefix_caching: false,
        num_kv_blocks: CostProfile::GPU_8B_BLOCKS,
        ..Settings::default()
    };
    let config = SimConfig::new(settings, CostProfile::GPU_8B);
    let workload = workload();
    let mut group = c.benchmark_group("simulate");
    group.bench_function("64", |b| {
        b.iter_custom(|iterations| {
            let (mut spent, mut done) = (Duration::ZERO, 0);
            while done < iterations {
                let start = Instant::now();
                let outcome = simulate(&config, &workload, |_, _| ControlFlow::Continue(()));
                spent += start.elapsed();
                done += outcome.expect("it can be").iterations.len() as u64;
            }
            spent.mul_f64(iterations as f64 / done as f64)
        });
    });
    group.finish();
}

criterion_group!(benches, simulator);
criterion_main!(benches);
