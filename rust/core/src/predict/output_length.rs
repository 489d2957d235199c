//! How long an answer will be: a belief learned from those that ended.
//!
//! A [`LengthBelief`] is a histogram of output lengths over bins that widen with the length (an eighth
//! of it at most), kept as cumulative counts, so that a conditional quantile is one search in an array.
//! Each answer takes a thousandth off the weight of those before it: the window of about 1,000 that
//! Past-Future (ASPLOS'25) keeps, without the window. What is asked is always conditional: of an answer
//! that has `generated` tokens and goes on, only lengths beyond that are possible.
//!
//! A prior is never forgotten: [`PRIOR`] answers spread evenly over the bins, so about evenly over the
//! logarithm of the length. It is all there is before the first answer has ended (the median is then
//! 2,000 tokens, and a high quantile whatever `max_tokens` allows), and it is what is left
//! for an answer that is longer than any before it.

/// Answers that a belief remembers.
const MEMORY: u32 = 1_000;
/// What an answer is taken to be while none has ended, in tokens.
const FIRST_GUESS: f64 = 128.0;
/// Weight of the prior, in answers.
const PRIOR: f64 = 2.0;

/// Bins of an octave; lengths below it have a bin each.
const PER_OCTAVE: u32 = 8;
/// Lengths from here on are all the same.
const LONGEST: u32 = 1 << 20;
const NUM_BINS: usize = bin(LONGEST - 1) + 1;

/// What is believed of output lengths, in tokens; the newest count as one in [`MEMORY`] at least.
#[derive(Clone, Debug, Default)]
pub struct LengthBelief {
    mean: f64,
    count: u32,
    /// Weight of the answers shorter than each bin's shortest length, and at last of all.
    below: Option<Box<[f32; NUM_BINS + 1]>>,
}

impl LengthBelief {
    /// Counts an answer that ended.
    pub fn learn(&mut self, tokens: u32) {
        self.count = (self.count + 1).min(MEMORY);
        self.mean += (f64::from(tokens) - self.mean) / f64::from(self.count);
        let below = self
            .below
            .get_or_insert_with(|| Box::new([0.0; NUM_BINS + 1]));
        for weight in below.iter_mut() {
            *weight *= 1.0 - 1.0 / MEMORY as f32;
        }
        for weight in &mut below[bin(tokens.min(LONGEST - 1)) + 1..] {
            *weight += 1.0;
        }
    }

    /// Answers that were counted, at most as many as are remembered.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Mean length; a guess while no answer has ended.
    pub fn mean(&self) -> f64 {
        if self.count == 0 {
            FIRST_GUESS
        } else {
            self.mean
        }
    }

