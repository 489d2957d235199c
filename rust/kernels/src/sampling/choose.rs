//! From one row of edited logits to a token.
//!
//! Greedy rows take the best token. Others keep the candidates that min-p, top-k and top-p leave, in this
//! order, and take the one whose tempered logit plus Gumbel noise is largest. Tempered logits are
//! `(logit - peak) / temperature`, never above zero, so that no temperature can overflow them.

use pulp::{Simd, WithSimd};

use super::noise::{MAX_GUMBEL, Stream, gumbel, gumbel_64};
use super::row::RowParams;
use super::select::{Candidate, at_least, nucleus, top_k};
use crate::simd::{MAX_LANES, any, dispatch, exp2};

/// The winner of a row and how clear its win was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Its (tempered and perturbed) logit less that of the second best; infinite without a second.
    pub margin: f32,
}

/// The best token of a row by its own logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// The largest logit.
    pub logit: f32,
    /// The lowest id that has it.
    pub token: u32,
}

/// The row's peak; none if a logit is NaN or +infinity, or all are -infinity.
pub fn peak(logits: &[f32]) -> Option<Peak> {
    let logit = dispatch(Highest(logits))?;
    let token = dispatch(FirstEqual {
        logits,
        value: logit,
    })?;
    logit.is_finite().then_some(Peak {
        logit,
        token: token as u32,
    })
}

/// Takes the best token; `margin` asks for the second best too.
pub fn choose_greedily(logits: &[f32], peak: Peak, margin: bool) -> Choice {
    let token = peak.token as usize;
    let second = |part| dispatch(Highest(part)).unwrap_or(f32::NEG_INFINITY);
    let margin = if margin {
        peak.logit - second(&logits[..token]).max(second(&logits[token + 1..]))
    } else {
        0.0
    };
    Choice {
        token: peak.token,
        margin,
    }
}

/// Draws a token; `candidates` is working memory.
pub fn choose_randomly(
    logits: &[f32],
    peak: Peak,
    params: &RowParams,
    stream: Stream,
    candidates: &mut Vec<Candidate>,
) -> Choice {
    let tempered = Tempered {
        peak: peak.logit,
        temperature: params.temperature,
    };
    let floor = if params.min_p > 0.0 {
        tempered.logit_at(params.min_p)
    } else {
        f32::NEG_INFINITY
    };
    let has_top_k = params.top_k > 0 && params.top_k < logits.len();
    if has_top_k {
        top_k(logits, params.top_k, floor, candidates);
        if params.top_p < 1.0 {
            dispatch(Weigh {
                tempered,
                candidates,
            });
            let total = candidates.iter().map(|c| f64::from(c.weight)).sum();
            nucleus(candidates, params.top_p, total);
        }
    } else if params.top_p < 1.0 {
        let total = dispatch(TotalWeight {
            tempered,
            logits,
            floor,
        });
        // All tokens below this share weigh less than 1 - p together: none is in the nucleus. The
        // factor covers rounding.
        let share = 0.99 * (1.0 - f64::from(params.top_p)) * total / logits.len() as f64;
        at_least(
            logits,
            floor.max(tempered.logit_at(share as f32)),
            candidates,
        );
        dispatch(Weigh {
            tempered,
            candidates,
        });
        nucleus(candidates, params.top_p, total);
    } else if floor > f32::NEG_INFINITY {
        at_least(logits, floor, candidates);
    } else {
        return dispatch(DrawDense {
            tempered,
            logits,
            stream,
        });
    }
    dispatch(DrawSparse {
        tempered,
        candidates,
        stream,
    })
}

/// `ln(sum(exp(logit - peak)))`.
pub fn log_total(logits: &[f32], peak: f32) -> f64 {
    let tempered = Tempered {
        peak,
        temperature: 1.0,
    };
    dispatch(TotalWeight {
        tempered,
        logits,
        floor: f32::NEG_INFINITY,
    })
    .ln()
}

/// How logits become tempered logits and weights.
#[derive(Clone, Copy)]
struct Tempered {
    peak: f32,
    temperature: f32,
}

impl Tempered {
    /// `(logit - peak) / temperature`, at most zero.
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, logits: S::f32s) -> S::f32s {
        let below = simd.sub_f32s(logits, simd.splat_f32s(self.peak));
        simd.mul_f32s(below, simd.splat_f32s(1.0 / self.temperature))
    }

    /// The weight of a tempered logit: its exponential.
    #[inline(always)]
    fn weight<S: Simd>(simd: S, tempered: S::f32s) -> S::f32s {
        exp2(
            simd,
            simd.mul_f32s(tempered, simd.splat_f32s(std::f32::consts::LOG2_E)),
        )
    }

    /// The logit whose weight is `share` of the peak's.
    fn logit_at(self, share: f32) -> f32 {
        self.peak + self.temperature * share.min(1.0).ln()
    }
}

