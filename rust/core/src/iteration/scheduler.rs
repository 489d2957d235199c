//! The scheduler: decides one iteration.
//!
//! In this order, within the token budget, as Sarathi-Serve (OSDI'24) has it: every running decode,
//! one token each, never paused; then, level by level, prefill chunks of running sequences and newcomers
//! while rows, memory and budget last. Promoted requests go before all chunks. A newcomer gets the blocks
//! of all its tokens at once (less what the prefix cache has), so only sequences that have sampled ever
//! ask for more memory; they preempt, and so may a newcomer of a strictly higher level.
//!
//! Who joins is decided in [`crate::iteration::newcomers`].

use crate::config::Limits;
use crate::iteration::commit::{leave_together, remove_ended};
use crate::iteration::join::leaves_together;
use crate::iteration::lane::{AtWork, Lane};
use crate::iteration::ledger::Ledger;
use crate::iteration::plan::{NO_ADAPTER, SOURCE_ID, StepPlan};
use crate::iteration::preempt::{choose_victim, preempt};
use crate::iteration::write::{
    write_chunk, write_copies, write_samples, write_scores, write_steady,
};
use crate::request::{SequenceKey, Time};
use crate::waiting::forecast::Blocked;

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

impl Scheduler<'_> {
    /// Decides, and writes the plan. False if there is nothing to run.
    pub(crate) fn run(mut self) -> bool {
        let number = self.lane.step.number + 1;
        self.plan.begin(number);
        self.lane.step.clear();
        self.lane.must_land = false;
        self.begin_pace();
        self.forget_gone_head();
        self.allow_offloads(0);
        self.schedule_decodes();
        self.close_batch();
        self.admit_newcomers();
        self.schedule_chunks(self.ledger.queue.num_levels());
        let prefill_backlog = self.count_work();
        let num_sequences = self.lane.step.num_sequences();
        if num_sequences == 0 {
            if !self.lane.is_ahead() {
                self.ledger.since_schedule.stop();
            }
            debug_assert!(self.lane.step.copies.is_empty(), "a copy is lost");
            self.plan.end_tables();
            return false;
        }
        self.write_plan();
        let is_short = self.ledger.clocks.blocked() == Some(Blocked::Budget);
        let gap_us = if self.lane.is_ahead() {
            Some(0)
        } else {
            self.lane.idle_since.map(|since| self.now.since_us(since))
        };
        let step = &mut self.lane.step;
        step.gap_us = gap_us;
        step.number = number;
        step.since = self.now;
        step.num_tokens = self.plan.num_tokens() as u64;
        step.prefill_is_short = is_short || prefill_backlog > 0;
        step.num_samples = self.plan.num_samples();
        step.num_scores = self.plan.num_scores();
        self.lane.last_shape = step.shape;
        self.lane.in_flight.launch(&mut self.lane.step);
        self.ledger.counters.iterations += 1;
        self.ledger.counters.scheduled_tokens += self.plan.num_tokens() as u64;
        self.ledger.counters.scheduled_sequences += num_sequences as u64;
        true
    }

    fn begin_pace(&mut self) {
        let policy = self.ledger.rules.policy();
        let num_levels = self.ledger.queue.num_levels();
        let Lane {
            governor, costs, ..
        } = &mut *self.lane;
        governor.begin(
            policy,
            costs,
            self.limits.block_size(),
            num_levels,
            self.now,
        );
    }

    /// Gives every running sequence memory for all its tokens, and every decode its token.
    ///
    /// A prefill has that memory already. A sequence that sampled several tokens in its last step needs
    /// some, and gets its tokens as a chunk. Who finds none while steps are in flight is left out, and
    /// the next step is planned when they have landed.
    fn schedule_decodes(&mut self) {
        let block_size = self.limits.block_size();
        let is_governing = self.lane.governor.is_governing();
        let mut position = 0;
        loop {
            let first = position;
            position += self.count_steady_from(first);
            let num_steady = position - first;
            self.budget -= num_steady as u32;
            self.lane.step.num_steady += num_steady;
            if is_governing {
                for at in first..position {
                    self.govern(at);
                }
            }
            let Some(&key) = self.lane.running.get(position) else {
                return;
            };
            let sequence = &mut self.ledger.sequences[key.0];
            if !sequence.may_be_planned() {
                position += 1;
                continue;
            }
            if sequence.finished.is_some() {
                self.lane.step.num_padded += 1;
                position += 1;
                continue;
            }
            let decodes = sequence.num_remaining_tokens() == 1;
            let copies = &mut self.lane.new_copies;
            if sequence.has_room(block_size) || sequence.make_room(block_size, copies).is_ok() {
                if decodes {
                    // It is come to again, and counted, at once.
                    let (_, steady) = self.lane.running.steady();
                    self.lane.step.is_plain &= steady.look(position, sequence, block_size);
                } else {
                    if is_governing {
                        self.govern(position);
                    }
                    position += 1;
                }
                if !self.lane.new_copies.is_empty() {
                    self.keep_copies(key);
                }
                continue;
            }
            if self.lane.is_ahead() {
                self.lane.must_land = true;
                position += 1;
                continue;
            }
            if self.empty_a_finished_one() {
                continue;
            }
            let Some(victim) = choose_victim(self.ledger, self.lane, block_size) else {
                debug_assert!(false, "the pool holds one sequence of max_model_len");
                return;
            };
            let level = |key: SequenceKey| self.ledger.sequences[key.0].level;
            if level(self.lane.running[victim]) <= level(key) {
                self.ledger.overflow.preempted();
            }
            if victim > position {
                // It was granted nothing yet.
                let victim = self.lane.running[victim];
                self.ledger.sequences[victim.0].unsettle();
            }
            self.budget += preempt(self.ledger, self.lane, victim, self.limits);
            // Try the same sequence again; it moved up if an older one left.
            position -= usize::from(victim < position);
        }
    }

    /// How many of those that run are steady, one after the other, from the one at `position` on.
    fn count_steady_from(&self, position: usize) -> usize {
        let sequences = &self.ledger.sequences;
        let is_steady = |key: &&SequenceKey| sequences[key.0].num_steady_steps > 0;
        let running = self.lane.running[position..].iter();
        running.take_while(is_steady).count()
    }

    /// Lets the governor see the sequence at `position`.
    fn govern(&mut self, position: usize) {
        let sequence = &self.ledger.sequences[self.lane.running[position].0];
        let class = self.ledger.rules.class(sequence.payer.class);
        self.lane.governor.see(sequence, class.tpot_target_us);
    }

    /// Lets those leave who stayed for others that were ended from outside or preempted.
    fn close_batch(&mut self) {
        if leaves_together(self.ledger.rules.policy().join) {
            leave_together(self.ledger, self.lane, self.now);
            remove_ended(self.ledger, self.lane);
        }
    }

    /// Frees the memory of a sequence that is done and only waits for its batch; false if none has any.
    fn empty_a_finished_one(&mut self) -> bool {
        let ledger = &mut *self.ledger;
        let done = self.lane.running.iter().find(|key| {
            let sequence = &ledger.sequences[key.0];
            sequence.finished.is_some() && sequence.table.num_blocks() > 0
        });
        done.map(|key| ledger.sequences[key.0].table.release())
            .is_some()
    }

    /// Schedules prefill chunks of running sequences of level number `lowest` and above, the highest
    /// level first, but for those that were left out for want of memory.
    pub(crate) fn schedule_chunks(&mut self, lowest: usize) {
        for level in 0..=lowest {
            if self.lane.step.num_sequences() == self.lane.running.len() || self.budget == 0 {
                return;
            }
            self.schedule_chunks_of(level);
        }
    }

    fn schedule_chunks_of(&mut self, level: usize) {
        let block_size = self.limits.block_size();
        for position in 0..self.lane.running.len() {
            if self.budget == 0 {
                return;
            }
            let key = self.lane.running[position];
            let sequence = &self.ledger.sequences[key.0];
            if sequence.level != level
                || sequence.num_granted_tokens() > 0
                || sequence.finished.is_some()
                || !sequence.may_be_planned()
                || (self.lane.must_land && !sequence.is_writable(block_size))
            {
                continue;
            }
            if self.lane.governor.most_chunk(sequence.num_planned_tokens()) == 0 {
                return;
            }
            let chunk = self.grant_chunk(key);
            self.budget -= chunk;
            let left = self.ledger.sequences[key.0].num_remaining_tokens() - chunk;
            self.lane.step.add_chunk(key, chunk, left);
        }
    }

    /// Has a sequence's next tokens copied, as far as the host has them, and grants it a chunk of those that
    /// come then: at least one token. Returns how many.
    pub(crate) fn grant_chunk(&mut self, key: SequenceKey) -> u32 {
        self.restore(key);
        let sequence = &self.ledger.sequences[key.0];
        let before = sequence.num_planned_tokens();
        let in_time = self.lane.governor.most_chunk(before).max(1);
        let chunk = sequence
            .num_remaining_tokens()
            .min(self.budget)
            .min(self.limits.max_chunk_tokens())
            .min(in_time);
        let chunk = self.cut_at_host(key, chunk);
        let sequence = &mut self.ledger.sequences[key.0];
        sequence.num_scheduled_tokens = chunk;
        let again = sequence.num_lost_tokens.min(before + chunk);
        self.ledger.counters.recomputed_tokens += u64::from(again.saturating_sub(before));
        let samples = sequence.num_samples();
        self.lane.governor.grant(before, chunk, samples);
        chunk
    }

    /// Counts what those that run hold, for predictions; returns the tokens that they have still to
    /// compute, beyond this step, before their next output.
    fn count_work(&mut self) -> u64 {
        let num_levels = self.ledger.queue.num_levels();
        let at_work = &mut self.lane.at_work;
        at_work.clear();
        at_work.resize(num_levels, AtWork::default());
        let step = &self.lane.step;
        if step.num_sequences() == self.lane.running.len() && !self.lane.running.has_below(0) {
            // Nobody is left out, and what the highest level holds is nobody's to take.
            at_work[0].prefill_tokens = step.num_left_tokens;
            return step.num_left_tokens;
        }
        let mut prefill_backlog = 0;
        for key in self.lane.running.iter() {
            let sequence = &self.ledger.sequences[key.0];
            let left = if sequence.ended || sequence.finished.is_some() {
                0
            } else {
                sequence.num_remaining_tokens() - sequence.num_granted_tokens()
            };
            let work = &mut at_work[sequence.level];
            work.rows += u64::from(sequence.num_rows());
            work.blocks += u64::from(sequence.table.num_blocks());
            work.prefill_tokens += u64::from(left);
            prefill_backlog += u64::from(left);
        }
        prefill_backlog
    }

    fn write_plan(&mut self) {
        let Lane { step, running, .. } = &mut *self.lane;
        let sequences = &mut self.ledger.sequences;
        let num_steady = write_steady(self.plan, step, running, sequences);
        let others = step.decodes.iter_mut().skip(num_steady);
        for part in others.chain(&mut step.chunks) {
            let sequence = &mut sequences[part.sequence.0];
            write_chunk(self.plan, part, sequence, self.limits);
        }
        self.plan.num_decodes = step.decodes.len();
        self.plan.end_tables();
        let num_plain = if step.is_plain { num_steady } else { 0 };
        for (at, part) in step.parts().enumerate().skip(num_plain) {
            let sequence = &sequences[part.sequence.0];
            write_samples(self.plan, at, part, sequence);
            if part.num_scores > 0 {
                let request = &self.ledger.requests[sequence.request.0].request;
                write_scores(self.plan, at, part, sequence, &request.sampling);
            }
        }
        let num_tokens = self.plan.token_ids.len();
        self.plan.token_sources.resize(num_tokens, SOURCE_ID);
        self.plan
            .adapter_ids
            .resize(step.num_sequences(), NO_ADAPTER);
        write_copies(self.plan, step.copies.iter().map(|(_, copy)| copy));
        step.shape = self.plan.shape();
    }
}
