//! The fit: coefficients of at least 0 with the least squared relative error, and where the knee is.
//!
//! With the knee at `k` tokens the maximum is `t_tok * max(tokens, k)`, which is linear in `t_tok`. Places
//! for the knee are the borders of the bins. Where both sides of it were seen, `t_weights` is then freed
//! of the border, if what comes out agrees with it: max-affine regression (Magnani and Boyd, Optimization
//! and Engineering 2009) on a grid.

use crate::predict::iteration_time::StepShape;
use crate::predict::iteration_time::moments::{
    BinnedMoments, Moments, NUM_BINS, NUM_TERMS, SCALES, bin_of, fewest_tokens,
};

/// Unknowns: `t0`, `t_seq`, `t_weights`, `t_tok`, `t_ctx`, `t_pair`, `t_sample`, `t_copy`.
const NUM_UNKNOWNS: usize = 8;
const WEIGHTS: usize = 2;
const TOKEN: usize = 3;
/// Scales of the unknowns.
const UNKNOWN_SCALES: [f64; NUM_UNKNOWNS] = [
    SCALES[0], SCALES[1], 1.0, SCALES[2], SCALES[3], SCALES[4], SCALES[5], SCALES[6],
];

/// Iterations that a prior of nothing is worth, and one that was loaded.
const NO_PRIOR: f64 = 0.02;
const LOADED_PRIOR: f64 = 1.0;
/// What holds an unknown that no iteration shows, beside what is known of `t0`.
const UNSEEN: f64 = 1e-9;
/// Iterations on each side of the knee before `t_weights` is freed of the border.
const FEWEST_OF_A_SIDE: f64 = 32.0;
/// The knee moves where that lowers the error by this share at least.
const GAIN: f64 = 0.002;

/// What a cost model has learned, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Coefficients {
    /// Every iteration.
    pub t0_us: f64,
    /// A sequence.
    pub t_seq_us: f64,
    /// Reading the weights once.
    pub t_weights_us: f64,
    /// A token's arithmetic in the linear layers.
    pub t_tok_us: f64,
    /// A token of a decode's context.
    pub t_ctx_us: f64,
    /// A pair of a prefill token and a token before it.
    pub t_pair_us: f64,
    /// A row of logits that is sampled.
    pub t_sample_us: f64,
    /// A block that is copied from or to the host; 0 where none was.
    pub t_copy_us: f64,
    /// Most tokens of an iteration that they were learned from.
    pub most_tokens: f64,
}

impl Coefficients {
    /// Microseconds that an iteration takes.
    pub fn time(&self, shape: &StepShape) -> f64 {
        self.t0_us
            + self.t_seq_us * shape.sequences
            + self.t_weights_us.max(self.t_tok_us * shape.tokens)
            + self.t_ctx_us * shape.decode_context
            + self.t_pair_us * shape.prefill_pairs
            + self.t_sample_us * shape.samples
            + self.t_copy_us * shape.copies
    }

    /// Names and values, in the order of the formula.
    pub fn named(&self) -> [(&'static str, f64); 9] {
        [
            ("t0_us", self.t0_us),
            ("t_seq_us", self.t_seq_us),
            ("t_weights_us", self.t_weights_us),
            ("t_tok_us", self.t_tok_us),
            ("t_ctx_us", self.t_ctx_us),
            ("t_pair_us", self.t_pair_us),
            ("t_sample_us", self.t_sample_us),
            ("t_copy_us", self.t_copy_us),
            ("most_tokens", self.most_tokens),
        ]
    }

    /// Those of a machine on which all takes so many times as long.
    pub(super) fn times(self, slowdown: f64) -> Self {
        let slower = self.unknowns().map(|unknown| unknown * slowdown);
        Self {
            most_tokens: self.most_tokens,
            ..Self::of(&slower)
        }
    }

    fn unknowns(&self) -> [f64; NUM_UNKNOWNS] {
        let named = self.named();
        std::array::from_fn(|at| named[at].1 * UNKNOWN_SCALES[at])
    }

    fn of(unknowns: &[f64; NUM_UNKNOWNS]) -> Self {
        let value = |at: usize| unknowns[at] / UNKNOWN_SCALES[at];
        Self {
            t0_us: value(0),
            t_seq_us: value(1),
            t_weights_us: value(WEIGHTS),
            t_tok_us: value(TOKEN),
            t_ctx_us: value(4),
            t_pair_us: value(5),
            t_sample_us: value(6),
            t_copy_us: value(7),
            most_tokens: 0.0,
        }
    }
}

/// The coefficients, and the knee they were found with.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    coefficients: Coefficients,
    prior: Option<[f64; NUM_UNKNOWNS]>,
    /// The first bin beyond the knee.
    knee: usize,
    /// The place for the knee to be tried next, wherever it is.
    rover: usize,
}