/// Loads up to a vector, filling up with -infinity.
#[inline(always)]
fn load_padded<S: Simd>(simd: S, logits: &[f32]) -> S::f32s {
    let mut lanes = [f32::NEG_INFINITY; MAX_LANES];
    lanes[..logits.len()].copy_from_slice(logits);
    simd.partial_load_f32s(&lanes[..S::F32_LANES])
}

/// The largest value, -infinity for none; nothing if there is a NaN.
struct Highest<'a>(&'a [f32]);

impl WithSimd for Highest<'_> {
    type Output = Option<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Option<f32> {
        let mut highest = [simd.splat_f32s(f32::NEG_INFINITY); 4];
        // A sum is NaN if a term is; if it is for another reason, the slow look below finds no NaN.
        let mut poison = [simd.splat_f32s(0.0); 4];
        let (vectors, tail) = S::as_simd_f32s(self.0);
        let (groups, rest) = vectors.as_chunks::<4>();
        for group in groups {
            for ((high, bad), &vector) in highest.iter_mut().zip(&mut poison).zip(group) {
                *high = simd.max_f32s(*high, vector);
                *bad = simd.add_f32s(*bad, vector);
            }
        }
        for &vector in rest {
            highest[0] = simd.max_f32s(highest[0], vector);
            poison[0] = simd.add_f32s(poison[0], vector);
        }
        let last = load_padded(simd, tail);
        highest[1] = simd.max_f32s(highest[1], last);
        let mut sum = poison[0];
        for i in 1..4 {
            highest[0] = simd.max_f32s(highest[0], highest[i]);
            sum = simd.add_f32s(sum, poison[i]);
        }
        let suspicious =
            simd.reduce_sum_f32s(sum).is_nan() || tail.iter().any(|logit| logit.is_nan());
        if suspicious && self.0.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        Some(simd.reduce_max_f32s(highest[0]))
    }
}

/// Index of the first element that equals a value.
struct FirstEqual<'a> {
    logits: &'a [f32],
    value: f32,
}

impl WithSimd for FirstEqual<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Option<usize> {
        let (vectors, tail) = S::as_simd_f32s(self.logits);
        let value = simd.splat_f32s(self.value);
        for (i, &vector) in vectors.iter().enumerate() {
            if any(simd, simd.equal_f32s(vector, value)) {
                let begin = i * S::F32_LANES;
                let mut lanes = self.logits[begin..begin + S::F32_LANES].iter();
                return lanes
                    .position(|&logit| logit == self.value)
                    .map(|lane| begin + lane);
            }
        }
        let begin = self.logits.len() - tail.len();
        tail.iter()
            .position(|&logit| logit == self.value)
            .map(|i| begin + i)
    }
}

/// Sum of the weights of all tokens with a logit of at least `floor`.
struct TotalWeight<'a> {
    tempered: Tempered,
    logits: &'a [f32],
    floor: f32,
}

impl WithSimd for TotalWeight<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f64 {
        let floor = simd.splat_f32s(self.floor);
        let mut total = 0.0;
        // Short runs in single precision, added up in double.
        for run in self.logits.chunks(64 * S::F32_LANES) {
            let mut sums = [simd.splat_f32s(0.0); 4];
            let (vectors, tail) = S::as_simd_f32s(run);
            for (i, &vector) in vectors.iter().enumerate() {
                let weight = Tempered::weight(simd, self.tempered.apply(simd, vector));
                let reaches = simd.greater_than_or_equal_f32s(vector, floor);
                let weight = simd.select_f32s(reaches, weight, simd.splat_f32s(0.0));
                sums[i % 4] = simd.add_f32s(sums[i % 4], weight);
            }
            let last = load_padded(simd, tail);
            let weight = Tempered::weight(simd, self.tempered.apply(simd, last));
            let reaches = simd.greater_than_or_equal_f32s(last, floor);
            let weight = simd.select_f32s(reaches, weight, simd.splat_f32s(0.0));
            let even = simd.add_f32s(simd.add_f32s(sums[0], sums[1]), weight);
            let odd = simd.add_f32s(sums[2], sums[3]);
            total += f64::from(simd.reduce_sum_f32s(simd.add_f32s(even, odd)));
        }
        total
    }
}

