// Memory of the emulated device: every buffer stands between two regions that nobody may touch.
//
// A buffer either ends where a forbidden region begins or begins where one ends; launches under several
// schedules use both, so an access one element beyond either end faults at once. What a fault hit is
// told by the buffer's number. New memory is filled with 0xff bytes: not-a-number in every float type,
// -1 as an integer.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace emulator {

/// Which end of a buffer stands exactly at a forbidden region.
enum class Placement { Begin, End };

struct Buffer {
    std::string name;
    char* mapping;       // the whole of it, forbidden regions included
    size_t mapped_bytes;
    char* data;
    size_t bytes;
};

constexpr size_t GUARD_BYTES = size_t{1} << 20;

inline size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

/// Vectors are 16 bytes; what is not a multiple of that is aligned as far as its size allows.
inline size_t alignment_of(size_t bytes) {
    const size_t lowest_bit = bytes & (~bytes + 1);
    return bytes == 0 || lowest_bit > 16 ? 16 : lowest_bit;
}

/// Maps a buffer between two forbidden regions. Its pages take memory only once touched.
inline Buffer map_buffer(const std::string& name, size_t bytes, Placement placement) {
    const size_t page = page_bytes();
    const size_t usable = (bytes + page - 1) / page * page;
    const size_t mapped = usable + 2 * GUARD_BYTES;
    void* mapping = mmap(nullptr, mapped, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return {name, nullptr, 0, nullptr, 0};
    char* const first = static_cast<char*>(mapping) + GUARD_BYTES;
    if (usable != 0) mprotect(first, usable, PROT_READ | PROT_WRITE);
    const size_t shift = placement == Placement::End ? usable - bytes : 0;
    char* data = first + shift;
    data -= reinterpret_cast<size_t>(data) % alignment_of(bytes);
    return {name, static_cast<char*>(mapping), mapped, data, bytes};
}

inline void unmap_buffer(const Buffer& buffer) {
    if (buffer.mapping != nullptr) munmap(buffer.mapping, buffer.mapped_bytes);
}

/// All buffers that a kernel may touch: what was allocated for it, and its shared memory.
inline std::vector<Buffer> buffers;

/// Says which buffer an address belongs to, for the report of a fault.
inline std::string describe_address(const void* address) {
    const char* const at = static_cast<const char*>(address);
    for (const Buffer& buffer : buffers) {
        if (at < buffer.mapping || at >= buffer.mapping + buffer.mapped_bytes) continue;
        char text[200];
        if (at < buffer.data) {
            snprintf(text, sizeof text, "%zu bytes before the beginning of %s (%zu bytes)",
                     static_cast<size_t>(buffer.data - at), buffer.name.c_str(), buffer.bytes);
        } else {
            snprintf(text, sizeof text, "%zu bytes after the beginning of %s (%zu bytes)",
                     static_cast<size_t>(at - buffer.data), buffer.name.c_str(), buffer.bytes);
        }
        return text;
    }
    return "an address outside of every buffer";
}

}  // namespace emulator
