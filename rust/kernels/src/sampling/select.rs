//! Finding the best tokens of a row without sorting the vocabulary.
//!
//! Tokens are ordered by logit, descending, ties by id, ascending: a total order, packed into one `u64`
//! ([`Candidate::key`]). [`top_k`] scans once and keeps a small buffer, raising its threshold by
//! quickselect whenever it fills; [`nucleus`] is a quickselect by weight: each round settles one side of a
//! pivot, so both take expected linear time.

use pulp::{Simd, WithSimd};

use crate::simd::{any, dispatch};

/// A token with its logit and, once known, its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Sorts descending by logit, then ascending by id.
    pub key: u64,
    /// The token's unnormalised probability.
    pub weight: f32,
}

impl Candidate {
    /// A token whose weight is not known yet.
    #[inline(always)]
    pub fn new(id: u32, logit: f32) -> Self {
        let bits = (logit + 0.0).to_bits(); // -0 and 0 are ties
        let rising = if bits >> 31 == 0 {
            bits | 0x8000_0000
        } else {
            !bits
        };
        Self {
            key: u64::from(rising) << 32 | u64::from(!id),
            weight: 0.0,
        }
    }

    /// The token.
    #[inline(always)]
    pub fn id(self) -> u32 {
        !(self.key as u32)
    }

    /// The token's logit.
    #[inline(always)]
    pub fn logit(self) -> f32 {
        let rising = (self.key >> 32) as u32;
        f32::from_bits(if rising >> 31 == 1 {
            rising & 0x7fff_ffff
        } else {
            !rising
        })
    }
}

/// Collects into `found` the `k` best tokens with a logit of at least `floor`, in no order.
pub fn top_k(logits: &[f32], k: usize, floor: f32, found: &mut Vec<Candidate>) {
    found.clear();
    if k > 0 {
        dispatch(Scan {
            logits,
            keep: k,
            floor,
            found,
        });
        if found.len() > k {
            found.select_nth_unstable_by(k - 1, |a, b| b.key.cmp(&a.key));
            found.truncate(k);
        }
    }
}

/// Collects into `found` all tokens with a logit of at least `floor`, by rising id.
pub fn at_least(logits: &[f32], floor: f32, found: &mut Vec<Candidate>) {
    found.clear();
    dispatch(Scan {
        logits,
        keep: usize::MAX,
        floor,
        found,
    });
}

/// One pass over the logits; skips whole vectors below the threshold.
struct Scan<'a> {
    logits: &'a [f32],
    /// Candidates that must stay; the buffer may hold more.
    keep: usize,
    floor: f32,
    found: &'a mut Vec<Candidate>,
}

impl WithSimd for Scan<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let capacity = self.keep.saturating_mul(4).max(256);
        let mut floor = self.floor;
        let (vectors, tail) = S::as_simd_f32s(self.logits);
        for (i, &vector) in vectors.iter().enumerate() {
            let reaches = simd.greater_than_or_equal_f32s(vector, simd.splat_f32s(floor));
            if !any(simd, reaches) {
                continue;
            }
            let begin = i * S::F32_LANES;
            for (id, &logit) in self.logits[begin..begin + S::F32_LANES].iter().enumerate() {
                if logit >= floor {
                    self.found.push(Candidate::new((begin + id) as u32, logit));
                }
            }
            if self.found.len() >= capacity && self.keep < usize::MAX {
                self.found
                    .select_nth_unstable_by(self.keep - 1, |a, b| b.key.cmp(&a.key));
                self.found.truncate(self.keep);
                floor = self.found[self.keep - 1].logit();
            }
        }
        let begin = self.logits.len() - tail.len();
        for (id, &logit) in tail.iter().enumerate() {
            if logit >= floor {
                self.found.push(Candidate::new((begin + id) as u32, logit));
            }
        }
    }
}

