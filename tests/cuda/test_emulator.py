"""The emulator runs correct kernels as CUDA would, and catches each kind of broken one."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulated_device import (
    SCHEDULES,
    EmulatedDevice,
    EmulatorError,
    KernelLibrary,
    on_every_schedule,
)

PRELUDE = """
#include "fp8.cuh"
struct Params { const int* in; int* out; int n; };
"""


class Params(ctypes.Structure):
    _fields_ = (("in_", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int))


class Kernels:
    """Bodies of kernels, compiled all at once: most of a compilation is headers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._library: KernelLibrary | None = None

    def add(self, body: str) -> str:
        self._numbers.setdefault(body, len(self._numbers))
        return body

    def library(self) -> KernelLibrary:
        if self._library is None:
            text = PRELUDE + "".join(
                f"\n__global__ void kernel_{number}([[maybe_unused]] const Params params) "
                f"{{ {body} }}"
                for body, number in self._numbers.items()
            )
            names = [f"kernel_{number}" for number in self._numbers.values()]
            self._library = KernelLibrary(text, names)
        return self._library

    def name(self, body: str) -> str:
        return f"kernel_{self._numbers[body]}"


KERNELS = Kernels()


def run_kernel(body, *, n=128, threads=128, blocks=1, shared_bytes=0, values=None, outputs=None):
    """Run ``body`` on ``n`` numbers under every schedule; returns ``out``."""
    numbers = torch.arange(n, dtype=torch.int32) if values is None else values
    out = torch.full((outputs or n,), -1, dtype=numbers.dtype)

    def run(device: EmulatedDevice):
        out_address = device.upload("out", out)
        params = Params(device.upload("in", numbers), out_address, n)
        device.launch(KERNELS.name(body), (blocks, 1, 1), threads, params, shared_bytes)
        return {"out": device.download(out_address, out)}

    return on_every_schedule(KERNELS.library(), run)["out"]


REVERSE = """
    __shared__ int tile[128];
    const int t = threadIdx.x;
    tile[t] = params.in[t];
    {barrier}
    params.out[t] = tile[127 - t];
"""
REVERSED_WITH = {
    barrier: KERNELS.add(REVERSE.replace("{barrier}", barrier))
    for barrier in ("__syncthreads();", "__syncwarp();", "")
}


def test_a_barrier_makes_shared_memory_visible():
    out = run_kernel(REVERSED_WITH["__syncthreads();"])
    assert out.tolist() == list(range(127, -1, -1))


def test_a_missing_barrier_is_caught():
    with pytest.raises(EmulatorError, match="out depends on the schedule"):
        run_kernel(REVERSED_WITH[""])


def test_a_warp_barrier_is_no_block_barrier():
    with pytest.raises(EmulatorError, match="out depends on the schedule"):
        run_kernel(REVERSED_WITH["__syncwarp();"])


ROUNDS = """
    __shared__ int tile[128];
    const int t = threadIdx.x;
    int sum = 0;
    for (int round = 0; round < 3; ++round) {
        tile[t] = params.in[t] + 1000 * round;
        __syncthreads();
        sum += tile[127 - t];
        {barrier}
    }
    params.out[t] = sum;
"""
ROUNDS_WITH = {
    barrier: KERNELS.add(ROUNDS.replace("{barrier}", barrier))
    for barrier in ("__syncthreads();", "")
}


def test_a_missing_barrier_before_shared_memory_is_used_again_is_caught():
    good = run_kernel(ROUNDS_WITH["__syncthreads();"])
    assert good.tolist() == [3 * (127 - t) + 3000 for t in range(128)]
    with pytest.raises(EmulatorError, match="out depends on the schedule"):
        run_kernel(ROUNDS_WITH[""])


NEIGHBOURS = """
    __shared__ int tile[32];
    const int t = threadIdx.x;
    tile[t] = params.in[t];
    {sync}
    params.out[t] = tile[t ^ 1];
"""
NEIGHBOURS_WITH = {
    sync: KERNELS.add(NEIGHBOURS.replace("{sync}", sync)) for sync in ("__syncwarp();", "")
}


def test_reliance_on_lockstep_within_a_warp_is_caught():
    good = run_kernel(NEIGHBOURS_WITH["__syncwarp();"], n=32, threads=32)
    assert good.tolist() == [t ^ 1 for t in range(32)]
    with pytest.raises(EmulatorError, match="depends on the schedule"):
        run_kernel(NEIGHBOURS_WITH[""], n=32, threads=32)


