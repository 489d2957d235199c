//! The waiting queue: who is next.
//!
//! In this order: promoted requests, oldest first; then level by level, the highest first, what was
//! preempted (oldest first) and then the fresh; last, best effort. Within a level the flow whose turn it
//! is ([`crate::waiting::fairness`]) gives its first request ([`crate::waiting::order`]).
//!
//! Keys are a strict total order that is fixed when a request begins to wait, so nothing is ever
//! sorted: the next request, an insertion and a removal are O(log n) in what waits, and a decision never
//! looks at the others.

mod behind;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::policy::{ClassId, Rules, Sharing};
use crate::request::SequenceKey;
use crate::waiting::fairness::{FlowKey, Flows};
use crate::waiting::order::{OrderArena, OrderKey, OrderTree, Units};
use crate::waiting::tenants::{Tenant, TenantKey, Tenants};

pub use behind::Behind;

/// Position by arrival: the request's number, then the child's. Older is smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    /// Number of the request, in order of submission.
    pub request: u64,
    /// Which of its answers.
    pub child: u32,
}

/// What a waiting request is expected to need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Priced service.
    pub units: Units,
    /// Tokens to compute before its first output.
    pub prefill_tokens: u64,
    /// Rows.
    pub rows: u64,
    /// Blocks to begin with.
    pub blocks: u64,
}

impl Work {
    fn add(&mut self, other: Work) {
        self.units += other.units;
        self.prefill_tokens += other.prefill_tokens;
        self.rows += other.rows;
        self.blocks += other.blocks;
    }

    fn remove(&mut self, other: Work) {
        self.units -= other.units;
        self.prefill_tokens -= other.prefill_tokens;
        self.rows -= other.rows;
        self.blocks -= other.blocks;
    }

    /// The part of it that `units` are of all its units.
    #[must_use]
    pub fn part(self, units: Units) -> Work {
        let share = if self.units == 0 {
            1.0
        } else {
            (units as f64 / self.units as f64).min(1.0)
        };
        let part = |all: u64| (all as f64 * share) as u64;
        Work {
            units: part(self.units),
            prefill_tokens: part(self.prefill_tokens),
            rows: part(self.rows),
            blocks: part(self.blocks),
        }
    }

    /// It without `other`.
    #[must_use]
    pub fn less(mut self, other: Work) -> Work {
        self.remove(other);
        self
    }

    /// Both together.
    #[must_use]
    pub fn plus(mut self, other: Work) -> Work {
        self.add(other);
        self
    }
}

/// Where a request waits that was never scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// In its flow.
    Flow,
    /// Ahead of everything that was not promoted.
    Promoted,
    /// Behind everything else.
    BestEffort,
}

/// A request that waits and was never scheduled.
#[derive(Clone, Copy, Debug)]
pub struct Fresh {
    /// Its only sequence.
    pub sequence: SequenceKey,
    /// Index of its level, 0 being the highest.
    pub level: usize,
    /// Its flow.
    pub leaf: FlowKey,
    /// Where it stands in it.
    pub key: OrderKey,
    /// What it is expected to need.
    pub work: Work,
    /// Where it waits.
    pub standing: Standing,
    /// Set aside until its tenant is let go; nobody in a flow ever is, because flows are held.
    pub is_aside: bool,
    /// Its class promises to promote it.
    pub is_promised: bool,
}

/// Who is next, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A promoted request.
    Promoted(SequenceKey),
    /// A preempted sequence of a level.
    Returning(SequenceKey, usize),
    /// The first request of a flow of a level.
    Fresh(SequenceKey, usize, FlowKey),
}

impl Next {
    /// The sequence.
    pub fn sequence(self) -> SequenceKey {
        match self {
            Self::Promoted(key) | Self::Returning(key, _) | Self::Fresh(key, ..) => key,
        }
    }
}

struct Level {
    tier: i32,
    root: FlowKey,
    /// Preempted sequences and what they need.
    returning: BTreeMap<Arrival, (SequenceKey, Work)>,
    /// Fresh requests by number, those of best effort that were set aside too; the newest may be shed
    /// first.
    fresh: OrderTree,
    /// All fresh requests in one order, where siblings share first come, first served.
    merged: OrderTree,
    work: Work,
}

/// Sequences that wait for a row and memory.
pub struct WaitingQueue {
    by_service: bool,
    flows: Flows,
    orders: OrderArena,
    /// The highest first; the last one is best effort.
    levels: Vec<Level>,
    /// The flow of each class, where siblings share by service.
    classes: Vec<FlowKey>,
    /// Name of the user of requests that name none.
    nobody: Arc<str>,
    /// Those that were promoted, and those of best effort, by number; without whom was set aside.
    promoted: BTreeMap<u64, SequenceKey>,
    best_effort: BTreeMap<u64, SequenceKey>,
    promoted_work: Work,
    promised_work: Work,
    num_waiting: usize,
}

