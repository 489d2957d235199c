//! The facade: everything that can be done to the scheduler, in the order of a request's way.
//!
//! One thread owns an [`Engine`]; its holds are not sendable, so it is made on that thread. No call
//! blocks, reads a clock or fails half-way.

use std::collections::HashMap;

use crate::config::policy::Policy;
use crate::config::{Limits, Settings, Vocabulary};
use crate::error::{CommitError, ConfigError, SubmitError};
use crate::iteration::commit::{Commit, StepResults, leave_together, remove_ended};
use crate::iteration::flight::Step;
use crate::iteration::join::{Padding, leaves_together, window_end};
use crate::iteration::lane::Lane;
use crate::iteration::ledger::{Ledger, Reserved};
use crate::iteration::plan::StepPlan;
use crate::iteration::progress::Progress;
use crate::iteration::scheduler::Scheduler;
use crate::iteration::seats::{OldestWaits, Seat};
use crate::iteration::shares::Share;
use crate::memory::blocks::{BlockCopy, CopyKind};
use crate::metrics::{GroupMetrics, IterationMetrics, MemoryMetrics, Metrics, PaceMetrics};
use crate::output::OutputBatch;
use crate::predict::iteration_time::CostModel;
use crate::request::{Finish, NewRequest, RequestId, SequenceKey, Ticket, Time};
use crate::request::{WaitReason, WaitTimes};
use crate::waiting::forecast::Blocked;

/// The scheduler: queue, KV memory and iterations of one model.
pub struct Engine {
    limits: Limits,
    vocabulary: Vocabulary,
    ledger: Ledger,
    lane: Lane,
}

impl Engine {
    /// An idle engine.
    pub fn new(settings: &Settings, vocabulary: Vocabulary) -> Result<Self, ConfigError> {
        let limits = settings.validate()?;
        Ok(Self {
            ledger: Ledger::new(&limits),
            lane: Lane::new(&limits),
            limits,
            vocabulary,
        })
    }

    /// The checked settings.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes a place at the door, before the prompt is tokenised.
    ///
    /// It is given back when the request is first scheduled, rejected, aborted, given up or released.
    pub fn reserve(&mut self, now: Time, ticket: Ticket) -> Result<(), SubmitError> {
        let reserved = self.ledger.reserve(&self.lane, &self.limits, ticket, now);
        self.count_rejection(&reserved);
        reserved
    }

    /// Whether a place for `n` answers is free at everybody's door. For a caller that feeds its own
    /// requests as there is room: what it does not try is not counted as rejected.
    pub fn has_room(&self, n: u32) -> bool {
        self.ledger.has_room(&self.lane, &self.limits, n)
    }

    fn count_rejection(&mut self, result: &Result<(), SubmitError>) {
        if let Err(error) = result {
            let counters = &mut self.ledger.counters;
            counters.submitted += 1;
            counters.rejected += 1;
            counters.rejections.count(error);
        }
    }

    /// Name of the class that a request with a reserved place will be served as.
    pub fn reserved_class(&self, id: RequestId) -> Option<&str> {
        self.ledger.reserved_class(id)
    }

    /// Gives a reserved place back; nothing happens if there is none.
    pub fn release(&mut self, id: RequestId) {
        self.ledger.release(id);
    }

    /// Lets a request wait whose place was reserved. A rejection gives the place back.
    pub fn submit(&mut self, now: Time, request: NewRequest) -> Result<(), SubmitError> {
        let submitted = self.try_submit(now, request);
        self.count_rejection(&submitted);
        if submitted.is_ok() {
            self.ledger.shed(&mut self.lane, &self.limits, now);
        }
        submitted
    }

    fn try_submit(&mut self, now: Time, request: NewRequest) -> Result<(), SubmitError> {
        let id = request.id;
        let Some(reserved) = self.ledger.reserved.remove(&id) else {
            return Err(SubmitError::NoReservation { request: id });
        };
        let eos = &self.vocabulary.eos_token_ids;
        match request.validate(&self.limits, eos, now) {
            Ok((request, prompt)) => {
                self.ledger
                    .let_in(&mut self.lane, &self.limits, reserved, request, prompt, now)
            }
            Err(error) => {
                let Reserved { class, tenant, .. } = reserved;
                self.ledger.count_rejected(class, tenant, &error);
                self.ledger.tenants.release(reserved.tenant);
                Err(error)
            }
        }
    }

    /// Ends a request wherever it is; false if it is not live (any more).
    ///
    /// Its clients are told at once. Memory is free at once, or when the last step in flight that has it is
    /// committed.
    pub fn abort(&mut self, now: Time, id: RequestId) -> bool {
        if self.ledger.release(id) {
            return true;
        }
        let Some(&key) = self.ledger.live.get(&id) else {
            return false;
        };
        self.ledger
            .end_request(&mut self.lane, key, Finish::Abort, now);
        true
    }

