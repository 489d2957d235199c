//! A delivery as Python sees it: flat arrays for who wants speed, one object per delta for who wants
//! comfort. Neither is made before it is asked for, and deltas share the delivery's memory.

use std::sync::Arc;

use chairlift_core::output::{Event, Output, Span, TokenLogprob};
use chairlift_core::request::{Finish, RequestStats, Time};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::types::PyList;

use crate::delivery::{Delivery, Outbox};
use crate::groups::wait_times;
use crate::numpy::{Kind, Plain, copied};

/// A delivery whose memory goes back to the outbox when nobody looks at it any more.
struct Shared {
    delivery: Delivery,
    outbox: Arc<Outbox>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.outbox.recycle(std::mem::take(&mut self.delivery));
    }
}

impl Shared {
    fn output(&self, index: usize) -> &Output {
        match &self.delivery.batch.events[index] {
            Event::Output(output) => output,
            _ => unreachable!("a delta is made for an output event"),
        }
    }
}

/// Everything that one or more iterations tell the client.
#[pyclass(frozen, module = "chairlift._core")]
pub struct OutputBatch {
    shared: Arc<Shared>,
}

impl OutputBatch {
    /// Wraps what was taken from the outbox.
    pub fn new(delivery: Delivery, outbox: &Arc<Outbox>) -> Self {
        let outbox = Arc::clone(outbox);
        Self {
            shared: Arc::new(Shared { delivery, outbox }),
        }
    }

    fn outputs(&self) -> impl Iterator<Item = &Output> {
        self.shared
            .delivery
            .batch
            .events
            .iter()
            .filter_map(|event| match event {
                Event::Output(output) => Some(output),
                _ => None,
            })
    }

    /// One entry per delta, as a numpy array.
    fn array<'py, T: Plain>(
        &self,
        py: Python<'py>,
        kind: Kind,
        entry: impl Fn(&Output) -> T,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut entries = Vec::with_capacity(self.shared.delivery.batch.events.len());
        entries.extend(self.outputs().map(entry));
        copied(py, &entries, kind)
    }
}

#[pymethods]
impl OutputBatch {
    /// Iterations merged into this batch.
    #[getter]
    fn iterations(&self) -> u64 {
        self.shared.delivery.iterations
    }

    /// Deltas in the batch.
    fn __len__(&self) -> usize {
        self.outputs().count()
    }

