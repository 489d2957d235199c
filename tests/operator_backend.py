"""Attention by the CUDA operators, for the table of steps: on the emulator or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chairlift.cuda_kernels import ops
from chairlift.cuda_kernels.catalogue import PREFILL_ROWS
from chairlift.cuda_kernels.work import cut_decode_work, cut_prefill_work


@dataclass
class OperatorBackend:
    """Cache write, then attention by either kernel, with everything where ``move`` puts it."""

    move: Callable[[torch.Tensor], torch.Tensor]
    chunk_tokens: int
    prefill: bool

    def prepare(self, plan):
        return plan

    def forward(self, qkv, k_cache, v_cache, plan, params):
        def there(array):
            return None if array is None else self.move(torch.as_tensor(array))

        cos_sin = params.cos_sin or (None, None)
        caches = there(k_cache), there(v_cache)
        q = ops.kv_cache_write(
            there(qkv),
            *caches,
            there(plan.slot_mapping.copy()),
            there(plan.positions.copy()),
            *map(there, cos_sin),
            there(params.q_norm),
            there(params.k_norm),
            params.norm_eps,
            params.k_scale,
            params.v_scale,
        )
        out = there(torch.full(q.shape, float("nan"), dtype=q.dtype))
        arrays = (
            plan.query_start_loc,
            plan.seq_lens,
            plan.block_table_offsets,
            plan.block_ids,
        )
        sequences = [there(array.copy()) for array in arrays]
        scales = (params.k_scale, params.v_scale)
        scores = (params.scale, params.soft_cap, params.window, *scales)
        if self.prefill:
            items = cut_prefill_work(
                plan.query_start_loc,
                plan.seq_lens,
                group=params.num_heads // params.num_kv_heads,
                tile_rows=PREFILL_ROWS,
            )
            ops.paged_attention_prefill(out, q, *caches, *sequences, there(items), *scores)
        else:
            work = cut_decode_work(
                plan.query_start_loc,
                plan.seq_lens,
                window=params.window,
                chunk_tokens=self.chunk_tokens,
            )
            limits = (work.num_partials, self.chunk_tokens, work.max_query_tokens)
            lists = there(work.items), there(work.splits)
            ops.paged_attention_decode(out, q, *caches, *sequences, *lists, *limits, *scores)
        for cache, moved in zip((k_cache, v_cache), caches, strict=True):
            cache.copy_(moved)
        return out.cpu().clone()
