//! The governor: keeps iterations within their target by what it adds to the decodes.
//!
//! Decodes are never cut. What time they leave of the target, by the cost model, goes to prefill: the
//! largest chunk that still fits solves a quadratic equation, so nothing is searched. That is the token
//! budget of Sarathi-Serve (OSDI'24), but in time, and anew in every iteration: 64 tokens after 60,000
//! cost as much as thousands after none.
//!
//! The target is the configured one, or else what the running decodes were promised: the least of their
//! classes' targets per output token, and less while a sequence lags behind its own (down to half, so that
//! one that is hopelessly late does not hold up the others).
//!
//! Copies from and to the host take time too: what they are predicted to take is gone for prefill, and no
//! more are made than fit.
//!
//! Two guards. Prefill always gets a few tokens, or it would stop for good where decodes alone take
//! longer. And a newcomer waits while, with it, the decodes alone of all that run at its level and above
//! would take longer than their target; if nobody runs it is let in.
//!
//! While the model knows nothing there is no governing; and it is not trusted beyond twice the tokens that
//! it has seen in an iteration, so that an engine that starts learns before it leaps.

use crate::config::policy::Policy;
use crate::iteration::sequence::Sequence;
use crate::predict::iteration_time::{Coefficients, CostModel, StepShape};
use crate::request::Time;

/// Trust in the model ends at this many times the most tokens that it has seen.
const GROWTH: f64 = 2.0;
/// A sequence that lags behind shortens iterations down to this share of its target.
const MOST_HASTE: f64 = 0.5;

/// Most blocks that are copied from and to the host in one iteration, so that plans have a bound.
pub(crate) const MOST_COPIES: u32 = 1_024;

/// What an iteration may still take, while it is decided.
#[derive(Debug, Default)]
pub(crate) struct Governor {
    /// What iterations cost; `None`: this one is not governed.
    costs: Option<Coefficients>,
    now: Time,
    /// The configured target.
    fixed_us: Option<f64>,
    /// The target of this iteration; infinite while nobody decodes.
    target_us: f64,
    /// What has been granted so far.
    shape: StepShape,
    prefill_tokens: u32,
    min_prefill_tokens: u32,
    /// Blocks that are copied from and to the host; counted in every iteration.
    copies: u32,
    /// All that run at each level, as if all were decoding, and the least target among them.
    settled: Vec<Settled>,
}

#[derive(Clone, Copy, Debug)]
struct Settled {
    shape: StepShape,
    target_us: f64,
}

impl Settled {
    const NOBODY: Self = Self {
        shape: StepShape {
            sequences: 0.0,
            tokens: 0.0,
            decode_context: 0.0,
            prefill_pairs: 0.0,
            samples: 0.0,
            copies: 0.0,
        },
        target_us: f64::INFINITY,
    };
}

impl Governor {
    /// Begins an iteration; it is governed if the policy and the model say so.
    pub(crate) fn begin(
        &mut self,
        policy: &Policy,
        costs: &CostModel,
        block_size: u32,
        num_levels: usize,
        now: Time,
    ) {
        self.copies = 0;
        let pace = &policy.pace;
        let is_governed = pace.is_governed(&policy.classes);
        self.costs = if is_governed {
            costs.coefficients_now()
        } else {
            None
        };
        if self.costs.is_none() {
            return;
        }
        self.now = now;
        self.fixed_us = pace.iteration_target_us.map(|us| us as f64);
        self.target_us = f64::INFINITY;
        self.shape = StepShape::default();
        self.prefill_tokens = 0;
        self.min_prefill_tokens = pace.min_prefill_tokens.unwrap_or(block_size);
        self.settled.clear();
        self.settled.resize(num_levels, Settled::NOBODY);
    }

    /// Whether this iteration is governed.
    pub(crate) fn is_governing(&self) -> bool {
        self.costs.is_some()
    }

    /// Sees a running sequence, whose class has this target per output token.
    pub(crate) fn see(&mut self, sequence: &Sequence, tpot_target_us: Option<u64>) {
        self.settle(sequence, tpot_target_us);
        if sequence.num_remaining_tokens() == 1 {
            self.see_decode(sequence, tpot_target_us);
        }
    }

