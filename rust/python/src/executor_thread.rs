//! The executor thread: attached to Python, runs `launch` and `collect`, and nothing else.
//!
//! It is a Python thread that spends its life in [`run`]: it waits for a step without the GIL, attaches
//! to call the executor, copies the results and posts them to the scheduler thread. With more than one
//! step in flight it launches what is there before it collects the oldest; where an executor runs its
//! steps beside this thread (`launches_ahead`), it waits a little for the next one, since it is the
//! executor that must not wait. An `Exception` fails the step and is logged once. Anything else that ends this thread (`SystemExit`, a panic) is
//! posted as the executor's end by [`Farewell`], so that no request waits for it.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::command::{Command, Step, recv_soon};
use crate::plan_views::PlanViews;
use crate::step_result::{ResultReader, read_graph_rows};

/// How long the next step is expected after one has ended: it takes the scheduler less.
const PATIENCE: Duration = Duration::from_micros(100);
/// How long the next step is waited for while the executor runs one: it takes the scheduler less, if there
/// is anything to plan.
const PATIENCE_AHEAD: Duration = Duration::from_micros(300);

/// The executor's end of the engine.
pub struct ExecutorEnd {
    /// Steps to run; disconnected when the engine shuts down.
    pub steps: Receiver<Step>,
    /// Where results go.
    pub commands: Sender<Command>,
    /// Plan sets in the ring.
    pub num_sets: usize,
    /// Most steps that are launched and not collected.
    pub max_in_flight_steps: usize,
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
    let launches_ahead = match executor.getattr_opt("launches_ahead")? {
        Some(launches_ahead) => launches_ahead.is_truthy()?,
        None => false,
    };
    let ahead = if launches_ahead {
        PATIENCE_AHEAD
    } else {
        Duration::ZERO
    };
    let mut launched: VecDeque<Launched> = VecDeque::with_capacity(end.max_in_flight_steps);
    let mut steps = end.steps;
    loop {
        while launched.len() < end.max_in_flight_steps {
            let received;
            (steps, received) = receive(py, steps, (!launched.is_empty()).then_some(ahead));
            match received {
                Ok(step) => launched.push_back(worker.launch(step)?),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Ok(()), // the engine was shut down
            }
        }
        let Some(oldest) = launched.pop_front() else {
            continue; // cannot be: the first step is waited for
        };
        let command = worker.collect(oldest)?;
        if end.commands.send(command).is_err() {
            return Ok(()); // the scheduler has ended
        }
    }
}

/// Waits for the next step, for `limit` if there is one, without the GIL.
fn receive(
    py: Python<'_>,
    steps: Receiver<Step>,
    limit: Option<Duration>,
) -> (Receiver<Step>, Result<Step, RecvTimeoutError>) {
    if limit == Some(Duration::ZERO) {
        let received = steps.try_recv().map_err(|error| match error {
            TryRecvError::Empty => RecvTimeoutError::Timeout,
            TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        });
        return (steps, received);
    }
    // `Receiver` is not `Sync`, so the wait moves it in and out.
    py.detach(move || {
        let received = match limit {
            None => recv_soon(&steps, PATIENCE, None),
            Some(limit) => recv_soon(&steps, limit, Some(Instant::now() + limit)),
        };
        (steps, received)
    })
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

/// A step that was launched.
struct Launched {
    step: Step,
    /// Why it was not, if the executor failed.
    failure: Option<String>,
}

impl Worker<'_> {
    fn launch(&mut self, step: Step) -> PyResult<Launched> {
        let plan = self.views.step_plan(&step.lease);
        let launched = plan.and_then(|plan| self.launch.call1((plan,)));
        let failure = match launched {
            Ok(_) => None,
            Err(error) => Some(self.failure(error, &step)?),
        };
        Ok(Launched { step, failure })
    }

    fn collect(&mut self, launched: Launched) -> PyResult<Command> {
        let Launched { mut step, failure } = launched;
        if let Some(failure) = failure {
            return Ok(Command::StepFailed(step, failure));
        }
        let Step {
            lease,
            results,
            graph_rows,
        } = &mut step;
        let collected = self.collect.call0().and_then(|result| {
            let plan = lease.plan();
            self.reader.read(&result, plan, self.vocab_size, results)?;
            *graph_rows = read_graph_rows(&result, plan)?;
            Ok(())
        });
        match collected {
            Ok(()) => Ok(Command::StepDone(step)),
            Err(error) => {
                let failure = self.failure(error, &step)?;
                Ok(Command::StepFailed(step, failure))
            }
        }
    }

    /// Logs what fails a step, and returns its message; an error that ends the thread is returned as one.
    fn failure(&self, error: PyErr, step: &Step) -> PyResult<String> {
        let py = self.launch.py();
        if !error.is_instance_of::<PyException>(py) {
            return Err(error);
        }
        log(py, &error, step.plan().step);
        Ok(describe(py, &error))
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
