//! The scheduler: decides one iteration.
//!
//! In this order, within the token budget, as Sarathi-Serve (OSDI'24) has it: every running decode,
//! one token each, never paused; then prefill chunks of running sequences; then newcomers while rows,
//! memory and budget last. A newcomer gets the blocks of all its tokens at once (less what the prefix
//! cache has), so only sequences that have sampled ever ask for more memory, and only they preempt.
//!
//! Newcomers join in the queue's order; the first that does not fit holds up those behind it.

use std::ops::Range;

use crate::config::Limits;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::{Entry, Ledger};
use crate::iteration::plan::{NO_ADAPTER, SOURCE_ID, StepPlan};
use crate::iteration::preempt::{choose_victim, preempt};
use crate::iteration::rows::Row;
use crate::iteration::sequence::Sequence;
use crate::memory::blocks::PrefixMatch;
use crate::output::Event;
use crate::request::{Request, SamplingParams, SequenceKey, Time};

/// One decision being made.
pub(crate) struct Scheduler<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) lane: &'a mut Lane,
    pub(crate) plan: &'a mut StepPlan,
    pub(crate) now: Time,
    /// Tokens that may still be scheduled.
    pub(crate) budget: u32,
}

/// Why the next in the queue does not join now.
struct DoesNotFit;

impl Scheduler<'_> {
    /// Decides, and writes the plan. False if there is nothing to run.
    pub(crate) fn run(mut self) -> bool {
        let number = self.lane.step.number + 1;
        self.plan.begin(number);
        self.lane.step.clear();
        self.schedule_decodes();
        self.schedule_chunks();
        self.schedule_newcomers();
        let num_sequences = self.lane.step.num_sequences();
        if num_sequences == 0 {
            return false;
        }
        self.write_plan();
        self.lane.step.number = number;
        self.lane.step.num_samples = self.plan.num_samples();
        self.lane.step.num_scores = self.plan.num_scores();
        self.lane.in_flight = true;
        self.ledger.counters.iterations += 1;
        self.ledger.counters.scheduled_tokens += self.plan.num_tokens() as u64;
        self.ledger.counters.scheduled_sequences += num_sequences as u64;
        true
    }

    /// Gives every running sequence memory for all its tokens, and every decode its token.
    ///
    /// A prefill has that memory already. A sequence that sampled several tokens in its last step needs
    /// some, and gets its tokens as a chunk.
    fn schedule_decodes(&mut self) {
        let mut position = 0;
        while let Some(&key) = self.lane.running.get(position) {
            let sequence = &mut self.ledger.sequences[key.0];
            if let Ok(copy) = sequence.make_room(self.limits.block_size()) {
                if sequence.num_remaining_tokens() == 1 {
                    sequence.num_scheduled_tokens = 1;
                    self.budget -= 1;
                    self.lane.step.decodes.push(key);
                }
                if let Some(copy) = copy {
                    self.lane.step.copies.push((key, copy));
                }
                position += 1;
                continue;
            }
            let Some(victim) = choose_victim(self.ledger, self.lane) else {
                debug_assert!(false, "the pool holds one sequence of max_model_len");
                return;
            };
            let block_size = self.limits.block_size();
            self.budget += preempt(self.ledger, self.lane, victim, block_size);
            // Try the same sequence again; it moved up if an older one left.
            position -= usize::from(victim < position);
        }
    }

    fn schedule_chunks(&mut self) {
        if self.lane.step.decodes.len() == self.lane.running.len() {
            return;
        }
        for &key in &self.lane.running {
            if self.budget == 0 {
                return;
            }
            let sequence = &mut self.ledger.sequences[key.0];
            if sequence.num_scheduled_tokens > 0 {
                continue;
            }
            let remaining = sequence.num_remaining_tokens();
            let chunk = remaining
                .min(self.budget)
                .min(self.limits.max_chunk_tokens());
            sequence.num_scheduled_tokens = chunk;
            self.budget -= chunk;
            self.lane.step.add(key, chunk);
        }
    }

    fn schedule_newcomers(&mut self) {
        while self.budget > 0 {
            let Some(key) = self.ledger.queue.first() else {
                return;
            };
            match self.admit(key) {
                Ok(chunk) => {
                    self.budget -= chunk;
                    self.lane.step.add(key, chunk);
                }
                Err(DoesNotFit) => return,
            }
        }
    }

    /// Gives a waiting sequence its rows and blocks and its first chunk, or changes nothing.
    fn admit(&mut self, key: SequenceKey) -> Result<u32, DoesNotFit> {
        let limits = self.limits;
        let sequence = &mut self.ledger.sequences[key.0];
        let entry = &mut self.ledger.requests[sequence.request.0];
        if self.lane.rows.num_free() < sequence.num_rows()
            || !fits_resets(self.plan, &entry.request, sequence)
        {
            return Err(DoesNotFit);
        }
        let pool = &self.lane.pool;
        let block_size = limits.block_size();
        let num_tokens = sequence.num_tokens();
        let cached = if limits.prefix_caching() {
            pool.find_prefix(sequence.usable_chain(block_size))
        } else {
            PrefixMatch::default()
        };
        // One token more than there is: the first decode must not have to preempt somebody.
        let needed = limits.blocks_for(num_tokens + 1) - cached.num_blocks + cached.num_parked;
        let watermark = if self.lane.running.is_empty() {
            0
        } else {
            limits.watermark_blocks()
        };
        if needed + watermark > pool.available() {
            return Err(DoesNotFit);
        }
        self.ledger.queue.remove(sequence.rank(), sequence.arrival);
        reserve_memory(sequence, &entry.request, limits);
        sequence
            .table
            .adopt(&sequence.chain[..cached.num_blocks as usize]);
        sequence
            .table
            .grow(limits.blocks_for(num_tokens) - cached.num_blocks)
            .expect("the blocks were counted above and nothing took any since");
        sequence.row = self.lane.rows.take();
        let siblings = (0..sequence.num_unborn).map_while(|_| self.lane.rows.take());
        sequence.sibling_rows.extend(siblings);
        write_resets(self.plan, &entry.request, sequence);

        sequence.num_computed_tokens = cached.num_blocks * block_size;
        sequence.num_published_blocks = cached.num_blocks;
        let lost = sequence.num_lost_tokens;
        self.ledger.counters.recomputed_tokens +=
            u64::from(lost.saturating_sub(sequence.num_computed_tokens));
        let remaining = sequence.num_remaining_tokens();
        let chunk = remaining.min(self.budget).min(limits.max_chunk_tokens());
        sequence.num_scheduled_tokens = chunk;
        if entry.request.stats.first_scheduled.is_none() {
            let num_cached_tokens = sequence.num_computed_tokens;
            mark_scheduled(entry, num_cached_tokens, self.now);
            self.ledger.counters.prompt_tokens += u64::from(sequence.num_prompt_tokens);
            self.ledger.counters.cached_tokens += u64::from(num_cached_tokens);
            self.ledger.outputs.events.push(Event::Scheduled {
                request: entry.request.id,
                num_cached_tokens,
            });
        }
        self.ledger.enter_running(&mut self.lane.running, key);
        Ok(chunk)
    }

    fn write_plan(&mut self) {
        let step = &self.lane.step;
        self.plan.num_decodes = step.decodes.len();
        for key in step.decodes.iter().chain(&step.chunks) {
            let sequence = &self.ledger.sequences[key.0];
            write_sequence(self.plan, sequence, self.limits);
            let scores = sequence.scores();
            if !scores.is_empty() {
                let request = &self.ledger.requests[sequence.request.0].request;
                write_scores(self.plan, sequence, scores, &request.sampling);
            }
        }
        let num_tokens = self.plan.token_ids.len();
        self.plan.token_sources.resize(num_tokens, SOURCE_ID);
        self.plan
            .adapter_ids
            .resize(step.num_sequences(), NO_ADAPTER);
        for (_, copy) in &step.copies {
            let (from, to) = (copy.source(), copy.destination());
            self.plan
                .block_copies
                .push([from.block.as_i32(), to.block.as_i32()]);
            self.plan
                .block_copy_locations
                .push([from.location as u8, to.location as u8]);
        }
    }
}

