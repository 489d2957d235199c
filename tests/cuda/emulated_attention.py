"""The CUDA attention kernels as an attention backend, on the emulated device."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from emulated_device import SCHEDULES, EmulatedDevice, KernelLibrary, Schedule, library_of

from chairlift.attention import AttentionMetadata, AttentionParams
from chairlift.cuda_kernels.catalogue import (
    DECODE_THREADS,
    FP8,
    HEAD_DIMS,
    PREFILL_ROWS,
    PREFILL_THREADS,
    decode_kernel,
    decode_row_counts,
    decode_rows,
    decode_shared_bytes,
    kv_cache_write_kernel,
    prefill_kernel,
    prefill_shared_bytes,
)
from chairlift.cuda_kernels.params import (
    KvCacheWriteParams,
    PagedAttentionCombineParams,
    PagedAttentionDecodeParams,
    PagedAttentionPrefillParams,
    division_by,
)
from chairlift.cuda_kernels.work import DecodeWork, cut_decode_work, cut_prefill_work

if TYPE_CHECKING:
    from chairlift.executor import StepPlan

TYPE_NAMES = {
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float8_e4m3fn: FP8,
}
WRITE_WARPS = 4


def write_library(dtype: torch.dtype, cache: torch.dtype | None = None) -> KernelLibrary:
    kernel = kv_cache_write_kernel(TYPE_NAMES[dtype], TYPE_NAMES[cache or dtype])
    return library_of("kv_cache_write", (kernel,))


def decode_library(dtype: torch.dtype, cache: torch.dtype | None = None) -> KernelLibrary:
    names = TYPE_NAMES[dtype], TYPE_NAMES[cache or dtype]
    kernels = [
        decode_kernel(names[0], dim, rows, names[1])
        for dim in HEAD_DIMS
        for rows in decode_row_counts(names[0])
    ]
    return library_of("paged_attention_decode", (*kernels, f"paged_attention_combine<{names[0]}>"))


def prefill_library(dtype: torch.dtype, cache: torch.dtype | None = None) -> KernelLibrary:
    names = TYPE_NAMES[dtype], TYPE_NAMES[cache or dtype]
    kernels = [prefill_kernel(names[0], dim, names[1]) for dim in HEAD_DIMS]
    return library_of("paged_attention_prefill", tuple(kernels))


@dataclass
class EmulatedBackend:
    """Cache write, then attention by either kernel, under one schedule."""

    schedule: Schedule = SCHEDULES[0]
    chunk_tokens: int = 64
    prefill: bool = False
    """Whether the prefill kernel attends."""
    work: DecodeWork | None = field(default=None, init=False)
    """How the last call was cut."""

    def prepare(self, plan: StepPlan) -> AttentionMetadata:
        return AttentionMetadata.from_plan(plan)

    def forward(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        q = self.write(qkv, k_cache, v_cache, metadata, params)
        attend = self.attend_prefill if self.prefill else self.attend_decode
        return attend(q, k_cache, v_cache, metadata, params)

    def write(self, qkv, k_cache, v_cache, metadata, params) -> torch.Tensor:
        """Write the caches in place and return the rotated queries."""
        tokens, heads = qkv.shape[0], params.num_heads + 2 * params.num_kv_heads
        q = torch.full((tokens, params.num_heads * params.head_dim), float("nan"), dtype=qkv.dtype)
        library = write_library(qkv.dtype, k_cache.dtype)
        with EmulatedDevice(library, self.schedule) as device:
            addresses = {
                name: device.upload(name, tensor)
                for name, tensor in (
                    ("qkv", qkv),
                    ("q_out", q),
                    ("k_cache", k_cache),
                    ("v_cache", v_cache),
                    ("slots", torch.tensor(metadata.slot_mapping)),
                    ("positions", torch.tensor(metadata.positions)),
                    ("q_norm", params.q_norm),
                    ("k_norm", params.k_norm),
                )
                if tensor is not None
            }
            if params.cos_sin is not None:
                for name, table in zip(("cos", "sin"), params.cos_sin, strict=True):
                    addresses[name] = device.upload(name, table)
            device.launch(
                *library.kernels,
                (tokens, -(-heads // WRITE_WARPS), 1),
                32 * WRITE_WARPS,
                KvCacheWriteParams(
                    **{name: c_void_p(address) for name, address in addresses.items()},
                    qkv_stride=qkv.stride(0),
                    heads=params.num_heads,
                    kv_heads=params.num_kv_heads,
                    head_dim=params.head_dim,
                    rotary_half=params.cos_sin[0].shape[1] if params.cos_sin else 0,
                    block_size=k_cache.shape[2],
                    norm_eps=params.norm_eps,
                    k_scale=params.k_scale,
                    v_scale=params.v_scale,
                ),
            )
            for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
                cache.copy_(device.download(addresses[name], cache))
            return device.download(addresses["q_out"], q)

    def attend_decode(self, q, k_cache, v_cache, metadata, params) -> torch.Tensor:
        """Attention over what the caches hold, cut along the keys and combined."""
        work = cut_decode_work(
            metadata.query_start_loc,
            metadata.seq_lens,
            window=params.window,
            chunk_tokens=self.chunk_tokens,
        )
        self.work = work
        group = params.num_heads // params.num_kv_heads
        max_rows = work.max_query_tokens * group
        shape = (work.num_partials, params.num_kv_heads, max_rows)
        # Lists are padded, as they are where a captured graph has a grid larger than the step.
        padding = torch.full((1, 3), -1, dtype=torch.int32)
        items, splits = (torch.cat((torch.tensor(a), padding)) for a in (work.items, work.splits))
        out = torch.full_like(q, float("nan"))
        library = decode_library(q.dtype, k_cache.dtype)
        with EmulatedDevice(library, self.schedule) as device:
            out_address = device.upload("out", out)
            starts = device.upload("query_start_loc", torch.tensor(metadata.query_start_loc))
            shared = {
                "out": out_address,
                "query_start_loc": starts,
                "partial_out": device.upload(
                    "partial_out", torch.full((*shape, params.head_dim), float("nan"))
                ),
                "partial_state": device.upload(
                    "partial_state", torch.full((*shape, 2), float("nan"))
                ),
                "kv_heads": params.num_kv_heads,
                "group": group,
                "max_rows": max_rows,
            }
            type_name, cache_name = TYPE_NAMES[q.dtype], TYPE_NAMES[k_cache.dtype]
            rows = decode_rows(max_rows, type_name)
            device.launch(
                decode_kernel(type_name, params.head_dim, rows, cache_name),
                (len(items), params.num_kv_heads, -(-max_rows // rows)),
                DECODE_THREADS,
                PagedAttentionDecodeParams(
                    **shared,
                    **_inputs(device, q, (k_cache, v_cache), metadata, params),
                    items=device.upload("items", items),
                    chunk_tokens=self.chunk_tokens,
                ),
                decode_shared_bytes(type_name, params.head_dim, rows, cache_name),
            )
            device.launch(
                f"paged_attention_combine<{type_name}>",
                (len(splits), params.num_kv_heads, max_rows),
                DECODE_THREADS,
                PagedAttentionCombineParams(
                    **shared,
                    splits=device.upload("splits", splits),
                    head_dim=params.head_dim,
                ),
            )
            return device.download(out_address, out)

    def attend_prefill(self, q, k_cache, v_cache, metadata, params) -> torch.Tensor:
        """Attention over what the caches hold, by tiles of rows on tensor cores."""
        group = params.num_heads // params.num_kv_heads
        items = torch.tensor(
            cut_prefill_work(
                metadata.query_start_loc, metadata.seq_lens, group=group, tile_rows=PREFILL_ROWS
            )
        )
        items = torch.cat((items, torch.full((1, 2), -1, dtype=torch.int32)))
        out = torch.full_like(q, float("nan"))
        type_name, cache_name = TYPE_NAMES[q.dtype], TYPE_NAMES[k_cache.dtype]
        library = prefill_library(q.dtype, k_cache.dtype)
        with EmulatedDevice(library, self.schedule) as device:
            address = device.upload("out", out)
            starts = device.upload("query_start_loc", torch.tensor(metadata.query_start_loc))
            device.launch(
                prefill_kernel(type_name, params.head_dim, cache_name),
                (len(items), params.num_kv_heads, 1),
                PREFILL_THREADS,
                PagedAttentionPrefillParams(
                    **_inputs(device, q, (k_cache, v_cache), metadata, params),
                    out=address,
                    query_start_loc=starts,
                    items=device.upload("items", items),
                    kv_heads=params.num_kv_heads,
                    group=group,
                ),
                prefill_shared_bytes(type_name, params.head_dim, cache_name),
            )
            return device.download(address, out)


def _inputs(device, q, caches, metadata, params) -> dict[str, object]:
    """Fields that both attention kernels read."""
    k_cache, v_cache = caches
    magic, shift = division_by(k_cache.shape[2])
    return {
        "q": device.upload("q", q),
        "k_cache": device.upload("k_cache", k_cache),
        "v_cache": device.upload("v_cache", v_cache),
        "seq_lens": device.upload("seq_lens", torch.tensor(metadata.seq_lens)),
        "block_table_offsets": device.upload(
            "block_table_offsets", torch.tensor(metadata.block_table_offsets)
        ),
        "block_ids": device.upload("block_ids", torch.tensor(metadata.block_ids)),
        "scale": params.scale,
        "soft_cap": params.soft_cap,
        "window": params.window,
        "block_size": k_cache.shape[2],
        "block_magic": magic,
        "block_shift": shift,
        "k_scale": params.k_scale,
        "v_scale": params.v_scale,
    }