    /// Applies new numbers of classes, tenants, weights and quotas to the running engine.
    ///
    /// Nothing that was accepted is lost. An error changes nothing.
    pub fn reload(&mut self, now: Time, policy: &Policy) -> Result<(), ConfigError> {
        let rules = policy.validate()?;
        self.ledger.rules.check_reload(&rules)?;
        self.ledger.reload(rules, now);
        Ok(())
    }

    /// Decides the next iteration into `plan`, which was made for these limits.
    ///
    /// False if there is nothing to run, or while as many steps are in flight as may be; then the plan
    /// says nothing.
    pub fn schedule(&mut self, now: Time, plan: &mut StepPlan) -> bool {
        if !self.may_plan() {
            return false;
        }
        self.on_time(now);
        self.ledger.shed(&mut self.lane, &self.limits, now);
        Scheduler {
            limits: &self.limits,
            ledger: &mut self.ledger,
            lane: &mut self.lane,
            plan,
            now,
            budget: self.limits.max_num_batched_tokens(),
        }
        .run()
    }

    /// Whether another step may be planned. Batches that leave together do not run ahead: who is in the
    /// next one is known when all are done.
    fn may_plan(&self) -> bool {
        if !self.lane.is_ahead() {
            return true;
        }
        self.lane.in_flight.len() < self.limits.max_in_flight_steps() as usize
            && !self.lane.must_land
            && !leaves_together(self.ledger.rules.policy().join)
    }

    /// Applies the results of step number `step`, the oldest in flight. An error changes nothing: the
    /// step is still in flight, and [`Self::fail_step`] ends it.
    pub fn commit(
        &mut self,
        now: Time,
        step: u64,
        results: &StepResults,
    ) -> Result<(), CommitError> {
        let Some(step) = self.take_oldest(step) else {
            return Err(CommitError::UnknownStep { step });
        };
        let stays = leaves_together(self.ledger.rules.policy().join);
        let commit = Commit {
            limits: &self.limits,
            vocabulary: &self.vocabulary,
            ledger: &mut self.ledger,
            lane: &mut self.lane,
            step: &step,
            results,
            now,
            stays,
        };
        match commit.run() {
            Ok(somebody_ended) => {
                self.lane.in_flight.landed(step, now);
                if somebody_ended {
                    leave_together(&mut self.ledger, &mut self.lane, now);
                    remove_ended(&mut self.ledger, &mut self.lane);
                }
                self.lane.idle_since = (!self.lane.running.is_empty()).then_some(now);
                Ok(())
            }
            Err(error) => {
                self.lane.in_flight.goes_on(step);
                Err(error)
            }
        }
    }

    /// The executor failed step number `step`, the oldest in flight: its requests end, all others go on.
    pub fn fail_step(&mut self, now: Time, step: u64) {
        let Some(step) = self.take_oldest(step) else {
            return;
        };
        // Whoever was to get a copied block in it cannot go on either, even without a token in it. One that
        // is gone has left its name to somebody who does not have that block.
        let has_copy = |(key, copy): &&(SequenceKey, BlockCopy)| {
            let owner = self.ledger.sequences.get(key.0);
            let block = copy.destination().block;
            copy.kind() != CopyKind::Offload
                && owner.is_some_and(|owner| owner.table.blocks().contains(&block))
        };
        let owners = step.copies.iter().filter(has_copy).map(|&(key, _)| key);
        let in_step = step.parts().map(|part| part.sequence);
        let affected: Vec<_> = in_step.chain(owners).collect();
        for key in affected {
            // One that has no token in the step leaves at once, with its request's other end.
            if let Some(sequence) = self.ledger.sequences.get(key.0) {
                let request = sequence.request;
                self.ledger
                    .end_request(&mut self.lane, request, Finish::StepFailed, now);
            }
        }
        self.drop_step(now, step);
    }

    /// The executor is gone: every request ends.
    pub fn fail_all(&mut self, now: Time) {
        self.ledger.release_all();
        self.end_all(now, Finish::EngineDead);
        while let Some(step) = self.lane.in_flight.take_oldest() {
            self.drop_step(now, step);
        }
    }

    /// Ends every request that was submitted, as [`Self::abort`] does, the oldest id first.
    pub fn abort_all(&mut self, now: Time) {
        self.end_all(now, Finish::Abort);
    }

    fn end_all(&mut self, now: Time, finish: Finish) {
        while let Some((_, &key)) = self.ledger.live.first_key_value() {
            self.ledger.end_request(&mut self.lane, key, finish, now);
        }
    }

    /// Takes step number `step` if it is the oldest in flight.
    fn take_oldest(&mut self, step: u64) -> Option<Step> {
        let oldest = self.lane.in_flight.oldest()?;
        (oldest.number == step).then_some(())?;
        self.lane.in_flight.take_oldest()
    }

