//! Small fused operations between the matrix products of a decoder layer.
//!
//! Row by row, arithmetic in float32; a row's result does not depend on the others or on threads.

use pulp::{Simd, WithSimd};

use crate::element::Element;
use crate::parallel;
use crate::prologue::inverse_rms;
use crate::scratch::Scratch;
use crate::simd::{MAX_LANES, dispatch, exp2};

/// Elements below which an operation stays on one thread.
const PARALLEL_MIN_ELEMENTS: usize = 32_768;
/// Elements that one piece of work should have at least.
const ELEMENTS_PER_PIECE: usize = 16_384;

/// Tensors of [`add_rms_norm`], all contiguous `[rows, width]` but the weight.
#[derive(Clone, Copy, Debug)]
pub struct NormTensors<E, W> {
    /// Input.
    pub x: *const E,
    /// Added to the input and overwritten with the sum; null: nothing is added or overwritten.
    pub residual: *mut E,
    /// `[width]` weight.
    pub weight: *const W,
    /// Output.
    pub out: *mut E,
    /// Rows of the tensors.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
}

// SAFETY: the pointers are only used under `add_rms_norm`'s contract, each row by one thread.
unsafe impl<E: Sync, W: Sync> Sync for NormTensors<E, W> {}

/// `residual += x; out = residual / sqrt(mean(residual^2) + eps) * weight`, per row.
///
/// The sum is rounded to the tensor's type before it is normalised, as it would be by two operations.
///
/// # Safety
/// The pointers are valid for the shapes documented at [`NormTensors`] and, apart from the null
/// residual, do not overlap.
pub unsafe fn add_rms_norm<E: Element, W: Element>(
    tensors: NormTensors<E, W>,
    eps: f32,
    threads: usize,
) {
    for_rows(tensors.rows, tensors.width, threads, &|begin, end| {
        let tensors = &tensors;
        Scratch::with(|scratch| {
            dispatch(NormRows {
                tensors,
                eps,
                begin,
                end,
                scratch,
            });
        });
    });
}

struct NormRows<'a, E, W> {
    tensors: &'a NormTensors<E, W>,
    eps: f32,
    begin: usize,
    end: usize,
    scratch: &'a mut Scratch,
}

impl<E: Element, W: Element> WithSimd for NormRows<'_, E, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.tensors.width;
        let sum = self.scratch.head(width);
        for row in self.begin..self.end {
            // SAFETY: rows are within the tensors by the contract of `add_rms_norm`.
            unsafe { norm_row(simd, self.tensors, row * width, self.eps, sum) };
        }
    }
}

/// # Safety
/// `at` is the offset of a row of the tensors; `sum` has the width of a row.
#[inline(always)]
unsafe fn norm_row<S: Simd, E: Element, W: Element>(
    simd: S,
    tensors: &NormTensors<E, W>,
    at: usize,
    eps: f32,
    sum: &mut [f32],
) {
    let (lanes, width) = (S::F32_LANES, tensors.width);
    let whole = width - width % lanes;
    // SAFETY: the caller's promise; offsets stay within the row.
    unsafe {
        let (x, out) = (tensors.x.add(at), tensors.out.add(at));
        let add = !tensors.residual.is_null();
        let residual = if add {
            tensors.residual.add(at)
        } else {
            tensors.residual
        };
        for i in (0..whole).step_by(lanes) {
            let mut value = E::load(simd, x.add(i));
            if add {
                value = simd.add_f32s(value, E::load(simd, residual.add(i)));
                E::store(simd, residual.add(i), value);
                value = E::load(simd, residual.add(i));
            }
            f32::store(simd, sum.as_mut_ptr().add(i), value);
        }
        for (i, sum) in sum.iter_mut().enumerate().skip(whole) {
            let mut value = x.add(i).read().to_f32();
            if add {
                let rounded = E::from_f32(value + residual.add(i).read().to_f32());
                residual.add(i).write(rounded);
                value = rounded.to_f32();
            }
            *sum = value;
        }
        let factor = inverse_rms(simd, sum, eps);
        for i in (0..whole).step_by(lanes) {
            let value = f32::load(simd, sum.as_ptr().add(i));
            let scaled = simd.mul_f32s(value, simd.splat_f32s(factor));
            let weight = W::load(simd, tensors.weight.add(i));
            E::store(simd, out.add(i), simd.mul_f32s(scaled, weight));
        }
        for (i, sum) in sum.iter().enumerate().skip(whole) {
            let weight = tensors.weight.add(i).read().to_f32();
            out.add(i).write(E::from_f32(sum * factor * weight));
        }
    }
}

/// `out[i] = silu(gate[i]) * up[i]` for rows `[gate, up]` of twice the width.
///
/// # Safety
/// `x` is `[rows, 2 * width]`, `out` `[rows, width]`, both contiguous and apart.
pub unsafe fn silu_and_mul<E: Element>(
    x: *const E,
    out: *mut E,
    rows: usize,
    width: usize,
    threads: usize,
) {
    let tensors = GateTensors { x, out, width };
    for_rows(rows, width, threads, &|begin, end| {
        dispatch(GateRows {
            tensors: &tensors,
            begin,
            end,
        });
    });
}

