//! Lets all of it happen again: a log's calls, on an engine of its own.
//!
//! Every result and every digest is compared. The first that differs ends the replay with a
//! [`Mismatch`], since from there on the two engines have different lives.

use std::fmt;

use crate::Engine;
use crate::config::Settings;
use crate::error::{ConfigError, SubmitError};
use crate::iteration::commit::StepResults;
use crate::iteration::plan::StepPlan;
use crate::output::OutputBatch;
use crate::record::digest::{PlanDigest, digest_outputs};
use crate::record::format::{Entry, Header, LogError, Results};
use crate::request::Time;

/// The first difference between a log and its replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The last step that was planned, or the one that differs; 0 before the first.
    pub step: u64,
    /// When, on the engine's clock.
    pub now: Time,
    /// The call.
    pub call: &'static str,
    /// What of it differs.
    pub field: &'static str,
    /// What the log says.
    pub logged: String,
    /// What it was now.
    pub replayed: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            step,
            now,
            call,
            field,
            logged,
            replayed,
        } = self;
        let seconds = now.0 as f64 / 1e6;
        write!(
            f,
            "step {step}, {call} at {seconds:.6} s: {field} differs: the log has {logged}, the replay \
             {replayed}"
        )
    }
}

/// An engine that lives a logged life.
pub struct Replayer {
    engine: Engine,
    plan: StepPlan,
    planned: PlanDigest,
    results: StepResults,
    batch: OutputBatch,
    scratch: Vec<u8>,
    now: Time,
    steps: u64,
    records: u64,
}

/// Settings that no engine can have, or a header that does not say any.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The settings are invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The log is damaged.
    #[error(transparent)]
    Log(#[from] LogError),
}

impl Replayer {
    /// An engine as it was when the log began, but with other settings if some are given.
    pub fn new(header: &Header, settings: Option<&Settings>) -> Result<Self, ReplayError> {
        let settings = settings.unwrap_or(&header.settings);
        let engine = Engine::new(settings, header.vocabulary()?)?;
        Ok(Self {
            plan: StepPlan::new(engine.limits()),
            engine,
            planned: PlanDigest::default(),
            results: StepResults::default(),
            batch: OutputBatch::default(),
            scratch: Vec::new(),
            now: Time(0),
            steps: 0,
            records: 0,
        })
    }

    /// The engine, to be asked anything.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The last plan.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// The outputs that were taken last.
    pub fn outputs(&self) -> &OutputBatch {
        &self.batch
    }

    /// Steps planned so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Records so far.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The next record of the log, which was made at `now`.
    pub fn apply(&mut self, now: Time, entry: &Entry) -> Result<(), Box<Mismatch>> {
        self.now = now;
        self.records += 1;
        let engine = &mut self.engine;
        match entry {
            Entry::Reserve { ticket, code } => {
                let reserved = engine.reserve(now, ticket.clone());
                self.same("reserve", "refusal", code, &refusal(reserved))
            }
            Entry::Release { id } => {
                engine.release(*id);
                Ok(())
            }
            Entry::Submit { request, code } => {
                let submitted = engine.submit(now, (**request).clone());
                self.same("submit", "refusal", code, &refusal(submitted))
            }
            Entry::Abort { id, live } => {
                let ended = engine.abort(now, *id);
                self.same("abort", "live", &live.to_string(), &ended.to_string())
            }
            Entry::Reload { policy, code } => {
                let reloaded = engine.reload(now, policy);
                let refusal = reloaded.map_or_else(|error| error.code(), |()| "");
                self.same("reload", "refusal", code, &named(refusal))
            }
            Entry::Schedule { plan } => self.schedule(plan.as_ref()),
            Entry::Commit { step, results } => self.commit(*step, results),
            // It changed nothing, and the results that were refused are not in the log.
            Entry::CommitRefused { .. } | Entry::Stopped { .. } => Ok(()),
            Entry::FailStep { step } => {
                engine.fail_step(now, *step);
                Ok(())
            }
            Entry::FailAll => {
                engine.fail_all(now);
                Ok(())
            }
            Entry::AbortAll => {
                engine.abort_all(now);
                Ok(())
            }
            Entry::OnTime => {
                engine.on_time(now);
                Ok(())
            }
            Entry::Outputs { digest, .. } => self.take_outputs(*digest),
        }
    }

    fn schedule(&mut self, logged: Option<&PlanDigest>) -> Result<(), Box<Mismatch>> {
        let call = "schedule";
        let planned = self.engine.schedule(self.now, &mut self.plan);
        self.steps += u64::from(planned);
        let text = |planned: bool| if planned { "a plan" } else { "nothing to run" };
        self.same(call, "decision", text(logged.is_some()), text(planned))?;
        let Some(logged) = logged else {
            return Ok(());
        };
        self.planned.set(&self.plan);
        if *logged == self.planned {
            return Ok(());
        }
        for (field, then, now) in logged.counts(&self.planned) {
            self.same(call, field, &then.to_string(), &now.to_string())?;
        }
        let Some(field) = logged.first_difference(&self.planned) else {
            return Ok(()); // cannot be: what is equal in every part is equal
        };
        let shown = |digest: Option<u64>| {
            digest.map_or("nothing".into(), |digest| format!("digest {digest:016x}"))
        };
        self.same(
            call,
            field.name,
            &shown(field.logged),
            &shown(field.replayed),
        )
    }

    fn commit(&mut self, step: u64, results: &Results) -> Result<(), Box<Mismatch>> {
        results.restore(&mut self.results);
        let committed = self.engine.commit(self.now, step, &self.results);
        let refusal = committed.map_or_else(|error| error.to_string(), |()| String::new());
        self.same("commit", "refusal", "", &named(&refusal))
    }

    fn take_outputs(&mut self, logged: u64) -> Result<(), Box<Mismatch>> {
        self.batch.clear();
        std::mem::swap(self.engine.outputs(), &mut self.batch);
        let digest = digest_outputs(&self.batch, &mut self.scratch);
        let shown = |digest: u64| format!("digest {digest:016x}");
        self.same(
            "outputs",
            "what clients are told",
            &shown(logged),
            &shown(digest),
        )
    }

    fn same(
        &self,
        call: &'static str,
        field: &'static str,
        logged: &str,
        replayed: &str,
    ) -> Result<(), Box<Mismatch>> {
        let logged = named(logged);
        if logged == replayed {
            return Ok(());
        }
        Err(Box::new(Mismatch {
            step: self.plan.step,
            now: self.now,
            call,
            field,
            logged,
            replayed: replayed.to_owned(),
        }))
    }
}

fn refusal(result: Result<(), SubmitError>) -> String {
    named(result.map_or_else(|error| error.code(), |()| ""))
}

/// No refusal has a name, too.
fn named(refusal: &str) -> String {
    let text = if refusal.is_empty() { "none" } else { refusal };
    text.to_owned()
}
