//! The requests of one flow, in order, with the work in front of any of them.
//!
//! Keys are fixed when a request begins to wait (see [`OrderKey`]), so an order is a search tree: a B-tree
//! whose entries know the work below them. Insertion, removal and the sum of the work in front of a key are
//! O(log n). Nobody has looked at a request for long when its turn comes, so what an operation costs is
//! memory that is read for the first time: a tree is low, a look at its first entry reads one or two cache
//! lines of each node, and taking that out moves nothing else. All trees share one arena, so that a flow
//! costs nothing but its root.
//!
//! Invariants: no node is empty. The key of an entry that leads to a node is not behind any key below that,
//! and behind all keys below the entries before it.

use crate::request::SequenceKey;

/// Where a waiting request stands among those of its flow; smaller is sooner, and no two are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct OrderKey {
    /// The client's own order within its class: lower is sooner.
    pub priority: i32,
    /// What the configured order says: predicted cost plus age, a deadline, or 0.
    pub cost: u64,
    /// Number of the request, in order of arrival.
    pub number: u64,
}

impl OrderKey {
    /// The key of an order by arrival alone.
    pub fn by_number(number: u64) -> Self {
        Self {
            number,
            ..Self::default()
        }
    }
}

/// Priced work, in thousandths of the price's unit.
pub type Units = u64;

const NONE: u32 = u32::MAX;
/// Most entries of a node: what fits eight cache lines.
const WIDTH: usize = 15;
/// A node with fewer gives them to a neighbour that has room, so that no two neighbours have hardly any.
const SPARSE: usize = WIDTH / 4;

/// A request, or a node of them. Its key's parts are apart, so that two fit a cache line.
#[derive(Clone, Copy, Default)]
struct Entry {
    cost: u64,
    number: u64,
    /// Units of the request, or of all below.
    units: Units,
    priority: i32,
    /// The sequence, or the node.
    link: u32,
}

impl Entry {
    fn new(key: OrderKey, units: Units, link: u32) -> Self {
        Self {
            cost: key.cost,
            number: key.number,
            units,
            priority: key.priority,
            link,
        }
    }

    fn key(&self) -> OrderKey {
        OrderKey {
            priority: self.priority,
            cost: self.cost,
            number: self.number,
        }
    }

    fn found(&self) -> (OrderKey, SequenceKey) {
        (self.key(), SequenceKey(self.link as usize))
    }
}

/// Entries in order, with room behind them and before them, where others have left.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Node {
    begin: u32,
    end: u32,
    places: [Entry; WIDTH],
}

impl Node {
    fn entries(&self) -> &[Entry] {
        &self.places[self.begin as usize..self.end as usize]
    }

    fn entry_mut(&mut self, position: usize) -> &mut Entry {
        &mut self.places[self.begin as usize + position]
    }

    fn len(&self) -> usize {
        (self.end - self.begin) as usize
    }

    /// Position of the last entry that is not behind `key`; of the first if all are.
    fn position_of(&self, key: OrderKey) -> usize {
        let others = self.entries().iter().skip(1);
        others.take_while(|entry| entry.key() <= key).count()
    }

    /// Puts an entry before the one at `position`; there is room.
    fn insert(&mut self, position: usize, entry: Entry) {
        if self.end as usize == WIDTH {
            self.places.copy_within(self.begin as usize.., 0);
            self.end -= self.begin;
            self.begin = 0;
        }
        let at = self.begin as usize + position;
        self.places.copy_within(at..self.end as usize, at + 1);
        self.places[at] = entry;
        self.end += 1;
    }

    /// Takes the entry at `position` out; the fewer of the others move up.
    fn remove(&mut self, position: usize) {
        let (begin, end) = (self.begin as usize, self.end as usize);
        let at = begin + position;
        if position < self.len() / 2 {
            self.places.copy_within(begin..at, begin + 1);
            self.begin += 1;
        } else {
            self.places.copy_within(at + 1..end, at);
            self.end -= 1;
        }
    }

