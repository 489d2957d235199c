//! The requests of one flow, in order, with the work in front of any of them.
//!
//! Keys are fixed when a request begins to wait (see [`OrderKey`]), so an order is a search tree: a
//! treap whose heap priorities are a hash of the request's number, which makes it the same in every run.
//! Insertion, removal and the sum of the work in front of a key are O(log n); all trees share one
//! arena, so that a flow costs nothing but its root.

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

/// Priced work, in thousandths of the price's unit.
pub type Units = u64;

const NONE: u32 = u32::MAX;

struct Node {
    key: OrderKey,
    sequence: SequenceKey,
    units: Units,
    /// Units of the whole subtree.
    sum: Units,
    heap: u32,
    left: u32,
    right: u32,
}

/// One order; its nodes are in the [`OrderArena`] that made it.
#[derive(Clone, Copy, Debug)]
pub struct OrderTree {
    root: u32,
}

impl Default for OrderTree {
    fn default() -> Self {
        Self { root: NONE }
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
        let node = Node {
            key,
            sequence,
            units,
            sum: units,
            heap: hash(key.number),
            left: NONE,
            right: NONE,
        };
        let at = if let Some(at) = self.free.pop() {
            self.nodes[at as usize] = node;
            at
        } else {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        };
        tree.root = self.insert_below(tree.root, at);
    }

    /// Takes the request with `key` out; false if it is not there.
    pub fn remove(&mut self, tree: &mut OrderTree, key: OrderKey) -> bool {
        let (root, removed) = self.remove_below(tree.root, key);
        tree.root = root;
        removed
    }

    /// The first request.
    pub fn first(&self, tree: OrderTree) -> Option<(OrderKey, SequenceKey)> {
        let mut at = tree.root;
        let mut first = None;
        while at != NONE {
            let node = &self.nodes[at as usize];
            first = Some((node.key, node.sequence));
            at = node.left;
        }
        first
    }

    /// The first request behind `key`.
    pub fn first_after(&self, tree: OrderTree, key: OrderKey) -> Option<(OrderKey, SequenceKey)> {
        let mut at = tree.root;
        let mut first = None;
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.key > key {
                first = Some((node.key, node.sequence));
                at = node.left;
            } else {
                at = node.right;
            }
        }
        first
    }

    /// Calls `visit` with the first `count` requests, in order.
    pub fn visit_first(&self, tree: OrderTree, count: usize, mut visit: impl FnMut(SequenceKey)) {
        let mut left = count;
        let mut path = Vec::new();
        let mut at = tree.root;
        while left > 0 && (at != NONE || !path.is_empty()) {
            while at != NONE {
                path.push(at);
                at = self.nodes[at as usize].left;
            }
            if let Some(next) = path.pop() {
                let node = &self.nodes[next as usize];
                visit(node.sequence);
                left -= 1;
                at = node.right;
            }
        }
    }

    /// Units of everything in the tree.
    pub fn total(&self, tree: OrderTree) -> Units {
        self.sum(tree.root)
    }

    /// Units of everything in front of `key`.
    pub fn total_before(&self, tree: OrderTree, key: OrderKey) -> Units {
        let mut at = tree.root;
        let mut total = 0;
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.key < key {
                total += self.sum(node.left) + node.units;
                at = node.right;
            } else {
                at = node.left;
            }
        }
        total
    }

    fn sum(&self, at: u32) -> Units {
        match at {
            NONE => 0,
            at => self.nodes[at as usize].sum,
        }
    }

    fn update(&mut self, at: u32) {
        let Node {
            left, right, units, ..
        } = self.nodes[at as usize];
        self.nodes[at as usize].sum = units + self.sum(left) + self.sum(right);
    }

    /// Puts node `new` into the subtree `at` and returns the subtree's root.
    fn insert_below(&mut self, at: u32, new: u32) -> u32 {
        if at == NONE {
            return new;
        }
        let key = self.nodes[new as usize].key;
        debug_assert!(key != self.nodes[at as usize].key, "a key twice");
        if self.nodes[new as usize].heap > self.nodes[at as usize].heap {
            let (left, right) = self.split(at, key);
            self.nodes[new as usize].left = left;
            self.nodes[new as usize].right = right;
            self.update(new);
            return new;
        }
        if key < self.nodes[at as usize].key {
            let left = self.insert_below(self.nodes[at as usize].left, new);
            self.nodes[at as usize].left = left;
        } else {
            let right = self.insert_below(self.nodes[at as usize].right, new);
            self.nodes[at as usize].right = right;
        }
        self.update(at);
        at
    }

    /// Cuts the subtree into what is in front of `key` and the rest.
    fn split(&mut self, at: u32, key: OrderKey) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        if self.nodes[at as usize].key < key {
            let (left, right) = self.split(self.nodes[at as usize].right, key);
            self.nodes[at as usize].right = left;
            self.update(at);
            (at, right)
        } else {
            let (left, right) = self.split(self.nodes[at as usize].left, key);
            self.nodes[at as usize].left = right;
            self.update(at);
            (left, at)
        }
    }

    /// Joins two subtrees, everything in `left` being in front of everything in `right`.
    fn join(&mut self, left: u32, right: u32) -> u32 {
        if left == NONE {
            return right;
        }
        if right == NONE {
            return left;
        }
        if self.nodes[left as usize].heap > self.nodes[right as usize].heap {
            let joined = self.join(self.nodes[left as usize].right, right);
            self.nodes[left as usize].right = joined;
            self.update(left);
            left
        } else {
            let joined = self.join(left, self.nodes[right as usize].left);
            self.nodes[right as usize].left = joined;
            self.update(right);
            right
        }
    }

    fn remove_below(&mut self, at: u32, key: OrderKey) -> (u32, bool) {
        if at == NONE {
            return (NONE, false);
        }
        let Node {
            left,
            right,
            key: own,
            ..
        } = self.nodes[at as usize];
        if own == key {
            self.free.push(at);
            return (self.join(left, right), true);
        }
        let removed = if key < own {
            let (left, removed) = self.remove_below(left, key);
            self.nodes[at as usize].left = left;
            removed
        } else {
            let (right, removed) = self.remove_below(right, key);
            self.nodes[at as usize].right = right;
            removed
        };
        self.update(at);
        (at, removed)
    }
}

/// Spreads numbers in order of arrival over heap priorities (the finaliser of `SplitMix64`).
fn hash(number: u64) -> u32 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

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
}
