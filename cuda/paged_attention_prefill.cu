// Paged attention for prefill chunks: many query tokens of a sequence after its context, in tiles.
//
// A block takes ROWS rows of one key/value head (row = query token * group + head of the group, so a
// group's heads fill tiles together) against all keys they see, KEYS at a time. Queries, keys and values
// come into shared memory by asynchronous copies: while the scores of a tile are computed its values are
// on their way, and while they are weighed the next keys are (FlashAttention-2, Dao 2023). Online
// softmax in fp32 (Milakov and Gimelshein 2018); weights are rounded to T for the second product.
//
// Each of the WARPS warps owns 16 rows; its products (products.cuh) are those of tensor cores, but for fp32.
//
// Key tiles begin at multiples of KEYS, whatever the chunk, so a row's result does not depend on how
// the prompt was cut. Invariants: keys that no row sees are not loaded but zero, since a weight of zero
// times garbage could be not-a-number. Not here: rotation and the cache's write (kv_cache_write.cu).

#include "paged.cuh"
#include "products.cuh"

/// One launch: grid (items, kv_heads), block THREADS, shared prefill_shared_bytes.
struct PagedAttentionPrefillParams {
    const void* q;                   // [tokens, heads * head_dim], of T, rotated
    const void* k_cache;             // [blocks, kv_heads, block_size, head_dim], of Cache
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
    float k_scale;                   // keys are multiplied by it where Cache is Fp8
    float v_scale;                   // values are
};

namespace {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = WARPS * 16;

/// Shared memory of a block.
template <class T, class Cache, int HEAD_DIM>
struct Tiles {
    static constexpr int KEYS = (HEAD_DIM > 128 ? 64 : 128) / static_cast<int>(sizeof(T));
    TileRows<T, ROWS, HEAD_DIM> queries;
    KvTile<T, Cache, KEYS, HEAD_DIM> keys;
    KvTile<T, Cache, KEYS, HEAD_DIM> values;
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
template <class T, class Cache, int KEYS, int HEAD_DIM>
__device__ __forceinline__ void copy_keys(KvTile<T, Cache, KEYS, HEAD_DIM>& to, const void* cache, int first,
                                          const Item& item, const PagedAttentionPrefillParams& params) {
    copy_tile<THREADS>(to, cache, threadIdx.x, [&](int key) -> long long {
        return first + key < item.end ? cache_offset<HEAD_DIM>(item.sequence, first + key, params) : -1;
    });
}

template <class T, int HEAD_DIM>
__device__ __forceinline__ void copy_queries(TileRows<T, ROWS, HEAD_DIM>& queries, const Item& item,
                                             const PagedAttentionPrefillParams& params) {
    constexpr int SIZE = Vector<T>::SIZE;
    constexpr int VECTORS = HEAD_DIM / SIZE;
    for (int i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const int row = item.first_row + i / VECTORS;
        const int d = i % VECTORS * SIZE;
        const bool wanted = row < item.rows;
        const long long from = wanted ? row_index(item.first_query, row, params) * HEAD_DIM + d : 0;
        ptx::copy_async_16(&queries.rows[i / VECTORS][d], static_cast<const T*>(params.q) + from, wanted ? 16 : 0);
    }
}

/// A warp's 16 rows: fragments of the output, and of rows lane / 4 and lane / 4 + 8 the softmax state.
template <class T, class Cache, int HEAD_DIM>
struct Rows {
    static constexpr int KEYS = Tiles<T, Cache, HEAD_DIM>::KEYS;
    float out[HEAD_DIM / 8][4];
    float maximum[2];
    float sum[2];  // of this lane's columns

    /// Turns scores into weights against the new maxima, and takes the old sums down to them.
    __device__ __forceinline__ void weigh(float (&scores)[KEYS / 8][4], const Visible (&seen)[2], int first_key,
                                          int lane, const PagedAttentionPrefillParams& params) {
        const float scale = params.scale * cache_scale<Cache>(params.k_scale);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = maximum[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int key = first_key + n * 8 + lane % 4 * 2 + i;
                    float& score = scores[n][2 * half + i];
                    score = weighable(score * scale, key, seen[half], params);
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
            const float total = sum[half] / cache_scale<Cache>(params.v_scale);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                const Pack<T, 2> pair{from_float<T>(out[n][2 * half] / total),
                                      from_float<T>(out[n][2 * half + 1] / total)};
                *reinterpret_cast<Pack<T, 2>*>(to + n * 8 + lane % 4 * 2) = pair;
            }
        }
    }
};

}  // namespace

template <class T, int HEAD_DIM, class Cache = T>
__global__ void __launch_bounds__(THREADS, 1) paged_attention_prefill(const PagedAttentionPrefillParams params) {
    constexpr int KEYS = Tiles<T, Cache, HEAD_DIM>::KEYS;
    const Item item = read_item<KEYS>(params);
    if (item.sequence < 0 || item.first_row >= item.rows) return;  // the whole block
    DYNAMIC_SHARED(shared);
    auto& tiles = *reinterpret_cast<Tiles<T, Cache, HEAD_DIM>*>(shared);
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;

    copy_queries(tiles.queries, item, params);
    copy_keys(tiles.keys, params.k_cache, item.begin, item, params);
    ptx::commit_copies();

    const int row = item.first_row + warp * 16 + lane / 4;
    const Visible seen[2] = {visible(item.context, item.rows, row, params),
                             visible(item.context, item.rows, row + 8, params)};
    Rows<T, Cache, HEAD_DIM> rows{};
    rows.maximum[0] = rows.maximum[1] = minus_infinity();

    for (int first = item.begin; first < item.end; first += KEYS) {
        copy_keys(tiles.values, params.v_cache, first, item, params);
        ptx::commit_copies();
        ptx::wait_for_copies<1>();  // the keys are there, and at first the queries
        land_tile<THREADS>(tiles.keys, threadIdx.x);
        __syncthreads();
        float scores[KEYS / 8][4];
        multiply_keys(scores, tiles.queries, tiles.keys, warp * 16, lane);
        __syncthreads();  // nobody reads the keys any more
        if (first + KEYS < item.end) {
            copy_keys(tiles.keys, params.k_cache, first + KEYS, item, params);
        }
        ptx::commit_copies();  // an empty group at last, so that the counts stay
        rows.weigh(scores, seen, first, lane, params);
        ptx::wait_for_copies<1>();  // the values are there
        land_tile<THREADS>(tiles.values, threadIdx.x);
        __syncthreads();
        multiply_values(rows.out, scores, tiles.values, lane);
        __syncthreads();  // nobody reads the values any more
    }
    rows.write(item, warp, lane, params);
}

// Instantiations, for HEAD_DIM in 64, 80, 96, 128, 256: paged_attention_prefill<T, HEAD_DIM> for T in float, Half,
// BFloat16, and paged_attention_prefill<T, HEAD_DIM, Fp8> for the last two.
