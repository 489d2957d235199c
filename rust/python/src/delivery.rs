//! What has been published and not yet taken: merged output, answers, and who is to be woken.
//!
//! The scheduler thread publishes once per iteration, and answers questions as they come. A client takes
//! everything that is pending at once; until it does, iterations merge, so a stalled client costs only
//! the text it has not read. One byte stands in the wake-up socket exactly while something is pending, so
//! an event loop wakes once for everything published since it last looked. The answer to a blocking call
//! goes to its caller alone. Nothing here touches Python.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chairlift_core::output::{Event, OutputBatch};
use serde::{Deserialize, Serialize};

use crate::command::{Answer, CallId};

/// The output of one or more iterations, and answers to questions that nobody is blocked for.
#[derive(Default, Serialize, Deserialize)]
pub struct Delivery {
    /// What the core said.
    pub batch: OutputBatch,
    /// Why requests failed: ranges of `batch.events`, with the message for those in it.
    pub failures: Vec<(Range<usize>, Arc<str>)>,
    /// Iterations that were merged; 0 for what commands alone brought about.
    pub iterations: u64,
    /// By call, in the order they were given.
    pub answers: Vec<(CallId, Answer)>,
}

impl Delivery {
    /// The message for the failure that the event at `index` tells, if there is one.
    pub fn failure(&self, index: usize) -> Option<&Arc<str>> {
        let hit = self
            .failures
            .iter()
            .find(|(range, _)| range.contains(&index));
        hit.map(|(_, message)| message)
    }

    fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.answers.is_empty()
    }

    fn clear(&mut self) {
        self.batch.clear();
        self.failures.clear();
        self.iterations = 0;
        self.answers.clear();
    }

    /// Appends `other`, leaving it empty.
    fn merge(&mut self, other: &mut Self) {
        if self.is_empty() {
            std::mem::swap(self, other);
            other.clear();
            return;
        }
        let into = &mut self.batch;
        let (events, tokens) = (into.events.len(), into.token_ids.len());
        let (text, logprobs) = (into.text.len(), into.logprobs.len());
        into.events
            .extend(other.batch.events.drain(..).map(|event| match event {
                Event::Output(mut output) => {
                    output.tokens = output.tokens.shifted(tokens);
                    output.text = output.text.shifted(text);
                    output.logprobs = output.logprobs.shifted(logprobs);
                    Event::Output(output)
                }
                Event::PromptLogprobs {
                    request,
                    num_tokens,
                    logprobs: range,
                } => Event::PromptLogprobs {
                    request,
                    num_tokens,
                    logprobs: range.shifted(logprobs),
                },
                other @ (Event::Scheduled { .. } | Event::Ended { .. }) => other,
            }));
        into.token_ids.append(&mut other.batch.token_ids);
        into.text.push_str(&other.batch.text);
        into.logprobs.append(&mut other.batch.logprobs);
        let failures = other.failures.drain(..);
        self.failures
            .extend(failures.map(|(range, why)| (range.start + events..range.end + events, why)));
        self.iterations += other.iterations;
        self.answers.append(&mut other.answers);
        other.clear();
    }
}

/// Whether the engine still serves.
#[derive(Clone, Debug)]
pub enum Status {
    /// It does.
    Running,
    /// It does not, for this reason; it still answers.
    Ended(Arc<str>),
    /// Nobody answers any more.
    Closed(Arc<str>),
}

impl Status {
    /// Why the engine serves no longer.
    pub fn end_reason(&self) -> Option<&Arc<str>> {
        match self {
            Self::Running => None,
            Self::Ended(reason) | Self::Closed(reason) => Some(reason),
        }
    }

    /// Whether no answer will come any more.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed(_))
    }
}

/// What a blocked client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Any output.
    Output,
    /// The end of a request.
    RequestEnd,
    /// Whatever there is.
    News,
}

