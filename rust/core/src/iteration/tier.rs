//! The second tier: KV blocks on the host, and when they are copied instead of computed again.
//!
//! What is evicted from the device goes to the host, whoever it was of: preempted sequences, or prefixes
//! that nobody uses. Before a sequence with a prefill is granted tokens, it is seen whether the host has
//! its next blocks. Those are copied into blocks that it has anyway, and count as computed when the step
//! lands; at least one token is computed by the same step. Where not all can be copied at once, or one in
//! between is missing, a chunk ends where the next block is on the host, so that the next one begins there.
//!
//! A copy is made where the cost model says that it is sooner than computing: back, if a block takes less
//! time than its tokens would after those before it; to the host, if there and back takes less than a block
//! at the start of a prompt. While it is not known what copies take they count as free, so that they are
//! tried and learned of.
//!
//! Copies are of the sequence that they are made for: if it is preempted in the same decision, they are
//! dropped with it. Then what was evicted for it is lost.

use crate::iteration::flight::Step;
use crate::iteration::governor::MOST_COPIES;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::iteration::scheduler::Scheduler;
use crate::memory::blocks::CopyKind;
use crate::predict::iteration_time::{Coefficients, pairs};
use crate::request::SequenceKey;

impl Scheduler<'_> {
    /// Lets what is evicted from now on go to the host, as far as that pays and there is time; `reserved`
    /// blocks that will come back go first.
    pub(crate) fn allow_offloads(&self, reserved: u32) {
        if self.limits.num_host_kv_blocks() == 0 {
            return;
        }
        let block_size = self.limits.block_size();
        let costs = self.lane.costs.coefficients();
        let pays = costs.is_none_or(|costs| costs.pays_to_copy(2, 0, block_size));
        let most = if pays {
            self.lane.governor.most_copies()
        } else {
            0
        };
        self.lane.pool.allow_offloads(most.saturating_sub(reserved));
    }

    /// Takes the copies that memory for a sequence led to into the step.
    pub(crate) fn keep_copies(&mut self, key: SequenceKey) {
        let Lane {
            step,
            new_copies,
            governor,
            ..
        } = &mut *self.lane;
        for copy in new_copies.drain(..) {
            if copy.kind() != CopyKind::OnWrite {
                governor.copied(1);
            }
            step.copies.push((key, copy));
        }
    }

    /// Keeps what the host has of a waiting sequence, beyond so many blocks; how much that is.
    pub(crate) fn keep_on_host(&mut self, key: SequenceKey, num_cached_blocks: u32) -> u32 {
        if self.limits.num_host_kv_blocks() == 0 {
            return 0;
        }
        let chain = self.ledger.sequences[key.0].usable_chain(self.limits.block_size());
        self.lane
            .pool
            .touch_on_host(&chain[num_cached_blocks as usize..])
    }

    /// Has the next blocks of a sequence copied from the host, where that is sooner than computing them. It
    /// has to be granted a token in the same step.
    pub(crate) fn restore(&mut self, key: SequenceKey) {
        let block_size = self.limits.block_size();
        let before = self.ledger.sequences[key.0].num_planned_tokens();
        if !self.pays_to_restore(before) || !before.is_multiple_of(block_size) {
            return;
        }
        let sequence = &mut self.ledger.sequences[key.0];
        let first = (before / block_size) as usize;
        let Some(chain) = sequence.usable_chain(block_size).get(first..) else {
            return;
        };
        let governor = &self.lane.governor;
        // At least one, so that a short target does not keep it from ever coming back.
        let most = governor
            .most_copies()
            .max(1)
            .min(MOST_COPIES - governor.num_copies());
        let count = self
            .lane
            .pool
            .find_on_host(&chain[..chain.len().min(most as usize)]);
        let chain = &sequence.chain[first..first + count as usize];
        sequence
            .table
            .restore(first, chain, &mut self.lane.new_copies);
        sequence.restore(count * block_size);
        self.keep_copies(key);
    }

    /// The first so many tokens of the next chunk of a sequence, up to where it can go on from the host.
    pub(crate) fn cut_at_host(&mut self, key: SequenceKey, chunk: u32) -> u32 {
        let block_size = self.limits.block_size();
        let before = self.ledger.sequences[key.0].num_planned_tokens();
        if !self.pays_to_restore(before) {
            return chunk;
        }
        // The block that it begins in is to be computed.
        let first = (before / block_size + 1) as usize;
        let end = (before + chunk).div_ceil(block_size) as usize;
        let chain = self.ledger.sequences[key.0].usable_chain(block_size);
        let within = &chain[first.min(chain.len())..end.min(chain.len())];
        match self.lane.pool.find_first_on_host(within) {
            Some(at) => (first as u32 + at) * block_size - before,
            None => chunk,
        }
    }

    /// Whether a block after so many tokens is copied from the host sooner than computed.
    fn pays_to_restore(&self, before: u32) -> bool {
        if self.limits.num_host_kv_blocks() == 0 {
            return false;
        }
        let block_size = self.limits.block_size();
        let costs = self.lane.costs.coefficients();
        costs.is_none_or(|costs| costs.pays_to_copy(1, before, block_size))
    }
}

/// The copies of a step have been made: what went to the host can be found there, and what came back is
/// computed.
pub(crate) fn land_copies(ledger: &mut Ledger, step: &Step, block_size: u32) {
    for (key, copy) in &step.copies {
        copy.land();
        match copy.kind() {
            CopyKind::OnWrite => {}
            CopyKind::Offload => ledger.counters.offloaded_blocks += 1,
            CopyKind::Restore => {
                ledger.counters.restored_tokens += u64::from(block_size);
                let sequence = &mut ledger.sequences[key.0];
                sequence.land_restored(block_size);
                if !sequence.ended {
                    ledger.charge_restored(*key);
                }
            }
        }
    }
}

impl Coefficients {
    /// Whether so many copies of a block take no more time than computing one after `before` tokens.
    fn pays_to_copy(&self, copies: u32, before: u32, block_size: u32) -> bool {
        let computing_us =
            self.t_tok_us * f64::from(block_size) + self.t_pair_us * pairs(before, block_size);
        f64::from(copies) * self.t_copy_us <= computing_us
    }
}
