//! Packing a tile of keys for the score kernel: token rows become one column per token.
//!
//! The cache keeps a key contiguous; scores of many keys at once need a vector that holds the same
//! dimension of neighbouring keys. The packed tile is float32 `[dim][TILE]`, whatever the cache is.
//! Pure data movement and widening: the fast paths and the portable one agree bit for bit.

use half::bf16;
use pulp::Simd;

use crate::element::{Dtype, Element};
use crate::tile::TILE;

/// Writes `packed[d * TILE + t] = rows[t][d]` for `d < dim` and `t < rows.len()`.
///
/// # Safety
/// `rows.len()` is a multiple of `S::F32_LANES` and at most [`TILE`]; each row points to `dim` readable
/// elements, `dim` a multiple of 8; `packed` points to `dim * TILE` writable values.
#[inline(always)]
pub unsafe fn pack_columns<S: Simd, C: Element>(
    simd: S,
    rows: &[*const C],
    dim: usize,
    packed: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    if matches!(C::DTYPE, Dtype::F32 | Dtype::Bf16) {
        if crate::simd::as_v4(simd).is_some() {
            for (chunk, rows) in rows.chunks_exact(16).enumerate() {
                // SAFETY: `as_v4` proves AVX-512; the rest is the caller's promise.
                unsafe { wide::pack_16_rows(rows, dim, packed.add(16 * chunk)) };
            }
            return;
        }
        if crate::simd::as_v3(simd).is_some() {
            for (chunk, rows) in rows.chunks_exact(8).enumerate() {
                // SAFETY: `as_v3` proves AVX2; the rest is the caller's promise.
                unsafe { narrow::pack_8_rows(rows, dim, packed.add(8 * chunk)) };
            }
            return;
        }
    }
    let _ = simd;
    for (t, &row) in rows.iter().enumerate() {
        for d in 0..dim {
            // SAFETY: the caller's promise.
            unsafe {
                packed
                    .add(d * TILE + t)
                    .write(row.add(d).read_unaligned().to_f32());
            };
        }
    }
}

/// AVX-512.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{
        __m512, __m512i, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
        _mm512_maskz_loadu_epi32, _mm512_set1_epi32, _mm512_shuffle_f32x4, _mm512_shuffle_ps,
        _mm512_slli_epi32, _mm512_storeu_ps, _mm512_unpackhi_ps, _mm512_unpacklo_ps,
    };

    use super::{Dtype, Element, TILE};

    /// One call of [`super::pack_columns`] for 16 rows.
    ///
    /// # Safety
    /// The machine has AVX-512F; `rows.len() == 16`; otherwise as for [`super::pack_columns`].
    #[inline(always)]
    pub(super) unsafe fn pack_16_rows<C: Element>(rows: &[*const C], dim: usize, packed: *mut f32) {
        // Words of 32 bits: one float32, or two bfloat16 of neighbouring dimensions.
        let per_word = 4 / C::DTYPE.size();
        let words = dim / per_word;
        let mut word = 0;
        while word < words {
            let count = (words - word).min(16);
            let mask = ((1_u32 << count) - 1) as u16;
            // SAFETY: AVX-512F is there; the mask keeps the loads within the row's `dim` elements and
            // the loop bounds keep the stores within the packed tile.
            unsafe {
                let mut block = [_mm512_castsi512_ps(_mm512_set1_epi32(0)); 16];
                for (vector, &row) in block.iter_mut().zip(rows) {
                    let source = row.cast::<i32>().add(word);
                    *vector = _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(mask, source));
                }
                transpose(&mut block);
                // With the usual count known, the block never leaves the registers.
                let target = packed.add(word * per_word * TILE);
                if count == 16 {
                    store_columns::<C>(&block, target);
                } else {
                    store_columns::<C>(&block[..count], target);
                }
            }
            word += 16;
        }
    }

    /// Stores each word of the columns as one or two dimensions.
    ///
    /// # Safety
    /// The machine has AVX-512F; `target` has room for the columns' dimensions, [`TILE`] values each.
    #[inline(always)]
    unsafe fn store_columns<C: Element>(columns: &[__m512], target: *mut f32) {
        for (d, &column) in columns.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                match C::DTYPE {
                    Dtype::F32 => _mm512_storeu_ps(target.add(d * TILE), column),
                    Dtype::Bf16 => {
                        let (low, high) = widen_pair(_mm512_castps_si512(column));
                        _mm512_storeu_ps(target.add(2 * d * TILE), low);
                        _mm512_storeu_ps(target.add((2 * d + 1) * TILE), high);
                    }
                    Dtype::F16 | Dtype::E4m3 => unreachable!("they take the portable path"),
                }
            }
        }
    }

    /// # Safety
    /// The machine has AVX-512F.
    #[inline(always)]
    unsafe fn widen_pair(pair: __m512i) -> (__m512, __m512) {
        // SAFETY: the caller's promise.
        unsafe {
            let upper_half = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            (
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pair)),
                _mm512_castsi512_ps(_mm512_and_si512(pair, upper_half)),
            )
        }
    }

    /// Transposes 16 x 16 words.
    ///
    /// # Safety
    /// The machine has AVX-512F.
    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // rows of a matrix that is being turned
    unsafe fn transpose(m: &mut [__m512; 16]) {
        // SAFETY: the caller's promise.
        unsafe {
            // Within 128-bit lanes: 4 x 4 transposes.
            for i in (0..16).step_by(4) {
                let (a, b) = (
                    _mm512_unpacklo_ps(m[i], m[i + 1]),
                    _mm512_unpackhi_ps(m[i], m[i + 1]),
                );
                let (c, d) = (
                    _mm512_unpacklo_ps(m[i + 2], m[i + 3]),
                    _mm512_unpackhi_ps(m[i + 2], m[i + 3]),
                );
                m[i] = _mm512_shuffle_ps::<0x44>(a, c);
                m[i + 1] = _mm512_shuffle_ps::<0xee>(a, c);
                m[i + 2] = _mm512_shuffle_ps::<0x44>(b, d);
                m[i + 3] = _mm512_shuffle_ps::<0xee>(b, d);
            }
            // Among the lanes: 4 x 4 transposes of whole lanes.
            for i in 0..4 {
                let [a, b, c, d] = [m[i], m[i + 4], m[i + 8], m[i + 12]];
                let (ab_even, ab_odd) = (
                    _mm512_shuffle_f32x4::<0x88>(a, b),
                    _mm512_shuffle_f32x4::<0xdd>(a, b),
                );
                let (cd_even, cd_odd) = (
                    _mm512_shuffle_f32x4::<0x88>(c, d),
                    _mm512_shuffle_f32x4::<0xdd>(c, d),
                );
                m[i] = _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even);
                m[i + 4] = _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd);
                m[i + 8] = _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even);
                m[i + 12] = _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd);
            }
        }
    }
}

