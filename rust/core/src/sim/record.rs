//! What a simulation returns.

use crate::iteration::plan::StepPlan;
use crate::request::Finish;
use crate::sim::service::Services;

/// How a request went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The simulation was broken off before it ended, or before it came.
    #[default]
    Unfinished,
    /// It was accepted and ended so; a client that gives up between two tries aborts as well.
    Ended(Finish),
    /// It was refused, also when it tried again; the code of the last error.
    Rejected(&'static str),
}

impl Outcome {
    /// A stable name: the finish reason, the code of the rejection, or `unfinished`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unfinished => "unfinished",
            Self::Ended(finish) => finish.reason(),
            Self::Rejected(code) => code,
        }
    }
}

/// One request's life; the `i`-th record is that of the `i`-th request. Times are microseconds from the
/// start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// When it first came.
    pub arrival_us: u64,
    /// When it came last: later than `arrival_us` if it was rejected and tried again.
    pub submitted_us: u64,
    /// First time in a plan.
    pub first_scheduled_us: Option<u64>,
    /// First output token.
    pub first_token_us: Option<u64>,
    /// When it ended or was rejected for good.
    pub finished_us: Option<u64>,
    /// How.
    pub outcome: Outcome,
    /// Time to first token, from `submitted_us`, that the gate predicted.
    pub predicted_ttft_us: Option<u64>,
    /// Longest gap between two of its tokens.
    pub max_gap_us: u64,
    /// Times it was rejected.
    pub rejections: u32,
    /// Times it was preempted.
    pub preemptions: u32,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Output tokens that its client received.
    pub output_tokens: u32,
}

/// One iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iteration {
    /// When it started, in microseconds.
    pub start_us: u64,
    /// How long it took, in microseconds.
    pub duration_us: u64,
    /// Sequences with one query token.
    pub num_decodes: u32,
    /// Tokens of the others.
    pub prefill_tokens: u32,
    /// Sequences in it.
    pub sequences: u32,
    /// Sequences that hold a row while it runs, in it or not.
    pub running: u32,
    /// Sequences that wait while it runs.
    pub waiting: u32,
    /// Blocks that nobody uses while it runs.
    pub free_blocks: u32,
    /// Sequences that were preempted for it.
    pub preemptions: u32,
}

impl Iteration {
    /// Tokens in it.
    pub fn num_tokens(&self) -> u32 {
        self.num_decodes + self.prefill_tokens
    }
}

/// Time between two output tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The request, by position.
    pub request: u32,
    /// Microseconds; saturates at over an hour.
    pub us: u32,
}

/// What every tenant had received when an iteration had ended.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceSample {
    /// When, in microseconds.
    pub at_us: u64,
    /// Tokens at their prices, by tenant.
    pub priced_tokens: Vec<f64>,
    /// Microseconds of the device, by tenant.
    pub device_us: Vec<f64>,
}

/// What an observer sees of an iteration whose results have just been committed.
#[derive(Clone, Copy, Debug)]
pub struct IterationView<'a> {
    /// Its line in the log.
    pub iteration: &'a Iteration,
    /// Its plan.
    pub plan: &'a StepPlan,
    /// What each tenant has received so far, and who waits.
    pub services: &'a Services,
}

/// Everything there is to know of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimOutcome {
    /// One for each request, in the order of the workload.
    pub records: Vec<Record>,
    /// Every iteration.
    pub iterations: Vec<Iteration>,
    /// Every gap, in order of time; empty unless asked for.
    pub gaps: Vec<Gap>,
    /// Service of the tenants from time to time and at the end; empty unless asked for.
    pub services: Vec<ServiceSample>,
    /// Tokens that were computed, lost in a preemption, and had to be computed again.
    pub recomputed_tokens: u64,
    /// Sequences admitted ahead of the first of the queue.
    pub backfilled: u64,
    /// Times that the promised start of the first of the queue was put off.
    pub forecast_slips: u64,
    /// When the last thing happened, in microseconds.
    pub end_us: u64,
}