    /// A step has landed without results: all that were in it have ended.
    fn drop_step(&mut self, now: Time, step: Step) {
        let block_size = self.limits.block_size();
        for (key, num_tokens) in step.num_landing(block_size) {
            self.ledger.sequences[key.0].land(num_tokens);
        }
        self.lane.in_flight.landed(step, now);
        remove_ended(&mut self.ledger, &mut self.lane);
    }

    /// What happened since it was last taken; the caller takes it by swapping in an empty batch.
    pub fn outputs(&mut self) -> &mut OutputBatch {
        &mut self.ledger.outputs
    }

    /// What was not taken yet, for whoever only looks.
    pub fn pending_outputs(&self) -> &OutputBatch {
        &self.ledger.outputs
    }

    /// How far the sequences of a request are; none if it is not live.
    pub fn progress(&self, id: RequestId) -> Vec<Progress> {
        self.ledger.progress(&self.lane, id)
    }

    /// When [`Self::on_time`] wants to be called though nothing else happens.
    pub fn next_wake(&self) -> Option<Time> {
        let join = self.ledger.rules.policy().join;
        let waits = !self.lane.is_ahead() && self.ledger.clocks.blocked() == Some(Blocked::Window);
        let window = waits.then(|| window_end(join, self.ledger.situation(&self.lane)));
        let window = window.flatten();
        [self.ledger.next_timer(), window]
            .into_iter()
            .flatten()
            .min()
    }

    /// Does what is due: requests expire or are promoted, tenants are let go that their rate held. Legal
    /// at any moment, also while a step is in flight; [`Self::schedule`] does it by itself.
    pub fn on_time(&mut self, now: Time) {
        self.ledger.on_time(&mut self.lane, now);
    }

    /// Why a live request waits now, and for how long it has waited for what; `None` if it was
    /// scheduled, or is not live.
    pub fn wait(&self, now: Time, id: RequestId) -> Option<(WaitReason, WaitTimes)> {
        let &key = self.ledger.live.get(&id)?;
        let reason = self.ledger.wait_reason(key)?;
        Some((reason, self.ledger.wait_times(key, now)))
    }

    /// What became of the requests of each class, by name.
    pub fn class_metrics(&self) -> impl Iterator<Item = (&str, &GroupMetrics)> {
        let classes = self.ledger.rules.policy().classes.iter();
        let metrics = self.ledger.classes.iter().map(|class| &class.metrics);
        classes.map(|class| class.name.as_str()).zip(metrics)
    }

    /// What became of the requests of each tenant, by name, since the engine started.
    pub fn tenant_metrics(&self) -> impl Iterator<Item = (&str, GroupMetrics)> {
        self.ledger.tenants.metrics()
    }

    /// What became of the requests of tenants beyond those that are remembered by name.
    pub fn other_tenant_metrics(&self) -> &GroupMetrics {
        self.ledger.tenants.other_metrics()
    }

    /// The policy in force: the first, or the one of the last [`Self::reload`].
    pub fn policy(&self) -> &Policy {
        self.ledger.rules.policy()
    }

    /// What iterations were like.
    pub fn iteration_metrics(&self) -> &IterationMetrics {
        &self.ledger.iterations
    }

    /// How well memory was foreseen.
    pub fn memory_metrics(&self) -> MemoryMetrics {
        let overflow = &self.ledger.overflow;
        let target = self.ledger.rules.policy().memory.target();
        MemoryMetrics {
            ended: overflow.ended(),
            overflowed: overflow.overflowed(),
            overflow: overflow.realised(),
            target: target.unwrap_or(0.0),
            quantile: overflow.quantile(),
        }
    }

    /// What iterations took of late, and how well that was predicted.
    pub fn pace_metrics(&self) -> PaceMetrics {
        self.ledger.pace.metrics(&self.lane.costs)
    }

    /// What iterations cost, as far as it was learned.
    pub fn cost_model(&self) -> &CostModel {
        &self.lane.costs
    }

    /// Who sits in each row, in the order of the rows; `None`: it is free. Looks at all that run.
    pub fn seats(&self) -> Vec<Option<Seat>> {
        self.ledger.seats(&self.lane, &self.limits)
    }

