// The two products of prefill attention for a warp's 16 rows: queries * keys^T and weights * values.
//
// 16-bit types are multiplied on tensor cores; fp32, for which those are not exact, on the vector units.
// Both have the fragments of mma.m16n8k16 (ptx.cuh): lane l has rows l / 4 and l / 4 + 8, and of every 8
// columns 2 * (l % 4) and the next.

#pragma once

#include "tensor_cores.cuh"

/// scores = queries * keys^T, of the warp's rows from `first_row` on, 16 dimensions at a time.
template <class T, int ROWS, int KEYS, int HEAD_DIM>
__device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 8][4], const TileRows<T, ROWS, HEAD_DIM>& queries,
                                              const TileRows<T, KEYS, HEAD_DIM>& keys, int first_row, int lane) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
        unsigned a[4];
        ptx::load_matrices(a, &queries.rows[first_row + lane % 16][d + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            unsigned b[4];
            ptx::load_matrices(b, &keys.rows[n * 8 + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
            mma(T{}, scores[n], a, b[0], b[1]);
            mma(T{}, scores[n + 1], a, b[2], b[3]);
        }
    }
}

/// out += weights * values, 16 keys at a time. The weights lie as the first product left them, which is
/// how the second wants its left side.
template <class T, int KEYS, int HEAD_DIM>
__device__ __forceinline__ void multiply_values(float (&out)[HEAD_DIM / 8][4], const float (&weights)[KEYS / 8][4],
                                                const TileRows<T, KEYS, HEAD_DIM>& values, int lane) {
#pragma unroll
    for (int key = 0; key < KEYS; key += 16) {
        const float(&low)[4] = weights[key / 8];
        const float(&high)[4] = weights[key / 8 + 1];
        const unsigned a[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                               pack<T>(high[2], high[3])};
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            unsigned b[4];
            ptx::load_matrices_transposed(b, &values.rows[key + lane % 16][d + lane / 16 * 8]);
            mma(T{}, out[d / 8], a, b[0], b[1]);
            mma(T{}, out[d / 8 + 1], a, b[2], b[3]);
        }
    }
}

/// The first product in fp32.
template <int ROWS, int KEYS, int HEAD_DIM>
__device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 8][4], const TileRows<float, ROWS, HEAD_DIM>& queries,
                                              const TileRows<float, KEYS, HEAD_DIM>& keys, int first_row, int lane) {
    constexpr int SIZE = Vector<float>::SIZE;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    }
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += SIZE) {
        const Vector<float> query[2] = {load_vector(&queries.rows[first_row + lane / 4][d]),
                                        load_vector(&queries.rows[first_row + lane / 4 + 8][d])};
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Vector<float> key = load_vector(&keys.rows[n * 8 + lane % 4 * 2 + i][d]);
#pragma unroll
                for (int j = 0; j < SIZE; ++j) {
                    scores[n][i] += query[0].values[j] * key.values[j];
                    scores[n][2 + i] += query[1].values[j] * key.values[j];
                }
            }
        }
    }
}

/// The second product in fp32. A row's weights are spread over the four lanes that share it.
template <int KEYS, int HEAD_DIM>
__device__ __forceinline__ void multiply_values(float (&out)[HEAD_DIM / 8][4], const float (&weights)[KEYS / 8][4],
                                            const TileRows<float, KEYS, HEAD_DIM>& values, int lane) {
#pragma unroll
    for (int key = 0; key < KEYS; ++key) {
        const int owner = lane / 4 * 4 + key % 8 / 2;
        const float first = __shfl_sync(ALL_LANES, weights[key / 8][key % 2], owner);
        const float second = __shfl_sync(ALL_LANES, weights[key / 8][2 + key % 2], owner);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            const Pack<float, 2> value = load_pack<2>(&values.rows[key][n * 8 + lane % 4 * 2]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                out[n][i] += first * value.values[i];
                out[n][2 + i] += second * value.values[i];
            }
        }
    }
}
