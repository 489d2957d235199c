"""How much of a device's memory KV blocks may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.cuda_kernels.work import CHUNK_TOKENS
from chairlift.errors import ModelError

if TYPE_CHECKING:
    from chairlift.gpu.device import DeviceMemory
    from chairlift.models.config import ModelConfig


def kv_memory(memory: DeviceMemory, utilization: float, step_bytes: int) -> int:
    """Return the bytes that are left for KV blocks.

    Args:
        memory: of the device, with the model loaded.
        utilization: share of the device that may be used, by everybody together.
        step_bytes: what the largest step takes at its peak beside weights and blocks.

    Raises:
        ModelError: nothing is left.
    """
    taken = memory.total - memory.free
    left = int(memory.total * utilization) - taken - step_bytes
    if left <= 0:
        raise ModelError(
            f"no device memory is left for the KV cache: of {_mib(memory.total)}, "
            f"gpu_memory_utilization {utilization} allows {_mib(memory.total * utilization)}; the "
            f"model and others have {_mib(taken)} and a step takes {_mib(step_bytes)}; raise it, "
            "or lower max_num_batched_tokens or max_num_seqs"
        )
    return left


def partial_bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Return the bytes that a block's share of a chunk adds to the partial results of decoding.

    They grow with the context, not with the step that was measured, so the pool pays for them.
    """
    per_chunk = 4 * config.num_heads * (config.head_dim + 2)
    return -(-per_chunk * block_size // CHUNK_TOKENS)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
