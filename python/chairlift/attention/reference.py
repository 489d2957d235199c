"""Paged attention in plain PyTorch: the specification that every kernel is tested against.

Simple, slow, on any device; all arithmetic in float32, results rounded once to the types of the
output and of the caches. Caches of float8_e4m3fn hold keys and values divided by their scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chairlift.attention.interface import AttentionMetadata, AttentionParams

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.executor import StepPlan


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def apply_rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[T, H, D]`` float32 by its positions (Su et al. 2021; neox pairing).

    Dimension ``j`` of the first half of the rotary part is paired with ``j`` of its second half;
    dimensions beyond ``rotary_dim`` pass unchanged.
    """
    half = cos.shape[1]
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]  # [T, 1, rotary_dim / 2]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


def write_kv(x: Tensor, cache: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Store keys or values ``[T, Hkv, D]`` at their slots of a cache ``[blocks, Hkv, size, D]``."""
    if cache.dtype == torch.float8_e4m3fn:
        most = torch.finfo(cache.dtype).max
        x = (x / scale).clamp(-most, most)  # NaN stays
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = x.to(cache.dtype)


def gather_kv(cache: Tensor, block_ids: Tensor, seq_len: int, scale: float = 1.0) -> Tensor:
    """Collect one sequence's keys or values from its blocks: ``[seq_len, Hkv, D]`` float32."""
    blocks = cache[block_ids].transpose(1, 2)  # [blocks, size, Hkv, D]
    x = blocks.reshape(-1, *blocks.shape[2:])[:seq_len].float()
    return x * scale if cache.dtype == torch.float8_e4m3fn else x


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention of the last ``q`` positions of a sequence.

    ``q`` ``[q, Hq, D]``, ``k`` and ``v`` ``[s, Hkv, D]``, all float32; query ``i`` sees positions
    ``<= s - q + i``, the last ``window`` of them if there is one. Query head ``h`` reads key head
    ``h // (Hq / Hkv)``.
    """
    num_queries, seq_len = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    last_visible = torch.arange(seq_len - num_queries, seq_len, device=q.device)
    behind = last_visible[:, None] - torch.arange(seq_len, device=q.device)[None, :]
    hidden = behind < 0
    if window:
        hidden |= behind >= window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class ReferenceBackend:
    """The reference as an attention backend."""

    def prepare(self, plan: StepPlan) -> AttentionMetadata:
        """Take the plan's arrays as they are."""
        return AttentionMetadata.from_plan(plan)

    def forward(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> Tensor:
        """See :class:`chairlift.attention.AttentionBackend`."""
        q = self.write(qkv, k_cache, v_cache, metadata, params)
        out = self.attend(q, k_cache, v_cache, metadata, params)
        return out.view(qkv.shape[0], -1).to(qkv.dtype)

    def write(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> Tensor:
        """Write the step's keys and values; returns the queries ``[T, Hq, D]`` float32."""
        heads, kv_heads, dim = params.num_heads, params.num_kv_heads, params.head_dim
        x = qkv.float().view(qkv.shape[0], -1, dim)  # [T, heads, D]
        q, k, v = torch.split(x, [heads, kv_heads, kv_heads], dim=1)
        if params.q_norm is not None:
            q = rms_norm(q, params.q_norm, params.norm_eps)
        if params.k_norm is not None:
            k = rms_norm(k, params.k_norm, params.norm_eps)
        if params.cos_sin is not None:
            positions = torch.tensor(metadata.positions, dtype=torch.int64, device=qkv.device)
            q, k = (apply_rope(t, positions, *params.cos_sin) for t in (q, k))
        slots = torch.tensor(metadata.slot_mapping, device=qkv.device)
        write_kv(k, k_cache, slots, params.k_scale)
        write_kv(v, v_cache, slots, params.v_scale)
        return q

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> Tensor:
        """Attend queries to what the caches hold; ``[T, Hq, D]`` float32 both ways."""
        starts, offsets = metadata.query_start_loc, metadata.block_table_offsets
        out = torch.empty_like(q)
        for i, seq_len in enumerate(metadata.seq_lens.tolist()):
            ids = metadata.block_ids[offsets[i] : offsets[i + 1]]
            table = torch.tensor(ids, dtype=torch.int64, device=q.device)
            keys = gather_kv(k_cache, table, seq_len, params.k_scale)
            values = gather_kv(v_cache, table, seq_len, params.v_scale)
            tokens = slice(int(starts[i]), int(starts[i + 1]))
            out[tokens] = attend(
                q[tokens],
                keys,
                values,
                params.scale,
                window=params.window,
                soft_cap=params.soft_cap,
            )
        return out
