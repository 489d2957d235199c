//! How far a request is, for whoever explains a recorded run. Made only when somebody looks.

use crate::iteration::flight::Step;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::request::RequestId;

/// One sequence of a request, beside the step that was planned last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// It runs; if not, it waits for its first row or was preempted.
    pub runs: bool,
    /// Its tokens in that step.
    pub num_scheduled_tokens: u32,
    /// Its tokens that were computed before it, or are by steps in flight.
    pub num_computed_tokens: u32,
    /// Prompt tokens.
    pub num_prompt_tokens: u32,
    /// Output tokens that are known.
    pub num_output_tokens: u32,
}

impl Ledger {
    /// The sequences of a request that exist; none if it is not live.
    pub(crate) fn progress(&self, lane: &Lane, id: RequestId) -> Vec<Progress> {
        let Some(key) = self.live.get(&id) else {
            return Vec::new();
        };
        let sequences = self.requests[key.0].sequences.iter();
        let progress = sequences.map(|key| {
            let sequence = &self.sequences[key.0];
            let mut parts = lane.in_flight.newest().into_iter().flat_map(Step::parts);
            let part = parts.find(|part| part.sequence == *key);
            let num_scheduled_tokens = part.map_or(0, |part| part.num_tokens);
            Progress {
                runs: sequence.row.is_some(),
                num_scheduled_tokens,
                num_computed_tokens: sequence.num_planned_tokens() - num_scheduled_tokens,
                num_prompt_tokens: sequence.num_prompt_tokens,
                num_output_tokens: sequence.num_output_tokens(),
            }
        });
        progress.collect()
    }
}
