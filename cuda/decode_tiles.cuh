// Decoding on tensor cores: eight rows at once, so that a group's heads cost no more than one.
//
// Keys are the left side of the first product and values, transposed, that of the second, so that the
// eight rows are the eight columns of mma.m16n8k16 (ptx.cuh): scores are [keys, rows], outputs [dims, rows].
// Each warp takes every WARPS-th tile of 16 keys with an online softmax of its own; its tiles are its own,
// so warps meet only at the end. Values are on their way while scores are computed, and the next keys while
// they are weighed. Weights are rounded to T for the second product.
//
// A key's warp and turn follow from its place in the chunk, so a row's result does not depend on the rows
// beside it. Keys that no row sees are zero, since a weight of zero times garbage could be not-a-number.

#pragma once

#include "decode.cuh"
#include "tensor_cores.cuh"

constexpr int TILED_ROWS = 8;
constexpr int TILED_WARPS = DECODE_THREADS / WARP;
constexpr int TILE_KEYS = 16;

/// Tiles of one warp.
template <class T, class Cache, int HEAD_DIM>
struct WarpTiles {
    KvTile<T, Cache, TILE_KEYS, HEAD_DIM> keys;
    KvTile<T, Cache, TILE_KEYS, HEAD_DIM> values;
};

/// Shared memory of a block: first tiles, then the meeting.
template <class T, class Cache, int HEAD_DIM>
union TiledShared {
    WarpTiles<T, Cache, HEAD_DIM> tiles[TILED_WARPS];
    Meeting<HEAD_DIM, TILED_ROWS, TILED_WARPS> meeting;
};

/// A warp's fragments of queries and outputs, and of rows 2 * (lane % 4) and the next the softmax state.
template <class T, int HEAD_DIM>
struct TiledSoftmax {
    unsigned queries[HEAD_DIM / 16][2];
    float out[HEAD_DIM / 16][4];
    float maximum[2];
    float sum[2];  // of this lane's keys

    __device__ __forceinline__ void begin(const DecodeItem& item, int lane, const PagedAttentionDecodeParams& params) {
        const int row = item.first_row + lane / 4;
        const T* const q =
            static_cast<const T*>(params.q) + row_index(item.first_query, row, params) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                queries[d / 16][half] =
                    row < item.rows ? *reinterpret_cast<const unsigned*>(q + d + 8 * half) : 0;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) out[d / 16][i] = 0.0f;
        }
        maximum[0] = maximum[1] = minus_infinity();
        sum[0] = sum[1] = 0.0f;
    }

    /// scores = keys * queries^T, 16 dimensions at a time.
    __device__ __forceinline__ void score(float (&scores)[4], const TileRows<T, TILE_KEYS, HEAD_DIM>& keys,
                                          int lane) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = 0.0f;
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            unsigned a[4];
            ptx::load_matrices(a, &keys.rows[lane % 16][d + lane / 16 * 8]);
            mma(T{}, scores, a, queries[d / 16][0], queries[d / 16][1]);
        }
    }

    /// Turns scores into weights against the new maxima, and takes the old sums down to them.
    __device__ __forceinline__ void weigh(float (&scores)[4], const Visible (&seen)[2], int first_key, float scale,
                                          int lane, const PagedAttentionDecodeParams& params) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = maximum[r];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& score = scores[2 * half + r];
                score = weighable(score * scale, first_key + lane / 4 + 8 * half, seen[r], params);
                highest = fmaxf(highest, score);
            }
