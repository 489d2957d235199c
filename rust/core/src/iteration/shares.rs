//! Tenants and classes seen from outside: what they were served, a change of their rules, and the
//! books about them.

use crate::config::policy::{ClassId, Rules, Sharing};
use crate::iteration::ledger::{Entry, Ledger};
use crate::request::Time;
use crate::waiting::tenants::TenantKey;

/// What a tenant was served in a class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share<'a> {
    /// The class; `None` where siblings share first come, first served: then its level's classes are
    /// one.
    pub class: Option<ClassId>,
    /// The tenant.
    pub tenant: &'a str,
    /// Its weight.
    pub weight: f64,
    /// Priced service that it really received, in thousandths; kept while the tenant is.
    pub served: u64,
    /// Units of work of it that wait, in thousandths.
    pub backlog: u64,
    /// Answers of the tenant, in all classes, that run.
    pub num_running: u32,
    /// Answers of the tenant, in all classes, at the door and waiting.
    pub num_queued: u32,
}

impl Ledger {
    /// What each tenant's flows were served.
    pub(crate) fn shares(&self) -> impl Iterator<Item = Share<'_>> {
        let is_fair = self.rules.policy().sharing == Sharing::Fair;
        self.tenants.iter().flat_map(move |(_, tenant)| {
            let flows = tenant.flows.iter().enumerate();
            // Classes of a level are one flow where siblings share first come, first served.
            let own = flows.filter(|&(at, &(_, flow))| {
                tenant.flows[..at].iter().all(|&(_, other)| other != flow)
            });
            own.map(move |(_, &(class, flow))| Share {
                class: is_fair.then_some(class),
                tenant: &tenant.name,
                weight: tenant.rules.settings.weight,
                served: self.queue.flows().served(flow),
                backlog: self.queue.flows().backlog(flow),
                num_running: tenant.num_running,
                num_queued: tenant.door.queued(),
            })
        })
    }

    /// Goes over to other rules, which were checked.
    pub(crate) fn reload(&mut self, rules: Rules, now: Time) {
        self.rules = rules;
        self.tenants.reload(&self.rules);
        let keys: Vec<TenantKey> = self.tenants.iter().map(|(key, _)| key).collect();
        for key in keys {
            // What holds it is looked at again when it is its turn.
            self.let_go(key, now);
            let tenant = self.tenants.get(key);
            let weight = tenant.rules.settings.weight;
            for &(_, flow) in &tenant.flows {
                self.queue.flows_mut().set_weight(flow, weight);
            }
        }
        self.tenants.forget_unnamed();
        self.queue.reload(&self.rules);
        let live: Vec<_> = self.live.values().copied().collect();
        for key in live {
            let entry = &mut self.requests[key.0];
            if let Some(timer) = entry.waiting.as_mut().and_then(|w| w.timer.take()) {
                self.timers.remove(&(timer, entry.request.id));
            }
            self.arm(key);
        }
    }

    /// Checks the books of queue, doors and tenants; says the first that disagrees.
    pub(crate) fn audit(&self) -> Result<(), String> {
        self.queue.flows().audit()?;
        let kept = self.tenants.num_flow_references() + self.queue.num_class_flows();
        let referring = self.live.len() + kept;
        let references = self.queue.flows().num_references();
        if references != referring {
            return Err(format!(
                "{references} references to flows are held, by {referring}"
            ));
        }
        let waiting = self
            .requests
            .iter()
            .filter_map(|(_, entry)| entry.waiting.as_ref());
        let places: u32 = waiting.map(|waiting| waiting.place.n()).sum();
        let reserved: u32 = self
            .reserved
            .values()
            .map(|reserved| reserved.place.n())
            .sum();
        if places + reserved != self.door.queued() {
            let queued = self.door.queued();
            return Err(format!(
                "{places} + {reserved} places are held, the door says {queued}"
            ));
        }
        let doors: u32 = self.classes.iter().map(|class| class.door.queued()).sum();
        if doors != self.door.queued() {
            return Err("the doors of the classes and the engine's disagree".into());
        }
        let accepted: u64 = self
            .classes
            .iter()
            .map(|class| class.metrics.accepted)
            .sum();
        if accepted + self.counters.rejected != self.counters.submitted {
            return Err(format!(
                "the classes accepted {accepted}, but {:?}",
                self.counters
            ));
        }
        self.audit_groups()?;
        for (key, tenant) in self.tenants.iter() {
            let of_tenant = self
                .requests
                .iter()
                .filter(|(_, entry)| entry.tenant == key);
            let (mut running, mut tokens) = (0, 0);
            for (_, entry) in of_tenant {
                if entry.request.stats.first_scheduled.is_some() {
                    running += entry.request.live_children;
                }
                tokens += entry
                    .waiting
                    .as_ref()
                    .map_or(0, |waiting| waiting.rate_tokens);
            }
            if running != tenant.num_running || tokens != tenant.waiting_tokens {
                return Err(format!(
                    "tenant {} runs {running} and waits for {tokens}, it says {} and {}",
                    tenant.name, tenant.num_running, tenant.waiting_tokens
                ));
            }
        }
        for (_, entry) in &self.requests {
            let Some(waiting) = &entry.waiting else {
                continue;
            };
            let is_armed = waiting
                .timer
                .is_none_or(|timer| self.timers.contains(&(timer, entry.request.id)));
            let fresh = &waiting.fresh;
            let owner = self.tenants.get(entry.tenant);
            let aside = owner.aside.get(&(fresh.standing, fresh.key.number));
            let known_aside = fresh.is_aside.then_some(&entry.request.id);
            if !is_armed || aside != known_aside {
                return Err(format!(
                    "{} has a timer or a standing nobody knows",
                    entry.request.id
                ));
            }
            let waits_before = |(_, other): (usize, &Entry)| {
                let waiting = other.waiting.as_ref();
                let other = waiting.filter(|_| other.tenant == entry.tenant);
                other.is_some_and(|other| {
                    !other.fresh.is_aside && other.fresh.standing == fresh.standing
                })
            };
            if fresh.is_aside
                && owner.held_since.is_none()
                && !self.requests.iter().any(waits_before)
            {
                return Err(format!("{} is aside for nobody", entry.request.id));
            }
        }
        Ok(())
    }

    /// Checks that nobody is lost in the books of a class or a tenant.
    fn audit_groups(&self) -> Result<(), String> {
        let classes = self.rules.policy().classes.iter().zip(&self.classes);
        let classes = classes.map(|(settings, class)| (settings.name.as_str(), class.metrics));
        let gone = [("others", *self.tenants.other_metrics())];
        let by_class: Vec<_> = classes.collect();
        let by_tenant: Vec<_> = self.tenants.metrics().chain(gone).collect();
        for groups in [&by_class, &by_tenant] {
            let (mut live, mut waiting, mut output_tokens) = (0, 0, 0);
            for (name, metrics) in groups {
                if metrics.accepted != metrics.ends() + metrics.live {
                    return Err(format!("{name} lost a request: {metrics:?}"));
                }
                if metrics.rejected != metrics.rejections.total() {
                    return Err(format!("{name} rejected for no reason: {metrics:?}"));
                }
                live += metrics.live;
                waiting += metrics.waiting;
                output_tokens += metrics.work.output_tokens;
            }
            let never_scheduled = self.requests.iter().filter(|(_, e)| e.waiting.is_some());
            let expected = (self.live.len() as u64, never_scheduled.count() as u64);
            if (live, waiting) != expected || output_tokens != self.counters.output_tokens {
                return Err(format!(
                    "groups have {live} requests, {waiting} of them waiting, and wrote \
                     {output_tokens} tokens; it is {expected:?} and {:?}",
                    self.counters
                ));
            }
        }
        Ok(())
    }
}