    /// Makes it a node of these entries.
    fn fill(&mut self, entries: &[Entry]) {
        self.begin = 0;
        self.end = entries.len() as u32;
        self.places[..entries.len()].copy_from_slice(entries);
    }
}

/// One order; its nodes are in the [`OrderArena`] that made it.
#[derive(Clone, Copy, Debug)]
pub struct OrderTree {
    root: u32,
    /// Nodes between the root and a request.
    height: u32,
}

impl Default for OrderTree {
    fn default() -> Self {
        Self {
            root: NONE,
            height: 0,
        }
    }
}

impl OrderTree {
    /// Whether nobody waits in it.
    pub fn is_empty(self) -> bool {
        self.root == NONE
    }
}

/// The nodes of all orders.
#[derive(Default)]
pub struct OrderArena {
    nodes: Vec<Node>,
    free: Vec<u32>,
}

impl OrderArena {
    /// Adds a request with `units` of work.
    pub fn insert(
        &mut self,
        tree: &mut OrderTree,
        key: OrderKey,
        sequence: SequenceKey,
        units: Units,
    ) {
        let entry = Entry::new(key, units, sequence.0 as u32);
        if tree.is_empty() {
            tree.root = self.add(&[entry]).link;
        } else if let Some(split) = self.insert_below(tree.root, tree.height, entry) {
            tree.root = self.add(&[self.entry_of(tree.root), split]).link;
            tree.height += 1;
        }
    }

    /// Takes the request with `key` out; false if it is not there.
    pub fn remove(&mut self, tree: &mut OrderTree, key: OrderKey) -> bool {
        if tree.is_empty() || self.remove_below(tree.root, tree.height, key).is_none() {
            return false;
        }
        while let (height, &[only]) = (tree.height, self.entries(tree.root))
            && height > 0
        {
            self.free.push(tree.root);
            (tree.root, tree.height) = (only.link, height - 1);
        }
        if self.entries(tree.root).is_empty() {
            self.free.push(tree.root);
            *tree = OrderTree::default();
        }
        true
    }

    /// The first request.
    pub fn first(&self, tree: OrderTree) -> Option<(OrderKey, SequenceKey)> {
        self.outermost(tree, <[Entry]>::first)
    }

    /// The last request.
    fn last(&self, tree: OrderTree) -> Option<(OrderKey, SequenceKey)> {
        self.outermost(tree, <[Entry]>::last)
    }

    fn outermost(
        &self,
        tree: OrderTree,
        choose: impl Fn(&[Entry]) -> Option<&Entry>,
    ) -> Option<(OrderKey, SequenceKey)> {
        let mut at = tree.root;
        for _ in 0..tree.height {
            at = choose(self.entries(at))?.link;
        }
        choose(self.entries(at)).map(Entry::found)
    }

    /// The first request behind `key`.
    pub fn first_after(&self, tree: OrderTree, key: OrderKey) -> Option<(OrderKey, SequenceKey)> {
        self.first_after_below(tree.root, tree.height, key)
    }

    fn first_after_below(
        &self,
        at: u32,
        height: u32,
        key: OrderKey,
    ) -> Option<(OrderKey, SequenceKey)> {
        let node = self.nodes.get(at as usize)?;
        let mut entries = node.entries()[node.position_of(key)..].iter();
        // All below the second are behind the key, so no more than that is looked at.
        entries.find_map(|entry| match height {
            0 => Some(entry.found()).filter(|&(found, _)| found > key),
            _ => self.first_after_below(entry.link, height - 1, key),
        })
    }

    /// The last request before `key`.
    fn last_before(&self, tree: OrderTree, key: OrderKey) -> Option<(OrderKey, SequenceKey)> {
        self.last_before_below(tree.root, tree.height, key)
    }

