//! The client's side of an engine: ask, tell, and take what was delivered.
//!
//! A call comes in two forms. The blocking one waits for its answer without the GIL; the scheduler
//! thread answers in microseconds, also while a step runs. The one that posts returns the number of the
//! call at once, and the answer is in a later batch: for an event loop, which must not wait for another
//! process. Output is waited for in one of two ways: blocking (`wait`), or by an event loop that watches
//! `fileno` and drains. Where the engine runs, in this process or another, only [`Post`] knows.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use chairlift_core::config::Limits;
use chairlift_core::request::{RequestId, Ticket, Time};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::batch::OutputBatch;
use crate::command::{Answer, CallId, Command, Message, Order, Question};
use crate::delivery::{Outbox, Until};
use crate::errors::{Refusal, misuse};
use crate::link;
use crate::policy::read_policy;
use crate::request::{Request, RequestArgsView};

/// A blocked client looks for signals (Ctrl-C) this often.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

/// The way to an engine.
pub enum Post {
    /// To the scheduler thread.
    Here(Sender<Command>),
    /// To the thread that writes to another process.
    Away(Sender<Message>),
}

impl Post {
    /// Sends a message. One that arrives nowhere is answered by the outbox being closed.
    fn send(&self, message: Message) {
        match self {
            Self::Here(commands) => {
                let _ = commands.send(Command::Client(message));
            }
            Self::Away(messages) => {
                let _ = messages.send(message);
            }
        }
    }
}

/// What a client and its reservations share: the engine, as it is seen from outside.
pub struct Line {
    post: Post,
    outbox: Arc<Outbox>,
    /// Name of the next request.
    next_id: AtomicU64,
    next_call: AtomicU64,
    /// What a request is checked against.
    limits: Arc<Limits>,
    /// The model's end-of-sequence tokens.
    eos_token_ids: Vec<u32>,
}

impl Line {
    /// The line to an engine with these limits, which says what it has to say in the outbox.
    pub fn new(
        post: Post,
        outbox: Arc<Outbox>,
        limits: Arc<Limits>,
        eos_token_ids: Vec<u32>,
    ) -> Self {
        Self {
            post,
            outbox,
            next_id: AtomicU64::new(1),
            next_call: AtomicU64::new(1),
            limits,
            eos_token_ids,
        }
    }

    fn fresh_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn fresh_call(&self) -> CallId {
        CallId(self.next_call.fetch_add(1, Ordering::Relaxed))
    }

    fn tell(&self, order: Order) {
        self.post.send(Message::Tell(order));
    }

    /// Posts a question; its answer will be in a batch.
    fn post(&self, question: Question) -> u64 {
        let call = self.fresh_call();
        self.post.send(Message::Ask(call, question));
        call.0
    }

