// Paged attention for few query tokens a sequence: one, or a handful.
//
// The keys of a sequence are cut into chunks of a fixed number of tokens, and a block takes one chunk of
// one key/value head for all rows that read it (row = query token * group + head of the group), so a
// group's heads share each loaded key, and a long sequence is many blocks. Chunks do not depend on the
// batch, so neither do results. A sequence of one chunk is written at once; the others leave an
// unnormalised sum, a maximum and a weight for each row, which the second kernel combines (split
// softmax: Flash-Decoding, Dao et al. 2023).
//
// Within a block, LANES lanes share a key, and WORKERS such teams take every WORKERS-th key, each with
// an online softmax of its own (Milakov and Gimelshein 2018) in fp32; they meet once at the end.
// Scores are kept in units of log2(e), so that weights are powers of two.
//
// Each key has its worker and its turn by its place in the chunk alone, so a row's result does not
// depend on the rows beside it. Invariants: keys that no row sees are not loaded; offsets are 64-bit before they are multiplied. Not
// here: rotation and the write of the cache (kv_cache_write.cu), which run before.

#include "paged.cuh"

/// One launch: grid (items, kv_heads, ceil(max_rows / ROWS)), block THREADS, shared decode_shared_bytes.
struct PagedAttentionDecodeParams {
    const void* q;                   // [tokens, heads * head_dim], of T, rotated
    const void* k_cache;             // [blocks, kv_heads, block_size, head_dim], of T
    const void* v_cache;             // the same
    void* out;                       // [tokens, heads * head_dim], of T
    const int* query_start_loc;      // [sequences + 1] first query token of each sequence
    const int* seq_lens;             // [sequences] tokens in the cache, those of this step included
    const int* block_table_offsets;  // [sequences + 1] into block_ids
    const int* block_ids;            // all block tables, one after the other
    const int* items;                // [items, 3] sequence (negative: padding), chunk, and where the partial
                                     // result goes (negative: the only chunk, written to out)
    float* partial_out;              // [partials, kv_heads, max_rows, head_dim] unnormalised sums
    float* partial_state;            // [partials, kv_heads, max_rows, 2] maximum, and sum of the weights
    float scale;                     // factor of the scores
    float soft_cap;                  // scores become cap * tanh(score / cap); 0: they stay
    int window;                      // a query sees that many keys up to its own; 0: all
    int kv_heads;                    // key/value heads
    int group;                       // query heads of each
    int block_size;                  // tokens of a block
    unsigned block_magic;            // ceil(2^(31 + block_shift) / block_size)
    int block_shift;                 // ceil(log2(block_size)): token / block_size = token * magic >> (31 + shift)
    int chunk_tokens;                // keys of a chunk
    int max_rows;                    // the most rows of any sequence: its query tokens * group
};

/// One launch: grid (splits, kv_heads, max_rows), block THREADS.
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

namespace {

constexpr int THREADS = 128;

/// How a block's threads share keys and dimensions.
template <class T, int HEAD_DIM>
struct Layout {
    static constexpr int SIZE = Vector<T>::SIZE;
    static constexpr int VECTORS = HEAD_DIM / SIZE;  // of one key
    static constexpr int LANES = VECTORS > 16 ? 32 : VECTORS > 8 ? 16 : 8;
    static constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
    static constexpr int VALUES = PER_LANE * SIZE;  // of one key in one lane
    static constexpr int WORKERS = THREADS / LANES;
    static constexpr int UNROLL = 4;  // keys that a worker has in flight
    static_assert(HEAD_DIM % SIZE == 0, "a head must be whole vectors");
};

/// What the item at hand is about.
struct Item {
    int sequence;
    int chunk;
    int partial;
    int first_query;  // of the sequence, among all tokens
    int rows;
    int seq_len;
    int context;  // position of the first query token
};

__device__ __forceinline__ Item read_item(const PagedAttentionDecodeParams& params) {
    const int* const item = params.items + 3ll * blockIdx.x;
    Item read{item[0], item[1], item[2], 0, 0, 0, 0};
    if (read.sequence < 0) return read;
    read.first_query = params.query_start_loc[read.sequence];
    const int queries = params.query_start_loc[read.sequence + 1] - read.first_query;
    read.rows = queries * params.group;
    read.seq_len = params.seq_lens[read.sequence];
    read.context = read.seq_len - queries;
    return read;
}

/// Values of one key, query or value row that this lane takes: vectors lane, lane + LANES, ...
template <class T, int HEAD_DIM>
__device__ __forceinline__ void load_row(Vector<T> (&to)[Layout<T, HEAD_DIM>::PER_LANE], const T* row,
                                         bool wanted, int lane) {
    using L = Layout<T, HEAD_DIM>;
#pragma unroll
    for (int i = 0; i < L::PER_LANE; ++i) {
        const int vector = lane + i * L::LANES;
        if (wanted && vector < L::VECTORS) {
            to[i] = load_vector(row + vector * L::SIZE);
        } else {
            to[i] = Vector<T>{};
        }
    }
}

/// Online softmax of ROWS rows over the keys that one worker has seen; this lane's part of the sums.
template <class T, int HEAD_DIM, int ROWS>
struct Softmax {
    using L = Layout<T, HEAD_DIM>;
    float query[ROWS][L::VALUES];
    float out[ROWS][L::VALUES];
    float maximum[ROWS];
    float sum[ROWS];

