// The gate of a SwiGLU layer (Shazeer 2020): out = silu(gate) * up, of a fused projection.
//
// Arithmetic in fp32, rounded once. One thread makes 16 bytes of the output.

#include "device.cuh"

/// One launch: grid (tokens, ceil(width / (THREADS * values in 16 bytes))), block THREADS.
struct SiluMulParams {
    const void* x;  // [tokens, 2 * width], of T: gate, then up
    void* out;      // [tokens, width], of T
    int width;      // a multiple of the values in 16 bytes
};

namespace {

constexpr int THREADS = 256;

}  // namespace

template <class T>
__global__ void __launch_bounds__(THREADS) silu_mul(const SiluMulParams params) {
    constexpr int SIZE = Vector<T>::SIZE;
    const long long token = blockIdx.x;
    const int d = (blockIdx.y * THREADS + threadIdx.x) * SIZE;
    if (d >= params.width) return;
    const T* const row = static_cast<const T*>(params.x) + token * 2 * params.width;
    const Vector<T> gate = load_vector(row + d);
    const Vector<T> up = load_vector(row + params.width + d);
    Vector<T> product;
    for (int i = 0; i < SIZE; ++i) {
        const float value = to_float(gate.values[i]);
        const float silu = value / (1.0f + __expf(-value));
        product.values[i] = from_float<T>(silu * to_float(up.values[i]));
    }
    store_vector(static_cast<T*>(params.out) + token * params.width + d, product);
}

// Instantiations: silu_mul<T> for T in float, Half, BFloat16.
