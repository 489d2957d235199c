//! Figures of late: moments and quantiles in which what was seen long ago counts little.
//!
//! The newest value always counts the same; all before it are worth a little less each time. Buckets are
//! found by the bits of the number, so that no result depends on a machine's mathematical library.

/// Values after which one counts for a third (1/e).
const MEMORY: f64 = 4_096.0;
/// Weight of a new value beyond which all weights are scaled down.
const LARGEST_WEIGHT: f64 = 1e9;

/// Mean and standard deviation of late (West's update, with forgetting).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecentMoments {
    weight: f64,
    mean: f64,
    /// Sum of the squares of the differences from the mean.
    squares: f64,
}

impl RecentMoments {
    /// Counts a value.
    pub fn observe(&mut self, value: f64) {
        const KEEP: f64 = 1.0 - 1.0 / MEMORY;
        self.weight = self.weight * KEEP + 1.0;
        let difference = value - self.mean;
        self.mean += difference / self.weight;
        self.squares = self.squares * KEEP + difference * (value - self.mean);
    }

    /// The mean; 0 before the first value.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// The variance; 0 before the second value.
    pub fn variance(&self) -> f64 {
        if self.weight > 1.0 {
            (self.squares / self.weight).max(0.0)
        } else {
            0.0
        }
    }
}

/// Octaves of a [`RecentQuantiles`].
const OCTAVES: usize = 28;
/// Buckets of an octave, as a power of two: each is about 2 % wide.
const BUCKET_BITS: u32 = 5;
const NUM_BUCKETS: usize = OCTAVES << BUCKET_BITS;

/// Quantiles of late of positive numbers, to about 2 %.
#[derive(Clone, Debug)]
pub struct RecentQuantiles {
    /// Power of two of the smallest number that is told apart.
    lowest: i32,
    weights: Vec<f64>,
    total: f64,
    /// Weight of the next value.
    next: f64,
}

impl RecentQuantiles {
    /// Of numbers from 2^`lowest` to 2^(`lowest` + 28).
    pub fn new(lowest: i32) -> Self {
        Self {
            lowest,
            weights: vec![0.0; NUM_BUCKETS],
            total: 0.0,
            next: 1.0,
        }
    }

    /// Counts a value.
    pub fn observe(&mut self, value: f64) {
        const GROWTH: f64 = 1.0 + 1.0 / MEMORY;
        let at = self.bucket(value);
        self.weights[at] += self.next;
        self.total += self.next;
        self.next *= GROWTH;
        if self.next > LARGEST_WEIGHT {
            let scale = 1.0 / self.next;
            self.weights.iter_mut().for_each(|weight| *weight *= scale);
            self.total *= scale;
            self.next = 1.0;
        }
    }

    /// The value that a share of `q` does not exceed; `None` before the first.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        if self.total <= 0.0 {
            return None;
        }
        let mut left = q.clamp(0.0, 1.0) * self.total;
        let mut last = 0;
        for (at, &weight) in self.weights.iter().enumerate() {
            if weight > 0.0 {
                last = at;
                if left <= weight {
                    break;
                }
                left -= weight;
            }
        }
        let (low, high) = (self.edge(last), self.edge(last + 1));
        let within = (left / self.weights[last]).clamp(0.0, 1.0);
        Some(low + (high - low) * within)
    }

    fn bucket(&self, value: f64) -> usize {
        if value.is_nan() || value <= self.edge(0) {
            return 0;
        }
        // Exponent and the first bits of the mantissa, read as one number, ascend with the value.
        let bits = (value.to_bits() >> (52 - BUCKET_BITS)) as i64;
        let first = (1_023 + i64::from(self.lowest)) << BUCKET_BITS;
        ((bits - first) as usize).min(NUM_BUCKETS - 1)
    }

    fn edge(&self, bucket: usize) -> f64 {
        let first = (1_023 + i64::from(self.lowest)) << BUCKET_BITS;
        f64::from_bits(((first + bucket as i64) as u64) << (52 - BUCKET_BITS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_moments_are_those_of_the_values() {
        let mut quantiles = RecentQuantiles::new(0);
        let mut moments = RecentMoments::default();
        assert_eq!(quantiles.quantile(0.5), None);
        for at in 0..1_000_u32 {
            let value = f64::from(1_000 + at * 389 % 1_000);
            quantiles.observe(value);
            moments.observe(value);
        }
        for (q, expected) in [
            (0.0, 1_000.0),
            (0.5, 1_500.0),
            (0.99, 1_990.0),
            (1.0, 2_000.0),
        ] {
            let got = quantiles.quantile(q).expect("values were counted");
            assert!((got / expected - 1.0).abs() < 0.025, "{q}: {got}");
        }
        assert!((moments.mean() - 1_500.0).abs() < 10.0, "{moments:?}");
        assert!(
            (moments.variance().sqrt() - 288.7).abs() < 5.0,
            "{moments:?}"
        );
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut quantiles = RecentQuantiles::new(0);
        let mut moments = RecentMoments::default();
        for value in [10.0, 1_000.0] {
            for _ in 0..60_000 {
                quantiles.observe(value);
                moments.observe(value);
            }
        }
        assert!(quantiles.quantile(0.01).expect("counted") > 900.0);
        assert!((moments.mean() - 1_000.0).abs() < 1.0);
        assert!(moments.variance() < 1.0);
    }

    #[test]
    fn numbers_out_of_range_are_in_the_outermost_buckets() {
        let mut quantiles = RecentQuantiles::new(4);
        quantiles.observe(0.0);
        assert!(quantiles.quantile(0.5).expect("counted") < 17.0);
        quantiles.observe(f64::INFINITY);
        quantiles.observe(f64::INFINITY);
        assert!(quantiles.quantile(0.9).expect("counted") > 2e9);
    }
}
