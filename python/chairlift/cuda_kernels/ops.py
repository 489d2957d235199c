"""The kernels as torch operators, ``torch.ops.chairlift``: traced by torch, captured in graphs.

Each operator is the method of :class:`~chairlift.cuda_kernels.kernels.Kernels` of its name, which
explains the arguments. The first argument is a tensor, and on its device the kernel runs: on CUDA
as registered here; the tests register the emulator for tensors on the CPU. Where torch traces,
without memory, the method of kernels without a launcher checks and makes results of their shapes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

from chairlift.cuda_kernels.kernels import Kernels
from chairlift.cuda_kernels.launcher import launcher_of

_SEQUENCES = "Tensor query_start_loc, Tensor seq_lens, Tensor block_table_offsets, Tensor block_ids"
_SCORES = "float scale, float soft_cap, int window"


@cache
def kernels_on(device: torch.device) -> Kernels:
    """Return the kernels of a CUDA device; made once."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return Kernels(launcher_of(index))


_TRACED = Kernels(None)


def _operator(name: str, schema: str, *, writes: tuple[str, ...] = ()) -> CustomOpDef:
    def run(first: torch.Tensor, *others: object) -> object:
        return getattr(kernels_on(first.device), name)(first, *others)

    operator = custom_op(
        f"chairlift::{name}", run, mutates_args=writes, device_types="cuda", schema=schema
    )
    operator.register_fake(getattr(_TRACED, name))
    return operator


rms_norm = _operator(
    "rms_norm",
    "(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> Tensor",
    writes=("residual",),
)
silu_mul = _operator("silu_mul", "(Tensor x) -> Tensor")
kv_cache_write = _operator(
    "kv_cache_write",
    "(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor positions, "
    "Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, float norm_eps) -> Tensor",
    writes=("k_cache", "v_cache"),
)
paged_attention_decode = _operator(
    "paged_attention_decode",
    f"(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, {_SEQUENCES}, Tensor items, "
    f"Tensor splits, int num_partials, int chunk_tokens, int max_query_tokens, {_SCORES}) -> ()",
    writes=("out",),
)
paged_attention_prefill = _operator(
    "paged_attention_prefill",
    f"(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, {_SEQUENCES}, Tensor items, "
    f"{_SCORES}) -> ()",
    writes=("out",),
)
block_copy = _operator(
    "block_copy",
    "(Tensor addresses, Tensor copies, Tensor(a!)[] caches) -> ()",
    writes=("caches",),
)

OPERATORS = {
    operator._name: operator
    for operator in (
        rms_norm,
        silu_mul,
        kv_cache_write,
        paged_attention_decode,
        paged_attention_prefill,
        block_copy,
    )
}
"""By name, which is that of the method too."""
