//! A lane: one model's memory, rows and running set. Several models later are several lanes over one
//! ledger.

use crate::config::Limits;
use crate::iteration::backfill::Backfilling;
use crate::iteration::filled::Filled;
use crate::iteration::fit::Foresight;
use crate::iteration::flight::{Flights, Step};
use crate::iteration::governor::Governor;
use crate::iteration::rows::RowPool;
use crate::iteration::running::Running;
use crate::iteration::tally::Tally;
use crate::memory::blocks::{BlockCopy, BlockPool};
use crate::predict::iteration_time::{CostModel, StepShape};
use crate::request::{SequenceKey, Time};
use crate::waiting::forecast::Room;

pub(crate) struct Lane {
    pub(crate) pool: BlockPool,
    pub(crate) rows: RowPool,
    /// Who runs.
    pub(crate) running: Running,
    /// Those of them that have ended; they leave when no step in flight has them.
    pub(crate) ended: Vec<SequenceKey>,
    /// The step being planned; between decisions it is empty and bears the number of the last.
    pub(crate) step: Step,
    /// Copies that the memory just given to a sequence needs; empty at any other moment.
    pub(crate) new_copies: Vec<BlockCopy>,
    /// The steps that the executor has.
    pub(crate) in_flight: Flights,
    /// What was in the step that was planned last.
    pub(crate) last_shape: StepShape,
    /// What the step that lands did, by class and tenant.
    pub(crate) tally: Tally,
    /// Who filled a block in it; empty between commits.
    pub(crate) filled: Filled,
    /// Nothing more is planned until nothing is in flight: somebody must be preempted.
    pub(crate) must_land: bool,
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

/// What the running sequences of a level hold, and have still to compute. The rows and blocks of the
/// highest level are counted only where somebody runs below it: nobody takes them from it.
#[derive(Clone, Copy, Default)]
pub(crate) struct AtWork {
    pub(crate) rows: u64,
    pub(crate) blocks: u64,
    /// Tokens before their next output, beyond the step.
    pub(crate) prefill_tokens: u64,
}

impl Lane {
    pub(crate) fn new(limits: &Limits) -> Self {
        let pool = BlockPool::new(limits.num_kv_blocks(), limits.num_host_kv_blocks());
        let seqs = limits.max_num_seqs() as usize;
        let (step, in_flight) = Flights::new(limits);
        Self {
            rows: RowPool::new(limits.max_num_seqs()),
            running: Running::with_capacity(seqs),
            ended: Vec::with_capacity(seqs),
            step,
            new_copies: Vec::new(),
            in_flight,
            last_shape: StepShape::default(),
            tally: Tally::default(),
            filled: Filled::with_capacity(seqs),
            must_land: false,
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

    /// Whether what is planned now runs ahead of results.
    pub(crate) fn is_ahead(&self) -> bool {
        !self.in_flight.is_empty()
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
