// The threads of one emulated block: fibers that run one at a time and stop only where CUDA says that
// threads wait for one another (block barriers, and warp operations with their mask).
//
// In which order they run is a schedule: by number, backwards, or drawn from a seed. A kernel that
// relies on an order that nothing guarantees gives different results under different schedules. Between
// two waits a fiber runs undisturbed, so races inside of such a stretch show only through its order.
//
// Contexts are made by ucontext and switched by _setjmp and _longjmp, which take no system call.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdint>
#include <deque>

#include "memory.h"

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// Not static: they are seen from outside, so calls that switch fibers are known to change them.
inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;
constexpr int warpSize = 32;

namespace emulator {

enum class Order { Forward, Reverse, Random };
enum class State : unsigned char { Runnable, AtBarrier, InWarp, Ended };

struct Thread;
/// Completes a warp operation for the lanes of `mask`, all of which have arrived.
using WarpOperation = void (*)(Thread* warp, unsigned mask);

/// A copy that was started and has not been waited for. Group -1: not committed yet.
struct AsyncCopy {
    char* to;
    const char* from;
    unsigned bytes;       // to be copied
    unsigned zero_bytes;  // to be cleared after them
    long group;
};

struct Thread {
    jmp_buf context;
    uint3 index;
    bool created = false;
    State state = State::Runnable;
    int line = 0;  // where it waits
    unsigned mask = 0;
    WarpOperation operation = nullptr;
    const void* in = nullptr;
    void* out = nullptr;
    std::deque<AsyncCopy> copies;
    long copy_groups = 0;
};

constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = size_t{128} << 10;

inline Thread threads[MAX_THREADS];
inline unsigned num_threads;
inline unsigned current;
inline unsigned runnable[MAX_THREADS / 32];  // a bit for each lane of each warp
inline unsigned num_ended;
inline unsigned num_at_barrier;

inline Order order;
inline uint64_t random_state;
inline sigjmp_buf launcher;
inline char failure[500];
inline void (*kernel_body)();
inline char* dynamic_shared;

inline uint64_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/// Ends the launch with a message; the fibers are left where they stand.
[[noreturn]] inline void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure, sizeof failure, format, arguments);
    va_end(arguments);
    siglongjmp(launcher, 2);
}

inline void set_state(unsigned index, State state) {
    threads[index].state = state;
    const unsigned bit = 1u << index % 32;
    if (state == State::Runnable) {
        runnable[index / 32] |= bit;
    } else {
        runnable[index / 32] &= ~bit;
    }
}

/// The next thread to run, or num_threads if none can.
inline unsigned pick() {
    const unsigned warps = (num_threads + 31) / 32;
    const uint64_t chance = order == Order::Random ? draw() : 0;
    for (unsigned i = 0; i < warps; ++i) {
        unsigned warp = i;
        if (order == Order::Reverse) warp = warps - 1 - i;
        if (order == Order::Random) warp = (i + static_cast<unsigned>(chance >> 32)) % warps;
        const unsigned lanes = runnable[warp];
        if (lanes == 0) continue;
        if (order == Order::Reverse) return warp * 32 + 31 - __builtin_clz(lanes);
        if (order == Order::Forward) return warp * 32 + __builtin_ctz(lanes);
        const unsigned turn = chance % 32;
        const unsigned turned = turn == 0 ? lanes : lanes >> turn | lanes << (32 - turn);
        return warp * 32 + (__builtin_ctz(turned) + turn) % 32;
    }
    return num_threads;
}

/// Nobody can run and not everybody has ended: says who waits where.
[[noreturn]] inline void fail_divergent() {
    for (unsigned i = 0; i < num_threads; ++i) {
        const Thread& thread = threads[i];
        if (thread.state == State::AtBarrier) {
            for (unsigned j = 0; j < num_threads; ++j) {
                const Thread& other = threads[j];
                if (other.state == State::AtBarrier) continue;
                if (other.state == State::Ended) {
                    fail("divergent barrier: thread %u waits at line %d, thread %u has ended", i,
                         thread.line, j);
                }
                fail("divergent barrier: thread %u waits at line %d, thread %u at line %d for its warp",
                     i, thread.line, j, other.line);
            }
        }
    }
    for (unsigned i = 0; i < num_threads; ++i) {
        if (threads[i].state == State::InWarp) {
            fail("divergent warp operation: thread %u waits at line %d for lanes %08x of its warp, "
                 "which never come",
                 i, threads[i].line, threads[i].mask);
        }
    }
    fail("no thread can run");
}

