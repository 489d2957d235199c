//! Who was served how much: a tree of flows with virtual counters.
//!
//! A flow stands for a class, a tenant of it, or a tenant's user. Service is charged to a leaf and to
//! everything above it. Among siblings the one with the least service for its weight is next (VTC,
//! Sheng et al., "Fairness in Serving Large Language Models", OSDI'24), or, where sharing is first come
//! first served, the one whose first request is.
//!
//! A flow that becomes eligible after a pause is lifted: to the least counter of its eligible siblings,
//! or, when there are none, to that of the sibling that left last. So it is neither credited for the
//! time it was away nor punished.
//!
//! Service only grows while a flow waits, but for refunds; so the set of eligible siblings is keyed by
//! what a counter was when it was last looked at, and only those at its front are brought up to date.
//! Charging costs an addition a tier, whoever waits.

mod charging;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use slab::Slab;

use crate::waiting::order::{OrderKey, OrderTree, Units};

/// Names a flow while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowKey(u32);

impl FlowKey {
    /// Its number; those of flows that are gone are used again.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Counters are lowered when one goes above this, which takes years.
const REBASE_ABOVE: u64 = 1 << 63;
/// What the least counter is lowered to: more than anything that can still be refunded.
const REBASE_TO: u64 = 1 << 61;
/// How far a counter may be above the least after that.
const MOST_DEBT: u64 = 1 << 62;
/// Idle children that owe and are remembered; beyond that the smallest debts are forgiven, because names
/// of users are the clients' to choose.
const MAX_IDLE: usize = 1 << 16;
/// Most that a counter moves at once, whatever the price and the weight: it never overflows.
const MOST_AT_ONCE: u64 = 1 << 60;
/// Weight 1 as the divisor of service: counters are units times this over the weight.
const UNIT_WEIGHT: f64 = (1_u64 << 20) as f64;

/// Where an eligible flow stands among its siblings. Service in the fair case, the first request in the
/// other; ties by number.
type SiblingKey = (OrderKey, FlowKey);

/// The part of a flow that every charge touches, small and by itself.
#[derive(Clone, Copy, Default)]
struct Account {
    /// Virtual counter: service over weight, and lifts.
    service: u64,
    /// What one unit of service adds to the counter.
    divisor: u64,
    /// Units that were really charged, less refunds.
    served: Units,
    parent: Option<FlowKey>,
}

impl Account {
    /// What `units` of service move its counter by.
    fn steps(&self, units: Units) -> u64 {
        units.saturating_mul(self.divisor).min(MOST_AT_ONCE)
    }
}

struct Flow {
    parent: Option<FlowKey>,
    /// Under which it stands among its parent's eligible children.
    standing: Option<SiblingKey>,
    /// May not run, whoever waits in it.
    held: bool,
    /// Units of everything that waits in it and below.
    backlog: Units,
    waiting: OrderTree,
    eligible: BTreeSet<SiblingKey>,
    /// Children that nobody refers to, by counter; dropped when a lift would give them as much.
    idle: BTreeSet<(u64, FlowKey)>,
    last_left: LastLeft,
    references: u32,
    /// Times that the first of its requests was passed over.
    passes: u32,
    name: Arc<str>,
}

/// Counter of the child that was eligible last.
#[derive(Clone, Copy)]
enum LastLeft {
    Nobody,
    Child(FlowKey),
    /// The child is gone; this was its counter.
    Counter(u64),
}

/// The tree.
pub struct Flows {
    slab: Slab<Flow>,
    /// By the flow's number.
    accounts: Vec<Account>,
    by_name: BTreeMap<(FlowKey, Arc<str>), FlowKey>,
    by_service: bool,
    rebase_above: u64,
    /// What [`Self::charge_all`] has summed up; empty outside it.
    above: Vec<(FlowKey, Units)>,
}

impl Flows {
    /// No flows; siblings share by service, or by who came first.
    pub fn new(by_service: bool) -> Self {
        Self {
            slab: Slab::new(),
            accounts: Vec::new(),
            by_name: BTreeMap::new(),
            by_service,
            rebase_above: REBASE_ABOVE,
            above: Vec::new(),
        }
    }

    /// A flow without a parent; it always exists.
    pub fn add_root(&mut self) -> FlowKey {
        self.add(None, "".into(), 1.0)
    }

