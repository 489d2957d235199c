//! Tenants: who they are, what runs for them, and what their token rate allows.
//!
//! Tenants that the policy names exist always; others exist while they are referred to. A tenant that
//! has reached its bound of running answers or used up its rate is held: nothing of it is scheduled
//! until an answer ends or the rate has caught up.
//!
//! The rate is a virtual clock (GCRA, ITU-T I.371): each token moves `paid_until` on by its share of a
//! second, and the tenant is held while that is further ahead of the time than the burst allows.

use std::collections::BTreeMap;
use std::sync::Arc;

use slab::Slab;

use crate::config::policy::{ClassId, Rules, TenantRules};
use crate::metrics::{GroupMetrics, WorkMetrics};
use crate::predict::output_length::LengthBelief;
use crate::request::{RequestId, Time};
use crate::waiting::fairness::FlowKey;
use crate::waiting::gate::Door;
use crate::waiting::queue::{Fresh, Standing};

/// Names a tenant while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TenantKey(u32);

/// Unnamed tenants that may be remembered for their rate alone before any is forgotten.
const MAX_REMEMBERED: usize = 4_096;

/// Tenants that are gone whose counters are remembered each for itself; those of others are summed up.
const MAX_DEPARTED: usize = 1_024;

/// Tokens a second, as a virtual clock.
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// Nanoseconds of a token.
    token: u64,
    /// Nanoseconds that may be used ahead.
    burst: u64,
    /// When the tokens used are paid for, in nanoseconds.
    paid_until: u64,
}

/// A tenant.
pub struct Tenant {
    /// Its name.
    pub name: Arc<str>,
    /// Its settings.
    pub rules: TenantRules,
    /// What of it is at the door and waiting.
    pub door: Door,
    /// Answers that were scheduled and have not ended.
    pub num_running: u32,
    /// Tokens that its waiting requests are expected to need.
    pub waiting_tokens: u64,
    /// Its flow in each class (in each level where siblings share first come, first served).
    pub flows: Vec<(ClassId, FlowKey)>,
    /// Requests that were set aside until it is let go, by where they wait and their number.
    pub aside: BTreeMap<(Standing, u64), RequestId>,
    /// Since when it is held, if it is.
    pub held_since: Option<Time>,
    /// Until when its rate holds it, if that is why.
    pub held_until: Option<Time>,
    /// Microseconds for which it was held before.
    pub held_us: u64,
    /// What became of its requests; what was done for them is in [`Tenants`].
    pub metrics: GroupMetrics,
    /// Output lengths of its answers, by class.
    lengths: Vec<(ClassId, LengthBelief)>,
    is_named: bool,
    references: u32,
    rate: Option<Rate>,
}

impl Tenant {
    /// An answer of a class ended.
    pub fn learn_length(&mut self, class: ClassId, tokens: u32) {
        let known = self.lengths.iter().position(|&(of, _)| of == class);
        let at = known.unwrap_or_else(|| {
            self.lengths.push((class, LengthBelief::default()));
            self.lengths.len() - 1
        });
        self.lengths[at].1.learn(tokens);
    }

    /// Lengths of its answers of a class, if any ended.
    pub fn lengths(&self, class: ClassId) -> Option<&LengthBelief> {
        let known = self.lengths.iter().find(|(of, _)| *of == class);
        known.map(|(_, lengths)| lengths)
    }

    /// Takes tokens of its rate.
    pub fn use_tokens(&mut self, now: Time, tokens: u64) {
        if let Some(rate) = &mut self.rate {
            let now_ns = now.0.saturating_mul(1_000);
            let price = tokens.saturating_mul(rate.token);
            rate.paid_until = rate.paid_until.max(now_ns).saturating_add(price);
        }
    }

    /// Until when the rate holds it, if it does, were `tokens` more used now.
    pub fn rate_holds_until(&self, now: Time, tokens: u64) -> Option<Time> {
        let rate = self.rate?;
        let paid_until = rate.paid_until.max(now.0.saturating_mul(1_000));
        let ahead = paid_until.saturating_add(tokens.saturating_mul(rate.token));
        let until = Time(ahead.saturating_sub(rate.burst).div_ceil(1_000));
        (until > now).then_some(until)
    }

    /// Whether it has to wait for an answer to end before `n` more may run. A request that was let in
    /// before the bound was lowered below its answers runs when nothing else of the tenant does.
    pub fn is_busy(&self, n: u32) -> bool {
        let bound = self.rules.settings.max_running;
        self.num_running > 0 && bound.is_some_and(|bound| self.num_running + n > bound)
    }

