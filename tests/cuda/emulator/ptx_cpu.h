// The CPU twin of cuda/ptx.cuh: the same functions, doing what the PTX ISA says of the instructions.
//
// An asynchronous copy overwrites its destination with 0xff bytes when it starts and delivers its data
// only when its own thread waits, so whoever reads too early computes with garbage.

#pragma once

#include "builtins.h"

namespace ptx {

inline float half_to_float(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16;
    const unsigned magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // 2^112 moves the exponent's bias from 15 to 127, and makes subnormal numbers normal.
    const float value = __uint_as_float(magnitude << 13) * 0x1p112f;
    return __uint_as_float(sign | __float_as_uint(value));
}

inline unsigned short float_to_half(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned sign = bits >> 16 & 0x8000u;
    const unsigned magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Subnormal: adding 0.5 leaves multiples of 2^-24 in the lowest bits, rounded by the addition.
        const float shifted = __uint_as_float(magnitude) + 0.5f;
        return static_cast<unsigned short>(sign | (__float_as_uint(shifted) - 0x3f000000u));
    }
    const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<unsigned short>(sign | (rounded - 0x38000000u) >> 13);
}

inline unsigned short float_to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline unsigned e4m3_to_halves(unsigned short two) {
    unsigned halves = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned bits = two >> 8 * i & 0xffu;
        const int exponent = bits >> 3 & 0xf;
        const float mantissa = static_cast<float>(bits & 7u);
        float value = exponent == 0 ? mantissa * 0x1p-9f : std::ldexp(8.0f + mantissa, exponent - 10);
        if ((bits & 0x7fu) == 0x7fu) value = __uint_as_float(0x7fffffffu);
        if (bits >> 7) value = -value;
        halves |= static_cast<unsigned>(float_to_half(value)) << 16 * i;
    }
    return halves;
}

inline unsigned multiply_halves(unsigned a, unsigned b) {
    const auto product = [=](int shift) -> unsigned {
        const float left = half_to_float(static_cast<unsigned short>(a >> shift));
        return float_to_half(left * half_to_float(static_cast<unsigned short>(b >> shift)));
    };
    return product(0) | product(16) << 16;
}

inline void copy_async_16(void* shared, const void* global, int bytes) {
    using namespace emulator;
    Thread& self = threads[current];
    const auto misaligned = [](const void* at) { return reinterpret_cast<size_t>(at) % 16 != 0; };
    if (bytes < 0 || bytes > 16 || misaligned(shared) || misaligned(global)) {
        fail("asynchronous copy of %d bytes from %p to %p: not within 16, or misaligned", bytes, global,
             shared);
    }
    std::memset(shared, 0xff, 16);
    self.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global),
                           static_cast<unsigned>(bytes), 16u - static_cast<unsigned>(bytes), -1});
}

inline void commit_copies() {
    emulator::Thread& self = emulator::threads[emulator::current];
    for (emulator::AsyncCopy& copy : self.copies) {
        if (copy.group < 0) copy.group = self.copy_groups;
    }
    ++self.copy_groups;
}

template <int Left>
void wait_for_copies() {
    emulator::Thread& self = emulator::threads[emulator::current];
    while (!self.copies.empty()) {
        const emulator::AsyncCopy& copy = self.copies.front();
        if (copy.group < 0 || copy.group >= self.copy_groups - Left) break;
        std::memcpy(copy.to, copy.from, copy.bytes);
        std::memset(copy.to + copy.bytes, 0, copy.zero_bytes);
        self.copies.pop_front();
    }
}

