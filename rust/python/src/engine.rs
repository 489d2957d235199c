//! The engine as Python starts and stops it: settings in, two threads, one client.
//!
//! `EngineCore` checks the settings, starts the scheduler thread (which makes the core there, since it
//! never leaves its thread) and gives a Python thread the work of [`EngineCore::run_executor`].
//! Shutting down is idempotent, from any thread: the scheduler aborts what is live and ends, which
//! disconnects the executor thread.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use chairlift_core::Vocabulary;
use chairlift_core::config::{Limits, MAX_IN_FLIGHT_STEPS, Settings};
use chairlift_core::iteration::commit::StepResults;
use chairlift_core::record::RecordedEngine;
use chairlift_core::text::TokenTable;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::client::{EngineClient, Line, Post};
use crate::command::{Command, Message, Order, Step};
use crate::cost_model::{CoefficientsView, Learned};
use crate::delivery::Outbox;
use crate::errors::{config_error, misuse, setup_error};
use crate::executor_thread::{self, ExecutorEnd};
use crate::flight_log::json;
use crate::link;
use crate::log_writer::LogWriter;
use crate::plan_memory::plan_sets;
use crate::policy::read_policy;
use crate::scheduler_thread::{self, SchedulerEnd};

/// The attributes of the settings object, but for its policy; the names are the core's.
#[derive(FromPyObject)]
struct SettingsView {
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    max_model_len: u32,
    long_prefill_token_threshold: Option<u32>,
    block_size: u32,
    num_kv_blocks: u32,
    num_host_kv_blocks: u32,
    enable_prefix_caching: bool,
    watermark_blocks: Option<u32>,
    max_queued_requests: u32,
    max_queued_tokens: Option<u64>,
    vocab_size: u32,
    max_in_flight_steps: u32,
    cost_model: Option<CoefficientsView>,
}

/// Reads an object with the attributes of `chairlift.engine_args.CoreSettings`.
pub fn read_settings(settings: &Bound<'_, PyAny>) -> PyResult<Settings> {
    let policy = read_policy(&settings.getattr("policy")?)?;
    let view: SettingsView = settings.extract()?;
    Ok(Settings {
        max_num_seqs: view.max_num_seqs,
        max_num_batched_tokens: view.max_num_batched_tokens,
        max_model_len: view.max_model_len,
        long_prefill_token_threshold: view.long_prefill_token_threshold,
        block_size: view.block_size,
        num_kv_blocks: view.num_kv_blocks,
        num_host_kv_blocks: view.num_host_kv_blocks,
        enable_prefix_caching: view.enable_prefix_caching,
        watermark_blocks: view.watermark_blocks,
        max_queued_requests: view.max_queued_requests,
        max_queued_tokens: view.max_queued_tokens,
        policy,
        vocab_size: view.vocab_size,
        max_in_flight_steps: view.max_in_flight_steps,
        cost_model: view.cost_model.map(Into::into),
    })
}

/// The bytes of every token, and which tokens end a text.
#[derive(FromPyObject)]
struct VocabularyView {
    token_bytes: Vec<u8>,
    token_offsets: PyBuffer<i64>,
    special: PyBuffer<u8>,
    eos_token_ids: Vec<u32>,
}

/// The attributes of `chairlift.flight_log.Recording`.
#[derive(FromPyObject)]
struct RecordingView {
    path: PathBuf,
    limit: u64,
    about: String,
}

/// Makes the flight log's file; what is written about the engine goes to its beginning.
fn start_log(record: Option<RecordingView>) -> PyResult<(Option<LogWriter>, Option<String>)> {
    let Some(RecordingView { path, limit, about }) = record else {
        return Ok((None, None));
    };
    let writer = LogWriter::create(&path, limit).map_err(|error| {
        let message = format!(
            "record is {}, which cannot be written: {error}",
            path.display()
        );
        setup_error(&message, "invalid_config")
    })?;
    Ok((Some(writer), Some(about)))
}

/// Plan sets in the ring: those in flight, or that in flight and one that the executor may still look at.
const NUM_SETS: usize = MAX_IN_FLIGHT_STEPS as usize;