    fn last_before_below(
        &self,
        at: u32,
        height: u32,
        key: OrderKey,
    ) -> Option<(OrderKey, SequenceKey)> {
        let node = self.nodes.get(at as usize)?;
        let mut entries = node.entries()[..=node.position_of(key)].iter().rev();
        entries.find_map(|entry| match height {
            0 => Some(entry.found()).filter(|&(found, _)| found < key),
            _ => self.last_before_below(entry.link, height - 1, key),
        })
    }

    /// All requests, the last first.
    pub fn iter_back(&self, tree: OrderTree) -> impl Iterator<Item = (OrderKey, SequenceKey)> {
        let next = move |&(key, _): &(OrderKey, SequenceKey)| self.last_before(tree, key);
        std::iter::successors(self.last(tree), next)
    }

    /// Calls `visit` with the first `count` requests, in order.
    pub fn visit_first(&self, tree: OrderTree, count: usize, mut visit: impl FnMut(SequenceKey)) {
        let next = |&(key, _): &(OrderKey, SequenceKey)| self.first_after(tree, key);
        let those = std::iter::successors(self.first(tree), next);
        those.take(count).for_each(|(_, sequence)| visit(sequence));
    }

    /// Units of everything in the tree.
    pub fn total(&self, tree: OrderTree) -> Units {
        sum(self.entries(tree.root))
    }

    /// Units of everything in front of `key`.
    pub fn total_before(&self, tree: OrderTree, key: OrderKey) -> Units {
        let (mut total, mut at, mut height) = (0, tree.root, tree.height);
        while let Some(node) = self.nodes.get(at as usize) {
            let position = node.position_of(key);
            total += sum(&node.entries()[..position]);
            let next = node.entries()[position];
            if height == 0 {
                return total + if next.key() < key { next.units } else { 0 };
            }
            (at, height) = (next.link, height - 1);
        }
        total
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    /// Those of a node; none where there is no node.
    fn entries(&self, at: u32) -> &[Entry] {
        self.nodes.get(at as usize).map_or(&[], Node::entries)
    }

    /// Makes a node of these entries; the entry that leads to it.
    fn add(&mut self, entries: &[Entry]) -> Entry {
        let at = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            self.nodes.len() as u32 - 1
        });
        self.node_mut(at).fill(entries);
        self.entry_of(at)
    }

    /// The entry that leads to a node.
    fn entry_of(&self, at: u32) -> Entry {
        let entries = self.entries(at);
        Entry {
            units: sum(entries),
            link: at,
            ..entries[0]
        }
    }

    /// Puts a request into the subtree `at`. If its root had to be split, the entry of the new node, which
    /// comes behind it.
    fn insert_below(&mut self, at: u32, height: u32, entry: Entry) -> Option<Entry> {
        let node = self.node_mut(at);
        let position = node.position_of(entry.key());
        let found = node.entry_mut(position);
        debug_assert!(height > 0 || found.key() != entry.key(), "a key twice");
        if height == 0 {
            let is_behind = found.key() < entry.key();
            return self.put(at, position + usize::from(is_behind), entry);
        }
        if entry.key() < found.key() {
            (found.priority, found.cost, found.number) = (entry.priority, entry.cost, entry.number);
        }
        found.units += entry.units;
        let below = found.link;
        let new = self.insert_below(below, height - 1, entry)?;
        self.node_mut(at).entry_mut(position).units -= new.units;
        self.put(at, position + 1, new)
    }

    /// Puts an entry into a node, before the one at `position`. One that is full is split; then the entry of
    /// the new node, which comes behind it.
    fn put(&mut self, at: u32, position: usize, entry: Entry) -> Option<Entry> {
        let node = self.node_mut(at);
        if node.len() < WIDTH {
            node.insert(position, entry);
            return None;
        }
        if position == WIDTH {
            // Most come last: what is before them stays full.
            return Some(self.add(&[entry]));
        }
        let middle = WIDTH / 2;
        let places = node.places;
        node.end = middle as u32;
        let new = self.add(&places[middle..]).link;
        if position <= middle {
            self.node_mut(at).insert(position, entry);
        } else {
            self.node_mut(new).insert(position - middle, entry);
        }
        Some(self.entry_of(new))
    }

    /// Takes the request with `key` out of the subtree `at`; its units, if it is there.
    fn remove_below(&mut self, at: u32, height: u32, key: OrderKey) -> Option<Units> {
        let node = self.node_mut(at);
        let position = node.position_of(key);
        let found = *node.entry_mut(position);
        if height == 0 {
            let is_there = found.key() == key;
            if is_there {
                node.remove(position);
            }
            return is_there.then_some(found.units);
        }
        let units = self.remove_below(found.link, height - 1, key)?;
        self.node_mut(at).entry_mut(position).units -= units;
        if self.entries(found.link).len() < SPARSE {
            self.dissolve(at, position);
        }
        Some(units)
    }

    /// Gives the few entries of the node that the entry at `position` leads to, to a neighbour that has room
    /// for them; then, or if there are none, it goes.
    fn dissolve(&mut self, at: u32, position: usize) {
        let few = *self.node_mut(at).entry_mut(position);
        let count = self.entries(few.link).len();
        if count > 0 {
            let siblings = self.entries(at);
            let has_room = |&to: &usize| {
                let sibling = siblings.get(to);
                sibling.is_some_and(|to| self.entries(to.link).len() + count <= WIDTH)
            };
            let neighbours = [position + 1, position.wrapping_sub(1)];
            let Some(to) = neighbours.into_iter().find(has_room) else {
                return;
            };
            let is_behind = to > position;
            let sibling = self.node_mut(at).entry_mut(to);
            let Entry { units, link, .. } = *sibling;
            let first = if is_behind { few } else { *sibling };
            *sibling = Entry {
                units: units + few.units,
                link,
                ..first
            };
            let begin = if is_behind {
                0
            } else {
                self.entries(link).len()
            };
            for offset in 0..count {
                let entry = self.entries(few.link)[offset];
                self.node_mut(link).insert(begin + offset, entry);
            }
        }
        self.node_mut(at).remove(position);
        self.free.push(few.link);
    }
}

