// Log-probabilities of the raw logits: of one token a row, and of the best ones.
//
// Serves sampled tokens, after sample.cu, and prompt tokens that are scored. A block takes one row. The
// best ones are found by a bound (ranking.cuh), and only they are ordered. A row whose logits hold NaN or
// +infinity, or no finite one, is marked as failed, though edits may have hidden that from the sampler.

#include "ranking.cuh"

/// One launch: grid (rows), block THREADS.
struct LogprobsParams {
    const void* logits;       // [logits rows, vocab_size], of T
    const int* logits_rows;   // [rows] the row of logits of each, or null: in order
    const int* token_ids;     // [rows] the token that each row tells first
    const int* num_best;      // [rows] how many of the best it tells after it; negative: nothing at all
    int* out_ids;             // [rows, stride] the token, then the best, descending, ties by id
    float* out_values;        // [rows, stride] their log-probabilities
    unsigned char* statuses;  // [rows] becomes 1 where a row failed, whose output is not written
    int vocab_size;           // tokens of the vocabulary, at most 2^22
    int stride;               // at least 1 + the most of num_best, or 1 + vocab_size
};

namespace {

constexpr int THREADS = 512;
constexpr int MOST_BEST = 1024;  // that a row may ask for

}  // namespace

template <class T>
__global__ void __launch_bounds__(THREADS) logprobs(const LogprobsParams params) {
    __shared__ Key best[MOST_BEST];
    __shared__ int num_found;
    const int row = blockIdx.x;
    if (params.num_best[row] < 0) return;  // the whole block, here and below
    const int count = min(params.num_best[row], min(params.vocab_size, MOST_BEST));
    const long long logits_row = params.logits_rows == nullptr ? row : params.logits_rows[row];
    const Logits<T> logits{static_cast<const T*>(params.logits) + logits_row * params.vocab_size, nullptr,
                           params.vocab_size};
    const float peak = key_logit(best_key<THREADS>(logits));
    if (!is_sound(peak)) {
        if (threadIdx.x == 0) params.statuses[row] = 1;
        return;
    }
    float weight = 0.0f;
    for_each_token<THREADS>(logits, [&](float logit, int) { weight += __expf(logit - peak); });
    const float log_total = logf(block_sum<THREADS>(weight));

    int* const ids = params.out_ids + static_cast<long long>(row) * params.stride;
    float* const values = params.out_values + static_cast<long long>(row) * params.stride;
    if (threadIdx.x == 0) {
        const int token = params.token_ids[row];
        ids[0] = token;
        values[0] = logits[token] - peak - log_total;
        num_found = 0;
    }
    if (count == 0) return;
    const Key bound = count < params.vocab_size ? bound_of_best<THREADS>(logits, count) : 0;
    __syncthreads();
    for_each_token<THREADS>(logits, [&](float logit, int id) {
        const Key key = rank_key(logit, id);
        if (key >= bound) best[atomicAdd(&num_found, 1)] = key;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int rank = 0;
        for (int other = 0; other < count; ++other) rank += best[other] > best[i];
        ids[1 + rank] = key_id(best[i]);
        values[1 + rank] = key_logit(best[i]) - peak - log_total;
    }
}

// Instantiations: logprobs<T> for T in float, Half, BFloat16.