const SHUT_DOWN: Command = Command::Client(Message::Tell(Order::Shutdown));

/// A running engine.
#[pyclass(frozen, module = "chairlift._core")]
pub struct EngineCore {
    commands: Sender<Command>,
    client: Py<EngineClient>,
    outbox: Arc<Outbox>,
    settings: Settings,
    eos_token_ids: Vec<u32>,
    executor_end: Mutex<Option<ExecutorEnd>>,
    scheduler: Mutex<Option<JoinHandle<Option<Learned>>>>,
    /// What the scheduler had learned when it ended.
    learned: Mutex<Option<Learned>>,
    is_shut_down: AtomicBool,
    epoch: Instant,
}

#[pymethods]
impl EngineCore {
    /// Starts the scheduler thread. `settings` and `vocabulary` are objects with the attributes of
    /// `chairlift.engine_args.CoreSettings` and `chairlift.engine.CoreVocabulary`. A step that takes
    /// longer than `step_timeout` seconds ends the engine. `record` is a `chairlift.flight_log.Recording`.
    #[new]
    #[pyo3(signature = (settings, vocabulary, *, step_timeout = None, record = None))]
    fn new(
        settings: &Bound<'_, PyAny>,
        vocabulary: &Bound<'_, PyAny>,
        step_timeout: Option<u32>,
        record: Option<RecordingView>,
    ) -> PyResult<Self> {
        let py = settings.py();
        let settings = read_settings(settings)?;
        let limits = Arc::new(validate(&settings)?);
        let vocabulary = read_vocabulary(py, vocabulary.extract()?)?;
        let eos_token_ids = vocabulary.eos_token_ids.clone();
        let (log, about) = start_log(record)?;
        let outbox = Arc::new(Outbox::new()?);
        let (commands, received) = channel();
        let (to_executor, steps) = channel();
        let ring = plan_sets(&limits, NUM_SETS).into_iter().map(|lease| Step {
            lease,
            results: StepResults::default(),
            graph_rows: 0,
        });
        let epoch = Instant::now();
        let end = SchedulerEnd {
            commands: received,
            steps: to_executor,
            outbox: Arc::clone(&outbox),
            ring: ring.collect(),
            epoch,
            step_timeout: step_timeout.map(|seconds| Duration::from_secs(seconds.into())),
            log,
        };
        let executor_end = ExecutorEnd {
            steps,
            commands: commands.clone(),
            num_sets: NUM_SETS,
            max_in_flight_steps: limits.max_in_flight_steps() as usize,
            vocab_size: limits.vocab_size(),
        };
        let scheduler = py.detach(|| start_scheduler(settings.clone(), vocabulary, about, end))?;
        let client = EngineClient::new(Line::new(
            Post::Here(commands.clone()),
            Arc::clone(&outbox),
            limits,
            eos_token_ids.clone(),
        ));
        Ok(Self {
            commands,
            client: Py::new(py, client)?,
            outbox,
            settings,
            eos_token_ids,
            executor_end: Mutex::new(Some(executor_end)),
            scheduler: Mutex::new(Some(scheduler)),
            learned: Mutex::new(None),
            is_shut_down: AtomicBool::new(false),
            epoch,
        })
    }

    /// The engine's client.
    #[getter]
    fn client(&self, py: Python<'_>) -> Py<EngineClient> {
        self.client.clone_ref(py)
    }

    /// Runs steps on `executor` until the engine is shut down; the whole life of the executor thread.
    fn run_executor(&self, executor: &Bound<'_, PyAny>) -> PyResult<()> {
        let end = self
            .executor_end
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match end {
            Some(end) => executor_thread::run(end, executor),
            // The engine ended before its executor thread came.
            None if self.is_shut_down.load(Ordering::Acquire) => Ok(()),
            None => Err(misuse("the engine has an executor thread already")),
        }
    }