impl Fit {
    pub(super) fn new(loaded: Option<Coefficients>) -> Self {
        Self {
            coefficients: loaded.unwrap_or_default(),
            prior: loaded.map(|loaded| loaded.unknowns()),
            knee: loaded.map_or(0, |loaded| bin_of(loaded.t_weights_us / loaded.t_tok_us)),
            rover: 0,
        }
    }

    pub(super) fn coefficients(&self) -> &Coefficients {
        &self.coefficients
    }

    /// Fits anew: with the knee where it is, next to it, and at one other place, or at all.
    pub(super) fn update(&mut self, moments: &BinnedMoments, everywhere: bool) {
        let mut best = self.solve_on_border(moments, self.knee);
        let enough = best.error * (1.0 - GAIN);
        let near = [self.knee.wrapping_sub(1), self.knee + 1, self.rover];
        for knee in 0..NUM_BINS {
            let is_tried = everywhere || near.contains(&knee);
            if is_tried && knee != self.knee && moments.weight(knee) > 0.0 {
                let solution = self.solve_on_border(moments, knee);
                if solution.error < best.error.min(enough) {
                    best = solution;
                }
            }
        }
        self.rover = (self.rover + 1) % NUM_BINS;
        self.knee = best.knee;
        let freed = self.solve_freed(moments, best.knee);
        let unknowns = freed.unwrap_or(best).unknowns;
        self.coefficients = Coefficients::of(&unknowns);
    }

    fn solve_on_border(&self, moments: &BinnedMoments, knee: usize) -> Solution {
        let (below, above) = moments.split(knee);
        self.solve(&below, &above, knee, false)
    }

    /// Without the bins at the border, whose iterations may be of either side; `None` if a side was not
    /// seen, or the two do not meet at the border.
    fn solve_freed(&self, moments: &BinnedMoments, knee: usize) -> Option<Solution> {
        let (below, _) = moments.split(knee.saturating_sub(1));
        let (_, above) = moments.split(knee + 1);
        let sees_both = below.weight >= FEWEST_OF_A_SIDE && above.weight >= FEWEST_OF_A_SIDE;
        if !sees_both && self.prior.is_none() {
            return None;
        }
        let freed = self.solve(&below, &above, knee, true);
        let meet_at = freed.unknowns[WEIGHTS] / (freed.unknowns[TOKEN] / UNKNOWN_SCALES[TOKEN]);
        let around = fewest_tokens(knee.saturating_sub(1))..fewest_tokens(knee + 1);
        around.contains(&meet_at).then_some(freed)
    }

    /// Solves for all unknowns; unless `frees`, `t_weights` is what the border's tokens cost.
    fn solve(&self, below: &Moments, above: &Moments, knee: usize, frees: bool) -> Solution {
        let border = fewest_tokens(knee) / SCALES[2];
        let flat = if frees {
            (WEIGHTS, 1.0)
        } else {
            (TOKEN, border)
        };
        let mut equations = Equations::default();
        equations.add(
            below,
            [(0, 0), (1, 1), (flat.0, 0), (4, 3), (5, 4), (6, 5), (7, 6)],
            flat.1,
        );
        equations.add(
            above,
            [(0, 0), (1, 1), (TOKEN, 2), (4, 3), (5, 4), (6, 5), (7, 6)],
            1.0,
        );
        self.add_prior(&mut equations, below.weight + above.weight);
        let mut is_free = [true; NUM_UNKNOWNS];
        is_free[WEIGHTS] = frees;
        let mut solution = Solution {
            knee,
            ..equations.solve(is_free)
        };
        if !frees {
            let per_token = solution.unknowns[TOKEN] / UNKNOWN_SCALES[TOKEN];
            let is_flat_there = below.weight > 0.0 || self.prior.is_some();
            let tokens = if is_flat_there {
                fewest_tokens(knee)
            } else {
                0.0
            };
            solution.unknowns[WEIGHTS] = per_token * tokens;
        }
        solution
    }

