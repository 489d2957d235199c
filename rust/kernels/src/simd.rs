//! Vector building blocks on top of `pulp`, written once for every instruction set.
//!
//! `pulp` picks the instruction set at run time; everything here is `inline(always)` so that it is
//! compiled inside the function that `pulp` enabled the set for. Where the portable form would be
//! slow, the known sets of x86-64 are recognised by type (see [`as_v4`]) and use their own
//! instructions; results are bit for bit the same.

use std::any::Any;
use std::sync::atomic::{AtomicU8, Ordering};

use pulp::{Simd, WithSimd};

/// Most lanes a float32 vector may have.
pub const MAX_LANES: usize = 16;

/// The widest instruction set that [`dispatch`] may use; see [`limit_instruction_set`].
static LIMIT: AtomicU8 = AtomicU8::new(Limit::None as u8);

/// Instruction sets to hold the kernels to, for tests of the paths that a machine would not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Limit {
    /// The best of this machine.
    None,
    /// AVX2 with FMA, on x86-64; elsewhere no limit.
    Avx2,
    /// One value at a time.
    Scalar,
}

/// Holds all later calls to an instruction set; results may differ in the last bits between sets.
pub fn limit_instruction_set(limit: Limit) {
    LIMIT.store(limit as u8, Ordering::Relaxed);
}

/// Runs `op` with the best instruction set of this machine, or within the limit.
#[inline]
pub fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
    let limit = LIMIT.load(Ordering::Relaxed);
    if limit == Limit::Scalar as u8 {
        return Simd::vectorize(pulp::Scalar, op);
    }
    #[cfg(target_arch = "x86_64")]
    if limit == Limit::Avx2 as u8
        && let Some(simd) = pulp::x86::V3::try_new()
    {
        return Simd::vectorize(simd, op);
    }
    pulp::Arch::new().dispatch(op)
}

/// The token of AVX-512 if that is what `S` is; folds to a constant.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn as_v4<S: Simd>(simd: S) -> Option<pulp::x86::V4> {
    (&simd as &dyn Any).downcast_ref::<pulp::x86::V4>().copied()
}

/// The token of AVX2 with FMA if that is what `S` is; folds to a constant.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn as_v3<S: Simd>(simd: S) -> Option<pulp::x86::V3> {
    (&simd as &dyn Any).downcast_ref::<pulp::x86::V3>().copied()
}

/// `a * b + c`, fused where the instruction set can.
#[inline(always)]
pub fn fma<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
    simd.mul_add_e_f32s(a, b, c)
}

/// Whether any lane of a mask is set.
///
/// (`pulp` 0.22.3 counts lanes from the wrong end of AVX-512 masks, so only this is taken from it.)
#[inline(always)]
pub fn any<S: Simd>(simd: S, mask: S::m32s) -> bool {
    simd.first_true_m32s(mask) != S::F32_LANES
}

/// `2^x` for `x <= 0`, relative error below 3e-7; exactly 1 at 0 and exactly 0 from -127 down.
///
/// Splits `x` into an integer, which becomes the exponent, and a rest within a half, for which a
/// polynomial does (the coefficients of Cephes' `exp2f`). NaN stays NaN on x86-64 and Arm.
#[inline(always)]
pub fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa.
    let magic = simd.splat_f32s(12_582_912.0);
    let x = simd.max_f32s(simd.splat_f32s(-127.0), x);
    let shifted = simd.add_f32s(x, magic);
    let rest = simd.sub_f32s(x, simd.sub_f32s(shifted, magic));
    let mut poly = simd.splat_f32s(1.535_336_2e-4);
    for coefficient in [
        1.339_887_4e-3,
        9.618_437e-3,
        5.550_332_5e-2,
        2.402_264_8e-1,
        6.931_472e-1,
        1.0,
    ] {
        poly = fma(simd, poly, rest, simd.splat_f32s(coefficient));
    }
    let biased = simd.add_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(127));
    let power = simd.wrapping_dyn_shl_u32s(biased, simd.splat_u32s(23));
    simd.mul_f32s(poly, simd.transmute_f32s_u32s(power))
}