/// What the other end of a link is told.
#[derive(Serialize, Deserialize)]
pub struct News {
    /// What was published.
    pub delivery: Option<Delivery>,
    /// Why the engine serves no longer, if it does not.
    pub end_reason: Option<Arc<str>>,
    /// No answer will come any more.
    pub is_closed: bool,
}

/// The outbox of an engine's one client.
pub struct Outbox {
    state: Mutex<State>,
    /// For whoever waits for output.
    published: Condvar,
    /// For whoever waits for an answer.
    answered: Condvar,
    reader: UnixStream,
    writer: UnixStream,
}

/// Whom to wake, once the lock is free: a thread that is woken under it would only wait again.
struct Due {
    notifies: bool,
    signals: bool,
}

struct State {
    pending: Delivery,
    /// An empty delivery whose memory is used again.
    spare: Option<Delivery>,
    /// A request's end is among what is pending.
    has_end: bool,
    status: Status,
    /// Calls that somebody is blocked for, with their answers.
    blocked: HashMap<CallId, Option<Answer>>,
    /// What the blocked client waits for, if one is blocked.
    waiting: Option<Until>,
    /// An event loop watches the socket.
    watched: bool,
    /// The byte is in the socket, or about to be.
    signalled: bool,
    /// Bytes written so far.
    wake_ups: u64,
}

impl State {
    fn is_ready(&self, until: Until) -> bool {
        let ended = self.status.end_reason().is_some();
        let has_output = !self.pending.batch.is_empty();
        match until {
            Until::Output => ended || has_output,
            Until::RequestEnd => ended || self.has_end,
            Until::News => true, // what is due is news
        }
    }

    /// Whether the blocked client has what it waits for, and whether the byte is to be written.
    fn due(&mut self) -> Due {
        let signals = self.watched && !self.signalled;
        self.signalled |= signals;
        self.wake_ups += u64::from(signals);
        Due {
            notifies: self.waiting.is_some_and(|until| self.is_ready(until)),
            signals,
        }
    }

    fn take(&mut self, reader: &UnixStream) -> Option<Delivery> {
        if self.signalled {
            let mut byte = [0];
            // The byte may still be on its way: then it stays due, and the loop wakes once more.
            self.signalled = !matches!((&mut &*reader).read(&mut byte), Ok(1));
        }
        if self.pending.is_empty() {
            return None;
        }
        self.has_end = false;
        let spare = self.spare.take().unwrap_or_default();
        Some(std::mem::replace(&mut self.pending, spare))
    }
}