    /// The length that an answer of more than `generated` tokens does not exceed, with probability
    /// `quantile`. More than `generated`; 1 is no bound.
    pub fn quantile_after(&self, generated: u32, quantile: f64) -> u32 {
        if quantile >= 1.0 || generated >= LONGEST - 1 {
            return u32::MAX;
        }
        let begin = self.weight_below(generated + 1);
        let wanted = begin + quantile.max(0.0) * (self.weight_before(NUM_BINS) - begin);
        let (mut low, mut high) = (bin(generated + 1), NUM_BINS - 1);
        while low < high {
            let middle = usize::midpoint(low, high);
            if self.weight_before(middle + 1) < wanted {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let (before, after) = (self.weight_before(low), self.weight_before(low + 1));
        let share = ((wanted - before) / (after - before)).clamp(0.0, 1.0);
        let length = f64::from(shortest(low)) + share * f64::from(width(low));
        (length.ceil() as u32).saturating_sub(1).max(generated + 1)
    }

    /// Weight of the answers shorter than `tokens`; those within a bin are spread over it.
    fn weight_below(&self, tokens: u32) -> f64 {
        let at = bin(tokens);
        let share = f64::from(tokens - shortest(at)) / f64::from(width(at));
        let (before, after) = (self.weight_before(at), self.weight_before(at + 1));
        before + share * (after - before)
    }

    /// Weight of the answers in the bins before `at`, with the prior's.
    fn weight_before(&self, at: usize) -> f64 {
        let learned = self
            .below
            .as_ref()
            .map_or(0.0, |below| f64::from(below[at]));
        learned + PRIOR * at as f64 / NUM_BINS as f64
    }
}

/// The bin of a length.
const fn bin(tokens: u32) -> usize {
    if tokens < PER_OCTAVE {
        return tokens as usize;
    }
    let octave = tokens.ilog2() - PER_OCTAVE.ilog2();
    (octave * PER_OCTAVE + (tokens >> octave)) as usize
}

/// The shortest length of a bin.
const fn shortest(bin: usize) -> u32 {
    let bin = bin as u32;
    if bin < PER_OCTAVE {
        return bin;
    }
    (PER_OCTAVE + bin % PER_OCTAVE) << (bin / PER_OCTAVE - 1)
}

/// Lengths in a bin.
const fn width(bin: usize) -> u32 {
    let bin = bin as u32;
    if bin < PER_OCTAVE {
        return 1;
    }
    1 << (bin / PER_OCTAVE - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_follow_each_other_and_hold_their_lengths() {
        let mut next = 0;
        for at in 0..NUM_BINS {
            assert_eq!(shortest(at), next);
            next += width(at);
            assert_eq!((bin(shortest(at)), bin(next - 1)), (at, at));
        }
        assert_eq!(next, LONGEST);
    }

    #[test]
    fn a_mean_is_learned_and_follows_a_change() {
        let mut belief = LengthBelief::default();
        assert!((belief.mean() - FIRST_GUESS).abs() < 1e-9);
        belief.learn(20);
        belief.learn(40);
        assert!((belief.mean() - 30.0).abs() < 1e-9);
        for _ in 0..5_000 {
            belief.learn(100);
        }
        assert!(belief.mean() > 99.0, "{}", belief.mean());
    }

    #[test]
    fn quantiles_are_those_of_the_lengths_that_are_left() {
        // Two humps, 300 to 500 and 1,500 to 1,900, in a scrambled order.
        let lengths: Vec<u32> = (0..900_u32)
            .map(|i| i * 7_919 % 900)
            .map(|i| {
                if i < 600 {
                    300 + i / 3
                } else {
                    1_500 + (i - 600) * 4 / 3
                }
            })
            .collect();
        let mut belief = LengthBelief::default();
        for &length in &lengths {
            belief.learn(length);
        }
        for generated in [0, 250, 350, 450, 600, 1_600] {
            let mut left: Vec<u32> = lengths.iter().copied().filter(|&l| l > generated).collect();
            left.sort_unstable();
            for percent in [10, 30, 50, 80, 95] {
                let exact = left[(left.len() - 1) * percent / 100];
                let told = belief.quantile_after(generated, percent as f64 / 100.0);
                let error = f64::from(told.abs_diff(exact)) / f64::from(exact);
                assert!(
                    error < 0.13,
                    "{generated}, {percent} %: {told}, not {exact}"
                );
            }
        }
    }

    #[test]
    fn what_was_never_seen_is_left_to_the_prior() {
        let mut belief = LengthBelief::default();
        let median = belief.quantile_after(0, 0.5);
        assert!((1_000..4_000).contains(&median), "{median}");
        for _ in 0..3_000 {
            belief.learn(100);
        }
        assert!((95..=104).contains(&belief.quantile_after(0, 0.5)));
        // Longer than any before it: it may well become longer still.
        let longer = belief.quantile_after(5_000, 0.5);
        assert!((10_000..200_000).contains(&longer), "{longer}");
        for generated in [0, 99, 100, 5_000, LONGEST, u32::MAX - 1] {
            for quantile in [0.0, 0.01, 0.5, 0.99] {
                assert!(belief.quantile_after(generated, quantile) > generated);
            }
            assert_eq!(belief.quantile_after(generated, 1.0), u32::MAX);
        }
    }

    #[test]
    fn old_lengths_fade() {
        let mut belief = LengthBelief::default();
        for _ in 0..3_000 {
            belief.learn(1_000);
        }
        for _ in 0..3_000 {
            belief.learn(50);
        }
        let told = belief.quantile_after(0, 0.9);
        assert!((45..=55).contains(&told), "{told}");
    }
}
