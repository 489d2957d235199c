// Gumbel noise from a counter: the same request, output and token always get the same noise.
//
// `argmax(logit + noise)` with independent Gumbel noise is a sample of the softmax (Gumbel 1954; Maddison
// et al. 2014). The noise is a pure function of (seed, child, output index, token id), by Philox4x32-10
// (Salmon et al. 2011). Four tokens share a block of the generator:
// id = 64 * (block / 16) + 16 * word + block % 16, as in the CPU's sampler.

#pragma once

#include "device.cuh"

/// No noise is larger: -ln(-ln(1 - 2^-33)), rounded up.
constexpr float MAX_GUMBEL = 22.9f;

/// Which random stream: all that the noise depends on besides the token.
struct Stream {
    unsigned long long seed;  // of the request
    unsigned child;           // which of its sequences
    unsigned output_index;    // output tokens that the sequence has already
};

/// Random bits of the four tokens of a block of the generator.
struct RandomWords {
    unsigned words[4];
};

__device__ __forceinline__ RandomWords philox(const Stream& stream, unsigned block) {
    unsigned c0 = block, c1 = stream.output_index, c2 = stream.child, c3 = 0;
    unsigned key0 = static_cast<unsigned>(stream.seed);
    unsigned key1 = static_cast<unsigned>(stream.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(c0, 0xd2511f53u), low0 = c0 * 0xd2511f53u;
        const unsigned high1 = __umulhi(c2, 0xcd9e8d57u), low1 = c2 * 0xcd9e8d57u;
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return {{c0, c1, c2, c3}};
}

/// The block of the generator in which a token's word is, and which of the four it is.
__device__ __forceinline__ unsigned noise_block(int id) { return id / 64 * 16 + id % 16; }
__device__ __forceinline__ int noise_word(int id) { return id / 16 % 4; }
/// The token of a block's first word; those of the others follow at distances of 16.
__device__ __forceinline__ int first_token(int block) { return block / 16 * 64 + block % 16; }

/// -ln(-ln(1 - v)) with v = (bits + 1/2) / 2^32. Exact where noise is large, since v is small there.
__device__ __forceinline__ float gumbel(unsigned bits) {
    constexpr float BELOW_ONE = 0.99999994f;  // or the largest v would round to 1
    const float v = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
    return -logf(-log1pf(-(v < BELOW_ONE ? v : BELOW_ONE)));
}
