//! The executor's side of a step: copies, tokens into their slots, and samples that are a function of what
//! the block tables lead to.

use chairlift_core::iteration::commit::{STATUS_FAILED, STATUS_OK, StepResults};
use chairlift_core::iteration::plan::{SOURCE_ID, SOURCE_LAST_SAMPLED, StepPlan};
use chairlift_core::output::TokenLogprob;

use super::harness::{Harness, candidates, next_token};
use super::plan_checks::sequence_of;

/// What the executor keeps of a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExecutorRow {
    pub child: u32,
    /// Log-probabilities wanted; -1: none.
    num_best: i64,
    last_sampled: u32,
    /// A step of it has failed, so there is no telling what its sequence is.
    pub is_broken: bool,
}

trait PushSample {
    fn push_sample(&mut self, tokens: &[u32], logprobs: &[TokenLogprob]);
}

impl PushSample for StepResults {
    fn push_sample(&mut self, tokens: &[u32], logprobs: &[TokenLogprob]) {
        self.token_ids.extend(tokens);
        self.logprobs.extend(logprobs);
        self.token_offsets.push(self.token_ids.len() as u32);
        self.logprob_offsets.push(self.logprobs.len() as u32);
    }
}

impl Harness {
    /// What the executor returns for the oldest plan in flight, or else for the last one again. May be
    /// asked for several times.
    pub fn execute(&mut self) -> StepResults {
        let Some(mut plan) = self.in_flight.pop_front() else {
            return self.run_plan(&self.plan.clone());
        };
        for index in 0..plan.num_tokens() {
            if plan.token_sources[index] == SOURCE_LAST_SAMPLED {
                let row = plan.rows[sequence_of(&plan, index as i32)];
                let token = self.rows[row as usize].last_sampled;
                plan.token_ids[index] = token as i32;
                plan.token_sources[index] = SOURCE_ID;
            }
        }
        let results = self.run_plan(&plan);
        self.in_flight.push_front(plan);
        results
    }

    fn run_plan(&mut self, plan: &StepPlan) -> StepResults {
        self.contents.copy(plan);
        for (row, ints) in plan.resets.rows.iter().zip(&plan.resets.ints) {
            self.rows[*row as usize] = ExecutorRow {
                child: ints[2] as u32,
                num_best: ints[3],
                ..ExecutorRow::default()
            };
        }
        self.contents.write(plan);
        let mut results = StepResults {
            token_offsets: vec![0],
            logprob_offsets: vec![0],
            prompt_logprob_offsets: vec![0],
            ..StepResults::default()
        };
        let is_broken = |row: i32| self.rows[row as usize].is_broken;
        let broken: Vec<i32> = plan
            .rows
            .iter()
            .copied()
            .filter(|&row| is_broken(row))
            .collect();
        for (&logit, &row) in plan.logits_indices.iter().zip(&plan.sample_rows) {
            if broken.contains(&plan.rows[sequence_of(plan, logit)]) {
                results.push_sample(&[0], &[]);
                continue;
            }
            let (tokens, logprobs) = self.sample(plan, logit, self.rows[row as usize]);
            self.rows[row as usize].last_sampled = tokens[tokens.len() - 1];
            results.push_sample(&tokens, &logprobs);
        }
        let asked = plan.score_token_ids.iter().zip(&plan.score_num_best);
        for (&index, (&token, &num_best)) in plan.score_indices.iter().zip(asked) {
            if !broken.contains(&plan.rows[sequence_of(plan, index)]) {
                let history = self.contents.history(plan, index);
                let entries = candidates(&history, token as u32, num_best as u32);
                results.prompt_logprobs.extend(entries);
            }
            let end = results.prompt_logprobs.len() as u32;
            results.prompt_logprob_offsets.push(end);
        }
        let status = |row| {
            if self.failing_rows.contains(row) || broken.contains(row) {
                STATUS_FAILED
            } else {
                STATUS_OK
            }
        };
        results.statuses = plan.rows.iter().map(status).collect();
        self.failing_rows.clear();
        results
    }

    /// One or more tokens after that at `index` of the plan, and their log-probabilities.
    fn sample(
        &self,
        plan: &StepPlan,
        index: i32,
        row: ExecutorRow,
    ) -> (Vec<u32>, Vec<TokenLogprob>) {
        let mut history = self.contents.history(plan, index);
        let count = 1 + next_token(&history, 99, self.most_tokens_per_sample);
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let token = next_token(&history, row.child, self.settings.vocab_size);
            tokens.push(token);
            if let Ok(num_best) = u32::try_from(row.num_best) {
                logprobs.extend(candidates(&history, token, num_best));
            }
            history.push(token);
        }
        (tokens, logprobs)
    }
}