#pragma unroll
            for (int bits = 4; bits < WARP; bits *= 2) {
                highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, bits));
            }
            const float base = finite_base(highest);
            const float factor = exp2f(maximum[r] - base);
            maximum[r] = highest;
            sum[r] *= factor;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& score = scores[2 * half + r];
                score = exp2f(score - base);
                sum[r] += score;
            }
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; ++n) {
                out[n][r] *= factor;
                out[n][2 + r] *= factor;
            }
        }
    }

    /// out += values^T * weights^T. The weights lie as [keys, rows] and are wanted transposed.
    __device__ __forceinline__ void add(const float (&weights)[4], const TileRows<T, TILE_KEYS, HEAD_DIM>& values,
                                        int lane) {
        const unsigned b0 = ptx::transpose_matrix(pack<T>(weights[0], weights[1]));
        const unsigned b1 = ptx::transpose_matrix(pack<T>(weights[2], weights[3]));
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            unsigned a[4];
            ptx::load_matrices_transposed(a, &values.rows[lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
            mma(T{}, out[d / 16], a, b0, b1);
        }
    }

    /// Leaves the warp's part where all meet.
    __device__ __forceinline__ void leave(Meeting<HEAD_DIM, TILED_ROWS, TILED_WARPS>& meeting, int warp, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane % 4 * 2 + r;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    meeting.out[warp][row][n * 16 + lane / 4 + 8 * half] = out[n][2 * half + r];
                }
            }
#pragma unroll
            for (int bits = 4; bits < WARP; bits *= 2) sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], bits);
            if (lane / 4 == 0) {
                meeting.maximum[warp][row] = maximum[r];
                meeting.sum[warp][row] = sum[r];
            }
        }
    }
};

/// Attends TILED_ROWS rows to the keys of the item.
template <class T, class Cache, int HEAD_DIM>
__device__ __forceinline__ void decode_on_tiles(const DecodeItem& item, unsigned char* shared_bytes,
                                                const PagedAttentionDecodeParams& params) {
    auto& shared = *reinterpret_cast<TiledShared<T, Cache, HEAD_DIM>*>(shared_bytes);
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    auto& keys = shared.tiles[warp].keys;
    auto& values = shared.tiles[warp].values;
    constexpr int STEP = TILED_WARPS * TILE_KEYS;

    // Where a tile's keys are: each lane looks one up for all.
    const auto offset_in = [&](int first) -> long long {
        const int key = first + lane % TILE_KEYS;
        return key >= item.first_seen && key < item.end ? cache_offset<HEAD_DIM>(item.sequence, key, params) : -1;
    };
    const auto copy = [&](auto& tile, const void* cache, long long offset) {
        copy_tile<WARP>(tile, cache, lane, [&](int key) { return __shfl_sync(ALL_LANES, offset, key % TILE_KEYS); });
    };

    TiledSoftmax<T, HEAD_DIM> softmax;
    softmax.begin(item, lane, params);
    const float scale = params.scale * cache_scale<Cache>(params.k_scale);
    const int row = item.first_row + lane % 4 * 2;
    const Visible seen[2] = {visible(item.context, item.rows, row, params),
                             visible(item.context, item.rows, row + 1, params)};

    int first = first_tile<STEP>(item) + warp * TILE_KEYS;
    long long offset = offset_in(first);
    if (first < item.end) copy(keys, params.k_cache, offset);
    ptx::commit_copies();
    for (; first < item.end; first += STEP) {
        copy(values, params.v_cache, offset);
        ptx::commit_copies();
        ptx::wait_for_copies<1>();  // the keys are there
        land_tile<WARP>(keys, lane);
        __syncwarp();
        float scores[4];
        softmax.score(scores, keys, lane);
        __syncwarp();  // nobody reads the keys any more
        offset = offset_in(first + STEP);
        if (first + STEP < item.end) copy(keys, params.k_cache, offset);
        ptx::commit_copies();  // an empty group at last, so that the counts stay
        softmax.weigh(scores, seen, first, scale, lane, params);
        ptx::wait_for_copies<1>();  // the values are there
        land_tile<WARP>(values, lane);
        __syncwarp();
        softmax.add(scores, values, lane);
        __syncwarp();  // nobody reads the values any more
    }
    __syncthreads();  // nobody needs the tiles any more
    softmax.leave(shared.meeting, warp, lane);
    __syncthreads();
    write_rows<T, Cache>(shared.meeting, item, params);
}
