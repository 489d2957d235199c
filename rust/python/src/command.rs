//! What other threads may ask of the scheduler thread: one channel, one enum.
//!
//! Commands are owned values; whoever wants an answer sends the end of a one-shot channel along. A
//! command whose answer channel is dropped is a scheduler that has ended, which the asker sees as a
//! disconnected channel and never as a hang.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use chairlift_core::config::policy::Policy;
use chairlift_core::iteration::commit::StepResults;
use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::request::{NewRequest, RequestId, Ticket};

use crate::errors::Refusal;
use crate::groups::{Groups, Wait};
use crate::metrics::EngineMetrics;
use crate::plan_memory::PlanLease;

/// Receives what is expected any moment: polls for so long, letting others run, and only then sleeps,
/// until `limit` if there is one.
///
/// Waking a thread whose core has gone idle costs tens of microseconds on a virtual machine, more than
/// a whole iteration of the scheduler.
pub fn recv_soon<T>(
    receiver: &Receiver<T>,
    patience: Duration,
    limit: Option<Instant>,
) -> Result<T, RecvTimeoutError> {
    let patient_until = Instant::now() + patience;
    let end = limit.map_or(patient_until, |limit| limit.min(patient_until));
    loop {
        match receiver.try_recv() {
            Ok(value) => return Ok(value),
            Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) if Instant::now() < end => thread::yield_now(),
            Err(TryRecvError::Empty) => break,
        }
    }
    match limit {
        None => receiver.recv().map_err(RecvTimeoutError::from),
        Some(limit) => receiver.recv_timeout(limit.saturating_duration_since(Instant::now())),
    }
}

/// Where an answer goes.
pub type Reply<T> = SyncSender<T>;

/// One plan set and the vectors its results come back in: they travel together, to the executor
/// thread and back, so that neither is allocated again.
pub struct Step {
    /// The plan, in memory that Python can see.
    pub lease: PlanLease,
    /// Filled by the executor thread.
    pub results: StepResults,
}

impl Step {
    /// The plan.
    pub fn plan(&self) -> &StepPlan {
        self.lease.plan()
    }
}

/// What the scheduler thread is asked to do.
pub enum Command {
    /// Reserve a place at the door.
    Reserve(Ticket, Reply<Result<(), Refusal>>),
    /// Give a reservation back.
    Release(RequestId),
    /// Submit a request whose place is reserved.
    Submit(Box<NewRequest>, Reply<Result<(), Refusal>>),
    /// Reserve a place and submit in the same breath.
    SubmitAtOnce(Box<(Ticket, NewRequest)>, Reply<Result<(), Refusal>>),
    /// Reserve and submit one after the other until there is no room or one is refused; answers how
    /// many were taken, and the refusal.
    Feed(Vec<(Ticket, NewRequest)>, Reply<(usize, Option<Refusal>)>),
    /// End a request, whatever its state.
    Abort(RequestId),
    /// End every request.
    AbortAll,
    /// Go over to another policy.
    Reload(Box<Policy>, Reply<Result<(), Refusal>>),
    /// Counters and gauges.
    Metrics(Reply<EngineMetrics>),
    /// The same by class and tenant.
    Groups(Reply<Groups>),
    /// Why a request waits, and for how long it has waited for what.
    Wait(RequestId, Reply<Option<Wait>>),
    /// The executor ran a step.
    StepDone(Step),
    /// The executor raised; the message is for the requests of that step.
    StepFailed(Step, String),
    /// The executor thread has ended, with the reason.
    ExecutorGone(String),
    /// End everything.
    Shutdown,
}
