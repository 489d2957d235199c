// Block copies of a step plan: for each pair of (source, destination), one whole KV block of every layer,
// from where it is to where it is wanted: on the device, or in memory of the host.
//
// Runs before the forward pass of the step that lists the copies, on the same stream, so that a
// sequence that shares its last block with a sibling gets its own before it writes, and one whose
// beginning was kept on the host finds it. The host's blocks are reached at their own addresses, over the
// bus, by the same loads and stores of 16 bytes: one launch moves all layers of any number of blocks.
// Not here: which blocks to copy (the scheduler decides).
//
// Invariants: no copy of a launch reads or writes what another writes. A plan's copies to the host may
// read what others write, so they are a launch of their own, before the others. Blocks are whole
// multiples of 16 bytes.

/// One launch: grid (copies, layers * 2), any block size.
struct BlockCopyParams {
    unsigned char* const* caches;    // [locations, layers * 2] the device's: K of layer 0, V of layer 0, ...; the host's
    const int* copies;               // [copies, 2] source and destination block
    const unsigned char* locations;  // [copies, 2] where each of them is: 0 the device, 1 the host
    long long block_bytes;           // bytes of one block in one cache: kv_heads * block_size * dim * size
};

/// A copy's source (end 0) or destination (end 1) in the cache of this block of the grid.
__device__ __forceinline__ int4* block_of(const BlockCopyParams& params, int end) {
    const int entry = 2 * static_cast<int>(blockIdx.x) + end;
    const unsigned cache = params.locations[entry] * gridDim.y + blockIdx.y;
    return reinterpret_cast<int4*>(params.caches[cache] + params.copies[entry] * params.block_bytes);
}

extern "C" __global__ void block_copy(const BlockCopyParams params) {
    const int4* const from = block_of(params, 0);
    int4* const to = block_of(params, 1);
    const long long words = params.block_bytes / static_cast<long long>(sizeof(int4));
    for (long long word = threadIdx.x; word < words; word += blockDim.x) {
        to[word] = from[word];
    }
}
