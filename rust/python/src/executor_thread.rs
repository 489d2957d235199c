//! The executor thread: attached to Python, runs `launch` and `collect`, and nothing else.
//!
//! It is a Python thread that spends its life in [`run`]: it waits for a step without the GIL, attaches
//! to call the executor, copies the results and posts them to the scheduler thread. An `Exception`
//! fails the step and is logged once. Anything else that ends this thread (`SystemExit`, a panic) is
//! posted as the executor's end by [`Farewell`], so that no request waits for it.

use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::command::{Command, Step, recv_soon};
use crate::plan_views::PlanViews;
use crate::step_result::ResultReader;

/// How long the next step is expected after one has ended: it takes the scheduler less.
const PATIENCE: Duration = Duration::from_micros(100);

/// The executor's end of the engine.
pub struct ExecutorEnd {
    /// Steps to run; disconnected when the engine shuts down.
    pub steps: Receiver<Step>,
    /// Where results go.
    pub commands: Sender<Command>,
    /// Plan sets in the ring.
    pub num_sets: usize,
    /// Tokens of the vocabulary, to check what is sampled.
    pub vocab_size: u32,
}

/// Runs steps until the engine shuts down.
pub fn run(end: ExecutorEnd, executor: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut farewell = Farewell {
        commands: end.commands.clone(),
        reason: "the executor thread panicked".to_owned(),
    };
    let served = serve(end, executor);
    farewell.reason = match &served {
        Ok(()) => "the executor thread has ended".to_owned(),
        Err(error) => {
            let why = describe(executor.py(), error);
            format!("the executor thread ended with {why}")
        }
    };
    served
}

fn serve(end: ExecutorEnd, executor: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = executor.py();
    let mut worker = Worker {
        launch: executor.getattr("launch")?,
        collect: executor.getattr("collect")?,
        views: PlanViews::new(py, end.num_sets)?,
        reader: ResultReader::default(),
        vocab_size: end.vocab_size,
    };
    // `Receiver` is not `Sync`, so the wait moves it in and out.
    let mut steps = end.steps;
    loop {
        let (back, received) = py.detach(move || {
            let received = recv_soon(&steps, PATIENCE, None);
            (steps, received)
        });
        steps = back;
        let Ok(mut step) = received else {
            return Ok(()); // the engine was shut down
        };
        let command = match worker.run_step(&mut step) {
            Ok(()) => Command::StepDone(step),
            Err(error) if error.is_instance_of::<PyException>(py) => {
                let message = describe(py, &error);
                log(py, &error, step.plan().step);
                Command::StepFailed(step, message)
            }
            Err(error) => return Err(error),
        };
        if end.commands.send(command).is_err() {
            return Ok(()); // the scheduler has ended
        }
    }
}

/// Tells the scheduler that nobody runs steps any more, however this thread ends.
struct Farewell {
    commands: Sender<Command>,
    reason: String,
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let reason = std::mem::take(&mut self.reason);
        // A scheduler that has ended needs no farewell.
        let _ = self.commands.send(Command::ExecutorGone(reason));
    }
}

struct Worker<'py> {
    launch: Bound<'py, PyAny>,
    collect: Bound<'py, PyAny>,
    views: PlanViews<'py>,
    reader: ResultReader,
    vocab_size: u32,
}

impl Worker<'_> {
    fn run_step(&mut self, step: &mut Step) -> PyResult<()> {
        let plan = self.views.step_plan(&step.lease)?;
        self.launch.call1((plan,))?;
        let result = self.collect.call0()?;
        let Step { lease, results } = step;
        self.reader
            .read(&result, lease.plan(), self.vocab_size, results)
    }
}

/// The exception's type and message; never its traceback.
fn describe(py: Python<'_>, error: &PyErr) -> String {
    let name = error
        .get_type(py)
        .name()
        .map_or_else(|_| "?".into(), |name| name.to_string());
    let message = error.value(py).to_string();
    if message.is_empty() {
        name
    } else {
        format!("{name}: {message}")
    }
}

/// Logs a failed step with its traceback. A logger that fails must not end the thread.
fn log(py: Python<'_>, error: &PyErr, step: u64) {
    let logged = (|| {
        let logger = py
            .import("logging")?
            .call_method1("getLogger", ("chairlift",))?;
        let keywords = PyDict::new(py);
        keywords.set_item("exc_info", error.value(py))?;
        logger.call_method(
            "error",
            (
                "the executor failed in step %d; its requests end with an error",
                step,
            ),
            Some(&keywords),
        )
    })();
    if let Err(error) = logged {
        error.write_unraisable(py, None);
    }
}
