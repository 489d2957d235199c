//! The running set: who has a row, the oldest arrival first.
//!
//! It is changed when somebody joins or leaves, and nowhere else; what a decision asks about all of them in
//! nearly every iteration is counted then, so that it need not look at anybody.

use std::ops::Deref;

use slab::Slab;

use crate::iteration::sequence::Sequence;
use crate::iteration::steady::Steady;
use crate::request::SequenceKey;

/// Those that run, read as a slice.
#[derive(Default)]
pub(crate) struct Running {
    keys: Vec<SequenceKey>,
    steady: Steady,
    /// How many of them are of each level.
    at_level: Vec<u32>,
    /// How many of them were let in as somebody's guests.
    num_guests: u32,
}

impl Deref for Running {
    type Target = [SequenceKey];

    fn deref(&self) -> &[SequenceKey] {
        &self.keys
    }
}

impl Running {
    /// Nobody, with room for so many.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self {
            keys: Vec::with_capacity(count),
            steady: Steady::with_capacity(count),
            ..Self::default()
        }
    }

    /// Puts a sequence in its place.
    pub(crate) fn enter(&mut self, sequences: &Slab<Sequence>, key: SequenceKey) {
        let sequence = &sequences[key.0];
        let is_older = |other: &SequenceKey| sequences[other.0].arrival < sequence.arrival;
        let position = self.keys.partition_point(is_older);
        self.keys.insert(position, key);
        self.steady.enter(position, key);
        self.num_guests += u32::from(sequence.is_guest);
        *self.count_of(sequence.level) += 1;
    }

    /// Takes a sequence out; nothing happens if it does not run.
    pub(crate) fn leave(&mut self, sequences: &Slab<Sequence>, key: SequenceKey) {
        let Some(position) = self.keys.iter().position(|&other| other == key) else {
            return;
        };
        self.keys.remove(position);
        self.steady.leave(position);
        let sequence = &sequences[key.0];
        self.num_guests -= u32::from(sequence.is_guest);
        *self.count_of(sequence.level) -= 1;
    }

    /// All, and what is kept of those that are steady.
    pub(crate) fn steady(&mut self) -> (&[SequenceKey], &mut Steady) {
        (&self.keys, &mut self.steady)
    }

    /// One that runs runs at another level from now on.
    pub(crate) fn move_to(&mut self, sequence: &mut Sequence, level: usize) {
        *self.count_of(sequence.level) -= 1;
        *self.count_of(level) += 1;
        sequence.level = level;
    }

    /// One that has just joined is a guest.
    pub(crate) fn make_guest(&mut self, sequence: &mut Sequence) {
        self.num_guests += u32::from(!sequence.is_guest);
        sequence.is_guest = true;
    }

    fn count_of(&mut self, level: usize) -> &mut u32 {
        if self.at_level.len() <= level {
            self.at_level.resize(level + 1, 0);
        }
        &mut self.at_level[level]
    }

    /// Whether anybody of a level below this one runs.
    pub(crate) fn has_below(&self, level: usize) -> bool {
        self.at_level
            .iter()
            .skip(level.saturating_add(1))
            .any(|&count| count > 0)
    }

    /// Whether anybody runs who was let in as a guest.
    pub(crate) fn has_guests(&self) -> bool {
        self.num_guests > 0
    }

    /// Checks the order and the counts; says the first that is wrong. For tests.
    pub(crate) fn audit(&self, sequences: &Slab<Sequence>, block_size: u32) -> Result<(), String> {
        let state = |key: &SequenceKey| &sequences[key.0];
        for (position, key) in self.keys.iter().enumerate() {
            if state(key).num_steady_steps > 0 {
                self.steady.audit(position, state(key), block_size)?;
            }
        }
        if !self.keys.iter().map(|key| state(key).arrival).is_sorted() {
            return Err("the running set is not in order of arrival".into());
        }
        let guests = self.keys.iter().filter(|key| state(key).is_guest).count();
        if guests != self.num_guests as usize {
            return Err(format!("{guests} guests run, not {}", self.num_guests));
        }
        for (level, &count) in self.at_level.iter().enumerate() {
            let of_level = self.keys.iter().filter(|key| state(key).level == level);
            let counted = of_level.count();
            if counted != count as usize {
                return Err(format!("{counted} run at level {level}, not {count}"));
            }
        }
        let counted: u32 = self.at_level.iter().sum();
        if counted as usize != self.keys.len() {
            return Err(format!(
                "{} run, but levels have {counted}",
                self.keys.len()
            ));
        }
        Ok(())
    }
}
