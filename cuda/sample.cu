// From logits to tokens: greedy, or drawn among what min-p, top-k and top-p leave, without sorting.
//
// A block takes one sample. Greedy rows take the best token, ties going to the lowest id. Others divide
// by the temperature, drop what min-p, then top-k, then top-p cut, and take the token whose tempered logit
// plus Gumbel noise (noise.cuh) is largest. What min-p and top-k leave is everything from a bound on
// (ranking.cuh). The bound of top-p is not looked for: the winner among all is the winner among those that
// stay, if it is one of them, and that it is if those before it weigh less than the share. If it is not,
// neither is anything behind it, and the next round draws among those before it (as rejection sampling in
// FlashInfer, Ye et al. 2025; here the noise is fixed, so the result is that of cutting first).
//
// Runs last in a step, after logit_edits.cu. Counts the token for the row's penalties, and leaves it where
// the next step's input may be taken from, so that this step need not be over on the host. A sample is
// a function of its row's logits, parameters, history and output index: all sums have a fixed order. A
// row whose logits hold NaN or +infinity, or no finite one, fails alone.

#include "noise.cuh"
#include "sampling.cuh"

/// One launch: grid (samples), block THREADS.
struct SampleParams {
    const void* logits;             // [logits rows, vocab_size], of T
    const float* edited;            // [samples, vocab_size] of rows with edits
    const int* sample_rows;         // [samples] the row of each; negative: padding
    const int* output_indices;      // [samples] output tokens that its sequence has already
    const int* logits_rows;         // [samples] the row of logits of each, or null: in order
    const SamplingRow* row_params;  // [max_rows]
    unsigned* row_counts;           // [max_rows, vocab_size], of rows with penalties
    int* last_tokens;               // [max_rows] the token that each row sampled last
    int* token_ids;                 // [samples] the tokens; 0 where a sample failed
    unsigned char* statuses;        // [samples] 0: well; 1: failed
    int vocab_size;                 // tokens of the vocabulary, at most 2^22
};

namespace {

constexpr int THREADS = 512;

/// How logits become tempered logits, at most zero, so that no temperature can overflow them.
struct Tempered {
    float peak;
    float inverse;  // of the temperature

    __device__ __forceinline__ float operator()(float logit) const { return (logit - peak) * inverse; }
};

/// Weight of all tokens from a bound on; the best token's is 1.
template <class T>
__device__ float weight_from(const Logits<T>& logits, const Tempered& tempered, Key bound) {
    float weight = 0.0f;
    for_each_token<THREADS>(logits, [&](float logit, int id) {
        if (rank_key(logit, id) >= bound) weight += __expf(tempered(logit));
    });
    return block_sum<THREADS>(weight);
}

/// Key of the token from `bound` on that has the largest tempered logit plus noise. `top`: of the best.
template <class T>
__device__ Key draw(const Logits<T>& logits, const Tempered& tempered, const Stream& stream, Key top, Key bound) {
    const int best = key_id(top);
    // The best token is always among them: what it gets is the score to beat.
    float score_to_beat = gumbel(philox(stream, noise_block(best)).words[noise_word(best)]);
    Key winner = rank_key(score_to_beat, best);
    for (int block = threadIdx.x; first_token(block) < logits.size; block += THREADS) {
        float scores[4];
        bool has_chance = false;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int id = first_token(block) + 16 * word;
            scores[word] = minus_infinity();
            if (id >= logits.size) continue;
            const float logit = logits[id];
            if (rank_key(logit, id) >= bound) scores[word] = tempered(logit);
            has_chance |= scores[word] + MAX_GUMBEL >= score_to_beat;
        }
        if (!has_chance) continue;
        const RandomWords random = philox(stream, block);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float score = scores[word] + gumbel(random.words[word]);
            if (score < score_to_beat) continue;
            score_to_beat = score;
            const Key key = rank_key(score, first_token(block) + 16 * word);
            winner = key > winner ? key : winner;
        }
    }
    const int id = key_id(block_max<THREADS>(winner));
    return rank_key(logits[id], id);
}

/// The token of a row that is not greedy. `top`: key of its best.
template <class T>
__device__ int choose(const Logits<T>& logits, const SamplingRow& row, const Stream& stream, Key top) {
    const Tempered tempered{key_logit(top), 1.0f / row.temperature};
    Key bound = 0;
    if (row.min_p > 0.0f) bound = lowest_key(tempered.peak + row.temperature * logf(row.min_p));
    if (row.top_k > 0 && row.top_k < logits.size) {
        const Key of_top_k = bound_of_best<THREADS>(logits, row.top_k);
        bound = of_top_k > bound ? of_top_k : bound;
    }
    const bool has_top_p = row.top_p < 1.0f;
    const float share = has_top_p ? row.top_p * weight_from(logits, tempered, bound) : 0.0f;
    for (;;) {
        const Key winner = draw(logits, tempered, stream, top, bound);
        if (!has_top_p || winner == top || weight_from(logits, tempered, winner + 1) < share) return key_id(winner);
        bound = winner + 1;
    }
}

}  // namespace

template <class T>
__global__ void __launch_bounds__(THREADS) sample(const SampleParams params) {
    const int number = blockIdx.x;
    const long long row_number = params.sample_rows[number];
    if (row_number < 0) return;  // the whole block
    const SamplingRow& row = params.row_params[row_number];
    const int output_index = params.output_indices[number];
    const Logits<T> logits{
        static_cast<const T*>(params.logits) + logits_offset(number, params),
        has_edits(row, output_index) ? params.edited + static_cast<long long>(number) * params.vocab_size : nullptr,
        params.vocab_size,
    };
    const Key top = best_key<THREADS>(logits);
    const bool is_well = is_sound(key_logit(top));  // of all threads alike
    int token = is_well ? key_id(top) : 0;
    if (is_well && row.temperature >= GREEDY_BELOW) {
        const Stream stream{row.seed, row.child, static_cast<unsigned>(output_index)};
        token = choose(logits, row, stream, top);
    }
    if (threadIdx.x != 0) return;
    params.token_ids[number] = token;
    params.statuses[number] = is_well ? 0 : 1;
    params.last_tokens[row_number] = token;
    if (is_well && row.has_penalties) atomicAdd(&params.row_counts[row_number * params.vocab_size + token], 1u);
}

// Instantiations: sample<T> for T in float, Half, BFloat16.