    fn see_decode(&mut self, sequence: &Sequence, tpot_target_us: Option<u64>) {
        let context = sequence.num_planned_tokens() + 1;
        self.shape.add_decode(context, sequence.num_rows());
        let outputs = sequence.num_output_tokens();
        if outputs == 0 {
            return; // the end of a prompt: no client waits for the next token yet
        }
        let target_us = match (self.fixed_us, tpot_target_us) {
            (Some(fixed_us), _) => fixed_us,
            (None, None) => return,
            (None, Some(target)) => {
                let due = sequence.first_output.0 + target * u64::from(outputs);
                let slack_us = due.saturating_sub(self.now.0) as f64;
                let target_us = target as f64;
                slack_us.clamp(target_us * MOST_HASTE, target_us)
            }
        };
        self.target_us = self.target_us.min(target_us);
    }

    /// Counts a sequence among those that run.
    pub(crate) fn settle(&mut self, sequence: &Sequence, tpot_target_us: Option<u64>) {
        if self.costs.is_none() {
            return;
        }
        let target_us = self.fixed_us.or(tpot_target_us.map(|us| us as f64));
        let settled = &mut self.settled[sequence.level];
        for _ in 0..sequence.num_rows() {
            settled.shape.add_decode(sequence.num_tokens(), 1);
        }
        settled.target_us = settled.target_us.min(target_us.unwrap_or(f64::INFINITY));
    }

    /// Whether those that run at `level` and above would decode too slowly with `newcomer` among them.
    pub(crate) fn holds(&self, newcomer: &Sequence, level: usize) -> bool {
        let Some(costs) = &self.costs else {
            return false;
        };
        let mut all = Settled::NOBODY;
        for settled in self.settled.iter().take(level + 1) {
            all.shape.sequences += settled.shape.sequences;
            all.shape.tokens += settled.shape.tokens;
            all.shape.decode_context += settled.shape.decode_context;
            all.shape.samples += settled.shape.samples;
            all.target_us = all.target_us.min(settled.target_us);
        }
        for _ in 0..newcomer.num_rows() {
            all.shape.add_decode(newcomer.num_tokens(), 1);
        }
        costs.time(&all.shape) > all.target_us
    }

    /// Most tokens of the next prefill chunk, after `before` tokens of its sequence.
    pub(crate) fn most_chunk(&self, before: u32) -> u32 {
        let Some(costs) = self.costs.filter(|_| self.target_us.is_finite()) else {
            return u32::MAX;
        };
        let least = self.min_prefill_tokens.saturating_sub(self.prefill_tokens);
        let trusted = GROWTH * costs.most_tokens - self.shape.tokens;
        let most = largest_chunk(&costs, &self.shape, before, self.target_us).min(trusted);
        (most.max(0.0) as u32).max(least)
    }

    /// Most tokens of a chunk beside nothing but `decodes`, if the target is what it was last.
    pub(crate) fn usual_chunk(&self, decodes: &StepShape) -> f64 {
        match self.costs.filter(|_| self.target_us.is_finite()) {
            None => f64::INFINITY,
            Some(costs) => largest_chunk(&costs, decodes, 0, self.target_us)
                .max(f64::from(self.min_prefill_tokens)),
        }
    }

    /// Most blocks that may still be copied from and to the host.
    pub(crate) fn most_copies(&self) -> u32 {
        let most = MOST_COPIES - self.copies;
        let Some(costs) = self.costs.filter(|_| self.target_us.is_finite()) else {
            return most;
        };
        let left_us = (self.target_us - costs.time(&self.shape)).max(0.0);
        // Where copies cost nothing, that is not a number, or infinite: then there is no other bound.
        let in_time = (left_us / costs.t_copy_us).min(f64::from(most));
        in_time as u32
    }

    /// Blocks that are copied from and to the host, so far.
    pub(crate) fn num_copies(&self) -> u32 {
        self.copies
    }

    /// Counts blocks that are copied.
    pub(crate) fn copied(&mut self, num_blocks: u32) {
        self.copies += num_blocks;
        self.shape.copies += f64::from(num_blocks);
    }

    /// Whether there is no time left for prefill.
    pub(crate) fn is_spent(&self) -> bool {
        self.most_chunk(0) == 0
    }

    /// Counts a chunk that was granted, after `before` tokens of its sequence.
    pub(crate) fn grant(&mut self, before: u32, chunk: u32, samples: u32) {
        if self.costs.is_some() {
            self.shape.add_chunk(before, chunk, samples);
            self.prefill_tokens += chunk;
        }
    }
}