inline void fiber_main();

inline char* stack_of(unsigned index) {
    static char* stacks = nullptr;
    if (stacks == nullptr) {
        void* memory = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        stacks = static_cast<char*>(memory);
        for (unsigned i = 0; i < MAX_THREADS; ++i) {
            mprotect(stacks + i * STACK_BYTES, page_bytes(), PROT_NONE);
        }
    }
    return stacks + index * STACK_BYTES;
}

/// Goes on with a thread where it stopped, or starts it.
[[noreturn]] inline void resume(unsigned index) {
    current = index;
    threadIdx = threads[index].index;
    if (threads[index].created) _longjmp(threads[index].context, 1);
    threads[index].created = true;
    ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = stack_of(index);
    fresh.uc_stack.ss_size = STACK_BYTES;
    fresh.uc_link = nullptr;
    makecontext(&fresh, fiber_main, 0);
    setcontext(&fresh);
    __builtin_unreachable();
}

/// Lets others run until somebody resumes the current thread.
__attribute__((noinline)) inline void switch_away() {
    if (num_ended == num_threads) {
        if (_setjmp(threads[current].context) == 0) siglongjmp(launcher, 1);
        return;  // resumed for the next block
    }
    const unsigned next = pick();
    if (next == num_threads) fail_divergent();
    if (next == current) return;
    if (_setjmp(threads[current].context) == 0) resume(next);
}

/// A fiber serves one thread of each block in turn.
inline void fiber_main() {
    for (;;) {
        kernel_body();
        Thread& self = threads[current];
        if (!self.copies.empty()) {
            fail("thread %u ends with asynchronous copies that nobody waited for", current);
        }
        set_state(current, State::Ended);
        ++num_ended;
        switch_away();
    }
}

/// Block barrier: everybody must come, and to the same one; the last to come completes it.
inline void barrier(int line, void (*complete)()) {
    threads[current].line = line;
    set_state(current, State::AtBarrier);
    if (++num_at_barrier < num_threads) {
        switch_away();
        return;
    }
    num_at_barrier = 0;
    complete();
    for (unsigned i = 0; i < num_threads; ++i) {
        if (threads[i].line != line) {
            fail("divergent barrier: thread %u waits at line %d, thread %u at line %d", i,
                 threads[i].line, current, line);
        }
        set_state(i, State::Runnable);
    }
}

/// Warp operation: the last lane of the mask to come completes it for all.
inline void warp_operation(WarpOperation operation, unsigned mask, const void* in, void* out,
                           int line) {
    Thread& self = threads[current];
    const unsigned base = current / 32 * 32;
    if ((mask >> current % 32 & 1) == 0) {
        fail("thread %u is not in the mask %08x of its warp operation at line %d", current, mask, line);
    }
    self.line = line;
    self.mask = mask;
    self.operation = operation;
    self.in = in;
    self.out = out;
    set_state(current, State::InWarp);
    for (unsigned lane = 0; lane < 32; ++lane) {
        if ((mask >> lane & 1) == 0) continue;
        const unsigned index = base + lane;
        if (index >= num_threads) fail("line %d: lane %u of the mask is no thread", line, lane);
        const Thread& other = threads[index];
        if (other.state != State::InWarp) {
            switch_away();
            return;
        }
        if (other.operation != operation || other.mask != mask) {
            fail("divergent warp operation: thread %u at line %d with mask %08x, thread %u at line %d "
                 "with mask %08x",
                 current, line, mask, index, other.line, other.mask);
        }
    }
    operation(threads + base, mask);
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (mask >> lane & 1) set_state(base + lane, State::Runnable);
    }
}

}  // namespace emulator