    /// Serves a client in another process, at the other end of a socket that it takes over, until that is
    /// gone; then the engine ends. What it says goes there alone.
    fn serve(&self, py: Python<'_>, fd: RawFd) -> PyResult<()> {
        let (settings, eos) = (&self.settings, &self.eos_token_ids);
        py.detach(|| link::serve(fd, settings, eos, &self.commands, &self.outbox))?;
        Ok(())
    }

    /// Aborts what is live and ends the scheduler thread; the executor thread ends after its step.
    /// Idempotent. The scheduler thread never needs the GIL, so this cannot dead-lock.
    fn shutdown(&self, py: Python<'_>) {
        self.is_shut_down.store(true, Ordering::Release);
        let _ = self.commands.send(SHUT_DOWN); // it may have ended already
        let handle = self
            .scheduler
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // A scheduler that panicked has told the clients.
        let ended = py.detach(|| handle.map(JoinHandle::join));
        if let Some(Ok(learned)) = ended {
            *self.learned.lock().unwrap_or_else(PoisonError::into_inner) = learned;
        }
        // An executor end that was never taken holds steps: let go of it.
        drop(
            self.executor_end
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
    }

    /// What was learned of iterations' time, once the engine was shut down; `None` if that was too
    /// little.
    fn learned<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let learned = *self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        learned.map(|learned| learned.to_dict(py)).transpose()
    }

    /// Seconds on the engine's clock, which the times of `Ended` are on.
    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }
}

impl Drop for EngineCore {
    fn drop(&mut self) {
        // Nobody can use the engine any more; the threads end by themselves.
        let _ = self.commands.send(SHUT_DOWN);
    }
}

/// Raises what starting an engine with these settings would raise, without starting one.
#[pyfunction]
pub fn check_settings(settings: &Bound<'_, PyAny>) -> PyResult<()> {
    validate(&read_settings(settings)?).map(drop)
}

/// The settings as the core has them, as JSON; without any, the core's own defaults.
#[pyfunction]
#[pyo3(signature = (settings = None))]
pub fn settings_json(settings: Option<&Bound<'_, PyAny>>) -> PyResult<String> {
    let settings = settings.map(read_settings).transpose()?;
    json(&settings.unwrap_or_default())
}

/// Raises what starting an engine with this `PolicyConfig` would raise.
#[pyfunction]
pub fn check_policy(policy: &Bound<'_, PyAny>) -> PyResult<()> {
    let checked = read_policy(policy)?.validate();
    checked.map(drop).map_err(|error| config_error(&error))
}

fn validate(settings: &Settings) -> PyResult<Limits> {
    settings.validate().map_err(|error| config_error(&error))
}

/// Starts the thread, and waits until the core is made on it.
fn start_scheduler(
    settings: Settings,
    vocabulary: Vocabulary,
    about: Option<String>,
    end: SchedulerEnd,
) -> PyResult<JoinHandle<Option<Learned>>> {
    let (ready, made) = channel();
    let handle = thread::Builder::new()
        .name("chairlift-sched".to_owned())
        .spawn(move || {
            let made = match about {
                None => RecordedEngine::new(&settings, vocabulary),
                Some(about) => RecordedEngine::recorded(&settings, vocabulary, &about),
            };
            match made {
                Ok(engine) => {
                    let _ = ready.send(Ok(())); // whoever started us may be gone
                    scheduler_thread::run(engine, end)
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    None
                }
            }
        })?;
    match made.recv() {
        Ok(Ok(())) => Ok(handle),
        Ok(Err(error)) => Err(config_error(&error)),
        Err(_) => Err(misuse("the scheduler thread panicked at start")),
    }
}

fn read_vocabulary(py: Python<'_>, view: VocabularyView) -> PyResult<Vocabulary> {
    let offsets = view.token_offsets.to_vec(py)?;
    let special = view.special.to_vec(py)?;
    let table = TokenTable::new(&view.token_bytes, &offsets, &special)
        .map_err(|error| setup_error(&error.to_string(), error.code()))?;
    Ok(Vocabulary {
        tokens: Arc::new(table),
        eos_token_ids: view.eos_token_ids,
    })
}