/// Inputs and outputs of a lane in load_matrices.
template <bool Transposed>
void load_matrices_of_warp(emulator::Thread* warp, unsigned) {
    const auto element = [&](unsigned matrix, unsigned row, unsigned column) -> unsigned {
        const void* const address = *static_cast<const void* const*>(warp[matrix * 8 + row].in);
        return static_cast<const unsigned short*>(address)[column];
    };
    for (unsigned lane = 0; lane < 32; ++lane) {
        emulator::check_row(warp[lane], *static_cast<const void* const*>(warp[lane].in));
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        unsigned* const to = static_cast<unsigned*>(warp[lane].out);
        const unsigned group = lane / 4;
        const unsigned pair = lane % 4 * 2;
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            const unsigned low =
                Transposed ? element(matrix, pair, group) : element(matrix, group, pair);
            const unsigned high =
                Transposed ? element(matrix, pair + 1, group) : element(matrix, group, pair + 1);
            to[matrix] = low | high << 16;
        }
    }
}

inline void load_matrices(unsigned (&to)[4], const void* shared, int line = __builtin_LINE()) {
    emulator::warp_operation(load_matrices_of_warp<false>, 0xffffffffu, &shared, to, line);
}

inline void load_matrices_transposed(unsigned (&to)[4], const void* shared,
                                     int line = __builtin_LINE()) {
    emulator::warp_operation(load_matrices_of_warp<true>, 0xffffffffu, &shared, to, line);
}

inline void transpose_matrix_of_warp(emulator::Thread* warp, unsigned) {
    const auto element = [&](unsigned row, unsigned column) -> unsigned {
        const unsigned pair = *static_cast<const unsigned*>(warp[row * 4 + column / 2].in);
        return pair >> 16 * (column % 2) & 0xffffu;
    };
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned row = lane / 4;
        const unsigned column = lane % 4 * 2;
        *static_cast<unsigned*>(warp[lane].out) = element(column, row) | element(column + 1, row) << 16;
    }
}

inline unsigned transpose_matrix(unsigned pair, int line = __builtin_LINE()) {
    unsigned transposed;
    emulator::warp_operation(transpose_matrix_of_warp, 0xffffffffu, &pair, &transposed, line);
    return transposed;
}

/// What a lane brings to an mma: its fragments of A and B. C is its output.
struct MmaOperands {
    unsigned a[4];
    unsigned b[2];
};

using ToFloat = float (*)(unsigned short);

/// m16n8k16 with the fragments that cuda/ptx.cuh describes. Sums in fp32, in order of depth.
template <ToFloat Convert>
void mma_of_warp(emulator::Thread* warp, unsigned) {
    float a[16][16];
    float b[16][8];
    for (unsigned lane = 0; lane < 32; ++lane) {
        const MmaOperands& in = *static_cast<const MmaOperands*>(warp[lane].in);
        const unsigned group = lane / 4;
        const unsigned pair = lane % 4 * 2;
        for (unsigned half = 0; half < 2; ++half) {
            const auto value = [&](unsigned bits) {
                return Convert(static_cast<unsigned short>(bits >> 16 * half));
            };
            a[group][pair + half] = value(in.a[0]);
            a[group + 8][pair + half] = value(in.a[1]);
            a[group][pair + 8 + half] = value(in.a[2]);
            a[group + 8][pair + 8 + half] = value(in.a[3]);
            b[pair + half][group] = value(in.b[0]);
            b[pair + 8 + half][group] = value(in.b[1]);
        }
    }
    float product[16][8] = {};
    for (unsigned row = 0; row < 16; ++row) {
        for (unsigned depth = 0; depth < 16; ++depth) {
            for (unsigned column = 0; column < 8; ++column) {
                product[row][column] += a[row][depth] * b[depth][column];
            }
        }
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        float* const c = static_cast<float*>(warp[lane].out);
        for (unsigned i = 0; i < 4; ++i) c[i] += product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

inline float bfloat16_to_float(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

inline void mma_half(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                     int line = __builtin_LINE()) {
    const MmaOperands in{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::warp_operation(mma_of_warp<half_to_float>, 0xffffffffu, &in, c, line);
}

inline void mma_bfloat16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                         int line = __builtin_LINE()) {
    const MmaOperands in{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::warp_operation(mma_of_warp<bfloat16_to_float>, 0xffffffffu, &in, c, line);
}

}  // namespace ptx
