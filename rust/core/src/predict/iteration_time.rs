//! How long an iteration will take: a cost model that is fitted while the engine runs.
//!
//! ```text
//! t = t0 + t_seq * sequences + max(t_weights, t_tok * tokens) + t_ctx * (sum of the decodes' contexts)
//!        + t_pair * (sum over prefill chunks of chunk * (context before + chunk / 2)) + t_sample * samples
//!        + t_copy * (blocks copied from and to the host)
//! ```
//! The maximum is the roofline of the linear layers: reading the weights, or the tokens' arithmetic; the
//! next two terms are attention. Every coefficient is at least 0.
//!
//! It is recursive least squares with forgetting, kept as sums of products rather than as their inverse
//! (`moments`): a prior that is never forgotten holds what the load does not show, and terms that come
//! and go together share their time. Sums are kept apart by the number of tokens, so that a long stretch
//! of decodes does not wear away what prefill costs, and so that the maximum's knee can be chosen among
//! their borders (`fit`). An iteration counts by its error relative to what it took or should have
//! taken, whichever is more: one that was stalled from outside counts for little, the less the longer.
//!
//! A machine is not as fast in one second as in the next: its clock is throttled, or neighbours use its
//! memory. What is learned is how fast it is over hundreds of iterations; one factor, the slowdown,
//! follows how fast it is now (exponential smoothing of measured over learned), and predictions have it.
//!
//! All arithmetic is plain, in a fixed order: the same log gives the same model, to the bit.

mod fit;
mod moments;
mod shares;

pub use fit::Coefficients;
pub use shares::StepShares;

use crate::metrics::{RecentMoments, RecentQuantiles};
use crate::predict::iteration_time::fit::Fit;
use crate::predict::iteration_time::moments::{BinnedMoments, Row, bin_of};

/// Iterations before the model says anything.
const FEWEST: u64 = 32;
/// Iterations between two fits, where none is a surprise.
const FIT_EVERY: u64 = 16;
/// An error of so many times the mean one, and of [`LEAST_SURPRISE`], is a surprise.
const SURPRISE: f64 = 4.0;
const LEAST_SURPRISE: f64 = 0.08;
/// Share of an iteration's error that the slowdown takes over.
const FOLLOWS: f64 = 0.25;
/// Largest relative error that it sees: an iteration that was stalled moves it by an eighth at most.
const LARGEST_ERROR: f64 = 0.5;
/// Power of two of the smallest ratio of measured to predicted time that is told apart.
const LOWEST_RATIO: i32 = -8;

/// What is in an iteration, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StepShape {
    /// Sequences in it.
    pub sequences: f64,
    /// Tokens to compute.
    pub tokens: f64,
    /// Sum of the contexts of the sequences with one token, that token included.
    pub decode_context: f64,
    /// Sum over the other sequences of chunk * (context before + chunk / 2).
    pub prefill_pairs: f64,
    /// Rows of logits that are sampled.
    pub samples: f64,
    /// Blocks that are copied from and to the host.
    pub copies: f64,
}

impl StepShape {
    /// Adds a sequence with one token, which has a context of `context` tokens with it, and `samples`
    /// answers.
    pub fn add_decode(&mut self, context: u32, samples: u32) {
        self.sequences += 1.0;
        self.tokens += 1.0;
        self.decode_context += f64::from(context);
        self.samples += f64::from(samples);
    }

    /// Adds a prefill chunk after `before` tokens of context.
    pub fn add_chunk(&mut self, before: u32, chunk: u32, samples: u32) {
        self.sequences += 1.0;
        self.tokens += f64::from(chunk);
        self.prefill_pairs += pairs(before, chunk);
        self.samples += f64::from(samples);
    }
}

/// Pairs of a chunk's tokens and those before each.
pub fn pairs(before: u32, chunk: u32) -> f64 {
    let chunk = f64::from(chunk);
    chunk * (f64::from(before) + chunk / 2.0)
}

/// How long an iteration is expected to take, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// By what is in it: on a machine as fast as it is in the long run.
    pub learned_us: f64,
    /// As fast as it is now.
    pub now_us: f64,
}

