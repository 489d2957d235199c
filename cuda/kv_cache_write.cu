// Rotary embedding and the write of a step's keys and values into the paged cache.
//
// Takes the fused projection of every token of a ragged step. Queries are normed (where the model does
// so), rotated and written to `q_out` for the attention kernels; keys the same, into their slots;
// values go to their slots as they are. Arithmetic in fp32, rounded once. Where the cache is e4m3, keys
// and values are divided by their scales first (fp8.cuh).
//
// Stands between the qkv projection and attention. Not here: which slot a token has (the scheduler
// decides) and what becomes of the cache. Invariant: no slot appears twice in a step, so no two warps
// write the same place.

#include "fp8.cuh"

/// One launch: grid (tokens, ceil((heads + 2 * kv_heads) / WARPS)), block WARPS * 32.
struct KvCacheWriteParams {
    const void* qkv;           // [tokens, (heads + 2 * kv_heads) * head_dim], of T
    void* q_out;               // [tokens, heads * head_dim], of T
    void* k_cache;             // [blocks, kv_heads, block_size, head_dim], of Cache
    void* v_cache;             // the same
    const long long* slots;    // [tokens] block * block_size + token in block; negative: padding, not written
    const int* positions;      // [tokens] of each token in its sequence
    const float* cos;          // [max_position, rotary_half], or null: no rotation
    const float* sin;          // the same
    const void* q_norm;        // [head_dim] weight of the query heads' RMS norm, of T, or null: no norm
    const void* k_norm;        // [head_dim] of the key heads, or null
    long long qkv_stride;      // values between two tokens of qkv
    int heads;                 // query heads
    int kv_heads;              // key heads; as many value heads
    int head_dim;              // values of a head
    int rotary_half;           // dimension j turns against j + rotary_half; the rest stays
    int block_size;            // tokens of a block
    float norm_eps;            // added to the mean of squares
    float k_scale;             // keys are divided by it where Cache is Fp8
    float v_scale;             // values are
};

namespace {

constexpr int WARPS = 4;

/// Factor that brings a head to root mean square 1 (Zhang and Sennrich 2019).
template <class T>
__device__ float norm_factor(const T* head, const KvCacheWriteParams& params, int lane) {
    float squares = 0.0f;
    for (int d = lane; d < params.head_dim; d += WARP) {
        const float value = to_float(head[d]);
        squares += value * value;
    }
    return rsqrtf(warp_sum(squares) / static_cast<float>(params.head_dim) + params.norm_eps);
}

/// Norms and rotates one head, and divides it by the scale: dimension pairs (j, j + half) over the lanes, then what is not rotated.
template <class T, class To>
__device__ void write_rotated(const T* head, To* to, float scale, const T* norm, int position,
                              const KvCacheWriteParams& params, int lane) {
    const float factor = norm == nullptr ? 1.0f : norm_factor(head, params, lane);
    const auto normed = [&](int d) {
        const float value = to_float(head[d]);
        return norm == nullptr ? value : value * factor * to_float(norm[d]);
    };
    const int half = params.cos == nullptr ? 0 : params.rotary_half;
    const long long row = static_cast<long long>(position) * half;
    for (int j = lane; j < half; j += WARP) {
        const float cos = params.cos[row + j];
        const float sin = params.sin[row + j];
        const float first = normed(j);
        const float second = normed(j + half);
        to[j] = from_float<To>((first * cos - second * sin) / scale);
        to[j + half] = from_float<To>((second * cos + first * sin) / scale);
    }
    for (int d = 2 * half + lane; d < params.head_dim; d += WARP) to[d] = from_float<To>(normed(d) / scale);
}

}  // namespace

template <class T, class Cache = T>
__global__ void kv_cache_write(const KvCacheWriteParams params) {
    const int lane = threadIdx.x % WARP;
    const int head = blockIdx.y * WARPS + threadIdx.x / WARP;
    const int all_heads = params.heads + 2 * params.kv_heads;
    const long long token = blockIdx.x;
    const long long slot = params.slots[token];
    if (head >= all_heads || slot < 0) return;  // whole warps
    const int position = params.positions[token];
    const T* const from = static_cast<const T*>(params.qkv) + token * params.qkv_stride +
                          static_cast<long long>(head) * params.head_dim;
    if (head < params.heads) {
        T* const to =
            static_cast<T*>(params.q_out) + (token * params.heads + head) * params.head_dim;
        write_rotated(from, to, 1.0f, static_cast<const T*>(params.q_norm), position, params, lane);
        return;
    }
    const bool is_key = head < params.heads + params.kv_heads;
    const int kv_head = head - params.heads - (is_key ? 0 : params.kv_heads);
    const long long block = slot / params.block_size;
    const long long in_block = slot % params.block_size;
    const long long offset =
        ((block * params.kv_heads + kv_head) * params.block_size + in_block) * params.head_dim;
    if (is_key) {
        Cache* const to = static_cast<Cache*>(params.k_cache) + offset;
        const float scale = cache_scale<Cache>(params.k_scale);
        write_rotated(from, to, scale, static_cast<const T*>(params.k_norm), position, params, lane);
        return;
    }
    Cache* const to = static_cast<Cache*>(params.v_cache) + offset;
    const float scale = cache_scale<Cache>(params.v_scale);
    for (int d = lane; d < params.head_dim; d += WARP) to[d] = from_float<Cache>(to_float(from[d]) / scale);
}

// Instantiations: kv_cache_write<T> for T in float, Half, BFloat16; kv_cache_write<T, Fp8> for the last two.