/// Widens `S::F32_LANES` bfloat16 values at `ptr`.
///
/// # Safety
/// `ptr` points to that many readable values.
#[inline(always)]
pub unsafe fn widen_bf16<S: Simd>(simd: S, ptr: *const u16) -> S::f32s {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64 as x86;
        if as_v4(simd).is_some() {
            // SAFETY: `as_v4` proves AVX-512; the caller vouches for 16 values.
            return unsafe {
                let half = x86::_mm256_loadu_si256(ptr.cast());
                let wide = x86::_mm512_slli_epi32::<16>(x86::_mm512_cvtepu16_epi32(half));
                same_type(wide)
            };
        }
        if as_v3(simd).is_some() {
            // SAFETY: `as_v3` proves AVX2; the caller vouches for 8 values.
            return unsafe {
                let half = x86::_mm_loadu_si128(ptr.cast());
                let wide = x86::_mm256_slli_epi32::<16>(x86::_mm256_cvtepu16_epi32(half));
                same_type(wide)
            };
        }
    }
    let mut wide = simd.splat_f32s(0.0);
    let lanes = (&raw mut wide).cast::<u32>();
    for lane in 0..S::F32_LANES {
        // SAFETY: the vector has F32_LANES lanes of 32 bits; the caller vouches for `ptr`.
        unsafe {
            lanes
                .add(lane)
                .write(u32::from(ptr.add(lane).read_unaligned()) << 16);
        };
    }
    wide
}

/// Rounds a vector to bfloat16 (nearest, ties to even; NaN stays NaN) and stores it at `ptr`.
///
/// # Safety
/// `ptr` points to `S::F32_LANES` writable values.
#[inline(always)]
pub unsafe fn narrow_bf16<S: Simd>(simd: S, ptr: *mut u16, values: S::f32s) {
    let bits = simd.transmute_u32s_f32s(values);
    let shift = simd.splat_u32s(16);
    let one = simd.splat_u32s(1);
    let odd = simd.and_u32s(simd.wrapping_dyn_shr_u32s(bits, shift), one);
    let bias = simd.add_u32s(odd, simd.splat_u32s(0x7fff));
    let rounded = simd.add_u32s(bits, bias);
    let quiet_nan = simd.or_u32s(bits, simd.splat_u32s(0x0040_0000));
    let is_number = simd.equal_f32s(values, values);
    let rounded = simd.select_u32s(is_number, rounded, quiet_nan);
    let upper = simd.wrapping_dyn_shr_u32s(rounded, shift);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64 as x86;
        if as_v4(simd).is_some() {
            // SAFETY: `as_v4` proves AVX-512; the caller vouches for 16 values.
            unsafe {
                let half = x86::_mm512_cvtepi32_epi16(same_type(upper));
                x86::_mm256_storeu_si256(ptr.cast(), half);
            }
            return;
        }
    }
    let lanes = (&raw const upper).cast::<u32>();
    for lane in 0..S::F32_LANES {
        // SAFETY: the vector has F32_LANES lanes of 32 bits; the caller vouches for `ptr`.
        unsafe { ptr.add(lane).write_unaligned(lanes.add(lane).read() as u16) };
    }
}

/// Reinterprets a vector as another of the same size.
///
/// # Safety
/// Both are plain vectors of bits of the same size.
#[inline(always)]
pub unsafe fn same_type<A: Copy, B: Copy>(a: A) -> B {
    debug_assert_eq!(size_of::<A>(), size_of::<B>());
    // SAFETY: same size, and every bit pattern of a vector is valid.
    unsafe { std::mem::transmute_copy(&a) }
}

/// Asks the second-level cache for the line at `ptr`; a hint that never faults.
#[inline(always)]
pub fn prefetch<T>(ptr: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect on memory and does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}