impl WaitingQueue {
    /// An empty queue for the levels of these rules.
    pub fn new(rules: &Rules) -> Self {
        let by_service = rules.policy().sharing == Sharing::Fair;
        let mut flows = Flows::new(by_service);
        let mut levels: Vec<i32> = rules.policy().classes.iter().map(|c| c.level).collect();
        levels.sort_unstable_by(|a, b| b.cmp(a));
        levels.dedup();
        let mut level = |tier| Level {
            tier,
            root: flows.add_root(),
            returning: BTreeMap::new(),
            fresh: OrderTree::default(),
            merged: OrderTree::default(),
            work: Work::default(),
        };
        let mut levels: Vec<Level> = levels.into_iter().map(&mut level).collect();
        levels.push(level(i32::MIN));
        let mut classes = Vec::new();
        if by_service {
            for class in &rules.policy().classes {
                let index = levels.partition_point(|level| level.tier > class.level);
                let name = class.name.as_str().into();
                classes.push(flows.acquire(levels[index].root, &name, class.weight));
            }
        }
        Self {
            by_service,
            classes,
            nobody: "".into(),
            flows,
            orders: OrderArena::default(),
            levels,
            promoted: BTreeMap::new(),
            best_effort: BTreeMap::new(),
            promoted_work: Work::default(),
            promised_work: Work::default(),
            num_waiting: 0,
        }
    }

    /// Levels, best effort included.
    pub fn num_levels(&self) -> usize {
        self.levels.len()
    }

    /// Flows of classes; they are kept for ever.
    pub fn num_class_flows(&self) -> usize {
        self.classes.len()
    }

    /// Index of a level.
    pub fn level_index(&self, level: i32) -> usize {
        self.levels.partition_point(|other| other.tier > level)
    }

    /// The flow of a tenant's user in a class, with one more reference to it.
    pub fn acquire_flow(
        &mut self,
        rules: &Rules,
        class: ClassId,
        tenants: &mut Tenants,
        tenant: TenantKey,
        user: Option<&Arc<str>>,
    ) -> FlowKey {
        while let Some(orphan) = tenants.pop_orphan() {
            self.flows.release(orphan);
        }
        let owner = tenants.get(tenant);
        let known = owner.flows.iter().find(|&&(of, _)| of == class);
        let of_tenant = match known {
            Some(&(_, flow)) => flow,
            None => self.add_tenant_flow(rules, class, tenants.get_mut(tenant)),
        };
        if !self.by_service {
            self.flows.keep(of_tenant);
            return of_tenant;
        }
        let user = user.unwrap_or(&self.nobody);
        self.flows.acquire(of_tenant, user, 1.0)
    }

    /// The flow of a tenant in a class. It is kept while there is the tenant: what it was served stays on
    /// the books.
    fn add_tenant_flow(&mut self, rules: &Rules, class: ClassId, owner: &mut Tenant) -> FlowKey {
        let parent = if self.by_service {
            self.classes[class.0 as usize]
        } else {
            self.levels[self.level_index(rules.class(class).level)].root
        };
        let weight = owner.rules.settings.weight;
        let flow = self.flows.acquire(parent, &owner.name, weight);
        owner.flows.push((class, flow));
        if owner.held_since.is_some() {
            self.flows.set_held(flow, true, None);
        }
        flow
    }

    /// Applies the weights of other rules, whose classes are the same.
    pub fn reload(&mut self, rules: &Rules) {
        for (class, &flow) in rules.policy().classes.iter().zip(&self.classes) {
            self.flows.set_weight(flow, class.weight);
        }
    }

    /// Gives a reference to a flow back.
    pub fn release_flow(&mut self, leaf: FlowKey) {
        self.flows.release(leaf);
    }

    /// The flows' counters.
    pub fn flows_mut(&mut self) -> &mut Flows {
        &mut self.flows
    }

    /// The flows' counters.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// Lets a fresh request wait in its flow.
    pub fn push_fresh(&mut self, fresh: &Fresh) {
        debug_assert_eq!(fresh.standing, Standing::Flow);
        self.num_waiting += 1;
        if fresh.is_promised {
            self.promised_work.add(fresh.work);
        }
        self.stand(fresh);
    }

    fn stand(&mut self, fresh: &Fresh) {
        match fresh.standing {
            Standing::Flow => {
                self.enter_level(fresh.level, fresh);
                self.enter_flow(fresh);
            }
            Standing::Promoted => {
                self.promoted_work.add(fresh.work);
                if !fresh.is_aside {
                    self.promoted.insert(fresh.key.number, fresh.sequence);
                }
            }
            Standing::BestEffort => {
                self.enter_level(self.levels.len() - 1, fresh);
                if !fresh.is_aside {
                    self.best_effort.insert(fresh.key.number, fresh.sequence);
                }
            }
        }
    }