struct GateTensors<E> {
    x: *const E,
    out: *mut E,
    width: usize,
}

// SAFETY: the pointers are only used under `silu_and_mul`'s contract, each row by one thread.
unsafe impl<E: Sync> Sync for GateTensors<E> {}

struct GateRows<'a, E> {
    tensors: &'a GateTensors<E>,
    begin: usize,
    end: usize,
}

impl<E: Element> WithSimd for GateRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.tensors.width;
        let whole = width - width % S::F32_LANES;
        for row in self.begin..self.end {
            // SAFETY: rows are within the tensors by the contract of `silu_and_mul`.
            unsafe {
                let gate = self.tensors.x.add(row * 2 * width);
                let up = gate.add(width);
                let out = self.tensors.out.add(row * width);
                for i in (0..whole).step_by(S::F32_LANES) {
                    let value = silu(simd, E::load(simd, gate.add(i)));
                    E::store(
                        simd,
                        out.add(i),
                        simd.mul_f32s(value, E::load(simd, up.add(i))),
                    );
                }
                // The rest takes the same vector path, so that a value does not depend on its place.
                let mut last = [0.0; MAX_LANES];
                for i in whole..width {
                    last[i - whole] = gate.add(i).read().to_f32();
                }
                let value = silu(simd, f32::load(simd, last.as_ptr()));
                f32::store(simd, last.as_mut_ptr(), value);
                for i in whole..width {
                    let product = last[i - whole] * up.add(i).read().to_f32();
                    out.add(i).write(E::from_f32(product));
                }
            }
        }
    }
}

/// `x / (1 + e^-x)`, from the side where the exponential cannot overflow.
#[inline(always)]
fn silu<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let one = simd.splat_f32s(1.0);
    let exponent = simd.mul_f32s(simd.abs_f32s(x), simd.splat_f32s(-std::f32::consts::LOG2_E));
    let small = exp2(simd, exponent); // e^-|x|
    let is_negative = simd.less_than_f32s(x, simd.splat_f32s(0.0));
    let numerator = simd.select_f32s(is_negative, simd.mul_f32s(x, small), x);
    simd.div_f32s(numerator, simd.add_f32s(one, small))
}

/// Cuts rows into pieces and runs them, on several threads if there is enough to do.
fn for_rows(rows: usize, width: usize, threads: usize, body: &(dyn Fn(usize, usize) + Sync)) {
    if rows * width < PARALLEL_MIN_ELEMENTS || threads <= 1 {
        body(0, rows);
        return;
    }
    let per_piece = (ELEMENTS_PER_PIECE / width.max(1)).max(1);
    parallel::for_each(threads, rows.div_ceil(per_piece), &|piece| {
        let begin = piece * per_piece;
        body(begin, (begin + per_piece).min(rows));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silu_and_mul_agrees_with_the_formula() {
        let (rows, width) = (3, 21);
        let x: Vec<f32> = (0..rows * 2 * width)
            .map(|i| (i as f32 - 60.0) * 0.37)
            .collect();
        let mut out = vec![0.0_f32; rows * width];
        // SAFETY: the vectors have the sizes that are passed.
        unsafe { silu_and_mul(x.as_ptr(), out.as_mut_ptr(), rows, width, 1) };
        for row in 0..rows {
            for i in 0..width {
                let gate = f64::from(x[row * 2 * width + i]);
                let up = f64::from(x[row * 2 * width + width + i]);
                let expected = gate / (1.0 + (-gate).exp()) * up;
                let found = f64::from(out[row * width + i]);
                assert!(
                    (found - expected).abs() <= 1e-6 * expected.abs() + 1e-12,
                    "{gate} {up}"
                );
            }
        }
    }

    #[test]
    fn add_rms_norm_agrees_with_the_formula() {
        let width = 37;
        let x: Vec<f32> = (0..width).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut residual: Vec<f32> = (0..width).map(|i| (i as f32 * 1.3).cos()).collect();
        let weight: Vec<f32> = (0..width).map(|i| 0.5 + i as f32 * 0.01).collect();
        let expected_sum: Vec<f32> = x.iter().zip(&residual).map(|(a, b)| a + b).collect();
        let square: f64 = expected_sum.iter().map(|&s| f64::from(s).powi(2)).sum();
        let mut out = vec![0.0_f32; width];
        let tensors = NormTensors {
            x: x.as_ptr(),
            residual: residual.as_mut_ptr(),
            weight: weight.as_ptr(),
            out: out.as_mut_ptr(),
            rows: 1,
            width,
        };
        // SAFETY: the vectors have the sizes that are passed.
        unsafe { add_rms_norm(tensors, 1e-5, 1) };
        assert_eq!(residual, expected_sum);
        for i in 0..width {
            let expected =
                f64::from(expected_sum[i] * weight[i]) / (square / width as f64 + 1e-5).sqrt();
            assert!((f64::from(out[i]) - expected).abs() < 1e-6, "{i}");
        }
    }
}
