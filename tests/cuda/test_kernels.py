"""The other kernels, and what no table shows: invariance, far offsets, padding, work lists."""

from __future__ import annotations

import itertools
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_attention import (
    TYPE_NAMES,
    EmulatedBackend,
    decode_library,
    prefill_library,
    write_library,
)
from emulated_device import (
    SCHEDULES,
    EmulatedDevice,
    Order,
    Schedule,
    library_of,
    on_every_schedule,
)

from attention_cases import Shape, World
from attention_table import CHUNK, TOLERANCES, Case
from chairlift.attention import AttentionMetadata, get_backend
from chairlift.attention.reference import apply_rope, rms_norm
from chairlift.cuda_kernels.catalogue import (
    decode_kernel,
    decode_shared_bytes,
    prefill_kernel,
    prefill_shared_bytes,
)
from chairlift.cuda_kernels.params import (
    BlockCopyParams,
    KvCacheWriteParams,
    PagedAttentionDecodeParams,
    PagedAttentionPrefillParams,
    RmsNormParams,
    SiluMulParams,
    division_by,
)
from chairlift.cuda_kernels.work import cut_decode_work, cut_prefill_work

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative error of a result that is rounded once: one unit, since sums differ in their order."""


def randn(*shape, dtype=torch.float32, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 576, 2048, 2056])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype, width, with_residual):
    x, weight = randn(5, width, dtype=dtype), randn(width, dtype=dtype, seed=4)
    residual = randn(5, width, dtype=dtype, seed=5)
    name = f"rms_norm<{TYPE_NAMES[dtype]}>"
    library = library_of("rms_norm", (name,))

    def run(device: EmulatedDevice):
        out = torch.full_like(x, float("nan"))
        out_address, residual_address = device.upload("out", out), device.upload("res", residual)
        params = RmsNormParams(
            x=device.upload("x", x),
            residual=residual_address if with_residual else None,
            weight=device.upload("weight", weight),
            out=out_address,
            width=width,
            eps=1e-5,
        )
        device.launch(name, (5, 1, 1), 256, params)
        return {
            "out": device.download(out_address, out),
            "residual": device.download(residual_address, residual),
        }

    found = on_every_schedule(library, run)
    total = (x.float() + residual.float()).to(dtype) if with_residual else x
    expected = rms_norm(total, weight, 1e-5)
    assert torch.equal(found["residual"], total if with_residual else residual)
    assert torch.allclose(found["out"].float(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 1536, 2056])
def test_silu_mul(dtype, width):
    x = 4 * randn(3, 2 * width, dtype=dtype)
    name = f"silu_mul<{TYPE_NAMES[dtype]}>"

    def run(device: EmulatedDevice):
        out = torch.full((3, width), float("nan"), dtype=dtype)
        address = device.upload("out", out)
        blocks = -(-width * x.element_size() // (16 * 256))
        params = SiluMulParams(device.upload("x", x), address, width)
        device.launch(name, (3, blocks, 1), 256, params)
        return {"out": device.download(address, out)}

    found = on_every_schedule(library_of("silu_mul", (name,)), run)["out"]
    gate, up = x.float().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(found.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)


HERE, HOST = 0, 1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_block_copy(dtype):
    """Within the device, to the host and back: any of them in one launch, in all caches."""
    element = torch.empty(0, dtype=dtype).element_size()
    caches = [
        torch.arange(start, start + blocks * 96, dtype=torch.int32).view(torch.uint8)[
            : blocks * 48 * element
        ]
        for start, blocks in ((0, 7), (2_000, 7), (4_000, 4), (6_000, 4))
    ]
    caches = [cache.view(dtype).view(-1, 48) for cache in caches]  # K and V, then the host's
    moves = [(0, HERE, 3, HERE), (5, HERE, 0, HOST), (0, HERE, 2, HOST), (3, HOST, 6, HERE)]
    numbers = torch.tensor(moves)
    copies = numbers[:, 0::2].int()
    locations = numbers[:, 1::2].to(torch.uint8)

    def run(device: EmulatedDevice):
        addresses = [device.upload(f"cache {i}", cache) for i, cache in enumerate(caches)]
        params = BlockCopyParams(
            caches=device.upload("caches", torch.tensor(addresses)),
            copies=device.upload("copies", copies),
            locations=device.upload("locations", locations),
            block_bytes=48 * element,
        )
        device.launch("block_copy", (len(moves), 2, 1), 32, params)
        downloads = zip(addresses, caches, strict=True)
        return {str(i): device.download(*pair) for i, pair in enumerate(downloads)}

    found = on_every_schedule(library_of("block_copy", ("block_copy",)), run)
    expected = [cache.clone() for cache in caches]
    for source, from_where, destination, to_where in moves:
        for cache in (0, 1):
            expected[2 * to_where + cache][destination] = caches[2 * from_where + cache][source]
    for ours, wanted in zip(found.values(), expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


class TestDecode:
    """What the decode kernels promise besides being right."""

    shape = Shape(64, 1, 3, 16, torch.float32, torch.float32)

    def outputs(self, case: Case, work=None):
        world = case.world()
        backend = world._implementation = EmulatedBackend(SCHEDULES[2], CHUNK)
        return world.step(work or case.work), backend.work

    def test_long_sequences_are_cut_and_short_ones_are_not(self):
        case = Case("cut", self.shape, ((300, 1), (63, 1), (10, 2)))
        _, work = self.outputs(case)
        assert work.num_partials == 5
        assert work.items.tolist() == [
            *([0, chunk, chunk] for chunk in range(5)),
            [1, 0, -1],
            [2, 0, -1],
        ]
        assert work.splits.tolist() == [[0, 0, 5]]

    @pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)  # vector units, tensor cores
    def test_rows_do_not_depend_on_the_batch(self, dtype):
        shape = replace(self.shape, dtype=dtype, cache_dtype=dtype)
        case = Case("batch", shape, ((200, 1), (70, 1), (3, 1)))
        together, _ = self.outputs(case)
        for index, rows in enumerate(together):
            (alone,), _ = self.outputs(case, [(index, 1)])
            assert torch.equal(rows, alone)

    @pytest.mark.parametrize(
        ("dtype", "cache_dtype"),
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float8_e4m3fn),
        ],
        ids=str,
    )
    def test_a_sequence_of_nan_leaves_its_neighbours_alone(self, dtype, cache_dtype):
        shape = replace(self.shape, dtype=dtype, cache_dtype=cache_dtype)
        case = Case("nan", shape, ((100, 1), (70, 1)))
        clean, _ = self.outputs(case)
        world = case.world()
        world._implementation = EmulatedBackend(SCHEDULES[0], CHUNK)
        world.sequences[0].qkv.fill_(float("nan"))
        found = world.step(case.work)
        assert found[0].isnan().all()
        assert torch.equal(found[1], clean[1])

    def test_an_infinite_score_is_no_accident(self):
        """Scores of thousands: weights are one-hot, nothing overflows."""
        case = Case("large", self.shape, ((150, 1),))
        worlds = case.world(), case.world()
        for world, backend in zip(
            worlds, (EmulatedBackend(SCHEDULES[0], CHUNK), get_backend("reference")), strict=True
        ):
            world._implementation = backend
            world.sequences[0].qkv[:, : 3 * 64] *= 1e4
        found, expected = (world.step(case.work)[0] for world in worlds)
        assert torch.allclose(found, expected, atol=1e-4)


def test_offsets_beyond_32_bits():
    """A block so far into a cache that element offsets do not fit 32 bits, signed or not; the rest
    of the cache is never touched, so it takes no memory."""
    block, dim, size = 600_000, 128, 64
    far = block * size * dim
    assert far > 2**32
    q, k, v = (randn(1, dim, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    with EmulatedDevice(write_library(torch.bfloat16, torch.bfloat16), SCHEDULES[0]) as device:
        caches = [device.allocate(name, 2 * (far + size * dim)) for name in ("k", "v")]
        params = KvCacheWriteParams(
            qkv=device.upload("qkv", torch.cat((q, k, v), dim=1)),
            q_out=device.upload("q_out", q),
            k_cache=caches[0],
            v_cache=caches[1],
            slots=device.upload("slots", torch.tensor([block * size + 5])),
            positions=device.upload("positions", torch.tensor([5], dtype=torch.int32)),
            qkv_stride=3 * dim,
            heads=1,
            kv_heads=1,
            head_dim=dim,
            block_size=size,
        )
        device.launch("kv_cache_write<BFloat16>", (1, 1, 1), 128, params)
        for cache, expected in zip(caches, (k, v), strict=True):
            assert torch.equal(device.download(cache + 2 * (far + 5 * dim), expected), expected)
    ints = {
        "query_start_loc": [0, 1],
        "seq_lens": [1],
        "block_table_offsets": [0, 1],
        "block_ids": [block],
        "items": [0, 0, -1],
    }
    magic, shift = division_by(size)
    common = {"scale": 1.0, "kv_heads": 1, "group": 1, "block_size": size}
    common |= {"block_magic": magic, "block_shift": shift}
    decode = decode_kernel("BFloat16", dim, 8)
    prefill = prefill_kernel("BFloat16", dim)
    for kernel, library, struct, more, shared in (
        (
            decode,
            decode_library(torch.bfloat16, torch.bfloat16),
            PagedAttentionDecodeParams,
            {"chunk_tokens": CHUNK, "max_rows": 1},
            decode_shared_bytes("BFloat16", dim, 8),
        ),
        (
            prefill,
            prefill_library(torch.bfloat16, torch.bfloat16),
            PagedAttentionPrefillParams,
            {},
            prefill_shared_bytes("BFloat16", dim),
        ),
    ):
        with EmulatedDevice(library, SCHEDULES[0]) as device:
            caches = {
                name: device.allocate(name, 2 * (far + size * dim))
                for name in ("k_cache", "v_cache")
            }
            for cache, value in zip(caches.values(), (k, v), strict=True):
                device.write(cache + 2 * far, value)
            out = device.upload("out", torch.zeros_like(q))
            addresses = {
                name: device.upload(name, torch.tensor(values, dtype=torch.int32))
                for name, values in ints.items()
            }
            params = struct(
                **addresses, **caches, **common, **more, q=device.upload("q", q), out=out
            )
            device.launch(kernel, (1, 1, 1), 128, params, shared)
            # A single key has all the weight.
            assert torch.equal(device.download(out, v), v), kernel


def test_padding_is_not_written():
    """Slots below zero pad a step to the size of a captured graph."""
    shape = Shape(64, 2, 2, 16, torch.float32, torch.float32, norms=True)
    world = Case("padding", shape, ((3, 2), (20, 1))).world()
    plan = world.plan([(0, 2), (1, 1)])
    slots = plan.slot_mapping.copy()
    slots[1] = -1
    metadata = AttentionMetadata.from_plan(
        types.SimpleNamespace(**{**vars(plan), "slot_mapping": slots})
    )
    before = world.k_cache.clone()
    qkv = randn(3, world.params.qkv_width)
    q = EmulatedBackend().write(qkv, world.k_cache, world.v_cache, metadata, world.params)
    changed = (before.nan_to_num() != world.k_cache.nan_to_num()).any(-1).any(1)
    assert sorted(changed.flatten().nonzero().flatten().tolist()) == sorted([slots[0], slots[2]])
    assert q[1].isnan().all()
    heads = qkv.view(3, -1, 64)[:, :4]
    expected = apply_rope(
        rms_norm(heads, world.params.q_norm, 1e-6),
        torch.tensor(plan.positions).long(),
        *world.params.cos_sin,
    )
    assert torch.allclose(q.view(3, 4, 64)[[0, 2]], expected[[0, 2]], atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_work_covers_every_visible_key_once(seed):
    rng = np.random.default_rng(seed)
    count, chunk = int(rng.integers(1, 30)), int(rng.choice([16, 64, 256]))
    window = int(rng.choice([0, 1, 30, 300]))
    queries = rng.integers(0, 4, count)
    seq_lens = (queries + rng.choice([0, 1, 15, 63, 64, 300, 2000], count)).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    work = cut_decode_work(starts, seq_lens, window=window, chunk_tokens=chunk)
    partials = [item[2] for item in work.items.tolist() if item[2] >= 0]
    assert sorted(partials) == list(range(work.num_partials))
    covered = {(int(i), int(c)) for i, c, _ in work.items}
    assert len(covered) == len(work.items)
    expected = set()
    for i in range(count):
        for query in range(queries[i]):
            end = seq_lens[i] - queries[i] + query + 1
            first = max(0, end - window) if window else 0
            expected |= {(i, key // chunk) for key in range(first, end)}
    assert covered == expected
    for sequence, first, number in work.splits.tolist():
        own = [item[2] for item in work.items.tolist() if item[0] == sequence]
        assert own == list(range(first, first + number))
        assert number > 1


@pytest.mark.parametrize("seed", range(20))
def test_prefill_work_covers_every_row_once_and_the_longest_first(seed):
    rng = np.random.default_rng(seed)
    count, group = int(rng.integers(1, 12)), int(rng.integers(1, 9))
    queries = rng.choice([0, 1, 7, 8, 9, 63, 64, 65, 500], count)
    seq_lens = (queries + rng.choice([0, 1, 1000], count)).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    items = cut_prefill_work(starts, seq_lens, group=group, tile_rows=64).tolist()
    expected = {(i, tile) for i in range(count) for tile in range(-(-queries[i] * group // 64))}
    assert sorted(map(tuple, items)) == sorted(expected)
    seen = []
    for sequence, tile in items:
        last_row = min((tile + 1) * 64, queries[sequence] * group) - 1
        seen.append(seq_lens[sequence] - queries[sequence] + last_row // group + 1)
    # A tile that ends inside of a token's rows may see one key more than it is sorted by.
    assert all(later <= sooner + 1 for sooner, later in itertools.pairwise(seen))


class TestPrefill:
    """What the prefill kernel promises besides being right."""

    shape = Shape(64, 1, 3, 16, torch.bfloat16, torch.bfloat16)

    def run(self, steps, lengths):
        world = World(self.shape, lengths, 5)
        world._implementation = EmulatedBackend(SCHEDULES[2], CHUNK, prefill=True)
        return world.run(steps)

    def test_rows_do_not_depend_on_batch_or_chunks(self):
        lengths = [150, 40]
        whole = self.run([[(0, 150)], [(1, 40)]], lengths)
        for steps in (
            [[(0, 150), (1, 40)]],
            [[(0, 64), (1, 1)], [(1, 39), (0, 86)]],
            [[(0, 17)], [(0, 100), (1, 33)], [(0, 33), (1, 7)]],
        ):
            for ours, theirs in zip(self.run(steps, lengths), whole, strict=True):
                assert torch.equal(ours, theirs)

    def test_a_sequence_of_nan_leaves_its_neighbours_alone(self):
        case = Case("nan", self.shape, ((10, 60), (70, 20)))
        outputs = []
        for value in (1.0, float("nan")):
            world = case.world()
            world._implementation = EmulatedBackend(SCHEDULES[0], CHUNK, prefill=True)
            world.sequences[0].qkv.mul_(value)
            outputs.append(world.step(case.work))
        assert outputs[1][0].isnan().all()
        assert torch.equal(outputs[0][1], outputs[1][1])


def test_division_by_multiplication_is_exact():
    rng = np.random.default_rng(1)
    for block_size in [*range(1, 300), 1024, 65535, 65536, 1_000_003]:
        magic, shift = division_by(block_size)
        assert magic < 2**32
        edges = [n for q in (1, 2, 1000) for n in (q * block_size - 1, q * block_size)]
        top = 2**31 - 1
        for n in [
            0,
            top,
            top // block_size * block_size,
            *edges,
            *rng.integers(0, top, 20).tolist(),
        ]:
            if n <= top:
                assert n * magic >> (31 + shift) == n // block_size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_whole_decode_is_the_same_under_more_schedules(dtype):
    case = Case("schedules", Shape(80, 1, 4, 13, dtype, dtype, norms=True), ((150, 1), (5, 3)))
    results = []
    for seed in range(1, 7):
        world = case.world()
        schedule = Schedule(Order.RANDOM, at_end=bool(seed % 2), seed=seed)
        world._implementation = EmulatedBackend(schedule, CHUNK)
        results.append(torch.cat(world.step(case.work)))
    reference = case.world()
    reference._implementation = get_backend("reference")
    expected = torch.cat(reference.step(case.work))
    assert (results[0].float() - expected.float()).abs().max() <= TOLERANCES[dtype]
    for other in results[1:]:
        assert torch.equal(results[0], other)