/// AVX2.
#[cfg(target_arch = "x86_64")]
mod narrow {
    use std::arch::x86_64::{
        __m256, __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_castps_si256,
        _mm256_castsi256_ps, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_set1_epi32,
        _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_storeu_ps,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps, _mm256_zextsi128_si256,
    };

    use super::{Dtype, Element, TILE};

    /// One call of [`super::pack_columns`] for 8 rows.
    ///
    /// # Safety
    /// The machine has AVX2; `rows.len() == 8`; otherwise as for [`super::pack_columns`].
    #[inline(always)]
    pub(super) unsafe fn pack_8_rows<C: Element>(rows: &[*const C], dim: usize, packed: *mut f32) {
        let per_word = 4 / C::DTYPE.size();
        let words = dim / per_word; // a multiple of 4
        let mut word = 0;
        while word < words {
            let count = (words - word).min(8);
            // SAFETY: AVX2 is there; loads stay within the row (8 or 4 words are left), stores within
            // the packed tile.
            unsafe {
                let mut block = [_mm256_setzero_ps(); 8];
                for (vector, &row) in block.iter_mut().zip(rows) {
                    let source = row.cast::<f32>().add(word);
                    *vector = if count == 8 {
                        _mm256_loadu_ps(source)
                    } else {
                        _mm256_castsi256_ps(_mm256_zextsi128_si256(_mm_loadu_si128(source.cast())))
                    };
                }
                transpose(&mut block);
                // With the usual count known, the block never leaves the registers.
                let target = packed.add(word * per_word * TILE);
                if count == 8 {
                    store_columns::<C>(&block, target);
                } else {
                    store_columns::<C>(&block[..count], target);
                }
            }
            word += 8;
        }
    }

    /// Stores each word of the columns as one or two dimensions.
    ///
    /// # Safety
    /// The machine has AVX2; `target` has room for the columns' dimensions, [`TILE`] values each.
    #[inline(always)]
    unsafe fn store_columns<C: Element>(columns: &[__m256], target: *mut f32) {
        for (d, &column) in columns.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                match C::DTYPE {
                    Dtype::F32 => _mm256_storeu_ps(target.add(d * TILE), column),
                    Dtype::Bf16 => {
                        let (low, high) = widen_pair(_mm256_castps_si256(column));
                        _mm256_storeu_ps(target.add(2 * d * TILE), low);
                        _mm256_storeu_ps(target.add((2 * d + 1) * TILE), high);
                    }
                    Dtype::F16 | Dtype::E4m3 => unreachable!("they take the portable path"),
                }
            }
        }
    }

    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    unsafe fn widen_pair(pair: __m256i) -> (__m256, __m256) {
        // SAFETY: the caller's promise.
        unsafe {
            let upper_half = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            (
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pair)),
                _mm256_castsi256_ps(_mm256_and_si256(pair, upper_half)),
            )
        }
    }

    /// Transposes 8 x 8 words.
    ///
    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // rows of a matrix that is being turned
    unsafe fn transpose(m: &mut [__m256; 8]) {
        // SAFETY: the caller's promise.
        unsafe {
            for i in (0..8).step_by(4) {
                let (a, b) = (
                    _mm256_unpacklo_ps(m[i], m[i + 1]),
                    _mm256_unpackhi_ps(m[i], m[i + 1]),
                );
                let (c, d) = (
                    _mm256_unpacklo_ps(m[i + 2], m[i + 3]),
                    _mm256_unpackhi_ps(m[i + 2], m[i + 3]),
                );
                m[i] = _mm256_shuffle_ps::<0x44>(a, c);
                m[i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                m[i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
                m[i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
            }
            for i in 0..4 {
                let (a, b) = (m[i], m[i + 4]);
                m[i] = _mm256_permute2f128_ps::<0x20>(a, b);
                m[i + 4] = _mm256_permute2f128_ps::<0x31>(a, b);
            }
        }
    }
}

/// The bfloat16 paths read two elements as one little-endian word.
const _: () = assert!(size_of::<bf16>() == 2 && cfg!(target_endian = "little"));