    fn add(&mut self, parent: Option<FlowKey>, name: Arc<str>, weight: f64) -> FlowKey {
        let flow = Flow {
            parent,
            standing: None,
            held: false,
            backlog: 0,
            waiting: OrderTree::default(),
            eligible: BTreeSet::new(),
            idle: BTreeSet::new(),
            last_left: LastLeft::Nobody,
            references: 0,
            passes: 0,
            name,
        };
        let at = self.slab.insert(flow);
        if self.accounts.len() <= at {
            self.accounts.resize_with(at + 1, Account::default);
        }
        self.accounts[at] = Account {
            service: 0,
            divisor: divisor(weight),
            served: 0,
            parent,
        };
        FlowKey(at as u32)
    }

    fn account(&self, key: FlowKey) -> &Account {
        &self.accounts[key.0 as usize]
    }

    fn account_mut(&mut self, key: FlowKey) -> &mut Account {
        &mut self.accounts[key.0 as usize]
    }

    /// The child of `parent` with that name and weight, made where there is none, with one more
    /// reference.
    pub fn acquire(&mut self, parent: FlowKey, name: &Arc<str>, weight: f64) -> FlowKey {
        let known = self.by_name.get(&(parent, Arc::clone(name))).copied();
        let key = known.unwrap_or_else(|| {
            let key = self.add(Some(parent), Arc::clone(name), weight);
            self.by_name.insert((parent, Arc::clone(name)), key);
            self.flow_mut(parent).references += 1;
            key
        });
        self.set_weight(key, weight);
        let flow = self.flow_mut(key);
        flow.references += 1;
        if flow.references == 1 {
            let service = self.account(key).service;
            self.flow_mut(parent).idle.remove(&(service, key));
        }
        key
    }

    /// Gives a reference back. A flow that nobody refers to is dropped as soon as a lift would restore
    /// its counter.
    pub fn release(&mut self, key: FlowKey) {
        let flow = self.flow_mut(key);
        flow.references -= 1;
        let parent = flow.parent;
        let service = self.account(key).service;
        if let Some(parent) = parent.filter(|_| self.flow(key).references == 0) {
            self.flow_mut(parent).idle.insert((service, key));
            self.drop_idle(parent);
        }
    }

    /// The child of that name, if there is one.
    #[cfg(test)]
    fn child(&self, parent: FlowKey, name: &str) -> Option<FlowKey> {
        self.by_name.get(&(parent, Arc::from(name))).copied()
    }

    /// Takes one more reference.
    pub fn keep(&mut self, key: FlowKey) {
        self.flow_mut(key).references += 1;
    }

    fn flow(&self, key: FlowKey) -> &Flow {
        &self.slab[key.0 as usize]
    }

    fn flow_mut(&mut self, key: FlowKey) -> &mut Flow {
        &mut self.slab[key.0 as usize]
    }

    /// The order of the requests that wait in a leaf.
    pub fn waiting(&self, leaf: FlowKey) -> OrderTree {
        self.flow(leaf).waiting
    }

    /// The same, to be changed; [`Self::changed`] must follow.
    pub fn waiting_mut(&mut self, leaf: FlowKey) -> &mut OrderTree {
        &mut self.flow_mut(leaf).waiting
    }

    /// Times that the first request of a leaf was passed over.
    pub fn passes(&self, leaf: FlowKey) -> u32 {
        self.flow(leaf).passes
    }

    /// Sets that.
    pub fn set_passes(&mut self, leaf: FlowKey, passes: u32) {
        self.flow_mut(leaf).passes = passes;
    }

    /// Units that wait in a flow and below.
    pub fn backlog(&self, key: FlowKey) -> Units {
        self.flow(key).backlog
    }

    /// Service that a flow really received.
    pub fn served(&self, key: FlowKey) -> Units {
        self.account(key).served
    }

    /// What waits in `leaf` has changed: by `added` and `removed` units, and `first` is first now.
    pub fn changed(
        &mut self,
        leaf: FlowKey,
        added: Units,
        removed: Units,
        first: Option<OrderKey>,
    ) {
        let mut at = Some(leaf);
        while let Some(key) = at {
            let flow = self.flow_mut(key);
            flow.backlog = flow.backlog + added - removed;
            at = flow.parent;
        }
        self.settle(leaf, first);
    }

    /// Holds a flow, whoever waits in it, or lets it go; `first` is the first request that waits in it
    /// if it is a leaf.
    pub fn set_held(&mut self, key: FlowKey, held: bool, first: Option<OrderKey>) {
        self.flow_mut(key).held = held;
        self.settle(key, first);
    }

    /// Gives a flow another weight, from now on.
    pub fn set_weight(&mut self, key: FlowKey, weight: f64) {
        self.account_mut(key).divisor = divisor(weight);
    }

    /// Whether anything below `root` may run.
    pub fn has_eligible(&self, root: FlowKey) -> bool {
        !self.flow(root).eligible.is_empty()
    }

