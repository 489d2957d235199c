// Edits of a step's logits before they are sampled: biases, suppression before min_tokens, penalties.
//
// Writes an edited copy of the rows that have any; the raw logits stay for log-probabilities. In this
// order: bias is added; suppressed tokens become -infinity; tokens of prompt or output have their logits
// divided (positive) or multiplied by the repetition penalty (Keskar et al. 2019); those of the output
// lose the frequency penalty for each occurrence and the presence penalty once.
//
// Runs after sampling_reset.cu and before sample.cu, which reads what is written here and counts the
// sampled token. A block edits TOKENS logits of one sample. Invariant: a row's lists name no token twice.

#include "sampling.cuh"

/// One launch: grid (samples, ceil(vocab_size / TOKENS)), block THREADS.
struct LogitEditsParams {
    const void* logits;             // [logits rows, vocab_size], of T
    float* edited;                  // [samples, vocab_size]; what has no edits is not written
    const int* sample_rows;         // [samples] the row of each; negative: padding
    const int* output_indices;      // [samples] output tokens that its sequence has already
    const int* logits_rows;         // [samples] the row of logits of each, or null: in order
    const SamplingRow* row_params;  // [max_rows]
    const unsigned* row_counts;     // [max_rows, vocab_size]
    const int* row_bias_ids;        // [max_rows, MAX_LISTED]
    const float* row_bias_values;   // [max_rows, MAX_LISTED]
    const int* row_suppressed_ids;  // [max_rows, MAX_LISTED]
    int vocab_size;                 // tokens of the vocabulary
};

namespace {

constexpr int THREADS = 256;
constexpr int TOKENS = 4096;  // that one block edits

__device__ __forceinline__ float penalised(float logit, unsigned count, const SamplingRow& row) {
    if (count == 0) return logit;
    logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    const unsigned occurrences = count & ~IN_PROMPT;
    if (occurrences > 0) {
        logit -= row.frequency_penalty * static_cast<float>(occurrences);
        logit -= row.presence_penalty;
    }
    return logit;
}

}  // namespace

template <class T>
__global__ void __launch_bounds__(THREADS) logit_edits(const LogitEditsParams params) {
    __shared__ float part[TOKENS];
    const int sample = blockIdx.x;
    const long long number = params.sample_rows[sample];
    if (number < 0) return;  // the whole block, here and below
    const SamplingRow row = params.row_params[number];
    const int output_index = params.output_indices[sample];
    if (!has_edits(row, output_index)) return;

    const int begin = blockIdx.y * TOKENS;
    const int count = min(TOKENS, params.vocab_size - begin);
    const T* const raw = static_cast<const T*>(params.logits) + logits_offset(sample, params) + begin;
    for (int i = threadIdx.x; i < count; i += THREADS) part[i] = to_float(raw[i]);
    __syncthreads();
    for (int i = threadIdx.x; i < row.num_bias; i += THREADS) {
        const int at = params.row_bias_ids[number * MAX_LISTED + i] - begin;
        if (at >= 0 && at < count) part[at] += params.row_bias_values[number * MAX_LISTED + i];
    }
    __syncthreads();
    if (suppresses(row, output_index)) {
        for (int i = threadIdx.x; i < row.num_suppressed; i += THREADS) {
            const int at = params.row_suppressed_ids[number * MAX_LISTED + i] - begin;
            if (at >= 0 && at < count) part[at] = minus_infinity();
        }
    }
    __syncthreads();
    float* const to = params.edited + static_cast<long long>(sample) * params.vocab_size + begin;
    const unsigned* const counts = params.row_counts + number * params.vocab_size + begin;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        to[i] = row.has_penalties ? penalised(part[i], counts[i], row) : part[i];
    }
}

// Instantiations: logit_edits<T> for T in float, Half, BFloat16.
