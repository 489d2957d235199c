"""The table of ragged steps that the CUDA and the CPU attention kernels share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention_cases import Shape, World

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8 = torch.float8_e4m3fn

CHUNK = 64
"""Keys of a chunk in these tests: short, so that short contexts are several."""

TOLERANCES = {
    # Sums of up to 1,500 products of unit normals in another order: some units in the last place.
    F32: 3e-5,
    # Queries, keys and outputs are rounded to 2^-11 of their size, and the reference keeps queries
    # as they are: a score moves by some 2^-11, an output between 2 and 4 by 2^-10 more.
    F16: 4e-3,
    # The same with 2^-8: what the CPU kernel is allowed too.
    BF16: 2.5e-2,
}


@dataclass(frozen=True)
class Case:
    """One step: sequences with a context in the cache and a few query tokens."""

    name: str
    shape: Shape
    sequences: tuple[tuple[int, int], ...]
    """Context and query tokens of each."""
    shared_blocks: int = 0
    """Leading blocks that all sequences have in common (prefix hits)."""
    window: int = 0
    soft_cap: float = 0.0
    k_scale: float = 1.0
    """Of a cache of 8 bits."""
    v_scale: float = 1.0

    def world(self, seed: int = 11) -> World:
        """Sequences with their context in the cache; what is not theirs is NaN."""
        world = World(self.shape, [sum(pair) for pair in self.sequences], seed)
        options = ("window", "soft_cap", "k_scale", "v_scale")
        world.params = replace(world.params, **{name: getattr(self, name) for name in options})
        for sequence in world.sequences[1:]:
            shared = world.sequences[0].blocks[: self.shared_blocks]
            sequence.blocks[: len(shared)] = shared
        generator = torch.Generator().manual_seed(seed + 1)
        size = (self.shape.kv_heads, self.shape.head_dim)
        for sequence, (context, _) in zip(world.sequences, self.sequences, strict=True):
            sequence.computed = context
            for cache, scale in ((world.k_cache, self.k_scale), (world.v_cache, self.v_scale)):
                for position in range(context):
                    block = sequence.blocks[position // self.shape.block_size]
                    at = position % self.shape.block_size
                    if cache[block, :, at].isnan().any():
                        values = torch.randn(size, generator=generator)
                        cache[block, :, at] = (values / scale).to(cache.dtype)
        return world

    @property
    def work(self) -> list[tuple[int, int]]:
        return [(index, queries) for index, (_, queries) in enumerate(self.sequences)]


def _shape(head_dim: int, group: int, block_size: int, dtype: torch.dtype, **more) -> Shape:
    kv_heads = 2 if group < 5 else 1
    return Shape(head_dim, kv_heads, group, block_size, dtype, dtype, **more)


def _everything() -> list[Case]:
    """All types, head sizes and groups, each with sequences and options of its own."""
    cases = []
    lengths = [0, 1, 7, 15, 16, 31, 62, 63, 64, 65, 100, 127, 128, 129, 200]
    combinations = itertools.product((F32, F16, BF16), (64, 80, 96, 128, 256), range(1, 9))
    for number, (dtype, head_dim, group) in enumerate(combinations):
        rng = np.random.default_rng(number)
        block_size = int(rng.choice([8, 13, 16, 32]))
        contexts = rng.choice(lengths, size=3, replace=False).tolist()
        queries = rng.choice([1, 1, 1, 2, 3, 5], size=3).tolist()
        shape = _shape(head_dim, group, block_size, dtype, norms=bool(number % 3 == 0))
        cases.append(
            Case(
                f"all-{number}-{shape}",
                shape,
                tuple(zip(contexts, queries, strict=True)),
                window=int(rng.choice([0, 0, 1, 20, 64, 70])),
                soft_cap=float(rng.choice([0.0, 0.0, 5.0])),
            )
        )
    return cases


def _borders() -> list[Case]:
    """Context and query tokens on both sides of every border of blocks and chunks."""
    cases = []
    for block_size in (8, 16, 32, 40):
        for border in sorted({block_size, 2 * block_size, CHUNK, 2 * CHUNK}):
            for total in (border - 1, border, border + 1):
                queries = (1, 2, 4)
                sequences = tuple((total - count, count) for count in queries)
                shape = Shape(64, 1, 2, block_size, F32, F32)
                cases.append(Case(f"border-b{block_size}-{total}", shape, sequences))
    return cases


def _prefix_hits() -> list[Case]:
    return [
        Case(
            f"shared-{shared}-{dtype}",
            _shape(64, 3, 16, dtype),
            tuple((16 * shared + more, 1) for more in (1, 5, 17, 40)),
            shared_blocks=shared,
        )
        for shared in (1, 3, 4, 8)
        for dtype in (F32, F16, BF16)
    ]


def _long_and_short() -> list[Case]:
    """One very long sequence beside many short ones."""
    short = tuple((length, 1) for length in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55))
    return [
        Case(
            f"long-{dtype}-w{window}",
            Shape(64, 1, 4, 16, dtype, dtype),
            ((1500, 1), *short),
            window=window,
        )
        for dtype in (F32, F16, BF16)
        for window in (0, 130)
    ]


def _windows() -> list[Case]:
    return [
        Case(
            f"window-{window}-{context}",
            Shape(64, 1, 2, 16, F32, F32),
            ((context, 1), (context, 3)),
            window=window,
        )
        for window in (1, 2, 63, 64, 65, 128)
        for context in (0, 1, 62, 63, 64, 65, 127, 128, 200)
    ]


def _rotations() -> list[Case]:
    """Heads that are not rotated, or in part, and the norms of q and k."""
    return [
        Case(
            f"rotary-{rotary}-{norms}-{dtype}",
            _shape(head_dim, 2, 16, dtype, rotary=rotary, norms=norms),
            ((40, 1), (0, 3)),
        )
        for rotary, norms in itertools.product((0.0, 0.25, 0.5, 1.0), (False, True))
        for head_dim, dtype in ((64, F32), (80, BF16))
    ]


def _prefill_chunks() -> list[Case]:
    """Whole prompts and chunks after a context, around the borders of tiles of rows and of keys."""
    cases = []
    combinations = itertools.product((F16, BF16, F32), (64, 80, 96, 128, 256), (1, 3, 4, 8))
    for number, (dtype, head_dim, group) in enumerate(combinations):
        rng = np.random.default_rng(1000 + number)
        contexts = rng.choice([0, 0, 1, 31, 32, 33, 63, 64, 65, 100], size=2).tolist()
        queries = rng.choice([15, 16, 17, 31, 33, 63, 64, 65, 90], size=2).tolist()
        shape = _shape(head_dim, group, int(rng.choice([8, 13, 16, 32])), dtype)
        if group > 1:
            shape = replace(shape, kv_heads=1)
        cases.append(
            Case(
                f"prefill-{number}-{shape}",
                shape,
                ((10, 1), *zip(contexts, queries, strict=True)),
                window=int(rng.choice([0, 0, 0, 1, 40, 64])),
                soft_cap=float(rng.choice([0.0, 0.0, 5.0])),
            )
        )
    return cases


def _fp8_caches() -> list[Case]:
    """Caches of 8 bits: every head size and way of decoding, and prefill chunks."""
    cases = []
    combinations = itertools.product((F16, BF16), (64, 80, 96, 128, 256), (1, 3, 8), (False, True))
    for number, (dtype, head_dim, group, is_prefill) in enumerate(combinations):
        rng = np.random.default_rng(2000 + number)
        contexts = rng.choice([0, 1, 15, 16, 31, 33, 63, 64, 65, 129, 200], size=3).tolist()
        queries = rng.choice([17, 33, 64, 65] if is_prefill else [1, 1, 2], size=3).tolist()
        shape = _shape(head_dim, group, int(rng.choice([8, 13, 16, 32])), dtype)
        cases.append(
            Case(
                f"fp8-{number}-{shape}",
                replace(shape, cache_dtype=FP8, kv_heads=1),
                tuple(zip(contexts, queries, strict=True)),
                window=int(rng.choice([0, 0, 20, 64])),
                soft_cap=float(rng.choice([0.0, 0.0, 5.0])),
                # Powers of two and others; with the least of them, keys reach the largest number.
                k_scale=float(rng.choice([0.0078125, 0.3, 1.0])),
                v_scale=float(rng.choice([0.125, 0.7, 1.0])),
            )
        )
    return cases


PREFILL_CASES = _prefill_chunks()
"""More query tokens than the decode kernel is made for."""
CASES = _everything() + _borders() + _prefix_hits() + _long_and_short() + _windows() + _rotations()
FP8_CASES = _fp8_caches()
"""From the same cache results have the tolerance of the queries' type, in which all numbers of 8
bits are exact."""