    /// `[N]` uint64 request of each delta.
    #[getter]
    fn request_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, ("uint64", 1), |output| output.request.0)
    }

    /// `[N]` int32 index of the answer among the request's `n`.
    #[getter]
    fn indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, ("int32", 1), |output| output.child as i32)
    }

    /// `[N, 2]` int64 range of `token_ids` of each delta.
    #[getter]
    fn token_ranges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, ("int64", 2), |output| ends(output.tokens))
    }

    /// `[T]` uint32 tokens of all deltas.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        copied(py, &self.shared.delivery.batch.token_ids, ("uint32", 1))
    }

    /// `[N, 2]` int64 range of `text` (in bytes of UTF-8) of each delta.
    #[getter]
    fn text_ranges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, ("int64", 2), |output| ends(output.text))
    }

    /// UTF-8 text of all deltas.
    #[getter]
    fn text(&self) -> &[u8] {
        self.shared.delivery.batch.text.as_bytes()
    }

    /// `[N]` uint8 how each delta ended its answer: 0 not, 1 eos, 2 stop token, 3 stop string,
    /// 4 length, 5 abort, 6 row failed, 7 step failed, 8 engine dead, 9 queue timeout, 10 deadline
    /// missed, 11 shed, 12 displaced.
    #[getter]
    fn finish_codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, ("uint8", 1), |output| finish_code(output.finish))
    }

    /// One object per delta, in order.
    fn deltas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for (index, event) in self.shared.delivery.batch.events.iter().enumerate() {
            if matches!(event, Event::Output(_)) {
                let shared = Arc::clone(&self.shared);
                list.append(Bound::new(py, Delta { shared, index })?)?;
            }
        }
        Ok(list)
    }

    /// Requests that are in a plan for the first time, with their cached prompt tokens and the seconds
    /// since their submission.
    fn scheduled(&self) -> Vec<(u64, u32, f64)> {
        let events = self.shared.delivery.batch.events.iter();
        events
            .filter_map(|event| match *event {
                Event::Scheduled {
                    request,
                    num_cached_tokens,
                    queue_time_us,
                } => Some((request.0, num_cached_tokens, queue_time_us as f64 / 1e6)),
                _ => None,
            })
            .collect()
    }

    /// What was scored of prompts: request, number of prompt tokens, and candidates with their
    /// log-probabilities, flat: for each token itself, then the best.
    fn prompt_logprobs(&self) -> Vec<(u64, u32, Vec<u32>, Vec<f32>)> {
        let batch = &self.shared.delivery.batch;
        let events = batch.events.iter();
        events
            .filter_map(|event| match event {
                Event::PromptLogprobs {
                    request,
                    num_tokens,
                    logprobs,
                } => {
                    let (tokens, values) = unzipped(&batch.logprobs[logprobs.range()]);
                    Some((request.0, *num_tokens, tokens, values))
                }
                _ => None,
            })
            .collect()
    }

    /// Answers to calls that were posted: the call's number, and its answer or the exception that it
    /// raises.
    fn answers(&self, py: Python<'_>) -> PyResult<Vec<(u64, Py<PyAny>)>> {
        let answers = self.shared.delivery.answers.iter();
        answers
            .map(|(call, answer)| Ok((call.0, answer.to_python(py)?)))
            .collect()
    }

    /// Requests that ended; their deltas are in this batch or an earlier one.
    fn ended(&self) -> Vec<Ended> {
        let events = self.shared.delivery.batch.events.iter();
        events
            .filter_map(|event| match event {
                Event::Ended { request, stats } => Some(Ended {
                    request: request.0,
                    stats: **stats,
                }),
                _ => None,
            })
            .collect()
    }
}

/// News of one answer: new tokens, their text, and how it ended if it did.
#[pyclass(frozen, module = "chairlift._core")]
pub struct Delta {
    shared: Arc<Shared>,
    index: usize,
}

impl Delta {
    fn output(&self) -> &Output {
        self.shared.output(self.index)
    }
}

#[pymethods]
impl Delta {
    /// The request, as `submit` named it.
    #[getter]
    fn request_id(&self) -> u64 {
        self.output().request.0
    }

    /// Which of the request's `n` answers.
    #[getter]
    fn index(&self) -> u32 {
        self.output().child
    }

    /// New tokens.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(
            py,
            &self.shared.delivery.batch.token_ids[self.output().tokens.range()],
        )
    }

    /// New text; it may lag behind the tokens.
    #[getter]
    fn text(&self) -> &str {
        &self.shared.delivery.batch.text[self.output().text.range()]
    }

    /// `stop`, `length`, `abort` or `error`, if this is the answer's end; of a request that was given
    /// up before it was scheduled `queue_timeout`, `deadline_missed`, `shed` or `displaced`.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.output().finish.map(Finish::reason)
    }

    /// The stop token that ended the answer.
    #[getter]
    fn stop_token_id(&self) -> Option<u32> {
        match self.output().finish {
            Some(Finish::StopToken(token)) => Some(token),
            _ => None,
        }
    }

    /// Index of the stop string that ended the answer.
    #[getter]
    fn stop_string_index(&self) -> Option<u32> {
        match self.output().finish {
            Some(Finish::StopString(index)) => Some(index),
            _ => None,
        }
    }

    /// Why the answer ended, if that was neither its own end nor its client's.
    #[getter]
    fn error(&self) -> Option<&str> {
        let message = self
            .shared
            .delivery
            .failure(self.index)
            .map(|message| &**message);
        match self.output().finish? {
            Finish::RowFailed => Some("the executor failed on this request; others go on"),
            Finish::StepFailed => Some(message.unwrap_or("the executor failed the step")),
            Finish::EngineDead => Some(message.unwrap_or("the engine is dead")),
            Finish::QueueTimeout => {
                Some("the request has waited for as long as its class may wait; retry later")
            }
            Finish::DeadlineMissed => Some(
                "the deadline has passed, or was certain to, before the request could be scheduled",
            ),
            Finish::Shed => Some("the engine is overloaded and gave the request up; retry later"),
            Finish::Displaced => {
                Some("the queue was full and a more important request took the place; retry later")
            }
            Finish::Eos
            | Finish::StopToken(_)
            | Finish::StopString(_)
            | Finish::Length
            | Finish::Abort => None,
        }
    }

    /// Whether the whole engine died.
    #[getter]
    fn engine_died(&self) -> bool {
        self.output().finish == Some(Finish::EngineDead)
    }

    /// Candidates and their log-probabilities, flat: for each token the sampled one, then the best.
    #[getter]
    fn logprobs(&self) -> Option<(Vec<u32>, Vec<f32>)> {
        let entries = &self.shared.delivery.batch.logprobs[self.output().logprobs.range()];
        if entries.is_empty() {
            return None;
        }
        Some(unzipped(entries))
    }
}

