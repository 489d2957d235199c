//! The ledger: all requests and sequences, who waits, and what there is to tell the clients.
//!
//! Every way a request can end goes through [`Ledger::end_child`], so each child ends once and each
//! request ends once, with its place, its memory and its row given back.

use std::collections::BTreeMap;

use slab::Slab;

use crate::config::Limits;
use crate::error::SubmitError;
use crate::iteration::lane::Lane;
use crate::iteration::sequence::{RequestKey, Sequence};
use crate::memory::blocks::BlockPool;
use crate::memory::prefix::{BlockHash, extend_chain};
use crate::metrics::Metrics;
use crate::output::{Event, Output, OutputBatch};
use crate::request::{Finish, Request, RequestId, SequenceKey, Time};
use crate::text::TextState;
use crate::waiting::gate::{Gate, Place};
use crate::waiting::queue::{Arrival, WaitingQueue};

pub(crate) struct Ledger {
    pub(crate) gate: Gate,
    /// Places of requests that were not submitted yet.
    pub(crate) reserved: BTreeMap<RequestId, Place>,
    pub(crate) queue: WaitingQueue,
    pub(crate) requests: Slab<Entry>,
    pub(crate) sequences: Slab<Sequence>,
    /// Requests that have not ended.
    pub(crate) live: BTreeMap<RequestId, RequestKey>,
    pub(crate) outputs: OutputBatch,
    pub(crate) counters: Metrics,
    num_arrivals: u64,
}

/// A request and what it holds.
pub(crate) struct Entry {
    pub(crate) request: Request,
    /// Held until it is first scheduled or ends.
    pub(crate) place: Option<Place>,
    /// Its sequences that exist: one until the first output, then one for each child that lives.
    pub(crate) sequences: Vec<SequenceKey>,
}

