//! From logits to tokens, row by row.
//!
//! The way of one sample:
//!
//! 1. Log-probabilities, where asked for, are those of the raw logits, before any of what follows.
//! 2. [`row`] applies the row's edits: logit bias, suppression before `min_tokens`, penalties.
//! 3. [`choose`] takes the best token (greedy), or tempers, cuts (min-p, top-k, top-p; [`select`]) and
//!    takes the best after adding noise ([`noise`]).
//! 4. The token is added to the row's history.
//!
//! A sample is a pure function of its row's logits, parameters, history and output index. A row whose
//! logits hold NaN or +infinity, or no finite one, fails alone.

pub mod choose;
pub mod noise;
pub mod reset;
pub mod row;
pub mod select;

use std::cell::RefCell;
use std::sync::OnceLock;

use crate::element::Dtype;
use crate::parallel;
use choose::{choose_greedily, choose_randomly, log_total, peak};
use row::Row;
use select::{Candidate, top_k};

/// Logits in all samples together below which one thread does them.
const PARALLEL_MIN_LOGITS: usize = 65_536;

/// What can be wrong with a call; nothing is changed when one is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    /// A row that the sampler does not have.
    #[error("row {row} is not below max_rows {max_rows}")]
    Row {
        /// The row.
        row: i64,
        /// How many there are.
        max_rows: usize,
    },
    /// A token id outside of the vocabulary.
    #[error("token id {id} in {what} is not below vocab_size {vocab_size}")]
    Token {
        /// Where it was found.
        what: &'static str,
        /// The id.
        id: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A parameter that cannot be used.
    #[error("row {row}: {what}")]
    Parameter {
        /// The row.
        row: i64,
        /// What is wrong, with the value.
        what: String,
    },
    /// Arrays that contradict each other.
    #[error("sampler: {0}")]
    Shape(String),
}

/// Logits of the samples of a step: contiguous `[rows, vocab_size]`.
#[derive(Clone, Copy, Debug)]
pub struct Logits {
    /// First element.
    pub data: *const u8,
    /// Element type.
    pub dtype: Dtype,
    /// Number of samples.
    pub rows: usize,
}

// SAFETY: the pointer is only read, under the contract of `Sampler::sample`.
unsafe impl Sync for Logits {}

/// Which sample a row of logits is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The sampler's row.
    pub row: usize,
    /// Output tokens that the row's sequence has already.
    pub output_index: u32,
}

/// What came of a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token; nothing if the row failed.
    pub token: Option<u32>,
    /// Margin between the best and the second-best score; 0 unless asked for.
    pub margin: f32,
    /// Log-probabilities: the sampled token's, then the best in descending order, ties by id.
    pub logprobs: Vec<(u32, f32)>,
}

/// The sampling state of all rows.
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    rows: Vec<Row>,
}

impl Sampler {
    /// A sampler with `max_rows` greedy rows.
    pub fn new(max_rows: usize, vocab_size: usize) -> Self {
        Self {
            vocab_size,
            rows: vec![Row::default(); max_rows],
        }
    }

    /// Size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Checks that a row exists.
    pub fn check_row(&self, row: i64) -> Result<usize, SamplerError> {
        let max_rows = self.rows.len();
        usize::try_from(row)
            .ok()
            .filter(|&row| row < max_rows)
            .ok_or(SamplerError::Row { row, max_rows })
    }

    /// Checks token ids against the vocabulary.
    pub fn check_tokens(&self, what: &'static str, ids: &[i32]) -> Result<(), SamplerError> {
        let vocab_size = self.vocab_size;
        let is_bad = |&&id: &&i32| usize::try_from(id).map_or(true, |id| id >= vocab_size);
        match ids.iter().find(is_bad) {
            Some(&id) => Err(SamplerError::Token {
                what,
                id: id.into(),
                vocab_size,
            }),
            None => Ok(()),
        }
    }

    /// Replaces a row's state. The row's ids have been checked.
    pub fn reset(&mut self, row: usize, state: Row) {
        self.rows[row] = state;
    }

