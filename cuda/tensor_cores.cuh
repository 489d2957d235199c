// What the kernels that multiply on tensor cores share: products by type, and tiles of keys or values in
// shared memory.
//
// Tiles are filled by asynchronous copies. An e4m3 cache is copied as it is into a staging area, and each
// thread converts the vectors that it copied itself, so that this needs no barrier between. Rows are
// padded by 16 bytes, so that the eight addresses of a matrix fall into different banks.

#pragma once

#include "fp8.cuh"

__device__ __forceinline__ void mma(Half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    ptx::mma_half(c, a, b0, b1);
}
__device__ __forceinline__ void mma(BFloat16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    ptx::mma_bfloat16(c, a, b0, b1);
}

/// Two values in a register, the first in the lower half.
template <class T>
__device__ __forceinline__ unsigned pack(float low, float high) {
    return from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
}

/// Two e4m3 numbers, the first in the lower byte, as two values in a register.
__device__ __forceinline__ unsigned from_e4m3(Half, unsigned two) { return e4m3_to_halves(two); }
__device__ __forceinline__ unsigned from_e4m3(BFloat16, unsigned two) {
    const unsigned halves = e4m3_to_halves(two);
    return pack<BFloat16>(ptx::half_to_float(static_cast<unsigned short>(halves)),
                          ptx::half_to_float(static_cast<unsigned short>(halves >> 16)));
}

/// KEYS keys or values of one head, as T.
template <class T, int KEYS, int HEAD_DIM>
struct TileRows {
    static constexpr int STRIDE = HEAD_DIM + Vector<T>::SIZE;
    T rows[KEYS][STRIDE];
};

/// A tile of a cache of the queries' own type.
template <class T, class Cache, int KEYS, int HEAD_DIM>
struct KvTile : TileRows<T, KEYS, HEAD_DIM> {
    __device__ __forceinline__ T* landing_place(int key, int d) { return &this->rows[key][d]; }
    __device__ __forceinline__ void land(int, int) {}
};

/// A tile of an e4m3 cache.
template <class T, int KEYS, int HEAD_DIM>
struct KvTile<T, Fp8, KEYS, HEAD_DIM> : TileRows<T, KEYS, HEAD_DIM> {
    alignas(16) Fp8 staged[KEYS][HEAD_DIM];

    __device__ __forceinline__ Fp8* landing_place(int key, int d) { return &staged[key][d]; }
    /// Converts the 16 values that have landed there.
    __device__ __forceinline__ void land(int key, int d) {
        const uint4 from = *reinterpret_cast<const uint4*>(&staged[key][d]);
        const unsigned words[4] = {from.x, from.y, from.z, from.w};
        unsigned pairs[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[2 * i] = from_e4m3(T{}, words[i] & 0xffffu);
            pairs[2 * i + 1] = from_e4m3(T{}, words[i] >> 16);
        }
        uint4* const to = reinterpret_cast<uint4*>(&this->rows[key][d]);
        to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
};

/// Calls `visit(key, d, is_inside)` for each of the 16-byte vectors of a tile that are the worker's; as
/// often for every worker.
template <class Cache, int KEYS, int HEAD_DIM, int WORKERS, class Visit>
__device__ __forceinline__ void for_each_vector(int worker, Visit visit) {
    constexpr int VECTORS = HEAD_DIM / Vector<Cache>::SIZE;
    static_assert(HEAD_DIM % Vector<Cache>::SIZE == 0, "a head must be whole vectors");
#pragma unroll
    for (int round = 0; round < (KEYS * VECTORS + WORKERS - 1) / WORKERS; ++round) {
        const int i = round * WORKERS + worker;
        visit(i / VECTORS, i % VECTORS * Vector<Cache>::SIZE, i < KEYS * VECTORS);
    }
}

/// Starts to copy a tile. `offset_of(key)` says where a key begins in the cache; negative: it becomes zero.
template <int WORKERS, class T, class Cache, int KEYS, int HEAD_DIM, class OffsetOf>
__device__ __forceinline__ void copy_tile(KvTile<T, Cache, KEYS, HEAD_DIM>& tile, const void* cache, int worker,
                                          OffsetOf offset_of) {
    for_each_vector<Cache, KEYS, HEAD_DIM, WORKERS>(worker, [&](int key, int d, bool is_inside) {
        const long long offset = offset_of(key);
        if (!is_inside) return;
        const Cache* const from = static_cast<const Cache*>(cache) + (offset < 0 ? 0 : offset + d);
        ptx::copy_async_16(tile.landing_place(key, d), from, offset < 0 ? 0 : 16);
    });
}

/// Makes what the worker copied, and has waited for, the tile's; a barrier makes it everybody's.
template <int WORKERS, class T, class Cache, int KEYS, int HEAD_DIM>
__device__ __forceinline__ void land_tile(KvTile<T, Cache, KEYS, HEAD_DIM>& tile, int worker) {
    for_each_vector<Cache, KEYS, HEAD_DIM, WORKERS>(worker, [&](int key, int d, bool is_inside) {
        if (is_inside) tile.land(key, d);
    });
}