    /// The leaf whose turn it is below `root`.
    pub fn next_leaf(&mut self, root: FlowKey) -> Option<FlowKey> {
        let mut at = root;
        loop {
            match self.least(at) {
                Some(child) => at = child,
                None if at == root && self.flow(root).waiting.is_empty() => return None,
                None => return Some(at),
            }
        }
    }

    /// Appends the first `count` leaves below `root` that may run, in the order of their turns as the
    /// counters are now.
    pub fn first_leaves(&self, root: FlowKey, count: usize, leaves: &mut Vec<FlowKey>) {
        let flow = self.flow(root);
        if flow.eligible.is_empty() {
            if !flow.waiting.is_empty() {
                leaves.push(root);
            }
            return;
        }
        let begin = leaves.len();
        leaves.extend(flow.eligible.iter().map(|&(_, key)| key).take(count));
        if self.by_service {
            // Some were charged since they were put in their place.
            leaves[begin..].sort_unstable_by_key(|&key| (self.account(key).service, key));
        }
        let children = leaves.len() - begin;
        let is_leaf = |&key: &FlowKey| self.flow(key).eligible.is_empty();
        if leaves[begin..].iter().all(is_leaf) {
            return;
        }
        for at in begin..begin + children {
            if leaves.len() < begin + children + count {
                self.first_leaves(leaves[at], count, leaves);
            }
        }
        leaves.drain(begin..begin + children);
        leaves.truncate(begin + count);
    }

    /// Makes a flow eligible if it has something that may run, and ineligible if not, and then its
    /// parent likewise.
    fn settle(&mut self, key: FlowKey, first: Option<OrderKey>) {
        let flow = self.flow(key);
        let Some(parent) = flow.parent else {
            return;
        };
        let own = first.or_else(|| flow.eligible.first().map(|&(first, _)| first));
        let own = own.filter(|_| !flow.held);
        match (flow.standing, own) {
            (Some(old), None) => {
                self.flow_mut(key).standing = None;
                let parent_flow = self.flow_mut(parent);
                parent_flow.eligible.remove(&old);
                parent_flow.last_left = LastLeft::Child(key);
                self.settle(parent, None);
            }
            (None, Some(first)) => {
                let standing = if self.by_service {
                    service_key(self.lift(parent, key))
                } else {
                    first
                };
                self.flow_mut(key).standing = Some((standing, key));
                self.flow_mut(parent).eligible.insert((standing, key));
                self.settle(parent, None);
            }
            (Some(old), Some(first)) if !self.by_service && old.0 != first => {
                self.stand(parent, key, old, first);
                self.settle(parent, None);
            }
            (None, None) | (Some(_), Some(_)) => {}
        }
    }

    fn stand(&mut self, parent: FlowKey, key: FlowKey, old: SiblingKey, new: OrderKey) {
        self.flow_mut(key).standing = Some((new, key));
        let eligible = &mut self.flow_mut(parent).eligible;
        eligible.remove(&old);
        eligible.insert((new, key));
    }

    /// The eligible child that is next. Others that stand in front of it are brought up to date.
    fn least(&mut self, parent: FlowKey) -> Option<FlowKey> {
        loop {
            let mut eligible = self.flow(parent).eligible.iter();
            let &old = eligible.next()?;
            let key = old.1;
            if !self.by_service {
                return Some(key);
            }
            let place = (service_key(self.account(key).service), key);
            // All others are where they stand or behind it.
            if eligible.next().is_none_or(|&next| place < next) {
                return Some(key);
            }
            self.stand(parent, key, old, place.0);
        }
    }

    /// The counter that a child that becomes eligible is lifted to at least.
    fn floor(&mut self, parent: FlowKey) -> Option<u64> {
        if let Some(least) = self.least(parent) {
            return Some(self.account(least).service);
        }
        match self.flow(parent).last_left {
            LastLeft::Nobody => None,
            LastLeft::Child(key) => Some(self.account(key).service),
            LastLeft::Counter(service) => Some(service),
        }
    }

    fn lift(&mut self, parent: FlowKey, key: FlowKey) -> u64 {
        let floor = self.floor(parent).unwrap_or(0);
        let account = self.account_mut(key);
        account.service = account.service.max(floor);
        let service = account.service;
        self.drop_idle(parent);
        service
    }

