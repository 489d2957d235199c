"""KV blocks in memory of the host: the second tier, for blocks that the device has no room for.

The memory is pinned, and so mapped into the device's address space: the kernel that copies blocks
reads and writes it as it does the device's own. The layout is that of the device's caches.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from chairlift.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.gpu.device import Device


class HostBlocks:
    """Blocks for each of the device's caches, in one piece of memory of the host."""

    def __init__(self, num_blocks: int, device_caches: Sequence[Tensor], device: Device) -> None:
        """Reserve ``num_blocks`` blocks of the kind that ``device_caches`` are made of.

        Raises:
            ModelError: that much memory cannot be pinned.
        """
        shape = (num_blocks, *device_caches[0].shape[1:])
        num_bytes = torch.Size(shape).numel() * device_caches[0].element_size()
        memory = _pages(len(device_caches) * num_bytes)
        try:
            device.pin(memory.data_ptr(), memory.nbytes)
        except RuntimeError as error:
            raise ModelError(
                f"{memory.nbytes:,} bytes of the host's memory cannot be pinned for KV blocks "
                f"({error}); lower kv_host_memory"
            ) from error
        weakref.finalize(self, _give_back, memory, device).atexit = False
        self.caches = [
            part.view(cache.dtype).view(shape)
            for part, cache in zip(memory.view(len(device_caches), -1), device_caches, strict=True)
        ]
        """K and V of each layer, ``[blocks, kv_heads, block_size, head_dim]`` each."""


def num_host_blocks(memory_bytes: int, bytes_per_block: int) -> int:
    """Return how many blocks ``memory_bytes`` hold; 0 stands for no second tier.

    Raises:
        ModelError: there is memory, but not for one block.
    """
    if 0 < memory_bytes < bytes_per_block:
        raise ModelError(
            f"kv_host_memory is {memory_bytes:,} bytes, but one block takes {bytes_per_block:,}; "
            "raise it, or leave it out"
        )
    return memory_bytes // bytes_per_block


def _pages(num_bytes: int) -> Tensor:
    """Bytes on pages of their own, no more of them than needed.

    What torch pins itself it rounds up to a power of two.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def _give_back(memory: Tensor, device: Device) -> None:
    device.unpin(memory.data_ptr())