ASYNC = """
    DYNAMIC_SHARED(shared);
    int* const tile = reinterpret_cast<int*>(shared);
    const int t = threadIdx.x;
    for (int half = 0; half < 2; ++half) {{
        ptx::copy_async_16(tile + 512 * half + 4 * t, params.in + 512 * half + 4 * t, 16);
        ptx::commit_copies();
    }}
    {first}
    int sum = tile[511 - t];
    {second}
    params.out[t] = sum + 1000 * tile[1023 - t];
    ptx::wait_for_copies<0>();
"""


WAITS = {
    "pipelined": (
        "ptx::wait_for_copies<1>(); __syncthreads();",
        "ptx::wait_for_copies<0>(); __syncthreads();",
    ),
    "at once": ("ptx::wait_for_copies<0>(); __syncthreads();", ""),
    "no second wait": ("ptx::wait_for_copies<1>(); __syncthreads();", ""),
    "no first wait": ("__syncthreads();", "ptx::wait_for_copies<0>(); __syncthreads();"),
    "no barrier": (
        "ptx::wait_for_copies<1>();",
        "ptx::wait_for_copies<0>(); __syncthreads();",
    ),
}
ASYNC_WITH = {
    name: KERNELS.add(ASYNC.format(first=first, second=second))
    for name, (first, second) in WAITS.items()
}


@pytest.mark.parametrize("name", ["pipelined", "at once"])
def test_asynchronous_copies_are_there_after_wait_and_barrier(name):
    out = run_kernel(ASYNC_WITH[name], n=1024, shared_bytes=4096, outputs=128)
    assert out.tolist() == [511 - t + 1000 * (1023 - t) for t in range(128)]


@pytest.mark.parametrize("name", ["no second wait", "no first wait", "no barrier"])
def test_reading_asynchronous_copies_too_early_is_caught(name):
    """Every element is another thread's copy, so some schedule reads what is not there yet."""
    with pytest.raises(EmulatorError, match="depends on the schedule"):
        run_kernel(ASYNC_WITH[name], n=1024, shared_bytes=4096, outputs=128)


PARTIAL_COPY = KERNELS.add(
    """
    DYNAMIC_SHARED(shared);
    ptx::copy_async_16(shared, params.in, 8);
    ptx::commit_copies();
    ptx::wait_for_copies<0>();
    for (int i = 0; i < 4; ++i) params.out[i] = reinterpret_cast<int*>(shared)[i];
    """
)


def test_a_partial_asynchronous_copy_clears_the_rest():
    values = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    out = run_kernel(PARTIAL_COPY, values=values, threads=1, shared_bytes=16, outputs=4)
    assert out.tolist() == [5, 6, 0, 0]


UNAWAITED = KERNELS.add(
    "DYNAMIC_SHARED(s); ptx::copy_async_16(s + 16 * threadIdx.x, params.in, 16);"
)


def test_copies_that_nobody_waits_for_are_caught():
    with pytest.raises(EmulatorError, match="copies that nobody waited for"):
        run_kernel(UNAWAITED, threads=32, shared_bytes=512)


OUT_OF_BOUNDS = {
    "write after": ("params.out[threadIdx.x + 1] = 1;", "after the beginning of out"),
    "write before": (
        "params.out[static_cast<int>(threadIdx.x) - 1] = 1;",
        "before the beginning of out",
    ),
    "read after": (
        "params.out[threadIdx.x] = params.in[threadIdx.x + 1];",
        r"512 bytes after the beginning of in \(512 bytes\)",
    ),
    "shared after": (
        "DYNAMIC_SHARED(s); reinterpret_cast<int*>(s)[threadIdx.x + 1] = 1;",
        "after the beginning of shared memory",
    ),
    "shared before": (
        "DYNAMIC_SHARED(s); params.out[threadIdx.x] = "
        "reinterpret_cast<int*>(s)[static_cast<int>(threadIdx.x) - 1];",
        "before the beginning of shared memory",
    ),
    "static shared": (
        "__shared__ int tile[128]; tile[threadIdx.x + params.n / 128] = 1;"
        "__syncthreads(); params.out[threadIdx.x] = tile[threadIdx.x];",
        "beyond an array",
    ),
    "misaligned": (
        "*reinterpret_cast<int4*>(params.out + threadIdx.x / 128 + 1) = int4{};",
        "misaligned pointer",
    ),
    "overflow": ("params.out[threadIdx.x] = 2147483647 + params.n;", "integer overflow"),
}