/// The end of a request, with what it cost. Times are seconds on the engine's clock.
#[pyclass(frozen, module = "chairlift._core")]
pub struct Ended {
    request: u64,
    stats: RequestStats,
}

#[pymethods]
impl Ended {
    /// The request, as `submit` named it.
    #[getter]
    fn request_id(&self) -> u64 {
        self.request
    }

    /// When it was submitted.
    #[getter]
    fn arrival_time(&self) -> f64 {
        seconds(self.stats.arrival)
    }

    /// When it was first in a plan.
    #[getter]
    fn first_scheduled_time(&self) -> Option<f64> {
        self.stats.first_scheduled.map(seconds)
    }

    /// When its first token was there.
    #[getter]
    fn first_token_time(&self) -> Option<f64> {
        self.stats.first_token.map(seconds)
    }

    /// When its last answer ended.
    #[getter]
    fn finished_time(&self) -> f64 {
        seconds(self.stats.finished)
    }

    /// Prompt tokens.
    #[getter]
    fn num_prompt_tokens(&self) -> u32 {
        self.stats.num_prompt_tokens
    }

    /// Prompt tokens that the prefix cache had.
    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.stats.num_cached_tokens
    }

    /// Output tokens of all answers.
    #[getter]
    fn num_output_tokens(&self) -> u32 {
        self.stats.num_output_tokens
    }

    /// Times one of its answers was preempted.
    #[getter]
    fn num_preemptions(&self) -> u32 {
        self.stats.num_preemptions
    }

    /// Seconds to the first token that the gate predicted; `None` if nothing was measured yet.
    #[getter]
    fn predicted_ttft(&self) -> Option<f64> {
        self.stats.predicted_ttft_us.map(|us| us as f64 / 1e6)
    }

    /// Seconds for which it waited for what before it was scheduled.
    #[getter]
    fn wait_times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        wait_times(py, self.stats.waits)
    }
}

fn unzipped(entries: &[TokenLogprob]) -> (Vec<u32>, Vec<f32>) {
    entries
        .iter()
        .map(|entry| (entry.token, entry.logprob))
        .unzip()
}

fn seconds(time: Time) -> f64 {
    time.0 as f64 / 1e6
}

fn finish_code(finish: Option<Finish>) -> u8 {
    match finish {
        None => 0,
        Some(Finish::Eos) => 1,
        Some(Finish::StopToken(_)) => 2,
        Some(Finish::StopString(_)) => 3,
        Some(Finish::Length) => 4,
        Some(Finish::Abort) => 5,
        Some(Finish::RowFailed) => 6,
        Some(Finish::StepFailed) => 7,
        Some(Finish::EngineDead) => 8,
        Some(Finish::QueueTimeout) => 9,
        Some(Finish::DeadlineMissed) => 10,
        Some(Finish::Shed) => 11,
        Some(Finish::Displaced) => 12,
    }
}

fn ends(span: Span) -> [i64; 2] {
    let range = span.range();
    [range.start as i64, range.end as i64]
}
