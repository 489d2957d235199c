//! What other threads may ask of the scheduler thread: one channel, one enum.
//!
//! What a client says is a [`Message`]: plain data, the same from this process and from another. A
//! question bears the number of its call, under which the outbox will hold the [`Answer`]. A question
//! that a scheduler never answers because it has ended is answered by the outbox being closed, never
//! by a hang.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use chairlift_core::config::policy::Policy;
use chairlift_core::iteration::commit::StepResults;
use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::request::{NewRequest, RequestId, Ticket, Time};
use serde::{Deserialize, Serialize};

use crate::cost_model::Learned;
use crate::errors::Refusal;
use crate::groups::{Groups, Wait};
use crate::iterations::Recent;
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

/// One plan set and the vectors its results come back in: they travel together, to the executor
/// thread and back, so that neither is allocated again.
pub struct Step {
    /// The plan, in memory that Python can see.
    pub lease: PlanLease,
    /// Filled by the executor thread.
    pub results: StepResults,
    /// Rows of the CUDA graph that was replayed for the step, padding included; 0 if none was.
    pub graph_rows: u32,
}

impl Step {
    /// The plan.
    pub fn plan(&self) -> &StepPlan {
        self.lease.plan()
    }
}

/// Numbers a question of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CallId(pub u64);

/// What a client says.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// It wants an answer.
    Ask(CallId, Question),
    /// It wants none.
    Tell(Order),
}

/// A request on its way: its deadline is told from its arrival, since clocks differ.
#[derive(Serialize, Deserialize)]
pub struct Submission {
    /// The request, without a deadline.
    pub request: NewRequest,
    /// Microseconds from its arrival to its deadline.
    pub time_left_us: Option<u64>,
}

impl Submission {
    /// The request, as of its arrival.
    pub fn arrived(self, now: Time) -> NewRequest {
        let deadline = self.time_left_us;
        NewRequest {
            deadline: deadline.map(|left_us| Time(now.0.saturating_add(left_us))),
            ..self.request
        }
    }
}

/// What has an answer.
#[derive(Serialize, Deserialize)]
pub enum Question {
    /// Reserve a place at the door: [`Answer::Reserved`].
    Reserve(Ticket),
    /// Submit a request whose place is reserved: [`Answer::Done`].
    Submit(Box<Submission>),
    /// Reserve a place and submit in the same breath: [`Answer::Done`].
    SubmitAtOnce(Box<(Ticket, Submission)>),
    /// Reserve and submit one after the other until there is no room or one is refused:
    /// [`Answer::Taken`].
    Feed(Vec<(Ticket, Submission)>),
    /// Go over to another policy: [`Answer::Done`].
    Reload(Box<Policy>),
    /// Counters and gauges.
    Metrics,
    /// The same by class and tenant; in brief: without the histograms of tenants.
    Groups {
        /// Whether it is to be brief.
        is_brief: bool,
    },
    /// The last iterations after that step, and the engine as it is now.
    Iterations(u64),
    /// Why a request waits, and for how long it has waited for what.
    Wait(RequestId),
    /// What iterations cost, as far as it was learned.
    CostModel,
}

/// What has none.
#[derive(Serialize, Deserialize)]
pub enum Order {
    /// Give a reservation back.
    Release(RequestId),
    /// End a request, whatever its state.
    Abort(RequestId),
    /// End every request.
    AbortAll,
    /// End everything.
    Shutdown,
}

/// What a question may be answered with.
#[derive(Serialize, Deserialize)]
pub enum Answer {
    /// It was not done.
    Refused(Refusal),
    /// A place is reserved for a request that will be of this class.
    Reserved(String),
    /// It was done.
    Done,
    /// How many requests were taken, and what the next one was refused for.
    Taken(u64, Option<Refusal>),
    /// A snapshot.
    Metrics(Box<EngineMetrics>),
    /// A snapshot.
    Groups(Box<Groups>),
    /// Iterations, and the engine beside them.
    Iterations(Box<Recent>),
    /// `None`: the request does not wait.
    Wait(Option<Wait>),
    /// `None`: too little is known.
    CostModel(Option<Learned>),
}

impl From<Result<(), Refusal>> for Answer {
    fn from(done: Result<(), Refusal>) -> Self {
        done.map_or_else(Self::Refused, |()| Self::Done)
    }
}

/// What the scheduler thread is asked to do.
pub enum Command {
    /// By a client.
    Client(Message),
    /// The executor ran a step.
    StepDone(Step),
    /// The executor raised; the message is for the requests of that step.
    StepFailed(Step, String),
    /// The executor thread has ended, with the reason.
    ExecutorGone(String),
}
