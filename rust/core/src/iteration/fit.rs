//! Whether there is memory for a newcomer: now, for good, or as far as can be foreseen.
//!
//! `optimistic` looks at now: its tokens, and a watermark (vLLM's rule). `reserve` promises
//! every answer the blocks of its prompt and its `max_tokens` (Orca, OSDI'22), and admits whom the rest
//! of the pool can be promised to; only a request whose own answers exceed the pool, which gets it to
//! itself, ever preempts there, and nobody but itself. `forecast` admits as long as the future peak of
//! all (`predict/memory_peak.rs`) fits the pool, where each answer ends at a quantile of what is believed
//! of its length, and the quantile is steered by how often that went wrong (`predict/overflow.rs`).
//! Whatever the mode, who comes to an empty running set is let in.
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
use crate::iteration::preempt::Lack;
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
    /// As the mode of admission says.
    Future,
}

/// The future peak of those that run, and when it was made.
#[derive(Default)]
pub(crate) struct Foresight {
    peak: FuturePeak,
    /// The comings and goings that it knows of, and the step.
    made_at: Option<(u64, u64)>,
    /// Whether what is free now is kept for those that run, and somebody waits for it.
    pub(crate) is_short: bool,
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
        let num_rows = sequence.num_rows();
        let lack = Lack {
            rows: num_rows.saturating_sub(self.lane.rows.num_free()),
            blocks: self.missing_blocks(key, cached, horizon),
            num_cached_blocks: cached.num_blocks,
        };
        let blocked = match lack {
            Lack {
                rows: 0, blocks: 0, ..
            } => return Ok(cached),
            Lack { rows: 0, .. } => Blocked::Memory,
            _ => Blocked::Slots,
        };
        Err(DoesNotFit { blocked, lack })
    }

    /// Blocks that are missing for a sequence of which the prefix cache has so much.
    fn missing_blocks(&mut self, key: SequenceKey, cached: PrefixMatch, horizon: Horizon) -> u32 {
        if self.lane.running.is_empty() {
            return self.missing_now(key, cached, 0);
        }
        let missing = self.missing_now(key, cached, self.limits.watermark_blocks());
        let later = match self.ledger.rules.policy().memory.admission {
            MemoryAdmission::Optimistic => return missing,
            MemoryAdmission::Reserve => self.missing_for_good(key, cached),
            MemoryAdmission::Forecast if missing > 0 || horizon == Horizon::Now => return missing,
            MemoryAdmission::Forecast => self.missing_at_the_peak(key, cached),
        };
        if later > 0 {
            self.ledger.overflow.refused();
            self.lane.foresight.is_short = true;
        }
        later
    }

    /// Blocks missing for the tokens that there are, above a watermark.
    fn missing_now(&self, key: SequenceKey, cached: PrefixMatch, watermark: u32) -> u32 {
        let num_tokens = self.ledger.sequences[key.0].num_tokens();
        // One token more than there is: the first decode must not have to preempt somebody.
        let needed = self.limits.blocks_for(num_tokens + 1) - cached.num_blocks + cached.num_parked;
        (needed + watermark).saturating_sub(self.lane.pool.available())
    }

    /// Blocks missing for all that it and those that run may grow to.
    fn missing_for_good(&self, key: SequenceKey, cached: PrefixMatch) -> u32 {
        let promised = |key: &SequenceKey| self.growth(&self.ledger.sequences[key.0]);
        let promised: u32 = self.lane.running.iter().map(promised).sum();
        let needed = self.growth(&self.ledger.sequences[key.0]) - cached.num_blocks;
        (promised + needed + cached.num_parked).saturating_sub(self.lane.pool.available())
    }

    /// Blocks that a sequence, and its siblings that are not born yet, may still ask for.
    fn growth(&self, sequence: &Sequence) -> u32 {
        if sequence.finished.is_some() {
            return 0;
        }
        let most = sequence.num_prompt_tokens + sequence.ending.max_tokens;
        let most = self.limits.blocks_for(most);
        // Siblings share the full blocks of the prompt; one that is not full is copied.
        let shared = sequence.num_prompt_tokens / self.limits.block_size();
        let copied = u32::from(sequence.may_share_last_block);
        let held = sequence.table.blocks().len() as u32;
        (most + copied).saturating_sub(held) + sequence.num_unborn * (most - shared)
    }

    /// Blocks by which the future peak with a newcomer exceeds the pool.
    fn missing_at_the_peak(&mut self, key: SequenceKey, cached: PrefixMatch) -> u32 {
        self.foresee();
        let (load, base) = self.load_of_newcomer(key, cached);
        let peak = self.lane.foresight.peak.peak_with(load, base);
        let block_size = u64::from(self.limits.block_size());
        let pool = u64::from(self.limits.num_kv_blocks()) * block_size;
        peak.saturating_sub(pool).div_ceil(block_size) as u32
    }

    /// Makes the future peak of those that run, unless it is at hand.
    fn foresee(&mut self) {
        let limits = self.limits;
        let (changes, step) = (self.ledger.overflow.changes(), self.lane.step.number);
        let foresight = &mut self.lane.foresight;
        let is_fresh = |(seen, at)| seen == changes && step - at < u64::from(limits.block_size());
        if foresight.made_at.is_some_and(is_fresh) {
            return;
        }
        foresight.peak.clear();
        let quantile = self.ledger.overflow.quantile();
        let mut freed_blocks = 0;
        for key in &self.lane.running {
            let sequence = &self.ledger.sequences[key.0];
            if sequence.finished.is_none() {
                let shared = sequence.num_shared_blocks;
                let remaining = self.ledger.remaining_at(sequence, quantile);
                foresight
                    .peak
                    .push(load_of(sequence, shared, remaining, limits));
                freed_blocks += sequence.table.blocks().len() as u32 - shared;
            }
        }
        let kept_blocks = self.lane.pool.usage().used.saturating_sub(freed_blocks);
        foresight
            .peak
            .settle(u64::from(kept_blocks) * u64::from(limits.block_size()));
        foresight.made_at = Some((changes, step));
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
        let made_at = self.lane.foresight.made_at;
        if let Some((_, step)) = made_at.filter(|&(changes, _)| changes == before) {
            let (load, revived) = self.load_of_newcomer(key, cached);
            self.lane.foresight.peak.insert(load, revived);
            self.lane.foresight.made_at = Some((self.ledger.overflow.changes(), step));
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
