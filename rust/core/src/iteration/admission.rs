//! Leaving the queue: what a request gives back and pays when it is scheduled.

use crate::iteration::join::Situation;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::iteration::sequence::RequestKey;
use crate::output::Event;
use crate::request::{SequenceKey, Time};
use crate::request::{WaitReason, WaitTimes};

impl Ledger {
    /// Takes a sequence out of the queue, where it waits fresh or preempted.
    ///
    /// Who lets a backfilled one (`is_guest`) pass loses nothing by it, and goes on waiting for what it
    /// waited for.
    pub(crate) fn leave_queue(&mut self, key: SequenceKey, is_guest: bool, now: Time) {
        let sequence = &self.sequences[key.0];
        let (request, level, arrival) = (sequence.request, sequence.level, sequence.arrival);
        if self.queue.remove_returning(level, arrival) {
            return;
        }
        let waits = self.wait_times(request, now);
        self.stop_waiting(request);
        self.requests[request.0].request.stats.waits = waits;
        if !is_guest {
            let oldest = self.queue.oldest();
            self.clocks.admitted(now, arrival.request, oldest);
        }
    }

    /// Charges a sequence that was admitted with so many tokens cached; tells the client, the first
    /// time.
    pub(crate) fn admitted(&mut self, key: SequenceKey, num_cached_tokens: u32, now: Time) {
        let request = self.sequences[key.0].request;
        let entry = &mut self.requests[request.0];
        if entry.request.stats.first_scheduled.is_some() {
            self.charge_admission(key, num_cached_tokens, 0);
            return;
        }
        entry.request.stats.first_scheduled = Some(now);
        entry.request.stats.num_cached_tokens = num_cached_tokens;
        let prompt = u64::from(entry.request.num_prompt_tokens);
        let n = entry.request.sampling.n;
        let id = entry.request.id;
        let (class, tenant) = (entry.class, entry.tenant);
        let most = entry.request.max_tokens;
        let queue_time_us = now.since_us(entry.request.stats.arrival);
        let stats = entry.request.stats;
        let of_class = &mut self.classes[class.0 as usize].metrics;
        of_class.scheduled(queue_time_us, &stats);
        let owner = self.tenants.get_mut(tenant);
        owner.metrics.scheduled(queue_time_us, &stats);
        owner.num_running += n;
        owner.use_tokens(now, prompt);
        let predicted = if self.rules.policy().charge_predicted_output {
            self.expected_length(class, tenant).min(most.into()) as u64 * u64::from(n)
        } else {
            0
        };
        self.charge_admission(key, num_cached_tokens, predicted);
        self.counters.prompt_tokens += prompt;
        self.counters.cached_tokens += u64::from(num_cached_tokens);
        self.outputs.events.push(Event::Scheduled {
            request: id,
            num_cached_tokens,
            queue_time_us,
        });
    }

    /// For how long a request has waited for what; zeros once it was scheduled.
    pub(crate) fn wait_times(&self, key: RequestKey, now: Time) -> WaitTimes {
        let entry = &self.requests[key.0];
        let Some(waiting) = &entry.waiting else {
            return entry.request.stats.waits;
        };
        let held = self.tenants.get(entry.tenant).held_us(now) - waiting.held_us;
        let number = waiting.fresh.key.number;
        self.clocks.times(now, number, waiting.since, held)
    }

    /// Why a request waits; `None` once it was scheduled.
    pub(crate) fn wait_reason(&self, key: RequestKey) -> Option<WaitReason> {
        let entry = &self.requests[key.0];
        let waiting = entry.waiting.as_ref()?;
        let is_held = self.tenants.get(entry.tenant).held_since.is_some();
        Some(self.clocks.reason(waiting.fresh.key.number, is_held))
    }

    /// What the join mode looks at.
    pub(crate) fn situation(&self, lane: &Lane) -> Situation {
        let oldest = self.queue.oldest_sequence().map(|key| {
            let request = self.sequences[key.0].request;
            self.requests[request.0].request.stats.arrival
        });
        Situation {
            is_forming: lane.is_forming,
            num_running: lane.running.len(),
            num_waiting: self.queue.work().rows,
            oldest_arrival: oldest,
        }
    }
}
