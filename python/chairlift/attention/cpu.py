"""The Rust kernel as an attention backend: arguments are checked here, then addresses go down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from chairlift import _core
from chairlift.attention.interface import (
    AttentionError,
    AttentionMetadata,
    AttentionParams,
)
from chairlift.attention.threads import share_openmp_pool

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.executor import StepPlan


_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
"""Types that the kernel knows. The last two are there to agree with the CUDA kernels: float16 over
caches of its own or of 8 bits, bfloat16 over those of 8 bits. No model is run in them on a CPU."""
_KNOWN = ", ".join(_NAMES.values())


@dataclass(frozen=True, slots=True)
class CpuAttentionMetadata(AttentionMetadata):
    """The step's arrays, checked and copied into Rust once for all layers."""

    batch: _core.AttentionBatch
    threads: int


class CpuBackend:
    """Paged attention by the Rust kernel (crate chairlift-kernels)."""

    def __init__(self) -> None:
        """Let the kernels share PyTorch's threads."""
        share_openmp_pool()
        self._layers: WeakKeyDictionary[AttentionParams, _core.AttentionLayer] = WeakKeyDictionary()

    def prepare(self, plan: StepPlan) -> AttentionMetadata:
        """Check and copy the plan's arrays; raises :class:`AttentionError` on a contradiction."""
        try:
            batch = _core.AttentionBatch(
                plan.query_start_loc,
                plan.seq_lens,
                plan.positions,
                plan.slot_mapping,
                plan.block_table_offsets,
                plan.block_ids,
            )
        except ValueError as error:
            raise AttentionError(str(error)) from None
        return CpuAttentionMetadata(
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            block_table_offsets=plan.block_table_offsets,
            block_ids=plan.block_ids,
            batch=batch,
            threads=torch.get_num_threads(),
        )

    def forward(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> Tensor:
        """See :class:`chairlift.attention.AttentionBackend`."""
        if not isinstance(metadata, CpuAttentionMetadata):
            raise AttentionError("the metadata was prepared by another attention backend")
        layer = self._layers.get(params)
        if layer is None:
            layer = self._layers[params] = _make_layer(params)
        _check(qkv, k_cache, v_cache, metadata.batch.num_tokens, params)
        out = qkv.new_empty((qkv.shape[0], params.num_heads * params.head_dim))
        try:
            _core.attention_forward(
                metadata.batch,
                layer,
                (qkv.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
                (_NAMES[qkv.dtype], _NAMES[k_cache.dtype]),
                k_cache.shape[0],
                k_cache.shape[2],
                metadata.threads,
            )
        except ValueError as error:
            raise AttentionError(str(error)) from None
        return out


def _make_layer(params: AttentionParams) -> _core.AttentionLayer:
    """Take down a layer's sizes and addresses; ``params`` keeps the tensors alive."""
    rope = None
    if params.cos_sin is not None:
        cos, sin = params.cos_sin
        _check_on_cpu("the rotary tables", cos, sin)
        rope = (cos.data_ptr(), sin.data_ptr(), cos.shape[0], cos.shape[1])
    norms: list[tuple[int, str] | None] = []
    for weight in (params.q_norm, params.k_norm):
        if weight is None:
            norms.append(None)
        else:
            _check_on_cpu("a norm weight", weight)
            norms.append((weight.data_ptr(), _NAMES[weight.dtype]))
    return _core.AttentionLayer(
        params.num_heads,
        params.num_kv_heads,
        params.head_dim,
        params.scale,
        rope,
        norms[0],
        norms[1],
        params.norm_eps,
        params.window,
        params.soft_cap,
        (params.k_scale, params.v_scale),
    )


def _check_on_cpu(what: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise AttentionError(
                f"{what}: on device {tensor.device}, the kernel needs it on the cpu"
            )


def _check(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, num_tokens: int, params: AttentionParams
) -> None:
    """Raise :class:`AttentionError` unless the tensors are what the kernel assumes."""
    _check_on_cpu("attention", qkv, k_cache, v_cache)
    if qkv.dtype not in _NAMES or not qkv.is_contiguous():
        raise AttentionError(f"qkv must be contiguous, of {_KNOWN}, not {qkv.dtype}")
    if qkv.shape != (num_tokens, params.qkv_width):
        raise AttentionError(
            f"qkv has shape {tuple(qkv.shape)}; this step and layer need "
            f"[{num_tokens}, {params.qkv_width}]"
        )
    if k_cache.dtype not in _NAMES or v_cache.dtype != k_cache.dtype:
        raise AttentionError(
            f"both caches must be of one of {_KNOWN}, not {k_cache.dtype} and {v_cache.dtype}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise AttentionError("the caches must be contiguous")
    shape = k_cache.shape
    if len(shape) != 4 or shape[1] != params.num_kv_heads or shape[3] != params.head_dim:
        raise AttentionError(
            f"k_cache has shape {tuple(shape)}, not "
            f"[num_blocks, {params.num_kv_heads}, block_size, {params.head_dim}]"
        )
    if v_cache.shape != shape:
        raise AttentionError(f"v_cache {tuple(v_cache.shape)} differs from k_cache {tuple(shape)}")
