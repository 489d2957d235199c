//! The element types of activations and caches.
//!
//! All arithmetic is float32; an [`Element`] only says how vectors of it are loaded and stored.
//! bfloat16 is the upper half of a float32, so widening is a shift and narrowing rounds to the nearest
//! even, exactly as `PyTorch` does it. float16 and e4m3 are for agreement with the CUDA kernels: no
//! model runs in them on a CPU, so caches of them are worked on one value at a time, by code that is
//! compiled once and not for each instruction set.

use std::fmt;

use half::{bf16, f16};
use pulp::{Simd, WithSimd};

use crate::e4m3::E4m3;
use crate::simd;

/// Element type of a tensor, as the caller names it at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Eight bits, [`E4m3`]; for caches alone.
    E4m3,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// `PyTorch`'s name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::E4m3 => "float8_e4m3fn",
        }
    }

    /// Appends `count` elements at `data` to `wide`.
    ///
    /// # Safety
    /// `data` points to that many readable elements of this type, aligned.
    pub unsafe fn widen(self, data: *const u8, count: usize, wide: &mut Vec<f32>) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::F32 => widen_all::<f32>(data.cast(), count, wide),
                Self::Bf16 => widen_all::<bf16>(data.cast(), count, wide),
                Self::F16 => widen_all::<f16>(data.cast(), count, wide),
                Self::E4m3 => widen_all::<E4m3>(data.cast(), count, wide),
            }
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// # Safety
/// `data` points to `count` readable elements, aligned.
unsafe fn widen_all<T: Element>(data: *const T, count: usize, wide: &mut Vec<f32>) {
    // SAFETY: the caller's promise.
    let elements = unsafe { std::slice::from_raw_parts(data, count) };
    wide.extend(elements.iter().map(|x| x.to_f32()));
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

    /// Runs `op`, which works on caches of this type, with the best instruction set there is for it.
    #[inline]
    fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
        simd::dispatch(op)
    }
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

/// The methods of an [`Element`] that has no instructions of its own: one value at a time.
macro_rules! by_values {
    () => {
        #[inline(always)]
        unsafe fn load<S: Simd>(simd: S, ptr: *const Self) -> S::f32s {
            let mut wide = simd.splat_f32s(0.0);
            let lanes = (&raw mut wide).cast::<f32>();
            for lane in 0..S::F32_LANES {
                // SAFETY: the vector has that many lanes; the caller vouches for `ptr`.
                unsafe {
                    lanes
                        .add(lane)
                        .write(ptr.add(lane).read_unaligned().to_f32());
                };
            }
            wide
        }

        #[inline(always)]
        unsafe fn store<S: Simd>(_: S, ptr: *mut Self, values: S::f32s) {
            let lanes = (&raw const values).cast::<f32>();
            for lane in 0..S::F32_LANES {
                // SAFETY: as for `load`.
                unsafe {
                    ptr.add(lane)
                        .write_unaligned(Self::from_f32(lanes.add(lane).read()));
                };
            }
        }

        #[inline]
        fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
            Simd::vectorize(pulp::Scalar, op)
        }
    };
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }

    by_values!();
}

impl Element for E4m3 {
    const DTYPE: Dtype = Dtype::E4m3;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        E4m3::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        E4m3::from_f32(value)
    }

    by_values!();
}
