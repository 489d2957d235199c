//! Before the scores: norms of q and k heads, rotary embedding, the write into the paged cache.
//!
//! Works on one head at a time, in float32, in an order fixed by the head alone. Queries are prepared
//! where they are used (`tile`), keys and values here, once per token.

use pulp::Simd;

use crate::attention::{Call, RopeTables};
use crate::element::Element;
use crate::scratch::Scratch;
use crate::simd::fma;

/// What happens to a head between the projection and the scores.
pub(crate) struct HeadTransform<'a> {
    /// Norm weight and epsilon.
    pub(crate) norm: Option<(&'a [f32], f32)>,
    /// Rotary tables and the token's position.
    pub(crate) rope: Option<(RopeTables, usize)>,
}

impl HeadTransform<'_> {
    /// Loads the head at `source` and transforms it into `target`.
    ///
    /// # Safety
    /// `source` points to `target.len()` elements; tables and weight fit that length.
    #[inline(always)]
    pub(crate) unsafe fn apply<S: Simd, E: Element>(
        &self,
        simd: S,
        source: *const E,
        target: &mut [f32],
    ) {
        for (i, x) in target.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *x = unsafe { source.add(i).read_unaligned() }.to_f32();
        }
        if let Some((weight, eps)) = self.norm {
            let factor = inverse_rms(simd, target, eps);
            for (x, w) in target.iter_mut().zip(weight) {
                *x = *x * factor * w;
            }
        }
        if let Some((tables, position)) = self.rope {
            let (first, rest) = target.split_at_mut(tables.half);
            // SAFETY: `forward` has checked that positions are within the tables.
            let (cos, sin) = unsafe {
                let row = position * tables.half;
                (
                    std::slice::from_raw_parts(tables.cos.add(row), tables.half),
                    std::slice::from_raw_parts(tables.sin.add(row), tables.half),
                )
            };
            for (((a, b), c), s) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`, summed in an order fixed by the length.
#[inline(always)]
pub(crate) fn inverse_rms<S: Simd>(simd: S, x: &[f32], eps: f32) -> f32 {
    let (vectors, tail) = S::as_simd_f32s(x);
    let mut sum = simd.splat_f32s(0.0);
    for &vector in vectors {
        sum = fma(simd, vector, vector, sum);
    }
    let tail: f32 = tail.iter().map(|x| x * x).sum();
    let mean = (simd.reduce_sum_f32s(sum) + tail) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Writes the keys and values of one token to its slot.
#[inline(always)]
pub(crate) fn write_token<S: Simd, E: Element, C: Element>(
    simd: S,
    call: &Call<'_, E, C>,
    token: usize,
    scratch: &mut Scratch,
) {
    let layer = call.layer;
    let slot = call.batch.slot(token);
    let (block, offset) = (slot / call.block_size, slot % call.block_size);
    let transform = HeadTransform {
        norm: call
            .k_norm
            .as_deref()
            .map(|weight| (weight, layer.norm_eps)),
        rope: layer
            .rope
            .map(|tables| (tables, call.batch.position(token))),
    };
    let (k_scale, v_scale) = call.cache_scales();
    let key = scratch.head(layer.head_dim);
    for kv_head in 0..layer.num_kv_heads {
        let at = call.cache_offset(block, kv_head, offset);
        // SAFETY: the slot is within the cache (`check_cache`), the heads within the projection, and
        // no other token of the step has this slot.
        unsafe {
            transform.apply(simd, call.head(token, layer.num_heads + kv_head), key);
            let k_target = call.k_cache.add(at);
            for (i, &x) in key.iter().enumerate() {
                k_target.add(i).write_unaligned(C::from_f32(x / k_scale));
            }
            let value = call.head(token, layer.num_heads + layer.num_kv_heads + kv_head);
            let v_target = call.v_cache.add(at);
            for i in 0..layer.head_dim {
                let x = value.add(i).read_unaligned().to_f32();
                v_target.add(i).write_unaligned(C::from_f32(x / v_scale));
            }
        }
    }
}