DIVERGENT = {
    "half": (
        "if (threadIdx.x < 64) __syncthreads();",
        "divergent barrier: .* has ended",
    ),
    "one left": ("if (threadIdx.x == 77) return; __syncthreads();", "thread 77 has ended"),
    "two barriers": (
        "if (threadIdx.x < 64) {\n __syncthreads();\n } else {\n __syncthreads();\n }",
        "divergent barrier: thread .* at line",
    ),
    "warp or block": (
        "if (threadIdx.x < 31) __syncwarp(); __syncthreads();",
        "divergent barrier: .* for its warp",
    ),
    "half a warp": ("if (threadIdx.x < 16) __syncwarp();", "which never come"),
    "not in the mask": ("if (threadIdx.x % 2) __syncwarp(0x55555555u);", "not in the mask"),
    "two masks": (
        "if (threadIdx.x % 32 < 16) __syncwarp(); else __syncwarp(0xffff0000u);",
        "divergent warp operation",
    ),
    "foreign lane": (
        "if (threadIdx.x % 32 < 16)\n params.out[threadIdx.x] = "
        "__shfl_sync(0xffffu, 1, static_cast<int>(threadIdx.x % 32 + 16));",
        "which is not in the mask",
    ),
}

for broken, _ in (*OUT_OF_BOUNDS.values(), *DIVERGENT.values()):
    KERNELS.add(broken)


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_accesses_out_of_bounds_are_caught(name):
    body, message = OUT_OF_BOUNDS[name]
    with pytest.raises(EmulatorError, match=message):
        run_kernel(body, shared_bytes=512)


@pytest.mark.parametrize("name", DIVERGENT)
def test_divergence_is_caught(name):
    body, message = DIVERGENT[name]
    with pytest.raises(EmulatorError, match=message):
        run_kernel(body)


SEVENS = KERNELS.add("params.out[threadIdx.x] = 7;")


def test_failures_leave_the_emulator_usable():
    with pytest.raises(EmulatorError):
        run_kernel(OUT_OF_BOUNDS["write after"][0])
    assert run_kernel(SEVENS).tolist() == [7] * 128


WARP_OPERATIONS = KERNELS.add(
    """
    const int t = threadIdx.x;
    const int lane = t % 32;
    int sum = params.in[t];
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bits);
    params.out[t] = sum;
    params.out[64 + t] = __shfl_down_sync(ALL_LANES, t, 3);
    params.out[128 + t] = __shfl_up_sync(ALL_LANES, t, 3, 8);
    params.out[192 + t] = static_cast<int>(__ballot_sync(ALL_LANES, lane % 3 == 0));
    int voted = -2;
    if (lane % 2) {
        voted = __any_sync(0xaaaaaaaau, lane == 5) + 2 * __all_sync(0xaaaaaaaau, lane % 2);
    } else {
        voted = __shfl_sync(0x55555555u, t, lane == 0 ? 30 : lane - 2);
    }
    params.out[256 + t] = voted;
    atomicAdd(params.out + 320, 1);
    """
)


def test_warp_operations():
    out = run_kernel(WARP_OPERATIONS, n=64, threads=64, outputs=321).tolist()
    assert out[:64] == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32
    assert out[64:128] == [t + 3 if t % 32 < 29 else t for t in range(64)]
    assert out[128:192] == [t - 3 if t % 8 > 2 else t for t in range(64)]
    ballot = sum(1 << lane for lane in range(0, 32, 3))
    assert {value % 2**32 for value in out[192:256]} == {ballot}
    for t in range(64):
        lane, base = t % 32, t // 32 * 32
        assert out[256 + t] == (3 if lane % 2 else base + (lane - 2) % 32)
    assert out[320] == -1 + 64


FROM_HALF = KERNELS.add(
    """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    params.out[i] = __float_as_int(to_float(Half{static_cast<unsigned short>(i)}));
    """
)
TO_BOTH = KERNELS.add(
    """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float value = __int_as_float(params.in[i]);
    const unsigned upper = from_float<BFloat16>(value).bits;
    params.out[i] = static_cast<int>(upper << 16 | from_float<Half>(value).bits);
    """
)


