// Block copies of a step plan: for each (source, destination) pair, one whole KV block of every layer.
//
// Runs before the forward pass of the step that lists the copies, on the same stream, so that a
// sequence that shares its last block with a sibling gets its own before it writes. Not here: which
// blocks to copy (the scheduler decides), and copies between host and device.
//
// Invariants: no destination appears twice in one launch, and none is a source of the same launch: the
// list's order matters where a destination was a source before (rare: its last holder was preempted in
// between), so a list is cut there into several launches on one stream. Blocks are whole multiples of
// 16 bytes.

/// One launch: grid (copies, layers * 2), any block size.
struct BlockCopyParams {
    unsigned char* const* caches;  // [layers * 2] device pointers: K of layer 0, V of layer 0, ...
    const int* copies;             // [num_copies, 2] source and destination block
    long long block_bytes;         // bytes of one block in one cache: kv_heads * block_size * dim * size
};

extern "C" __global__ void block_copy(const BlockCopyParams params) {
    const long long source = params.copies[2 * blockIdx.x];
    const long long destination = params.copies[2 * blockIdx.x + 1];
    unsigned char* const cache = params.caches[blockIdx.y];
    const int4* from = reinterpret_cast<const int4*>(cache + source * params.block_bytes);
    int4* to = reinterpret_cast<int4*>(cache + destination * params.block_bytes);
    const long long words = params.block_bytes / static_cast<long long>(sizeof(int4));
    for (long long word = threadIdx.x; word < words; word += blockDim.x) {
        to[word] = from[word];
    }
}