/// The request left the queue for the first time.
fn mark_scheduled(entry: &mut Entry, num_cached_tokens: u32, now: Time) {
    entry.place = None;
    entry.request.stats.first_scheduled = Some(now);
    entry.request.stats.num_cached_tokens = num_cached_tokens;
}

/// Room for everything the sequence can become, so that its decode steps allocate nothing.
fn reserve_memory(sequence: &mut Sequence, request: &Request, limits: &Limits) {
    let most = request.num_prompt_tokens + request.max_tokens;
    let extra = most as usize - sequence.tokens.len();
    sequence.tokens.reserve_exact(extra);
    let blocks = limits.blocks_for(most);
    sequence.table.reserve(blocks);
    if limits.prefix_caching() {
        let extra = (blocks as usize).saturating_sub(sequence.chain.len());
        sequence.chain.reserve_exact(extra);
    }
}

/// Whether the plan's ragged reset arrays have room; always true for the first newcomer of a step.
fn fits_resets(plan: &StepPlan, request: &Request, sequence: &Sequence) -> bool {
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
fn write_resets(plan: &mut StepPlan, request: &Request, sequence: &Sequence) {
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

fn write_sequence(plan: &mut StepPlan, sequence: &Sequence, limits: &Limits) {
    let row = sequence.row.as_ref().map_or(-1, Row::as_i32);
    debug_assert!(row >= 0, "a scheduled sequence has a row");
    let begin = sequence.num_computed_tokens;
    let end = begin + sequence.num_scheduled_tokens;
    let blocks = sequence.table.blocks();
    let block_size = limits.block_size();
    plan.rows.push(row);
    plan.seq_lens.push(end as i32);
    for position in begin..end {
        let block = blocks[(position / block_size) as usize].as_i32();
        let slot = i64::from(block) * i64::from(block_size) + i64::from(position % block_size);
        plan.token_ids
            .push(sequence.tokens[position as usize] as i32);
        plan.positions.push(position as i32);
        plan.slot_mapping.push(slot);
    }
    plan.query_start_loc.push(plan.token_ids.len() as i32);
    plan.block_ids
        .extend(blocks.iter().map(|block| block.as_i32()));
    plan.block_table_offsets.push(plan.block_ids.len() as i32);
    if sequence.completes() {
        let last = plan.token_ids.len() as i32 - 1;
        let output_index = sequence.num_output_tokens() as i32;
        for row in sequence.row.iter().chain(&sequence.sibling_rows) {
            plan.logits_indices.push(last);
            plan.sample_rows.push(row.as_i32());
            plan.sample_output_indices.push(output_index);
        }
    }
}

/// Asks for the log-probabilities of the prompt tokens after those at `positions`, which were just
/// written.
fn write_scores(
    plan: &mut StepPlan,
    sequence: &Sequence,
    positions: Range<u32>,
    sampling: &SamplingParams,
) {
    let first = plan.token_ids.len() as u32 - sequence.num_scheduled_tokens;
    let num_best = sampling.prompt_logprobs.unwrap_or(0) as i32;
    for position in positions {
        let index = first + position - sequence.num_computed_tokens;
        let next = sequence.tokens[position as usize + 1];
        plan.score_indices.push(index as i32);
        plan.score_token_ids.push(next as i32);
        plan.score_num_best.push(num_best);
    }
}