    fn enter_level(&mut self, index: usize, fresh: &Fresh) {
        let level = &mut self.levels[index];
        level.work.add(fresh.work);
        let key = OrderKey::by_number(fresh.key.number);
        self.orders.insert(&mut level.fresh, key, fresh.sequence, 0);
    }

    fn leave_level(&mut self, index: usize, fresh: &Fresh) {
        let level = &mut self.levels[index];
        level.work.remove(fresh.work);
        let key = OrderKey::by_number(fresh.key.number);
        let removed = self.orders.remove(&mut level.fresh, key);
        debug_assert!(removed, "not in its level");
    }

    fn enter_flow(&mut self, fresh: &Fresh) {
        let Fresh {
            leaf,
            key,
            sequence,
            work,
            ..
        } = *fresh;
        let tree = self.flows.waiting_mut(leaf);
        self.orders.insert(tree, key, sequence, work.units);
        if !self.by_service {
            let merged = &mut self.levels[fresh.level].merged;
            self.orders.insert(merged, key, sequence, work.units);
        }
        let first = self.first_key(leaf);
        self.flows.changed(leaf, work.units, 0, first);
    }

    fn leave_flow(&mut self, fresh: &Fresh) {
        let tree = self.flows.waiting_mut(fresh.leaf);
        let removed = self.orders.remove(tree, fresh.key);
        debug_assert!(removed, "not in its flow");
        if !self.by_service {
            let merged = &mut self.levels[fresh.level].merged;
            self.orders.remove(merged, fresh.key);
        }
        let first = self.first_key(fresh.leaf);
        self.flows.changed(fresh.leaf, 0, fresh.work.units, first);
    }

    fn first_key(&self, leaf: FlowKey) -> Option<OrderKey> {
        let first = self.orders.first(self.flows.waiting(leaf));
        first.map(|(key, _)| key)
    }

    /// Takes a fresh request out, wherever it stands.
    pub fn remove_fresh(&mut self, fresh: &Fresh) {
        self.num_waiting -= 1;
        if fresh.is_promised {
            self.promised_work.remove(fresh.work);
        }
        self.leave(fresh);
    }

    fn leave(&mut self, fresh: &Fresh) {
        match fresh.standing {
            Standing::Flow => {
                self.leave_level(fresh.level, fresh);
                self.leave_flow(fresh);
            }
            Standing::Promoted => {
                self.promoted.remove(&fresh.key.number);
                self.promoted_work.remove(fresh.work);
            }
            Standing::BestEffort => {
                self.leave_level(self.levels.len() - 1, fresh);
                self.best_effort.remove(&fresh.key.number);
            }
        }
    }

    /// Moves a fresh request to where `standing` says.
    pub fn move_to(&mut self, fresh: &mut Fresh, standing: Standing) {
        self.leave(fresh);
        fresh.standing = standing;
        fresh.is_aside = false;
        self.stand(fresh);
    }

    /// Sets a fresh request that waits outside its flow aside, or lets it wait again.
    pub fn set_aside(&mut self, fresh: &mut Fresh, aside: bool) {
        debug_assert_ne!(fresh.standing, Standing::Flow);
        self.leave(fresh);
        fresh.is_aside = aside;
        self.stand(fresh);
    }

    /// Lets a preempted sequence of a level wait.
    pub fn push_returning(
        &mut self,
        level: usize,
        arrival: Arrival,
        sequence: SequenceKey,
        work: Work,
    ) {
        self.num_waiting += 1;
        self.levels[level].work.add(work);
        let previous = self.levels[level]
            .returning
            .insert(arrival, (sequence, work));
        debug_assert!(previous.is_none(), "two sequences with one arrival");
    }

    /// Takes a preempted sequence out; false if it does not wait.
    pub fn remove_returning(&mut self, level: usize, arrival: Arrival) -> bool {
        let Some((_, work)) = self.levels[level].returning.remove(&arrival) else {
            return false;
        };
        self.levels[level].work.remove(work);
        self.num_waiting -= 1;
        true
    }

    /// Who is next.
    pub fn peek(&mut self) -> Option<Next> {
        if self.num_waiting == 0 {
            return None;
        }
        if let Some((_, &key)) = self.promoted.first_key_value() {
            return Some(Next::Promoted(key));
        }
        (0..self.levels.len()).find_map(|index| {
            let returning = &self.levels[index].returning;
            match returning.first_key_value() {
                Some((_, &(key, _))) => Some(Next::Returning(key, index)),
                None => self.peek_fresh(index),
            }
        })
    }

