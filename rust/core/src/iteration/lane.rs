//! A lane: one model's memory, rows and running set. Several models later are several lanes over one
//! ledger.

use crate::config::Limits;
use crate::iteration::backfill::Backfilling;
use crate::iteration::fit::Foresight;
use crate::iteration::governor::Governor;
use crate::iteration::rows::RowPool;
use crate::memory::blocks::{BlockCopy, BlockPool};
use crate::predict::iteration_time::{CostModel, StepShape};
use crate::request::{SequenceKey, Time};
use crate::waiting::forecast::Room;

pub(crate) struct Lane {
    pub(crate) pool: BlockPool,
    pub(crate) rows: RowPool,
    /// Running sequences, oldest arrival first.
    pub(crate) running: Vec<SequenceKey>,
    /// The step being planned or in flight.
    pub(crate) step: Step,
    /// Whether `step` has been handed to the executor.
    pub(crate) in_flight: bool,
    /// A batch that leaves together is still being formed.
    pub(crate) is_forming: bool,
    /// What those that run hold and have still to compute, by their level.
    pub(crate) at_work: Vec<AtWork>,
    /// What memory those that run will need.
    pub(crate) foresight: Foresight,
    /// What iterations cost.
    pub(crate) costs: CostModel,
    pub(crate) governor: Governor,
    /// When the last results came, if somebody runs on since.
    pub(crate) idle_since: Option<Time>,
    /// Who goes ahead of the first of the queue while that does not fit.
    pub(crate) backfill: Backfilling,
}

/// What the running sequences of a level hold, and have still to compute.
#[derive(Clone, Copy, Default)]
pub(crate) struct AtWork {
    pub(crate) rows: u64,
    pub(crate) blocks: u64,
    /// Tokens before their next output, beyond the step.
    pub(crate) prefill_tokens: u64,
}

/// Who is in a step, in the order of its plan. Kept until its results are committed.
pub(crate) struct Step {
    /// Its number, from 1.
    pub(crate) number: u64,
    /// When it was decided.
    pub(crate) since: Time,
    /// Tokens in it.
    pub(crate) num_tokens: u64,
    /// Whether more prefill was there than the token budget allowed.
    pub(crate) prefill_is_short: bool,
    /// Samples that its plan asks for.
    pub(crate) num_samples: usize,
    /// What its time depends on.
    pub(crate) shape: StepShape,
    /// Rows of those that are done and stay for their batch.
    pub(crate) num_padded: u64,
    /// Since the results of the step before, if any of its sequences ran on.
    pub(crate) gap_us: Option<u64>,
    /// Prompt tokens that it scores.
    pub(crate) num_scores: usize,
    /// One query token each: decodes, and prefill chunks of one token.
    pub(crate) decodes: Vec<SequenceKey>,
    /// Prefill chunks of more than one token.
    pub(crate) chunks: Vec<SequenceKey>,
    /// Copies on write, and for whom; held until the step is over.
    pub(crate) copies: Vec<(SequenceKey, BlockCopy)>,
}

impl Lane {
    pub(crate) fn new(limits: &Limits) -> Self {
        let pool = BlockPool::new(limits.num_kv_blocks());
        let seqs = limits.max_num_seqs() as usize;
        Self {
            rows: RowPool::new(limits.max_num_seqs()),
            running: Vec::with_capacity(seqs),
            step: Step {
                number: 0,
                since: Time(0),
                num_tokens: 0,
                prefill_is_short: false,
                num_samples: 0,
                num_scores: 0,
                shape: StepShape::default(),
                num_padded: 0,
                gap_us: None,
                decodes: Vec::with_capacity(seqs),
                chunks: Vec::with_capacity(seqs),
                copies: Vec::with_capacity(seqs),
            },
            in_flight: false,
            is_forming: false,
            at_work: Vec::new(),
            foresight: Foresight::default(),
            costs: CostModel::new(limits.cost_model()),
            governor: Governor::default(),
            idle_since: None,
            backfill: Backfilling::default(),
            pool,
        }
    }

    /// What is free for newcomers, behind all that runs.
    pub(crate) fn room(&self, limits: &Limits) -> Room {
        let free = self.pool.available();
        let blocks = if self.foresight.missing_blocks > 0 {
            0
        } else {
            free.saturating_sub(limits.watermark_blocks())
        };
        Room {
            rows: self.rows.num_free().into(),
            blocks: blocks.into(),
            prefill_tokens: self.at_work.iter().map(|work| work.prefill_tokens).sum(),
        }
    }

    /// What is free for newcomers of a level: prefill of lower ones goes behind theirs, and if `preempts`
    /// says so, what lower ones hold is as good as free.
    pub(crate) fn room_for(&self, limits: &Limits, level: usize, preempts: bool) -> Room {
        let mut room = self.room(limits);
        for below in self.at_work.iter().skip(level + 1) {
            room.prefill_tokens -= below.prefill_tokens;
            if preempts {
                room.rows += below.rows;
                room.blocks += below.blocks;
            }
        }
        room
    }
}

impl Step {
    /// Forgets who was in it.
    pub(crate) fn clear(&mut self) {
        self.decodes.clear();
        self.chunks.clear();
        self.copies.clear();
        self.num_padded = 0;
    }

    /// Adds a sequence with so many query tokens.
    pub(crate) fn add(&mut self, sequence: SequenceKey, num_query_tokens: u32) {
        if num_query_tokens == 1 {
            self.decodes.push(sequence);
        } else {
            self.chunks.push(sequence);
        }
    }

    /// Takes back what was granted to `sequence`.
    pub(crate) fn withdraw(&mut self, sequence: SequenceKey) {
        self.decodes.retain(|&key| key != sequence);
        self.chunks.retain(|&key| key != sequence);
        self.copies.retain(|&(key, _)| key != sequence);
    }

    /// The sequence at `position` of the plan.
    pub(crate) fn sequence(&self, position: usize) -> SequenceKey {
        match position.checked_sub(self.decodes.len()) {
            None => self.decodes[position],
            Some(position) => self.chunks[position],
        }
    }

    /// Sequences in it.
    pub(crate) fn num_sequences(&self) -> usize {
        self.decodes.len() + self.chunks.len()
    }
}