impl Outbox {
    /// An empty outbox of a running engine.
    pub fn new() -> std::io::Result<Self> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        Ok(Self {
            state: Mutex::new(State {
                pending: Delivery::default(),
                spare: None,
                has_end: false,
                status: Status::Running,
                blocked: HashMap::new(),
                waiting: None,
                watched: false,
                signalled: false,
                wake_ups: 0,
            }),
            published: Condvar::new(),
            answered: Condvar::new(),
            reader,
            writer,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock panics half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a delivery and leaves an empty one with its memory. Called by the scheduler thread.
    pub fn publish(&self, delivery: &mut Delivery) {
        if delivery.is_empty() {
            return;
        }
        let has_end = delivery
            .batch
            .events
            .iter()
            .any(|event| matches!(event, Event::Ended { .. }));
        let mut state = self.state();
        state.has_end |= has_end;
        state.pending.merge(delivery);
        let due = state.due();
        drop(state);
        self.wake(&due);
    }

    /// Gives an answer, to the blocked caller or to whoever takes what is pending.
    pub fn answer(&self, call: CallId, answer: Answer) {
        let mut state = self.state();
        if let Some(place) = state.blocked.get_mut(&call) {
            *place = Some(answer);
            drop(state);
            self.answered.notify_all();
        } else {
            state.pending.answers.push((call, answer));
            let due = state.due();
            drop(state);
            self.wake(&due);
        }
    }

    /// Somebody will be blocked for the answer to this call, which is about to be made.
    pub fn expect(&self, call: CallId) {
        self.state().blocked.insert(call, None);
    }

    /// Blocks for the answer to an expected call. `None` after `limit`; an error with the reason if there
    /// will be no answer.
    pub fn wait_for_answer(
        &self,
        call: CallId,
        limit: Duration,
    ) -> Option<Result<Answer, Arc<str>>> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        loop {
            let answer = state.blocked.get_mut(&call).and_then(Option::take);
            if let Some(answer) = answer {
                state.blocked.remove(&call);
                return Some(Ok(answer));
            }
            if let Status::Closed(reason) = &state.status {
                let reason = Arc::clone(reason);
                state.blocked.remove(&call);
                return Some(Err(reason));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let result = self.answered.wait_timeout(state, left);
            state = result.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Nobody will be blocked for this call any more.
    pub fn forget(&self, call: CallId) {
        self.state().blocked.remove(&call);
    }

    /// Wakes whom [`State::due`] found.
    fn wake(&self, due: &Due) {
        if due.notifies {
            self.published.notify_all();
        }
        if due.signals {
            // At most this byte is in the socket, so it cannot be full; and both ends live as long as
            // the outbox.
            let _ = (&self.writer).write(&[1]);
        }
    }

    /// The engine serves no longer; the first reason stays.
    pub fn end(&self, reason: &str) {
        self.go_over(|status| match status {
            Status::Running => Status::Ended(reason.into()),
            later => later,
        });
    }

    /// No answer will come any more; a reason that was given stays.
    pub fn close(&self, reason: &str) {
        self.go_over(|status| match status {
            Status::Running => Status::Closed(reason.into()),
            Status::Ended(reason) | Status::Closed(reason) => Status::Closed(reason),
        });
        self.answered.notify_all();
    }

    fn go_over(&self, next: impl FnOnce(Status) -> Status) {
        let mut state = self.state();
        state.status = next(std::mem::replace(&mut state.status, Status::Running));
        let due = state.due();
        drop(state);
        self.wake(&due);
    }

    /// Blocks until there is something to tell the other end of a link, which knows of the engine's end
    /// if `end_is_told`.
    pub fn next_news(&self, end_is_told: bool) -> News {
        let mut state = self.state();
        loop {
            let end_reason = state.status.end_reason().filter(|_| !end_is_told).cloned();
            let is_closed = state.status.is_closed();
            if !state.pending.is_empty() || end_reason.is_some() || is_closed {
                return News {
                    delivery: state.take(&self.reader),
                    end_reason,
                    is_closed,
                };
            }
            state.waiting = Some(Until::News);
            let result = self.published.wait(state);
            state = result.unwrap_or_else(PoisonError::into_inner);
            state.waiting = None;
        }
    }

    /// Whether the engine still serves.
    pub fn status(&self) -> Status {
        self.state().status.clone()
    }

    /// Takes what is pending, if anything.
    pub fn take(&self) -> Option<Delivery> {
        self.state().take(&self.reader)
    }

    /// Blocks until there is what is waited for, the engine ended, or `limit` has passed.
    pub fn wait(&self, until: Until, limit: Duration) -> Option<Delivery> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        while !state.is_ready(until) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state.waiting = Some(until);
            let result = self.published.wait_timeout(state, left);
            state = result.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting = None;
        }
        state.take(&self.reader)
    }

    /// Takes an emptied delivery back, for its memory.
    pub fn recycle(&self, mut delivery: Delivery) {
        delivery.clear();
        let mut state = self.state();
        state.spare.get_or_insert(delivery);
    }

    /// The descriptor that becomes readable when something is pending; from now on it is signalled.
    pub fn watch(&self) -> RawFd {
        let mut state = self.state();
        state.watched = true;
        if !state.pending.is_empty() || state.status.end_reason().is_some() {
            let due = state.due();
            drop(state);
            self.wake(&due);
        }
        self.reader.as_raw_fd()
    }

    /// Times the descriptor was signalled.
    pub fn wake_ups(&self) -> u64 {
        self.state().wake_ups
    }
}