/// The cost model.
#[derive(Clone, Debug)]
pub struct CostModel {
    fit: Fit,
    moments: BinnedMoments,
    num_observations: u64,
    was_loaded: bool,
    /// How many times as long as learned iterations take now.
    slowdown: f64,
    /// Measured over predicted, each before it was learned from.
    ratios: RecentQuantiles,
    /// The relative error's absolute value.
    error: RecentMoments,
    /// Most tokens of an iteration that was learned from.
    most_tokens: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self::new(None)
    }
}

impl CostModel {
    /// A model that begins with what another had learned, or with nothing.
    pub fn new(loaded: Option<Coefficients>) -> Self {
        Self {
            fit: Fit::new(loaded),
            moments: BinnedMoments::default(),
            num_observations: 0,
            was_loaded: loaded.is_some(),
            slowdown: 1.0,
            ratios: RecentQuantiles::new(LOWEST_RATIO),
            error: RecentMoments::default(),
            most_tokens: loaded.map_or(0.0, |loaded| loaded.most_tokens),
        }
    }

    /// Whether it has seen enough to predict.
    pub fn is_known(&self) -> bool {
        self.was_loaded || self.num_observations >= FEWEST
    }

    /// Iterations that it has learned from, without those of a loaded model.
    pub fn num_observations(&self) -> u64 {
        self.num_observations
    }

    /// What is expected of an iteration; `None` while too little is known.
    pub fn predict(&self, shape: &StepShape) -> Option<Prediction> {
        let learned_us = self.fit.coefficients().time(shape).max(1.0);
        self.is_known().then_some(Prediction {
            learned_us,
            now_us: self.slowdown * learned_us,
        })
    }

    /// What a share of `q` of the iterations of late did not exceed, over what was predicted of each;
    /// `None` before the first prediction.
    pub fn ratio(&self, q: f64) -> Option<f64> {
        self.ratios.quantile(q)
    }

    /// How many times as long as learned iterations take now: above 1 on a machine that is slower than it
    /// was over the last hundreds of iterations.
    pub fn slowdown(&self) -> f64 {
        self.slowdown
    }

    /// What it has learned, times the slowdown: what its predictions come from. `None` while too little is
    /// known.
    pub fn coefficients_now(&self) -> Option<Coefficients> {
        self.coefficients()
            .map(|learned| learned.times(self.slowdown))
    }

    /// What it has learned; `None` while too little is known.
    pub fn coefficients(&self) -> Option<Coefficients> {
        let most_tokens = self.most_tokens;
        self.is_known().then(|| Coefficients {
            most_tokens,
            ..*self.fit.coefficients()
        })
    }

    /// Most tokens of an iteration that it has learned from: beyond it, it is a guess.
    pub fn most_tokens(&self) -> f64 {
        self.most_tokens
    }

    /// Mean absolute relative error of its predictions of late.
    pub fn mean_error(&self) -> f64 {
        self.error.mean()
    }

    /// Learns from an iteration that took `time_us`; returns what it had predicted.
    pub fn observe(&mut self, shape: &StepShape, time_us: f64) -> Option<Prediction> {
        let time_us = time_us.max(1.0);
        let prediction = self.predict(shape);
        let mut scale = time_us;
        let mut is_surprise = false;
        if let Some(Prediction { learned_us, now_us }) = prediction {
            scale = scale.max(learned_us);
            let ratio = time_us / now_us;
            let usual = (SURPRISE * self.error.mean()).max(LEAST_SURPRISE);
            is_surprise = (ratio - 1.0).abs() > usual;
            let error = (ratio - 1.0).clamp(-LARGEST_ERROR, LARGEST_ERROR);
            self.slowdown *= 1.0 + FOLLOWS * error;
            self.ratios.observe(ratio);
            self.error.observe((ratio - 1.0).abs().min(1.0));
        }
        let row = Row::new(shape, time_us, scale);
        self.moments.add(bin_of(shape.tokens), &row);
        self.num_observations += 1;
        self.most_tokens = self.most_tokens.max(shape.tokens);
        let count = self.num_observations;
        if is_surprise || count.is_power_of_two() || count.is_multiple_of(FIT_EVERY) {
            // Early, and ever more rarely, all places for the knee are tried; else a few.
            self.fit.update(&self.moments, count.is_power_of_two());
        }
        prediction
    }
}

#[cfg(test)]
mod tests;
