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
        let statuses = result.getattr(pyo3::intern!(py, "statuses"))?;
        copy_into(
            &statuses,
            "statuses",
            "uint8",
            Some(plan.num_seqs()),
            &mut out.statuses,
        )?;

        self.read_tokens(result, plan, vocab_size, out)?;
        let asked = Asked {
            names: &SAMPLES,
            parts: plan.num_samples(),
            vocab_size,
        };
        let into = (&mut out.logprob_offsets, &mut out.logprobs);
        let logprobs = result.getattr(pyo3::intern!(py, "logprobs"))?;
        self.read_logprobs(&logprobs, &asked, into)?;
        let asked = Asked {
            names: &PROMPT,
            parts: plan.num_scores(),
            vocab_size,
        };
        let into = (&mut out.prompt_logprob_offsets, &mut out.prompt_logprobs);
        let logprobs = result.getattr(pyo3::intern!(py, "prompt_logprobs"))?;
        if logprobs.is_none() && asked.parts > 0 {
            return Err(PyValueError::new_err(format!(
                "StepResult.prompt_logprobs is None, but the step scores {} prompt tokens",
                asked.parts
            )));
        }
        self.read_logprobs(&logprobs, &asked, into)
    }

    fn read_tokens(
        &mut self,
        result: &Bound<'_, PyAny>,
        plan: &StepPlan,
        vocab_size: u32,
        out: &mut StepResults,
    ) -> PyResult<()> {
        let py = result.py();
        let samples = plan.num_samples();
        let tokens = result.getattr(pyo3::intern!(py, "token_ids"))?;
        let offsets = result.getattr(pyo3::intern!(py, "token_offsets"))?;
        let (name, dtype) = ("token_ids", "int32");
        out.token_offsets.clear();
        if offsets.is_none() {
            copy_into(&tokens, name, dtype, Some(samples), &mut self.tokens)?;
            out.token_offsets.extend(0..=samples as u32);
        } else {
            copy_into(&tokens, name, dtype, None, &mut self.tokens)?;
            let (name, parts) = ("token_offsets", samples);
            let (entries, offsets_of) = (self.tokens.len(), &mut self.offsets);
            copy_into(&offsets, name, dtype, Some(parts + 1), offsets_of)?;
            check_offsets(name, &self.offsets, entries, 1)?;
            out.token_offsets
                .extend(self.offsets.iter().map(|&offset| offset as u32));
        }
        out.token_ids.clear();
        for (index, &token) in self.tokens.iter().enumerate() {
            let id = in_vocabulary(token, vocab_size);
            if id.is_none() {
                let sample = out.token_offsets[1..].partition_point(|&end| end as usize <= index);
                if status_of(plan, sample, &out.statuses)? == STATUS_OK {
                    return Err(outside("token_ids", token, vocab_size));
                }
            }
            out.token_ids.push(id.unwrap_or(0)); // of a failed row: never read
        }
        Ok(())
    }

    /// Reads a `RaggedLogprobs`; `None` leaves both vectors empty.
    fn read_logprobs(
        &mut self,
        logprobs: &Bound<'_, PyAny>,
        asked: &Asked,
        (out_offsets, out): (&mut Vec<u32>, &mut Vec<TokenLogprob>),
    ) -> PyResult<()> {
        out_offsets.clear();
        out.clear();
        if logprobs.is_none() {
            return Ok(());
        }
        let Names {
            offsets,
            ids,
            values,
        } = asked.names;
        let expected = Some(asked.parts + 1);
        let array = logprobs.getattr("offsets")?;
        copy_into(&array, offsets, "int32", expected, &mut self.offsets)?;
        let array = logprobs.getattr("token_ids")?;
        copy_into(&array, ids, "int32", None, &mut self.logprob_tokens)?;
        let entries = self.logprob_tokens.len();
        let array = logprobs.getattr("values")?;
        let into = &mut self.logprob_values;
        copy_into(&array, values, "float32", Some(entries), into)?;
        check_offsets(offsets, &self.offsets, entries, 0)?;
        let known = |token: i32| in_vocabulary(token, asked.vocab_size).is_some();
        if let Some(&token) = self.logprob_tokens.iter().find(|&&token| !known(token)) {
            return Err(outside(ids, token, asked.vocab_size));
        }
        out_offsets.extend(self.offsets.iter().map(|&offset| offset as u32));
        let pairs = self.logprob_tokens.iter().zip(&self.logprob_values);
        out.extend(pairs.map(|(&token, &logprob)| TokenLogprob {
            token: token as u32,
            logprob,
        }));
        Ok(())
    }
}

/// Reads how many rows the CUDA graph had that was replayed for a step; 0 if none was.
pub fn read_graph_rows(result: &Bound<'_, PyAny>, plan: &StepPlan) -> PyResult<u32> {
    let rows = result.getattr(pyo3::intern!(result.py(), "graph_rows"))?;
    let sequences = plan.num_seqs();
    match rows.extract::<u32>() {
        Ok(rows) if rows == 0 || rows as usize >= sequences => Ok(rows),
        _ => Err(PyValueError::new_err(format!(
            "StepResult.graph_rows is {rows}; it must be 0, or an integer not below the {sequences} \
             sequences of the step"
        ))),
    }
}

/// Names of the three arrays of a `RaggedLogprobs`, for messages.
struct Names {
    offsets: &'static str,
    ids: &'static str,
    values: &'static str,
}

const SAMPLES: Names = Names {
    offsets: "logprobs.offsets",
    ids: "logprobs.token_ids",
    values: "logprobs.values",
};

const PROMPT: Names = Names {
    offsets: "prompt_logprobs.offsets",
    ids: "prompt_logprobs.token_ids",
    values: "prompt_logprobs.values",
};

/// A `RaggedLogprobs` that a step asks for.
struct Asked {
    names: &'static Names,
    parts: usize,
    vocab_size: u32,
}

/// Checks that offsets cut so many entries into parts of `least` entries or more.
fn check_offsets(name: &str, offsets: &[i32], entries: usize, least: i32) -> PyResult<()> {
    let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
    let rising = offsets
        .windows(2)
        .all(|pair| i64::from(pair[0]) + i64::from(least) <= i64::from(pair[1]));
    if rising && first == 0 && usize::try_from(last) == Ok(entries) {
        return Ok(());
    }
    let by = if least == 0 { "" } else { ", by 1 or more," };
    Err(PyValueError::new_err(format!(
        "StepResult.{name} must rise{by} from 0 to the {entries} entries; they begin with {first} \
         and end with {last}"
    )))
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