    /// How many of `free` slots its requests would get now.
    pub fn free_slots(&self, free: u32) -> u32 {
        if self.held_since.is_some() {
            return 0;
        }
        let bound = self.rules.settings.max_running.unwrap_or(u32::MAX);
        free.min(bound.saturating_sub(self.num_running))
    }

    /// The first request that may be called back to where it waits; none while it is held.
    pub fn first_aside(&self, standing: Standing) -> Option<RequestId> {
        let mut those = self.aside.range((standing, 0)..=(standing, u64::MAX));
        let first = those.next().map(|(_, &id)| id);
        first.filter(|_| self.held_since.is_none())
    }

    /// A request is not aside any more, if it was.
    pub fn forget_aside(&mut self, fresh: &Fresh) {
        if fresh.is_aside {
            self.aside.remove(&(fresh.standing, fresh.key.number));
        }
    }

    /// Whether the policy names it.
    pub fn is_named(&self) -> bool {
        self.is_named
    }

    /// Microseconds for which it has been held, until now.
    pub fn held_us(&self, now: Time) -> u64 {
        self.held_us + self.held_since.map_or(0, |since| now.since_us(since))
    }

    fn apply(&mut self, rules: TenantRules) {
        let settings = &rules.settings;
        self.rate = settings.tokens_per_second.map(|rate| {
            let token = 1_000_000_000 / rate.min(1_000_000_000);
            Rate {
                token,
                burst: settings.burst_tokens.unwrap_or(rate).saturating_mul(token),
                paid_until: self.rate.map_or(0, |old| old.paid_until),
            }
        });
        self.rules = rules;
    }
}

/// All tenants.
pub struct Tenants {
    slab: Slab<Tenant>,
    /// By the tenant's number: each step counts for many tenants, and has to find little else there.
    work: Vec<WorkMetrics>,
    by_name: BTreeMap<Arc<str>, TenantKey>,
    forget_at: usize,
    any_has_rate: bool,
    /// Flows of tenants that are gone.
    orphans: Vec<FlowKey>,
    /// What became of the requests of tenants that are gone, for when they come back.
    departed: BTreeMap<Arc<str>, GroupMetrics>,
    /// The same of those beyond [`MAX_DEPARTED`], summed up.
    others: GroupMetrics,
}

impl Tenants {
    /// The tenants that the rules name.
    pub fn new(rules: &Rules) -> Self {
        let mut tenants = Self {
            slab: Slab::new(),
            work: Vec::new(),
            by_name: BTreeMap::new(),
            forget_at: MAX_REMEMBERED,
            any_has_rate: false,
            orphans: Vec::new(),
            departed: BTreeMap::new(),
            others: GroupMetrics::default(),
        };
        tenants.reload(rules);
        tenants
    }

    /// Applies other rules to all tenants, and adds those that are new.
    pub fn reload(&mut self, rules: &Rules) {
        let policy = rules.policy();
        let mut settings = policy.tenants.values().chain([&policy.default_tenant]);
        self.any_has_rate = settings.any(|tenant| tenant.tokens_per_second.is_some());
        let names = policy.tenants.keys();
        for name in names {
            if !self.by_name.contains_key(name.as_str()) {
                self.add(name, rules);
            }
        }
        for (_, tenant) in &mut self.slab {
            tenant.is_named = rules.policy().tenants.contains_key(&*tenant.name);
            tenant.apply(rules.tenant(&tenant.name).clone());
        }
    }

    /// The tenant of that name, with one more reference to it.
    pub fn acquire(&mut self, now: Time, name: &str, rules: &Rules) -> TenantKey {
        let known = self.by_name.get(name).copied();
        let key = known.unwrap_or_else(|| {
            self.forget_idle(now);
            self.add(name, rules)
        });
        self.slab[key.0 as usize].references += 1;
        key
    }

    /// Gives a reference back.
    pub fn release(&mut self, key: TenantKey) {
        let tenant = &mut self.slab[key.0 as usize];
        tenant.references -= 1;
        if tenant.references == 0 && !tenant.is_named && tenant.rate.is_none() {
            self.remove(key);
        }
    }

