//! A few rows of queries against one tile: scores, weights, sums of values.
//!
//! The two products keep a block of rows times vectors in registers; which block a row falls into does
//! not touch the order of its sums. The code for all sizes of blocks is long, so [`WeighRows`] and
//! [`SumRows`] are functions of their own (`Simd::vectorize`), which callers of all types share.

use pulp::{Simd, WithSimd};

use super::{Frame, TILE};
use crate::element::Element;
use crate::simd::{MAX_LANES, exp2, fma};

/// Most rows that go through a tile together; their sums stay in registers.
pub(super) const ROWS: usize = 6;

/// A few rows against one tile.
pub(super) struct Step {
    /// First row.
    pub(super) row: usize,
    /// Number of rows, at most [`ROWS`].
    pub(super) rows: usize,
    /// First position of the tile.
    pub(super) tile_begin: usize,
    /// Positions of the tile that the last of the rows sees.
    pub(super) tokens: usize,
}

/// Scores of the step's rows, made weights.
pub(super) struct WeighRows<'a> {
    frame: &'a Frame,
    step: &'a Step,
}

impl<'a> WeighRows<'a> {
    /// # Safety
    /// The step is within the frame's areas, for as long as this is there.
    pub(super) unsafe fn new(frame: &'a Frame, step: &'a Step) -> Self {
        Self { frame, step }
    }
}

impl WithSimd for WeighRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: promised to `new`.
        unsafe {
            score_rows(simd, self.frame, self.step);
            weigh_rows(simd, self.frame, self.step);
        }
    }
}

/// The weighted values, added to the sums of the step's rows.
pub(super) struct SumRows<'a, T> {
    frame: &'a Frame,
    step: &'a Step,
    values: &'a [*const T; TILE],
}

impl<'a, T> SumRows<'a, T> {
    /// # Safety
    /// The step is within the frame's areas and `values` are rows of whole vectors, for as long as this
    /// is there.
    pub(super) unsafe fn new(
        frame: &'a Frame,
        step: &'a Step,
        values: &'a [*const T; TILE],
    ) -> Self {
        Self {
            frame,
            step,
            values,
        }
    }
}

impl<T: Element> WithSimd for SumRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: promised to `new`.
        unsafe { sum_rows(simd, self.frame, self.step, self.values) };
    }
}

/// Calls `$kernel::<$types, ROWS, VECTORS>` for run-time numbers of rows (1-6) and vectors (1-4).
macro_rules! with_sizes {
    ($kernel:ident, $types:tt, $rows:expr, $vectors:expr, $arguments:tt) => {
        with_sizes!(@rows $kernel, $types, $rows, $vectors, $arguments, 1 2 3 4 5 6)
    };
    (@rows $kernel:ident, $types:tt, $rows:expr, $vectors:expr, $arguments:tt, $($r:literal)*) => {
        match $rows {
            $($r => with_sizes!(@vectors $kernel, $types, $r, $vectors, $arguments),)*
            _ => unreachable!("at most six rows"),
        }
    };
    (@vectors $kernel:ident, [$($type:ident),*], $r:literal, $vectors:expr, ($($argument:expr),*)) => {
        match $vectors {
            1 => $kernel::<$($type,)* $r, 1>($($argument),*),
            2 => $kernel::<$($type,)* $r, 2>($($argument),*),
            3 => $kernel::<$($type,)* $r, 3>($($argument),*),
            4 => $kernel::<$($type,)* $r, 4>($($argument),*),
            _ => unreachable!("at most four vectors"),
        }
    };
}

/// Vectors of one row that are summed at once; with [`ROWS`] rows they fill the registers.
const fn max_vectors<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 4 } else { 2 }
}