impl Ledger {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            gate: Gate::new(limits.max_queued_requests()),
            reserved: BTreeMap::new(),
            queue: WaitingQueue::default(),
            requests: Slab::new(),
            sequences: Slab::new(),
            live: BTreeMap::new(),
            outputs: OutputBatch::default(),
            counters: Metrics::default(),
            num_arrivals: 0,
        }
    }

    /// Takes a place at the door for `id`.
    pub(crate) fn reserve(&mut self, id: RequestId) -> Result<(), SubmitError> {
        if self.live.contains_key(&id) || self.reserved.contains_key(&id) {
            return Err(SubmitError::DuplicateRequest { request: id });
        }
        self.reserved.insert(id, self.gate.reserve()?);
        Ok(())
    }

    /// Lets a checked request wait.
    pub(crate) fn admit_to_queue(
        &mut self,
        request: Request,
        prompt: Vec<u32>,
        place: Place,
        pool: &BlockPool,
        limits: &Limits,
    ) {
        let arrival = Arrival {
            request: self.num_arrivals,
            child: 0,
        };
        self.num_arrivals += 1;
        self.counters.submitted += 1;
        let root = BlockHash::root(request.cache_salt.as_deref(), None);
        let mut chain = Vec::new();
        if limits.prefix_caching() {
            extend_chain(&mut chain, root, &prompt, limits.block_size());
        }
        let id = request.id;
        let entry = self.requests.vacant_entry();
        let sequence = SequenceKey(self.sequences.insert(Sequence {
            request: RequestKey(entry.key()),
            arrival,
            tokens: prompt,
            num_prompt_tokens: request.num_prompt_tokens,
            num_computed_tokens: 0,
            num_scheduled_tokens: 0,
            num_tokens_to_score: request.num_tokens_to_score(),
            num_scored_tokens: 0,
            num_published_blocks: 0,
            table: pool.table(),
            row: None,
            sibling_rows: Vec::new(),
            num_unborn: request.sampling.n - 1,
            may_share_last_block: request.sampling.n > 1,
            root,
            chain,
            text: TextState::new(request.stop.stop.clone()),
            ended: false,
            protected_below_tokens: 0,
            num_lost_tokens: 0,
        }));
        self.live.insert(id, RequestKey(entry.key()));
        entry.insert(Entry {
            request,
            place: Some(place),
            sequences: vec![sequence],
        });
        let rank = self.sequences[sequence.0].rank();
        self.queue.push(rank, arrival, sequence);
    }

    /// Ends a whole request: every child that lives gets `finish`.
    ///
    /// Its memory and rows are free at once, but for sequences of the step in flight: those leave when
    /// it is committed, and not before.
    pub(crate) fn end_request(
        &mut self,
        lane: &mut Lane,
        key: RequestKey,
        finish: Finish,
        now: Time,
    ) {
        for sequence in self.requests[key.0].sequences.clone() {
            let state = &mut self.sequences[sequence.0];
            if state.ended {
                continue;
            }
            let (rank, arrival) = (state.rank(), state.arrival);
            let (running, scheduled) = (state.row.is_some(), state.num_scheduled_tokens > 0);
            let unborn = arrival.child + 1..=arrival.child + state.num_unborn;
            state.ended = true;
            // What its text still held back is delivered; nothing can follow that would cut it.
            let held = self.outputs.text.len();
            state.text.finish(&mut self.outputs.text);
            self.tell_finish(key, arrival.child, held, finish);
            self.end_child(key, finish, now);
            for child in unborn {
                self.tell_finish(key, child, self.outputs.text.len(), finish);
                self.end_child(key, finish, now);
            }
            if running && scheduled && lane.in_flight {
                continue;
            }
            if running {
                lane.running.retain(|&other| other != sequence);
            } else {
                self.queue.remove(rank, arrival);
            }
            self.discard(sequence);
        }
    }

    fn tell_finish(&mut self, key: RequestKey, child: u32, text: usize, finish: Finish) {
        let tokens = self.outputs.token_ids.len();
        let logprobs = self.outputs.logprobs.len();
        self.outputs.events.push(Event::Output(Output {
            request: self.requests[key.0].request.id,
            child,
            tokens: tokens..tokens,
            text: text..self.outputs.text.len(),
            logprobs: logprobs..logprobs,
            finish: Some(finish),
        }));
    }

    /// Counts the end of one child; the last one ends the request.
    pub(crate) fn end_child(&mut self, key: RequestKey, finish: Finish, now: Time) {
        let entry = &mut self.requests[key.0];
        entry.request.live_children -= 1;
        if entry.request.live_children > 0 {
            return;
        }
        entry.place = None;
        entry.request.stats.finished = now;
        let request = entry.request.id;
        let stats = entry.request.stats;
        self.live.remove(&request);
        match finish {
            Finish::Abort => self.counters.aborted += 1,
            Finish::RowFailed | Finish::StepFailed | Finish::EngineDead => {
                self.counters.failed += 1;
            }
            Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) | Finish::Length => {
                self.counters.finished += 1;
            }
            Finish::QueueTimeout | Finish::DeadlineMissed => self.counters.expired += 1,
            Finish::Shed => self.counters.shed += 1,
            Finish::Displaced => self.counters.displaced += 1,
        }
        self.outputs.events.push(Event::Ended { request, stats });
    }

    /// Drops a sequence that has ended and left running set and queue.
    pub(crate) fn discard(&mut self, key: SequenceKey) {
        let sequence = self.sequences.remove(key.0);
        debug_assert!(sequence.ended, "discarded a sequence that lives");
        let request = sequence.request.0;
        let entry = &mut self.requests[request];
        entry.sequences.retain(|&other| other != key);
        if entry.sequences.is_empty() {
            self.requests.remove(request);
        }
    }

    /// Puts `sequence` into the running set, which is ordered by arrival.
    pub(crate) fn enter_running(&self, running: &mut Vec<SequenceKey>, sequence: SequenceKey) {
        let arrival = self.sequences[sequence.0].arrival;
        let position = running.partition_point(|other| self.sequences[other.0].arrival < arrival);
        running.insert(position, sequence);
    }
}
