//! Steady decodes: what a plan says of a sequence, known without a look at it.
//!
//! A sequence that decodes gets one token more in every step. Until its last block is full or its answer
//! has its length, a plan says of it what the last one said, one further. So what is found by a look at it
//! is kept here, in columns like those of a plan, and the sequence knows for how many steps that will do
//! ([`Sequence::num_steady_steps`]). Whatever else happens to it (its results are not just one token more,
//! it is preempted, it ends) takes those away, and the next plan looks again.

use std::ops::Range;

use crate::iteration::flight::{Part, Step};
use crate::iteration::plan::StepPlan;
use crate::iteration::rows::Row;
use crate::iteration::sequence::Sequence;
use crate::iteration::tables::Written;
use crate::memory::blocks::BlockTable;
use crate::request::SequenceKey;

/// What the next plan says of each running sequence that is steady; of the others, nothing of meaning.
#[derive(Default)]
pub(crate) struct Steady {
    parts: Vec<Part>,
    rows: Vec<i32>,
    seq_lens: Vec<i32>,
    output_indices: Vec<i32>,
    slots: Vec<i64>,
    tables: Vec<Written>,
}

impl Steady {
    /// Nobody, with room for so many.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self {
            parts: Vec::with_capacity(count),
            rows: Vec::with_capacity(count),
            seq_lens: Vec::with_capacity(count),
            output_indices: Vec::with_capacity(count),
            slots: Vec::with_capacity(count),
            tables: Vec::with_capacity(count),
        }
    }

    /// Makes a place for who enters the running set.
    pub(crate) fn enter(&mut self, position: usize, key: SequenceKey) {
        let part = Part {
            sequence: key,
            num_tokens: 1,
            num_left_tokens: 0,
            num_samples: 0,
            num_scores: 0,
        };
        self.parts.insert(position, part);
        self.rows.insert(position, 0);
        self.seq_lens.insert(position, 0);
        self.output_indices.insert(position, 0);
        self.slots.insert(position, 0);
        self.tables.insert(position, Written::default());
    }

    /// Closes the place of who leaves it.
    pub(crate) fn leave(&mut self, position: usize) {
        self.parts.remove(position);
        self.rows.remove(position);
        self.seq_lens.remove(position);
        self.output_indices.remove(position);
        self.slots.remove(position);
        self.tables.remove(position);
    }

    /// Looks at a sequence of which the next token can be computed and is the last before its next output. It
    /// is steady after that for a step at least. Whether that leads to one sample and scores nothing.
    pub(crate) fn look(
        &mut self,
        position: usize,
        sequence: &mut Sequence,
        block_size: u32,
    ) -> bool {
        let planned = sequence.num_planned_tokens();
        let seq_len = planned as i32 + 1;
        let part = &mut self.parts[position];
        part.num_samples = sequence.num_samples_after(planned + 1);
        part.num_scores = sequence.scores_of(1).len() as u32;
        let is_plain = part.num_samples == 1 && part.num_scores == 0;
        self.rows[position] = row_of(sequence);
        self.seq_lens[position] = seq_len;
        self.output_indices[position] = seq_len - sequence.num_prompt_tokens as i32;
        self.slots[position] = slot_of(&sequence.table, planned, block_size);
        self.tables[position] = Written::of(&sequence.table);
        sequence.num_steady_steps = if is_plain {
            let in_blocks = sequence.table.num_blocks() * block_size - planned;
            in_blocks.min(sequence.num_expected_outputs_left()).max(1)
        } else {
            1
        };
        is_plain
    }

    /// Writes the steady ones of a range, which are launched, into plan and step, and goes on to what comes
    /// after that.
    pub(crate) fn write<'a>(
        &mut self,
        range: Range<usize>,
        plan: &mut StepPlan,
        step: &mut Step,
        table: impl Fn(usize) -> &'a BlockTable,
    ) {
        step.decodes.extend_from_slice(&self.parts[range.clone()]);
        plan.rows.extend_from_slice(&self.rows[range.clone()]);
        let seq_lens = &mut self.seq_lens[range.clone()];
        plan.seq_lens.extend_from_slice(seq_lens);
        for seq_len in seq_lens {
            *seq_len += 1;
        }
        let indices = &mut self.output_indices[range.clone()];
        plan.sample_output_indices.extend_from_slice(indices);
        for index in indices {
            *index += 1;
        }
        let slots = &mut self.slots[range.clone()];
        plan.slot_mapping.extend_from_slice(slots);
        for slot in slots {
            *slot += 1;
        }
        let begin = range.start;
        plan.add_tables(&self.tables[range], |at| table(begin + at));
    }

    /// Checks what is kept of a steady sequence; says what is wrong. For tests.
    pub(crate) fn audit(
        &self,
        position: usize,
        sequence: &Sequence,
        block_size: u32,
    ) -> Result<(), String> {
        let planned = sequence.num_planned_tokens();
        let seq_len = planned as i32 + 1;
        let part = &self.parts[position];
        let told = (
            (part.num_samples, part.num_scores, self.rows[position]),
            (self.seq_lens[position], self.output_indices[position]),
            (self.slots[position], self.tables[position]),
        );
        let found = (
            (1, 0, row_of(sequence)),
            (seq_len, seq_len - sequence.num_prompt_tokens as i32),
            (
                slot_of(&sequence.table, planned, block_size),
                Written::of(&sequence.table),
            ),
        );
        if told != found {
            let arrival = sequence.arrival;
            return Err(format!("{arrival:?} is {found:?}, but told as {told:?}"));
        }
        Ok(())
    }
}

/// The row of a sequence that runs.
pub(crate) fn row_of(sequence: &Sequence) -> i32 {
    let row = sequence.row.as_ref().map_or(-1, Row::as_i32);
    debug_assert!(row >= 0, "a scheduled sequence has a row");
    row
}

/// Where K and V of the token at `position` go.
pub(crate) fn slot_of(table: &BlockTable, position: u32, block_size: u32) -> i64 {
    let block = table.block((position / block_size) as usize);
    i64::from(block.as_i32()) * i64::from(block_size) + i64::from(position % block_size)
}
