// Paged attention for prefill chunks: many query tokens of a sequence after its context, on tensor cores.
//
// A block takes ROWS rows of one key/value head (row = query token * group + head of the group, so a
// group's heads fill tiles together) against all keys they see, KEYS at a time. Queries, keys and values
// come into shared memory by asynchronous copies: while the scores of a tile are computed its values are
// on their way, and while they are weighed the next keys are (FlashAttention-2, Dao 2023). Online
// softmax in fp32 (Milakov and Gimelshein 2018); weights are rounded to T for the second product.
//
// Each of the WARPS warps owns 16 rows; fragments are those of mma.m16n8k16 (ptx.cuh). Rows of shared
// memory are padded by 16 bytes, so that the eight addresses of a matrix fall into different banks.
//
// Key tiles begin at multiples of KEYS, whatever the chunk, so a row's result does not depend on how
// the prompt was cut. Invariants: keys that no row sees are not loaded but zero, since a weight of zero
// times garbage could be not-a-number. Not here: rotation and the cache's write (kv_cache_write.cu),
// and fp32, whose prefill is done by the decode kernel.

#include "paged.cuh"

/// One launch: grid (items, kv_heads), block THREADS, shared prefill_shared_bytes.
struct PagedAttentionPrefillParams {
    const void* q;                   // [tokens, heads * head_dim], of T, rotated
    const void* k_cache;             // [blocks, kv_heads, block_size, head_dim], of T
    const void* v_cache;             // the same
    void* out;                       // [tokens, heads * head_dim], of T
    const int* query_start_loc;      // [sequences + 1] first query token of each sequence
    const int* seq_lens;             // [sequences] tokens in the cache, those of this step included
    const int* block_table_offsets;  // [sequences + 1] into block_ids
    const int* block_ids;            // all block tables, one after the other
    const int* items;                // [items, 2] sequence (negative: padding), and its tile of ROWS rows
    float scale;                     // factor of the scores
    float soft_cap;                  // scores become cap * tanh(score / cap); 0: they stay
    int window;                      // a query sees that many keys up to its own; 0: all
    int kv_heads;                    // key/value heads
    int group;                       // query heads of each
    int block_size;                  // tokens of a block
    unsigned block_magic;            // ceil(2^(31 + block_shift) / block_size)
    int block_shift;                 // ceil(log2(block_size))
};

namespace {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = WARPS * 16;

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

/// Shared memory of a block.
template <class T, int HEAD_DIM>
struct Tiles {
    static constexpr int KEYS = HEAD_DIM > 128 ? 32 : 64;
    static constexpr int STRIDE = HEAD_DIM + Vector<T>::SIZE;
    T queries[ROWS][STRIDE];
    T keys[KEYS][STRIDE];
    T values[KEYS][STRIDE];
};

/// What a block is about.
struct Item {
    int sequence;
    int first_row;
    int first_query;  // of the sequence, among all tokens
    int rows;         // of the sequence
    int context;      // position of its first query token
    int begin;        // of the keys that any of the rows sees, at a border of tiles
    int end;
};

template <int KEYS>
__device__ __forceinline__ Item read_item(const PagedAttentionPrefillParams& params) {
    const int* const item = params.items + 2ll * blockIdx.x;
    Item read{item[0], item[1] * ROWS, 0, 0, 0, 0, 0};
    if (read.sequence < 0) return read;
    read.first_query = params.query_start_loc[read.sequence];
    const int queries = params.query_start_loc[read.sequence + 1] - read.first_query;
    read.rows = queries * params.group;
    read.context = params.seq_lens[read.sequence] - queries;
    const int last_row = min(read.first_row + ROWS, read.rows) - 1;
    read.begin = visible(read.context, read.rows, read.first_row, params).first / KEYS * KEYS;
    read.end = visible(read.context, read.rows, last_row, params).end;
    return read;
}

/// Starts to copy a tile of keys or values; those at `end` and beyond become zero.
template <class T, int HEAD_DIM>
__device__ __forceinline__ void copy_keys(T (*to)[Tiles<T, HEAD_DIM>::STRIDE], const void* cache, int first,
                                          const Item& item, const PagedAttentionPrefillParams& params) {
    constexpr int SIZE = Vector<T>::SIZE;
    constexpr int VECTORS = HEAD_DIM / SIZE;
    for (int i = threadIdx.x; i < Tiles<T, HEAD_DIM>::KEYS * VECTORS; i += THREADS) {
        const int key = i / VECTORS;
        const int d = i % VECTORS * SIZE;
        const bool wanted = first + key < item.end;
        const long long from = wanted ? cache_offset<HEAD_DIM>(item.sequence, first + key, params) + d : 0;
        ptx::copy_async_16(&to[key][d], static_cast<const T*>(cache) + from, wanted ? 16 : 0);
    }
}

template <class T, int HEAD_DIM>
__device__ __forceinline__ void copy_queries(Tiles<T, HEAD_DIM>& tiles, const Item& item,
                                             const PagedAttentionPrefillParams& params) {
    constexpr int SIZE = Vector<T>::SIZE;
    constexpr int VECTORS = HEAD_DIM / SIZE;
    for (int i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const int row = item.first_row + i / VECTORS;
        const int d = i % VECTORS * SIZE;
        const bool wanted = row < item.rows;
        const long long from = wanted ? row_index(item.first_query, row, params) * HEAD_DIM + d : 0;
        ptx::copy_async_16(&tiles.queries[i / VECTORS][d], static_cast<const T*>(params.q) + from, wanted ? 16 : 0);
    }
}

/// A warp's 16 rows: fragments of the output, and of rows lane / 4 and lane / 4 + 8 the softmax state.
template <class T, int HEAD_DIM>
struct Rows {
    using Shared = Tiles<T, HEAD_DIM>;
    static constexpr int KEYS = Shared::KEYS;
    float out[HEAD_DIM / 8][4];
    float maximum[2];
    float sum[2];  // of this lane's columns

