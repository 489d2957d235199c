//! What happens to waiting requests because time passes.
//!
//! A request that was never scheduled has one timer: the earliest moment at which a rule has something
//! to say about it. Its deadline ends it. At its class's maximum queue time it expires or is promoted;
//! at the longest wait behind higher levels, where there are any, it is promoted. When it will certainly
//! miss its deadline or its class's TTFT target, it is relegated or dropped, as the class says. A tenant
//! that its rate holds has a timer, too.

use crate::config::policy::{OnDoomed, OnTimeout};
use crate::iteration::lane::Lane;
use crate::iteration::ledger::{Entry, Ledger, Waiting};
use crate::iteration::sequence::RequestKey;
use crate::request::{Finish, Time};
use crate::waiting::queue::Standing;
use crate::waiting::tenants::TenantKey;

/// Iterations before the longest wait behind higher levels at which a request is promoted.
const AGEING_LEAD_ITERATIONS: u64 = 16;

/// What a rule says about a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    End(Finish),
    Promote,
    Relegate,
}

impl Ledger {
    /// The first moment at which something is due.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        let timer = self.timers.first().map(|&(at, _)| at);
        let hold = self.holds.first().map(|&(at, _)| at);
        [timer, hold].into_iter().flatten().min()
    }

    /// Does what is due.
    pub(crate) fn on_time(&mut self, lane: &mut Lane, now: Time) {
        while let Some(&(at, tenant)) = self.holds.first()
            && at <= now
        {
            self.let_go(tenant, now);
        }
        while let Some(&(at, id)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            let key = self.live[&id];
            if let Some(waiting) = &mut self.requests[key.0].waiting {
                waiting.timer = None;
            }
            self.rule(lane, key, now);
        }
    }

    /// Does all that is due for a waiting request; what one rule does may silence the others.
    fn rule(&mut self, lane: &mut Lane, key: RequestKey, now: Time) {
        while let Some((_, due)) = self.next_due(key).filter(|&(at, _)| at <= now) {
            match due {
                Due::End(finish) => return self.end_request(lane, key, finish, now),
                Due::Promote => self.stand(key, Standing::Promoted),
                Due::Relegate => self.stand(key, Standing::BestEffort),
            }
        }
        self.arm(key);
    }

    /// Sets a waiting request's timer to the first moment at which a rule has something to say. That may
    /// be over already: a deadline that has passed, a bound that was lowered.
    pub(crate) fn arm(&mut self, key: RequestKey) {
        let next = self.next_due(key);
        let entry = &mut self.requests[key.0];
        if let (Some(waiting), Some((next, _))) = (&mut entry.waiting, next) {
            waiting.timer = Some(next);
            self.timers.insert((next, entry.request.id));
        }
    }

    /// What a rule will say first about a waiting request, and when.
    fn next_due(&self, key: RequestKey) -> Option<(Time, Due)> {
        let entry = &self.requests[key.0];
        let waiting = entry.waiting.as_ref()?;
        let dues = self.dues(entry, waiting);
        dues.into_iter().flatten().min_by_key(|&(at, _)| at)
    }

    /// What each rule will say about a waiting request, and when; at the same moment the first counts.
    fn dues(&self, entry: &Entry, waiting: &Waiting) -> [Option<(Time, Due)>; 4] {
        let class = self.rules.class(entry.class);
        let arrival = entry.request.stats.arrival;
        let after = |us: u64| Time(arrival.0.saturating_add(us));
        let standing = waiting.fresh.standing;
        let deadline = entry.request.deadline;
        let missed = deadline.map(|at| (at, Due::End(Finish::DeadlineMissed)));
        if standing == Standing::Promoted {
            return [missed, None, None, None];
        }
        let timeout = match class.on_timeout {
            OnTimeout::Expire => Due::End(Finish::QueueTimeout),
            OnTimeout::Promote => Due::Promote,
        };
        let timeout = class.max_queue_time_us.map(|most| (after(most), timeout));
        if standing == Standing::BestEffort {
            return [missed, timeout, None, None];
        }
        // Nobody of the highest level waits behind a higher one.
        let ages = self.rules.policy().max_level_wait_us;
        let aged = ages.filter(|_| waiting.fresh.level > 0).map(|most| {
            // A place comes free within some iterations, and the wait is to end in time.
            let lead = AGEING_LEAD_ITERATIONS.saturating_mul(self.forecast.iteration_us());
            (after(most - lead.min(most / 2)), Due::Promote)
        });
        let target = class.ttft_target_us.map(after);
        let target = [target, deadline].into_iter().flatten().min();
        let doomed = match class.on_doomed {
            OnDoomed::Keep => None,
            OnDoomed::Relegate => Some(Due::Relegate),
            OnDoomed::Drop => Some(Due::End(Finish::DeadlineMissed)),
        };
        let doomed = target.zip(doomed).map(|(target, due)| {
            let prompt = entry.request.num_prompt_tokens.into();
            let least = self.forecast.prefill_us(prompt);
            let last = target.0.saturating_sub(least).max(arrival.0 + 1);
            (Time(last), due)
        });
        [missed, timeout, aged, doomed]
    }

    fn stand(&mut self, key: RequestKey, standing: Standing) {
        let entry = &mut self.requests[key.0];
        let tenant = entry.tenant;
        if let Some(waiting) = &mut entry.waiting {
            self.tenants.get_mut(tenant).forget_aside(&waiting.fresh);
            self.queue.move_to(&mut waiting.fresh, standing);
            self.call_back(tenant);
        }
    }

    /// Holds a tenant: nothing of it is scheduled until `until`, or until one of its answers ends.
    pub(crate) fn hold(&mut self, key: TenantKey, until: Option<Time>, now: Time) {
        let tenant = self.tenants.get_mut(key);
        tenant.held_since = Some(now);
        tenant.held_until = until;
        self.queue.set_held(&tenant.flows, true);
        if let Some(until) = until {
            self.holds.insert((until, key));
        }
    }

    /// Lets a tenant go that is held; whether it may run is looked at when it is its turn.
    pub(crate) fn let_go(&mut self, key: TenantKey, now: Time) {
        let tenant = self.tenants.get_mut(key);
        let Some(since) = tenant.held_since.take() else {
            return;
        };
        tenant.held_us += now.since_us(since);
        if let Some(until) = tenant.held_until.take() {
            self.holds.remove(&(until, key));
        }
        self.queue.set_held(&self.tenants.get(key).flows, false);
        self.call_back(key);
    }

    /// Sets a request that waits outside its flow aside until its tenant is let go.
    pub(crate) fn set_aside(&mut self, key: RequestKey) {
        let entry = &mut self.requests[key.0];
        if let Some(waiting) = &mut entry.waiting
            && waiting.fresh.standing != Standing::Flow
        {
            self.queue.set_aside(&mut waiting.fresh, true);
            let place = (waiting.fresh.standing, waiting.fresh.key.number);
            let owner = self.tenants.get_mut(entry.tenant);
            owner.aside.insert(place, entry.request.id);
        }
    }

    /// Brings the first promoted request and the first of best effort back that were set aside, if
    /// their tenant is not held. Those behind them follow one by one, as these leave.
    pub(crate) fn call_back(&mut self, key: TenantKey) {
        for standing in [Standing::Promoted, Standing::BestEffort] {
            let Some(id) = self.tenants.get(key).first_aside(standing) else {
                continue;
            };
            let request = self.live[&id];
            if let Some(waiting) = &mut self.requests[request.0].waiting {
                self.tenants.get_mut(key).forget_aside(&waiting.fresh);
                self.queue.set_aside(&mut waiting.fresh, false);
            }
        }
    }
}
