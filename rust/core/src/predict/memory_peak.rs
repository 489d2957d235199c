//! How much memory those that run will need at most, if their answers end as predicted.
//!
//! The future peak of Past-Future (ASPLOS'25): sorted by the tokens they have still to write, the most
//! first, the first `i` hold `sum of their tokens + i * remaining of the i-th` when the `i`-th ends; after
//! that its memory is free. The peak is the largest of these.
//!
//! As long as all write a token an iteration and nobody comes or goes, none of these sums changes, so a
//! [`FuturePeak`] is made once and asked for every candidate until somebody does. Answers that outlive
//! their prediction make it stale slowly; whoever owns it makes it anew from time to time.

use std::cmp::Reverse;

/// A sequence, or a candidate: what it holds now, and what it is predicted to add.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Tokens that will be free when it ends, rounded up to blocks by its owner.
    pub tokens: u32,
    /// Tokens that each of its answers is predicted to write before it ends.
    pub remaining: u32,
    /// Its answers: as many tokens are written an iteration.
    pub answers: u32,
}

/// The loads of all that run, by the time at which they end.
#[derive(Debug, Default)]
pub struct FuturePeak {
    /// Who ends last is first.
    loads: Vec<Load>,
    /// Tokens that are in use whoever ends.
    base: u64,
}

impl FuturePeak {
    /// Begins anew.
    pub fn clear(&mut self) {
        self.loads.clear();
        self.base = 0;
    }

    /// Adds a load; [`Self::settle`] before anything is asked.
    pub fn push(&mut self, load: Load) {
        self.loads.push(load);
    }

    /// Sorts what was pushed, on top of `base` tokens that nobody's end frees.
    pub fn settle(&mut self, base: u64) {
        self.base = base;
        let by_end = |load: &Load| Reverse((load.remaining, load.tokens));
        self.loads.sort_unstable_by_key(by_end);
    }

    /// Adds one that was admitted, and tokens that it keeps in use beside its load.
    pub fn insert(&mut self, load: Load, base: u64) {
        self.base += base;
        let at = self
            .loads
            .partition_point(|other| other.remaining > load.remaining);
        self.loads.insert(at, load);
    }

    /// Largest number of tokens in use at any time from now on, with the candidate's and `base` more.
    pub fn peak_with(&self, candidate: Load, base: u64) -> u64 {
        let ends_later = |load: &Load| load.remaining > candidate.remaining;
        let (longer, shorter) = self.loads.split_at(self.loads.partition_point(ends_later));
        let mut sum = Sum::default();
        for &load in longer.iter().chain([&candidate]).chain(shorter) {
            sum.add(load);
        }
        self.base + base + sum.peak
    }
}

/// The first so many loads, and the peak while they are left.
#[derive(Default)]
struct Sum {
    tokens: u64,
    answers: u64,
    peak: u64,
}

impl Sum {
    fn add(&mut self, load: Load) {
        self.tokens += u64::from(load.tokens);
        self.answers += u64::from(load.answers);
        let at_its_end = self.tokens + self.answers * u64::from(load.remaining);
        self.peak = self.peak.max(at_its_end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(tokens: u32, remaining: u32, answers: u32) -> Load {
        Load {
            tokens,
            remaining,
            answers,
        }
    }

    fn future(loads: &[Load], base: u64) -> FuturePeak {
        let mut future = FuturePeak::default();
        for &load in loads {
            future.push(load);
        }
        future.settle(base);
        future
    }

    /// The same by playing the future, one token at a time.
    fn played(loads: &[Load], base: u64) -> u64 {
        let last = loads.iter().map(|load| load.remaining).max().unwrap_or(0);
        let in_use = |time: u32| -> u64 {
            let there = loads.iter().filter(|load| load.remaining >= time);
            there
                .map(|load| u64::from(load.tokens + time * load.answers))
                .sum()
        };
        base + (0..=last).map(in_use).max().unwrap_or(0)
    }

    fn scrambled(count: u32, seed: u32) -> Vec<Load> {
        let number = |i: u32, salt: u32| (i * 7_919 + seed * 104_729 + salt) % 211;
        (0..count)
            .map(|i| {
                load(
                    number(i, 1) * 5,
                    number(i, 97) * 3 % 50,
                    1 + number(i, 5) % 3,
                )
            })
            .collect()
    }

    #[test]
    fn the_peak_is_that_of_the_future_played() {
        for seed in 0..200 {
            let mut loads = scrambled(seed % 9, seed);
            let mut future = future(&loads, 7);
            let candidate = load(40, seed % 60, 1 + seed % 2);
            let told = future.peak_with(candidate, 2);
            loads.push(candidate);
            assert_eq!(told, played(&loads, 9), "seed {seed}");
            future.insert(candidate, 2);
            let nobody = load(0, 0, 0);
            assert_eq!(future.peak_with(nobody, 0), told, "seed {seed}");
        }
    }

    #[test]
    fn time_does_not_change_it_while_all_write() {
        let now = [load(100, 9, 1), load(10, 30, 2)];
        let later = now.map(|at| load(at.tokens + 5 * at.answers, at.remaining - 5, at.answers));
        let nobody = load(0, 0, 0);
        let peaks = [now, later].map(|loads| future(&loads, 0).peak_with(nobody, 0));
        assert_eq!(peaks, [110 + 3 * 9; 2]);
    }
}
