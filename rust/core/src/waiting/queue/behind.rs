//! Who is next behind the first of the queue, for backfill: a bounded look, in the queue's order.
//!
//! The order among flows depends on what each is charged, and so on who is let in. It is taken as it is
//! now: of flows that share by service the first request of each in the order of their turns, then the
//! second of each, and so on; of flows that do not, whoever is first. What is held or set aside is not in
//! it, as it is not next either; nor is what was preempted, which has waited for memory in vain before.

use crate::request::SequenceKey;
use crate::waiting::fairness::FlowKey;
use crate::waiting::order::OrderKey;
use crate::waiting::queue::{Next, WaitingQueue};

/// Those who are next behind the first; the memory is kept, so that looking allocates nothing.
#[derive(Debug, Default)]
pub struct Behind {
    /// In the queue's order.
    pub found: Vec<Next>,
    leaves: Vec<FlowKey>,
    cursors: Vec<Cursor>,
}

/// How far a flow was looked through.
#[derive(Debug)]
struct Cursor {
    leaf: FlowKey,
    key: OrderKey,
    sequence: SequenceKey,
    taken: u32,
}

impl WaitingQueue {
    /// Collects who is next behind `head` and never ran, `count` at most.
    pub fn collect_behind(&self, head: SequenceKey, count: usize, behind: &mut Behind) {
        let Behind {
            found,
            leaves,
            cursors,
        } = behind;
        found.clear();
        let mut is_enough = |next: Next| {
            if next.sequence() != head {
                found.push(next);
            }
            found.len() == count
        };
        let mut promoted = self.promoted.values();
        if promoted.any(|&key| is_enough(Next::Promoted(key))) {
            return;
        }
        let last = self.levels.len() - 1;
        for (index, level) in self.levels.iter().enumerate() {
            if index == last {
                let mut fresh = self.best_effort.values();
                fresh.any(|&key| is_enough(Next::Fresh(key, index, level.root)));
                return;
            }
            leaves.clear();
            // One more than are wanted: the head may be in one of them, alone.
            self.flows.first_leaves(level.root, count + 1, leaves);
            cursors.clear();
            cursors.extend(leaves.iter().filter_map(|&leaf| self.cursor(leaf)));
            while let Some((sequence, leaf)) = self.advance(cursors) {
                if is_enough(Next::Fresh(sequence, index, leaf)) {
                    return;
                }
            }
        }
    }

    fn cursor(&self, leaf: FlowKey) -> Option<Cursor> {
        let (key, sequence) = self.orders.first(self.flows.waiting(leaf))?;
        Some(Cursor {
            leaf,
            key,
            sequence,
            taken: 0,
        })
    }

    /// The next of all the flows looked through.
    fn advance(&self, cursors: &mut Vec<Cursor>) -> Option<(SequenceKey, FlowKey)> {
        let by_turn = |cursor: &Cursor| {
            if self.by_service {
                (cursor.taken, OrderKey::default())
            } else {
                (0, cursor.key)
            }
        };
        let at = (0..cursors.len()).min_by_key(|&at| by_turn(&cursors[at]))?;
        let cursor = &mut cursors[at];
        let next = (cursor.sequence, cursor.leaf);
        let tree = self.flows.waiting(cursor.leaf);
        if let Some((key, sequence)) = self.orders.first_after(tree, cursor.key) {
            cursor.key = key;
            cursor.sequence = sequence;
            cursor.taken += 1;
        } else {
            cursors.remove(at);
        }
        Some(next)
    }
}
