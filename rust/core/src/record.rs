//! The flight recorder: everything an engine is told, and a digest of everything it decides.
//!
//! An engine is a function of its settings and of the calls of its facade, so a log of the calls is
//! enough to let all of it happen again ([`Replayer`]), bit for bit, and to ask the engine anything on
//! the way: why a request waited ([`Story`]), what other settings would have done ([`recorded_workload`]).
//! [`RecordedEngine`] offers the calls of [`Engine`] and writes each one down, with its time and its
//! result, into a buffer ([`Recorder`]). Where nothing is recorded that costs one branch a call.
//!
//! Not here: files. Whoever owns the engine takes full buffers and writes them.
//!
//! Invariants:
//! - only [`RecordedEngine`] can change a recorded engine: it gives the engine away for reading only;
//! - a log says nothing of the decisions themselves but digests, so it cannot disagree with itself; a
//!   replay that differs names the first step and field;
//! - a log that was cut off is good up to its last whole record.

mod digest;
mod format;
mod recorder;
mod replay;
mod story;
mod storyteller;
mod workload;

pub use digest::{PlanDigest, PlanField};
pub use format::{Decoder, Entry, Header, LogError, Results, read_header};
pub use recorder::Recorder;
pub use replay::{Mismatch, Replayer};
pub use story::{Ahead, End, Gap, Moment, Scheduled, Span, StepView, Story};
pub use storyteller::Storyteller;
pub use workload::{MeasuredRequest, MeasuredStep, Measures, recorded_workload};

use std::ops::Deref;

use crate::Engine;
use crate::config::policy::Policy;
use crate::config::{Settings, Vocabulary};
use crate::error::{CommitError, ConfigError, SubmitError};
use crate::iteration::commit::StepResults;
use crate::iteration::plan::StepPlan;
use crate::output::OutputBatch;
use crate::request::{NewRequest, RequestId, Ticket, Time};
use format::Kind;

/// An [`Engine`] whose calls are written down if that was asked for. What only reads is called on the
/// engine itself.
pub struct RecordedEngine {
    engine: Engine,
    recorder: Option<Box<Recorder>>,
}

impl Deref for RecordedEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl RecordedEngine {
    /// An idle engine of which nothing is recorded.
    pub fn new(settings: &Settings, vocabulary: Vocabulary) -> Result<Self, ConfigError> {
        let engine = Engine::new(settings, vocabulary)?;
        let recorder = None;
        Ok(Self { engine, recorder })
    }

    /// An idle engine that is recorded from its start. `about` is kept in the log as it is.
    pub fn recorded(
        settings: &Settings,
        vocabulary: Vocabulary,
        about: &str,
    ) -> Result<Self, ConfigError> {
        let header = Header::new(settings, &vocabulary, about);
        let engine = Engine::new(settings, vocabulary)?;
        let recorder = Some(Box::new(Recorder::new(header)));
        Ok(Self { engine, recorder })
    }

    /// Where the log is taken from; `None` if nothing is recorded.
    pub fn recorder(&mut self) -> Option<&mut Recorder> {
        self.recorder.as_deref_mut()
    }

    /// Ends the recording, with a record that says why; returns what was not taken yet.
    pub fn stop_recording(&mut self, why: &str) -> Option<Vec<u8>> {
        let mut recorder = self.recorder.take()?;
        recorder.begin(Kind::Stopped, None);
        recorder.write(why);
        recorder.end();
        Some(recorder.take(Vec::new()))
    }

    /// See [`Engine::reserve`].
    pub fn reserve(&mut self, now: Time, ticket: Ticket) -> Result<(), SubmitError> {
        let Some(recorder) = &mut self.recorder else {
            return self.engine.reserve(now, ticket);
        };
        recorder.begin(Kind::Reserve, Some(now));
        recorder.write(&ticket);
        let reserved = self.engine.reserve(now, ticket);
        recorder.write(code_of(&reserved));
        recorder.end();
        reserved
    }

