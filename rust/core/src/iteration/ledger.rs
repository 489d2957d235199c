//! The ledger: all requests and sequences, who waits, and what there is to tell the clients.
//!
//! Every way a request can end goes through [`Ledger::end_child`], so each child ends once and each
//! request ends once, with its place, its memory, its row and its flow given back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use slab::Slab;

use crate::config::Limits;
use crate::config::policy::{ClassId, Rules};
use crate::iteration::charge::{Deferred, Prices};
use crate::iteration::lane::Lane;
use crate::iteration::sequence::{RequestKey, Sequence};
use crate::metrics::{GroupMetrics, IterationMetrics, Metrics, PaceBook};
use crate::output::{Event, Output, OutputBatch, Span};
use crate::predict::output_length::LengthBelief;
use crate::predict::overflow::OverflowControl;
use crate::request::{EndKind, Finish, Request, RequestId, SequenceKey, Time};
use crate::waiting::fairness::FlowKey;
use crate::waiting::forecast::{Forecast, Stopwatch};
use crate::waiting::gate::{Door, Place};
use crate::waiting::queue::{Fresh, Standing, WaitingQueue};
use crate::waiting::reasons::{Reading, WaitClocks};
use crate::waiting::tenants::{TenantKey, Tenants};

pub(crate) struct Ledger {
    pub(crate) rules: Rules,
    pub(crate) prices: Prices,
    pub(crate) deferred: Deferred,
    pub(crate) door: Door,
    pub(crate) classes: Vec<Class>,
    pub(crate) tenants: Tenants,
    /// Places of requests that were not submitted yet.
    pub(crate) reserved: BTreeMap<RequestId, Reserved>,
    pub(crate) queue: WaitingQueue,
    pub(crate) requests: Slab<Entry>,
    pub(crate) sequences: Slab<Sequence>,
    /// Requests that have not ended.
    pub(crate) live: BTreeMap<RequestId, RequestKey>,
    /// When a waiting request's next rule is due.
    pub(crate) timers: BTreeSet<(Time, RequestId)>,
    /// When a tenant's rate lets it go.
    pub(crate) holds: BTreeSet<(Time, TenantKey)>,
    pub(crate) forecast: Forecast,
    pub(crate) clocks: WaitClocks,
    pub(crate) since_schedule: Stopwatch,
    /// Whether overload is being shed.
    pub(crate) is_shedding: bool,
    pub(crate) lengths: LengthBelief,
    pub(crate) overflow: OverflowControl,
    pub(crate) outputs: OutputBatch,
    pub(crate) counters: Metrics,
    pub(crate) iterations: IterationMetrics,
    pub(crate) pace: PaceBook,
    pub(crate) num_arrivals: u64,
}

/// What is known of a class.
#[derive(Default)]
pub(crate) struct Class {
    pub(crate) door: Door,
    pub(crate) lengths: LengthBelief,
    pub(crate) metrics: GroupMetrics,
}

/// A place at the door, and whose it is.
pub(crate) struct Reserved {
    pub(crate) place: Place,
    pub(crate) class: ClassId,
    pub(crate) tenant: TenantKey,
    pub(crate) user: Option<Arc<str>>,
}

/// A request and what it holds.
pub(crate) struct Entry {
    pub(crate) request: Request,
    pub(crate) class: ClassId,
    pub(crate) tenant: TenantKey,
    pub(crate) leaf: FlowKey,
    /// Held until it is first scheduled or ends.
    pub(crate) waiting: Option<Box<Waiting>>,
    /// Its sequences that exist: one until the first output, then one for each child that lives.
    pub(crate) sequences: Vec<SequenceKey>,
}

/// What a request holds until it is first scheduled.
pub(crate) struct Waiting {
    pub(crate) fresh: Fresh,
    pub(crate) place: Place,
    /// Tokens of its tenant's rate that it is expected to use.
    pub(crate) rate_tokens: u64,
    /// When its next rule is due.
    pub(crate) timer: Option<Time>,
    /// The wait clocks when it came, and for how long its tenant had been held.
    pub(crate) since: Reading,
    pub(crate) held_us: u64,
}

impl Ledger {
    pub(crate) fn new(limits: &Limits) -> Self {
        let rules = limits.rules().clone();
        Self {
            prices: Prices::new(rules.policy().price),
            deferred: Deferred::default(),
            door: Door::default(),
            classes: rules
                .policy()
                .classes
                .iter()
                .map(|_| Class::default())
                .collect(),
            tenants: Tenants::new(&rules),
            reserved: BTreeMap::new(),
            queue: WaitingQueue::new(&rules),
            requests: Slab::new(),
            sequences: Slab::new(),
            live: BTreeMap::new(),
            timers: BTreeSet::new(),
            holds: BTreeSet::new(),
            forecast: Forecast::default(),
            clocks: WaitClocks::default(),
            since_schedule: Stopwatch::default(),
            is_shedding: false,
            lengths: LengthBelief::default(),
            overflow: OverflowControl::default(),
            outputs: OutputBatch::default(),
            counters: Metrics::default(),
            iterations: IterationMetrics::default(),
            pace: PaceBook::default(),
            num_arrivals: 0,
            rules,
        }
    }

