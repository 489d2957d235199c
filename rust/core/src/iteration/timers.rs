//! What happens to waiting requests because time passes.
//!
//! A request that was never scheduled has one timer: the earliest moment at which a rule has something
//! to say about it. Its deadline ends it. At its class's maximum queue time it expires or is promoted;
//! at the longest wait behind higher levels it is promoted. When it will certainly miss its deadline or
//! its class's TTFT target, it is relegated or dropped, as the class says. A tenant that its rate holds
//! has a timer, too.

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

    fn rule(&mut self, lane: &mut Lane, key: RequestKey, now: Time) {
        let mut dues = self.dues(&self.requests[key.0]);
        dues.sort_by_key(|&(at, _)| at);
        for (_, due) in dues.into_iter().take_while(|&(at, _)| at <= now) {
            match due {
                Due::End(finish) => return self.end_request(lane, key, finish, now),
                Due::Promote => self.stand(key, Standing::Promoted),
                Due::Relegate => self.stand(key, Standing::BestEffort),
            }
        }
        self.arm(key, now);
    }

    /// Sets a waiting request's timer to the next moment at which a rule has something to say.
    pub(crate) fn arm(&mut self, key: RequestKey, now: Time) {
        let entry = &self.requests[key.0];
        let dues = self.dues(entry);
        let next = dues
            .into_iter()
            .map(|(at, _)| at)
            .filter(|&at| at > now)
            .min();
        let entry = &mut self.requests[key.0];
        if let (Some(waiting), Some(next)) = (&mut entry.waiting, next) {
            waiting.timer = Some(next);
            self.timers.insert((next, entry.request.id));
        }
    }

    /// What the rules will say about a waiting request, and when.
    fn dues(&self, entry: &Entry) -> Vec<(Time, Due)> {
        let Some(waiting) = &entry.waiting else {
            return Vec::new();
        };
        let class = self.rules.class(entry.class);
        let arrival = entry.request.stats.arrival;
        let after = |us: u64| Time(arrival.0.saturating_add(us));
        let mut dues = Vec::new();
        if let Some(deadline) = entry.request.deadline {
            dues.push((deadline, Due::End(Finish::DeadlineMissed)));
        }
        let standing = self.standing(entry, waiting);
        if standing == Standing::Promoted {
            return dues;
        }
        if let Some(most) = class.max_queue_time_us {
            let due = match class.on_timeout {
                OnTimeout::Expire => Due::End(Finish::QueueTimeout),
                OnTimeout::Promote => Due::Promote,
            };
            dues.push((after(most), due));
        }
        if standing == Standing::BestEffort {
            return dues;
        }
        // Nobody of the highest level waits behind a higher one.
        let ages = self.rules.policy().max_level_wait_us;
        if let Some(most) = ages.filter(|_| waiting.fresh.level > 0) {
            // A place comes free within some iterations, and the wait is to end in time.
            let lead = (AGEING_LEAD_ITERATIONS * self.forecast.iteration_us()).min(most / 2);
            dues.push((after(most - lead), Due::Promote));
        }
        let target = class.ttft_target_us.map(after);
        let target = [target, entry.request.deadline].into_iter().flatten().min();
        let doomed = match class.on_doomed {
            OnDoomed::Keep => None,
            OnDoomed::Relegate => Some(Due::Relegate),
            OnDoomed::Drop => Some(Due::End(Finish::DeadlineMissed)),
        };
        if let (Some(target), Some(due)) = (target, doomed) {
            let least = self
                .forecast
                .prefill_us(entry.request.num_prompt_tokens.into());
            let last = Time(target.0.saturating_sub(least).max(arrival.0 + 1));
            dues.push((last, due));
        }
        dues
    }

    /// Where a request waits, or waited before it was set aside.
    fn standing(&self, entry: &Entry, waiting: &Waiting) -> Standing {
        let parked = &self.tenants.get(entry.tenant).parked;
        let aside = parked.iter().find(|&&(id, _)| id == entry.request.id);
        aside.map_or(waiting.fresh.standing, |&(_, standing)| standing)
    }

    fn stand(&mut self, key: RequestKey, standing: Standing) {
        let entry = &mut self.requests[key.0];
        if let Some(waiting) = &mut entry.waiting {
            let parked = &mut self.tenants.get_mut(entry.tenant).parked;
            parked.retain(|&(id, _)| id != entry.request.id);
            self.queue.move_to(&mut waiting.fresh, standing);
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
        for (id, standing) in std::mem::take(&mut tenant.parked) {
            let request = self.live[&id];
            if let Some(waiting) = &mut self.requests[request.0].waiting {
                self.queue.move_to(&mut waiting.fresh, standing);
            }
        }
        let tenant = self.tenants.get_mut(key);
        let Some(since) = tenant.held_since.take() else {
            return;
        };
        tenant.held_us += now.since_us(since);
        if let Some(until) = tenant.held_until.take() {
            self.holds.remove(&(until, key));
        }
        self.queue.set_held(&self.tenants.get(key).flows, false);
    }

    /// Sets a request that waits outside its flow aside until its tenant is let go.
    pub(crate) fn park(&mut self, key: RequestKey) {
        let entry = &mut self.requests[key.0];
        let Some(waiting) = &mut entry.waiting else {
            return;
        };
        let standing = waiting.fresh.standing;
        if standing != Standing::Flow {
            self.queue.move_to(&mut waiting.fresh, Standing::Parked);
            let owner = self.tenants.get_mut(entry.tenant);
            owner.parked.push((entry.request.id, standing));
        }
    }
}