    /// Since when the longest-waiting request of each class and tenant waits, of those that were never
    /// scheduled. Looks at the requests that live, from the oldest on, up to a bound.
    pub fn oldest_waits(&self) -> OldestWaits<'_> {
        self.ledger.oldest_waits()
    }

    /// What each tenant's flows were served.
    pub fn shares(&self) -> impl Iterator<Item = Share<'_>> {
        self.ledger.shares()
    }

    /// Rows that are padding: none where newcomers join at every iteration.
    pub fn padding(&self) -> Padding {
        let mut padding = Padding::default();
        if leaves_together(self.ledger.rules.policy().join) {
            for key in self.lane.running.iter() {
                let sequence = &self.ledger.sequences[key.0];
                if sequence.finished.is_some() {
                    padding.sequences += 1;
                    padding.context_tokens += u64::from(sequence.num_tokens());
                }
            }
        }
        padding
    }

    /// Counters and gauges.
    pub fn metrics(&self) -> Metrics {
        let pool = self.lane.pool.usage();
        let host = self.lane.pool.host_usage();
        Metrics {
            live: self.ledger.live.len() as u64,
            queued: u64::from(self.ledger.door.queued()),
            queued_tokens: self.ledger.door.queued_tokens(),
            waiting: self
                .ledger
                .classes
                .iter()
                .map(|class| class.metrics.waiting)
                .sum(),
            waiting_sequences: self.ledger.queue.len() as u64,
            running_sequences: self.lane.running.len() as u64,
            free_blocks: u64::from(pool.free),
            used_blocks: u64::from(pool.used),
            cached_blocks: u64::from(pool.cached),
            host_free_blocks: u64::from(host.free),
            host_used_blocks: u64::from(host.used),
            host_cached_blocks: u64::from(host.cached),
            ..self.ledger.counters
        }
    }

    /// Checks every book against every other; says the first that disagrees. For tests: it is slow.
    pub fn audit(&self) -> Result<(), String> {
        let tables = self
            .ledger
            .sequences
            .iter()
            .map(|(_, sequence)| &sequence.table);
        let copies = self.lane.in_flight.iter().flat_map(|step| &step.copies);
        let copies = copies.map(|(_, copy)| copy);
        self.lane.pool.audit(tables, copies)?;
        let running = self.lane.running.len();
        let waiting = self.ledger.queue.len();
        let sequences = self.ledger.sequences.len();
        if running + waiting != sequences {
            return Err(format!(
                "{running} run, {waiting} wait, but {sequences} exist"
            ));
        }
        let lives = self.ledger.overflow.live();
        if lives != running as u64 {
            return Err(format!(
                "{running} run, but {lives} admissions have not ended"
            ));
        }
        let rows: u32 = self
            .ledger
            .sequences
            .iter()
            .map(|(_, sequence)| {
                u32::from(sequence.row.is_some()) + sequence.sibling_rows.len() as u32
            })
            .sum();
        let free = self.lane.rows.num_free();
        if rows + free != self.limits.max_num_seqs() {
            return Err(format!("{rows} rows are held and {free} free"));
        }
        self.ledger.audit()?;
        let counters = self.metrics();
        let ended = counters.finished + counters.aborted + counters.failed + counters.rejected;
        let given_up = counters.expired + counters.shed + counters.displaced;
        if counters.submitted != ended + given_up + counters.live
            || counters.rejections.total() != counters.rejected
        {
            return Err(format!("a request is lost or ended twice: {counters:?}"));
        }
        let block_size = self.limits.block_size();
        self.lane
            .running
            .audit(&self.ledger.sequences, block_size)?;
        self.audit_flights()
    }

    /// Checks what sequences say of the steps in flight, and that those without run-ahead leave no decode
    /// out.
    fn audit_flights(&self) -> Result<(), String> {
        let mut in_flight: HashMap<usize, u32> = HashMap::new();
        let block_size = self.limits.block_size();
        let steps = self.lane.in_flight.iter();
        for (key, num_tokens) in steps.flat_map(|step| step.num_landing(block_size)) {
            *in_flight.entry(key.0).or_default() += num_tokens;
        }
        let leaves_nobody_out = self.lane.is_ahead() && self.limits.max_in_flight_steps() == 1;
        for (key, sequence) in &self.ledger.sequences {
            let (arrival, tokens) = (sequence.arrival, in_flight.remove(&key).unwrap_or(0));
            if sequence.num_in_flight_tokens != tokens || sequence.num_scheduled_tokens > 0 {
                return Err(format!(
                    "{arrival:?} does not know its {tokens} tokens in flight"
                ));
            }
            if tokens > 0 && sequence.row.is_none() {
                return Err(format!(
                    "{arrival:?} has no row, but {tokens} tokens in flight"
                ));
            }
            if sequence.ended && tokens == 0 {
                return Err(format!("{arrival:?} has ended, but is there"));
            }
            let decodes = sequence.num_remaining_tokens() == 1 && sequence.finished.is_none();
            if leaves_nobody_out && sequence.row.is_some() && decodes && tokens == 0 {
                return Err(format!("{arrival:?} decodes but got no token"));
            }
        }
        if in_flight.is_empty() {
            Ok(())
        } else {
            Err("a step in flight has a sequence that is gone".into())
        }
    }
}