    /// Ends a whole request: every child that lives gets `finish`.
    ///
    /// Its memory and rows are free at once, but for sequences of steps in flight: those leave when the
    /// last of them has landed, and not before.
    pub(crate) fn end_request(
        &mut self,
        lane: &mut Lane,
        key: RequestKey,
        finish: Finish,
        now: Time,
    ) {
        let tenant = self.requests[key.0].tenant;
        if self.stop_waiting(key).is_some() && self.tenants.get(tenant).held_until.is_none() {
            // It may have been the one that its tenant was too busy for.
            self.let_go(tenant, now);
        }
        for sequence in self.requests[key.0].sequences.clone() {
            let state = &mut self.sequences[sequence.0];
            if state.ended {
                continue;
            }
            // One that is done and only waits for its batch has its own end.
            let finish = state.finished.unwrap_or(finish);
            let (level, arrival) = (state.level, state.arrival);
            let (running, in_flight) = (state.row.is_some(), state.is_in_flight());
            let unborn = arrival.child + 1..=arrival.child + state.num_unborn;
            state.end();
            // What its text still held back is delivered; nothing can follow that would cut it.
            let held = self.outputs.text.len();
            state.text.finish(&mut self.outputs.text);
            if state.finished.is_none() {
                self.count_output(sequence);
            }
            self.refund(sequence);
            self.tell_finish(key, arrival.child, held, finish);
            self.end_child(key, finish, now);
            for child in unborn {
                self.tell_finish(key, child, self.outputs.text.len(), finish);
                self.end_child(key, finish, now);
            }
            if in_flight {
                lane.ended.push(sequence);
                continue;
            }
            if running {
                lane.running.leave(&self.sequences, sequence);
            } else {
                self.queue.remove_returning(level, arrival);
            }
            self.discard(sequence);
        }
    }

    /// Counts the output of a sequence that is done.
    pub(crate) fn count_output(&mut self, key: SequenceKey) {
        let sequence = &self.sequences[key.0];
        let stats = &mut self.requests[sequence.request.0].request.stats;
        stats.num_output_tokens += sequence.num_output_tokens();
    }

    /// Takes a request that was never scheduled out of the queue; nothing happens if it was.
    pub(crate) fn stop_waiting(&mut self, key: RequestKey) -> Option<Box<Waiting>> {
        let entry = &mut self.requests[key.0];
        let waiting = entry.waiting.take()?;
        let tenant = self.tenants.get_mut(entry.tenant);
        tenant.waiting_tokens -= waiting.rate_tokens;
        tenant.forget_aside(&waiting.fresh);
        if let Some(timer) = waiting.timer {
            self.timers.remove(&(timer, entry.request.id));
        }
        self.queue.remove_fresh(&waiting.fresh);
        if waiting.fresh.standing != Standing::Flow {
            let tenant = entry.tenant;
            self.call_back(tenant);
        }
        Some(waiting)
    }

    pub(crate) fn tell_finish(&mut self, key: RequestKey, child: u32, text: usize, finish: Finish) {
        let tokens = self.outputs.token_ids.len();
        let logprobs = self.outputs.logprobs.len();
        self.outputs.events.push(Event::Output(Output {
            request: self.requests[key.0].request.id,
            child,
            tokens: Span::new(tokens..tokens),
            text: Span::new(text..self.outputs.text.len()),
            logprobs: Span::new(logprobs..logprobs),
            finish: Some(finish),
        }));
    }

    /// Counts the end of one child; the last one ends the request.
    pub(crate) fn end_child(&mut self, key: RequestKey, finish: Finish, now: Time) {
        let entry = &mut self.requests[key.0];
        let was_scheduled = entry.request.stats.first_scheduled.is_some();
        let (class, tenant) = (entry.class, entry.tenant);
        entry.request.live_children -= 1;
        let is_last = entry.request.live_children == 0;
        if was_scheduled {
            self.tenants.get_mut(tenant).num_running -= 1;
            self.let_go(tenant, now);
        }
        if !is_last {
            return;
        }
        let entry = &mut self.requests[key.0];
        entry.request.stats.finished = now;
        let request = entry.request.id;
        let stats = entry.request.stats;
        let n = entry.request.sampling.n;
        let leaf = entry.leaf;
        self.live.remove(&request);
        let counters = &mut self.counters;
        match finish.kind() {
            EndKind::Finished => counters.finished += 1,
            EndKind::Aborted => counters.aborted += 1,
            EndKind::Failed => counters.failed += 1,
            EndKind::Expired => {
                counters.expired += 1;
                counters.deadline_missed += u64::from(finish == Finish::DeadlineMissed);
            }
            EndKind::Shed => counters.shed += 1,
            EndKind::Displaced => counters.displaced += 1,
        }
        self.classes[class.0 as usize]
            .metrics
            .ended(finish, &stats, n);
        self.tenants
            .get_mut(tenant)
            .metrics
            .ended(finish, &stats, n);
        self.queue.release_flow(leaf);
        self.outputs.events.push(Event::Ended {
            request,
            stats: Box::new(stats),
        });
    }

    /// Drops a sequence that has ended and left running set and queue.
    pub(crate) fn discard(&mut self, key: SequenceKey) {
        let sequence = self.sequences.remove(key.0);
        debug_assert!(sequence.ended, "discarded a sequence that lives");
        if let Some(life) = sequence.life {
            self.end_life(life);
        }
        let request = sequence.request.0;
        let entry = &mut self.requests[request];
        entry.sequences.retain(|&other| other != key);
        if entry.sequences.is_empty() {
            // Until now its tenant was there for the work of its step in flight.
            self.tenants.release(entry.tenant);
            self.requests.remove(request);
        }
    }
}
