//! Whether there is memory for a newcomer: now, for good, or as far as can be foreseen.
//!
//! `optimistic` looks at now: its tokens, and a watermark (vLLM's rule). `reserve` promises
//! every answer the blocks of its prompt and its `max_tokens` (Orca, OSDI'22), and admits whom the rest
//! of the pool can be promised to; only a request whose own answers exceed the pool, which gets it to
//! itself, ever preempts for memory there, and nobody but itself. `forecast` admits as long as the future
//! peak of all (`predict/memory_peak.rs`) fits the pool, where each answer ends at a quantile of what is
//! believed of its length, and the quantile is steered by how often that went wrong
//! (`predict/overflow.rs`). Whatever the mode, who comes to an empty running set is let in, and nobody waits
//! for what those will need that give way to it: lower levels, if levels preempt to be admitted, and the
//! guests of the head (`backfill.rs`). With `forecast` guests do not give way: each that goes is a
//! preemption, and no quantile of lengths steers how often a head is early.
//!
//! Blocks that several use count once: `reserve` promises growth, on top of what is in use now, and the
//! forecast counts what a sequence found in the prefix cache, or shares with siblings, as in use until
//! everybody is gone. The blocks that it will fill are counted to the last token: a whole block less one
//! token more than it writes.
//!
//! With nobody waiting nothing is computed. With somebody, the loads of those that run are sorted once
//! and used until somebody comes or goes, or has written a block more: as long as all write, the
//! peak does not change.

use crate::config::Limits;
use crate::config::memory::MemoryAdmission;
use crate::iteration::ledger::Ledger;
use crate::iteration::preempt::{GivingWay, Lack};
use crate::iteration::scheduler::Scheduler;
use crate::iteration::sequence::Sequence;
use crate::iteration::write::fits_resets;
use crate::memory::blocks::PrefixMatch;
use crate::predict::memory_peak::{FuturePeak, Load};
use crate::predict::overflow::Life;
use crate::request::SequenceKey;
use crate::waiting::forecast::Blocked;

/// Why the next in the queue does not join now, and what it lacks.
pub(crate) struct DoesNotFit {
    pub(crate) blocked: Blocked,
    pub(crate) lack: Lack,
}

/// How far a newcomer has to look ahead.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Horizon {
    /// Not at all: lower levels gave way for it, and will again.
    Now,
    /// As the mode of admission says; those of levels below this one will give way.
    Future(usize),
}

/// The future peak of those that run, and when it was made.
#[derive(Default)]
pub(crate) struct Foresight {
    peak: FuturePeak,
    made_at: Option<MadeAt>,
    /// Blocks that were missing later for the last that was held back in this iteration: what is free now
    /// is kept for those that run. 0 where nobody was.
    pub(crate) missing_blocks: u32,
}

/// What a future peak knows of.
#[derive(Clone, Copy)]
struct MadeAt {
    /// Comings and goings.
    changes: u64,
    step: u64,
    /// Who is left out.
    giving_way: GivingWay,
}

