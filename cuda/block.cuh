// Reductions over a block of THREADS threads, each with its result in every thread.
//
// Sums are taken in one fixed order, so that they are the same to the last bit whoever runs first.

#pragma once

#include "device.cuh"

/// Combines the values of all threads; `combine` is commutative.
template <int THREADS, class Value, class Combine>
__device__ __forceinline__ Value block_reduce(Value value, Combine combine) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ Value of_warps[WARPS];
#pragma unroll
    for (int bits = WARP / 2; bits > 0; bits /= 2) {
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, bits));
    }
    __syncthreads();  // nobody reads an earlier result any more
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = of_warps[0];
    for (int warp = 1; warp < WARPS; ++warp) value = combine(value, of_warps[warp]);
    return value;
}

template <int THREADS>
__device__ __forceinline__ float block_sum(float value) {
    return block_reduce<THREADS>(value, [](float a, float b) { return a + b; });
}

template <int THREADS, class Value>
__device__ __forceinline__ Value block_max(Value value) {
    return block_reduce<THREADS>(value, [](Value a, Value b) { return a > b ? a : b; });
}
