//! The step plan: one iteration's decision as flat arrays, written once.
//!
//! The builder appends to plain vectors whose capacity is fixed when they are made ([`StepPlan::new`]),
//! so their memory never moves and the bindings can export it once. Decodes come first, then prefill
//! chunks: two counts cut every array. The meaning and shape of each array is that of
//! `chairlift.executor.StepPlan`, which mirrors this struct field by field.
//!
//! A plan is complete: block tables are whole in every plan, and a row's parameters travel in
//! [`RowResets`] in the step in which a sequence takes the row. It is written on top of what it said before,
//! of which block tables that still hold stay in place; so nobody else may write into its arrays, and it
//! serves one engine.

use crate::config::Limits;
use crate::iteration::governor::MOST_COPIES;
use crate::iteration::tables::{TableArrays, Written, WrittenTables};
use crate::memory::blocks::{BlockLocation, BlockTable};
use crate::predict::iteration_time::{StepShape, pairs};
use crate::request::MAX_RAGGED_PER_REQUEST;

/// Where an input token comes from: its id is in the plan.
pub const SOURCE_ID: u8 = 0;
/// Where an input token comes from: the row's last sampled token, still on the device.
pub const SOURCE_LAST_SAMPLED: u8 = 1;

/// The sequence uses no adapter.
pub const NO_ADAPTER: i32 = -1;

/// One iteration, decided. `N` sequences, `T` tokens, `S` samples, `P` scored prompt tokens, `C`
/// copies, `M` masks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Number of the step, from 1; 0 before the first.
    pub step: u64,
    /// The first so many sequences have one query token each.
    pub num_decodes: usize,
    /// `[N]` row of each sequence.
    pub rows: Vec<i32>,
    /// `[N]` adapter of each sequence; [`NO_ADAPTER`] today.
    pub adapter_ids: Vec<i32>,
    /// `[N + 1]` where each sequence's tokens begin.
    pub query_start_loc: Vec<i32>,
    /// `[N]` context length after this step.
    pub seq_lens: Vec<i32>,
    /// `[T]` input tokens.
    pub token_ids: Vec<i32>,
    /// `[T]` [`SOURCE_ID`] or [`SOURCE_LAST_SAMPLED`].
    pub token_sources: Vec<u8>,
    /// `[T]` position in the sequence.
    pub positions: Vec<i32>,
    /// `[T]` KV slot: block * `block_size` + position % `block_size`.
    pub slot_mapping: Vec<i64>,
    /// `[G * N + 1]` where each sequence's blocks begin, for each of `G` KV groups in turn; there is
    /// one group.
    pub block_table_offsets: Vec<i32>,
    /// `[B]` block tables, one after the other.
    pub block_ids: Vec<i32>,
    /// `[S]` token whose logits are sampled.
    pub logits_indices: Vec<i32>,
    /// `[S]` row of each sample.
    pub sample_rows: Vec<i32>,
    /// `[S]` output tokens the row's sequence has already.
    pub sample_output_indices: Vec<i32>,
    /// `[M]` row of each sample whose logits get a mask; empty today.
    pub mask_rows: Vec<i32>,
    /// `[P]` token whose logits give the log-probability of the prompt token after it.
    pub score_indices: Vec<i32>,
    /// `[P]` that prompt token.
    pub score_token_ids: Vec<i32>,
    /// `[P]` how many of the best are told beside it.
    pub score_num_best: Vec<i32>,
    /// `[C]` (source, destination) blocks to copy before the forward pass. Those to the host come first and
    /// are made first, for the block that they read may be written by another. Of those after them what one
    /// writes no other reads or writes: they may be made in any order.
    pub block_copies: Vec<[i32; 2]>,
    /// `[C]` the [`BlockLocation`](crate::memory::blocks::BlockLocation)s of source and destination.
    pub block_copy_locations: Vec<[u8; 2]>,
    /// Rows that change hands in this step.
    pub resets: RowResets,
    /// What the block tables' arrays hold.
    pub(crate) tables: WrittenTables,
}

/// Rows that a sequence takes over in this step. `R` rows; ragged data as ranges into flat arrays.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowResets {
    /// `[R]` the row.
    pub rows: Vec<i32>,
    /// `[R]` temperature, `top_p`, `min_p`, repetition, presence, frequency penalty.
    pub floats: Vec<[f32; 6]>,
    /// `[R]` `top_k`, seed, child, logprobs (-1 none), prompt ids in the id range, `min_tokens`.
    pub ints: Vec<[i64; 6]>,
    /// `[R]` range of `ids`.
    pub id_ranges: Vec<[i32; 2]>,
    /// `[R]` range of `bias_ids` and `bias_values`.
    pub bias_ranges: Vec<[i32; 2]>,
    /// `[R]` range of `suppressed_ids`.
    pub suppressed_ranges: Vec<[i32; 2]>,
    /// Prompt and output ids of rows with penalties.
    pub ids: Vec<i32>,
    /// `logit_bias` tokens.
    pub bias_ids: Vec<i32>,
    /// `logit_bias` values.
    pub bias_values: Vec<f32>,
    /// Tokens not to be sampled before `min_tokens`.
    pub suppressed_ids: Vec<i32>,
}