/// Tokens `x` of a chunk after `before` with which the iteration takes `target_us`: with `rest` for all
/// else, `max(t_weights, t_tok * (tokens + x)) + t_pair * (before * x + x^2 / 2) = rest`, so it is the
/// lesser of two roots. May be fractional, negative or infinite.
fn largest_chunk(costs: &Coefficients, shape: &StepShape, before: u32, target_us: f64) -> f64 {
    let one_more = StepShape {
        sequences: shape.sequences + 1.0,
        samples: shape.samples + 1.0,
        ..*shape
    };
    let linear_us = costs.t_weights_us.max(costs.t_tok_us * shape.tokens);
    let rest = target_us - (costs.time(&one_more) - linear_us);
    let square = costs.t_pair_us / 2.0;
    let slope = costs.t_pair_us * f64::from(before);
    let flat = root(square, slope, rest - costs.t_weights_us);
    let steep = root(
        square,
        slope + costs.t_tok_us,
        rest - costs.t_tok_us * shape.tokens,
    );
    flat.min(steep)
}

/// The `x` of at least 0 at which `square * x^2 + slope * x` is `value`.
fn root(square: f64, slope: f64, value: f64) -> f64 {
    if value <= 0.0 {
        return 0.0;
    }
    let bottom = slope + (slope * slope + 4.0 * square * value).sqrt();
    if bottom > 0.0 {
        2.0 * value / bottom
    } else {
        f64::INFINITY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Coefficients = Coefficients {
        t0_us: 600.0,
        t_seq_us: 4.0,
        t_weights_us: 5_400.0,
        t_tok_us: 32.0,
        t_ctx_us: 0.0437,
        t_pair_us: 0.001_31,
        t_sample_us: 2.0,
        t_copy_us: 40.0,
        most_tokens: 2_048.0,
    };

    #[test]
    fn the_largest_chunk_takes_the_target_and_no_more() {
        let mut seen = [false; 2];
        for decodes in [1, 32, 160, 256] {
            for before in [0, 100, 8_000, 100_000] {
                for target_us in [9_000.0, 25_000.0, 100_000.0] {
                    let mut shape = StepShape::default();
                    for _ in 0..decodes {
                        shape.add_decode(500, 1);
                    }
                    let chunk = largest_chunk(&COSTS, &shape, before, target_us);
                    let with = StepShape {
                        sequences: shape.sequences + 1.0,
                        tokens: shape.tokens + chunk,
                        prefill_pairs: chunk * (f64::from(before) + chunk / 2.0),
                        samples: shape.samples + 1.0,
                        ..shape
                    };
                    let time_us = COSTS.time(&with);
                    if chunk > 0.0 {
                        assert!(
                            (time_us / target_us - 1.0).abs() < 1e-9,
                            "{chunk} {time_us}"
                        );
                    } else {
                        assert!(time_us >= target_us, "{time_us}");
                    }
                    seen[usize::from(chunk > 0.0)] = true;
                }
            }
        }
        assert_eq!(
            seen, [true; 2],
            "some leave room for a chunk and some do not"
        );
    }

    #[test]
    fn copies_get_what_is_left_and_take_it_from_prefill() {
        let mut governor = Governor {
            costs: Some(COSTS),
            target_us: 9_000.0,
            ..Governor::default()
        };
        governor.shape.add_decode(500, 1);
        let chunk = governor.most_chunk(0);
        let most = governor.most_copies();
        let left_us = 9_000.0 - COSTS.time(&governor.shape);
        assert_eq!(most, (left_us / COSTS.t_copy_us) as u32);
        governor.copied(most / 2);
        let less = governor.most_chunk(0);
        assert!(0 < less && less < chunk, "{less} of {chunk}");
        assert!(governor.most_copies().abs_diff(most - most / 2) <= 1);
        governor.target_us = f64::INFINITY;
        assert_eq!(governor.most_copies(), MOST_COPIES - most / 2);
        governor.target_us = 1.0;
        assert_eq!(governor.most_copies(), 0);
    }

    #[test]
    fn copies_that_cost_nothing_have_no_bound_in_time() {
        let free = Coefficients {
            t_copy_us: 0.0,
            ..COSTS
        };
        let governor = Governor {
            costs: Some(free),
            target_us: 9_000.0,
            ..Governor::default()
        };
        assert_eq!(governor.most_copies(), MOST_COPIES);
    }

    #[test]
    fn what_costs_nothing_has_no_bound() {
        let free = Coefficients {
            t_tok_us: 0.0,
            t_pair_us: 0.0,
            ..COSTS
        };
        let chunk = largest_chunk(&free, &StepShape::default(), 10, 25_000.0);
        assert!(chunk.is_infinite(), "{chunk}");
    }
}
