// What a warp may rely on of the block's dynamic shared memory: its contents when all lanes last waited for
// one another (__syncwarp) or for the block (__syncthreads).
//
// A warp operation runs when all its lanes have come, so what they wrote before it is there, here as on
// most devices; but only a wait makes what one lane has written another's to read. So load_matrices, which
// reads for all lanes, fails on a row that has changed since. Bytes that were written and are the same
// as before do not show.

#pragma once

#include "threads.h"

namespace emulator {

inline size_t dynamic_shared_bytes;
inline std::vector<char> shared_images;  // one of all the memory for each warp

inline char* shared_image(unsigned warp) { return shared_images.data() + warp * dynamic_shared_bytes; }

/// Makes what a warp sees now what it may rely on.
inline void take_image(unsigned warp) {
    if (dynamic_shared_bytes > 0) std::memcpy(shared_image(warp), dynamic_shared, dynamic_shared_bytes);
}

inline void take_images() {
    for (unsigned warp = 0; warp * 32 < num_threads; ++warp) take_image(warp);
}

/// Completes a __syncwarp; one of some lanes alone says nothing about the others.
inline void wait_for_warp(Thread* warp, unsigned mask) {
    if (mask == 0xffffffffu) take_image(static_cast<unsigned>(warp - threads) / 32);
}

/// Fails unless 16 bytes are shared memory as it was when the thread's warp last waited.
inline void check_row(const Thread& thread, const void* row) {
    const unsigned index = static_cast<unsigned>(&thread - threads);
    const size_t offset = static_cast<size_t>(static_cast<const char*>(row) - dynamic_shared);
    if (offset >= dynamic_shared_bytes || dynamic_shared_bytes - offset < 16) {
        fail("load_matrices at line %d: the row of thread %u is not in dynamic shared memory", thread.line, index);
    }
    if (std::memcmp(row, shared_image(index / 32) + offset, 16) != 0) {
        fail("load_matrices at line %d: the row of thread %u was written after the last wait of its warp",
             thread.line, index);
    }
}

}  // namespace emulator
