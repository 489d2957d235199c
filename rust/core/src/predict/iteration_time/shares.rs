//! Who an iteration's time goes to: each sequence by the terms of the cost model that it causes.
//!
//! What a sequence causes by itself it pays for: its tokens, its context, its samples. What is there for
//! all is shared out: `t0` and copies of blocks by sequence, the linear layers (also where the weights bind)
//! by token. What the model does not explain scales them all, so that the shares add up to the time that was
//! measured.

use crate::predict::iteration_time::{Coefficients, StepShape, pairs};

/// Prices of what is in one iteration, in the unit of its time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepShares {
    sequence: f64,
    token: f64,
    context: f64,
    pair: f64,
    sample: f64,
}

impl StepShares {
    /// By tokens alone, at so much each.
    pub fn by_tokens(token: f64) -> Self {
        Self {
            token,
            ..Self::default()
        }
    }

    /// Of an iteration that took `time`.
    pub fn new(costs: &Coefficients, shape: &StepShape, time: f64) -> Self {
        let predicted = costs.time(shape);
        let tokens = shape.tokens.max(1.0);
        if predicted <= 0.0 {
            return Self::by_tokens(time / tokens);
        }
        let scale = time / predicted;
        let for_all = costs.t0_us + costs.t_copy_us * shape.copies;
        let linear = costs.t_weights_us.max(costs.t_tok_us * shape.tokens);
        Self {
            sequence: scale * (costs.t_seq_us + for_all / shape.sequences.max(1.0)),
            token: scale * linear / tokens,
            context: scale * costs.t_ctx_us,
            pair: scale * costs.t_pair_us,
            sample: scale * costs.t_sample_us,
        }
    }

    /// Of a sequence with one token, that has a context of `context` tokens with it.
    pub fn decode(&self, context: u32, samples: u32) -> f64 {
        let own = self.context * f64::from(context) + self.sample * f64::from(samples);
        self.sequence + self.token + own
    }

    /// The same in nanoseconds, if that is the unit, rounded.
    pub fn decode_ns(&self, context: u32, samples: u32) -> u64 {
        nearest(self.decode(context, samples))
    }

    /// Of a prefill chunk after `before` tokens.
    pub fn chunk(&self, before: u32, chunk: u32, samples: u32) -> f64 {
        let own = self.pair * pairs(before, chunk) + self.sample * f64::from(samples);
        self.sequence + self.token * f64::from(chunk) + own
    }

    /// The same in nanoseconds, if that is the unit, rounded.
    pub fn chunk_ns(&self, before: u32, chunk: u32, samples: u32) -> u64 {
        nearest(self.chunk(before, chunk, samples))
    }
}

/// The nearest whole number of nanoseconds, which are not negative. `f64::round` would be a call, and the
/// conversion to an unsigned number takes several times the instructions.
fn nearest(nanoseconds: f64) -> u64 {
    (nanoseconds + 0.5) as i64 as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_a_long_context_pays_more() {
        let costs = Coefficients {
            t0_us: 600.0,
            t_seq_us: 4.0,
            t_weights_us: 5_400.0,
            t_tok_us: 32.0,
            t_ctx_us: 0.1,
            t_pair_us: 0.001,
            t_sample_us: 2.0,
            t_copy_us: 5.0,
            most_tokens: 0.0,
        };
        let mut shape = StepShape::default();
        shape.add_decode(100, 1);
        shape.add_decode(20_000, 4);
        shape.add_chunk(3_000, 500, 0);
        shape.copies = 20.0;
        let shares = StepShares::new(&costs, &shape, 30_000.0);
        let (short, long) = (shares.decode(100, 1), shares.decode(20_000, 4));
        let total = short + long + shares.chunk(3_000, 500, 0);
        assert!((total / 30_000.0 - 1.0).abs() < 1e-12, "{total}");
        let context = shares.decode(20_000, 1) / short;
        assert!(
            context > 5.0,
            "a long context costs {context} times a short one"
        );
        assert!(long > shares.decode(20_000, 1), "and so do more samples");
    }

    #[test]
    fn an_unknown_model_shares_by_tokens() {
        let shape = StepShape {
            tokens: 10.0,
            ..StepShape::default()
        };
        let nothing = StepShares::new(&Coefficients::default(), &shape, 50.0);
        assert_eq!(nothing, StepShares::by_tokens(5.0));
    }
}
