//! Python bindings of Chairlift: the private module `chairlift._core`.
//!
//! Two threads meet here. The scheduler thread (`scheduler_thread`) owns the core and never attaches to
//! Python; the executor thread (`executor_thread`) is a Python thread that runs steps. Plans go over in
//! memory that both can see (`plan_memory`, `plan_views`), results come back as arrays (`step_result`),
//! and clients take everything an iteration has to say in one batch (`delivery`, `batch`, `client`),
//! also from another process (`link`).
//!
//! Beside all that, `simulate` runs the core under a virtual clock, and `flight_log` lets it live again
//! what `log_writer` wrote down.
//!
//! No Python call and no drop of a Python object happens under a lock.

mod answer;
mod batch;
mod client;
mod command;
mod cost_model;
mod delivery;
mod engine;
mod errors;
mod executor_thread;
mod flight_log;
mod groups;
mod iterations;
mod kernels;
mod link;
mod log_writer;
mod metrics;
mod numpy;
mod plan_memory;
mod plan_views;
mod policy;
mod record;
mod request;
mod sampler;
mod scheduler_thread;
mod sim_arrays;
mod simulate;
mod step_result;

/// Requests come and go on one thread and are read on others, at random ages: with the system's allocator a
/// crowded queue's iterations took a tenth longer.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The extension module.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::batch::{Delta, Ended, OutputBatch};
    #[pymodule_export]
    use crate::client::{EngineClient, Reservation};
    #[pymodule_export]
    use crate::cost_model::fit_cost_model;
    #[pymodule_export]
    use crate::engine::{EngineCore, check_policy, check_settings, settings_json};
    #[pymodule_export]
    use crate::flight_log::{FlightLog, RecordedRun};
    #[pymodule_export]
    use crate::groups::{iteration_bounds, size_bounds, time_bounds};
    #[pymodule_export]
    use crate::kernels::{
        AttentionBatch, AttentionLayer, add_rms_norm, attention_forward, kernel_pool,
        limit_instruction_set, silu_and_mul, use_openmp,
    };
    #[pymodule_export]
    use crate::request::Request;
    #[pymodule_export]
    use crate::sampler::Sampler;
    #[pymodule_export]
    use crate::simulate::{capacity, gpu_8b, simulate};
}
