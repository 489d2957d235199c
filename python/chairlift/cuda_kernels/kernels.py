"""Calls of the kernels: arguments checked, results made, the struct filled in, launched.

A kernel is a method of :class:`Kernels`, which launches wherever its launcher does: on a device, or
in the tests on the emulator. Without a launcher it only checks and makes the results, for which
there need be no memory behind the tensors: so torch traces. ``cuda/*.cu`` explain what the kernels
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from chairlift.cuda_kernels.arguments import FLOATS, TYPE_NAMES, VECTOR_BYTES, Arguments
from chairlift.cuda_kernels.catalogue import (
    DECODE_THREADS,
    FP8,
    HALF_TYPES,
    HEAD_DIMS,
    PREFILL_THREADS,
    decode_kernel,
    decode_rows,
    decode_shared_bytes,
    kv_cache_write_kernel,
    prefill_kernel,
    prefill_shared_bytes,
)
from chairlift.cuda_kernels.launcher import Launch
from chairlift.cuda_kernels.params import (
    BlockCopyParams,
    KvCacheWriteParams,
    PagedAttentionCombineParams,
    PagedAttentionDecodeParams,
    PagedAttentionPrefillParams,
    RmsNormParams,
    SiluMulParams,
    division_by,
)
from chairlift.cuda_kernels.sampling_kernels import SamplingKernels

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.cuda_kernels.launcher import Launcher

ROW_THREADS = 256
"""Threads of a block of ``rms_norm`` and ``silu_mul``."""
WRITE_WARPS = 4
"""Heads that a block of ``kv_cache_write`` takes."""
COPY_THREADS = 256
"""Threads of a block of ``block_copy``."""
CACHE_NAMES = TYPE_NAMES | {torch.float8_e4m3fn: FP8}
"""What the kernels call the type of a cache."""
DECODE_KEYS = 64
"""Most keys that a block of the decode kernel reads at once; a chunk is a multiple of it."""


def cache_types(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the types that a cache may have beside queries of a type."""
    return (dtype, torch.float8_e4m3fn) if TYPE_NAMES.get(dtype) in HALF_TYPES else (dtype,)