    /// Score of every row for one key, summed over the lanes that share it.
    __device__ __forceinline__ void score(float (&scores)[ROWS], const Vector<T> (&key)[L::PER_LANE]) const {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) scores[row] = 0.0f;
#pragma unroll
        for (int d = 0; d < L::VALUES; ++d) {
            const float value = to_float(key[d / L::SIZE].values[d % L::SIZE]);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) scores[row] += query[row][d] * value;
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
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

    __device__ __forceinline__ void add(const float (&weights)[ROWS], const Vector<T> (&value)[L::PER_LANE]) {
#pragma unroll
        for (int d = 0; d < L::VALUES; ++d) {
            const float v = to_float(value[d / L::SIZE].values[d % L::SIZE]);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) out[row][d] += weights[row] * v;
        }
    }
};

/// Takes the rows' queries, times the scale, and begins with nothing seen.
template <class T, int HEAD_DIM, int ROWS>
__device__ __forceinline__ void load_queries(Softmax<T, HEAD_DIM, ROWS>& softmax, const Item& item, int first_row,
                                             int lane, const PagedAttentionDecodeParams& params) {
    using L = Layout<T, HEAD_DIM>;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = first_row + r;
        const long long at = row_index(item.first_query, row, params) * HEAD_DIM;
        Vector<T> query[L::PER_LANE];
        load_row<T, HEAD_DIM>(query, static_cast<const T*>(params.q) + at, row < item.rows, lane);
#pragma unroll
        for (int d = 0; d < L::VALUES; ++d) {
            softmax.query[r][d] = to_float(query[d / L::SIZE].values[d % L::SIZE]) * params.scale;
            softmax.out[r][d] = 0.0f;
        }
        softmax.maximum[r] = minus_infinity();
        softmax.sum[r] = 0.0f;
    }
}

/// Reads this worker's keys and values of the chunk, UNROLL at a time.
template <class T, int HEAD_DIM, int ROWS>
__device__ __forceinline__ void read_keys(Softmax<T, HEAD_DIM, ROWS>& softmax, const Item& item, int first_row,
                                          int lane, int worker, const PagedAttentionDecodeParams& params) {
    using L = Layout<T, HEAD_DIM>;
    // Rows are in order of their position, so the first sees the earliest key and the last the latest.
    const int last_row = min(first_row + ROWS, item.rows) - 1;
    constexpr int TILE = L::WORKERS * L::UNROLL;
    const int chunk_begin = item.chunk * params.chunk_tokens;
    const int first_seen = visible(item.context, item.rows, first_row, params).first;
    const int begin = max(first_seen - chunk_begin, 0) / TILE * TILE + chunk_begin;
    const int end = min(visible(item.context, item.rows, last_row, params).end, chunk_begin + params.chunk_tokens);
    for (int tile = begin; tile < end; tile += TILE) {
        long long offsets[L::UNROLL];
        bool wanted[L::UNROLL];
        float scores[L::UNROLL][ROWS];
        Vector<T> loaded[L::UNROLL][L::PER_LANE];
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) {
            const int token = tile + u * L::WORKERS + worker;
            wanted[u] = token >= first_seen && token < end;
            offsets[u] = wanted[u] ? cache_offset<HEAD_DIM>(item.sequence, token, params) : 0;
            load_row<T, HEAD_DIM>(loaded[u], static_cast<const T*>(params.k_cache) + offsets[u], wanted[u], lane);
        }
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) {
            softmax.score(scores[u], loaded[u]);
            const int token = tile + u * L::WORKERS + worker;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Visible seen = visible(item.context, item.rows, first_row + r, params);
                scores[u][r] = weighable(scores[u][r], token, seen, params);
            }
        }
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) {
            load_row<T, HEAD_DIM>(loaded[u], static_cast<const T*>(params.v_cache) + offsets[u], wanted[u], lane);
        }
        softmax.rescale(scores);
