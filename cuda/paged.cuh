// What the kernels that read the paged cache share: which keys a row sees, where they are, and the
// scores that hidden keys get. A row is one query token of one head of a group: rows are numbered
// token * group + head of the group, so they are in order of their position.
//
// `Params` is any kernel's struct with the fields that a function names.

#pragma once

#include "device.cuh"

/// Scores are kept in units of log2(e), so that weights are powers of two.
constexpr float LOG2_E = 1.4426950408889634f;

/// What scores are taken relative to: their maximum, or anything finite where no key was seen.
__device__ __forceinline__ float finite_base(float highest) {
    return highest == minus_infinity() ? 0.0f : highest;
}

/// Index of a row among all heads of all tokens; blockIdx.y is the key/value head.
template <class Params>
__device__ __forceinline__ long long row_index(int first_query, int row, const Params& params) {
    const long long token = first_query + row / params.group;
    return (token * params.kv_heads + blockIdx.y) * params.group + row % params.group;
}

/// Keys that a row sees: [first, end). A row beyond the sequence's sees none.
struct Visible {
    int first;
    int end;
};

/// `context`: position of the sequence's first query token; `rows`: of the sequence.
template <class Params>
__device__ __forceinline__ Visible visible(int context, int rows, int row, const Params& params) {
    if (row >= rows) return {0, 0};
    const int end = context + row / params.group + 1;
    return {params.window > 0 && end > params.window ? end - params.window : 0, end};
}

/// A score, capped, in units of log2(e); minus infinity if the row does not see the key.
template <class Params>
__device__ __forceinline__ float weighable(float score, int key, const Visible& seen, const Params& params) {
    if (params.soft_cap > 0.0f) score = params.soft_cap * tanhf(score / params.soft_cap);
    return key >= seen.first && key < seen.end ? score * LOG2_E : minus_infinity();
}

/// Where a key of a sequence begins in either cache, for key/value head blockIdx.y.
template <int HEAD_DIM, class Params>
__device__ __forceinline__ long long cache_offset(int sequence, int key, const Params& params) {
    const int index =
        static_cast<int>(static_cast<unsigned long long>(key) * params.block_magic >> (31 + params.block_shift));
    const long long block = params.block_ids[params.block_table_offsets[sequence] + index];
    const int in_block = key - index * params.block_size;
    return ((block * params.kv_heads + blockIdx.y) * params.block_size + in_block) * HEAD_DIM;
}