/// Fills in the candidates' weights.
struct Weigh<'a> {
    tempered: Tempered,
    candidates: &'a mut [Candidate],
}

impl WithSimd for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut lanes = [0.0; MAX_LANES];
        for chunk in self.candidates.chunks_mut(S::F32_LANES) {
            for (lane, candidate) in lanes.iter_mut().zip(chunk.iter()) {
                *lane = candidate.logit();
            }
            let logits = simd.partial_load_f32s(&lanes[..S::F32_LANES]);
            let weights = Tempered::weight(simd, self.tempered.apply(simd, logits));
            simd.partial_store_f32s(&mut lanes[..S::F32_LANES], weights);
            for (candidate, &weight) in chunk.iter_mut().zip(&lanes) {
                candidate.weight = weight;
            }
        }
    }
}

/// The two best scores so far; ties go to the lower id.
struct Race {
    best: f32,
    token: u32,
    second: f32,
}

impl Race {
    const fn new() -> Self {
        Self {
            best: f32::NEG_INFINITY,
            token: u32::MAX,
            second: f32::NEG_INFINITY,
        }
    }

    #[inline(always)]
    fn offer(&mut self, score: f32, token: u32) {
        if score > self.best || (score == self.best && token < self.token) {
            self.second = self.best;
            (self.best, self.token) = (score, token);
        } else if score > self.second {
            self.second = score;
        }
    }

    fn choice(&self) -> Choice {
        Choice {
            token: self.token,
            margin: self.best - self.second,
        }
    }
}

/// Draws among a list of candidates.
struct DrawSparse<'a> {
    tempered: Tempered,
    candidates: &'a [Candidate],
    stream: Stream,
}

impl WithSimd for DrawSparse<'_> {
    type Output = Choice;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Choice {
        let mut race = Race::new();
        let mut ids = [0; MAX_LANES];
        let mut lanes = [0.0; MAX_LANES];
        for chunk in self.candidates.chunks(S::F32_LANES) {
            for ((lane, id), candidate) in lanes.iter_mut().zip(&mut ids).zip(chunk) {
                (*lane, *id) = (candidate.logit(), candidate.id());
            }
            let logits = simd.partial_load_f32s(&lanes[..S::F32_LANES]);
            let noise = gumbel(
                simd,
                self.stream,
                simd.partial_load_u32s(&ids[..S::U32_LANES]),
            );
            let scores = simd.add_f32s(self.tempered.apply(simd, logits), noise);
            simd.partial_store_f32s(&mut lanes[..S::F32_LANES], scores);
            for ((&score, &id), _) in lanes.iter().zip(&ids).zip(chunk) {
                race.offer(score, id);
            }
        }
        race.choice()
    }
}

/// Draws among all tokens; skips those that no noise could lift.
struct DrawDense<'a> {
    tempered: Tempered,
    logits: &'a [f32],
    stream: Stream,
}

impl WithSimd for DrawDense<'_> {
    type Output = Choice;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Choice {
        let mut race = Race::new();
        let (groups, tail) = self.logits.as_chunks::<64>();
        for (i, group) in groups.iter().enumerate() {
            self.offer_group(simd, group, 64 * i as u32, 64, &mut race);
        }
        if !tail.is_empty() {
            let mut group = [f32::NEG_INFINITY; 64];
            group[..tail.len()].copy_from_slice(tail);
            self.offer_group(
                simd,
                &group,
                64 * groups.len() as u32,
                tail.len(),
                &mut race,
            );
        }
        race.choice()
    }
}