fn sum(entries: &[Entry]) -> Units {
    entries.iter().map(|entry| entry.units).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Spreads numbers (the finaliser of `SplitMix64`).
    fn hash(number: u64) -> u32 {
        let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as u32
    }

    /// Checks the invariants of a subtree, and adds its keys and units; how many nodes it has.
    fn check(
        arena: &OrderArena,
        at: u32,
        height: u32,
        found: &mut Vec<(OrderKey, Units)>,
    ) -> usize {
        let entries = arena.entries(at);
        assert!(!entries.is_empty(), "an empty node");
        let mut num_nodes = 1;
        for entry in entries {
            let last = found.last().map(|&(key, _)| key);
            assert!(
                last.is_none_or(|last| last < entry.key()),
                "a key that is not behind others"
            );
            if height == 0 {
                found.push((entry.key(), entry.units));
                continue;
            }
            let before = found.len();
            num_nodes += check(arena, entry.link, height - 1, found);
            assert!(entry.key() <= found[before].0, "a key behind one below it");
            let units = found[before..].iter().map(|&(_, units)| units);
            assert_eq!(entry.units, units.sum::<u64>());
        }
        num_nodes
    }

    #[test]
    fn an_order_equals_a_sorted_map() {
        let mut arena = OrderArena::default();
        let mut trees = [OrderTree::default(), OrderTree::default()];
        let mut models = [BTreeMap::new(), BTreeMap::new()];
        for number in 0..4_000_u64 {
            let which = (hash(number) % 2) as usize;
            let (tree, model) = (&mut trees[which], &mut models[which]);
            let draw = hash(number ^ 0xabcd);
            let key = OrderKey {
                priority: (draw % 3) as i32 - 1,
                cost: u64::from(draw % 7),
                number,
            };
            let units = u64::from(draw % 1_000);
            arena.insert(tree, key, SequenceKey(number as usize), units);
            model.insert(key, units);
            if draw % 5 < 2 {
                let nth = draw as usize % model.len();
                let removed = *model.keys().nth(nth).expect("it is within");
                model.remove(&removed);
                assert!(arena.remove(tree, removed));
                assert!(!arena.remove(tree, removed), "removed twice");
            }
            let first = model.keys().next().copied();
            assert_eq!(arena.first(*tree).map(|(key, _)| key), first);
            let behind = model.range(key..).find(|&(&other, _)| other != key);
            let found = arena.first_after(*tree, key).map(|(key, _)| key);
            assert_eq!(found, behind.map(|(&key, _)| key));
            assert_eq!(arena.total(*tree), model.values().sum::<u64>());
            let before: u64 = model.range(..key).map(|(_, units)| units).sum();
            assert_eq!(arena.total_before(*tree, key), before);
        }
        for (tree, model) in trees.iter().zip(&models) {
            let mut seen = Vec::new();
            arena.visit_first(*tree, 10, |key| seen.push(key.0 as u64));
            let expected: Vec<u64> = model.keys().take(10).map(|key| key.number).collect();
            assert_eq!(seen, expected);
        }
        assert!(models.iter().all(|model| model.len() > 500));
    }

    /// Crowds that come in order and at random, and leave from the front, from behind and at random.
    #[test]
    fn trees_stay_low_and_leave_nothing_behind() {
        let mut arena = OrderArena::default();
        let mut tree = OrderTree::default();
        let mut model = BTreeMap::new();
        let mut number = 0;
        for round in 0..12 {
            for _ in 0..3_000 {
                let draw = hash(number);
                let cost = if round % 2 == 0 {
                    0
                } else {
                    u64::from(draw % 1_000)
                };
                let key = OrderKey {
                    priority: 0,
                    cost,
                    number,
                };
                arena.insert(&mut tree, key, SequenceKey(number as usize), draw.into());
                model.insert(key, u64::from(draw));
                number += 1;
            }
            assert!((2..=3).contains(&tree.height), "{tree:?}");
            let mut fullest = 0;
            while let (Some((&first, _)), Some((&last, _))) =
                (model.first_key_value(), model.last_key_value())
            {
                let leaver = match round / 2 % 3 {
                    0 => first,
                    1 => last,
                    _ => {
                        let cost = u64::from(hash(model.len() as u64) % 1_000);
                        let number = u64::from(hash(number + model.len() as u64)) % number;
                        let drawn = OrderKey {
                            priority: 0,
                            cost: cost * u64::from(round % 2 == 1),
                            number,
                        };
                        model.range(drawn..).next().map_or(first, |(&key, _)| key)
                    }
                };
                model.remove(&leaver);
                assert!(arena.remove(&mut tree, leaver));
                if model.len() % 100 != 1 {
                    continue;
                }
                let mut found = Vec::new();
                let num_nodes = check(&arena, tree.root, tree.height, &mut found);
                assert!(
                    found
                        .iter()
                        .copied()
                        .eq(model.iter().map(|(&key, &units)| (key, units)))
                );
                let back = arena.iter_back(tree).map(|(key, _)| key);
                assert!(back.eq(model.keys().rev().copied()));
                assert_eq!(num_nodes + arena.free.len(), arena.nodes.len());
                // No two neighbours have hardly any.
                assert!(
                    num_nodes <= 2 + model.len() / 2,
                    "{num_nodes} for {}",
                    model.len()
                );
                fullest = fullest.max(num_nodes);
            }
            assert!(fullest > 200, "{fullest}");
            assert!(tree.is_empty());
            assert_eq!(arena.free.len(), arena.nodes.len());
        }
    }
}