impl Scheduler<'_> {
    /// What the prefix cache has of a waiting sequence, if there is room for all it needs.
    pub(crate) fn find_room(
        &mut self,
        key: SequenceKey,
        horizon: Horizon,
    ) -> Result<PrefixMatch, DoesNotFit> {
        let limits = self.limits;
        let sequence = &mut self.ledger.sequences[key.0];
        let request = &self.ledger.requests[sequence.request.0].request;
        if !fits_resets(self.plan, request, sequence) {
            return Err(DoesNotFit {
                blocked: Blocked::Budget,
                lack: Lack::default(),
            });
        }
        let cached = if limits.prefix_caching() {
            let chain = sequence.usable_chain(limits.block_size());
            self.lane.pool.find_prefix(chain)
        } else {
            PrefixMatch::default()
        };
        let lack = Lack {
            rows: sequence
                .num_rows()
                .saturating_sub(self.lane.rows.num_free()),
            blocks: self.missing_now(key, cached),
            num_cached_blocks: cached.num_blocks,
        };
        if let Horizon::Future(level) = horizon
            && lack.rows == 0
            && self.missing_later(key, cached, level, lack.blocks) > 0
        {
            // Whoever gives way has been left out already, so nobody's going would help.
            let lack = Lack::default();
            return Err(DoesNotFit {
                blocked: Blocked::Memory,
                lack,
            });
        }
        let blocked = match lack {
            Lack {
                rows: 0, blocks: 0, ..
            } => return Ok(cached),
            Lack { rows: 0, .. } => Blocked::Memory,
            _ => Blocked::Slots,
        };
        Err(DoesNotFit { blocked, lack })
    }

    /// Blocks missing later for a sequence of which the prefix cache has so much, though those of levels
    /// below `level` and its guests give way. Not asked where blocks are missing now and nobody does.
    fn missing_later(
        &mut self,
        key: SequenceKey,
        cached: PrefixMatch,
        level: usize,
        missing_now: u32,
    ) -> u32 {
        let (policy, running) = (self.ledger.rules.policy(), &self.lane.running);
        let admission = policy.memory.admission;
        if admission == MemoryAdmission::Optimistic || running.is_empty() {
            return 0;
        }
        let mut giving_way = self.giving_way(key, level);
        let sequences = &self.ledger.sequences;
        if !running.iter().any(|key| giving_way.has(&sequences[key.0])) {
            if missing_now > 0 {
                return 0;
            }
            giving_way = GivingWay::NOBODY;
        }
        let missing = match admission {
            MemoryAdmission::Reserve => self.missing_for_good(key, cached, giving_way),
            _ => self.missing_at_the_peak(key, cached, giving_way),
        };
        if missing > 0 {
            self.ledger.overflow.refused();
            self.lane.foresight.missing_blocks = missing;
        }
        missing
    }

    /// Blocks missing for the tokens that there are, above a watermark where somebody runs.
    fn missing_now(&self, key: SequenceKey, cached: PrefixMatch) -> u32 {
        let watermark = if self.lane.running.is_empty() {
            0
        } else {
            self.limits.watermark_blocks()
        };
        let num_tokens = self.ledger.sequences[key.0].num_tokens();
        // One token more than there is: the first decode must not have to preempt somebody.
        let needed = self.limits.blocks_for(num_tokens + 1) - cached.num_blocks + cached.num_parked;
        (needed + watermark).saturating_sub(self.lane.pool.available())
    }

    /// Blocks missing for all that it and those that run, and stay, may grow to.
    fn missing_for_good(
        &self,
        key: SequenceKey,
        cached: PrefixMatch,
        giving_way: GivingWay,
    ) -> u32 {
        let (mut promised, mut free) = (0, self.lane.pool.available());
        for key in self.lane.running.iter() {
            let sequence = &self.ledger.sequences[key.0];
            if giving_way.has(sequence) {
                free += sequence.table.num_blocks() - sequence.num_shared_blocks;
            } else {
                promised += self.growth(sequence);
            }
        }
        let needed = self.growth(&self.ledger.sequences[key.0]) - cached.num_blocks;
        (promised + needed + cached.num_parked).saturating_sub(free)
    }

    /// Blocks that a sequence, and its siblings that are not born yet, may still ask for.
    fn growth(&self, sequence: &Sequence) -> u32 {
        if sequence.finished.is_some() || sequence.ended {
            return 0;
        }
        let most = sequence.num_prompt_tokens + sequence.ending.max_tokens;
        let most = self.limits.blocks_for(most);
        // Siblings share the full blocks of the prompt; one that is not full is copied.
        let shared = sequence.num_prompt_tokens / self.limits.block_size();
        let copied = u32::from(sequence.may_share_last_block);
        let held = sequence.table.num_blocks();
        (most + copied).saturating_sub(held) + sequence.num_unborn * (most - shared)
    }

    /// Blocks by which the future peak of a newcomer and of those that stay exceeds the pool.
    fn missing_at_the_peak(
        &mut self,
        key: SequenceKey,
        cached: PrefixMatch,
        giving_way: GivingWay,
    ) -> u32 {
        self.foresee(giving_way);
        let (load, revived) = self.load_of_newcomer(key, cached);
        let peak = self.lane.foresight.peak.peak_with(load, revived);
        let block_size = u64::from(self.limits.block_size());
        let pool = u64::from(self.limits.num_kv_blocks()) * block_size;
        peak.saturating_sub(pool).div_ceil(block_size) as u32
    }

    /// Makes the future peak of those that stay, unless it is at hand.
    fn foresee(&mut self, giving_way: GivingWay) {
        let limits = self.limits;
        let (changes, step) = (self.ledger.overflow.changes(), self.lane.step.number);
        let foresight = &mut self.lane.foresight;
        let is_fresh = |made_at: MadeAt| {
            let age = step - made_at.step;
            (made_at.changes, made_at.giving_way) == (changes, giving_way)
                && age < u64::from(limits.block_size())
        };
        if foresight.made_at.is_some_and(is_fresh) {
            return;
        }
        foresight.peak.clear();
        let quantile = self.ledger.overflow.quantile();
        let mut freed_blocks = 0;
        for key in self.lane.running.iter() {
            let sequence = &self.ledger.sequences[key.0];
            if sequence.finished.is_some() {
                continue;
            }
            let shared = sequence.num_shared_blocks;
            freed_blocks += sequence.table.num_blocks() - shared;
            if !giving_way.has(sequence) {
                let remaining = self.ledger.remaining_at(sequence, quantile);
                let load = load_of(sequence, shared, remaining, limits);
                foresight.peak.push(load);
            }
        }
        let kept_blocks = self.lane.pool.usage().used.saturating_sub(freed_blocks);
        let base = u64::from(kept_blocks) * u64::from(limits.block_size());
        foresight.peak.settle(base);
        foresight.made_at = Some(MadeAt {
            changes,
            step,
            giving_way,
        });
    }

    /// What a newcomer adds to the future, and the tokens that it puts to use again for good.
    fn load_of_newcomer(&self, key: SequenceKey, cached: PrefixMatch) -> (Load, u64) {
        let sequence = &self.ledger.sequences[key.0];
        let quantile = self.ledger.overflow.quantile();
        let remaining = self.ledger.remaining_at(sequence, quantile);
        let load = load_of(sequence, cached.num_blocks, remaining, self.limits);
        let revived = u64::from(cached.num_parked) * u64::from(self.limits.block_size());
        (load, revived)
    }

    /// A newcomer was admitted: its life begins, and whoever is next finds it foreseen.
    pub(crate) fn has_joined(&mut self, key: SequenceKey, cached: PrefixMatch) {
        let before = self.ledger.overflow.changes();
        self.ledger.sequences[key.0].life = Some(self.ledger.overflow.begin());
        let made_at = self.lane.foresight.made_at.take();
        let sequence = &self.ledger.sequences[key.0];
        let knows = |at: &MadeAt| at.changes == before && !at.giving_way.has(sequence);
        if let Some(made_at) = made_at.filter(knows) {
            let (load, revived) = self.load_of_newcomer(key, cached);
            self.lane.foresight.peak.insert(load, revived);
            self.lane.foresight.made_at = Some(MadeAt {
                changes: self.ledger.overflow.changes(),
                ..made_at
            });
        }
    }
}

/// A sequence's load, and that of its siblings that are not born yet, beyond so many shared blocks.
fn load_of(sequence: &Sequence, shared_blocks: u32, remaining: u32, limits: &Limits) -> Load {
    let block_size = limits.block_size();
    let own = sequence.num_tokens() - shared_blocks * block_size;
    let in_last_block = sequence.num_prompt_tokens % block_size;
    Load {
        tokens: own + sequence.num_unborn * in_last_block + sequence.num_rows() * (block_size - 1),
        remaining,
        answers: sequence.num_rows(),
    }
}

impl Ledger {
    /// The life of an admission is over: what came of it steers the forecast.
    pub(crate) fn end_life(&mut self, life: Life) {
        let target = self.rules.policy().memory.target();
        self.overflow.end(life, target);
    }
}
