// Row resets of a step plan: a row gets the parameters and the history of the sequence that takes it.
//
// Reads the plan's arrays as they are. Runs first in a step, on the stream of the sampling kernels, so
// what a step before it counted is there already. Not here: checks of the values (the host's), and
// log-probabilities wanted, which only the host needs.
//
// Invariants: no row appears twice in a launch; ids are within the vocabulary; no list is longer than
// MAX_LISTED.

#include "sampling.cuh"

/// One launch: grid (resets, ceil(vocab_size / TOKENS)), block THREADS.
struct SamplingResetParams {
    const int* rows;               // [resets] the row; negative: padding
    const float* floats;           // [resets, 6] temperature, top_p, min_p, repetition, presence, frequency
    const long long* ints;         // [resets, 6] top_k, seed, child, logprobs, prompt ids, min_tokens
    const int* id_ranges;          // [resets, 2] of ids: prompt, then output
    const int* bias_ranges;        // [resets, 2] of bias_ids and bias_values
    const int* suppressed_ranges;  // [resets, 2] of suppressed_ids
    const int* ids;
    const int* bias_ids;
    const float* bias_values;
    const int* suppressed_ids;
    SamplingRow* row_params;       // [max_rows]
    unsigned* row_counts;          // [max_rows, vocab_size] of each token: in the output, and IN_PROMPT
    int* row_bias_ids;             // [max_rows, MAX_LISTED]
    float* row_bias_values;        // [max_rows, MAX_LISTED]
    int* row_suppressed_ids;       // [max_rows, MAX_LISTED]
    int vocab_size;                // tokens of the vocabulary
};

namespace {

constexpr int THREADS = 256;
constexpr int TOKENS = 8192;  // whose counts one block makes

__device__ SamplingRow read_row(const SamplingResetParams& params, int reset) {
    const float* const floats = params.floats + 6ll * reset;
    const long long* const ints = params.ints + 6ll * reset;
    const int* const bias = params.bias_ranges + 2ll * reset;
    const int* const suppressed = params.suppressed_ranges + 2ll * reset;
    constexpr long long MOST = 0x7fffffff;
    SamplingRow row;
    row.seed = static_cast<unsigned long long>(ints[1]);
    row.child = static_cast<unsigned>(ints[2]);
    row.temperature = floats[0];
    row.top_p = floats[1];
    row.min_p = floats[2];
    row.repetition_penalty = floats[3];
    row.presence_penalty = floats[4];
    row.frequency_penalty = floats[5];
    row.top_k = static_cast<int>(ints[0] < MOST ? ints[0] : MOST);
    row.min_tokens = static_cast<int>(ints[5] < MOST ? ints[5] : MOST);
    row.num_bias = bias[1] - bias[0];
    row.num_suppressed = suppressed[1] - suppressed[0];
    row.has_penalties =
        row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f;
    return row;
}

/// Counts the ids of the block's part of the vocabulary, from zero.
__device__ void count_tokens(const SamplingResetParams& params, int reset, long long row) {
    const int begin = blockIdx.y * TOKENS;
    const int end = min(begin + TOKENS, params.vocab_size);
    unsigned* const counts = params.row_counts + row * params.vocab_size;
    for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += THREADS) counts[id] = 0;
    __syncthreads();
    const int first = params.id_ranges[2ll * reset];
    const int last = params.id_ranges[2ll * reset + 1];
    const long long first_output = first + params.ints[6ll * reset + 4];
    for (int i = first + static_cast<int>(threadIdx.x); i < last; i += THREADS) {
        const int id = params.ids[i];
        if (id < begin || id >= end) continue;
        if (i < first_output) {
            atomicOr(&counts[id], IN_PROMPT);
        } else {
            atomicAdd(&counts[id], 1u);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) sampling_reset(const SamplingResetParams params) {
    const int reset = blockIdx.x;
    const long long row = params.rows[reset];
    if (row < 0) return;  // the whole block
    const SamplingRow state = read_row(params, reset);
    if (blockIdx.y == 0) {
        if (threadIdx.x == 0) params.row_params[row] = state;
        const int first_bias = params.bias_ranges[2ll * reset];
        for (int i = threadIdx.x; i < state.num_bias; i += THREADS) {
            params.row_bias_ids[row * MAX_LISTED + i] = params.bias_ids[first_bias + i];
            params.row_bias_values[row * MAX_LISTED + i] = params.bias_values[first_bias + i];
        }
        const int first_suppressed = params.suppressed_ranges[2ll * reset];
        for (int i = threadIdx.x; i < state.num_suppressed; i += THREADS) {
            params.row_suppressed_ids[row * MAX_LISTED + i] = params.suppressed_ids[first_suppressed + i];
        }
    }
    if (state.has_penalties) count_tokens(params, reset, row);
}
