//! Writing a decision into the plan: what each sequence of a step adds to its arrays.

use std::ops::Range;

use crate::config::Limits;
use crate::iteration::plan::{SOURCE_ID, SOURCE_LAST_SAMPLED, StepPlan};
use crate::iteration::rows::Row;
use crate::iteration::sequence::Sequence;
use crate::request::{Request, SamplingParams};

/// Whether the plan's ragged reset arrays have room; always true for the first newcomer of a step.
pub(crate) fn fits_resets(plan: &StepPlan, request: &Request, sequence: &Sequence) -> bool {
    let fits = |used: usize, capacity: usize, extra: usize| used + extra <= capacity;
    let resets = &plan.resets;
    let (bias, suppressed) = (request.sampling.logit_bias.len(), request.suppressed.len());
    let ids = if request.sampling.has_penalties() {
        sequence.tokens.len()
    } else {
        0
    };
    fits(resets.ids.len(), resets.ids.capacity(), ids)
        && fits(resets.bias_ids.len(), resets.bias_ids.capacity(), bias)
        && fits(
            resets.suppressed_ids.len(),
            resets.suppressed_ids.capacity(),
            suppressed,
        )
}

/// Hands the sequence's rows over; its siblings share the ranges of its ragged data.
pub(crate) fn write_resets(plan: &mut StepPlan, request: &Request, sequence: &Sequence) {
    let resets = &mut plan.resets;
    let sampling = &request.sampling;
    let range = |begin: usize, end: usize| [begin as i32, end as i32];

    let begin = resets.ids.len();
    if sampling.has_penalties() {
        resets
            .ids
            .extend(sequence.tokens.iter().map(|&id| id as i32));
    }
    let ids = range(begin, resets.ids.len());
    let begin = resets.bias_ids.len();
    for &(token, value) in &sampling.logit_bias {
        resets.bias_ids.push(token as i32);
        resets.bias_values.push(value);
    }
    let bias = range(begin, resets.bias_ids.len());
    let begin = resets.suppressed_ids.len();
    resets
        .suppressed_ids
        .extend(request.suppressed.iter().map(|&id| id as i32));
    let suppressed = range(begin, resets.suppressed_ids.len());

    let rows = sequence.row.iter().chain(&sequence.sibling_rows);
    for (child, row) in (sequence.arrival.child..).zip(rows) {
        resets.rows.push(row.as_i32());
        resets.floats.push([
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        ]);
        resets.ints.push([
            i64::from(sampling.top_k),
            sampling.seed as i64,
            i64::from(child),
            sampling.logprobs.map_or(-1, i64::from),
            i64::from(sequence.num_prompt_tokens),
            i64::from(request.stop.min_tokens),
        ]);
        resets.id_ranges.push(ids);
        resets.bias_ranges.push(bias);
        resets.suppressed_ranges.push(suppressed);
    }
}

/// Writes what the step computes of a sequence; returns the samples that it leads to.
#[inline]
pub(crate) fn write_sequence(plan: &mut StepPlan, sequence: &Sequence, limits: &Limits) -> u32 {
    let row = sequence.row.as_ref().map_or(-1, Row::as_i32);
    debug_assert!(row >= 0, "a scheduled sequence has a row");
    let begin = sequence.num_planned_tokens();
    let end = begin + sequence.num_scheduled_tokens;
    let num_known = sequence.num_tokens();
    let blocks = sequence.table.blocks();
    let block_size = limits.block_size();
    plan.rows.push(row);
    plan.seq_lens.push(end as i32);
    for position in begin..end {
        let block = blocks[(position / block_size) as usize].as_i32();
        let slot = i64::from(block) * i64::from(block_size) + i64::from(position % block_size);
        let token = if position < num_known {
            sequence.token(position)
        } else {
            mark_as_sampled(plan);
            0
        };
        plan.token_ids.push(token as i32);
        plan.positions.push(position as i32);
        plan.slot_mapping.push(slot);
    }
    plan.query_start_loc.push(plan.token_ids.len() as i32);
    plan.block_ids
        .extend(blocks.iter().map(|block| block.as_i32()));
    plan.block_table_offsets.push(plan.block_ids.len() as i32);
    let mut num_samples = 0;
    if sequence.completes() {
        let last = plan.token_ids.len() as i32 - 1;
        let output_index = (sequence.num_expected_tokens() - sequence.num_prompt_tokens) as i32;
        for row in sequence.row.iter().chain(&sequence.sibling_rows) {
            plan.logits_indices.push(last);
            plan.sample_rows.push(row.as_i32());
            plan.sample_output_indices.push(output_index);
            num_samples += 1;
        }
    }
    num_samples
}

/// The next token is sampled by a step in flight: the executor has it.
#[inline(never)]
fn mark_as_sampled(plan: &mut StepPlan) {
    plan.token_sources.resize(plan.token_ids.len(), SOURCE_ID);
    plan.token_sources.push(SOURCE_LAST_SAMPLED);
}

/// Asks for the log-probabilities of the prompt tokens after those at `positions`, which were just
/// written.
pub(crate) fn write_scores(
    plan: &mut StepPlan,
    sequence: &Sequence,
    positions: Range<u32>,
    sampling: &SamplingParams,
) {
    let first = plan.token_ids.len() as u32 - sequence.num_scheduled_tokens;
    let num_best = sampling.prompt_logprobs.unwrap_or(0) as i32;
    for position in positions {
        let index = first + position - sequence.num_planned_tokens();
        let next = sequence.tokens[position as usize + 1];
        plan.score_indices.push(index as i32);
        plan.score_token_ids.push(next as i32);
        plan.score_num_best.push(num_best);
    }
}
