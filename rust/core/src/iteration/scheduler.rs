//! The scheduler: decides one iteration.
//!
//! In this order, within the token budget, as Sarathi-Serve (OSDI'24) has it: every running decode,
//! one token each, never paused; then, level by level, prefill chunks of running sequences and newcomers
//! while rows, memory and budget last. Promoted requests go before all chunks. A newcomer gets the blocks
//! of all its tokens at once (less what the prefix cache has), so only sequences that have sampled ever
//! ask for more memory; they preempt, and so may a newcomer of a strictly higher level.
//!
//! Newcomers join in the queue's order. The first that does not fit holds up those behind it, but for
//! whom backfill ([`crate::iteration::backfill`]) lets go ahead.

use crate::config::Limits;
use crate::config::memory::MemoryAdmission;
use crate::config::policy::Order;
use crate::iteration::commit::{leave_together, remove_ended};
use crate::iteration::fit::{DoesNotFit, Horizon};
use crate::iteration::join::{leaves_together, may_join, takes};
use crate::iteration::lane::{AtWork, Lane};
use crate::iteration::ledger::Ledger;
use crate::iteration::plan::{NO_ADAPTER, SOURCE_ID, StepPlan};
use crate::iteration::preempt::{GivingWay, Lack, choose_victim, choose_victims_for, preempt};
use crate::iteration::sequence::Sequence;
use crate::iteration::write::{
    write_chunk, write_copies, write_decodes, write_resets, write_samples, write_scores,
};
use crate::request::{Request, SequenceKey, Time};
use crate::waiting::forecast::Blocked;
use crate::waiting::queue::Next;

/// Candidates of a flow that [`Order::Prefix`] looks at.
const PREFIX_CANDIDATES: usize = 16;
/// Times that the first of a flow may be passed over for a longer cached prefix.
const MAX_PASSES: u32 = 32;

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

/// How a newcomer comes in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entrance {
    /// It is the next in the queue, and those below this level would give way to it.
    InTurn(usize),
    /// Others gave way for it.
    OverOthers,
    /// Ahead of the first of the queue, for as long as that does not fit; of this level.
    AsGuest(usize),
}

