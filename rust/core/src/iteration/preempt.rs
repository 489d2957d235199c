//! Preemption: who gives memory up when there is none.
//!
//! When a running sequence needs a block, the victim is of the lowest level that runs, and of it the
//! newest that would free memory now and that has filled a block since it was last preempted; where all
//! are protected the protection yields, and where nobody frees memory at once (siblings that share all
//! their blocks) the newest goes. The oldest of the highest level is never the victim, so it always gets
//! on: since the pool holds one sequence of `max_model_len`, every sequence gets its turn as the oldest,
//! and no chain of preemptions can go on for ever.
//!
//! A waiting request of a strictly higher level preempts to be admitted, if that frees what it lacks: only
//! those that run since an earlier step and were not preempted too often, those that are protected last,
//! so that two requests never take turns at it for ever.
//!
//! A victim is computed again from its tokens (recompute), and waits ahead of everything fresh of its
//! level. It keeps its text state: nothing is sent twice.

use std::cmp::Reverse;

use crate::config::Limits;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::iteration::sequence::Sequence;
use crate::request::SequenceKey;
use crate::waiting::queue::Work;

/// Preemptions of one request after which nobody preempts it to be admitted.
const MAX_PREEMPTIONS: u32 = 8;

/// Position in the running set of the sequence to preempt; `None` if only one runs that is not done.
pub(crate) fn choose_victim(ledger: &Ledger, lane: &Lane) -> Option<usize> {
    let state = |at: usize| &ledger.sequences[lane.running[at].0];
    let unfinished = || (0..lane.running.len()).filter(|&at| state(at).finished.is_none());
    // Oldest first, so the first of the highest level is its oldest.
    let spared = unfinished().min_by_key(|&at| state(at).level)?;
    let lowest = unfinished().map(|at| state(at).level).max()?;
    let (mut protected, mut useless) = (None, None);
    for level in (0..=lowest).rev() {
        for at in unfinished().rev() {
            let sequence = state(at);
            if at == spared || sequence.level != level {
                continue;
            }
            if sequence.table.num_exclusive() == 0 {
                useless.get_or_insert(at);
            } else if sequence.is_protected() {
                protected.get_or_insert(at);
            } else {
                return Some(at);
            }
        }
    }
    protected.or(useless)
}

/// What a newcomer lacks to be admitted.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lack {
    pub(crate) rows: u32,
    pub(crate) blocks: u32,
    /// Blocks that it needs beside those, because the prefix cache has them.
    pub(crate) num_cached_blocks: u32,
}

/// Running sequences of levels below `level` that together make room for `newcomer`; `None` if there
/// are not enough.
pub(crate) fn choose_victims_below(
    ledger: &Ledger,
    lane: &Lane,
    newcomer: SequenceKey,
    level: usize,
    lack: Lack,
) -> Option<Vec<SequenceKey>> {
    // What a victim shares with the newcomer is no gain: the newcomer takes it.
    let cached = &ledger.sequences[newcomer.0].chain[..lack.num_cached_blocks as usize];
    let shared = |sequence: &Sequence| {
        let pairs = sequence.chain.iter().zip(cached);
        pairs.take_while(|(own, cached)| own == cached).count()
    };
    let may_go = |sequence: &Sequence| {
        sequence.level > level
            && sequence.finished.is_none()
            && sequence.joined_at_step < lane.step.number + 1
            && preemptions(ledger, sequence) < MAX_PREEMPTIONS
    };
    let mut candidates: Vec<(SequenceKey, &Sequence)> = lane
        .running
        .iter()
        .map(|&key| (key, &ledger.sequences[key.0]))
        .filter(|(_, sequence)| may_go(sequence))
        .collect();
    candidates.sort_by_key(|(_, sequence)| {
        (
            sequence.is_protected(),
            Reverse(sequence.level),
            sequence.num_computed_tokens,
            Reverse(sequence.arrival),
        )
    });
    let (mut blocks, mut rows) = (0, 0);
    let mut victims = Vec::new();
    for (key, sequence) in candidates {
        if blocks >= lack.blocks && rows >= lack.rows {
            break;
        }
        let frees = sequence.table.num_exclusive_from(shared(sequence));
        if frees > 0 || rows < lack.rows {
            blocks += frees;
            rows += sequence.num_rows();
            victims.push(key);
        }
    }
    (blocks >= lack.blocks && rows >= lack.rows).then_some(victims)
}

fn preemptions(ledger: &Ledger, sequence: &Sequence) -> u32 {
    ledger.requests[sequence.request.0]
        .request
        .stats
        .num_preemptions
}

/// Moves the running sequence at `position` back to the waiting queue.
///
/// Returns the tokens of the step being planned that it had been granted.
pub(crate) fn preempt(
    ledger: &mut Ledger,
    lane: &mut Lane,
    position: usize,
    limits: &Limits,
) -> u32 {
    let key = lane.running.remove(position);
    lane.step.withdraw(key);
    ledger.refund(key);
    let sequence = &mut ledger.sequences[key.0];
    let life = sequence.life.take();
    let granted = sequence.num_scheduled_tokens;
    sequence.reset_for_recompute(limits.block_size());
    let work = Work {
        units: 0,
        prefill_tokens: sequence.num_tokens().into(),
        rows: sequence.num_rows().into(),
        blocks: limits.blocks_for(sequence.num_tokens() + 1).into(),
    };
    let (level, arrival) = (sequence.level, sequence.arrival);
    ledger.counters.preemptions += 1;
    ledger.requests[sequence.request.0]
        .request
        .stats
        .num_preemptions += 1;
    if let Some(life) = life {
        ledger.end_life(life);
    }
    ledger.queue.push_returning(level, arrival, key, work);
    granted
}
