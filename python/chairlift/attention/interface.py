"""What the model code and the attention backends agree on.

A model calls :meth:`AttentionBackend.prepare` once per step and :meth:`AttentionBackend.forward`
once per layer. One call does everything between the fused qkv projection and the output projection:
the optional norms of q and k, the rotary embedding, the write of K and V into the paged cache, and
attention over that cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.executor import Int32Array, Int64Array, StepPlan

MODEL_DTYPES = (torch.float32, torch.bfloat16)
"""Types that a model is run in on the CPU: its activations, norm weights and caches."""


class AttentionError(ChairliftError, ValueError):
    """An argument of an attention call does not fit: its type, its shape or its capacity."""

    code = "invalid_attention"


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """What is fixed for one attention layer. Checked once, here."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, normally ``head_dim ** -0.5``."""
    cos_sin: tuple[Tensor, Tensor] | None
    """Rotary tables (cos, sin), float32 ``[max_position, rotary_dim / 2]`` each; the halves of the
    first ``rotary_dim`` dimensions turn against each other (neox style). None: no rotation."""
    q_norm: Tensor | None = None
    """[head_dim] weight of an RMS norm over each query head, before the rotation (Qwen3)."""
    k_norm: Tensor | None = None
    """[head_dim] the same for the key heads."""
    norm_eps: float = 1e-6
    window: int = 0
    """Keys that a query sees, up to its own; 0: all of them."""
    soft_cap: float = 0.0
    """Scores become ``cap * tanh(score / cap)``; 0: they stay (Gemma 2)."""
    k_scale: float = 1.0
    """Keys are divided by it where the cache is float8_e4m3fn."""
    v_scale: float = 1.0
    """Values are."""

    def __post_init__(self) -> None:
        """Raise :class:`AttentionError` for what no backend could run."""
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise AttentionError(
                f"{self.num_heads} query heads cannot be shared by {self.num_kv_heads} kv heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim < 8 or self.head_dim % 8:
            raise AttentionError(f"head_dim {self.head_dim} is not a multiple of 8")
        if self.window < 0 or self.soft_cap < 0:
            raise AttentionError(
                f"window {self.window} and soft_cap {self.soft_cap} must not be negative"
            )
        if self.cos_sin is not None:
            _check_tables(*self.cos_sin, self.head_dim)
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is None:
                continue
            if weight.dtype not in (*MODEL_DTYPES, torch.float16) or not weight.is_contiguous():
                raise AttentionError(f"{name} must be contiguous float32, float16 or bfloat16")
            if tuple(weight.shape) != (self.head_dim,):
                raise AttentionError(
                    f"{name} has shape {tuple(weight.shape)}, not [{self.head_dim}]"
                )

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: all query heads, all key heads, all value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def _check_tables(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.dim() != 2 or not table.is_contiguous():
            raise AttentionError(
                f"the {name} table must be contiguous float32 [max_position, rotary_dim / 2]"
            )
    if cos.shape != sin.shape:
        raise AttentionError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    if not 0 < 2 * cos.shape[1] <= head_dim:
        raise AttentionError(f"rotary_dim {2 * cos.shape[1]} is not within head_dim {head_dim}")


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step stand; the arrays are the plan's own (see :class:`StepPlan`)."""

    query_start_loc: Int32Array  # [N + 1]
    seq_lens: Int32Array  # [N]
    positions: Int32Array  # [T]
    slot_mapping: Int64Array  # [T]
    block_table_offsets: Int32Array  # [N + 1]
    block_ids: Int32Array  # [B]

    @classmethod
    def from_plan(cls, plan: StepPlan) -> AttentionMetadata:
        """Take from a plan what attention needs."""
        return cls(
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            block_table_offsets=plan.block_table_offsets,
            block_ids=plan.block_ids,
        )


Metadata_contra = TypeVar("Metadata_contra", contravariant=True)
"""Where the tokens of a step stand, in whatever form the attention takes it."""


class LayerAttention(Protocol[Metadata_contra]):
    """What a decoder needs of attention."""

    def forward(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: Metadata_contra,
        params: AttentionParams,
    ) -> Tensor:
        """Run one layer's attention; ``qkv`` ``[T, (Hq + 2 * Hkv) * D]`` -> ``[T, Hq * D]``.

        ``k_cache`` and ``v_cache`` are ``[num_blocks, num_kv_heads, block_size, head_dim]``; the K
        and V of the step's tokens are written to their slots first. Query token ``i`` of a sequence
        with ``q`` query tokens and context length ``s`` attends to positions ``<= s - q + i``.

        Raises :class:`AttentionError` when an argument does not fit.
        """


class AttentionBackend(LayerAttention[AttentionMetadata], Protocol):
    """One implementation of paged attention on the CPU."""

    def prepare(self, plan: StepPlan) -> AttentionMetadata:
        """Build what every layer of the step shares. Valid as long as the plan's arrays are."""
