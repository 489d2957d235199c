//! What a prompt costs on top of those that decode, by the cost model: the part of a newcomer's time to
//! its first token that no rate can tell, because it has hardly anything to do with how much is served.

use crate::config::Limits;
use crate::iteration::lane::Lane;
use crate::predict::iteration_time::{StepShape, pairs};
use crate::request::Time;
use crate::waiting::forecast::Outlook;

impl Lane {
    /// What the cost model says of a prompt that would be next, beside those that decode; `None` while it
    /// knows too little.
    pub(crate) fn outlook(
        &self,
        limits: &Limits,
        prompt_tokens: u32,
        now: Time,
    ) -> Option<Outlook> {
        let costs = self.costs.coefficients_now()?;
        let last = &self.last_shape;
        // Who was sampled in the last iteration decodes in the next.
        let mut shape = if self.running.is_empty() {
            StepShape::default()
        } else {
            StepShape {
                sequences: last.samples,
                tokens: last.samples,
                decode_context: last.decode_context,
                prefill_pairs: 0.0,
                samples: last.samples,
                copies: 0.0,
            }
        };
        let budget = f64::from(limits.max_num_batched_tokens()) - shape.tokens;
        let chunk = budget
            .min(f64::from(limits.max_chunk_tokens()))
            .min(self.governor.usual_chunk(&shape))
            .max(1.0);
        let prompt = f64::from(prompt_tokens.max(1));
        let iterations = (prompt / chunk).ceil();
        shape.sequences += 1.0;
        shape.tokens += prompt / iterations;
        let prefill_us =
            iterations * costs.time(&shape) + costs.t_pair_us * pairs(0, prompt_tokens);
        let since = self.in_flight.oldest().map_or(now, |step| step.since);
        let in_flight = self.in_flight.iter().map(|step| costs.time(&step.shape));
        let rest_us = in_flight.sum::<f64>() - now.since_us(since) as f64;
        Some(Outlook {
            prefill_us,
            rest_us: rest_us.max(0.0),
        })
    }
}
