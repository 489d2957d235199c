// Root-mean-square norm (Zhang and Sennrich 2019) with the residual added on the way.
//
// out = norm(x + residual) * weight, and residual becomes the sum. The sum is rounded once to T before
// it is normed, so that the norm sees what the next layer will; arithmetic in fp32. One block a token.

#include "block.cuh"

/// One launch: grid (tokens), block THREADS.
struct RmsNormParams {
    const void* x;        // [tokens, width], of T
    void* residual;       // [tokens, width], of T, overwritten with the sum; or null: nothing is added
    const void* weight;   // [width], of T
    void* out;            // [tokens, width], of T; may be x
    int width;            // values of a token, a multiple of those in 16 bytes
    float eps;            // added to the mean of squares
};

namespace {

constexpr int THREADS = 256;

}  // namespace

template <class T>
__global__ void __launch_bounds__(THREADS) rms_norm(const RmsNormParams params) {
    constexpr int SIZE = Vector<T>::SIZE;
    const long long row = static_cast<long long>(blockIdx.x) * params.width;
    const T* const x = static_cast<const T*>(params.x) + row;
    T* const residual = params.residual == nullptr ? nullptr : static_cast<T*>(params.residual) + row;
    const T* const weight = static_cast<const T*>(params.weight);
    T* const out = static_cast<T*>(params.out) + row;

    float squares = 0.0f;
    for (int d = threadIdx.x * SIZE; d < params.width; d += THREADS * SIZE) {
        Vector<T> values = load_vector(x + d);
        if (residual != nullptr) {
            const Vector<T> added = load_vector(residual + d);
            for (int i = 0; i < SIZE; ++i) {
                values.values[i] = from_float<T>(to_float(values.values[i]) + to_float(added.values[i]));
            }
            store_vector(residual + d, values);
        }
        for (int i = 0; i < SIZE; ++i) {
            const float value = to_float(values.values[i]);
            squares += value * value;
        }
    }
    const float factor = rsqrtf(block_sum<THREADS>(squares) / static_cast<float>(params.width) + params.eps);
    // Each thread reads back what it wrote itself.
    const T* const sums = residual == nullptr ? x : residual;
    for (int d = threadIdx.x * SIZE; d < params.width; d += THREADS * SIZE) {
        Vector<T> values = load_vector(sums + d);
        const Vector<T> weights = load_vector(weight + d);
        for (int i = 0; i < SIZE; ++i) {
            values.values[i] =
                from_float<T>(to_float(values.values[i]) * factor * to_float(weights.values[i]));
        }
        store_vector(out + d, values);
    }
}

// Instantiations: rms_norm<T> for T in float, Half, BFloat16.
