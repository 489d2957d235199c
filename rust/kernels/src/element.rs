//! The two element types of activations and caches, float32 and bfloat16.
//!
//! All arithmetic is float32; an [`Element`] only says how vectors of it are loaded and stored.
//! bfloat16 is the upper half of a float32, so widening is a shift and narrowing rounds to the nearest
//! even, exactly as `PyTorch` does it.

use half::bf16;
use pulp::Simd;

use crate::simd;

/// Element type of a tensor, as the caller names it at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A type that tensors may have.
pub trait Element: Copy + Send + Sync + 'static {
    /// The type's run-time name.
    const DTYPE: Dtype;

    /// Widens one element.
    fn to_f32(self) -> f32;

    /// Rounds to the nearest element, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Loads one vector.
    ///
    /// # Safety
    /// `ptr` points to at least `S::F32_LANES` readable elements.
    unsafe fn load<S: Simd>(simd: S, ptr: *const Self) -> S::f32s;

    /// Rounds and stores one vector.
    ///
    /// # Safety
    /// `ptr` points to at least `S::F32_LANES` writable elements.
    unsafe fn store<S: Simd>(simd: S, ptr: *mut Self, values: S::f32s);
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(_: S, ptr: *const Self) -> S::f32s {
        // SAFETY: the caller vouches for the lanes; unaligned reads need no more.
        unsafe { ptr.cast::<S::f32s>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(_: S, ptr: *mut Self, values: S::f32s) {
        // SAFETY: as for `load`.
        unsafe { ptr.cast::<S::f32s>().write_unaligned(values) }
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, ptr: *const Self) -> S::f32s {
        // SAFETY: the caller vouches for the lanes.
        unsafe { simd::widen_bf16(simd, ptr.cast()) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, ptr: *mut Self, values: S::f32s) {
        // SAFETY: the caller vouches for the lanes.
        unsafe { simd::narrow_bf16(simd, ptr.cast(), values) }
    }
}
