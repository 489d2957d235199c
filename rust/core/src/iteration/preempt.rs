//! Preemption: who gives memory up when there is none.
//!
//! When a running sequence needs a block, guests ([`crate::iteration::backfill`]) give way first, then the
//! lowest level that runs; of it those that were preempted often last, and before them whoever costs least
//! to compute again, the newest of equals. Only those are asked that free memory in this step and
//! that have filled a block since they were last preempted; where all are protected the protection yields,
//! and where nobody frees memory at once (siblings that share all their blocks) the newest goes. The oldest
//! of the highest level is never the victim, so it always gets on: since the pool holds one sequence of
//! `max_model_len`, every sequence gets its turn as the oldest, and no chain of preemptions can go on for
//! ever.
//!
//! What is computed again is the context, less the blocks that others hold too. Blocks of its own count in
//! full though the prefix cache keeps them for a while: memory is short, so they are taken next.
//!
//! To be admitted, a waiting request preempts sequences of strictly lower levels and its own guests (but
//! for those that the forecast admitted), if that frees what it lacks: only those that run since an earlier
//! step and were not preempted too often, those that are protected last, so that two requests never take
//! turns at it for ever.
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

/// Preemptions of one request after which nobody preempts it to be admitted, and others are preferred
/// when memory is short.
const MAX_PREEMPTIONS: u32 = 8;

/// Whether preempting a sequence is of use now; the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    /// It frees memory, and got on since it was last preempted.
    Frees,
    /// It frees memory, but has not filled a block since it was last preempted.
    IsProtected,
    /// All its blocks are somebody else's too.
    FreesNothing,
}

/// Position in the running set of the sequence to preempt; `None` if only one runs that is not done.
pub(crate) fn choose_victim(ledger: &Ledger, lane: &Lane, block_size: u32) -> Option<usize> {
    let state = |at: usize| &ledger.sequences[lane.running[at].0];
    let unfinished = || (0..lane.running.len()).filter(|&at| state(at).finished.is_none());
    // Oldest first, so the first of the highest level is its oldest.
    let spared = unfinished().min_by_key(|&at| state(at).level)?;
    let rank = |&at: &usize| {
        let sequence = state(at);
        let frees = sequence.table.num_exclusive();
        let usefulness = match frees {
            0 => Use::FreesNothing,
            _ if sequence.is_protected() => Use::IsProtected,
            _ => Use::Frees,
        };
        let shared = sequence.table.num_blocks() - frees;
        let cost = sequence
            .num_computed_tokens
            .saturating_sub(shared * block_size);
        (
            usefulness,
            !lane.backfill.is_guest(sequence),
            Reverse(sequence.level),
            preemptions(ledger, sequence) >= MAX_PREEMPTIONS,
            if frees == 0 { 0 } else { cost },
            Reverse(at),
        )
    };
    unfinished().filter(|&at| at != spared).min_by_key(rank)
}

/// Who gives way to a newcomer: they are preempted if it lacks what they have, and it need not wait for
/// what they will need.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct GivingWay {
    /// Those of levels below it.
    pub(crate) level: usize,
    /// Guests that joined from that step on.
    pub(crate) guests_since: Option<u64>,
}

impl GivingWay {
    /// Nobody does.
    pub(crate) const NOBODY: Self = Self {
        level: usize::MAX,
        guests_since: None,
    };

    /// Whether a running sequence does.
    pub(crate) fn has(self, sequence: &Sequence) -> bool {
        sequence.level > self.level || self.has_as_guest(sequence)
    }

    fn has_as_guest(self, sequence: &Sequence) -> bool {
        let since = self.guests_since;
        since.is_some_and(|since| sequence.is_guest_since(since))
    }
}

/// What a newcomer lacks to be admitted.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lack {
    pub(crate) rows: u32,
    pub(crate) blocks: u32,
    /// Blocks that it needs beside those, because the prefix cache has them.
    pub(crate) num_cached_blocks: u32,
}

/// Running sequences that give way to `newcomer` and together make room for it; `None` if there are not
/// enough.
pub(crate) fn choose_victims_for(
    ledger: &Ledger,
    lane: &Lane,
    newcomer: SequenceKey,
    giving_way: GivingWay,
    lack: Lack,
) -> Option<Vec<SequenceKey>> {
    let state = &ledger.sequences[newcomer.0];
    let may_have_guests = giving_way.guests_since.is_some() && lane.running.has_guests();
    if !may_have_guests && !lane.running.has_below(giving_way.level) {
        return None;
    }
    // What a victim shares with the newcomer is no gain: the newcomer takes it.
    let cached = &state.chain[..lack.num_cached_blocks as usize];
    let shared = |sequence: &Sequence| {
        let pairs = sequence.chain.iter().zip(cached);
        pairs.take_while(|(own, cached)| own == cached).count()
    };
    let may_go = |sequence: &Sequence| {
        giving_way.has(sequence)
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
            !giving_way.has_as_guest(sequence),
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
    let key = lane.running[position];
    lane.running.leave(&ledger.sequences, key);
    ledger.refund(key);
    let sequence = &mut ledger.sequences[key.0];
    lane.step.withdraw(key, sequence.num_steady_steps > 0);
    let life = sequence.life.take();
    debug_assert!(!lane.is_ahead(), "what it has is not free yet");
    let granted = sequence.num_granted_tokens();
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