/// Scores of the step's rows: `weights[r][t] = queries[row + r] . keys[t]`.
///
/// # Safety
/// The step is within the frame's areas.
#[inline(always)]
unsafe fn score_rows<S: Simd>(simd: S, frame: &Frame, step: &Step) {
    let vectors = step.tokens.div_ceil(S::F32_LANES);
    let mut done = 0;
    while done < vectors {
        let count = (vectors - done).min(max_vectors::<S>());
        // SAFETY: the caller's promise; `done + count` vectors are within a tile.
        unsafe {
            let queries = frame.queries.add(step.row * frame.dim);
            let keys = frame.keys.add(done * S::F32_LANES);
            let scores = frame.weights.add(done * S::F32_LANES);
            with_sizes!(
                scores_kernel,
                [S],
                step.rows,
                count,
                (simd, queries, frame.dim, keys, scores)
            );
        }
        done += count;
    }
}

/// # Safety
/// `queries` is `[R, dim]`, `keys` `[dim, TILE]` with `V` vectors from its start, `scores` `[R, TILE]`.
#[inline(always)]
unsafe fn scores_kernel<S: Simd, const R: usize, const V: usize>(
    simd: S,
    queries: *const f32,
    dim: usize,
    keys: *const f32,
    scores: *mut f32,
) {
    let mut sums = [[simd.splat_f32s(0.0); V]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for d in 0..dim {
            let mut columns = [simd.splat_f32s(0.0); V];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = f32::load(simd, keys.add(d * TILE + v * S::F32_LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = simd.splat_f32s(*queries.add(r * dim + d));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = fma(simd, query, column, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                f32::store(simd, scores.add(r * TILE + v * S::F32_LANES), sum);
            }
        }
    }
}

/// Turns scores into weights `2^(score - maximum)` and rescales states whose maximum grew.
///
/// # Safety
/// The step is within the frame's areas.
#[inline(always)]
unsafe fn weigh_rows<S: Simd>(simd: S, frame: &Frame, step: &Step) {
    let lanes = S::F32_LANES;
    let vectors = step.tokens.div_ceil(lanes);
    for r in 0..step.rows {
        let row = step.row + r;
        let visible = frame
            .visible(row)
            .saturating_sub(step.tile_begin)
            .min(step.tokens);
        // SAFETY: the caller's promise.
        unsafe {
            let scores = frame.weights.add(r * TILE);
            let state = frame.states.add(row * frame.stride);
            let (whole, rest) = (visible / lanes, visible % lanes);
            let passed = frame.passed(row).saturating_sub(step.tile_begin);
            let seen = if passed < visible {
                visible.div_ceil(lanes)
            } else {
                0
            };
            for v in seen..vectors {
                f32::store(simd, scores.add(v * lanes), simd.splat_f32s(0.0));
            }
            if seen == 0 {
                continue;
            }
            limit(scores, visible, passed, frame.soft_cap);
            let mut highest = simd.splat_f32s(f32::NEG_INFINITY);
            for v in 0..whole {
                highest = simd.max_f32s(highest, f32::load(simd, scores.add(v * lanes)));
            }
            if rest > 0 {
                let at = scores.add(whole * lanes);
                let is_visible = simd.mask_between_m32s(0, rest as u32).mask();
                let hidden = simd.splat_f32s(f32::NEG_INFINITY);
                let masked = simd.select_f32s(is_visible, f32::load(simd, at), hidden);
                f32::store(simd, at, masked);
                highest = simd.max_f32s(highest, masked);
            }
            let weight_sums = state.add(frame.width);
            let maximum = weight_sums.add(MAX_LANES);
            let before = *maximum;
            let now = before.max(simd.reduce_max_f32s(highest));
            if now > before {
                rescale(simd, state, frame.width, before - now);
                *maximum = now;
            }
            let mut sum = f32::load(simd, weight_sums);
            let subtract = simd.splat_f32s(now);
            for v in 0..seen {
                let at = scores.add(v * lanes);
                let weight = exp2(simd, simd.sub_f32s(f32::load(simd, at), subtract));
                f32::store(simd, at, weight);
                sum = simd.add_f32s(sum, weight);
            }
            f32::store(simd, weight_sums, sum);
        }
    }
}

/// Caps the scores of the visible positions and hides those that the window has passed.
///
/// # Safety
/// `scores` has `visible` elements, more than `passed`.
#[inline(always)]
unsafe fn limit(scores: *mut f32, visible: usize, passed: usize, soft_cap: Option<f32>) {
    // SAFETY: the caller's promise.
    let scores = unsafe { std::slice::from_raw_parts_mut(scores, visible) };
    if let Some(cap) = soft_cap {
        for score in &mut scores[passed..] {
            *score = cap * (*score / cap).tanh();
        }
    }
    scores[..passed].fill(f32::NEG_INFINITY);
}

/// Multiplies a state's sums by `2^exponent`.
///
/// # Safety
/// `state` is a row's state of `width` sums of values.
#[inline(always)]
unsafe fn rescale<S: Simd>(simd: S, state: *mut f32, width: usize, exponent: f32) {
    let factor = exp2(simd, simd.splat_f32s(exponent));
    for i in (0..width + S::F32_LANES).step_by(S::F32_LANES) {
        // SAFETY: the sums of values and the sums of weights are neighbours.
        unsafe {
            let at = state.add(i);
            f32::store(simd, at, simd.mul_f32s(f32::load(simd, at), factor));
        }
    }
}

/// Adds the weighted values: `state[r] += sum over t of weights[r][t] * values[t]`.
///
/// # Safety
/// The step is within the frame's areas; `values` are rows of whole vectors.
#[inline(always)]
unsafe fn sum_rows<S: Simd, T: Element>(
    simd: S,
    frame: &Frame,
    step: &Step,
    values: &[*const T; TILE],
) {
    // Values in place have no padding, but then the width needs none.
    let vectors = frame.width / S::F32_LANES;
    let passes = vectors.div_ceil(max_vectors::<S>());
    let per_pass = vectors.div_ceil(passes);
    let mut done = 0;
    while done < vectors {
        let count = (vectors - done).min(per_pass);
        // SAFETY: the caller's promise; `done + count` vectors are within a row.
        unsafe {
            let sums = frame
                .states
                .add(step.row * frame.stride + done * S::F32_LANES);
            let begin = done * S::F32_LANES;
            with_sizes!(
                sums_kernel,
                [S, T],
                step.rows,
                count,
                (simd, frame, &values[..step.tokens], begin, sums)
            );
        }
        done += count;
    }
}

/// # Safety
/// `V` vectors from `begin` are within each row of `values` and, from its start, of `sums`
/// `[R, frame.stride]`.
#[inline(always)]
unsafe fn sums_kernel<S: Simd, T: Element, const R: usize, const V: usize>(
    simd: S,
    frame: &Frame,
    values: &[*const T],
    begin: usize,
    sums: *mut f32,
) {
    let lanes = S::F32_LANES;
    let mut totals = [[simd.splat_f32s(0.0); V]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for (r, totals) in totals.iter_mut().enumerate() {
            for (v, total) in totals.iter_mut().enumerate() {
                *total = f32::load(simd, sums.add(r * frame.stride + v * lanes));
            }
        }
        for (t, &source) in values.iter().enumerate() {
            let mut row = [simd.splat_f32s(0.0); V];
            for (v, value) in row.iter_mut().enumerate() {
                *value = T::load(simd, source.add(begin + v * lanes));
            }
            for (r, totals) in totals.iter_mut().enumerate() {
                let weight = simd.splat_f32s(*frame.weights.add(r * TILE + t));
                for (total, &value) in totals.iter_mut().zip(&row) {
                    *total = fma(simd, weight, value, *total);
                }
            }
        }
        for (r, totals) in totals.iter().enumerate() {
            for (v, &total) in totals.iter().enumerate() {
                f32::store(simd, sums.add(r * frame.stride + v * lanes), total);
            }
        }
    }
}
