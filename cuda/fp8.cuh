// Keys and values of 8 bits: e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning") with one
// scale for the keys and one for the values of a layer.
//
// A cached value is the nearest e4m3 number to value / scale, ties to even, at most 448; NaN stays NaN.
// Back to fp16, and so to bf16 and fp32, is exact, so that attention only multiplies by the scales once.

#pragma once

#include "device.cuh"

/// An e4m3 number, as bits: sign, 4 of exponent (bias 7), 3 of mantissa; no infinities, S1111111 is NaN.
struct Fp8 {
    unsigned char bits;
};

/// The nearest e4m3 number, at most 448 in size.
template <>
__device__ __forceinline__ Fp8 from_float<Fp8>(float value) {
    const unsigned sign = __float_as_uint(value) >> 24 & 0x80u;
    const unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
    unsigned bits;
    if (magnitude > 0x7f800000u) {
        bits = 0x7f;  // NaN
    } else if (magnitude >= 0x43e00000u) {
        bits = 0x7e;  // 448 and above
    } else if (magnitude < 0x3c800000u) {
        // Below 2^-6: adding 2^14 leaves multiples of 2^-9 in the lowest bits, rounded by the addition.
        bits = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u;
    } else {
        bits = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    }
    return {static_cast<unsigned char>(sign | bits)};
}

/// Two e4m3 numbers, the first in the lower byte, as two fp16 numbers; for devices that have no
/// instruction for it.
__device__ __forceinline__ unsigned e4m3_by_shifts(unsigned two) {
    const unsigned spread = (two & 0xffu) << 8 | (two & 0xff00u) << 16;
    const unsigned magnitude = spread & 0x7f007f00u;
    // With one bit of exponent more and a bias of 15 the same bits are 2^-8 of the number.
    const unsigned shifted = (spread & 0x80008000u) | magnitude >> 1;
    const unsigned nan = (magnitude + 0x01000100u) & 0x80008000u;  // of each half
    constexpr unsigned TWO_TO_8 = 0x5c005c00u;
    return ptx::multiply_halves(shifted | (nan - (nan >> 5)), TWO_TO_8);
}

__device__ __forceinline__ unsigned e4m3_to_halves(unsigned two) {
#if defined(CHAIRLIFT_EMULATOR) || __CUDA_ARCH__ >= 890
    return ptx::e4m3_to_halves(static_cast<unsigned short>(two));
#else
    return e4m3_by_shifts(two);
#endif
}

/// The scale by which values of a cache are multiplied. Only e4m3 has one.
template <class Cache>
__device__ __forceinline__ float cache_scale(float) {
    return 1.0f;
}
template <>
__device__ __forceinline__ float cache_scale<Fp8>(float scale) {
    return scale;
}