    /// Posts a question and waits for its answer, without the GIL.
    fn ask(&self, py: Python<'_>, question: Question) -> PyResult<Answer> {
        let call = self.fresh_call();
        self.outbox.expect(call);
        self.post.send(Message::Ask(call, question));
        loop {
            match py.detach(|| self.outbox.wait_for_answer(call, SIGNAL_CHECK)) {
                Some(Ok(Answer::Refused(refusal))) => return Err(refusal.into()),
                Some(Ok(answer)) => return Ok(answer),
                Some(Err(reason)) => return Err(Refusal::dead(&reason).into()),
                None => py
                    .check_signals()
                    .inspect_err(|_| self.outbox.forget(call))?,
            }
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

    fn ticket(&self, args: Option<RequestArgsView>, n: u32) -> Ticket {
        args.unwrap_or_default().ticket(self.line.fresh_id(), n)
    }

    fn reservation(&self, ticket: Ticket) -> Reservation {
        Reservation {
            line: Arc::clone(&self.line),
            ticket,
            is_open: AtomicBool::new(true),
        }
    }
}

#[pymethods]
impl EngineClient {
    /// The client of an engine in another process, at the other end of a socket that it takes over.
    /// Waits until the engine has said what it is.
    #[staticmethod]
    fn connect(py: Python<'_>, fd: RawFd) -> PyResult<Self> {
        py.detach(|| link::connect(fd)).map(Self::new)
    }

    /// Raises what `submit` would raise for the request itself; asks nobody.
    fn check(&self, request: &Request) -> PyResult<()> {
        let line = &self.line;
        let (_, submission) = request.named(RequestId(0));
        let named = submission.arrived(Time(0));
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
        let ticket = self.ticket(args, n);
        self.line.ask(py, Question::Reserve(ticket.clone()))?;
        Ok(self.reservation(ticket))
    }

    /// The same without waiting: the number of the call, whose answer is the name of the class that the
    /// request will be served as, and the place as it is if the answer is no error.
    #[pyo3(signature = (args = None, *, n = 1))]
    fn post_reserve(&self, args: Option<RequestArgsView>, n: u32) -> (u64, Reservation) {
        let ticket = self.ticket(args, n);
        let call = self.line.post(Question::Reserve(ticket.clone()));
        (call, self.reservation(ticket))
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
        let (id, question) = if let Some(reservation) = reservation {
            (reservation.ticket.id, reservation.question(request)?)
        } else {
            let named = request.named(self.line.fresh_id());
            (named.0.id, Question::SubmitAtOnce(Box::new(named)))
        };
        self.line.ask(py, question)?;
        Ok(id.0)
    }

    /// Submits a request on the place that was reserved for it, without waiting: the number of the call,
    /// whose answer is `None`. The request's id is the reservation's.
    fn post_submit(&self, request: &Request, reservation: &Reservation) -> PyResult<u64> {
        Ok(self.line.post(reservation.question(request)?))
    }

    /// Submits requests in order until the queue is full (of all, of the class's or of the tenant's),
    /// and returns the ids of those it took. Any other refusal is raised, if it is the first request's;
    /// else the next call meets it.
    #[expect(clippy::needless_pass_by_value, reason = "how PyO3 hands over a list")]
    fn submit_many(&self, py: Python<'_>, requests: Vec<PyRef<'_, Request>>) -> PyResult<Vec<u64>> {
        let named: Vec<_> = requests
            .iter()
            .map(|request| request.named(self.line.fresh_id()))
            .collect();
        let mut ids: Vec<u64> = named.iter().map(|(ticket, _)| ticket.id.0).collect();
        let Answer::Taken(taken, refusal) = self.line.ask(py, Question::Feed(named))? else {
            return Err(misuse(WRONG_ANSWER));
        };
        ids.truncate(taken as usize);
        match refusal {
            Some(refusal) if taken == 0 && !refusal.is_full_queue() => Err(refusal.into()),
            _ => Ok(ids),
        }
    }

    /// Ends a request, whatever its state; its last output says `abort`. Unknown ids are ignored.
    fn abort(&self, request_id: u64) {
        self.line.tell(Order::Abort(RequestId(request_id)));
    }

    /// Ends every request of this client.
    fn abort_all(&self) {
        self.line.tell(Order::AbortAll);
    }

    /// Ends the engine: requests end as aborted.
    fn shutdown(&self) {
        self.line.tell(Order::Shutdown);
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
            if let Some(reason) = outbox.status().end_reason() {
                // What was published before the end is taken first.
                return match outbox.take() {
                    Some(delivery) => Ok(Some(self.batch(delivery))),
                    None => Err(Refusal::dead(reason).into()),
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
        self.line
            .outbox
            .status()
            .end_reason()
            .map(ToString::to_string)
    }

    /// Whether nothing will answer any more: an engine that has ended may still.
    #[getter]
    fn is_closed(&self) -> bool {
        self.line.outbox.status().is_closed()
    }

    /// Times `fileno` was made readable.
    #[getter]
    fn wake_ups(&self) -> u64 {
        self.line.outbox.wake_ups()
    }

    /// The numbers the engine runs with, after validation.
    #[getter]
    fn limits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let limits = &self.line.limits;
        let dict = PyDict::new(py);
        let entries = [
            ("max_num_seqs", limits.max_num_seqs()),
            ("max_num_batched_tokens", limits.max_num_batched_tokens()),
            ("max_model_len", limits.max_model_len()),
            ("requested_max_model_len", limits.requested_max_model_len()),
            ("max_chunk_tokens", limits.max_chunk_tokens()),
            ("block_size", limits.block_size()),
            ("num_kv_blocks", limits.num_kv_blocks()),
            ("num_host_kv_blocks", limits.num_host_kv_blocks()),
            ("watermark_blocks", limits.watermark_blocks()),
            ("max_queued_requests", limits.max_queued_requests()),
            ("vocab_size", limits.vocab_size()),
            ("max_in_flight_steps", limits.max_in_flight_steps()),
        ];
        for (name, value) in entries {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Goes over to another policy (a `PolicyConfig`); nothing that was accepted is lost. Raises
    /// `ConfigError`, and then nothing has changed.
    fn reload(&self, py: Python<'_>, policy: &Bound<'_, PyAny>) -> PyResult<()> {
        let policy = Box::new(read_policy(policy)?);
        self.line.ask(py, Question::Reload(policy)).map(drop)
    }

    /// The same without waiting: the number of the call, whose answer is `None`.
    fn post_reload(&self, policy: &Bound<'_, PyAny>) -> PyResult<u64> {
        let policy = Box::new(read_policy(policy)?);
        Ok(self.line.post(Question::Reload(policy)))
    }

    /// Counters and gauges.
    fn metrics(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.line.ask(py, Question::Metrics)?.into_python(py)
    }

    /// The number of a call for them.
    fn post_metrics(&self) -> u64 {
        self.line.post(Question::Metrics)
    }

    /// Counters and histograms by class and by tenant, and what each tenant was served; with `brief`
    /// only the counters of tenants.
    #[pyo3(signature = (*, brief = false))]
    fn group_metrics(&self, py: Python<'_>, brief: bool) -> PyResult<Py<PyAny>> {
        let question = Question::Groups { is_brief: brief };
        self.line.ask(py, question)?.into_python(py)
    }

    /// The number of a call for them.
    #[pyo3(signature = (*, brief = false))]
    fn post_group_metrics(&self, brief: bool) -> u64 {
        self.line.post(Question::Groups { is_brief: brief })
    }

    /// The last iterations whose number is above `since_step` (256 are kept), who sits in which row, and
    /// how long the longest-waiting of each class and tenant has waited.
    #[pyo3(signature = (since_step = 0))]
    fn iterations(&self, py: Python<'_>, since_step: u64) -> PyResult<Py<PyAny>> {
        self.line
            .ask(py, Question::Iterations(since_step))?
            .into_python(py)
    }

    /// The same without waiting: the number of the call.
    #[pyo3(signature = (since_step = 0))]
    fn post_iterations(&self, since_step: u64) -> u64 {
        self.line.post(Question::Iterations(since_step))
    }

    /// Why a request waits now, and for how many seconds it has waited for what; `None` if it was
    /// scheduled or is not live.
    fn waiting(&self, py: Python<'_>, request_id: u64) -> PyResult<Py<PyAny>> {
        let question = Question::Wait(RequestId(request_id));
        self.line.ask(py, question)?.into_python(py)
    }

    /// What iterations cost, as far as it was learned; `None` while that is too little.
    fn cost_model(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.line.ask(py, Question::CostModel)?.into_python(py)
    }

    /// The number of a call for it.
    fn post_waiting(&self, request_id: u64) -> u64 {
        self.line.post(Question::Wait(RequestId(request_id)))
    }
}

const WRONG_ANSWER: &str = "the engine gave an answer to another question";

/// A place at the door. Released when it is dropped, closed as a context manager, or used up.
#[pyclass(frozen, module = "chairlift._core")]
pub struct Reservation {
    line: Arc<Line>,
    ticket: Ticket,
    is_open: AtomicBool,
}

impl Reservation {
    /// The question that submits a request on this place, which is used up by it.
    fn question(&self, request: &Request) -> PyResult<Question> {
        let (ticket, submission) = request.named(self.ticket.id);
        if ticket != self.ticket {
            return Err(misuse(
                "the reservation is for another tenant, class, user or number of answers",
            ));
        }
        if !self.is_open.swap(false, Ordering::AcqRel) {
            return Err(misuse("the reservation was used or released already"));
        }
        Ok(Question::Submit(Box::new(submission)))
    }
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
            self.line.tell(Order::Release(self.ticket.id));
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
