//! Preemption: who gives memory up when a running sequence needs a block and there is none.
//!
//! The victim is the newest running sequence that would free memory now and that has filled a block
//! since it was last preempted; where all are protected the protection yields, and where nobody frees
//! memory at once (siblings that share all their blocks) the newest goes. The oldest is never the
//! victim, so it always gets on: since the pool holds one sequence of `max_model_len`, every sequence
//! gets its turn as the oldest, and no chain of preemptions can go on for ever.
//!
//! A victim is computed again from its tokens (recompute), and waits ahead of everything fresh. It
//! keeps its text state: nothing is sent twice.

use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;

/// Position in the running set of the sequence to preempt; `None` if only the oldest runs.
pub(crate) fn choose_victim(ledger: &Ledger, lane: &Lane) -> Option<usize> {
    let mut protected = None;
    for (position, key) in lane.running.iter().enumerate().skip(1).rev() {
        let sequence = &ledger.sequences[key.0];
        if sequence.table.num_exclusive() == 0 {
            continue;
        }
        if sequence.num_tokens() >= sequence.protected_below_tokens {
            return Some(position);
        }
        protected.get_or_insert(position);
    }
    protected.or(lane
        .running
        .len()
        .checked_sub(1)
        .filter(|&newest| newest > 0))
}

/// Moves the running sequence at `position` back to the waiting queue.
///
/// Returns the tokens of the step being planned that it had been granted.
pub(crate) fn preempt(
    ledger: &mut Ledger,
    lane: &mut Lane,
    position: usize,
    block_size: u32,
) -> u32 {
    debug_assert!(position > 0, "the oldest is never preempted");
    let key = lane.running.remove(position);
    lane.step.withdraw(key);
    let sequence = &mut ledger.sequences[key.0];
    let granted = sequence.num_scheduled_tokens;
    sequence.reset_for_recompute(block_size);
    ledger.queue.push(sequence.rank(), sequence.arrival, key);
    ledger.counters.preemptions += 1;
    ledger.requests[sequence.request.0]
        .request
        .stats
        .num_preemptions += 1;
    granted
}
