// The words of CUDA C++ that our kernels use, for g++: qualifiers, vector types, barriers, warp
// operations, atomics and a little arithmetic. What is missing here fails to compile, on purpose.

#pragma once

#include <algorithm>
#include <cmath>

#include "shared_image.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To emulated_bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of two sizes");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned bits) { return emulated_bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulated_bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return emulated_bit_cast<float>(bits); }
inline int __float_as_int(float value) { return emulated_bit_cast<int>(value); }

inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __expf(float value) { return std::exp(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
template <class T>
inline T __ldg(const T* address) {
    return *address;
}

inline void __syncthreads(int line = __builtin_LINE()) { emulator::barrier(line, emulator::take_images); }
inline void __threadfence() {}

namespace emulator {

template <class T>
struct Exchange {
    T value;
    unsigned source;  // lane to read
};

template <class T>
void exchange(Thread* warp, unsigned mask) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if ((mask >> lane & 1) == 0) continue;
        const unsigned source = static_cast<const Exchange<T>*>(warp[lane].in)->source;
        if ((mask >> source & 1) == 0) {
            fail("shuffle at line %d: lane %u reads lane %u, which is not in the mask %08x",
                 warp[lane].line, lane, source, mask);
        }
        *static_cast<T*>(warp[lane].out) = static_cast<const Exchange<T>*>(warp[source].in)->value;
    }
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source, int line) {
    const Exchange<T> in{value, source};
    T out{};
    warp_operation(exchange<T>, mask, &in, &out, line);
    return out;
}

inline void ballot(Thread* warp, unsigned mask) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (mask >> lane & 1) votes |= *static_cast<const unsigned*>(warp[lane].in) << lane;
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (mask >> lane & 1) *static_cast<unsigned*>(warp[lane].out) = votes;
    }
}

inline unsigned lane() { return current % 32; }

inline unsigned char* shared_memory() { return reinterpret_cast<unsigned char*>(dynamic_shared); }

/// Atomic by nature: a fiber is never interrupted.
template <class T, class Change>
T atomically(T* address, Change change) {
    const T old = *address;
    *address = change(old);
    return old;
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    emulator::warp_operation(emulator::wait_for_warp, mask, nullptr, nullptr, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    const unsigned segment = emulator::lane() & ~(width - 1u);
    return emulator::shuffle(mask, value, segment + (source & (width - 1)), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = emulator::lane();
    const unsigned source = lane ^ bits;
    const bool inside = source < (lane & ~(width - 1u)) + width;
    return emulator::shuffle(mask, value, inside ? source : lane, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = emulator::lane();
    const bool inside = (lane & (width - 1)) + by < static_cast<unsigned>(width);
    return emulator::shuffle(mask, value, inside ? lane + by : lane, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = emulator::lane();
    const bool inside = (lane & (width - 1)) >= by;
    return emulator::shuffle(mask, value, inside ? lane - by : lane, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    const unsigned in = predicate != 0;
    unsigned out = 0;
    emulator::warp_operation(emulator::ballot, mask, &in, &out, line);
    return out;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) == mask;
}

template <class T>
T atomicAdd(T* address, T value) {
    return emulator::atomically(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* address, T value) {
    return emulator::atomically(address, [=](T old) { return std::max(old, value); });
}
template <class T>
T atomicOr(T* address, T value) {
    return emulator::atomically(address, [=](T old) { return static_cast<T>(old | value); });
}
template <class T>
T atomicExch(T* address, T value) {
    return emulator::atomically(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
    return emulator::atomically(address, [=](T old) { return old == expected ? value : old; });
}
