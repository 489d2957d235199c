//! Backfill: who goes ahead of the first of the queue while that does not fit.
//!
//! The first that lacks memory or rows (the head) gets a reservation: the iteration at which it will fit
//! by prediction ([`crate::predict::reservation`]; EASY, Lifka, JSSPP'95). Of those behind it, a bounded
//! number is looked at in an iteration, in the queue's order; who fits now, and does not move that start,
//! joins as the head's guest. The reservation is sticky: from the first time on that somebody asked,
//! until the head is admitted, ends, is held or is overtaken by something more important (a higher level,
//! a promoted request, a preempted sequence), no request of its own level takes its place, however shares
//! and orders change meanwhile.
//!
//! Predictions can be wrong. A start that has to be put off is counted as a forecast slip. And guests are
//! there by the head's leave: they preempt nobody, they give memory up before everybody else, and as soon
//! as the head would fit without them, they go. So the head never waits for a guest. Who was preempted goes
//! ahead of nobody, so that is lost once at most. But a forecast promises how few admissions see a
//! preemption: where it admits, guests stay, and a head that could start early waits for them, as in EASY.
//!
//! Nothing is computed while the head fits, nobody is behind it, or no memory is free for anybody. The
//! curve is kept while the running set and the predictions for it stay what they were.

use crate::config::memory::{Backfill, MemoryAdmission};
use crate::iteration::fit::Horizon;
use crate::iteration::join::leaves_together;
use crate::iteration::newcomers::{Entrance, Handed};
use crate::iteration::preempt::Lack;
use crate::iteration::scheduler::Scheduler;
use crate::iteration::sequence::Sequence;
use crate::memory::blocks::PrefixMatch;
use crate::predict::reservation::{Candidate, Curve, Need, Occupant};
use crate::request::SequenceKey;
use crate::waiting::queue::{Arrival, Behind, Next, Standing};
use crate::waiting::tenants::TenantKey;

/// How many times as long as predicted a guest may run and be out of the head's way in time.
const CAUTION: u32 = 2;

/// The reservation, and what it is computed from.
#[derive(Default)]
pub(crate) struct Backfilling {
    reservation: Option<Reservation>,
    curve: Curve,
    /// Whom the curve was made of, and when they joined.
    running: Vec<(Arrival, u64)>,
    /// Whether that was looked at in this decision, and nobody was admitted since.
    is_current: bool,
    behind: Behind,
}

/// The head and what it was promised.
struct Reservation {
    head: SequenceKey,
    arrival: Arrival,
    /// From which iteration on it did not fit.
    since: u64,
    /// The iteration at which it will fit; none once somebody more important was admitted first.
    start: Option<u64>,
}

impl Backfilling {
    /// Whether a running sequence is there by leave of the head that waits.
    pub(crate) fn is_guest(&self, sequence: &Sequence) -> bool {
        let since = self.reservation.as_ref().map(|head| head.since);
        since.is_some_and(|since| sequence.is_guest_since(since))
    }

    /// Whether a waiting sequence has the reservation.
    pub(crate) fn is_head(&self, key: SequenceKey) -> bool {
        self.reservation
            .as_ref()
            .is_some_and(|head| head.head == key)
    }

    /// A sequence was admitted in its turn.
    pub(crate) fn joined(&mut self, key: SequenceKey) {
        if self.is_head(key) {
            self.reservation = None;
        } else if let Some(head) = &mut self.reservation {
            head.start = None; // overtaken: that is no error of the prediction
        }
    }
}

impl Scheduler<'_> {
    /// Forgets the reservation of a head that does not wait any more.
    pub(crate) fn forget_gone_head(&mut self) {
        let sequences = &self.ledger.sequences;
        let waits = |head: &Reservation| {
            let sequence = sequences.get(head.head.0);
            sequence.is_some_and(|s| s.arrival == head.arrival && s.row.is_none())
        };
        let state = &mut self.lane.backfill;
        state.reservation = state.reservation.take().filter(waits);
    }

    /// Who is next: the queue's next, or the head with the reservation if the other is not more important.
    pub(crate) fn next_in_line(&mut self) -> Option<Next> {
        let mut next = self.ledger.queue.peek()?;
        if self.mode() != Backfill::Easy {
            return Some(next);
        }
        if let Next::Returning(key, level) = next {
            // A guest that was preempted is behind whom it was let in ahead of, as before.
            let sequence = &self.ledger.sequences[key.0];
            let first = self.ledger.queue.peek_fresh(level);
            let since = first.and_then(|first| self.blocked_since(first.sequence()));
            match first {
                Some(first) if since.is_some_and(|since| sequence.is_guest_since(since)) => {
                    next = first;
                }
                _ => return Some(next),
            }
        }
        let (Next::Fresh(_, level, _), Some(head)) = (next, &self.lane.backfill.reservation) else {
            return Some(next);
        };
        Some(self.as_next_of(head, level).unwrap_or(next))
    }

    fn blocked_since(&self, key: SequenceKey) -> Option<u64> {
        self.ledger.sequences[key.0].blocked_since
    }

    /// Who may go ahead. Where nobody is preempted for memory, nobody can be asked to go again.
    fn mode(&self) -> Backfill {
        let memory = &self.ledger.rules.policy().memory;
        match (memory.backfill, memory.admission) {
            (Backfill::Easy, MemoryAdmission::Reserve) => Backfill::Off,
            (mode, _) => mode,
        }
    }

    /// A reserved head as the next of `level`, if it may be that.
    fn as_next_of(&self, head: &Reservation, level: usize) -> Option<Next> {
        let sequence = self.ledger.sequences.get(head.head.0)?;
        if sequence.arrival != head.arrival {
            return None;
        }
        let entry = &self.ledger.requests[sequence.request.0];
        let fresh = &entry.waiting.as_ref()?.fresh;
        let is_held = self.ledger.tenants.get(entry.tenant).held_since.is_some();
        let stands = match fresh.standing {
            Standing::Flow => fresh.level == level && !is_held,
            Standing::BestEffort => level + 1 == self.ledger.queue.num_levels(),
            Standing::Promoted => false,
        };
        (stands && !fresh.is_aside).then_some(Next::Fresh(head.head, level, fresh.leaf))
    }

    /// Lets others go ahead of `head`, which does not fit.
    pub(crate) fn backfill(&mut self, head: SequenceKey, lack: Lack, handed: &mut Handed) {
        let policy = self.ledger.rules.policy();
        let count = policy.memory.backfill_candidates as usize;
        if self.mode() == Backfill::Off || leaves_together(policy.join) {
            return;
        }
        let now = self.iteration();
        let blocked_since = &mut self.ledger.sequences[head.0].blocked_since;
        *blocked_since = blocked_since.or(Some(now));
        if !self.has_room_for_anybody() || self.ledger.queue.len() == 1 {
            return;
        }
        let mut state = std::mem::take(&mut self.lane.backfill);
        state.is_current = false;
        let queue = &self.ledger.queue;
        queue.collect_behind(head, count, &mut state.behind);
        let bounded = self.bounded_tenant(head);
        let missing_later = self.lane.foresight.missing_blocks;
        let missing = lack.blocks.max(missing_later);
        let need = self.need_of(head, missing);
        for at in 0..state.behind.found.len() {
            if !self.has_room_for_anybody() {
                break;
            }
            let next = state.behind.found[at];
            if self.may_join_now(next, bounded) {
                self.offer(&mut state, (head, need), next, handed);
            }
        }
        self.lane.backfill = state;
        // What the next ones lack does not matter: it is the head that the queue waits for.
        self.lane.foresight.missing_blocks = missing_later;
    }

    /// Whether anybody can fit: looking at candidates costs nothing where nobody does.
    fn has_room_for_anybody(&self) -> bool {
        self.budget > 0
            && self.lane.rows.num_free() > 0
            && self.lane.pool.available() > self.limits.watermark_blocks()
    }

    /// The head's tenant if it has bounds on what runs or on its rate: guests of the same tenant would use
    /// up what the head needs.
    fn bounded_tenant(&self, head: SequenceKey) -> Option<TenantKey> {
        let request = self.ledger.sequences[head.0].request;
        let tenant = self.ledger.requests[request.0].tenant;
        let settings = &self.ledger.tenants.get(tenant).rules.settings;
        let is_bounded = settings.max_running.is_some() || settings.tokens_per_second.is_some();
        is_bounded.then_some(tenant)
    }

    /// Whether the bounds of tenants let a candidate join.
    fn may_join_now(&self, next: Next, bounded: Option<TenantKey>) -> bool {
        let request = self.ledger.sequences[next.sequence().0].request;
        let entry = &self.ledger.requests[request.0];
        let tenant = self.ledger.tenants.get(entry.tenant);
        bounded != Some(entry.tenant)
            && !tenant.is_busy(entry.request.sampling.n)
            && (matches!(next, Next::Promoted(_)) || tenant.rate_holds_until(self.now, 0).is_none())
    }

    /// Admits a candidate if it fits and does not move the head's start.
    fn offer(
        &mut self,
        state: &mut Backfilling,
        (head, need): (SequenceKey, Need),
        next: Next,
        handed: &mut Handed,
    ) {
        let key = next.sequence();
        if let Next::Fresh(_, level, _) = next {
            self.schedule_chunks(level);
        }
        if self.budget == 0 || self.is_too_many(next, key) {
            return;
        }
        let Ok(cached) = self.find_room(key, Horizon::Future(self.level_of(next))) else {
            return;
        };
        let is_easy = self.mode() == Backfill::Easy;
        if is_easy {
            let start = self.promise(state, head, need);
            if !self.is_out_of_the_way(state, key, cached, start) {
                return;
            }
        }
        let is_first = match next {
            Next::Fresh(_, _, leaf) => self.ledger.queue.is_first(leaf, key).then_some(leaf),
            _ => None,
        };
        let Ok(chunk) = self.admit(key, Entrance::AsGuest(self.level_of(next))) else {
            return;
        };
        if let Some(leaf) = is_first {
            self.ledger.queue.left(leaf, true);
        }
        if is_easy {
            let sequence = &mut self.ledger.sequences[key.0];
            self.lane.running.make_guest(sequence);
        }
        self.ledger.counters.backfilled += 1;
        state.is_current = false;
        self.start_newcomer(next, key, chunk, handed);
    }

    /// The iteration at which the head will fit: from the first time on at which somebody could go ahead of
    /// it, it has a reservation for that.
    fn promise(&mut self, state: &mut Backfilling, head: SequenceKey, need: Need) -> u64 {
        self.refresh_curve(state);
        let start = state.curve.reserve(need);
        let sequence = &self.ledger.sequences[head.0];
        let known = state.reservation.take().filter(|known| known.head == head);
        if known.is_some_and(|known| known.start.is_some_and(|promised| promised < start)) {
            self.ledger.counters.forecast_slips += 1;
        }
        state.reservation = Some(Reservation {
            head,
            arrival: sequence.arrival,
            since: sequence.blocked_since.unwrap_or(self.iteration()),
            start: Some(start),
        });
        start
    }

    /// Whether a candidate that fits now leaves the head's start where it is.
    fn is_out_of_the_way(
        &self,
        state: &Backfilling,
        key: SequenceKey,
        cached: PrefixMatch,
        start: u64,
    ) -> bool {
        let now = self.iteration();
        let sequence = &self.ledger.sequences[key.0];
        let candidate = self.as_candidate(key, sequence, cached);
        // Its prompt must be out of the way of the head's own, too.
        now + self.chunks_before_output(sequence) < start
            && state.curve.has_room_for(&candidate, now)
    }

    /// Number of the iteration that is being decided.
    fn iteration(&self) -> u64 {
        self.lane.step.number + 1
    }

    /// What must be free for the head, which misses so many blocks now or later.
    fn need_of(&self, head: SequenceKey, missing_blocks: u32) -> Need {
        let blocks = if missing_blocks > 0 {
            self.lane.pool.available() + missing_blocks
        } else {
            let sequence = &self.ledger.sequences[head.0];
            self.limits.blocks_for(sequence.num_tokens() + 1) + self.limits.watermark_blocks()
        };
        let rows = self.ledger.sequences[head.0].num_rows();
        Need { blocks, rows }
    }

    /// Makes the curve anew if the running set or the predictions for it have changed.
    fn refresh_curve(&self, state: &mut Backfilling) {
        let now = self.iteration();
        if std::mem::replace(&mut state.is_current, true) {
            return;
        }
        let sequences = &self.ledger.sequences;
        let running = self.lane.running.iter();
        let running = running.map(|key| {
            let sequence = &sequences[key.0];
            (sequence.arrival, sequence.joined_at_step)
        });
        if state.curve.is_true_at(now) && running.clone().eq(state.running.iter().copied()) {
            return;
        }
        state.running.clear();
        state.running.extend(running);
        let free = Need {
            blocks: self.lane.pool.available(),
            rows: self.lane.rows.num_free(),
        };
        let keys = self.lane.running.iter();
        let entries = keys
            .clone()
            .map(|key| sequences[key.0].table.num_blocks() as usize);
        let used = self.limits.num_kv_blocks() - free.blocks;
        let is_shared = entries.sum::<usize>() != used as usize;
        let occupants = keys.flat_map(|&key| self.as_occupants(key, is_shared));
        state
            .curve
            .rebuild(now, self.limits.block_size(), free, occupants);
    }

    /// A running sequence, and its siblings that are not born yet, which will need blocks of their own.
    fn as_occupants(&self, key: SequenceKey, is_shared: bool) -> impl Iterator<Item = Occupant> {
        let sequence = &self.ledger.sequences[key.0];
        let held = if is_shared {
            sequence.table.num_exclusive()
        } else {
            sequence.table.num_blocks()
        };
        let own = Occupant {
            ends_at: self.end_after(sequence, self.ledger.predicted_remaining(key)),
            tokens: sequence.num_tokens(),
            held,
            rows: sequence.num_rows(),
        };
        let sibling = Occupant {
            tokens: self.limits.block_size(),
            held: 0,
            rows: 0,
            ..own
        };
        let unborn = std::iter::repeat_n(sibling, sequence.num_unborn as usize);
        std::iter::once(own).chain(unborn)
    }

    /// A waiting sequence that fits now. One with siblings is taken to hold its most from the start.
    fn as_candidate(
        &self,
        key: SequenceKey,
        sequence: &Sequence,
        cached: PrefixMatch,
    ) -> Candidate {
        let shared = cached.num_blocks - cached.num_parked;
        let most_output = sequence.ending.max_tokens;
        let longest = sequence.num_prompt_tokens + most_output;
        let of_siblings = sequence.num_unborn * (self.limits.blocks_for(most_output) + 1);
        let most_blocks = self.limits.blocks_for(longest) - shared + of_siblings;
        let held = if sequence.num_unborn > 0 {
            most_blocks
        } else {
            self.limits.blocks_for(sequence.num_tokens()) - shared
        };
        let output = CAUTION * self.ledger.predicted_remaining(key);
        Candidate {
            occupant: Occupant {
                ends_at: self.end_after(sequence, output.min(most_output)),
                tokens: sequence.num_tokens(),
                held,
                rows: sequence.num_rows(),
            },
            most_blocks,
        }
    }

    /// The first iteration that a sequence which runs in this one is not in any more, if so many output
    /// tokens are to come.
    fn end_after(&self, sequence: &Sequence, output: u32) -> u64 {
        self.iteration() + self.chunks_before_output(sequence) + u64::from(output)
    }

    /// Iterations that compute a part of its tokens before the one that samples.
    fn chunks_before_output(&self, sequence: &Sequence) -> u64 {
        let most = self.limits.max_num_batched_tokens();
        let chunk = most.min(self.limits.max_chunk_tokens());
        u64::from((sequence.num_remaining_tokens() - 1) / chunk)
    }
}