    /// Holds each unknown to the prior. Of nothing, as firmly as one iteration with as much of it as a
    /// usual one has: a small one and one of few iterations are learned as any other. One that was
    /// loaded, as an iteration would that has little else: it holds what the load does not show.
    fn add_prior(&self, equations: &mut Equations, weight: f64) {
        let nothing = NO_PRIOR / weight.max(1.0);
        let unseen = UNSEEN * equations.matrix[0][0].max(f64::MIN_POSITIVE);
        for at in 0..NUM_UNKNOWNS {
            let (strength, prior) = match &self.prior {
                None => (nothing * equations.matrix[at][at] + unseen, 0.0),
                Some(prior) => {
                    let time = prior[0] + prior[WEIGHTS] + prior[at];
                    (LOADED_PRIOR / time.max(1.0).powi(2), prior[at])
                }
            };
            equations.matrix[at][at] += strength;
            equations.right[at] += strength * prior;
            equations.square += strength * prior * prior;
        }
    }
}

struct Solution {
    unknowns: [f64; NUM_UNKNOWNS],
    /// Sum of the squared relative errors, and of what the prior says.
    error: f64,
    knee: usize,
}

/// Normal equations.
#[derive(Default)]
struct Equations {
    matrix: [[f64; NUM_UNKNOWNS]; NUM_UNKNOWNS],
    right: [f64; NUM_UNKNOWNS],
    square: f64,
}

impl Equations {
    /// Adds sums, given which unknown each term belongs to; the third is times `factor`.
    fn add(&mut self, sums: &Moments, terms: [(usize, usize); NUM_TERMS], factor: f64) {
        let factor = |at: usize| if at == 2 { factor } else { 1.0 };
        for (i, &(unknown, term)) in terms.iter().enumerate() {
            for (j, &(other_unknown, other)) in terms.iter().enumerate() {
                let product = sums.products[term.max(other)][term.min(other)];
                self.matrix[unknown][other_unknown] += product * factor(i) * factor(j);
            }
            self.right[unknown] += sums.with_time[term] * factor(i);
        }
        self.square += sums.square;
    }

    /// The unknowns of at least 0, those not free being 0: whoever comes out negative is set to 0, the
    /// most negative first, until none is.
    fn solve(&self, mut is_free: [bool; NUM_UNKNOWNS]) -> Solution {
        let mut unknowns = self.solve_free(is_free);
        while let Some(worst) = most_negative(&unknowns) {
            is_free[worst] = false;
            unknowns = self.solve_free(is_free);
        }
        let mut error = self.square;
        for (at, &unknown) in unknowns.iter().enumerate() {
            let row = self.matrix[at].iter().zip(unknowns);
            let product: f64 = row.map(|(entry, other)| entry * other).sum();
            error += unknown * (product - 2.0 * self.right[at]);
        }
        Solution {
            unknowns,
            error,
            knee: 0,
        }
    }

    /// Cholesky's decomposition, over the free unknowns.
    fn solve_free(&self, is_free: [bool; NUM_UNKNOWNS]) -> [f64; NUM_UNKNOWNS] {
        let mut lower = [[0.0; NUM_UNKNOWNS]; NUM_UNKNOWNS];
        let mut forward = [0.0; NUM_UNKNOWNS];
        for row in (0..NUM_UNKNOWNS).filter(|&row| is_free[row]) {
            for column in (0..=row).filter(|&column| is_free[column]) {
                let mut sum = self.matrix[row][column];
                for (a, b) in lower[row][..column].iter().zip(&lower[column][..column]) {
                    sum -= a * b;
                }
                lower[row][column] = if row == column {
                    sum.max(f64::MIN_POSITIVE).sqrt()
                } else {
                    sum / lower[column][column]
                };
            }
            let known = lower[row][..row].iter().zip(&forward);
            let sum: f64 = known.map(|(a, b)| a * b).sum();
            forward[row] = (self.right[row] - sum) / lower[row][row];
        }
        let mut unknowns = [0.0; NUM_UNKNOWNS];
        for row in (0..NUM_UNKNOWNS).rev().filter(|&row| is_free[row]) {
            let after: f64 = (row + 1..NUM_UNKNOWNS)
                .map(|below| lower[below][row] * unknowns[below])
                .sum();
            unknowns[row] = (forward[row] - after) / lower[row][row];
        }
        unknowns
    }
}

fn most_negative(unknowns: &[f64; NUM_UNKNOWNS]) -> Option<usize> {
    let negative = (0..NUM_UNKNOWNS).filter(|&at| unknowns[at] < 0.0);
    negative.min_by(|&a, &b| unknowns[a].total_cmp(&unknowns[b]))
}
