"""Attention on the device: a step's work lists, and one layer by the CUDA kernels.

Sequences with one query token go to the decode kernel, prefill chunks to the prefill kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.cuda_kernels import ops
from chairlift.cuda_kernels.arguments import TYPE_NAMES
from chairlift.cuda_kernels.catalogue import (
    PREFILL_ROWS,
    decode_kernel,
    decode_rows,
    kv_cache_write_kernel,
    prefill_kernel,
)
from chairlift.cuda_kernels.kernels import CACHE_NAMES
from chairlift.cuda_kernels.work import (
    CHUNK_TOKENS,
    DecodeWork,
    cut_decode_work,
    cut_prefill_work,
)

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.attention import AttentionParams
    from chairlift.executor import Int32Array, StepPlan
    from chairlift.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's attention is cut into, on the host."""

    decode: tuple[DecodeWork, ...]
    """One for each launch of the decode kernel."""
    prefill: Int32Array | None  # [items, 2]
    """Tiles of the prefill kernel."""


@dataclass(frozen=True, slots=True)
class DecodeLists:
    """The lists of one launch of the decode kernel, on the device."""

    items: Tensor  # [items, 3]
    splits: Tensor  # [splits, 3]
    num_partials: int
    max_query_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Where the tokens of one step stand, on the device; the arrays are those of the plan."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] int64; below zero: padding
    query_start_loc: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    block_table_offsets: Tensor  # [N + 1]
    block_ids: Tensor  # [B]
    decode: tuple[DecodeLists, ...]
    prefill: Tensor | None  # [items, 2]


def kernels_of(config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[str]:
    """Name the kernels that a model's steps launch, to be compiled before the first one."""
    type_name, cache_name = TYPE_NAMES[dtype], CACHE_NAMES[cache_dtype]
    group = config.num_heads // config.num_kv_heads
    names = (
        "paged_attention_combine",
        "rms_norm",
        "silu_mul",
        "logit_edits",
        "sample",
        "logprobs",
    )
    return [
        kv_cache_write_kernel(type_name, cache_name),
        decode_kernel(type_name, config.head_dim, decode_rows(group, type_name), cache_name),
        prefill_kernel(type_name, config.head_dim, cache_name),
        *(f"{name}<{type_name}>" for name in names),
        "sampling_reset",
        "block_copy",
    ]


def cut_step(plan: StepPlan, *, group: int, chunk_tokens: int = CHUNK_TOKENS) -> StepWork:
    """Cut a plan's attention for heads in groups of ``group`` that share keys."""
    decodes = plan.num_decodes
    sizes = (plan.query_start_loc[: decodes + 1], plan.seq_lens[:decodes])
    decode = [cut_decode_work(*sizes, chunk_tokens=chunk_tokens)] if decodes else []
    prefill = None
    if plan.num_prefills:
        sizes = (plan.query_start_loc[decodes:], plan.seq_lens[decodes:])
        prefill = cut_prefill_work(*sizes, group=group, tile_rows=PREFILL_ROWS)
        prefill[:, 0] += decodes
    return StepWork(tuple(decode), prefill)


def padded(array: Int32Array, length: int) -> Int32Array:  # [length, columns]
    """Lengthen a list by entries of -1, which the kernels pass over."""
    missing = length - len(array)
    if not missing:
        return array
    padding = np.full((missing, array.shape[1]), -1, dtype=np.int32)
    return np.concatenate((array, padding))


class CudaBackend:
    """Paged attention by the CUDA kernels, as a decoder calls it."""

    def __init__(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        """Cut keys into chunks of that many, as :func:`cut_step` does."""
        self._chunk_tokens = chunk_tokens

    def forward(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DeviceStep,
        params: AttentionParams,
    ) -> Tensor:
        """See :class:`chairlift.attention.AttentionBackend`."""
        step = metadata
        cos, sin = (None, None) if params.cos_sin is None else params.cos_sin
        q: Tensor = ops.kv_cache_write(
            qkv,
            k_cache,
            v_cache,
            step.slots,
            step.positions,
            cos,
            sin,
            params.q_norm,
            params.k_norm,
            params.norm_eps,
            params.k_scale,
            params.v_scale,
        )
        out = torch.empty_like(q)
        arrays = (
            out,
            q,
            k_cache,
            v_cache,
            step.query_start_loc,
            step.seq_lens,
            step.block_table_offsets,
            step.block_ids,
        )
        scales = (params.k_scale, params.v_scale)
        scores = (params.scale, params.soft_cap, params.window, *scales)
        for lists in step.decode:
            ops.paged_attention_decode(
                *arrays,
                lists.items,
                lists.splits,
                lists.num_partials,
                self._chunk_tokens,
                lists.max_query_tokens,
                *scores,
            )
        if step.prefill is not None:
            ops.paged_attention_prefill(*arrays, step.prefill, *scores)
        return out


class CudaOps:
    """What stands between the linear layers of a decoder, by the CUDA kernels."""

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See :func:`chairlift.attention.ops.add_rms_norm`."""
        out: Tensor = ops.rms_norm(x, residual, weight, eps)
        return out, x if residual is None else residual

    @staticmethod
    def silu_and_mul(x: Tensor) -> Tensor:
        """See :func:`chairlift.attention.ops.silu_and_mul`."""
        out: Tensor = ops.silu_mul(x)
        return out
