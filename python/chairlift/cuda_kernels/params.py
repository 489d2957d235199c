"""The kernels' parameter structs, field by field as in the ``.cu`` files, which explain them.

:func:`layout_checks` turns them into C++ assertions that every compilation contains, so that the
two sides cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int, c_longlong, c_uint, c_ulonglong, c_void_p, sizeof


class BlockCopyParams(Structure):
    """``block_copy.cu``."""

    _fields_ = (
        ("caches", c_void_p),
        ("copies", c_void_p),
        ("locations", c_void_p),
        ("block_bytes", c_longlong),
    )


class KvCacheWriteParams(Structure):
    """``kv_cache_write.cu``."""

    _fields_ = (
        ("qkv", c_void_p),
        ("q_out", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv_stride", c_longlong),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("rotary_half", c_int),
        ("block_size", c_int),
        ("norm_eps", c_float),
        ("k_scale", c_float),
        ("v_scale", c_float),
    )


class PagedAttentionDecodeParams(Structure):
    """``paged_attention_decode.cu``, the first kernel."""

    _fields_ = (
        ("q", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("out", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table_offsets", c_void_p),
        ("block_ids", c_void_p),
        ("items", c_void_p),
        ("partial_out", c_void_p),
        ("partial_state", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int),
        ("kv_heads", c_int),
        ("group", c_int),
        ("block_size", c_int),
        ("block_magic", c_uint),
        ("block_shift", c_int),
        ("chunk_tokens", c_int),
        ("max_rows", c_int),
        ("k_scale", c_float),
        ("v_scale", c_float),
    )


class PagedAttentionCombineParams(Structure):
    """``paged_attention_decode.cu``, the second kernel."""

    _fields_ = (
        ("partial_out", c_void_p),
        ("partial_state", c_void_p),
        ("out", c_void_p),
        ("query_start_loc", c_void_p),
        ("splits", c_void_p),
        ("kv_heads", c_int),
        ("group", c_int),
        ("head_dim", c_int),
        ("max_rows", c_int),
    )


class PagedAttentionPrefillParams(Structure):
    """``paged_attention_prefill.cu``."""

    _fields_ = (
        ("q", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("out", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table_offsets", c_void_p),
        ("block_ids", c_void_p),
        ("items", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int),
        ("kv_heads", c_int),
        ("group", c_int),
        ("block_size", c_int),
        ("block_magic", c_uint),
        ("block_shift", c_int),
        ("k_scale", c_float),
        ("v_scale", c_float),
    )


class SamplingRow(Structure):
    """``sampling.cuh``: what the sampling kernels keep of a row, in memory of the device."""

    _fields_ = (
        ("seed", c_ulonglong),
        ("child", c_uint),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("top_k", c_int),
        ("min_tokens", c_int),
        ("num_bias", c_int),
        ("num_suppressed", c_int),
        ("has_penalties", c_int),
    )


class SamplingResetParams(Structure):
    """``sampling_reset.cu``."""

    _fields_ = (
        ("rows", c_void_p),
        ("floats", c_void_p),
        ("ints", c_void_p),
        ("id_ranges", c_void_p),
        ("bias_ranges", c_void_p),
        ("suppressed_ranges", c_void_p),
        ("ids", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("suppressed_ids", c_void_p),
        ("row_params", c_void_p),
        ("row_counts", c_void_p),
        ("row_bias_ids", c_void_p),
        ("row_bias_values", c_void_p),
        ("row_suppressed_ids", c_void_p),
        ("vocab_size", c_int),
    )


class LogitEditsParams(Structure):
    """``logit_edits.cu``."""

    _fields_ = (
        ("logits", c_void_p),
        ("edited", c_void_p),
        ("sample_rows", c_void_p),
        ("output_indices", c_void_p),
        ("logits_rows", c_void_p),
        ("row_params", c_void_p),
        ("row_counts", c_void_p),
        ("row_bias_ids", c_void_p),
        ("row_bias_values", c_void_p),
        ("row_suppressed_ids", c_void_p),
        ("vocab_size", c_int),
    )


class SampleParams(Structure):
    """``sample.cu``."""

    _fields_ = (
        ("logits", c_void_p),
        ("edited", c_void_p),
        ("sample_rows", c_void_p),
        ("output_indices", c_void_p),
        ("logits_rows", c_void_p),
        ("row_params", c_void_p),
        ("row_counts", c_void_p),
        ("last_tokens", c_void_p),
        ("token_ids", c_void_p),
        ("statuses", c_void_p),
        ("vocab_size", c_int),
    )


class LogprobsParams(Structure):
    """``logprobs.cu``."""

    _fields_ = (
        ("logits", c_void_p),
        ("logits_rows", c_void_p),
        ("token_ids", c_void_p),
        ("num_best", c_void_p),
        ("out_ids", c_void_p),
        ("out_values", c_void_p),
        ("statuses", c_void_p),
        ("vocab_size", c_int),
        ("stride", c_int),
    )


class RmsNormParams(Structure):
    """``rms_norm.cu``."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("width", c_int),
        ("eps", c_float),
    )


class SiluMulParams(Structure):
    """``silu_mul.cu``."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("width", c_int),
    )


def layout_checks(structs: Sequence[type[Structure]]) -> str:
    """C++ assertions that the structs of the same names have these sizes and offsets.

    NVRTC has no ``offsetof``: it checks the sizes, and g++ (in the tests) the offsets too.
    """
    sizes, offsets = [], []
    for struct in structs:
        name = struct.__name__
        sizes.append(f'static_assert(sizeof({name}) == {sizeof(struct)}, "size of {name}");')
        for field, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            offsets.append(
                f"static_assert(__builtin_offsetof({name}, {field}) == {offset}, "
                f'"offset of {name}::{field}");'
            )
    return "\n".join([*sizes, "#ifndef __CUDACC_RTC__", *offsets, "#endif", ""])


def division_by(block_size: int) -> tuple[int, int]:
    """Multiplier and shift with which ``n // block_size == n * multiplier >> (31 + shift)``.

    Exact for every ``n`` below 2**31 (Granlund and Montgomery 1994).
    """
    shift = (block_size - 1).bit_length()
    return -(-(1 << (31 + shift)) // block_size), shift
