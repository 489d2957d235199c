//! Gumbel noise from a counter: the same request, output and token always get the same noise.
//!
//! `argmax(logit + noise)` with independent Gumbel noise is a sample of the softmax (Gumbel 1954; Maddison
//! et al. 2014). The noise is a pure function of (seed, child, output index, token id), by
//! Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so that neither
//! preemption nor the batch nor the set of candidates ever changes a draw.

use pulp::Simd;

use crate::simd::fma;

/// Largest noise that [`gumbel`] can return, rounded up: `-ln(-ln(1 - 2^-33))`.
pub const MAX_GUMBEL: f32 = 22.9;

/// Which random stream: everything the noise depends on besides the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The request's seed.
    pub seed: u64,
    /// Which of the request's sequences.
    pub child: u32,
    /// How many output tokens the sequence has already.
    pub output_index: u32,
}

/// Tokens that share the generator's four output words: id = 64 * (block / 16) + 16 * word + block % 16.
const TOKENS_PER_ROUND: u32 = 64;

/// Noise for `F32_LANES` tokens, any ids.
#[inline(always)]
pub fn gumbel<S: Simd>(simd: S, stream: Stream, ids: S::u32s) -> S::f32s {
    let fifteen = simd.splat_u32s(15);
    let rounds = simd.wrapping_dyn_shr_u32s(ids, simd.splat_u32s(TOKENS_PER_ROUND.ilog2()));
    let block = simd.wrapping_dyn_shl_u32s(rounds, simd.splat_u32s(4));
    let block = simd.or_u32s(block, simd.and_u32s(ids, fifteen));
    let word = simd.wrapping_dyn_shr_u32s(ids, simd.splat_u32s(4));
    let word = simd.and_u32s(word, simd.splat_u32s(3));
    let words = philox(simd, stream, block);
    let mut bits = words[0];
    for (j, &other) in words.iter().enumerate().skip(1) {
        let is_this = simd.equal_u32s(word, simd.splat_u32s(j as u32));
        bits = simd.select_u32s(is_this, other, bits);
    }
    from_bits(simd, bits)
}

/// Noise for the 64 consecutive tokens from `first` (a multiple of 64): `noise[16 * j + lane group]`.
///
/// Bit for bit what [`gumbel`] gives, at a quarter of the price. Lanes beyond 16 do not exist; narrower
/// vectors call once per `offset` of 0, `F32_LANES`, ... below 16.
#[inline(always)]
pub fn gumbel_64<S: Simd>(simd: S, stream: Stream, first: u32, offset: u32) -> [S::f32s; 4] {
    let block = simd.add_u32s(simd.splat_u32s(first / 4 + offset), iota(simd));
    let words = philox(simd, stream, block);
    let mut noise = [simd.splat_f32s(0.0); 4];
    for (noise, &word) in noise.iter_mut().zip(&words) {
        *noise = from_bits(simd, word);
    }
    noise
}

/// 0, 1, 2, ...
#[inline(always)]
pub fn iota<S: Simd>(simd: S) -> S::u32s {
    let mut lanes = [0_u32; crate::simd::MAX_LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = i as u32;
    }
    simd.partial_load_u32s(&lanes[..S::U32_LANES])
}

/// Four words of 32 random bits per block.
#[inline(always)]
fn philox<S: Simd>(simd: S, stream: Stream, block: S::u32s) -> [S::u32s; 4] {
    let mut c = [
        block,
        simd.splat_u32s(stream.output_index),
        simd.splat_u32s(stream.child),
        simd.splat_u32s(0),
    ];
    let (mut key0, mut key1) = (stream.seed as u32, (stream.seed >> 32) as u32);
    let (m0, m1) = (simd.splat_u32s(0xD251_1F53), simd.splat_u32s(0xCD9E_8D57));
    for _ in 0..10 {
        let (low0, high0) = simd.widening_mul_u32s(c[0], m0);
        let (low1, high1) = simd.widening_mul_u32s(c[2], m1);
        c = [
            simd.xor_u32s(simd.xor_u32s(high1, c[1]), simd.splat_u32s(key0)),
            low1,
            simd.xor_u32s(simd.xor_u32s(high0, c[3]), simd.splat_u32s(key1)),
            low0,
        ];
        key0 = key0.wrapping_add(0x9E37_79B9);
        key1 = key1.wrapping_add(0xBB67_AE85);
    }
    c
}

/// `-ln(-ln(1 - v))` with `v = (bits + 1/2) / 2^32`.
#[inline(always)]
fn from_bits<S: Simd>(simd: S, bits: S::u32s) -> S::f32s {
    // Winners have a tiny v, so v keeps all its precision: upper and lower half are converted exactly.
    let (low, high) = (
        simd.and_u32s(bits, simd.splat_u32s(0xffff)),
        simd.wrapping_dyn_shr_u32s(bits, simd.splat_u32s(16)),
    );
    let low = simd.add_f32s(small_to_f32(simd, low), simd.splat_f32s(0.5));
    let v = fma(
        simd,
        small_to_f32(simd, high),
        simd.splat_f32s(65_536.0),
        low,
    );
    let v = simd.mul_f32s(v, simd.splat_f32s(2.0_f32.powi(-32)));
    // ln(1 - v) = ln(u) + ((1 - u) - v) / u: the rest repairs the rounding of u (Kahan).
    let one = simd.splat_f32s(1.0);
    let u = simd.sub_f32s(one, v);
    let u = simd.max_f32s(u, simd.splat_f32s(2.0_f32.powi(-26)));
    let rest = simd.sub_f32s(simd.sub_f32s(one, u), v);
    let exponential = simd.neg_f32s(simd.add_f32s(ln(simd, u), simd.div_f32s(rest, u)));
    simd.neg_f32s(ln(simd, exponential))
}