    /// Samples one token for each row of logits and adds it to its row's history.
    ///
    /// # Safety
    /// `logits.data` points to `logits.rows * vocab_size` elements that nobody writes meanwhile.
    pub unsafe fn sample(
        &mut self,
        logits: Logits,
        samples: &[Sample],
        margins: bool,
        threads: usize,
    ) -> Result<Vec<Sampled>, SamplerError> {
        if logits.rows != samples.len() {
            let (rows, count) = (logits.rows, samples.len());
            return Err(SamplerError::Shape(format!(
                "{rows} rows of logits, {count} samples"
            )));
        }
        for sample in samples {
            self.check_row(sample.row as i64)?;
        }
        let results: Vec<OnceLock<Sampled>> = samples.iter().map(|_| OnceLock::new()).collect();
        let is_small = samples.len() * self.vocab_size < PARALLEL_MIN_LOGITS;
        let this = &*self;
        parallel::for_each(if is_small { 1 } else { threads }, samples.len(), &|i| {
            // SAFETY: row `i` is within the logits by the caller's promise.
            let sampled = unsafe { this.sample_one(&logits, i, samples[i], margins) };
            results[i].set(sampled).expect("each sample is taken once");
        });
        let results: Vec<Sampled> = results
            .into_iter()
            .map(|result| result.into_inner().expect("every sample was taken"))
            .collect();
        for (sample, result) in samples.iter().zip(&results) {
            if let Some(token) = result.token {
                self.rows[sample.row].push(token);
            }
        }
        Ok(results)
    }

    /// # Safety
    /// `logits` has a row `i` of `vocab_size` elements.
    unsafe fn sample_one(
        &self,
        logits: &Logits,
        i: usize,
        sample: Sample,
        margins: bool,
    ) -> Sampled {
        let at = i * self.vocab_size;
        // SAFETY: the caller's promise.
        unsafe {
            match logits.dtype {
                Dtype::F32 => {
                    let raw = logits.data.cast::<f32>().add(at);
                    let raw = std::slice::from_raw_parts(raw, self.vocab_size);
                    Memory::with(|memory| self.sample_raw(raw, sample, margins, memory))
                }
                dtype => {
                    let raw = logits.data.add(at * dtype.size());
                    let mut wide = Memory::with(|memory| std::mem::take(&mut memory.widened));
                    wide.clear();
                    dtype.widen(raw, self.vocab_size, &mut wide);
                    Memory::with(|memory| {
                        let sampled = self.sample_raw(&wide, sample, margins, memory);
                        memory.widened = wide;
                        sampled
                    })
                }
            }
        }
    }

    fn sample_raw(
        &self,
        raw: &[f32],
        sample: Sample,
        margins: bool,
        memory: &mut Memory,
    ) -> Sampled {
        let row = &self.rows[sample.row];
        let params = &row.params;
        let has_edits = row.has_edits(sample.output_index);
        let edited = if has_edits {
            memory.edited.clear();
            memory.edited.extend_from_slice(raw);
            row.edit(&mut memory.edited, sample.output_index);
            memory.edited.as_slice()
        } else {
            raw
        };
        let failed = Sampled {
            token: None,
            margin: 0.0,
            logprobs: Vec::new(),
        };
        let Some(top) = peak(edited) else {
            return failed;
        };
        let choice = if params.is_greedy() {
            choose_greedily(edited, top, margins)
        } else {
            let stream = params.stream(sample.output_index);
            choose_randomly(edited, top, params, stream, &mut memory.candidates)
        };
        let mut logprobs = Vec::new();
        if let Some(count) = params.logprobs {
            let raw_peak = if has_edits {
                peak(raw).map(|p| p.logit)
            } else {
                Some(top.logit)
            };
            // Edits may hide a NaN of the raw logits; the row fails all the same.
            let Some(raw_peak) = raw_peak else {
                return failed;
            };
            logprobs =
                log_probabilities(raw, raw_peak, choice.token, count, &mut memory.candidates);
        }
        let margin = if margins { choice.margin } else { 0.0 };
        Sampled {
            token: Some(choice.token),
            margin,
            logprobs,
        }
    }
}

fn log_probabilities(
    raw: &[f32],
    peak: f32,
    token: u32,
    count: usize,
    candidates: &mut Vec<Candidate>,
) -> Vec<(u32, f32)> {
    let log_total = log_total(raw, peak);
    let value = |logit: f32| (f64::from(logit) - f64::from(peak) - log_total) as f32;
    top_k(raw, count, f32::NEG_INFINITY, candidates);
    candidates.sort_unstable_by_key(|candidate| std::cmp::Reverse(candidate.key));
    let best = candidates
        .iter()
        .map(|candidate| (candidate.id(), value(candidate.logit())));
    std::iter::once((token, value(raw[token as usize])))
        .chain(best)
        .collect()
}

/// A thread's working memory; kept between calls.
struct Memory {
    widened: Vec<f32>,
    edited: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Memory {
    fn with<R>(use_it: impl FnOnce(&mut Self) -> R) -> R {
        thread_local! {
            static MEMORY: RefCell<Memory> = const {
                RefCell::new(Memory { widened: Vec::new(), edited: Vec::new(), candidates: Vec::new() })
            };
        }
        MEMORY.with(|memory| use_it(&mut memory.borrow_mut()))
    }
}