/// What newcomers were given.
#[derive(Default)]
pub(crate) struct Handed {
    rows: u64,
    blocks: u64,
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
        let mut position = 0;
        while let Some(&key) = self.lane.running.get(position) {
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
                if self.lane.governor.is_governing() {
                    let class = self.ledger.rules.class(sequence.payer.class);
                    self.lane.governor.see(sequence, class.tpot_target_us);
                }
                if decodes {
                    sequence.num_scheduled_tokens = 1;
                    self.budget -= 1;
                    self.lane.step.add_decode(key);
                }
                if !self.lane.new_copies.is_empty() {
                    self.keep_copies(key);
                }
                position += 1;
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
            self.budget += preempt(self.ledger, self.lane, victim, self.limits);
            // Try the same sequence again; it moved up if an older one left.
            position -= usize::from(victim < position);
        }
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
            sequence.finished.is_some() && !sequence.table.blocks().is_empty()
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
                || sequence.num_scheduled_tokens > 0
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
    fn grant_chunk(&mut self, key: SequenceKey) -> u32 {
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
                sequence.num_remaining_tokens() - sequence.num_scheduled_tokens
            };
            let work = &mut at_work[sequence.level];
            work.rows += u64::from(sequence.num_rows());
            work.blocks += sequence.table.blocks().len() as u64;
            work.prefill_tokens += u64::from(left);
            prefill_backlog += u64::from(left);
        }
        prefill_backlog
    }

    /// Admits newcomers while there is room, and says what holds the next one up.
    fn admit_newcomers(&mut self) {
        let mut handed = Handed::default();
        let blocked = self.admit_until_blocked(&mut handed);
        self.lane.is_forming =
            leaves_together(self.ledger.rules.policy().join) && blocked == Some(Blocked::Budget);
        if let Some(before) = self.ledger.clocks.blocked()
            && let Some(passed) = self.ledger.since_schedule.lap(self.now)
        {
            let forecast = &mut self.ledger.forecast;
            forecast.measure_admissions(before, passed, handed.rows, handed.blocks);
        }
        if blocked.is_some() {
            self.ledger.since_schedule.lap(self.now);
        }
        self.ledger.clocks.set(self.now, blocked);
    }

    /// What holds everybody up while all rows are taken and nobody may be preempted: then it does not
    /// matter who is next, which would have to be found out.
    fn without_rows(&mut self) -> Option<Blocked> {
        let queue = &self.ledger.queue;
        let level = queue.next_level()?;
        let may_preempt =
            self.ledger.rules.policy().preempt_to_admit && self.lane.running.has_below(level);
        if self.lane.rows.num_free() > 0 || may_preempt {
            return None;
        }
        self.schedule_chunks(level);
        Some(if self.budget == 0 {
            Blocked::Budget
        } else {
            Blocked::Slots
        })
    }

    fn admit_until_blocked(&mut self, handed: &mut Handed) -> Option<Blocked> {
        self.lane.foresight.missing_blocks = 0;
        if self.ledger.queue.is_empty() {
            return None;
        }
        if self.lane.must_land {
            return Some(Blocked::Memory);
        }
        let join = self.ledger.rules.policy().join;
        if leaves_together(join) && !may_join(join, self.ledger.situation(self.lane), self.now) {
            return Some(Blocked::Window);
        }
        if let Some(blocked) = self.without_rows() {
            return Some(blocked);
        }
        while let Some(next) = self.next_in_line() {
            match next {
                Next::Promoted(_) => {}
                Next::Returning(_, level) | Next::Fresh(_, level, _) => self.schedule_chunks(level),
            }
            if self.budget == 0 || self.lane.governor.is_spent() {
                return Some(Blocked::Budget);
            }
            if self.hold_back(next) {
                continue;
            }
            let key = self.choose(next);
            let num_rows = self.limits.max_num_seqs() - self.lane.rows.num_free();
            if !takes(join, num_rows, self.ledger.sequences[key.0].num_rows()) {
                return Some(Blocked::Window);
            }
            if self.is_too_many(next, key) {
                return Some(Blocked::Sla);
            }
            let level = self.level_of(next);
            let admitted = match self.admit(key, Entrance::InTurn(level)) {
                Err(DoesNotFit { lack, .. }) if self.preempt_for(next, key, lack) => {
                    self.admit(key, Entrance::OverOthers)
                }
                admitted => admitted,
            };
            match admitted {
                Ok(chunk) => {
                    if let Next::Fresh(first, _, leaf) = next {
                        self.ledger.queue.left(leaf, key == first);
                    }
                    self.lane.backfill.joined(key);
                    self.start_newcomer(next, key, chunk, handed);
                }
                Err(DoesNotFit { blocked, lack }) => {
                    if matches!(blocked, Blocked::Memory | Blocked::Slots) && !self.lane.must_land {
                        self.backfill(key, lack, handed);
                    }
                    return Some(blocked);
                }
            }
        }
        None
    }

    /// Gives an admitted sequence its place in the step.
    pub(crate) fn start_newcomer(
        &mut self,
        next: Next,
        key: SequenceKey,
        chunk: u32,
        handed: &mut Handed,
    ) {
        self.budget -= chunk;
        let sequence = &mut self.ledger.sequences[key.0];
        let left = sequence.num_remaining_tokens() - chunk;
        self.lane.step.add_chunk(key, chunk, left);
        if let Next::Promoted(_) = next {
            // It stays ahead of those it went ahead of, or they would take its place.
            self.lane.running.move_to(sequence, 0);
        }
        if !matches!(next, Next::Returning(..)) {
            // What returns was let in before: it is no service to those that wait for their first time.
            handed.rows += u64::from(sequence.num_rows());
            handed.blocks += sequence.table.blocks().len() as u64;
        }
    }

    /// Sets the next request aside if its tenant's bounds say so; then somebody else is next.
    fn hold_back(&mut self, next: Next) -> bool {
        if matches!(next, Next::Returning(..)) {
            return false; // it was let in before
        }
        let request = self.ledger.sequences[next.sequence().0].request;
        let entry = &self.ledger.requests[request.0];
        let tenant_key = entry.tenant;
        let tenant = self.ledger.tenants.get(tenant_key);
        let is_busy = tenant.is_busy(entry.request.sampling.n);
        let until = match next {
            // Its class's bound on the queue time outweighs the rate.
            Next::Promoted(_) => None,
            _ => tenant.rate_holds_until(self.now, 0).filter(|_| !is_busy),
        };
        if !is_busy && until.is_none() {
            return false;
        }
        if tenant.held_since.is_none() {
            self.ledger.hold(tenant_key, until, self.now);
        }
        // Holding its flows does not stop what waits elsewhere.
        self.ledger.set_aside(request);
        true
    }

    /// The sequence to admit: the next, or with [`Order::Prefix`] one of the next few of its flow.
    fn choose(&mut self, next: Next) -> SequenceKey {
        let first = next.sequence();
        let Next::Fresh(_, _, leaf) = next else {
            return first;
        };
        let by_prefix = self.ledger.rules.policy().order == Order::Prefix;
        if !by_prefix || !self.limits.prefix_caching() || self.lane.backfill.is_head(first) {
            return first;
        }
        let mut best = (first, 0);
        if self.ledger.queue.passes(leaf) < MAX_PASSES {
            let mut candidates = Vec::with_capacity(PREFIX_CANDIDATES);
            self.ledger
                .queue
                .visit_first(leaf, PREFIX_CANDIDATES, |key| candidates.push(key));
            for key in candidates {
                let sequence = &mut self.ledger.sequences[key.0];
                let entry = &self.ledger.requests[sequence.request.0];
                let owner = self.ledger.tenants.get(entry.tenant);
                if owner.is_busy(entry.request.sampling.n) {
                    continue;
                }
                let chain = sequence.usable_chain(self.limits.block_size());
                let cached = self.lane.pool.find_prefix(chain).num_blocks;
                if cached > best.1 {
                    best = (key, cached);
                }
            }
        }
        best.0
    }

    /// Whether the decodes would take too long with this one among them. Promoted ones were promised
    /// their place.
    pub(crate) fn is_too_many(&self, next: Next, key: SequenceKey) -> bool {
        let level = match next {
            Next::Promoted(_) => return false,
            Next::Returning(_, level) | Next::Fresh(_, level, _) => level,
        };
        let newcomer = &self.ledger.sequences[key.0];
        !self.lane.running.is_empty() && self.lane.governor.holds(newcomer, level)
    }

    /// The level below which others give way to the next. Where it waits counts: best effort preempts
    /// nobody, whatever its class.
    pub(crate) fn level_of(&self, next: Next) -> usize {
        match next {
            Next::Promoted(key) => self.ledger.sequences[key.0].level,
            Next::Returning(_, level) | Next::Fresh(_, level, _) => level,
        }
    }

    /// Who gives way to a newcomer that may preempt what is below `level`. Its guests do not where a
    /// forecast keeps to a share of admissions that may see a preemption: there it waits for them.
    pub(crate) fn giving_way(&self, newcomer: SequenceKey, level: usize) -> GivingWay {
        let policy = self.ledger.rules.policy();
        let guests_stay = policy.memory.admission == MemoryAdmission::Forecast;
        let since = self.ledger.sequences[newcomer.0].blocked_since;
        GivingWay {
            level: if policy.preempt_to_admit {
                level
            } else {
                usize::MAX
            },
            guests_since: since.filter(|_| !guests_stay),
        }
    }

    /// Preempts a newcomer's guests, and sequences of lower levels, so that it fits; false, and nothing
    /// has changed, if that would not be enough, or has to wait for the steps in flight.
    fn preempt_for(&mut self, next: Next, key: SequenceKey, lack: Lack) -> bool {
        let giving_way = self.giving_way(key, self.level_of(next));
        if giving_way == GivingWay::NOBODY || lack.blocks + lack.rows == 0 {
            return false;
        }
        let Some(victims) = choose_victims_for(self.ledger, self.lane, key, giving_way, lack)
        else {
            return false;
        };
        if self.lane.is_ahead() {
            self.lane.must_land = true;
            return false;
        }
        for victim in victims {
            let position = self.lane.running.iter().position(|&key| key == victim);
            if let Some(position) = position {
                self.budget += preempt(self.ledger, self.lane, position, self.limits);
            }
        }
        true
    }

    /// Gives a waiting sequence its rows and blocks and its first chunk, or changes nothing.
    pub(crate) fn admit(
        &mut self,
        key: SequenceKey,
        entrance: Entrance,
    ) -> Result<u32, DoesNotFit> {
        let limits = self.limits;
        let horizon = match entrance {
            Entrance::OverOthers => Horizon::Now,
            Entrance::InTurn(level) | Entrance::AsGuest(level) => Horizon::Future(level),
        };
        let cached = self.find_room(key, horizon)?;
        let is_guest = matches!(entrance, Entrance::AsGuest(_));
        self.ledger.leave_queue(key, is_guest, self.now);
        let num_on_host = self.keep_on_host(key, cached.num_blocks);
        self.allow_offloads(num_on_host);
        let sequence = &mut self.ledger.sequences[key.0];
        let entry = &mut self.ledger.requests[sequence.request.0];
        let block_size = limits.block_size();
        reserve_memory(sequence, &entry.request, limits);
        sequence
            .table
            .adopt(&sequence.chain[..cached.num_blocks as usize]);
        sequence
            .table
            .grow(
                limits.blocks_for(sequence.num_tokens()) - cached.num_blocks,
                &mut self.lane.new_copies,
            )
            .expect("the blocks were counted above and nothing took any since");
        sequence.row = self.lane.rows.take();
        let siblings = (0..sequence.num_unborn).map_while(|_| self.lane.rows.take());
        sequence.sibling_rows.extend(siblings);
        write_resets(self.plan, &entry.request, sequence);

        sequence.joined_at_step = self.lane.step.number + 1;
        sequence.blocked_since = None;
        sequence.is_guest = false;
        sequence.num_computed_tokens = cached.num_blocks * block_size;
        sequence.num_published_blocks = cached.num_blocks;
        sequence.num_shared_blocks = cached.num_blocks;
        let class = self.ledger.rules.class(sequence.payer.class);
        self.lane.governor.settle(sequence, class.tpot_target_us);
        self.keep_copies(key);
        let chunk = self.grant_chunk(key);
        let num_cached_tokens = self.ledger.sequences[key.0].num_planned_tokens();
        self.ledger.admitted(key, num_cached_tokens, self.now);
        self.lane.running.enter(&self.ledger.sequences, key);
        self.has_joined(key, cached);
        Ok(chunk)
    }

    fn write_plan(&mut self) {
        let step = &mut self.lane.step;
        let sequences = &mut self.ledger.sequences;
        let are_plain = write_decodes(self.plan, &mut step.decodes, sequences, self.limits);
        for part in &mut step.chunks {
            let sequence = &mut sequences[part.sequence.0];
            write_chunk(self.plan, part, sequence, self.limits);
        }
        self.plan.end_tables();
        let num_plain = if are_plain { step.decodes.len() } else { 0 };
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