/// Converts integers below 2^23.
#[inline(always)]
fn small_to_f32<S: Simd>(simd: S, x: S::u32s) -> S::f32s {
    let biased = simd.or_u32s(x, simd.splat_u32s(0x4b00_0000)); // 2^23 + x
    simd.sub_f32s(
        simd.transmute_f32s_u32s(biased),
        simd.splat_f32s(8_388_608.0),
    )
}

/// Natural logarithm of a positive normal number (Cephes' `logf`), relative error about 1e-7.
#[inline(always)]
pub fn ln<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2))
    let root = simd.splat_u32s(0x3f35_04f3);
    let bits = simd.sub_u32s(simd.transmute_u32s_f32s(x), root);
    let biased = simd.add_u32s(bits, simd.splat_u32s(128 << 23));
    let biased = simd.wrapping_dyn_shr_u32s(biased, simd.splat_u32s(23));
    let e = simd.sub_f32s(small_to_f32(simd, biased), simd.splat_f32s(128.0));
    let m = simd.add_u32s(simd.and_u32s(bits, simd.splat_u32s(0x007f_ffff)), root);
    let m = simd.sub_f32s(simd.transmute_f32s_u32s(m), simd.splat_f32s(1.0));
    let mut poly = simd.splat_f32s(7.037_683_6e-2);
    for coefficient in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_7e-1,
        2.000_071_4e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        poly = fma(simd, poly, m, simd.splat_f32s(coefficient));
    }
    let square = simd.mul_f32s(m, m);
    let mut y = simd.mul_f32s(simd.mul_f32s(poly, m), square);
    y = fma(simd, e, simd.splat_f32s(-2.121_944_4e-4), y);
    y = fma(simd, square, simd.splat_f32s(-0.5), y);
    fma(simd, e, simd.splat_f32s(0.693_359_4), simd.add_f32s(m, y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::WithSimd;

    struct Sparse(Stream, Vec<u32>);

    impl WithSimd for Sparse {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let mut all = Vec::new();
            for ids in self.1.chunks(S::U32_LANES) {
                let noise = gumbel(simd, self.0, simd.partial_load_u32s(ids));
                let mut lanes = vec![0.0; S::F32_LANES];
                simd.partial_store_f32s(&mut lanes, noise);
                all.extend_from_slice(&lanes[..ids.len()]);
            }
            all
        }
    }

    struct Dense(Stream, u32);

    impl WithSimd for Dense {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let mut all = vec![0.0; 64];
            for offset in (0..16).step_by(S::F32_LANES) {
                let noise = gumbel_64(simd, self.0, self.1, offset as u32);
                for (j, &noise) in noise.iter().enumerate() {
                    let begin = 16 * j + offset;
                    simd.partial_store_f32s(&mut all[begin..begin + S::F32_LANES], noise);
                }
            }
            all
        }
    }

    struct Words(Stream);

    impl WithSimd for Words {
        type Output = [u32; 4];

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> [u32; 4] {
            let words = philox(simd, self.0, simd.splat_u32s(0));
            words.map(|word| {
                let mut lanes = vec![0; S::U32_LANES];
                simd.partial_store_u32s(&mut lanes, word);
                lanes[0]
            })
        }
    }

    const STREAM: Stream = Stream {
        seed: 0x0123_4567_89ab_cdef,
        child: 3,
        output_index: 77,
    };

    /// The known answer of the authors' test suite for a zero counter and key.
    #[test]
    fn philox_gives_the_known_answer() {
        let zero = Stream {
            seed: 0,
            child: 0,
            output_index: 0,
        };
        let expected = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(crate::simd::dispatch(Words(zero)), expected);
        assert_eq!(Words(zero).with_simd(pulp::Scalar), expected);
    }

    #[test]
    fn dense_and_sparse_noise_are_the_same_bits_on_every_instruction_set() {
        for first in [0, 64, 49_088] {
            let ids: Vec<u32> = (first..first + 64).collect();
            let sparse = crate::simd::dispatch(Sparse(STREAM, ids));
            assert_eq!(sparse, crate::simd::dispatch(Dense(STREAM, first)));
        }
    }

    #[test]
    fn noise_follows_the_formula() {
        let ids: Vec<u32> = (0..100_000).collect();
        let noise = crate::simd::dispatch(Sparse(STREAM, ids));
        let mean = noise.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
        let below_zero = noise.iter().filter(|&&x| x < 0.0).count() as f64 / 1e5;
        // Euler's constant, and P(g < 0) = 1/e, each to about four standard errors.
        assert!((mean - 0.577_216).abs() < 0.016, "{mean}");
        assert!((below_zero - 0.367_879).abs() < 0.006, "{below_zero}");
        assert!(noise.iter().all(|&x| x.is_finite() && x <= MAX_GUMBEL));
    }

    struct Ln(f32);

    impl WithSimd for Ln {
        type Output = f32;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            let mut lanes = vec![0.0; S::F32_LANES];
            simd.partial_store_f32s(&mut lanes, ln(simd, simd.splat_f32s(self.0)));
            lanes[0]
        }
    }

    #[test]
    fn ln_is_accurate() {
        for i in 0..20_000 {
            let x = 1.1e-10_f32 * 1.0013_f32.powi(i);
            let (found, expected) = (f64::from(crate::simd::dispatch(Ln(x))), f64::from(x).ln());
            let error = (found - expected).abs();
            assert!(
                error <= 3e-7 * expected.abs().max(0.1),
                "ln {x}: {found} {expected}"
            );
        }
    }
}