    fn add(&mut self, name: &str, rules: &Rules) -> TenantKey {
        let name: Arc<str> = name.into();
        let mut metrics = self.departed.remove(&name).unwrap_or_default();
        let work = std::mem::take(&mut metrics.work);
        let mut tenant = Tenant {
            name: Arc::clone(&name),
            rules: rules.tenant(&name).clone(),
            door: Door::default(),
            num_running: 0,
            waiting_tokens: 0,
            flows: Vec::new(),
            aside: BTreeMap::new(),
            held_since: None,
            held_until: None,
            held_us: 0,
            metrics,
            lengths: Vec::new(),
            is_named: rules.policy().tenants.contains_key(&*name),
            references: 0,
            rate: None,
        };
        tenant.apply(rules.tenant(&name).clone());
        let at = self.slab.insert(tenant);
        if self.work.len() <= at {
            self.work.resize_with(at + 1, WorkMetrics::default);
        }
        self.work[at] = work;
        let key = TenantKey(at as u32);
        self.by_name.insert(name, key);
        key
    }

    fn remove(&mut self, key: TenantKey) {
        let metrics = self.metrics_of(key);
        let tenant = self.slab.remove(key.0 as usize);
        self.by_name.remove(&tenant.name);
        self.orphans
            .extend(tenant.flows.into_iter().map(|(_, flow)| flow));
        if self.departed.len() < MAX_DEPARTED {
            self.departed.insert(tenant.name, metrics);
        } else {
            self.others.absorb(&metrics);
        }
    }

    fn metrics_of(&self, key: TenantKey) -> GroupMetrics {
        GroupMetrics {
            work: self.work[key.0 as usize],
            ..self.get(key).metrics
        }
    }

    /// What became of the requests of each tenant: of those that are here, then of those that are gone,
    /// each in order of their names.
    pub fn metrics(&self) -> impl Iterator<Item = (&str, GroupMetrics)> {
        let here = self
            .iter()
            .map(|(key, tenant)| (&*tenant.name, self.metrics_of(key)));
        let gone = self.departed.iter();
        here.chain(gone.map(|(name, metrics)| (&**name, *metrics)))
    }

    /// What was done for a tenant's requests, to be counted on.
    pub fn work_mut(&mut self, key: TenantKey) -> &mut WorkMetrics {
        &mut self.work[key.0 as usize]
    }

    /// What became of the requests of tenants that are not told one by one.
    pub fn other_metrics(&self) -> &GroupMetrics {
        &self.others
    }

    /// A flow that a tenant referred to that is gone.
    pub fn pop_orphan(&mut self) -> Option<FlowKey> {
        self.orphans.pop()
    }

    /// References to flows that tenants have, those of tenants that are gone included.
    pub fn num_flow_references(&self) -> usize {
        let held = self.slab.iter().map(|(_, tenant)| tenant.flows.len());
        held.sum::<usize>() + self.orphans.len()
    }

    /// Forgets idle tenants that the rules name no more; nobody may be held.
    pub fn forget_unnamed(&mut self) {
        let idle =
            |tenant: &Tenant| tenant.references == 0 && !tenant.is_named && tenant.rate.is_none();
        let idle = self.slab.iter().filter(|(_, tenant)| idle(tenant));
        let idle: Vec<TenantKey> = idle.map(|(at, _)| TenantKey(at as u32)).collect();
        for key in idle {
            self.remove(key);
        }
    }

    /// Forgets unnamed tenants whose rate has caught up, whenever twice as many are remembered.
    fn forget_idle(&mut self, now: Time) {
        if self.slab.len() < self.forget_at {
            return;
        }
        let idle = self.slab.iter().filter(|(_, tenant)| {
            let owes = tenant
                .rate
                .is_some_and(|rate| rate.paid_until > now.0.saturating_mul(1_000));
            tenant.references == 0 && !tenant.is_named && !owes && tenant.held_since.is_none()
        });
        let idle: Vec<TenantKey> = idle.map(|(at, _)| TenantKey(at as u32)).collect();
        for key in idle {
            self.remove(key);
        }
        self.forget_at = 2 * self.slab.len().max(MAX_REMEMBERED);
    }

    /// Whether any tenant has a token rate.
    pub fn any_has_rate(&self) -> bool {
        self.any_has_rate
    }

    /// A tenant.
    pub fn get(&self, key: TenantKey) -> &Tenant {
        &self.slab[key.0 as usize]
    }

    /// A tenant, to be changed.
    pub fn get_mut(&mut self, key: TenantKey) -> &mut Tenant {
        &mut self.slab[key.0 as usize]
    }

    /// All tenants, in order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (TenantKey, &Tenant)> {
        self.by_name.values().map(|&key| (key, self.get(key)))
    }
}
