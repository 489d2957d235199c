// Every instruction that our kernels write as inline PTX, as functions. Nothing else in cuda/ has asm.
//
// The tests run the kernels on the CPU, where `ptx_cpu.h` beside the emulator takes this file's place
// with functions of the same names that do what the PTX ISA says. So these wrappers are the one part
// of the kernels that only a GPU proves. PTX ISA: docs.nvidia.com/cuda/parallel-thread-execution.
//
// Fragments of mma.m16n8k16 (lane l, group g = l / 4, pair t = l % 4), two 16-bit values a register,
// the lower column or row in the lower half:
//   a[0]: A[g][2t, 2t+1]  a[1]: A[g+8][2t, 2t+1]  a[2]: A[g][2t+8, 2t+9]  a[3]: A[g+8][2t+8, 2t+9]
//   b[0]: B[2t, 2t+1][g]  b[1]: B[2t+8, 2t+9][g]
//   c[0, 1]: C[g][2t, 2t+1]  c[2, 3]: C[g+8][2t, 2t+1]

#pragma once

#ifdef CHAIRLIFT_EMULATOR
#include "ptx_cpu.h"
#else

namespace ptx {

/// fp16 bits to float.
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

/// Float to fp16 bits, to nearest even.
__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

/// Float to bf16 bits, to nearest even.
__device__ __forceinline__ unsigned short float_to_bfloat16(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

/// Two e4m3 numbers, the first in the lower byte, to two fp16 numbers, exactly. From sm_89 on.
__device__ __forceinline__ unsigned e4m3_to_halves(unsigned short two) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    return halves;
}

/// Products of two pairs of fp16 numbers, to nearest even.
__device__ __forceinline__ unsigned multiply_halves(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/// Starts copying 16 bytes from global to shared memory; the last `16 - bytes` of them become zero
/// and their source is not read. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
}

/// Closes a group of the copies that this thread started.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all but the latest `Left` groups of this thread are there.
template <int Left>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

/// Four 8x8 matrices of 16-bit values from shared memory: lane l gives the address of row l % 8 of
/// matrix l / 8 and gets of each matrix row l / 4, columns 2 * (l % 4) and the next.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* shared) {
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

/// The same, each matrix transposed on the way: lane l gets rows 2 * (l % 4) and the next, column l / 4.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], const void* shared) {
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

/// An 8x8 matrix of 16-bit values, transposed: lane l gives and gets row l / 4, columns 2 * (l % 4) and
/// the next.
__device__ __forceinline__ unsigned transpose_matrix(unsigned pair) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

/// c += a * b on 16x8 tiles with depth 16, fp16.
__device__ __forceinline__ void mma_half(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// c += a * b on 16x8 tiles with depth 16, bf16.
__device__ __forceinline__ void mma_bfloat16(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx

#endif
