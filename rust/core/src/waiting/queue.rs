//! The waiting queue: who is next.
//!
//! First come, first served, with one exception: a preempted sequence returns ahead of fresh ones.
//! Keys are a strict total order fixed at arrival, so the queue is a search tree: the next sequence,
//! an insertion and a removal are O(log n) in what waits.

use std::collections::BTreeMap;

use crate::request::SequenceKey;

/// Whether a sequence has run before. Returning ones go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Preempted: it has output that its client is waiting to see continued.
    Returning,
    /// Never scheduled.
    Fresh,
}

/// Position by arrival: the request's number, then the child's. Older is smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    /// Number of the request, in order of submission.
    pub request: u64,
    /// Which of its answers.
    pub child: u32,
}

/// Sequences that wait for a row and memory.
#[derive(Debug, Default)]
pub struct WaitingQueue {
    sequences: BTreeMap<(Rank, Arrival), SequenceKey>,
}

impl WaitingQueue {
    /// Adds a sequence.
    pub fn push(&mut self, rank: Rank, arrival: Arrival, sequence: SequenceKey) {
        let previous = self.sequences.insert((rank, arrival), sequence);
        debug_assert!(previous.is_none(), "two sequences with one arrival");
    }

    /// The sequence that is next.
    pub fn first(&self) -> Option<SequenceKey> {
        self.sequences.first_key_value().map(|(_, &key)| key)
    }

    /// Takes a sequence out, wherever it stands; false if it does not wait.
    pub fn remove(&mut self, rank: Rank, arrival: Arrival) -> bool {
        self.sequences.remove(&(rank, arrival)).is_some()
    }

    /// Sequences that wait.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
}
