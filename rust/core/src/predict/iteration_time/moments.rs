//! Sums of products of an iteration's terms and time, by the number of its tokens.
//!
//! A bin forgets only when it is added to: its memory is so many iterations of its own size.

use crate::predict::iteration_time::StepShape;

/// Terms: 1, sequences, tokens, decode context, prefill pairs, samples, copies.
pub(super) const NUM_TERMS: usize = 7;
/// Sizes that bring the terms to about one, so that no rounding matters and a prior weighs alike.
pub(super) const SCALES: [f64; NUM_TERMS] = [1.0, 64.0, 512.0, 32_768.0, 1_048_576.0, 64.0, 64.0];
/// Iterations of a bin after which one counts for a third (1/e).
const MEMORY: f64 = 512.0;
/// Bins of one to eight tokens.
const SINGLE: usize = 8;
/// Bits of the mantissa that part an octave: four bins.
const PART_BITS: u32 = 2;
/// Number of bins: up to 2^17 tokens.
pub(super) const NUM_BINS: usize = SINGLE + (14 << PART_BITS);

/// The bin of an iteration with so many tokens.
pub(super) fn bin_of(tokens: f64) -> usize {
    if tokens < 8.0 {
        return (tokens.max(1.0) as usize) - 1;
    }
    // Exponent and the first bits of the mantissa, as one ascending number.
    let bits = (tokens.to_bits() >> (52 - PART_BITS)) as usize;
    let first = 8.0_f64.to_bits() >> (52 - PART_BITS);
    (SINGLE - 1 + bits - first as usize).min(NUM_BINS - 1)
}

/// Fewest tokens of a bin.
pub(super) fn fewest_tokens(bin: usize) -> f64 {
    if bin < SINGLE {
        return (bin + 1) as f64;
    }
    let first = 8.0_f64.to_bits() >> (52 - PART_BITS);
    f64::from_bits((first + (bin + 1 - SINGLE) as u64) << (52 - PART_BITS))
}

/// An iteration's terms and time, over a common scale.
pub(super) struct Row {
    terms: [f64; NUM_TERMS],
    time: f64,
}

impl Row {
    /// Of an iteration; dividing by `scale` makes of errors relative ones.
    pub(super) fn new(shape: &StepShape, time_us: f64, scale: f64) -> Self {
        let terms = [
            1.0,
            shape.sequences,
            shape.tokens,
            shape.decode_context,
            shape.prefill_pairs,
            shape.samples,
            shape.copies,
        ];
        Self {
            terms: std::array::from_fn(|at| terms[at] / SCALES[at] / scale),
            time: time_us / scale,
        }
    }
}

/// Sums of products.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moments {
    /// Of two terms; only what is on or below the diagonal.
    pub(super) products: [[f64; NUM_TERMS]; NUM_TERMS],
    /// Of a term and the time.
    pub(super) with_time: [f64; NUM_TERMS],
    /// Of the time with itself.
    pub(super) square: f64,
    /// Iterations, as far as they are not forgotten.
    pub(super) weight: f64,
}

impl Moments {
    fn add(&mut self, row: &Row) {
        const KEEP: f64 = 1.0 - 1.0 / MEMORY;
        for (at, &term) in row.terms.iter().enumerate() {
            for (sum, other) in self.products[at][..=at].iter_mut().zip(row.terms) {
                *sum = *sum * KEEP + term * other;
            }
            self.with_time[at] = self.with_time[at] * KEEP + term * row.time;
        }
        self.square = self.square * KEEP + row.time * row.time;
        self.weight = self.weight * KEEP + 1.0;
    }

    fn absorb(&mut self, other: &Self) {
        for at in 0..NUM_TERMS {
            for (sum, other) in self.products[at][..=at].iter_mut().zip(other.products[at]) {
                *sum += other;
            }
            self.with_time[at] += other.with_time[at];
        }
        self.square += other.square;
        self.weight += other.weight;
    }
}

/// The sums of each bin.
#[derive(Clone, Debug)]
pub(super) struct BinnedMoments(Vec<Moments>);

impl Default for BinnedMoments {
    fn default() -> Self {
        Self(vec![Moments::default(); NUM_BINS])
    }
}

impl BinnedMoments {
    /// Counts an iteration of a bin.
    pub(super) fn add(&mut self, bin: usize, row: &Row) {
        self.0[bin].add(row);
    }

    /// Iterations of a bin, as far as they are not forgotten.
    pub(super) fn weight(&self, bin: usize) -> f64 {
        self.0[bin].weight
    }

    /// The sums below a bin, and from it on.
    pub(super) fn split(&self, bin: usize) -> (Moments, Moments) {
        let (mut below, mut above) = (Moments::default(), Moments::default());
        for (at, moments) in self.0.iter().enumerate() {
            if moments.weight > 0.0 {
                let side = if at < bin { &mut below } else { &mut above };
                side.absorb(moments);
            }
        }
        (below, above)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_tokens_is_in_its_bin() {
        for tokens in 1..100_000_u32 {
            let tokens = f64::from(tokens);
            let bin = bin_of(tokens);
            assert!(fewest_tokens(bin) <= tokens, "{tokens} in {bin}");
            assert!(tokens < fewest_tokens(bin + 1), "{tokens} in {bin}");
        }
        assert_eq!(bin_of(1e9), NUM_BINS - 1);
    }
}