    /// Who is next of the fresh requests of a level.
    pub fn peek_fresh(&mut self, index: usize) -> Option<Next> {
        let level = &self.levels[index];
        if index + 1 == self.levels.len() {
            let first = self.best_effort.first_key_value();
            return first.map(|(_, &key)| Next::Fresh(key, index, level.root));
        }
        let leaf = self.flows.next_leaf(level.root)?;
        let first = self.orders.first(self.flows.waiting(leaf));
        first.map(|(_, key)| Next::Fresh(key, index, leaf))
    }

    /// The level of the next, which costs less than to say who it is; `None` if nobody is, or if it was
    /// promoted.
    pub fn next_level(&self) -> Option<usize> {
        if self.num_waiting == 0 || !self.promoted.is_empty() {
            return None;
        }
        let last = self.levels.len() - 1;
        let has_next = |(index, level): &(usize, &Level)| {
            !level.returning.is_empty()
                || self.flows.has_eligible(level.root)
                || (*index == last && !self.best_effort.is_empty())
        };
        let mut levels = self.levels.iter().enumerate();
        levels.find(has_next).map(|(index, _)| index)
    }

    /// Calls `visit` with the first `count` requests of a flow, in order.
    pub fn visit_first(&self, leaf: FlowKey, count: usize, visit: impl FnMut(SequenceKey)) {
        self.orders
            .visit_first(self.flows.waiting(leaf), count, visit);
    }

    /// Holds the flows of a tenant, or lets them go.
    pub fn set_held(&mut self, flows: &[(ClassId, FlowKey)], held: bool) {
        for &(_, flow) in flows {
            let first = self.first_key(flow);
            self.flows.set_held(flow, held, first);
        }
    }

    /// What is served before a request that is about to wait in a flow: promoted requests, everything of
    /// higher levels, and what of its own level the order puts in front of it.
    pub fn work_before(&self, level: usize, leaf: FlowKey, key: OrderKey) -> Work {
        let own = &self.levels[level];
        let units = if self.by_service {
            let first = self.orders.total_before(self.flows.waiting(leaf), key);
            self.flows.work_before(leaf, first)
        } else {
            self.orders.total_before(own.merged, key)
        };
        let above = self.levels[..level].iter();
        above
            .fold(self.promoted_work, |sum, level| sum.plus(level.work))
            .plus(own.work.part(units))
    }

    /// Everything that waits.
    pub fn work(&self) -> Work {
        self.levels
            .iter()
            .fold(self.promoted_work, |sum, level| sum.plus(level.work))
    }

    /// Fresh requests that were not promoted, of level number `from` and below: the lowest level first,
    /// and the newest of it first.
    pub fn least_important(&self, from: usize) -> impl Iterator<Item = SequenceKey> {
        let levels = self.levels[from..].iter().rev();
        let newest_first = levels.flat_map(|level| self.orders.iter_back(level.fresh));
        newest_first.map(|(_, key)| key)
    }

    /// What waits of those that were promised to be promoted.
    pub fn promised_work(&self) -> Work {
        self.promised_work
    }

    /// The oldest fresh request that waits and was not set aside.
    fn oldest_fresh(&self) -> Option<(u64, SequenceKey)> {
        let flows = &self.levels[..self.levels.len() - 1];
        let fresh = flows.iter().map(|level| self.orders.first(level.fresh));
        let fresh = fresh
            .flatten()
            .map(|(key, sequence)| (key.number, sequence));
        let others = [&self.promoted, &self.best_effort].into_iter();
        let others = others.filter_map(|those| those.first_key_value());
        fresh
            .chain(others.map(|(&number, &key)| (number, key)))
            .min_by_key(|&(number, _)| number)
    }

    /// Number of the oldest fresh request.
    pub fn oldest(&self) -> Option<u64> {
        self.oldest_fresh().map(|(number, _)| number)
    }

    /// The oldest fresh request.
    pub fn oldest_sequence(&self) -> Option<SequenceKey> {
        self.oldest_fresh().map(|(_, key)| key)
    }

    /// Whether a fresh request is the first that waits in its flow.
    pub fn is_first(&self, leaf: FlowKey, key: SequenceKey) -> bool {
        let first = self.orders.first(self.flows.waiting(leaf));
        first.is_some_and(|(_, first)| first == key)
    }

    /// Times that the first of a flow was passed over since it became the first.
    pub fn passes(&self, leaf: FlowKey) -> u32 {
        self.flows.passes(leaf)
    }

    /// The first of a flow was admitted, or another one ahead of it.
    pub fn left(&mut self, leaf: FlowKey, was_first: bool) {
        let passes = if was_first { 0 } else { self.passes(leaf) + 1 };
        self.flows.set_passes(leaf, passes);
    }

    /// Sequences that wait.
    pub fn len(&self) -> usize {
        self.num_waiting
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.num_waiting == 0
    }
}
