// The order of the tokens of one row, and the best ones without sorting: by logit, descending; ties by
// id, ascending.
//
// A token's logit and id are packed into a key; larger keys are better, and no two are equal. So "the k
// best" is a bound on keys. It is found digit by digit from the top: count the keys of each digit, go to
// the digit in which the k-th lies, and on among its keys (radix selection). Counts do not depend on the
// order in which they are made.

#pragma once

#include "block.cuh"

using Key = unsigned long long;

/// Bits of a key that hold the id: vocabularies have at most 2^22 tokens.
constexpr int ID_BITS = 22;
constexpr unsigned ID_MASK = (1u << ID_BITS) - 1;

__device__ __forceinline__ Key rank_key(float logit, int id) {
    const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are ties
    const unsigned rising = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<Key>(rising) << ID_BITS | (~static_cast<unsigned>(id) & ID_MASK);
}

/// The least key of a logit, whatever the id.
__device__ __forceinline__ Key lowest_key(float logit) { return rank_key(logit, ID_MASK); }

__device__ __forceinline__ int key_id(Key key) { return static_cast<int>(~static_cast<unsigned>(key) & ID_MASK); }

__device__ __forceinline__ float key_logit(Key key) {
    const unsigned rising = static_cast<unsigned>(key >> ID_BITS);
    return __uint_as_float(rising >> 31 ? rising & 0x7fffffffu : ~rising);
}

/// Logits of one row: as the model gave them, or edited.
template <class T>
struct Logits {
    const T* raw;
    const float* edited;  // null: not edited
    int size;             // tokens of the vocabulary

    __device__ __forceinline__ float operator[](int id) const {
        return edited != nullptr ? edited[id] : to_float(raw[id]);
    }
};

/// Calls `visit(logit, id)` for every token, in a fixed order of each thread.
template <int THREADS, class T, class Visit>
__device__ __forceinline__ void for_each_token(const Logits<T>& logits, Visit visit) {
#pragma unroll 4
    for (int id = threadIdx.x; id < logits.size; id += THREADS) visit(logits[id], id);
}

/// Key of the best token. If a logit is NaN, the key's is.
template <int THREADS, class T>
__device__ __forceinline__ Key best_key(const Logits<T>& logits) {
    Key best = 0;
    for_each_token<THREADS>(logits, [&](float logit, int id) {
        const Key key = rank_key(logit == logit ? logit : __uint_as_float(0x7fffffffu), id);
        best = key > best ? key : best;
    });
    return block_max<THREADS>(best);
}

/// Whether a row with this best logit can be sampled: none is NaN or +infinity, and one is finite.
__device__ __forceinline__ bool is_sound(float best) { return best > minus_infinity() && best < -minus_infinity(); }

constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;

/// Keys of one digit.
struct Bin {
    int digit;
    int above;  // keys of larger digits
    int size;
};

/// The bin of the key that is the `rank`-th (from 1) from the top.
template <int THREADS>
__device__ __forceinline__ Bin bin_of_rank(const int (&bins)[BINS], int rank) {
    constexpr int EACH = BINS / THREADS;
    __shared__ int of_warps[THREADS / WARP];
    __shared__ Bin found;
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int first = BINS - 1 - EACH * static_cast<int>(threadIdx.x);  // thread 0 has the largest digits
    int own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own += bins[first - i];
    int upto = own;
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, upto, by);
        if (lane >= by) upto += before;
    }
    if (lane == WARP - 1) of_warps[warp] = upto;
    __syncthreads();
    int above = upto - own;
    for (int w = 0; w < warp; ++w) above += of_warps[w];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int size = bins[first - i];
        if (above < rank && rank <= above + size) found = {first - i, above, size};
        above += size;
    }
    __syncthreads();
    return found;
}

/// The bound that exactly the `count` best tokens reach; there are at least as many.
template <int THREADS, class T>
__device__ __forceinline__ Key bound_of_best(const Logits<T>& logits, int count) {
    __shared__ int bins[BINS];
    Key bound = 0;             // the digits found so far
    int left = 32 + ID_BITS;   // bits after them
    for (;;) {
        const int shift = left > DIGIT_BITS ? left - DIGIT_BITS : 0;
        const unsigned mask = (1u << (left - shift)) - 1;
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
        __syncthreads();
        for_each_token<THREADS>(logits, [&](float logit, int id) {
            const Key key = rank_key(logit, id);
            if (key >> left == bound >> left) atomicAdd(&bins[static_cast<unsigned>(key >> shift) & mask], 1);
        });
        __syncthreads();
        const Bin bin = bin_of_rank<THREADS>(bins, count);
        bound |= static_cast<Key>(bin.digit) << shift;
        count -= bin.above;
        left = shift;
        if (count == bin.size || left == 0) return bound;
    }
}
