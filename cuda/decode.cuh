// What both ways of decoding share (paged_attention_decode.cu): the parameters, what a block is about, and
// the end, where the workers of a block bring their softmaxes together.

#pragma once

#include "fp8.cuh"
#include "paged.cuh"

/// One launch: grid (items, kv_heads, ceil(max_rows / ROWS)), block DECODE_THREADS, shared decode_shared_bytes.
struct PagedAttentionDecodeParams {
    const void* q;                   // [tokens, heads * head_dim], of T, rotated
    const void* k_cache;             // [blocks, kv_heads, block_size, head_dim], of Cache
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
    float k_scale;                   // keys are multiplied by it where Cache is Fp8
    float v_scale;                   // values are
};

constexpr int DECODE_THREADS = 128;

/// What a block is about: `ROWS` rows from `first_row` on, and one chunk of the keys of their sequence.
struct DecodeItem {
    int sequence;
    int partial;      // negative: the only chunk
    int first_query;  // of the sequence, among all tokens
    int rows;         // of the sequence
    int context;      // position of its first query token
    int first_row;
    int chunk_begin;  // first key of the chunk
    int first_seen;   // first key that any of the rows sees
    int end;          // of the chunk's keys that any of the rows sees
};

template <int ROWS>
__device__ __forceinline__ DecodeItem read_decode_item(const PagedAttentionDecodeParams& params) {
    const int* const item = params.items + 3ll * blockIdx.x;
    DecodeItem read{};
    read.sequence = item[0];
    if (read.sequence < 0) return read;
    read.partial = item[2];
    read.first_query = params.query_start_loc[read.sequence];
    const int queries = params.query_start_loc[read.sequence + 1] - read.first_query;
    read.rows = queries * params.group;
    read.context = params.seq_lens[read.sequence] - queries;
    read.first_row = blockIdx.z * ROWS;
    // Rows are in order of their position, so the first sees the earliest key and the last the latest.
    const int last_row = min(read.first_row + ROWS, read.rows) - 1;
    read.chunk_begin = item[1] * params.chunk_tokens;
    read.first_seen = visible(read.context, read.rows, read.first_row, params).first;
    const int seen_end = visible(read.context, read.rows, last_row, params).end;
    read.end = min(seen_end, read.chunk_begin + params.chunk_tokens);
    return read;
}

/// The first key of the chunk that a block reads in tiles of TILE keys, which begin at the chunk's begin.
template <int TILE>
__device__ __forceinline__ int first_tile(const DecodeItem& item) {
    return max(item.first_seen - item.chunk_begin, 0) / TILE * TILE + item.chunk_begin;
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
template <class T, class Cache, int HEAD_DIM, int ROWS, int WORKERS>
__device__ __forceinline__ void write_rows(Meeting<HEAD_DIM, ROWS, WORKERS>& meeting, const DecodeItem& item,
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
    const float v_scale = cache_scale<Cache>(params.v_scale);
    for (int i = thread; i < ROWS * HEAD_DIM; i += DECODE_THREADS) {
        const int r = i / HEAD_DIM;
        const int d = i % HEAD_DIM;
        const int row = item.first_row + r;
        if (row >= item.rows) return;
        float value = 0.0f;
        for (int w = 0; w < WORKERS; ++w) value += meeting.maximum[w][r] * meeting.out[w][r][d];
        value *= v_scale;
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
