"""How much KV cache there is: its layout, its size from memory, and what fits in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chairlift.errors import ModelError
from chairlift.host_memory import available_memory

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.executor import Int32Array
    from chairlift.models.config import ModelConfig

DEFAULT_SHARE = 0.4
"""Share of the memory available after loading the model that the cache may take by default."""
DEFAULT_LIMIT_BYTES = 4 << 30
"""And no more than this."""


@dataclass(frozen=True, slots=True)
class KvPoolSize:
    """The size of a pool of KV blocks, and what it means for requests."""

    num_blocks: int
    block_size: int
    """Tokens in a block."""
    bytes_per_block: int
    """K and V of all layers."""
    max_model_len: int
    """Tokens of the longest sequence, which the pool can hold at least once."""

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the pool."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def full_length_requests(self) -> int:
        """Sequences of ``max_model_len`` tokens that fit at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)

    def __str__(self) -> str:
        """Say it in one line, for the log."""
        return (
            f"KV cache: {self.num_bytes / 2**20:,.0f} MiB, {self.num_blocks:,} blocks of "
            f"{self.block_size} = {self.num_tokens:,} tokens, {self.full_length_requests:,} "
            f"concurrent requests of the full {self.max_model_len:,} tokens"
        )


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block of ``block_size`` tokens takes in all layers, K and V."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def size_kv_pool(
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
) -> KvPoolSize:
    """Size the pool: by ``num_blocks`` if given, else by memory, else by the default share of it.

    ``max_model_len`` is lowered to what the pool holds where that is less.

    Raises:
        ModelError: not even one block fits.
    """
    if num_blocks is None:
        if memory_bytes is None:
            memory_bytes = min(DEFAULT_LIMIT_BYTES, int(DEFAULT_SHARE * available_memory()))
        num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelError(
            f"a KV cache of {memory_bytes or 0:,} bytes holds no block of {bytes_per_block:,} "
            "bytes; give it more memory, or a smaller block size"
        )
    longest = min(max_model_len, num_blocks * block_size)
    return KvPoolSize(num_blocks, block_size, bytes_per_block, longest)


class KvCache:
    """The blocks: K and V of each layer, ``[blocks, kv_heads, block_size, head_dim]`` each."""

    def __init__(
        self,
        config: ModelConfig,
        size: KvPoolSize,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve the memory; on the CPU, pages that no block is written to are never touched."""
        shape = (size.num_blocks, config.num_kv_heads, size.block_size, config.head_dim)
        self.layers = [
            (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(config.num_layers)
        ]

    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy (source, destination) blocks ``[C, 2]``; all are read before any is written."""
        sources, destinations = torch.tensor(copies, dtype=torch.int64).unbind(1)
        for layer in self.layers:
            for cache in layer:
                _copy(cache, sources, destinations)


def _copy(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    cache.index_copy_(0, destinations, cache.index_select(0, sources))