    /// scores = queries * keys^T, 16 dimensions at a time.
    __device__ __forceinline__ void score(float (&scores)[KEYS / 8][4], const Shared& tiles, int warp, int lane) const {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            unsigned a[4];
            ptx::load_matrices(a, &tiles.queries[warp * 16 + lane % 16][d + lane / 16 * 8]);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n += 2) {
                unsigned b[4];
                ptx::load_matrices(b, &tiles.keys[n * 8 + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
                mma(T{}, scores[n], a, b[0], b[1]);
                mma(T{}, scores[n + 1], a, b[2], b[3]);
            }
        }
    }

    /// Turns scores into weights against the new maxima, and takes the old sums down to them.
    __device__ __forceinline__ void weigh(float (&scores)[KEYS / 8][4], const Visible (&seen)[2], int first_key,
                                          int lane, const PagedAttentionPrefillParams& params) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = maximum[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int key = first_key + n * 8 + lane % 4 * 2 + i;
                    float& score = scores[n][2 * half + i];
                    score = weighable(score * params.scale, key, seen[half], params);
                    highest = fmaxf(highest, score);
                }
            }
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
            const float base = finite_base(highest);
            const float factor = exp2f(maximum[half] - base);
            maximum[half] = highest;
            sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[n][2 * half + i];
                    score = exp2f(score - base);
                    sum[half] += score;
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                out[n][2 * half] *= factor;
                out[n][2 * half + 1] *= factor;
            }
        }
    }

    /// out += weights * values, 16 keys at a time. The weights lie as the first product left them,
    /// which is how the second wants its left side.
    __device__ __forceinline__ void add(const float (&weights)[KEYS / 8][4], const Shared& tiles, int lane) {
#pragma unroll
        for (int key = 0; key < KEYS; key += 16) {
            const float(&low)[4] = weights[key / 8];
            const float(&high)[4] = weights[key / 8 + 1];
            const unsigned a[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                                   pack<T>(high[2], high[3])};
#pragma unroll
            for (int d = 0; d < HEAD_DIM; d += 16) {
                unsigned b[4];
                ptx::load_matrices_transposed(b, &tiles.values[key + lane % 16][d + lane / 16 * 8]);
                mma(T{}, out[d / 8], a, b[0], b[1]);
                mma(T{}, out[d / 8 + 1], a, b[2], b[3]);
            }
        }
    }

    /// Normalises and writes the rows.
    __device__ __forceinline__ void write(const Item& item, int warp, int lane,
                                          const PagedAttentionPrefillParams& params) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 1);
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 2);
            const int row = item.first_row + warp * 16 + half * 8 + lane / 4;
            if (row >= item.rows) continue;
            T* const to = static_cast<T*>(params.out) + row_index(item.first_query, row, params) * HEAD_DIM;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                const unsigned pair = pack<T>(out[n][2 * half] / sum[half], out[n][2 * half + 1] / sum[half]);
                *reinterpret_cast<unsigned*>(to + n * 8 + lane % 4 * 2) = pair;
            }
        }
    }
};

}  // namespace

template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS, 1) paged_attention_prefill(const PagedAttentionPrefillParams params) {
    constexpr int KEYS = Tiles<T, HEAD_DIM>::KEYS;
    const Item item = read_item<KEYS>(params);
    if (item.sequence < 0 || item.first_row >= item.rows) return;  // the whole block
    DYNAMIC_SHARED(shared);
    auto& tiles = *reinterpret_cast<Tiles<T, HEAD_DIM>*>(shared);
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;

    copy_queries<T, HEAD_DIM>(tiles, item, params);
    copy_keys<T, HEAD_DIM>(tiles.keys, params.k_cache, item.begin, item, params);
    ptx::commit_copies();

    const int row = item.first_row + warp * 16 + lane / 4;
    const Visible seen[2] = {visible(item.context, item.rows, row, params),
                             visible(item.context, item.rows, row + 8, params)};
    Rows<T, HEAD_DIM> rows{};
    rows.maximum[0] = rows.maximum[1] = minus_infinity();

    for (int first = item.begin; first < item.end; first += KEYS) {
        copy_keys<T, HEAD_DIM>(tiles.values, params.v_cache, first, item, params);
        ptx::commit_copies();
        ptx::wait_for_copies<1>();  // the keys are there, and at first the queries
        __syncthreads();
        float scores[KEYS / 8][4];
        rows.score(scores, tiles, warp, lane);
        __syncthreads();  // nobody reads the keys any more
        if (first + KEYS < item.end) {
            copy_keys<T, HEAD_DIM>(tiles.keys, params.k_cache, first + KEYS, item, params);
        }
        ptx::commit_copies();  // an empty group at last, so that the counts stay
        rows.weigh(scores, seen, first, lane, params);
        ptx::wait_for_copies<1>();  // the values are there
        __syncthreads();
        rows.add(scores, tiles, lane);
        __syncthreads();  // nobody reads the values any more
    }
    rows.write(item, warp, lane, params);
}

// Instantiations: paged_attention_prefill<T, HEAD_DIM> for T in Half, BFloat16 and HEAD_DIM in 64, 80, 96,
// 128, 256.
