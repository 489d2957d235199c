//! The sampler for Python: a stateful class that takes row resets and logits.
//!
//! `chairlift.sampler` is the only caller; it checks the logits tensor and builds the result.

#![allow(
    clippy::needless_pass_by_value,
    reason = "PyO3 hands arguments over by value"
)]

use std::sync::{Mutex, PoisonError};

use chairlift_kernels::element::Dtype;
use chairlift_kernels::sampling::reset::ResetArrays;
use chairlift_kernels::sampling::{self, Logits, Sample, Sampled};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Log-probabilities of all samples, ragged: offsets, token ids, values.
type Logprobs = (Vec<i32>, Vec<i32>, Vec<f32>);

/// Sampling state of all rows; see `chairlift_kernels::sampling`.
#[pyclass(frozen, module = "chairlift._core")]
pub struct Sampler(Mutex<sampling::Sampler>);

#[pymethods]
impl Sampler {
    /// A sampler whose rows are all greedy.
    #[new]
    fn new(max_rows: usize, vocab_size: usize) -> Self {
        Self(Mutex::new(sampling::Sampler::new(max_rows, vocab_size)))
    }

    /// Resets rows; the arrays are those of `chairlift.executor.RowResets`.
    #[allow(clippy::too_many_arguments)] // one flat call from Python
    fn reset(
        &self,
        py: Python<'_>,
        rows: PyBuffer<i32>,
        floats: PyBuffer<f32>,
        ints: PyBuffer<i64>,
        id_ranges: PyBuffer<i32>,
        bias_ranges: PyBuffer<i32>,
        suppressed_ranges: PyBuffer<i32>,
        ids: PyBuffer<i32>,
        bias_ids: PyBuffer<i32>,
        bias_values: PyBuffer<f32>,
        suppressed_ids: PyBuffer<i32>,
    ) -> PyResult<()> {
        let arrays = ResetArrays {
            rows: &rows.to_vec(py)?,
            floats: &floats.to_vec(py)?,
            ints: &ints.to_vec(py)?,
            id_ranges: &id_ranges.to_vec(py)?,
            bias_ranges: &bias_ranges.to_vec(py)?,
            suppressed_ranges: &suppressed_ranges.to_vec(py)?,
            ids: &ids.to_vec(py)?,
            bias_ids: &bias_ids.to_vec(py)?,
            bias_values: &bias_values.to_vec(py)?,
            suppressed_ids: &suppressed_ids.to_vec(py)?,
        };
        py.detach(|| {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .reset_rows(arrays)
        })
        .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Samples from the logits at an address, contiguous `[S, vocab_size]`; fills `token_ids`,
    /// `statuses` and, if given, `margins` (all `[S]`), and returns the log-probabilities if any
    /// sample asked for them.
    #[pyo3(signature = (logits, is_bf16, rows, sample_rows, output_indices, token_ids, statuses, margins, threads))]
    #[allow(clippy::too_many_arguments)] // one flat call from Python
    fn sample(
        &self,
        py: Python<'_>,
        logits: usize,
        is_bf16: bool,
        rows: usize,
        sample_rows: PyBuffer<i32>,
        output_indices: PyBuffer<i32>,
        token_ids: PyBuffer<i32>,
        statuses: PyBuffer<u8>,
        margins: Option<PyBuffer<f32>>,
        threads: usize,
    ) -> PyResult<Option<Logprobs>> {
        let samples = samples(&sample_rows.to_vec(py)?, &output_indices.to_vec(py)?)?;
        let wants_margins = margins.is_some();
        let sampled = py
            .detach(|| {
                let dtype = if is_bf16 { Dtype::Bf16 } else { Dtype::F32 };
                let logits = Logits {
                    data: logits as *const u8,
                    dtype,
                    rows,
                };
                let mut sampler = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: the Python caller has checked type, shape and contiguity of the logits, and
                // keeps them.
                unsafe { sampler.sample(logits, &samples, wants_margins, threads) }
            })
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let tokens: Vec<i32> = sampled
            .iter()
            .map(|s| s.token.unwrap_or(0).cast_signed())
            .collect();
        token_ids.copy_from_slice(py, &tokens)?;
        let failed: Vec<u8> = sampled
            .iter()
            .map(|s| u8::from(s.token.is_none()))
            .collect();
        statuses.copy_from_slice(py, &failed)?;
        if let Some(margins) = margins {
            let values: Vec<f32> = sampled.iter().map(|s| s.margin).collect();
            margins.copy_from_slice(py, &values)?;
        }
        Ok(ragged(&sampled))
    }
}

fn samples(rows: &[i32], output_indices: &[i32]) -> PyResult<Vec<Sample>> {
    if rows.len() != output_indices.len() {
        let (rows, indices) = (rows.len(), output_indices.len());
        let message = format!("{rows} sample rows but {indices} output indices");
        return Err(PyValueError::new_err(message));
    }
    rows.iter()
        .zip(output_indices)
        .map(
            |(&row, &index)| match (usize::try_from(row), u32::try_from(index)) {
                (Ok(row), Ok(output_index)) => Ok(Sample { row, output_index }),
                _ => Err(PyValueError::new_err(format!(
                    "sample row {row}, output index {index}"
                ))),
            },
        )
        .collect()
}

fn ragged(sampled: &[Sampled]) -> Option<Logprobs> {
    if sampled.iter().all(|s| s.logprobs.is_empty()) {
        return None;
    }
    let (mut offsets, mut ids, mut values) = (vec![0], Vec::new(), Vec::new());
    for s in sampled {
        ids.extend(s.logprobs.iter().map(|(id, _)| id.cast_signed()));
        values.extend(s.logprobs.iter().map(|(_, value)| *value));
        offsets.push(ids.len() as i32);
    }
    Some((offsets, ids, values))
}
