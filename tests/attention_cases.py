"""Steps for the attention tests: ragged batches over a cache of permuted, poisoned blocks."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from chairlift.attention import AttentionParams, get_backend

if TYPE_CHECKING:
    from chairlift.executor import StepPlan

MAX_POSITION = 2048


@dataclass(frozen=True)
class Shape:
    """One line of the table that every backend is tested on."""

    head_dim: int = 64
    kv_heads: int = 3
    group: int = 3
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    rotary: float = 1.0
    norms: bool = False

    def __str__(self) -> str:
        types_ = f"{str(self.dtype)[6:]}-{str(self.cache_dtype)[6:]}"
        return (
            f"d{self.head_dim}-g{self.group}-b{self.block_size}-{types_}"
            f"{'-norms' if self.norms else ''}{f'-rotary{self.rotary}' if self.rotary != 1 else ''}"
        )

    def params(self, generator: torch.Generator) -> AttentionParams:
        cos_sin = None
        if self.rotary:
            half = int(self.head_dim * self.rotary) // 2
            frequencies = 10_000.0 ** (-torch.arange(half) / half)
            angles = torch.arange(MAX_POSITION)[:, None] * frequencies
            cos_sin = (angles.cos(), angles.sin())

        def norm() -> torch.Tensor | None:
            weight = 1 + 0.2 * torch.randn(self.head_dim, generator=generator)
            return weight.to(self.dtype) if self.norms else None

        return AttentionParams(
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            cos_sin=cos_sin,
            q_norm=norm(),
            k_norm=norm(),
        )


@dataclass
class Sequence:
    """One sequence with all its tokens known, and how far it is computed."""

    qkv: torch.Tensor  # [length, width]
    blocks: list[int]
    computed: int = 0


@dataclass
class World:
    """Caches and sequences; :meth:`step` runs some of them through a backend."""

    shape: Shape
    lengths: list[int]
    seed: int
    backend: str = "cpu"
    params: AttentionParams = field(init=False)
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        generator = torch.Generator().manual_seed(self.seed)
        self.params = shape.params(generator)
        needed = [-(-length // shape.block_size) for length in self.lengths]
        pool = sum(needed) + 3
        permuted = torch.randperm(pool, generator=generator).tolist()
        self.sequences = []
        for length, count in zip(self.lengths, needed, strict=True):
            qkv = torch.randn(length, self.params.qkv_width, generator=generator).to(shape.dtype)
            self.sequences.append(Sequence(qkv, [permuted.pop() for _ in range(count)]))
        size = (pool, shape.kv_heads, shape.block_size, shape.head_dim)
        # What is not written must not be read: it is NaN.
        self.k_cache = torch.full(size, float("nan"), dtype=shape.cache_dtype)
        self.v_cache = torch.full(size, float("nan"), dtype=shape.cache_dtype)
        self._implementation = get_backend(self.backend)

    def plan(self, work: list[tuple[int, int]]) -> StepPlan:
        """Plan ``work``, (sequence, tokens) pairs, as the scheduler would."""
        size = self.shape.block_size
        starts, seq_lens, positions, slots, offsets, ids = [0], [], [], [], [0], []
        for index, count in work:
            sequence = self.sequences[index]
            end = sequence.computed + count
            for position in range(sequence.computed, end):
                positions.append(position)
                slots.append(sequence.blocks[position // size] * size + position % size)
            ids.extend(sequence.blocks[: -(-end // size)])
            starts.append(len(positions))
            seq_lens.append(end)
            offsets.append(len(ids))
        arrays = types.SimpleNamespace(
            query_start_loc=np.array(starts, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(slots, np.int64),
            block_table_offsets=np.array(offsets, np.int32),
            block_ids=np.array(ids, np.int32),
        )
        for array in vars(arrays).values():
            array.flags.writeable = False
        return cast("StepPlan", arrays)

    def step(self, work: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Run one step; returns the output rows of each sequence of ``work``."""
        metadata = self._implementation.prepare(self.plan(work))
        rows = []
        for index, count in work:
            sequence = self.sequences[index]
            rows.append(sequence.qkv[sequence.computed : sequence.computed + count])
            sequence.computed += count
        out = self._implementation.forward(
            torch.cat(rows), self.k_cache, self.v_cache, metadata, self.params
        )
        return list(out.split([count for _, count in work]))

    def run(self, steps: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
        """Run all steps; returns each sequence's outputs in order of position."""
        outputs: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        for work in steps:
            for (index, _), rows in zip(work, self.step(work), strict=True):
                outputs[index].append(rows)
        return [torch.cat(rows) if rows else torch.empty(0) for rows in outputs]