/// Keeps the smallest set of best candidates whose weights reach `share` of `total`; at least one.
///
/// In other words a candidate stays when those before it weigh less than `share * total`. Sums are taken
/// in double precision.
pub fn nucleus(candidates: &mut Vec<Candidate>, share: f32, total: f64) {
    let mut needed = f64::from(share) * total;
    let (mut begin, mut end) = (0, candidates.len());
    // Invariant: everything before `begin` stays, everything from `end` on is dropped, and `needed` is
    // what is left to reach after the part before `begin`.
    while end - begin > 1 {
        let pivot = median_key(&candidates[begin..end]);
        let window = &mut candidates[begin..end];
        let mut split = 0;
        let mut weight = 0.0;
        for i in 0..window.len() {
            if window[i].key >= pivot {
                weight += f64::from(window[i].weight);
                window.swap(split, i);
                split += 1;
            }
        }
        // The window's upper part has `split >= 1` members, the pivot being the least of them.
        if weight < needed {
            needed -= weight;
            begin += split;
        } else if split == window.len() {
            // The pivot is the last member: it stays if those before it are not enough.
            let last = window
                .iter()
                .position(|c| c.key == pivot)
                .unwrap_or(split - 1);
            window.swap(last, split - 1);
            if weight - f64::from(window[split - 1].weight) < needed {
                begin = end;
            } else {
                end -= 1;
            }
        } else {
            end = begin + split;
        }
    }
    // One left: it stays if something is still needed, or if it is the best of all.
    let keep = if end > begin && (needed > 0.0 || begin == 0) {
        end
    } else {
        begin
    };
    candidates.truncate(keep.max(1));
}

fn median_key(window: &[Candidate]) -> u64 {
    let (a, b, c) = (
        window[0].key,
        window[window.len() / 2].key,
        window[window.len() - 1].key,
    );
    a.max(b).min(a.min(b).max(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small deterministic generator for the tests.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            self.0 >> 33
        }

        fn logits(&mut self, count: usize, distinct: u64) -> Vec<f32> {
            (0..count)
                .map(|_| (self.next() % distinct) as f32 * 0.01 - 5.0)
                .collect()
        }
    }

    fn sorted(logits: &[f32]) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        ids.sort_by(|&a, &b| {
            logits[b as usize]
                .total_cmp(&logits[a as usize])
                .then(a.cmp(&b))
        });
        ids
    }

    fn ids(candidates: &[Candidate]) -> Vec<u32> {
        let mut candidates = candidates.to_vec();
        candidates.sort_by_key(|c| std::cmp::Reverse(c.key));
        candidates.iter().map(|c| c.id()).collect()
    }

    #[test]
    fn keys_keep_the_logit_and_the_id() {
        for logit in [-3.5_f32, -1e-30, 0.0, 2.0, 1e30, f32::NEG_INFINITY] {
            let candidate = Candidate::new(49_151, logit);
            assert_eq!((candidate.id(), candidate.logit()), (49_151, logit));
        }
        assert!(Candidate::new(1, 2.0).key > Candidate::new(0, 1.0).key);
        assert!(Candidate::new(0, 2.0).key > Candidate::new(1, 2.0).key);
        assert!(Candidate::new(0, -1.0).key > Candidate::new(0, -2.0).key);
    }

    #[test]
    fn top_k_agrees_with_sorting() {
        let mut random = Random(1);
        let mut found = Vec::new();
        for round in 0..300 {
            let count = 1 + random.next() as usize % 3000;
            let distinct = if round % 2 == 0 { 7 } else { 100_000 };
            let logits = random.logits(count, distinct);
            let k = 1 + random.next() as usize % (count + 5);
            top_k(&logits, k, f32::NEG_INFINITY, &mut found);
            assert_eq!(
                ids(&found),
                sorted(&logits)[..k.min(count)],
                "round {round}"
            );
        }
    }

    #[test]
    fn nucleus_agrees_with_sorting() {
        let mut random = Random(2);
        for round in 0..2000 {
            let count = 1 + random.next() as usize % 200;
            let distinct = if round % 2 == 0 { 5 } else { 100_000 };
            let logits = random.logits(count, distinct);
            let mut candidates = Vec::new();
            at_least(&logits, f32::NEG_INFINITY, &mut candidates);
            // Whole weights: their sums are exact in any order.
            for candidate in &mut candidates {
                candidate.weight = ((candidate.logit() + 5.0) * 100.0).round();
            }
            let total: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
            let share = (random.next() % 1000) as f32 / 1000.0;
            let order = sorted(&logits);
            let mut before = 0.0;
            let mut expected = vec![];
            for &id in &order {
                if before < f64::from(share) * total || expected.is_empty() {
                    expected.push(id);
                }
                before += f64::from(((logits[id as usize] + 5.0) * 100.0).round());
            }
            nucleus(&mut candidates, share, total);
            assert_eq!(ids(&candidates), expected, "round {round}, share {share}");
        }
    }
}
