//! Histograms of a fixed shape: counting is a search among 22 bounds and two additions, a copy is flat.

/// Upper bounds of the buckets of a [`Histogram`], ascending; the last bucket has none.
pub type Bounds = [u64; 22];

/// Bounds for the times of requests, in microseconds: those of vLLM's time to first token, which cover
/// milliseconds to an hour.
pub const TIME_BOUNDS_US: Bounds = [
    1_000,
    5_000,
    10_000,
    20_000,
    40_000,
    60_000,
    80_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    20_000_000,
    40_000_000,
    80_000_000,
    160_000_000,
    640_000_000,
    2_560_000_000,
];

/// Bounds for the times of iterations and for the gaps that follow from them, in microseconds: finer
/// where models run, up to ten seconds.
pub const ITERATION_BOUNDS_US: Bounds = [
    250, 500, 1_000, 2_000, 3_000, 5_000, 7_500, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000,
    75_000, 100_000, 150_000, 200_000, 300_000, 500_000, 1_000_000, 2_500_000, 10_000_000,
];

/// Bounds for numbers of sequences and tokens: powers of two.
pub const SIZE_BOUNDS: Bounds = [
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536,
    131_072, 262_144, 524_288, 1_048_576, 2_097_152,
];

/// The bucket that a value is in: the first whose bound it does not exceed.
pub fn bucket(bounds: &Bounds, value: u64) -> usize {
    bounds.partition_point(|&bound| bound < value)
}

/// How often a value was in which range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(C)]
pub struct Histogram {
    /// Sum of all values.
    pub sum: u64,
    /// How often it was in each bucket, bounds included; not cumulative.
    pub counts: [u64; 23],
}

impl Histogram {
    /// Counts a value.
    pub fn observe(&mut self, bounds: &Bounds, value: u64) {
        self.add(bucket(bounds, value), value, 1);
    }

    /// Counts a value `times` times whose bucket is known.
    pub fn add(&mut self, bucket: usize, value: u64, times: u64) {
        self.counts[bucket] += times;
        self.sum += value * times;
    }

    /// Adds what another counted.
    pub(crate) fn absorb(&mut self, other: &Self) {
        for (own, other) in self.counts.iter_mut().zip(other.counts) {
            *own += other;
        }
        self.sum += other.sum;
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_in_the_first_bucket_that_bounds_it() {
        let mut histogram = Histogram::default();
        for time in [0, 1_000, 1_001, 3_000_000_000] {
            histogram.observe(&TIME_BOUNDS_US, time);
        }
        assert_eq!(histogram.counts[..2], [2, 1]);
        assert_eq!(histogram.counts.last(), Some(&1));
        assert_eq!((histogram.count(), histogram.sum), (4, 3_000_002_001));
    }

    #[test]
    fn bounds_ascend() {
        for bounds in [TIME_BOUNDS_US, ITERATION_BOUNDS_US, SIZE_BOUNDS] {
            assert!(bounds.is_sorted_by(|a, b| a < b));
        }
    }
}
