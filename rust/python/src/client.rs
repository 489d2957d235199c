//! The client's side of an engine: submit, abort, and take what was delivered.
//!
//! A call posts one command and, where there is an answer, waits for it without the GIL; the scheduler
//! thread answers in microseconds, also while a step runs. Output is waited for in one of two ways:
//! blocking (`wait`), or by an event loop that watches `fileno` and drains. The same calls will serve a
//! client in another process.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, sync_channel};
use std::time::{Duration, Instant};

use chairlift_core::config::Limits;
use chairlift_core::request::{RequestId, Ticket, Time};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::batch::OutputBatch;
use crate::command::{Command, Reply};
use crate::delivery::{Outbox, Status, Until};
use crate::errors::{Refusal, misuse};
use crate::groups::wait_times;
use crate::policy::read_policy;
use crate::request::{Request, RequestArgsView};

/// A blocked client looks for signals (Ctrl-C) this often.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

/// What a client and its reservations share: the engine, as it is seen from outside.
pub struct Line {
    /// To the scheduler thread.
    pub commands: Sender<Command>,
    /// From it.
    pub outbox: Arc<Outbox>,
    /// Name of the next request.
    pub next_id: AtomicU64,
    /// What a request is checked against.
    pub limits: Arc<Limits>,
    /// The model's end-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// Zero of the engine's clock.
    pub epoch: Instant,
}

impl Line {
    fn fresh_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn now(&self) -> Time {
        Time(self.epoch.elapsed().as_micros() as u64)
    }

    /// Posts a command and waits for its answer, without the GIL.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        command: impl FnOnce(Reply<T>) -> Command + Send,
    ) -> Result<T, Refusal> {
        py.detach(|| {
            let (reply, answer) = sync_channel(1);
            self.commands
                .send(command(reply))
                .map_err(|_| self.gone())?;
            answer.recv().map_err(|_| self.gone())
        })
    }

    /// The scheduler thread does not answer any more.
    fn gone(&self) -> Refusal {
        match self.outbox.status() {
            Status::Ended(reason) => Refusal::Dead(reason),
            Status::Running => Refusal::Dead("the engine has ended".into()),
        }
    }
}

/// The client of an engine.
#[pyclass(frozen, module = "chairlift._core")]
pub struct EngineClient {
    line: Arc<Line>,
}

impl EngineClient {
    /// The client at the end of a line.
    pub fn new(line: Line) -> Self {
        Self {
            line: Arc::new(line),
        }
    }

    fn batch(&self, delivery: crate::delivery::Delivery) -> OutputBatch {
        OutputBatch::new(delivery, &self.line.outbox)
    }
}

#[pymethods]
impl EngineClient {
    /// Raises what `submit` would raise for the request itself; asks nobody.
    fn check(&self, request: &Request) -> PyResult<()> {
        let line = &self.line;
        let (_, named) = request.named(RequestId(0), Time(0));
        let checked = named.validate(&line.limits, &line.eos_token_ids, Time(0));
        checked
            .map(drop)
            .map_err(|error| Refusal::from(error).into())
    }

    /// Reserves a place at the door for each of `n` answers, before anything costly is done for a
    /// request. `args` has the attributes of `RequestArgs`; `None`: the default tenant and class.
    #[pyo3(signature = (args = None, *, n = 1))]
    fn reserve(
        &self,
        py: Python<'_>,
        args: Option<RequestArgsView>,
        n: u32,
    ) -> PyResult<Reservation> {
        let id = self.line.fresh_id();
        let ticket = args.unwrap_or_default().ticket(id, n);
        let asked = ticket.clone();
        self.line
            .ask(py, |reply| Command::Reserve(asked, reply))??;
        Ok(Reservation {
            line: Arc::clone(&self.line),
            ticket,
            is_open: AtomicBool::new(true),
        })
    }

    /// Submits a request on the place that was reserved for it, or on one that is reserved in the same
    /// breath, and returns its id.
    #[pyo3(signature = (request, reservation = None))]
    fn submit(
        &self,
        py: Python<'_>,
        request: &Request,
        reservation: Option<&Reservation>,
    ) -> PyResult<u64> {
        let Some(reservation) = reservation else {
            let named = request.named(self.line.fresh_id(), self.line.now());
            let id = named.1.id.0;
            let at_once = |reply| Command::SubmitAtOnce(Box::new(named), reply);
            self.line.ask(py, at_once)??;
            return Ok(id);
        };
        let id = reservation.ticket.id;
        let (ticket, named) = request.named(id, self.line.now());
        if ticket != reservation.ticket {
            return Err(misuse(
                "the reservation is for another tenant, class, user or number of answers",
            ));
        }
        if !reservation.is_open.swap(false, Ordering::AcqRel) {
            return Err(misuse("the reservation was used or released already"));
        }
        let named = Box::new(named);
        self.line.ask(py, |reply| Command::Submit(named, reply))??;
        Ok(id.0)
    }

