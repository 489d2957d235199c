//! The simulator: exact times, the same records for the same seed, and one outcome for each request.

mod crowd;
mod exact;

use std::ops::ControlFlow;

use chairlift_core::Engine;
use chairlift_core::sim::{IterationView, SimConfig, SimOutcome, SimRequest, Workload, simulate};

fn to_the_end(_: &Engine, _: &IterationView<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn run(config: &SimConfig, workload: &Workload) -> SimOutcome {
    simulate(config, workload, to_the_end).expect("a simulation that can be")
}

fn request(arrival_us: u64, input_tokens: u32, output_tokens: u32) -> SimRequest {
    SimRequest {
        arrival_us,
        input_tokens,
        output_tokens,
        tenant: 0,
        class: 0,
        priority: 0,
        deadline_us: None,
        abort_us: None,
        prefix: 0..0,
    }
}

fn workload(requests: Vec<SimRequest>) -> Workload {
    Workload {
        requests,
        tenants: vec!["a".into(), "b".into()],
        ..Workload::default()
    }
}