    /// See [`Engine::release`].
    pub fn release(&mut self, id: RequestId) {
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(Kind::Release, None);
            recorder.write(&id);
            recorder.end();
        }
        self.engine.release(id);
    }

    /// See [`Engine::submit`].
    pub fn submit(&mut self, now: Time, request: NewRequest) -> Result<(), SubmitError> {
        let Some(recorder) = &mut self.recorder else {
            return self.engine.submit(now, request);
        };
        recorder.begin(Kind::Submit, Some(now));
        recorder.write(&request);
        let submitted = self.engine.submit(now, request);
        recorder.write(code_of(&submitted));
        recorder.end();
        submitted
    }

    /// See [`Engine::abort`].
    pub fn abort(&mut self, now: Time, id: RequestId) -> bool {
        let live = self.engine.abort(now, id);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(Kind::Abort, Some(now));
            recorder.write(&(id, live));
            recorder.end();
        }
        live
    }

    /// See [`Engine::reload`].
    pub fn reload(&mut self, now: Time, policy: &Policy) -> Result<(), ConfigError> {
        let reloaded = self.engine.reload(now, policy);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(Kind::Reload, Some(now));
            recorder.write(policy);
            recorder.write(reloaded.as_ref().map_or_else(ConfigError::code, |()| ""));
            recorder.end();
        }
        reloaded
    }

    /// See [`Engine::schedule`].
    pub fn schedule(&mut self, now: Time, plan: &mut StepPlan) -> bool {
        let planned = self.engine.schedule(now, plan);
        if let Some(recorder) = &mut self.recorder {
            recorder.schedule(now, planned.then_some(plan));
        }
        planned
    }

    /// See [`Engine::commit`].
    pub fn commit(
        &mut self,
        now: Time,
        step: u64,
        results: &StepResults,
    ) -> Result<(), CommitError> {
        let committed = self.engine.commit(now, step, results);
        if let Some(recorder) = &mut self.recorder {
            match &committed {
                Ok(()) => recorder.commit(now, step, results),
                Err(error) => {
                    recorder.begin(Kind::CommitRefused, Some(now));
                    recorder.write(&step);
                    recorder.write(error.code());
                    recorder.end();
                }
            }
        }
        committed
    }

    /// See [`Engine::fail_step`].
    pub fn fail_step(&mut self, now: Time, step: u64) {
        self.engine.fail_step(now, step);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(Kind::FailStep, Some(now));
            recorder.write(&step);
            recorder.end();
        }
    }

    /// See [`Engine::fail_all`].
    pub fn fail_all(&mut self, now: Time) {
        self.engine.fail_all(now);
        self.note(Kind::FailAll, now);
    }

    /// See [`Engine::abort_all`].
    pub fn abort_all(&mut self, now: Time) {
        self.engine.abort_all(now);
        self.note(Kind::AbortAll, now);
    }

    /// See [`Engine::on_time`].
    pub fn on_time(&mut self, now: Time) {
        self.engine.on_time(now);
        self.note(Kind::OnTime, now);
    }

    /// Swaps what happened since the last time with `empty`; false, and nothing is swapped, if that is
    /// nothing. See [`Engine::outputs`].
    pub fn take_outputs(&mut self, empty: &mut OutputBatch) -> bool {
        let outputs = self.engine.outputs();
        if outputs.is_empty() {
            return false;
        }
        std::mem::swap(outputs, empty);
        if let Some(recorder) = &mut self.recorder {
            recorder.outputs(empty);
        }
        true
    }

    fn note(&mut self, kind: Kind, now: Time) {
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(kind, Some(now));
            recorder.end();
        }
    }
}

/// Why a request was refused; empty if it was not.
fn code_of(result: &Result<(), SubmitError>) -> &'static str {
    result.as_ref().map_or_else(SubmitError::code, |()| "")
}