impl StepPlan {
    /// An empty plan that holds any step under `limits` without growing.
    pub fn new(limits: &Limits) -> Self {
        let seqs = limits.max_num_seqs() as usize;
        let tokens = limits.max_num_batched_tokens() as usize;
        let blocks = limits.blocks_for(limits.max_model_len()) as usize * seqs;
        let copies = seqs + most_host_copies(limits);
        Self {
            step: 0,
            num_decodes: 0,
            rows: Vec::with_capacity(seqs),
            adapter_ids: Vec::with_capacity(seqs),
            query_start_loc: Vec::with_capacity(seqs + 1),
            seq_lens: Vec::with_capacity(seqs),
            token_ids: Vec::with_capacity(tokens),
            token_sources: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            slot_mapping: Vec::with_capacity(tokens),
            block_table_offsets: Vec::with_capacity(seqs + 1),
            block_ids: Vec::with_capacity(blocks),
            logits_indices: Vec::with_capacity(seqs),
            sample_rows: Vec::with_capacity(seqs),
            sample_output_indices: Vec::with_capacity(seqs),
            mask_rows: Vec::with_capacity(seqs),
            score_indices: Vec::with_capacity(tokens),
            score_token_ids: Vec::with_capacity(tokens),
            score_num_best: Vec::with_capacity(tokens),
            block_copies: Vec::with_capacity(copies),
            block_copy_locations: Vec::with_capacity(copies),
            resets: RowResets {
                rows: Vec::with_capacity(seqs),
                floats: Vec::with_capacity(seqs),
                ints: Vec::with_capacity(seqs),
                id_ranges: Vec::with_capacity(seqs),
                bias_ranges: Vec::with_capacity(seqs),
                suppressed_ranges: Vec::with_capacity(seqs),
                ids: Vec::with_capacity(limits.max_model_len() as usize + tokens),
                bias_ids: Vec::with_capacity(4 * MAX_RAGGED_PER_REQUEST),
                bias_values: Vec::with_capacity(4 * MAX_RAGGED_PER_REQUEST),
                suppressed_ids: Vec::with_capacity(4 * MAX_RAGGED_PER_REQUEST),
            },
            tables: WrittenTables::with_capacity(seqs),
        }
    }

    /// Sequences in the step.
    pub fn num_seqs(&self) -> usize {
        self.rows.len()
    }

    /// Tokens in the step.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// What the step's time depends on.
    pub fn shape(&self) -> StepShape {
        let contexts = self.seq_lens[..self.num_decodes].iter();
        let chunks = self.num_decodes..self.num_seqs();
        StepShape {
            sequences: self.num_seqs() as f64,
            tokens: self.num_tokens() as f64,
            decode_context: contexts.map(|&context| i64::from(context)).sum::<i64>() as f64,
            prefill_pairs: chunks
                .map(|at| {
                    let chunk = self.query_start_loc[at + 1] - self.query_start_loc[at];
                    pairs((self.seq_lens[at] - chunk) as u32, chunk as u32)
                })
                .sum(),
            samples: self.num_samples() as f64,
            copies: self.num_host_copies() as f64,
        }
    }

    /// Samples the step returns.
    pub fn num_samples(&self) -> usize {
        self.sample_rows.len()
    }

    /// Prompt tokens that the step scores.
    pub fn num_scores(&self) -> usize {
        self.score_indices.len()
    }

    /// Blocks that are copied from and to the host.
    pub fn num_host_copies(&self) -> usize {
        let host = BlockLocation::Host as u8;
        let locations = self.block_copy_locations.iter();
        locations.filter(|ends| ends.contains(&host)).count()
    }

    /// Adds the block table of the step's next sequence.
    pub(crate) fn add_table(&mut self, table: &BlockTable) {
        self.add_tables(&[Written::of(table)], |_| table);
    }

    /// Adds those of the step's next sequences, which are known to be so; `table` has each.
    pub(crate) fn add_tables<'a>(
        &mut self,
        known: &[Written],
        table: impl Fn(usize) -> &'a BlockTable,
    ) {
        let mut arrays = TableArrays {
            block_ids: &mut self.block_ids,
            offsets: &mut self.block_table_offsets,
        };
        self.tables.add_all(&mut arrays, known, table);
    }

    /// Ends the block tables of the step.
    pub(crate) fn end_tables(&mut self) {
        let mut arrays = TableArrays {
            block_ids: &mut self.block_ids,
            offsets: &mut self.block_table_offsets,
        };
        self.tables.end(&mut arrays);
    }

    /// Empties the plan for step number `step`, but for the block tables, which [`Self::end_tables`] brings up
    /// to date.
    pub(crate) fn begin(&mut self, step: u64) {
        self.step = step;
        self.num_decodes = 0;
        self.rows.clear();
        self.adapter_ids.clear();
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        self.seq_lens.clear();
        self.token_ids.clear();
        self.token_sources.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.tables.begin();
        self.logits_indices.clear();
        self.sample_rows.clear();
        self.sample_output_indices.clear();
        self.mask_rows.clear();
        self.score_indices.clear();
        self.score_token_ids.clear();
        self.score_num_best.clear();
        self.block_copies.clear();
        self.block_copy_locations.clear();
        self.resets.clear();
    }
}

/// Most blocks that a plan copies from and to the host.
fn most_host_copies(limits: &Limits) -> usize {
    if limits.num_host_kv_blocks() == 0 {
        0
    } else {
        MOST_COPIES as usize
    }
}

impl RowResets {
    fn clear(&mut self) {
        self.rows.clear();
        self.floats.clear();
        self.ints.clear();
        self.id_ranges.clear();
        self.bias_ranges.clear();
        self.suppressed_ranges.clear();
        self.ids.clear();
        self.bias_ids.clear();
        self.bias_values.clear();
        self.suppressed_ids.clear();
    }
}