impl DrawDense<'_> {
    #[inline(always)]
    fn offer_group<S: Simd>(
        &self,
        simd: S,
        group: &[f32; 64],
        first: u32,
        count: usize,
        race: &mut Race,
    ) {
        let lanes = S::F32_LANES;
        let (vectors, _) = S::as_simd_f32s(group);
        let mut highest = simd.splat_f32s(f32::NEG_INFINITY);
        for &vector in vectors {
            highest = simd.max_f32s(highest, self.tempered.apply(simd, vector));
        }
        let needed = simd.splat_f32s(race.second - MAX_GUMBEL);
        let hopeful = simd.greater_than_f32s(highest, needed);
        if !any(simd, hopeful) {
            return;
        }
        let mut scores = [0.0; 64];
        for offset in (0..16).step_by(lanes) {
            let noise = gumbel_64(simd, self.stream, first, offset as u32);
            for (j, &noise) in noise.iter().enumerate() {
                let at = 16 * j + offset;
                let logits = simd.partial_load_f32s(&group[at..at + lanes]);
                let score = simd.add_f32s(self.tempered.apply(simd, logits), noise);
                simd.partial_store_f32s(&mut scores[at..at + lanes], score);
            }
        }
        let (vectors, _) = S::as_simd_f32s(&scores);
        for (v, &vector) in vectors.iter().enumerate() {
            let better = simd.greater_than_f32s(vector, simd.splat_f32s(race.second));
            if !any(simd, better) {
                continue;
            }
            let begin = v * lanes;
            for (i, &score) in scores[begin..begin + lanes].iter().enumerate() {
                if begin + i < count {
                    race.offer(score, first + (begin + i) as u32);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Stream = Stream {
        seed: 5,
        child: 0,
        output_index: 3,
    };

    fn logits() -> Vec<f32> {
        (0..1000)
            .map(|i| ((i * 37 % 1000) as f32 * 0.013).sin() * 4.0)
            .collect()
    }

    #[test]
    fn the_peak_is_the_lowest_id_of_the_largest_logit() {
        for count in [1, 2, 15, 16, 17, 63, 100, 1000] {
            for place in 0..count.min(40) {
                let mut logits = vec![-3.0; count];
                logits[place] = 1.5;
                logits[count - 1] = 1.5;
                assert_eq!(
                    peak(&logits),
                    Some(Peak {
                        logit: 1.5,
                        token: place as u32
                    })
                );
            }
        }
    }

    #[test]
    fn rows_without_a_peak() {
        for count in [1, 16, 33, 100] {
            for place in 0..count {
                for bad in [f32::NAN, f32::INFINITY] {
                    let mut logits = vec![1.0; count];
                    logits[place] = bad;
                    assert_eq!(peak(&logits), None, "{bad} at {place} of {count}");
                }
            }
            assert_eq!(peak(&vec![f32::NEG_INFINITY; count]), None);
            let mut one = vec![f32::NEG_INFINITY; count];
            one[count / 2] = -7.0;
            assert_eq!(
                peak(&one),
                Some(Peak {
                    logit: -7.0,
                    token: (count / 2) as u32
                })
            );
        }
        // Finite logits whose sum overflows are no NaN.
        let mut huge = vec![3e38; 100];
        huge[70] = f32::NEG_INFINITY;
        assert_eq!(
            peak(&huge),
            Some(Peak {
                logit: 3e38,
                token: 0
            })
        );
    }

    #[test]
    fn all_ways_to_draw_agree_where_nothing_is_cut() {
        let logits = logits();
        let top = peak(&logits).unwrap();
        let base = RowParams {
            temperature: 0.8,
            ..RowParams::default()
        };
        let mut candidates = Vec::new();
        for output_index in 0..200 {
            let stream = Stream {
                output_index,
                ..STREAM
            };
            let mut draw = |params| choose_randomly(&logits, top, &params, stream, &mut candidates);
            let dense = draw(base);
            assert_eq!(dense, draw(RowParams { top_k: 999, ..base }));
            assert_eq!(
                dense,
                draw(RowParams {
                    min_p: 1e-30,
                    ..base
                })
            );
            assert_eq!(
                dense.token,
                draw(RowParams {
                    top_p: 0.999_999,
                    ..base
                })
                .token
            );
        }
    }

    #[test]
    fn extreme_temperatures_give_no_nan() {
        let logits = vec![3e38, -3e38, 2.9e38];
        let top = peak(&logits).unwrap();
        let mut candidates = Vec::new();
        for temperature in [1.1e-5, 1.0, 1e30] {
            for top_p in [0.5, 1.0] {
                let params = RowParams {
                    temperature,
                    top_p,
                    ..RowParams::default()
                };
                let choice = choose_randomly(&logits, top, &params, STREAM, &mut candidates);
                assert!(
                    choice.token < 3 && !choice.margin.is_nan(),
                    "{temperature} {choice:?}"
                );
            }
        }
    }

    #[test]
    fn greedy_margin() {
        let logits = [1.0, 4.0, 2.5];
        let top = peak(&logits).unwrap();
        assert_eq!(
            choose_greedily(&logits, top, true),
            Choice {
                token: 1,
                margin: 1.5
            }
        );
        let top = peak(&[2.0]).unwrap();
        assert_eq!(choose_greedily(&[2.0], top, true).margin, f32::INFINITY);
    }
}
