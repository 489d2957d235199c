// Runs CUDA kernels on the CPU, for tests: what a translation unit includes before a `.cu` file.
//
// A kernel takes one parameter struct by value. Blocks run one after the other, in the order of the
// schedule too; a launch ends with a message when a thread touches what is not its buffers' (guarded
// memory), indexes beyond an array or through a misaligned pointer (traps that g++ puts in), waits where
// others do not (divergence), loads matrices that its warp has not waited for, or leaves a copy in flight. Not emulated: the memory model (a missing
// __threadfence shows nothing), several blocks at once, limits of registers, and time.

#pragma once

#define CHAIRLIFT_EMULATOR 1

#include <signal.h>

#include "builtins.h"

namespace emulator {

/// One launch, as the Python side fills it in.
struct Launch {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    unsigned order;      // emulator::Order
    unsigned placement;  // emulator::Placement of the shared memory
    unsigned long long seed;
};

struct Kernel {
    void (*body)(const void* params);
    unsigned long long params_bytes;
};

template <auto Function>
struct Signature;
template <class Params, void (*Function)(Params)>
struct Signature<Function> {
    static void body(const void* params) { Function(*static_cast<const Params*>(params)); }
    static constexpr Kernel kernel{body, sizeof(Params)};
};

inline const Kernel* launched;
inline const void* launched_params;
inline void run_body() { launched->body(launched_params); }

inline void on_fault(int signal, siginfo_t* info, void*) {
    const unsigned t = current;
    if (signal == SIGSEGV || signal == SIGBUS) {
        snprintf(failure, sizeof failure, "block (%u, %u, %u), thread %u: access out of bounds: %s",
                 blockIdx.x, blockIdx.y, blockIdx.z, t, describe_address(info->si_addr).c_str());
    } else {
        snprintf(failure, sizeof failure,
                 "block (%u, %u, %u), thread %u: index beyond an array, misaligned pointer or integer "
                 "overflow",
                 blockIdx.x, blockIdx.y, blockIdx.z, t);
    }
    siglongjmp(launcher, 2);
}

/// Signal handlers for the time of a launch; what was there before comes back.
class FaultHandlers {
public:
    FaultHandlers() {
        static char stack[64 << 10];
        stack_t alternative{};
        alternative.ss_sp = stack;
        alternative.ss_size = sizeof stack;
        sigaltstack(&alternative, &old_stack_);
        struct sigaction action {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, &old_actions_[i]);
    }
    ~FaultHandlers() {
        for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &old_actions_[i], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }
    FaultHandlers(const FaultHandlers&) = delete;
    FaultHandlers& operator=(const FaultHandlers&) = delete;

private:
    static constexpr int COUNT = 5;
    static constexpr int SIGNALS[COUNT] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
    stack_t old_stack_;
    struct sigaction old_actions_[COUNT];
};

/// Runs one block; false if it failed.
inline bool run_block(unsigned shared_bytes) {
    std::memset(dynamic_shared, 0xff, shared_bytes);
    take_images();
    num_ended = num_at_barrier = 0;
    for (unsigned i = 0; i < num_threads; ++i) {
        threads[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y,
                            i / (blockDim.x * blockDim.y)};
        threads[i].copies.clear();
        threads[i].copy_groups = 0;
        set_state(i, State::Runnable);
    }
    const int outcome = sigsetjmp(launcher, 1);
    if (outcome == 0) resume(pick());
    if (outcome == 1) return true;
    for (Thread& thread : threads) thread.created = false;
    for (unsigned& lanes : runnable) lanes = 0;
    return false;
}

/// Runs the grid. The blocks come in the order of the schedule as well.
inline bool run_grid(const Launch& launch) {
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    blockDim = {launch.block[0], launch.block[1], launch.block[2]};
    num_threads = blockDim.x * blockDim.y * blockDim.z;
    order = static_cast<Order>(launch.order);
    random_state = launch.seed * 2654435761u + 88172645463325252ull;
    std::vector<unsigned> blocks(size_t{gridDim.x} * gridDim.y * gridDim.z);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<unsigned>(i);
    if (order == Order::Reverse) std::reverse(blocks.begin(), blocks.end());
    if (order == Order::Random) {
        for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[draw() % i]);
    }
    for (const unsigned block : blocks) {
        blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y,
                    block / (gridDim.x * gridDim.y)};
        if (!run_block(launch.shared_bytes)) return false;
    }
    return true;
}

/// Runs a kernel; returns null, or what went wrong.
inline const char* launch_kernel(const Kernel& kernel, const Launch& launch, const void* params,
                                 unsigned long long params_bytes) {
    if (params_bytes != kernel.params_bytes) {
        snprintf(failure, sizeof failure, "the kernel takes %llu bytes of parameters, not %llu",
                 kernel.params_bytes, params_bytes);
        return failure;
    }
    const unsigned long long in_block =
        1ull * launch.block[0] * launch.block[1] * launch.block[2];
    if (in_block == 0 || in_block > MAX_THREADS || launch.grid[1] > 65535 || launch.grid[2] > 65535) {
        snprintf(failure, sizeof failure, "no device runs %llu threads in a grid of y %u and z %u",
                 in_block, launch.grid[1], launch.grid[2]);
        return failure;
    }
    launched = &kernel;
    launched_params = params;
    kernel_body = run_body;
    const Buffer shared =
        map_buffer("shared memory", launch.shared_bytes, static_cast<Placement>(launch.placement));
    buffers.push_back(shared);
    dynamic_shared = shared.data;
    dynamic_shared_bytes = shared.bytes;
    shared_images.resize((in_block + 31) / 32 * shared.bytes);
    bool passed;
    {
        const FaultHandlers handlers;
        passed = run_grid(launch);
    }
    buffers.pop_back();
    unmap_buffer(shared);
    return passed ? nullptr : failure;
}

}  // namespace emulator

extern "C" {

/// Guarded device memory, filled with 0xff unless it is to stay untouched; null if there is none.
inline __attribute__((used)) void* emulator_allocate(const char* name, unsigned long long bytes,
                                                     unsigned placement, int fill) {
    using namespace emulator;
    const Buffer buffer = map_buffer(name, bytes, static_cast<Placement>(placement));
    if (buffer.mapping == nullptr) return nullptr;
    if (fill) std::memset(buffer.data, 0xff, bytes);
    buffers.push_back(buffer);
    return buffer.data;
}

/// Gives all device memory back.
inline __attribute__((used)) void emulator_free_all() {
    for (const emulator::Buffer& buffer : emulator::buffers) emulator::unmap_buffer(buffer);
    emulator::buffers.clear();
}
}

/// Exports the kernels of a translation unit under their numbers.
#define EMULATED_KERNELS(...)                                                                      \
    static const emulator::Kernel emulated_kernels[] = {__VA_ARGS__};                              \
    extern "C" const char* emulator_launch(unsigned kernel, const emulator::Launch* launch,        \
                                           const void* params, unsigned long long params_bytes) {  \
        return emulator::launch_kernel(emulated_kernels[kernel], *launch, params, params_bytes);   \
    }
#define EMULATED_KERNEL(...) emulator::Signature<__VA_ARGS__>::kernel