    /// Drops the idle children that a lift would give their counter back, and what is too many.
    fn drop_idle(&mut self, parent: FlowKey) {
        let floor = if self.by_service {
            self.floor(parent).unwrap_or(u64::MAX)
        } else {
            u64::MAX
        };
        let mut dropped = 0;
        while let Some(&(service, key)) = self.flow(parent).idle.first() {
            if service > floor && self.flow(parent).idle.len() <= MAX_IDLE {
                break;
            }
            let flow = self.slab.remove(key.0 as usize);
            let parent_flow = self.flow_mut(parent);
            parent_flow.idle.pop_first();
            if matches!(parent_flow.last_left, LastLeft::Child(last) if last == key) {
                parent_flow.last_left = LastLeft::Counter(service);
            }
            self.by_name.remove(&(parent, flow.name));
            dropped += 1;
        }
        // The last one may take the parent along.
        for _ in 0..dropped {
            self.release(parent);
        }
    }

    /// Work of `key`'s siblings and of those of everything above it that is served before `units` of
    /// work in `key` are: each sibling gets ahead by what its weight and its counter allow, and never by
    /// more than waits in it. Looks at the [`SIBLINGS_LOOKED_AT`] next in line of each tier and takes the
    /// others to be like them on average.
    pub fn work_before(&self, key: FlowKey, units: Units) -> Units {
        let mut ahead = units;
        let mut at = key;
        while let Some(parent) = self.flow(at).parent {
            ahead += self.siblings_before(parent, at, ahead);
            at = parent;
        }
        ahead
    }

    fn siblings_before(&self, parent: FlowKey, key: FlowKey, units: Units) -> Units {
        let own = self.account(key);
        let eligible = &self.flow(parent).eligible;
        let first = eligible.first();
        let least = first.map_or(own.service, |&(_, key)| self.account(key).service);
        let until = own.service.max(least);
        let until = until.saturating_add(units.saturating_mul(own.divisor));
        let mut ahead = 0;
        let mut seen = 0;
        for &(_, sibling) in eligible.iter().take(SIBLINGS_LOOKED_AT) {
            if sibling != key {
                let account = self.account(sibling);
                let gap = until.saturating_sub(account.service) / account.divisor;
                ahead += self.flow(sibling).backlog.min(gap);
            }
            seen += 1;
        }
        match seen {
            0 => 0,
            seen => (u128::from(ahead) * eligible.len() as u128 / seen) as u64,
        }
    }

    /// Checks the books; says the first that disagrees. For tests: it is slow.
    pub fn audit(&self) -> Result<(), String> {
        for (at, flow) in &self.slab {
            let key = FlowKey(at as u32);
            let children = self.by_name.iter().filter(|((of, _), _)| *of == key);
            let backlogs: u64 = children.map(|(_, &c)| self.flow(c).backlog).sum();
            if flow.waiting.is_empty() && backlogs != flow.backlog {
                return Err(format!("{key:?} has a backlog that its children have not"));
            }
            let may_run = !flow.waiting.is_empty() || !flow.eligible.is_empty();
            if flow.parent.is_some() && flow.standing.is_some() != (may_run && !flow.held) {
                return Err(format!("{key:?} stands among its siblings wrongly"));
            }
            let idle = (self.account(key).service, key);
            let is_idle = flow.parent.map(|of| self.flow(of).idle.contains(&idle));
            if is_idle.is_some_and(|is_idle| is_idle != (flow.references == 0)) {
                return Err(format!(
                    "{key:?} is idle to one, and referred to by another"
                ));
            }
            let late = |&(key, child): &SiblingKey| {
                self.by_service && key.cost > self.account(child).service
            };
            if flow.eligible.iter().any(late) {
                return Err(format!("a child of {key:?} stands behind its counter"));
            }
            let stands =
                |&(key, child): &SiblingKey| self.flow(child).standing == Some((key, child));
            if !flow.eligible.iter().all(stands) {
                return Err(format!(
                    "a child of {key:?} stands elsewhere than it thinks"
                ));
            }
        }
        Ok(())
    }

    /// Flows that exist.
    pub fn num_flows(&self) -> usize {
        self.slab.len()
    }

    /// References to all flows, less those that flows have to their parents.
    pub fn num_references(&self) -> usize {
        let all = self.slab.iter().map(|(_, flow)| flow.references as usize);
        all.sum::<usize>() - self.by_name.len()
    }
}

/// Siblings of a tier that a prediction looks at.
const SIBLINGS_LOOKED_AT: usize = 128;

fn divisor(weight: f64) -> u64 {
    (UNIT_WEIGHT / weight).round() as u64
}

fn service_key(service: u64) -> OrderKey {
    OrderKey {
        priority: 0,
        cost: service,
        number: 0,
    }
}

#[cfg(test)]
mod tests;
