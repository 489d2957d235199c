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
_SCALES = "float k_scale=1.0, float v_scale=1.0"
_SCORES = f"float scale, float soft_cap, int window, {_SCALES}"


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
    "Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, float norm_eps, "
    f"{_SCALES}) -> Tensor",
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
    "(Tensor addresses, Tensor copies, Tensor locations, Tensor(a!)[] caches, "
    "Tensor(b!)[] host_caches) -> ()",
    writes=("caches", "host_caches"),
)

sampling_reset = _operator(
    "sampling_reset",
    "(Tensor(a!) row_params, Tensor(b!) row_counts, Tensor(c!) row_bias_ids, "
    "Tensor(d!) row_bias_values, Tensor(e!) row_suppressed_ids, Tensor rows, Tensor floats, "
    "Tensor ints, Tensor id_ranges, Tensor bias_ranges, Tensor suppressed_ranges, Tensor ids, "
    "Tensor bias_ids, Tensor bias_values, Tensor suppressed_ids) -> ()",
    writes=(
        "row_params",
        "row_counts",
        "row_bias_ids",
        "row_bias_values",
        "row_suppressed_ids",
    ),
)
logit_edits = _operator(
    "logit_edits",
    "(Tensor(a!) edited, Tensor logits, Tensor sample_rows, Tensor output_indices, "
    "Tensor row_params, Tensor row_counts, Tensor row_bias_ids, Tensor row_bias_values, "
    "Tensor row_suppressed_ids) -> ()",
    writes=("edited",),
)
sample = _operator(
    "sample",
    "(Tensor(a!) token_ids, Tensor(b!) statuses, Tensor(c!) last_tokens, Tensor(d!) row_counts, "
    "Tensor logits, Tensor? edited, Tensor sample_rows, Tensor output_indices, Tensor row_params) "
    "-> ()",
    writes=("token_ids", "statuses", "last_tokens", "row_counts"),
)
logprobs = _operator(
    "logprobs",
    "(Tensor(a!) out_ids, Tensor(b!) out_values, Tensor(c!) statuses, Tensor logits, "
    "Tensor token_ids, Tensor num_best) -> ()",
    writes=("out_ids", "out_values", "statuses"),
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
        sampling_reset,
        logit_edits,
        sample,
        logprobs,
    )
}
"""By name, which is that of the method too."""