def check_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Check the arguments of :meth:`Kernels.rms_norm`."""
    check = Arguments("rms_norm")
    check.tensor("x", x, FLOATS, ("tokens", "width"))
    check.tensor("weight", weight, x.dtype, ("width",))
    if residual is not None:
        check.tensor("residual", residual, x.dtype, ("tokens", "width"))
    _check_vectors(check, "width", check["width"], x)


def check_silu_mul(x: Tensor) -> None:
    """Check the argument of :meth:`Kernels.silu_mul`."""
    check = Arguments("silu_mul")
    check.tensor("x", x, FLOATS, ("tokens", "2 * width"))
    check.multiple("2 * width", check["2 * width"], 2, "gate and up")
    _check_vectors(check, "width", check["2 * width"] // 2, x)
    check.grid(_silu_grid(x))


def check_kv_cache_write(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> int:
    """Check the arguments of :meth:`Kernels.kv_cache_write`; returns the number of query heads."""
    check = Arguments("kv_cache_write")
    check.tensor("qkv", qkv, FLOATS, ("tokens", "width"), row_stride=True)
    shape = ("blocks", "kv_heads", "block_size", "head_dim")
    check.tensor("k_cache", k_cache, cache_types(qkv.dtype), shape)
    check.tensor("v_cache", v_cache, k_cache.dtype, shape)
    check.tensor("slots", slots, torch.int64, ("tokens",))
    check.tensor("positions", positions, torch.int32, ("tokens",))
    head_dim, kv_heads = check["head_dim"], check["kv_heads"]
    check.multiple("width", check["width"], head_dim, "all heads have head_dim values")
    heads = check["width"] // head_dim - 2 * kv_heads
    if heads < 1 or heads % kv_heads:
        raise check.error(
            f"qkv is {check['width']} wide: with {kv_heads} key/value heads of {head_dim} that "
            f"leaves {heads} query heads, which must be a multiple of {kv_heads}"
        )
    if (cos is None) != (sin is None):
        raise check.error("cos and sin must both be given, or neither")
    if cos is not None and sin is not None:
        check.tensor("cos", cos, torch.float32, ("max_position", "rotary_half"))
        check.tensor("sin", sin, torch.float32, ("max_position", "rotary_half"))
        check.number("rotary_half", check["rotary_half"], 1, head_dim // 2)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check.tensor(name, weight, qkv.dtype, ("head_dim",))
    return heads


def check_paged_attention_decode(
    out: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    sequences: Sequence[Tensor],
    work: tuple[Tensor, Tensor],
    limits: tuple[int, int, int],
    window: int,
) -> None:
    """Check the arguments of :meth:`Kernels.paged_attention_decode`.

    ``sequences`` are the four arrays of the sequences, ``work`` items and splits, ``limits``
    partial results, tokens of a chunk and query tokens of a sequence at most.
    """
    check = Arguments("paged_attention_decode")
    group = _check_attention(check, out, q, caches, sequences, window)
    items, splits = work
    num_partials, chunk_tokens, max_query_tokens = limits
    check.tensor("items", items, torch.int32, ("items", 3))
    check.tensor("splits", splits, torch.int32, ("splits", 3))
    check.number("num_partials", num_partials, 0, check["items"])
    check.number("chunk_tokens", chunk_tokens, DECODE_KEYS)
    check.multiple("chunk_tokens", chunk_tokens, DECODE_KEYS, "keys read at once")
    check.number("max_query_tokens", max_query_tokens, 0)
    if check["splits"] and not num_partials:
        raise check.error(f"{check['splits']} splits have no partial results to combine")
    check.grid((check["items"], check["kv_heads"], max_query_tokens * group))


def check_paged_attention_prefill(
    out: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    sequences: Sequence[Tensor],
    items: Tensor,
    window: int,
) -> None:
    """Check the arguments of :meth:`Kernels.paged_attention_prefill`."""
    check = Arguments("paged_attention_prefill")
    _check_attention(check, out, q, caches, sequences, window)
    check.tensor("items", items, torch.int32, ("items", 2))
    check.grid((check["items"], check["kv_heads"], 1))


def check_block_copy(
    addresses: Tensor,
    copies: Tensor,
    locations: Tensor,
    caches: Sequence[Tensor],
    host_caches: Sequence[Tensor],
) -> None:
    """Check the arguments of :meth:`Kernels.block_copy`."""
    check = Arguments("block_copy")
    if not caches:
        raise check.error("there are no caches")
    if len(host_caches) not in (0, len(caches)):
        raise check.error(f"there are {len(caches)} caches, but {len(host_caches)} on the host")
    shape = ("blocks", "kv_heads", "block_size", "head_dim")
    for index, cache in enumerate(caches):
        check.tensor(f"caches[{index}]", cache, caches[0].dtype, shape)
    shape = ("host blocks", *shape[1:])
    for index, cache in enumerate(host_caches):
        check.tensor(f"host_caches[{index}]", cache, caches[0].dtype, shape, on_host=True)
    check.tensor("addresses", addresses, torch.int64, (len(caches) + len(host_caches),))
    check.tensor("copies", copies, torch.int32, ("copies", 2))
    check.tensor("locations", locations, torch.uint8, ("copies", 2))
    check.multiple("a block's bytes", _block_bytes(caches[0]), VECTOR_BYTES, "one access")
    check.grid((check["copies"], len(caches), 1))


class Kernels(SamplingKernels):
    """The kernels, on one device."""

    def __init__(self, launcher: Launcher | None) -> None:
        """Launch with ``launcher``; None: launch nothing."""
        self._launcher = launcher

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Return ``rms_norm(x + residual) * weight``; the residual becomes the sum.

        ``x`` and ``residual`` are ``[T, H]``, ``weight`` ``[H]``.

        Raises:
            KernelArgumentError: an argument does not fit, as in every method here.
        """
        check_rms_norm(x, residual, weight)
        out = self._empty(tuple(x.shape), x, x.dtype)
        if self._launcher is None:
            return out
        params = RmsNormParams(
            x=x.data_ptr(),
            residual=_address(residual),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            width=x.shape[1],
            eps=eps,
        )
        name = f"rms_norm<{TYPE_NAMES[x.dtype]}>"
        self._launcher.launch(Launch(name, (x.shape[0], 1, 1), ROW_THREADS, params))
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        """Return ``silu(x[:, :I]) * x[:, I:]`` ``[T, I]`` of ``x`` ``[T, 2 * I]``."""
        check_silu_mul(x)
        width = x.shape[1] // 2
        out = self._empty((x.shape[0], width), x, x.dtype)
        if self._launcher is None:
            return out
        params = SiluMulParams(x.data_ptr(), out.data_ptr(), width)
        name = f"silu_mul<{TYPE_NAMES[x.dtype]}>"
        self._launcher.launch(Launch(name, _silu_grid(x), ROW_THREADS, params))
        return out

    def kv_cache_write(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        positions: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their slots.

        Args:
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``.
            k_cache: ``[blocks, kv_heads, block_size, head_dim]``, written.
            v_cache: the same.
            slots: ``[T]`` int64; those below zero are padding.
            positions: ``[T]`` int32.
            cos: ``[max_position, rotary_dim / 2]`` float32; None: no rotation.
            sin: the same.
            q_norm: ``[head_dim]`` weight of the query heads' norm; None: there is none.
            k_norm: the same of the key heads.
            norm_eps: added to the mean of squares.
            k_scale: keys are divided by it where the cache is float8_e4m3fn.
            v_scale: values are.

        Returns:
            The queries ``[T, heads * head_dim]``; of padding, whatever was there.
        """
        heads = check_kv_cache_write(
            qkv, k_cache, v_cache, slots, positions, cos, sin, q_norm, k_norm
        )
        _, kv_heads, block_size, head_dim = k_cache.shape
        tokens = qkv.shape[0]
        q = self._empty((tokens, heads * head_dim), qkv, qkv.dtype)
        if self._launcher is None:
            return q
        params = KvCacheWriteParams(
            qkv=qkv.data_ptr(),
            q_out=q.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            slots=slots.data_ptr(),
            positions=positions.data_ptr(),
            cos=_address(cos),
            sin=_address(sin),
            q_norm=_address(q_norm),
            k_norm=_address(k_norm),
            qkv_stride=qkv.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_half=0 if cos is None else cos.shape[1],
            block_size=block_size,
            norm_eps=norm_eps,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        name = kv_cache_write_kernel(TYPE_NAMES[qkv.dtype], CACHE_NAMES[k_cache.dtype])
        grid = (tokens, -(-(heads + 2 * kv_heads) // WRITE_WARPS), 1)
        self._launcher.launch(Launch(name, grid, 32 * WRITE_WARPS, params))
        return q

    def paged_attention_decode(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table_offsets: Tensor,
        block_ids: Tensor,
        items: Tensor,
        splits: Tensor,
        num_partials: int,
        chunk_tokens: int,
        max_query_tokens: int,
        scale: float,
        soft_cap: float,
        window: int,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Attend for the sequences of ``items``; their rows of ``out`` are written.

        Args:
            out: ``[T, heads * head_dim]``.
            q: ``[T, heads * head_dim]``, rotated.
            k_cache: ``[blocks, kv_heads, block_size, head_dim]``.
            v_cache: the same.
            query_start_loc: ``[N + 1]`` int32, as the plan's; so are the next three.
            seq_lens: ``[N]``.
            block_table_offsets: ``[N + 1]``.
            block_ids: ``[B]``.
            items: ``[items, 3]`` (see :class:`chairlift.cuda_kernels.work.DecodeWork`), padded
                with -1.
            splits: ``[splits, 3]``, padded with -1.
            num_partials: partial results that the items leave at most.
            chunk_tokens: keys of a chunk.
            max_query_tokens: query tokens of a sequence at most.
            scale: factor of the scores.
            soft_cap: scores become ``cap * tanh(score / cap)``; 0: they stay.
            window: keys that a query sees, up to its own; 0: all.
            k_scale: keys are multiplied by it where the cache is float8_e4m3fn.
            v_scale: values are.
        """
        sequences = (query_start_loc, seq_lens, block_table_offsets, block_ids)
        limits = (num_partials, chunk_tokens, max_query_tokens)
        caches = (k_cache, v_cache)
        check_paged_attention_decode(out, q, caches, sequences, (items, splits), limits, window)
        if self._launcher is None:
            return
        _, kv_heads, _, head_dim = k_cache.shape
        group = q.shape[1] // (kv_heads * head_dim)
        max_rows = max_query_tokens * group
        partials = (num_partials, kv_heads, max_rows)
        partial_out = self._empty((*partials, head_dim), q, torch.float32)
        partial_state = self._empty((*partials, 2), q, torch.float32)
        shared: dict[str, int] = {
            "out": out.data_ptr(),
            "query_start_loc": query_start_loc.data_ptr(),
            "partial_out": partial_out.data_ptr(),
            "partial_state": partial_state.data_ptr(),
            "kv_heads": kv_heads,
            "group": group,
            "max_rows": max_rows,
        }
        type_name, cache_name = TYPE_NAMES[q.dtype], CACHE_NAMES[k_cache.dtype]
        rows = decode_rows(max_rows, type_name)
        self._launcher.launch(
            Launch(
                decode_kernel(type_name, head_dim, rows, cache_name),
                (items.shape[0], kv_heads, -(-max_rows // rows)),
                DECODE_THREADS,
                PagedAttentionDecodeParams(
                    **shared,
                    **_cache_fields(q, caches, sequences, scale, soft_cap, window),
                    k_scale=k_scale,
                    v_scale=v_scale,
                    items=items.data_ptr(),
                    chunk_tokens=chunk_tokens,
                ),
                decode_shared_bytes(type_name, head_dim, rows, cache_name),
            )
        )
        self._launcher.launch(
            Launch(
                f"paged_attention_combine<{type_name}>",
                (splits.shape[0], kv_heads, max_rows),
                DECODE_THREADS,
                PagedAttentionCombineParams(**shared, splits=splits.data_ptr(), head_dim=head_dim),
            )
        )

    def paged_attention_prefill(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table_offsets: Tensor,
        block_ids: Tensor,
        items: Tensor,
        scale: float,
        soft_cap: float,
        window: int,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Attend for the tiles of ``items`` ``[items, 2]``, as :meth:`paged_attention_decode`."""
        sequences = (query_start_loc, seq_lens, block_table_offsets, block_ids)
        caches = (k_cache, v_cache)
        check_paged_attention_prefill(out, q, caches, sequences, items, window)
        if self._launcher is None:
            return
        _, kv_heads, _, head_dim = k_cache.shape
        type_name, cache_name = TYPE_NAMES[q.dtype], CACHE_NAMES[k_cache.dtype]
        self._launcher.launch(
            Launch(
                prefill_kernel(type_name, head_dim, cache_name),
                (items.shape[0], kv_heads, 1),
                PREFILL_THREADS,
                PagedAttentionPrefillParams(
                    **_cache_fields(q, caches, sequences, scale, soft_cap, window),
                    k_scale=k_scale,
                    v_scale=v_scale,
                    out=out.data_ptr(),
                    query_start_loc=query_start_loc.data_ptr(),
                    items=items.data_ptr(),
                    kv_heads=kv_heads,
                    group=q.shape[1] // (kv_heads * head_dim),
                ),
                prefill_shared_bytes(type_name, head_dim, cache_name),
            )
        )

    def block_copy(
        self,
        addresses: Tensor,
        copies: Tensor,
        locations: Tensor,
        caches: Sequence[Tensor],
        host_caches: Sequence[Tensor],
    ) -> None:
        """Copy blocks in all caches. No copy may read or write what another writes.

        Args:
            addresses: int64 addresses of ``caches``, then of ``host_caches``.
            copies: ``[C, 2]`` int32 source and destination.
            locations: ``[C, 2]`` uint8 where each of them is: 0 in ``caches``, 1 in
                ``host_caches``.
            caches: ``[blocks, kv_heads, block_size, head_dim]`` each.
            host_caches: the same with their own number of blocks, in memory of the host that the
                device reaches at its own addresses; or none.
        """
        check_block_copy(addresses, copies, locations, caches, host_caches)
        if self._launcher is None:
            return
        params = BlockCopyParams(
            caches=addresses.data_ptr(),
            copies=copies.data_ptr(),
            locations=locations.data_ptr(),
            block_bytes=_block_bytes(caches[0]),
        )
        grid = (copies.shape[0], len(caches), 1)
        self._launcher.launch(Launch("block_copy", grid, COPY_THREADS, params))

    def _empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        if self._launcher is None:
            return like.new_empty(shape, dtype=dtype)
        return self._launcher.empty(shape, like, dtype)


def _check_vectors(check: Arguments, name: str, value: int, x: Tensor) -> None:
    check.multiple(name, value, VECTOR_BYTES // x.element_size(), f"{VECTOR_BYTES} bytes")


def _check_attention(
    check: Arguments,
    out: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    sequences: Sequence[Tensor],
    window: int,
) -> int:
    """Check what both attention kernels take; returns the query heads of a key/value head."""
    check.tensor("q", q, FLOATS, ("tokens", "width"))
    check.tensor("out", out, q.dtype, ("tokens", "width"))
    shape = ("blocks", "kv_heads", "block_size", "head_dim")
    check.tensor("k_cache", caches[0], cache_types(q.dtype), shape)
    check.tensor("v_cache", caches[1], caches[0].dtype, shape)
    query_start_loc, seq_lens, block_table_offsets, block_ids = sequences
    check.tensor("query_start_loc", query_start_loc, torch.int32, ("sequences + 1",))
    check.tensor("seq_lens", seq_lens, torch.int32, ("sequences",))
    if check["sequences + 1"] != check["sequences"] + 1:
        raise check.error(
            f"query_start_loc has {check['sequences + 1']} entries for {check['sequences']} "
            "sequences; it must have one more"
        )
    check.tensor("block_table_offsets", block_table_offsets, torch.int32, ("sequences + 1",))
    check.tensor("block_ids", block_ids, torch.int32, ("table entries",))
    if check["head_dim"] not in HEAD_DIMS:
        raise check.error(f"head_dim is {check['head_dim']}; there are kernels for {HEAD_DIMS}")
    kv_width = check["kv_heads"] * check["head_dim"]
    check.multiple("width of q", check["width"], kv_width, "a group of heads shares keys")
    check.number("window", window, 0)
    return check["width"] // kv_width


def _cache_fields(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    sequences: Sequence[Tensor],
    scale: float,
    soft_cap: float,
    window: int,
) -> dict[str, int | float]:
    """Fields that both attention kernels have."""
    block_size = caches[0].shape[2]
    magic, shift = division_by(block_size)
    _, seq_lens, block_table_offsets, block_ids = sequences
    return {
        "q": q.data_ptr(),
        "k_cache": caches[0].data_ptr(),
        "v_cache": caches[1].data_ptr(),
        "seq_lens": seq_lens.data_ptr(),
        "block_table_offsets": block_table_offsets.data_ptr(),
        "block_ids": block_ids.data_ptr(),
        "scale": scale,
        "soft_cap": soft_cap,
        "window": window,
        "block_size": block_size,
        "block_magic": magic,
        "block_shift": shift,
    }


def _silu_grid(x: Tensor) -> tuple[int, int, int]:
    vectors = x.shape[1] // 2 * x.element_size() // VECTOR_BYTES
    return (x.shape[0], -(-vectors // ROW_THREADS), 1)


def _block_bytes(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