def test_conversions_agree_with_torch():
    """Every fp16 value to float, and floats around every rounding border to fp16 and bf16."""
    bits = run_kernel(FROM_HALF, n=65536, threads=1024, blocks=64)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    assert_same_numbers(bits.view(torch.float32), every.view(torch.float16).float())
    middle = every.view(torch.float16).float().view(torch.int32)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randint(-(2**31), 2**31 - 1, (65536,), generator=generator)
    values = torch.cat([*(middle + d for d in (-4096, -1, 0, 1, 4096)), noise.int()])
    blocks = len(values) // 1024
    found = run_kernel(TO_BOTH, n=len(values), threads=1024, blocks=blocks, values=values)
    halves, bfloats = found.view(torch.int16).view(-1, 2).T.contiguous()
    for ours, dtype in ((halves, torch.float16), (bfloats, torch.bfloat16)):
        assert_same_numbers(ours.view(dtype), values.view(torch.float32).to(dtype))


TO_FP8 = KERNELS.add(
    """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    params.out[i] = from_float<Fp8>(__int_as_float(params.in[i])).bits;
    """
)
FROM_FP8 = KERNELS.add(
    """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    {
        const unsigned two = static_cast<unsigned>(params.in[i]);
        params.out[2 * i] = static_cast<int>(e4m3_to_halves(two));
        params.out[2 * i + 1] = static_cast<int>(e4m3_by_shifts(two));
    }
    """
)


def test_conversions_to_8_bits_agree_with_torch():
    """Floats around every rounding border, beyond the largest number, and of every kind."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ordered = every[every.isfinite()].sort().values
    middles = (ordered[1:] + ordered[:-1]) / 2
    special = torch.tensor([448.0, 464.0, 480.0, 1e30, torch.inf, torch.nan, 1e-30, 2**-10, 0.0])
    borders = torch.cat([ordered, middles, special, -special]).view(torch.int32)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator).int()
    values = torch.cat([*(borders + d for d in (-1, 0, 1)), noise])
    values = values[: len(values) // 1024 * 1024]
    blocks = len(values) // 1024
    found = run_kernel(TO_FP8, n=len(values), threads=1024, blocks=blocks, values=values)
    floats = values.view(torch.float32)
    expected = floats.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    is_nan = floats.isnan()
    assert is_nan.any()
    assert (found[is_nan] & 0x7F == 0x7F).all()
    assert torch.equal(found[~is_nan], expected[~is_nan])


def test_conversions_from_8_bits_agree_with_torch():
    """All pairs of numbers, by the instruction's twin and by shifts."""
    out = run_kernel(FROM_FP8, n=65536, threads=1024, blocks=64, outputs=2 * 65536)
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float8_e4m3fn)
    for way in (0, 1):
        halves = out.view(-1, 2)[:, way].contiguous().view(torch.float16)
        assert_same_numbers(halves.float(), pairs.float())


TRANSPOSED = KERNELS.add(
    """
    const unsigned lane = threadIdx.x;
    const unsigned pair = 8 * (lane / 4) + lane % 4 * 2;
    params.out[lane] = static_cast<int>(ptx::transpose_matrix((pair + 1) << 16 | pair));
    """
)


def test_a_matrix_is_transposed():
    out = run_kernel(TRANSPOSED, n=32, threads=32).view(torch.int16).view(8, 8)
    assert torch.equal(out, torch.arange(64, dtype=torch.int16).view(8, 8).T)


def assert_same_numbers(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.float().nan_to_num(nan=0.5), b.float().nan_to_num(nan=0.5))


MMA = """
    DYNAMIC_SHARED(shared);
    const int lane = threadIdx.x;
    const char* const in = reinterpret_cast<const char*>(params.in);
    ptx::copy_async_16(shared + 16 * lane, in + 16 * lane, 16);
    if (lane < 16) ptx::copy_async_16(shared + 512 + 16 * lane, in + 512 + 16 * lane, 16);
    ptx::commit_copies();
    ptx::wait_for_copies<0>();
    {sync}
    unsigned a[4], b[4];
    // Matrices of A: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    ptx::load_matrices(a, shared + lane % 16 * 32 + lane / 16 * 16);
    ptx::load_matrices_transposed(b, shared + 512 + lane % 16 * 16);
    float c[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    ptx::mma_{type}(c, a, b[0], b[1]);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        params.out[row * 8 + lane % 4 * 2 + i % 2] = __float_as_int(c[i]);
    }
"""
MMA_OF = {
    dtype: KERNELS.add(MMA.replace("{type}", name).replace("{sync}", "__syncwarp();"))
    for dtype, name in ((torch.float16, "half"), (torch.bfloat16, "bfloat16"))
}


