//! The simulator: the production core under a virtual clock.
//!
//! Nothing of the scheduler is modelled: [`simulate`] drives an [`Engine`] as the scheduler thread does
//! and only replaces what is outside of it.
//! - The clock jumps from event to event: arrivals, aborts, retries and the end of the step in flight,
//!   and whenever the engine wants to be called ([`Engine::next_wake`]), also in the middle of a step
//!   (`world`).
//! - The executor takes the time that a [`CostProfile`] says, with noise, on a machine that may be slow
//!   for some seconds, by chance or as it was recorded (`slowness`).
//! - The model ends an answer at its true length ([`Workload`]), which no policy can see.
//! - Clients that are rejected try once more, and some give up (`clients`).
//!
//! It is pure and deterministic: the same configuration, workload and seed give the same records. Each
//! cause of chance has a random stream of its own ([`Random`]), so that policies are compared under
//! the same chances.

mod clients;
mod fairness;
mod profile;
mod random;
mod record;
mod service;
mod slowness;
mod workload;
mod world;

use std::ops::ControlFlow;

pub use fairness::GapProbe;
pub use profile::CostProfile;
pub use random::{Cause, Random};
pub use record::{Gap, Iteration, IterationView, Outcome, Record, ServiceSample, SimOutcome};
pub use service::{Services, TenantService};
pub use slowness::Stretch;
pub use workload::{SimRequest, Workload};

use crate::Engine;
use crate::config::Settings;
use crate::config::memory::{Backfill, MemoryAdmission};
use crate::config::policy::Policy;
use crate::error::ConfigError;
use world::World;

/// Requests that [`capacity`] is measured with.
pub const CAPACITY_REQUESTS: usize = 4_000;

/// What is simulated, but for the requests.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Engine limits and policy. The vocabulary's size is the simulator's own.
    pub settings: Settings,
    /// What iterations cost.
    pub profile: CostProfile,
    /// Seed of every random stream.
    pub seed: u64,
    /// `max_tokens` of every request, or its true output length where that is larger.
    pub max_tokens: u32,
    /// Whether a rejected client tries once more, after the Retry-After that it was told.
    pub retry: bool,
    /// Whether [`SimOutcome::gaps`] is kept.
    pub keep_gaps: bool,
    /// Iterations between two [`SimOutcome::services`]; `None` keeps none.
    pub service_interval: Option<u32>,
    /// How slow the machine was, instead of the profile's slow seconds: as predicted before the first
    /// stretch, and as in the last one after it.
    pub slowness: Option<Vec<Stretch>>,
}

impl SimConfig {
    /// `settings` on `profile` with seed 0, `max_tokens` 1,024 and retries.
    pub fn new(settings: Settings, profile: CostProfile) -> Self {
        Self {
            settings,
            profile,
            seed: 0,
            max_tokens: 1_024,
            retry: true,
            keep_gaps: false,
            service_interval: None,
            slowness: None,
        }
    }
}

/// A simulation that cannot be.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SimError {
    /// The settings are invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A number of the cost profile is not allowed.
    #[error("profile.{field} is {value}; it must be {allowed}")]
    Profile {
        /// The number.
        field: &'static str,
        /// Its value, as text.
        value: String,
        /// What is allowed, as a phrase.
        allowed: &'static str,
    },
    /// A stretch of a recorded slowness is not allowed.
    #[error("stretch {stretch} of the slowness: {field} is {value}; it must be {allowed}")]
    Slowness {
        /// Its position.
        stretch: usize,
        /// The number.
        field: &'static str,
        /// Its value, as text.
        value: String,
        /// What is allowed, as a phrase.
        allowed: &'static str,
    },
    /// A request of the workload is not allowed.
    #[error("request {request} of the workload: {field} is {value}; it must be {allowed}")]
    Workload {
        /// Its position.
        request: usize,
        /// The number.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed, as a phrase.
        allowed: String,
    },
    /// Requests wait that the engine neither runs nor wants to be woken for. The engine is at fault.
    #[error("{live} requests wait at {now_us} us, but the engine runs nothing and sets no timer")]
    Stuck {
        /// Requests that have not ended.
        live: u64,
        /// When, in microseconds.
        now_us: u64,
    },
}

impl SimError {
    /// Stable identifier of the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Config(error) => error.code(),
            Self::Profile { .. } => "invalid_profile",
            Self::Slowness { .. } => "invalid_slowness",
            Self::Workload { .. } => "invalid_workload",
            Self::Stuck { .. } => "engine_stuck",
        }
    }
}

/// Serves the workload to its end, or until `observe`, which sees every iteration when its results
/// have been committed, breaks off.
pub fn simulate<F>(
    config: &SimConfig,
    workload: &Workload,
    observe: F,
) -> Result<SimOutcome, SimError>
where
    F: FnMut(&Engine, &IterationView<'_>) -> ControlFlow<()>,
{
    World::new(config, workload)?.run(observe)
}

/// Requests a second that continuous FCFS with optimistic memory serves when the first [`CAPACITY_REQUESTS`] are all there at
/// time 0: the capacity of profile, pool and workload, whatever the policy and the recorded slowness of
/// `config` are.
///
/// `None` if `observe` broke off, or there are no requests.
pub fn capacity<F>(
    config: &SimConfig,
    workload: &Workload,
    observe: F,
) -> Result<Option<f64>, SimError>
where
    F: FnMut(&Engine, &IterationView<'_>) -> ControlFlow<()>,
{
    let mut policy = Policy::default();
    policy.memory.backfill = Backfill::Off; // strictly first come, first served
    policy.memory.admission = MemoryAdmission::Optimistic;
    let config = SimConfig {
        settings: Settings {
            policy,
            max_queued_requests: CAPACITY_REQUESTS as u32,
            max_queued_tokens: None,
            ..config.settings.clone()
        },
        slowness: None,
        ..config.clone()
    };
    let burst = workload.burst(CAPACITY_REQUESTS);
    let outcome = simulate(&config, &burst, observe)?;
    let ended = outcome.records.iter().map(|record| record.finished_us);
    let makespan = ended.collect::<Option<Vec<u64>>>();
    let makespan_us = makespan.and_then(|ends| ends.into_iter().max());
    Ok(makespan_us.map(|us| burst.requests.len() as f64 / (us.max(1) as f64 / 1e6)))
}
