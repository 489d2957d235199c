// What the sampling kernels keep of each row between steps.
//
// A row belongs to one sequence until it is reset (sampling_reset.cu). The lists of biases and of
// suppressed tokens have room for MAX_LISTED entries a row; counts are kept for rows with penalties alone.

#pragma once

#include "ranking.cuh"

/// Most entries of logit_bias, and of the tokens that min_tokens suppresses, as the scheduler admits.
constexpr int MAX_LISTED = 1024;

/// Temperatures below this take the best token: dividing by them would only overflow.
constexpr float GREEDY_BELOW = 1e-5f;

/// Bit of a count: the token is in the prompt. The bits below it count it in the output.
constexpr unsigned IN_PROMPT = 1u << 31;

/// Sampling parameters of a row's sequence.
struct SamplingRow {
    unsigned long long seed;   // of the request
    unsigned child;            // which of its sequences
    float temperature;         // divides the logits; below 1e-5: greedy
    float top_p;               // the smallest set of best tokens with at least this share; 1 or more: all
    float min_p;               // tokens below this share of the best one's are dropped
    float repetition_penalty;  // divides positive, multiplies negative logits of tokens seen
    float presence_penalty;    // subtracted from logits of tokens in the output
    float frequency_penalty;   // subtracted once per occurrence in the output
    int top_k;                 // best tokens that stay; 0: all
    int min_tokens;            // suppressed tokens may not be sampled before so many outputs
    int num_bias;              // entries of the row's list of biases
    int num_suppressed;        // entries of its list of suppressed tokens
    int has_penalties;         // 1: the row's counts are kept
};

__device__ __forceinline__ bool suppresses(const SamplingRow& row, int output_index) {
    return row.num_suppressed > 0 && output_index < row.min_tokens;
}

/// Whether the row's logits are edited before they are sampled (logit_edits.cu).
__device__ __forceinline__ bool has_edits(const SamplingRow& row, int output_index) {
    return row.num_bias > 0 || row.has_penalties || suppresses(row, output_index);
}

/// Which row of logits a sample reads; children of one request share one. `Params` is a kernel's struct.
template <class Params>
__device__ __forceinline__ long long logits_offset(int sample, const Params& params) {
    const long long row = params.logits_rows == nullptr ? sample : params.logits_rows[sample];
    return row * params.vocab_size;
}
