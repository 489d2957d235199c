"""Attention on a CUDA device beside torch's own, and beside what the device can do.

    python benches/gpu_attention.py

Decode: 64 sequences with a context of 4,096, bf16, 8 key/value heads of 128, groups of 4 and 8; as
a share of the rate at which the device copies memory. Prefill: one prompt of 8,192; as a share of
the rate at which the device multiplies matrices. torch attends to the same keys, laid out densely.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift.cuda_kernels import ops
from chairlift.cuda_kernels.catalogue import PREFILL_ROWS
from chairlift.cuda_kernels.work import CHUNK_TOKENS, cut_decode_work, cut_prefill_work

BLOCK_SIZE = 16
REPEATS = 30


@dataclass(frozen=True)
class Shape:
    """Sequences of one length."""

    sequences: int
    context: int
    """Tokens in the cache, the queries' included."""
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values."""
        values = self.sequences * self.context * self.kv_heads * self.head_dim
        return 2 * values * self.dtype.itemsize

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products, without what is masked."""
        before = self.context - self.queries
        pairs = self.sequences * self.queries * (before + (self.queries + 1) / 2)
        return 4 * pairs * self.kv_heads * self.group * self.head_dim


class Paged:
    """Our attention over a paged cache of shuffled blocks."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        blocks = -(-shape.context // BLOCK_SIZE)
        pool = shape.sequences * blocks
        cache = (pool, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        width = shape.kv_heads * shape.group * shape.head_dim

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device).to(shape.dtype)

        def there(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        tokens = shape.sequences * shape.queries
        self.q, self.out = random(tokens, width), random(tokens, width)
        self.caches = random(*cache), random(*cache)
        starts = np.arange(shape.sequences + 1, dtype=np.int32) * shape.queries
        lengths = np.full(shape.sequences, shape.context, dtype=np.int32)
        self.sequences = (
            there(starts),
            there(lengths),
            there(np.arange(shape.sequences + 1) * blocks),
            there(np.random.default_rng(0).permutation(pool)),
        )
        self.scores = (shape.head_dim**-0.5, 0.0, 0)
        self.prefill = shape.queries > 1
        if self.prefill:
            self.lists = (
                there(cut_prefill_work(starts, lengths, group=shape.group, tile_rows=PREFILL_ROWS)),
            )
        else:
            work = cut_decode_work(starts, lengths)
            self.lists = (there(work.items), there(work.splits))
            self.limits = (work.num_partials, CHUNK_TOKENS, 1)

    def __call__(self) -> torch.Tensor:
        if self.prefill:
            ops.paged_attention_prefill(
                self.out, self.q, *self.caches, *self.sequences, *self.lists, *self.scores
            )
        else:
            ops.paged_attention_decode(
                self.out,
                self.q,
                *self.caches,
                *self.sequences,
                *self.lists,
                *self.limits,
                *self.scores,
            )
        return self.out


class Dense:
    """torch's attention over the same keys, one sequence behind the other."""

    def __init__(self, shape: Shape, paged: Paged) -> None:
        self.shape = shape
        blocks = -(-shape.context // BLOCK_SIZE)
        tables = paged.sequences[3].long().view(shape.sequences, blocks)
        self.k, self.v = (
            cache[tables].transpose(2, 1).flatten(2, 3)[:, :, : shape.context].contiguous()
            for cache in paged.caches
        )  # [N, kv_heads, context, dim]
        q = paged.q.view(shape.sequences, shape.queries, -1, shape.head_dim)
        self.q = q.transpose(1, 2).contiguous()

    def __call__(self) -> torch.Tensor:
        out = scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=self.shape.queries > 1, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(-1, self.q.shape[1] * self.shape.head_dim)


def seconds(work: Callable[[], object]) -> float:
    """Median time on the device."""
    for _ in range(5):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rate(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Bytes a second that a copy within the device reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source))


def matrix_rate(device: torch.device, size: int = 8_192) -> float:
    """Operations a second of a large product of bf16 matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def compare(shape: Shape, device: torch.device) -> tuple[Paged, Dense, float]:
    """Make both, and return the largest difference of their results."""
    paged = Paged(shape, device)
    dense = Dense(shape, paged)
    return paged, dense, (paged() - dense()).abs().max().item()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device: nothing to measure")
    device = torch.device("cuda")
    copied, multiplied = copy_rate(device), matrix_rate(device)
    print(f"{torch.cuda.get_device_name()}: copies {copied / 1e9:,.0f} GB/s, multiplies ", end="")
    print(f"{multiplied / 1e12:,.0f} TFLOP/s (bf16)")
    for group in (4, 8):
        shape = Shape(64, 4_096, 1, 8, group, 128)
        paged, dense, error = compare(shape, device)
        ours, theirs = seconds(paged), seconds(dense)
        rate = shape.kv_bytes / ours
        print(
            f"decode, 64 x 4,096, groups of {group}: {ours * 1e6:,.0f} us, "
            f"{rate / 1e9:,.0f} GB/s = {rate / copied:.0%} of the copy (goal 80 %); "
            f"torch {theirs * 1e6:,.0f} us; largest difference {error:.1e}"
        )
    shape = Shape(1, 8_192, 8_192, 8, 4, 128)
    paged, dense, error = compare(shape, device)
    ours, theirs = seconds(paged), seconds(dense)
    rate = shape.operations / ours
    print(
        f"prefill, 8,192: {ours * 1e3:,.2f} ms, {rate / 1e12:,.0f} TFLOP/s = "
        f"{rate / multiplied:.0%} of the matrix rate (goal 35 %); torch {theirs * 1e3:,.2f} ms; "
        f"largest difference {error:.1e}"
    )


if __name__ == "__main__":
    main()
