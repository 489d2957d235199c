//! Reads `chairlift.executor.StepResult` into the core's vectors, checking every array.
//!
//! An executor is foreign code: a wrong dtype, shape, length or token is told with the array's name and
//! both numbers, and fails the step like an exception of the executor. What passes here the core
//! accepts.

use chairlift_core::iteration::commit::{STATUS_OK, StepResults};
use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::output::TokenLogprob;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Reused between steps, so that a step allocates nothing here.
#[derive(Default)]
pub struct ResultReader {
    tokens: Vec<i32>,
    offsets: Vec<i32>,
    logprob_tokens: Vec<i32>,
    logprob_values: Vec<f32>,
}

impl ResultReader {
    /// Fills `out` from a `StepResult` for `plan`.
    pub fn read(
        &mut self,
        result: &Bound<'_, PyAny>,
        plan: &StepPlan,
        vocab_size: u32,
        out: &mut StepResults,
    ) -> PyResult<()> {
        let py = result.py();
        let samples = plan.num_samples();
        let statuses = result.getattr(pyo3::intern!(py, "statuses"))?;
        copy_into(
            &statuses,
            "statuses",
            "uint8",
            Some(plan.num_seqs()),
            &mut out.statuses,
        )?;

        let tokens = result.getattr(pyo3::intern!(py, "token_ids"))?;
        copy_into(
            &tokens,
            "token_ids",
            "int32",
            Some(samples),
            &mut self.tokens,
        )?;
        out.token_ids.clear();
        for (sample, &token) in self.tokens.iter().enumerate() {
            out.token_ids.push(match in_vocabulary(token, vocab_size) {
                Some(id) => id,
                None if status_of(plan, sample, &out.statuses)? != STATUS_OK => 0, // never read
                None => return Err(outside("token_ids", token, vocab_size)),
            });
        }
        out.token_offsets.clear();
        out.token_offsets.extend(0..=samples as u32);

        out.logprob_offsets.clear();
        out.logprobs.clear();
        let logprobs = result.getattr(pyo3::intern!(py, "logprobs"))?;
        if !logprobs.is_none() {
            self.read_logprobs(&logprobs, samples, vocab_size, out)?;
        }
        Ok(())
    }

    fn read_logprobs(
        &mut self,
        logprobs: &Bound<'_, PyAny>,
        samples: usize,
        vocab_size: u32,
        out: &mut StepResults,
    ) -> PyResult<()> {
        let offsets = logprobs.getattr("offsets")?;
        copy_into(
            &offsets,
            "logprobs.offsets",
            "int32",
            Some(samples + 1),
            &mut self.offsets,
        )?;
        let ids = logprobs.getattr("token_ids")?;
        copy_into(
            &ids,
            "logprobs.token_ids",
            "int32",
            None,
            &mut self.logprob_tokens,
        )?;
        let entries = self.logprob_tokens.len();
        let values = logprobs.getattr("values")?;
        copy_into(
            &values,
            "logprobs.values",
            "float32",
            Some(entries),
            &mut self.logprob_values,
        )?;

        let rising = self.offsets.windows(2).all(|pair| pair[0] <= pair[1]);
        let (first, last) = (self.offsets[0], self.offsets[samples]);
        if !rising || first != 0 || usize::try_from(last) != Ok(entries) {
            return Err(PyValueError::new_err(format!(
                "StepResult.logprobs.offsets must rise from 0 to the {entries} entries; \
                 they begin with {first} and end with {last}"
            )));
        }
        let mut tokens = self.logprob_tokens.iter();
        if let Some(token) = tokens.find(|&&token| in_vocabulary(token, vocab_size).is_none()) {
            return Err(outside("logprobs.token_ids", *token, vocab_size));
        }
        out.logprob_offsets
            .extend(self.offsets.iter().map(|&offset| offset as u32));
        out.logprobs
            .extend(self.logprob_tokens.iter().zip(&self.logprob_values).map(
                |(&token, &logprob)| TokenLogprob {
                    token: token as u32,
                    logprob,
                },
            ));
        Ok(())
    }
}

/// Copies a one-dimensional array of `T` with `len` entries (any number where `None`).
fn copy_into<T: Element + Default + Clone>(
    array: &Bound<'_, PyAny>,
    name: &str,
    dtype: &str,
    len: Option<usize>,
    into: &mut Vec<T>,
) -> PyResult<()> {
    let buffer = PyBuffer::<T>::get(array).map_err(|_| wrong_array(array, name, dtype))?;
    if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
        return Err(wrong_array(array, name, dtype));
    }
    let got = buffer.item_count();
    if let Some(expected) = len.filter(|&expected| expected != got) {
        return Err(PyValueError::new_err(format!(
            "StepResult.{name} has {got} entries, but the step needs {expected}"
        )));
    }
    into.clear();
    into.resize(got, T::default());
    buffer.copy_to_slice(array.py(), into)
}

/// Says what was wanted and what came.
fn wrong_array(array: &Bound<'_, PyAny>, name: &str, dtype: &str) -> PyErr {
    let came = match PyUntypedBuffer::get(array) {
        Err(_) => format!(
            "a {}",
            array
                .get_type()
                .name()
                .map_or("?".into(), |n| n.to_string())
        ),
        Ok(buffer) => format!(
            "{} dimension(s) of format '{}', {}",
            buffer.dimensions(),
            buffer.format().to_string_lossy(),
            if buffer.is_c_contiguous() {
                "contiguous"
            } else {
                "not contiguous"
            },
        ),
    };
    PyTypeError::new_err(format!(
        "StepResult.{name} must be a contiguous one-dimensional {dtype} array; it is {came}"
    ))
}

fn in_vocabulary(token: i32, vocab_size: u32) -> Option<u32> {
    u32::try_from(token).ok().filter(|&id| id < vocab_size)
}

/// The status of the sequence that a sample scores. The plan lay open to the executor, so it may hold
/// anything by now.
fn status_of(plan: &StepPlan, sample: usize, statuses: &[u8]) -> PyResult<u8> {
    let sequence = plan.logits_indices.get(sample).and_then(|&token| {
        let begun = plan
            .query_start_loc
            .partition_point(|&start| start <= token);
        begun.checked_sub(1)
    });
    let status = sequence.and_then(|sequence| statuses.get(sequence));
    status.copied().ok_or_else(|| {
        PyValueError::new_err(format!(
            "sample {sample} belongs to none of the plan's {} sequences any more: an executor must \
             not write to the arrays of its plan",
            statuses.len()
        ))
    })
}

fn outside(name: &str, token: i32, vocab_size: u32) -> PyErr {
    PyValueError::new_err(format!(
        "StepResult.{name} has token {token}, which is outside the vocabulary of {vocab_size} tokens"
    ))
}