    /// Submits requests in order until the queue is full (of all, of the class's or of the tenant's),
    /// and returns the ids of those it took. Any other refusal is raised, if it is the first request's;
    /// else the next call meets it.
    #[expect(clippy::needless_pass_by_value, reason = "how PyO3 hands over a list")]
    fn submit_many(&self, py: Python<'_>, requests: Vec<PyRef<'_, Request>>) -> PyResult<Vec<u64>> {
        let now = self.line.now();
        let named: Vec<_> = requests
            .iter()
            .map(|request| request.named(self.line.fresh_id(), now))
            .collect();
        let mut ids: Vec<u64> = named.iter().map(|(ticket, _)| ticket.id.0).collect();
        let feed = |reply| Command::Feed(named, reply);
        let (taken, refusal) = self.line.ask(py, feed)?;
        ids.truncate(taken);
        match refusal {
            Some(refusal) if taken == 0 && !refusal.is_full_queue() => Err(refusal.into()),
            _ => Ok(ids),
        }
    }

    /// Ends a request, whatever its state; its last output says `abort`. Unknown ids are ignored.
    fn abort(&self, request_id: u64) {
        // A scheduler that is gone has ended the request already.
        let _ = self
            .line
            .commands
            .send(Command::Abort(RequestId(request_id)));
    }

    /// Ends every request of this client.
    fn abort_all(&self) {
        let _ = self.line.commands.send(Command::AbortAll);
    }

    /// Blocks until there is output (with `until_end`: until a request ended) and takes all there is;
    /// `None` after `timeout` seconds. Raises `EngineDeadError` when the engine has ended and nothing is
    /// left to take.
    #[pyo3(signature = (timeout = None, *, until_end = false))]
    fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        until_end: bool,
    ) -> PyResult<Option<OutputBatch>> {
        let until = if until_end {
            Until::RequestEnd
        } else {
            Until::Output
        };
        let limit = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let slice = left.unwrap_or(SIGNAL_CHECK).min(SIGNAL_CHECK);
            let outbox = &self.line.outbox;
            if let Some(delivery) = py.detach(|| outbox.wait(until, slice)) {
                return Ok(Some(self.batch(delivery)));
            }
            if let Status::Ended(reason) = outbox.status() {
                // What was published before the end is taken first.
                return match outbox.take() {
                    Some(delivery) => Ok(Some(self.batch(delivery))),
                    None => Err(Refusal::Dead(reason).into()),
                };
            }
            py.check_signals()?;
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
        }
    }

    /// Takes all there is, without blocking.
    fn drain(&self, py: Python<'_>) -> Option<OutputBatch> {
        let outbox = &self.line.outbox;
        let delivery = py.detach(|| outbox.take())?;
        Some(self.batch(delivery))
    }

    /// A descriptor that is readable exactly while there is output (or news of the engine's end) that
    /// was not drained. For `loop.add_reader`; it belongs to the client.
    fn fileno(&self) -> RawFd {
        self.line.outbox.watch()
    }

    /// Why the engine has ended, or `None` while it runs.
    #[getter]
    fn end_reason(&self) -> Option<String> {
        match self.line.outbox.status() {
            Status::Running => None,
            Status::Ended(reason) => Some(reason.to_string()),
        }
    }

    /// Times `fileno` was made readable.
    #[getter]
    fn wake_ups(&self) -> u64 {
        self.line.outbox.wake_ups()
    }

    /// Goes over to another policy (a `PolicyConfig`); nothing that was accepted is lost. Raises
    /// `ConfigError`, and then nothing has changed.
    fn reload(&self, py: Python<'_>, policy: &Bound<'_, PyAny>) -> PyResult<()> {
        let policy = Box::new(read_policy(policy)?);
        self.line
            .ask(py, |reply| Command::Reload(policy, reply))??;
        Ok(())
    }

    /// Counters and gauges.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.line.ask(py, Command::Metrics)?.to_dict(py)
    }

    /// Counters and histograms by class and by tenant, and what each tenant was served.
    fn group_metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.line.ask(py, Command::Groups)?.to_dict(py)
    }

    /// Why a request waits now, and for how many seconds it has waited for what; `None` if it was
    /// scheduled or is not live.
    fn waiting<'py>(
        &self,
        py: Python<'py>,
        request_id: u64,
    ) -> PyResult<Option<(&'static str, Bound<'py, PyDict>)>> {
        let ask = |reply| Command::Wait(RequestId(request_id), reply);
        match self.line.ask(py, ask)? {
            None => Ok(None),
            Some(wait) => Ok(Some((wait.reason, wait_times(py, wait.times)?))),
        }
    }
}

/// A place at the door. Released when it is dropped, closed as a context manager, or used up.
#[pyclass(frozen, module = "chairlift._core")]
pub struct Reservation {
    line: Arc<Line>,
    ticket: Ticket,
    is_open: AtomicBool,
}

#[pymethods]
impl Reservation {
    /// The id that the request will have.
    #[getter]
    fn request_id(&self) -> u64 {
        self.ticket.id.0
    }

    /// Gives the place back unless it was used; idempotent.
    fn release(&self) {
        if self.is_open.swap(false, Ordering::AcqRel) {
            let _ = self.line.commands.send(Command::Release(self.ticket.id));
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.release();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}
