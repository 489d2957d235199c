// What all kernels share: the 16-bit float types, vectors of 16 bytes, warp sums, dynamic shared memory.
//
// No headers of CUDA or torch: NVRTC compiles these sources as they are, and the tests compile them
// for the CPU. Conversions go through ptx.cuh.

#pragma once

#include "ptx.cuh"

/// IEEE half precision, as bits.
struct Half {
    unsigned short bits;
};

/// The upper half of a float, as bits.
struct BFloat16 {
    unsigned short bits;
};

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Half value) { return ptx::half_to_float(value.bits); }
__device__ __forceinline__ float to_float(BFloat16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
    return {ptx::float_to_half(value)};
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
    return {ptx::float_to_bfloat16(value)};
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

/// Values that one access moves.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T)) Pack {
    static constexpr int SIZE = COUNT;
    T values[COUNT];
};

/// As many values of a type as one 16-byte access moves.
template <class T>
using Vector = Pack<T, 16 / static_cast<int>(sizeof(T))>;

/// COUNT values from an address that is a multiple of their size.
template <int COUNT, class T>
__device__ __forceinline__ Pack<T, COUNT> load_pack(const T* from) {
    return *reinterpret_cast<const Pack<T, COUNT>*>(from);
}

/// 16 bytes from an address that is a multiple of 16.
template <class T>
__device__ __forceinline__ Vector<T> load_vector(const T* from) {
    return *reinterpret_cast<const Vector<T>*>(from);
}

template <class T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T>& vector) {
    *reinterpret_cast<Vector<T>*>(to) = vector;
}

/// Sum over the warp, in every lane, in one fixed order.
__device__ __forceinline__ float warp_sum(float value) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(ALL_LANES, value, bits);
    return value;
}

/// Declares `name` as the block's dynamic shared memory, aligned to 16 bytes.
#ifdef CHAIRLIFT_EMULATOR
#define DYNAMIC_SHARED(name) unsigned char* const name = emulator::shared_memory()
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif
