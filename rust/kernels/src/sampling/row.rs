//! What a row remembers: its parameters and, for penalties, which tokens it has seen.
//!
//! Edits of the logits touch only a few tokens (bias, suppression, tokens seen), so they are applied to a
//! copy of the row in this order: bias, suppression before `min_tokens`, penalties.

use std::collections::HashMap;

use super::noise::Stream;

/// Temperatures below this are greedy: dividing by them would only overflow.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Sampling parameters of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowParams {
    /// Divides the logits; 0 (or below 1e-5) takes the best token.
    pub temperature: f32,
    /// Smallest set of best tokens with at least this share of the probability; 1 or more: all.
    pub top_p: f32,
    /// Tokens with less than this share of the best token's probability are dropped.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence in the output.
    pub frequency_penalty: f32,
    /// Number of best tokens that stay; 0: all.
    pub top_k: usize,
    /// Seed of the request.
    pub seed: u64,
    /// Which of the request's sequences.
    pub child: u32,
    /// Log-probabilities wanted: none, or the sampled token's and so many best.
    pub logprobs: Option<usize>,
    /// Suppressed tokens may not be sampled before so many outputs.
    pub min_tokens: u32,
}

impl Default for RowParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            top_k: 0,
            seed: 0,
            child: 0,
            logprobs: None,
            min_tokens: 0,
        }
    }
}

impl RowParams {
    /// Whether the best token is taken without randomness.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// The random stream of one output.
    pub fn stream(&self, output_index: u32) -> Stream {
        Stream {
            seed: self.seed,
            child: self.child,
            output_index,
        }
    }
}

/// How often the output has a token. Entries without occurrences are of the prompt.
type Occurrences = HashMap<u32, u32>;

/// One row's parameters and history.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Its parameters.
    pub params: RowParams,
    bias: Vec<(u32, f32)>,
    suppressed: Vec<u32>,
    seen: Occurrences,
}

impl Row {
    /// A row that starts (or resumes) with these ids behind it. Ids are within the vocabulary.
    pub fn new(
        params: RowParams,
        prompt: &[i32],
        output: &[i32],
        bias: Vec<(u32, f32)>,
        suppressed: Vec<u32>,
    ) -> Self {
        let mut seen = Occurrences::new();
        if params.has_penalties() {
            for &id in prompt {
                seen.entry(id.cast_unsigned()).or_default();
            }
            for &id in output {
                *seen.entry(id.cast_unsigned()).or_default() += 1;
            }
        }
        Self {
            params,
            bias,
            suppressed,
            seen,
        }
    }

    /// Takes note of a sampled token.
    pub fn push(&mut self, token: u32) {
        if self.params.has_penalties() {
            *self.seen.entry(token).or_default() += 1;
        }
    }

    /// Whether [`Row::edit`] would change anything.
    pub fn has_edits(&self, output_index: u32) -> bool {
        !self.bias.is_empty() || !self.seen.is_empty() || self.suppresses(output_index)
    }

    fn suppresses(&self, output_index: u32) -> bool {
        output_index < self.params.min_tokens && !self.suppressed.is_empty()
    }

    /// Applies bias, suppression and penalties to the row's logits.
    pub fn edit(&self, logits: &mut [f32], output_index: u32) {
        for &(token, bias) in &self.bias {
            logits[token as usize] += bias;
        }
        if self.suppresses(output_index) {
            for &token in &self.suppressed {
                logits[token as usize] = f32::NEG_INFINITY;
            }
        }
        let params = &self.params;
        for (&token, &occurrences) in &self.seen {
            let logit = &mut logits[token as usize];
            let factor = params.repetition_penalty;
            *logit = if *logit > 0.0 {
                *logit / factor
            } else {
                *logit * factor
            };
            if occurrences > 0 {
                *logit -= params.frequency_penalty * occurrences as f32;
                *logit -= params.presence_penalty;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_follow_their_order() {
        let params = RowParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            min_tokens: 2,
            ..RowParams::default()
        };
        let mut row = Row::new(params, &[0, 1], &[1, 2], vec![(0, 3.0), (4, 1.0)], vec![4]);
        row.push(2);
        let mut logits = vec![-1.0, -1.0, 4.0, 4.0, 4.0];
        row.edit(&mut logits, 1);
        // 0: (-1 + 3) / 2; 1: -1 * 2 - 0.25 - 0.5; 2: 4 / 2 - 2 * 0.25 - 0.5; 3 untouched; 4 suppressed.
        assert_eq!(logits, [1.0, -2.75, 1.0, 4.0, f32::NEG_INFINITY]);
        let mut later = vec![0.0; 5];
        row.edit(&mut later, 2);
        assert_eq!(later[4], 1.0);
    }

    #[test]
    fn a_plain_row_has_no_edits() {
        let mut row = Row::new(RowParams::default(), &[1], &[2], vec![], vec![3]);
        row.push(1);
        assert!(!row.has_edits(0));
    }
}