#pragma unroll
        for (int u = 0; u < L::UNROLL; ++u) softmax.add(scores[u], loaded[u]);
    }
}

/// Shared memory in which the workers of a block meet.
template <int HEAD_DIM, int ROWS, int WORKERS>
struct Meeting {
    float out[WORKERS][ROWS][HEAD_DIM];
    float maximum[WORKERS][ROWS];
    float sum[WORKERS][ROWS];
    float total[ROWS];
    float highest[ROWS];
};

/// Brings the workers' sums together and writes the rows, normalised or as a partial result.
template <class T, int HEAD_DIM, int ROWS, int WORKERS>
__device__ __forceinline__ void write_rows(Meeting<HEAD_DIM, ROWS, WORKERS>& meeting, const Item& item, int first_row,
                           const PagedAttentionDecodeParams& params) {
    const int thread = threadIdx.x;
    if (thread < ROWS) {
        float highest = minus_infinity();
        for (int w = 0; w < WORKERS; ++w) highest = fmaxf(highest, meeting.maximum[w][thread]);
        const float base = finite_base(highest);
        float total = 0.0f;
        for (int w = 0; w < WORKERS; ++w) {
            const float factor = exp2f(meeting.maximum[w][thread] - base);
            meeting.maximum[w][thread] = factor;  // from here on
            total += factor * meeting.sum[w][thread];
        }
        meeting.total[thread] = total;
        meeting.highest[thread] = highest;
    }
    __syncthreads();
    for (int i = thread; i < ROWS * HEAD_DIM; i += THREADS) {
        const int r = i / HEAD_DIM;
        const int d = i % HEAD_DIM;
        const int row = first_row + r;
        if (row >= item.rows) return;
        float value = 0.0f;
        for (int w = 0; w < WORKERS; ++w) value += meeting.maximum[w][r] * meeting.out[w][r][d];
        if (item.partial < 0) {
            const long long at = row_index(item.first_query, row, params) * HEAD_DIM;
            static_cast<T*>(params.out)[at + d] = from_float<T>(value / meeting.total[r]);
            continue;
        }
        const long long at =
            (static_cast<long long>(item.partial) * params.kv_heads + blockIdx.y) * params.max_rows + row;
        params.partial_out[at * HEAD_DIM + d] = value;
        if (d == 0) {
            params.partial_state[2 * at] = meeting.highest[r];
            params.partial_state[2 * at + 1] = meeting.total[r];
        }
    }
}

}  // namespace

template <class T, int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(THREADS, 1) paged_attention_decode(const PagedAttentionDecodeParams params) {
    using L = Layout<T, HEAD_DIM>;
    const Item item = read_item(params);
    const int first_row = blockIdx.z * ROWS;
    if (first_row >= item.rows) return;  // the whole block; padding has no rows
    const int lane = threadIdx.x % L::LANES;
    const int worker = threadIdx.x / L::LANES;

    Softmax<T, HEAD_DIM, ROWS> softmax;
    load_queries<T, HEAD_DIM, ROWS>(softmax, item, first_row, lane, params);
    read_keys<T, HEAD_DIM, ROWS>(softmax, item, first_row, lane, worker, params);

    DYNAMIC_SHARED(shared);
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
    write_rows<T, HEAD_DIM, ROWS, L::WORKERS>(meeting, item, first_row, params);
}

/// Combines the partial results of one row. The warps take every fourth one, and meet in shared memory.
template <class T>
__global__ void __launch_bounds__(THREADS) paged_attention_combine(const PagedAttentionCombineParams params) {
    constexpr int WARPS = THREADS / WARP;
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
    for (int d = threadIdx.x; d < params.head_dim; d += THREADS) {
        float value = 0.0f;
        float total = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            value += outs[w][d];
            total += sums[w];
        }
        to[d] = from_float<T>(value / total);
    }
}

// Instantiations, for T in float, Half, BFloat16: paged_attention_combine<T>, and
// paged_attention_decode<T, HEAD_DIM, ROWS> for HEAD_DIM in 64, 80, 96, 128, 256 and ROWS in 1, 4, 8.
