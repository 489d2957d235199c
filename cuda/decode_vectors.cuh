// Decoding on the vector units: fp32, for which tensor cores are not exact.
//
// LANES lanes share a key, and WORKERS such teams take every WORKERS-th key, each with an online softmax
// of its own (Milakov and Gimelshein 2018) in fp32; they meet once at the end. Each key has its worker and
// its turn by its place in the chunk alone, so a row's result does not depend on the rows beside it.

#pragma once

#include "decode.cuh"

/// How a block's threads share keys and dimensions.
template <int HEAD_DIM>
struct VectorLayout {
    static constexpr int SIZE = Vector<float>::SIZE;  // values that a lane loads at once
    static constexpr int VECTORS = HEAD_DIM / SIZE;   // of one key
    static constexpr int LANES = VECTORS > 16 ? 32 : 16;
    static constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
    static constexpr int VALUES = PER_LANE * SIZE;  // of one key in one lane
    static constexpr int WORKERS = DECODE_THREADS / LANES;
    static constexpr int UNROLL = PER_LANE > 1 ? 2 : 4;  // keys that a worker has in flight
    static_assert(HEAD_DIM % SIZE == 0, "a head must be whole vectors");
};

/// What one lane takes of a key, query or value: vectors lane, lane + LANES, ...
template <class L>
__device__ __forceinline__ void load_row(float (&to)[L::VALUES], const float* row, bool wanted, int lane) {
#pragma unroll
    for (int i = 0; i < L::PER_LANE; ++i) {
        const int vector = lane + i * L::LANES;
        Vector<float> values{};
        if (wanted && vector < L::VECTORS) values = load_vector(row + vector * L::SIZE);
#pragma unroll
        for (int j = 0; j < L::SIZE; ++j) to[i * L::SIZE + j] = values.values[j];
    }
}

/// Online softmax of ROWS rows over the keys that one worker has seen; this lane's part of the sums.
template <class L, int ROWS>
struct VectorSoftmax {
    float query[ROWS][L::VALUES];
    float out[ROWS][L::VALUES];
    float maximum[ROWS];
    float sum[ROWS];

    /// Score of every row for one key, summed over the lanes that share it.
    __device__ __forceinline__ void score(float (&scores)[ROWS], const float (&key)[L::VALUES]) const {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            scores[row] = 0.0f;
#pragma unroll
            for (int d = 0; d < L::VALUES; ++d) scores[row] += query[row][d] * key[d];
#pragma unroll
            for (int bits = L::LANES / 2; bits > 0; bits /= 2) {
                scores[row] += __shfl_xor_sync(ALL_LANES, scores[row], bits);
            }
        }
    }

    /// Turns scores into weights against the new maximum, and takes the old sums down to it.
    __device__ __forceinline__ void rescale(float (&scores)[L::UNROLL][ROWS]) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float highest = maximum[row];
#pragma unroll
            for (int u = 0; u < L::UNROLL; ++u) highest = fmaxf(highest, scores[u][row]);
            const float base = finite_base(highest);
            const float factor = exp2f(maximum[row] - base);
            maximum[row] = highest;
            sum[row] *= factor;
#pragma unroll
            for (int u = 0; u < L::UNROLL; ++u) {
                scores[u][row] = exp2f(scores[u][row] - base);
                sum[row] += scores[u][row];
            }
#pragma unroll
            for (int d = 0; d < L::VALUES; ++d) out[row][d] *= factor;
        }
    }

    __device__ __forceinline__ void add(const float (&weights)[ROWS], const float (&value)[L::VALUES]) {
#pragma unroll
        for (int d = 0; d < L::VALUES; ++d) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) out[row][d] += weights[row] * value[d];
        }
    }
};

/// Takes the rows' queries, times the scale, and begins with nothing seen.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void load_queries(VectorSoftmax<VectorLayout<HEAD_DIM>, ROWS>& softmax,
                                             const DecodeItem& item, int lane,
                                             const PagedAttentionDecodeParams& params) {
    using L = VectorLayout<HEAD_DIM>;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = item.first_row + r;
        const long long at = row_index(item.first_query, row, params) * HEAD_DIM;
        load_row<L>(softmax.query[r], static_cast<const float*>(params.q) + at, row < item.rows, lane);
#pragma unroll
        for (int d = 0; d < L::VALUES; ++d) {
            softmax.query[r][d] *= params.scale;
            softmax.out[r][d] = 0.0f;
        }
        softmax.maximum[r] = minus_infinity();
        softmax.sum[r] = 0.0f;
    }
}

/// Reads this worker's keys and values of the chunk, UNROLL at a time.
template <int HEAD_DIM, class L, int ROWS>
__device__ __forceinline__ void read_keys(VectorSoftmax<L, ROWS>& softmax, const DecodeItem& item, int lane,
                                          int worker, const PagedAttentionDecodeParams& params) {
    constexpr int TILE = L::WORKERS * L::UNROLL;
    for (int tile = first_tile<TILE>(item); tile < item.end; tile += TILE) {
        long long offsets[L::UNROLL];
        bool wanted[L::UNROLL];
        float scores[L::UNROLL][ROWS];
        float loaded[L::UNROLL][L::VALUES];
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) {
            const int token = tile + u * L::WORKERS + worker;
            wanted[u] = token >= item.first_seen && token < item.end;
            offsets[u] = wanted[u] ? cache_offset<HEAD_DIM>(item.sequence, token, params) : 0;
            load_row<L>(loaded[u], static_cast<const float*>(params.k_cache) + offsets[u], wanted[u], lane);
        }
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) {
            softmax.score(scores[u], loaded[u]);
            const int token = tile + u * L::WORKERS + worker;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Visible seen = visible(item.context, item.rows, item.first_row + r, params);
                scores[u][r] = weighable(scores[u][r], token, seen, params);
            }
        }
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) {
            load_row<L>(loaded[u], static_cast<const float*>(params.v_cache) + offsets[u], wanted[u], lane);
        }
        softmax.rescale(scores);
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) softmax.add(scores[u], loaded[u]);
    }
}

/// Attends ROWS rows to the keys of the item.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void decode_on_vectors(const DecodeItem& item, unsigned char* shared,
                                                  const PagedAttentionDecodeParams& params) {
    using L = VectorLayout<HEAD_DIM>;
    const int lane = threadIdx.x % L::LANES;
    const int worker = threadIdx.x / L::LANES;
    VectorSoftmax<L, ROWS> softmax;
    load_queries<HEAD_DIM, ROWS>(softmax, item, lane, params);
    read_keys<HEAD_DIM>(softmax, item, lane, worker, params);

    auto& meeting = *reinterpret_cast<Meeting<HEAD_DIM, ROWS, L::WORKERS>*>(shared);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int d = 0; d < L::VALUES; ++d) {
            const int vector = lane + d / L::SIZE * L::LANES;
            if (vector < L::VECTORS) meeting.out[worker][r][vector * L::SIZE + d % L::SIZE] = softmax.out[r][d];
        }
        if (lane == 0) {
            meeting.maximum[worker][r] = softmax.maximum[r];
            meeting.sum[worker][r] = softmax.sum[r];
        }
    }
    __syncthreads();
    write_rows<float, float>(meeting, item, params);
}