@pytest.mark.parametrize("dtype", MMA_OF)
def test_mma_multiplies_matrices_given_by_load_matrices(dtype):
    """A is [16, 16] and B [16, 8], both as stored, so B is transposed on the way to its lanes."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(16, columns, generator=generator).to(dtype) for columns in (16, 8))
    packed = torch.cat([a.flatten(), b.flatten()]).view(torch.int32)
    out = run_kernel(MMA_OF[dtype], threads=32, values=packed, shared_bytes=768, outputs=128)
    # Sums of 16 products of exactly converted values: only their order differs.
    expected = a.float() @ b.float() + 1
    assert torch.allclose(out.view(torch.float32).view(16, 8), expected, atol=1e-5)


UNSYNCED_MMA = [
    KERNELS.add(MMA.replace("{type}", "half").replace("{sync}", sync))
    for sync in (
        "",
        "__syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);",
        "__shfl_sync(ALL_LANES, 0, 0);",
    )
]
"""No wait, one of either half of the warp alone, and an exchange, which orders no memory."""


@pytest.mark.parametrize("number", range(len(UNSYNCED_MMA)))
def test_matrices_that_the_warp_has_not_waited_for_are_caught(number):
    """Lanes load what others have copied, all of which have come: the result would be right."""
    values = torch.arange(192, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=r"load_matrices at line .* after the last wait of its"):
        run_kernel(UNSYNCED_MMA[number], threads=32, values=values, shared_bytes=768, outputs=128)


WRITTEN_AGAIN = """
    DYNAMIC_SHARED(shared);
    const int t = threadIdx.x;
    unsigned* const rows = reinterpret_cast<unsigned*>(shared);
    unsigned loaded[4];
    for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 4; ++i) rows[4 * t + i] = params.in[t] + round;
        {sync}
        ptx::load_matrices(loaded, rows + 4 * t);
    }
    params.out[t] = static_cast<int>(loaded[t % 4]);
"""
WRITTEN_AGAIN_WITH = {
    sync: KERNELS.add(WRITTEN_AGAIN.replace("{sync}", sync))
    for sync in ("__syncthreads();", "if (round == 0) __syncwarp();")
}


def test_a_barrier_is_waited_for_in_every_round():
    good, bad = WRITTEN_AGAIN_WITH.values()
    run_kernel(good, n=64, threads=64, shared_bytes=1024)
    with pytest.raises(EmulatorError, match=r"load_matrices at line .* after the last wait of its"):
        run_kernel(bad, n=64, threads=64, shared_bytes=1024)


NOT_DYNAMIC = KERNELS.add(
    "alignas(16) __shared__ unsigned rows[128]; unsigned loaded[4];"
    "ptx::load_matrices(loaded, rows + 4 * threadIdx.x);"
)


def test_matrices_are_loaded_from_dynamic_shared_memory():
    with pytest.raises(EmulatorError, match="row of thread 0 is not in dynamic shared memory"):
        run_kernel(NOT_DYNAMIC, n=32, threads=32, shared_bytes=512)


WHO_CAME = KERNELS.add(
    "const int number = threadIdx.x + 32 * blockIdx.x;"
    "params.out[atomicAdd(params.out + 64, 1) + 1] = number;"
)


def test_schedules_differ_in_what_they_run_first():
    seen = set()
    for schedule in SCHEDULES:
        with EmulatedDevice(KERNELS.library(), schedule) as device:
            out = torch.full((65,), -1, dtype=torch.int32)
            address = device.upload("out", out)
            params = Params(device.upload("in", out), address, 64)
            device.launch(KERNELS.name(WHO_CAME), (2, 1, 1), 32, params)
            ran = device.download(address, out)[:64].tolist()
            assert sorted(ran) == list(range(64))
            seen.add(tuple(ran))
    assert len(seen) == len(SCHEDULES)


def test_impossible_launches_are_refused():
    with EmulatedDevice(KERNELS.library(), SCHEDULES[0]) as device:
        kernel = KERNELS.name(SEVENS)
        with pytest.raises(EmulatorError, match="takes 24 bytes of parameters, not 8"):
            device.launch(kernel, (1, 1, 1), 32, ctypes.c_void_p())
        with pytest.raises(EmulatorError, match="2048 threads"):
            device.launch(kernel, (1, 1, 1), 2048, Params())


def test_a_source_that_does_not_compile_says_why():
    with pytest.raises(EmulatorError, match="no_such_function"):
        KernelLibrary("__global__ void f(const int) { no_such_function(); }", ["f"])
