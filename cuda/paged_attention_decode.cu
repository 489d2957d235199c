// Paged attention for few query tokens a sequence: one, or a handful.
//
// The keys of a sequence are cut into chunks of a fixed number of tokens, and a block takes one chunk of
// one key/value head for all rows that read it (row = query token * group + head of the group), so a
// group's heads share each loaded key, and a long sequence is many blocks. Chunks do not depend on the
// batch, so neither do results. A sequence of one chunk is written at once; the others leave an
// unnormalised sum, a maximum and a weight for each row, which the second kernel combines (split
// softmax: Flash-Decoding, Dao et al. 2023).
//
// Types of 16 bits are multiplied on tensor cores (decode_tiles.cuh), fp32 on the vector units
// (decode_vectors.cuh). Scores are kept in units of log2(e), so that weights are powers
// of two.
//
// Invariants: keys that no row sees are not loaded; offsets are 64-bit before they are multiplied. Not
// here: rotation and the write of the cache (kv_cache_write.cu), which run before.

#include "decode_tiles.cuh"
#include "decode_vectors.cuh"

/// One launch: grid (splits, kv_heads, max_rows), block DECODE_THREADS.
struct PagedAttentionCombineParams {
    const float* partial_out;        // as above
    const float* partial_state;      // as above
    void* out;                       // [tokens, heads * head_dim], of T
    const int* query_start_loc;      // [sequences + 1]
    const int* splits;               // [splits, 3] sequence (negative: padding), first partial result, their number
    int kv_heads;                    // key/value heads
    int group;                       // query heads of each
    int head_dim;                    // values of a head, 256 at most
    int max_rows;                    // as above
};

template <class T, int HEAD_DIM, int ROWS, class Cache = T>
__global__ void __launch_bounds__(DECODE_THREADS, 1) paged_attention_decode(const PagedAttentionDecodeParams params) {
    DYNAMIC_SHARED(shared);
    const DecodeItem item = read_decode_item<ROWS>(params);
    if (item.first_row >= item.rows) return;  // the whole block; padding has no rows
    if constexpr (sizeof(T) == 2) {
        static_assert(ROWS == TILED_ROWS, "tensor cores take eight rows, whatever a sequence has");
        decode_on_tiles<T, Cache, HEAD_DIM>(item, shared, params);
    } else {
        decode_on_vectors<HEAD_DIM, ROWS>(item, shared, params);
    }
}

/// Combines the partial results of one row. The warps take every fourth one, and meet in shared memory.
template <class T>
__global__ void __launch_bounds__(DECODE_THREADS) paged_attention_combine(const PagedAttentionCombineParams params) {
    constexpr int WARPS = DECODE_THREADS / WARP;
    constexpr int MAX_HEAD_DIM = 256;
    constexpr int VALUES = MAX_HEAD_DIM / WARP;
    __shared__ float outs[WARPS][MAX_HEAD_DIM];
    __shared__ float sums[WARPS];
    const int* const split = params.splits + 3ll * blockIdx.x;
    if (split[0] < 0) return;  // the whole block, here and below
    const int first_query = params.query_start_loc[split[0]];
    const int row = blockIdx.z;
    if (row >= (params.query_start_loc[split[0] + 1] - first_query) * params.group) return;
    const int count = split[2];
    const auto at = [&](int partial) {
        return (static_cast<long long>(split[1] + partial) * params.kv_heads + blockIdx.y) * params.max_rows + row;
    };

    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    float highest = minus_infinity();
    for (int p = lane; p < count; p += WARP) highest = fmaxf(highest, params.partial_state[2 * at(p)]);
    for (int bits = WARP / 2; bits > 0; bits /= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, bits));
    }
    const float base = finite_base(highest);
    float out[VALUES] = {};
    float sum = 0.0f;
    for (int p = warp; p < count; p += WARPS) {
        const float factor = exp2f(params.partial_state[2 * at(p)] - base);
        sum += factor * params.partial_state[2 * at(p) + 1];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int d = lane + i * WARP;
            if (d < params.head_dim) out[i] += factor * params.partial_out[at(p) * params.head_dim + d];
        }
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) outs[warp][lane + i * WARP] = out[i];
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    T* const to = static_cast<T*>(params.out) + row_index(first_query, row, params) * params.head_dim;
    for (int d = threadIdx.x; d < params.head_dim; d += DECODE_THREADS) {
        float value = 0.0f;
        float total = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            value += outs[w][d];
            total += sums[w];
        }
        to[d] = from_float<T>(value / total);
    }
}

// Instantiations, for HEAD_DIM in 64, 80, 96, 128, 256: paged_attention_decode<float, HEAD_DIM, ROWS> for ROWS in
// 1, 4, 8; paged_attention_decode<T, HEAD_DIM, 8> and paged_attention_decode<T, HEAD_DIM, 8, Fp8> for T in Half,
// BFloat16. And paged_attention_combine<T> for T in float, Half, BFloat16.
