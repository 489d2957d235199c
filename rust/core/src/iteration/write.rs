//! Writing a decision into the plan: what each sequence of a step adds to its arrays.

use slab::Slab;

use crate::config::Limits;
use crate::iteration::flight::{Part, Step};
use crate::iteration::plan::{SOURCE_ID, SOURCE_LAST_SAMPLED, StepPlan};
use crate::iteration::running::Running;
use crate::iteration::sequence::Sequence;
use crate::iteration::steady::{row_of, slot_of};
use crate::memory::blocks::{BlockCopy, CopyKind};
use crate::request::{Request, SamplingParams};

/// Whether the plan's ragged reset arrays have room; always true for the first newcomer of a step.
pub(crate) fn fits_resets(plan: &StepPlan, request: &Request, sequence: &Sequence) -> bool {
    let fits = |used: usize, capacity: usize, extra: usize| used + extra <= capacity;
    let resets = &plan.resets;
    let (bias, suppressed) = (request.sampling.logit_bias.len(), request.suppressed.len());
    let ids = if request.sampling.has_penalties() {
        sequence.num_tokens() as usize
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
        resets.ids.extend(sequence.tokens().map(|id| id as i32));
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

/// Writes the steady decodes, which come first, and launches them. They have one token each, so an array is
/// filled for many of them at once: also with what is sampled, if each leads to one sample and scores
/// nothing. Says how many they are.
pub(crate) fn write_steady(
    plan: &mut StepPlan,
    step: &mut Step,
    running: &mut Running,
    sequences: &mut Slab<Sequence>,
) -> usize {
    let num_others = step.decodes.len();
    let count = std::mem::take(&mut step.num_steady);
    plan.token_ids.resize(count, 0);
    let (keys, steady) = running.steady();
    let (mut begin, mut at) = (0, 0);
    for (position, &key) in keys.iter().enumerate() {
        let sequence = &mut sequences[key.0];
        if sequence.num_steady_steps > 0 {
            let position = sequence.num_planned_tokens();
            plan.token_ids[at] = token_of(sequence, position, at, &mut plan.token_sources);
            sequence.launch_steady();
            at += 1;
        } else {
            let table = |at: usize| &sequences[keys[at].0].table;
            steady.write(begin..position, plan, step, table);
            begin = position + 1;
        }
    }
    let table = |at: usize| &sequences[keys[at].0].table;
    steady.write(begin..keys.len(), plan, step, table);
    debug_assert_eq!(plan.rows.len(), count);
    step.decodes.rotate_left(num_others);
    let last = plan.seq_lens.iter().map(|&seq_len| seq_len - 1);
    plan.positions.extend(last);
    plan.query_start_loc.extend(1..=count as i32);
    if step.is_plain {
        plan.logits_indices.extend(0..count as i32);
        plan.sample_rows.extend_from_slice(&plan.rows);
    } else {
        plan.sample_output_indices.clear();
    }
    count
}

/// Writes the tokens of a prefill chunk and launches it.
pub(crate) fn write_chunk(
    plan: &mut StepPlan,
    part: &mut Part,
    sequence: &mut Sequence,
    limits: &Limits,
) {
    let begin = sequence.num_planned_tokens();
    let end = begin + sequence.num_scheduled_tokens;
    plan.rows.push(row_of(sequence));
    plan.seq_lens.push(end as i32);
    for position in begin..end {
        let at = plan.token_ids.len();
        let token = token_of(sequence, position, at, &mut plan.token_sources);
        plan.token_ids.push(token);
        plan.positions.push(position as i32);
        let slot = slot_of(&sequence.table, position, limits.block_size());
        plan.slot_mapping.push(slot);
    }
    plan.query_start_loc.push(plan.token_ids.len() as i32);
    plan.add_table(&sequence.table);
    launch(part, sequence);
}

/// Hands the scheduled tokens of a sequence over to the executor; its part says what they lead to.
fn launch(part: &mut Part, sequence: &mut Sequence) {
    part.num_samples = sequence.num_samples();
    part.num_scores = sequence.scores().len() as u32;
    sequence.launch();
}

/// The id of the token at `position`, which is number `at` of the plan; 0 where a step in flight samples it:
/// the executor has it.
fn token_of(sequence: &Sequence, position: u32, at: usize, sources: &mut Vec<u8>) -> i32 {
    if position < sequence.num_tokens() {
        return sequence.token(position) as i32;
    }
    mark_as_sampled(sources, at);
    0
}

#[inline(never)]
fn mark_as_sampled(sources: &mut Vec<u8>, at: usize) {
    sources.resize(at, SOURCE_ID);
    sources.push(SOURCE_LAST_SAMPLED);
}

/// Index of the output that is sampled after the first `seq_len` tokens.
fn output_index_after(seq_len: i32, sequence: &Sequence) -> i32 {
    seq_len - sequence.num_prompt_tokens as i32
}

/// Asks for the samples that the tokens of a launched sequence lead to, which is at `at` in the plan.
pub(crate) fn write_samples(plan: &mut StepPlan, at: usize, part: &Part, sequence: &Sequence) {
    if part.num_samples == 0 {
        return;
    }
    let last = plan.query_start_loc[at + 1] - 1;
    let output_index = output_index_after(plan.seq_lens[at], sequence);
    for row in sequence.row.iter().chain(&sequence.sibling_rows) {
        plan.logits_indices.push(last);
        plan.sample_rows.push(row.as_i32());
        plan.sample_output_indices.push(output_index);
    }
}

/// Writes the copies: those to the host first, since their blocks may be written by others.
pub(crate) fn write_copies<'a>(
    plan: &mut StepPlan,
    copies: impl Iterator<Item = &'a BlockCopy> + Clone,
) {
    let is_offload = |copy: &&BlockCopy| copy.kind() == CopyKind::Offload;
    let offloads = copies.clone().filter(is_offload);
    for copy in offloads.chain(copies.filter(|copy| !is_offload(copy))) {
        let (from, to) = (copy.source(), copy.destination());
        let blocks = [from.block.as_i32(), to.block.as_i32()];
        plan.block_copies.push(blocks);
        let locations = [from.location as u8, to.location as u8];
        plan.block_copy_locations.push(locations);
    }
}

/// Asks for the log-probabilities of the prompt tokens that the launched sequence at `at` scores: those
/// after the last of its tokens that have a successor to score.
pub(crate) fn write_scores(
    plan: &mut StepPlan,
    at: usize,
    part: &Part,
    sequence: &Sequence,
    sampling: &SamplingParams,
) {
    let seq_len = plan.seq_lens[at] as u32;
    let end_of_query = plan.query_start_loc[at + 1] as u32;
    let num_best = sampling.prompt_logprobs.unwrap_or(0) as i32;
    let end = seq_len.min(sequence.num_tokens_to_score);
    for position in end - part.num_scores..end {
        let next = sequence.token(position + 1);
        plan.score_indices
            .push((end_of_query - (seq_len - position)) as i32);
        plan.score_token_ids.push(next as i32);
        plan.score_num_best.push(num_best);
    }
}
