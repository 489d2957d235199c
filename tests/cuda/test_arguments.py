"""Every argument of every kernel: what does not fit is refused before anything is launched."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass, replace

import pytest
import torch
from emulated_launcher import EmulatedLauncher

from chairlift.cuda_kernels.arguments import KernelArgumentError
from chairlift.cuda_kernels.catalogue import MAX_LISTED
from chairlift.cuda_kernels.kernels import Kernels
from chairlift.cuda_kernels.ops import OPERATORS
from chairlift.cuda_kernels.params import SamplingRow

F8, F32, F16, BF16, I32, I64, U8 = (
    torch.float8_e4m3fn,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


def floats(*shape, dtype=F16):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape, dtype=I32):
    return torch.zeros(shape, dtype=dtype)


def rms_norm():
    return {
        "x": floats(3, 16),
        "residual": floats(3, 16),
        "weight": floats(16),
        "eps": 1e-5,
    }


def silu_mul():
    return {"x": floats(3, 32)}


def kv_cache_write():
    return {
        "qkv": floats(3, 8 * 64),
        "k_cache": floats(5, 2, 16, 64),
        "v_cache": floats(5, 2, 16, 64),
        "slots": ints(3, dtype=I64),
        "positions": ints(3),
        "cos": floats(100, 32, dtype=F32),
        "sin": floats(100, 32, dtype=F32),
        "q_norm": floats(64),
        "k_norm": floats(64),
        "norm_eps": 1e-5,
    }


def attention():
    return {
        "out": floats(3, 4 * 64),
        "q": floats(3, 4 * 64),
        "k_cache": floats(5, 2, 16, 64),
        "v_cache": floats(5, 2, 16, 64),
        "query_start_loc": ints(3),
        "seq_lens": ints(2),
        "block_table_offsets": ints(3),
        "block_ids": ints(7),
    }


def paged_attention_decode():
    return attention() | {
        "items": ints(4, 3),
        "splits": ints(1, 3),
        "num_partials": 3,
        "chunk_tokens": 64,
        "max_query_tokens": 1,
        "scale": 0.1,
        "soft_cap": 0.0,
        "window": 0,
    }


def paged_attention_prefill():
    return attention() | {"items": ints(4, 2), "scale": 0.1, "soft_cap": 0.0, "window": 0}


def block_copy():
    return {
        "addresses": ints(4, dtype=I64),
        "copies": ints(2, 2),
        "locations": ints(2, 2, dtype=U8),
        "caches": [floats(5, 2, 16, 64), floats(5, 2, 16, 64)],
        "host_caches": [floats(9, 2, 16, 64), floats(9, 2, 16, 64)],
    }


def state():
    return {
        "row_params": ints(4, sizeof(SamplingRow), dtype=U8),
        "row_counts": ints(4, 50),
        "row_bias_ids": ints(4, MAX_LISTED),
        "row_bias_values": floats(4, MAX_LISTED, dtype=F32),
        "row_suppressed_ids": ints(4, MAX_LISTED),
    }


def sampling_reset():
    return state() | {
        "rows": ints(2),
        "floats": floats(2, 6, dtype=F32),
        "ints": ints(2, 6, dtype=I64),
        "id_ranges": ints(2, 2),
        "bias_ranges": ints(2, 2),
        "suppressed_ranges": ints(2, 2),
        "ids": ints(7),
        "bias_ids": ints(3),
        "bias_values": floats(3, dtype=F32),
        "suppressed_ids": ints(5),
    }


def logit_edits():
    samples = {
        "edited": floats(3, 50, dtype=F32),
        "logits": floats(3, 50),
        "sample_rows": ints(3),
        "output_indices": ints(3),
    }
    return samples | state()


def sample():
    return {
        "token_ids": ints(3),
        "statuses": ints(3, dtype=U8),
        "last_tokens": ints(4),
        "row_counts": ints(4, 50),
        "logits": floats(3, 50),
        "edited": floats(3, 50, dtype=F32),
        "sample_rows": ints(3),
        "output_indices": ints(3),
        "row_params": ints(4, sizeof(SamplingRow), dtype=U8),
    }


def logprobs():
    return {
        "out_ids": ints(3, 5),
        "out_values": floats(3, 5, dtype=F32),
        "statuses": ints(3, dtype=U8),
        "logits": floats(3, 50),
        "token_ids": ints(3),
        "num_best": ints(3),
    }


VALID = {
    make.__name__: make
    for make in (
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


@dataclass(frozen=True)
class Wrong:
    """One argument of one kernel that does not fit, and what is said of it."""

    kernel: str
    changes: dict
    says: str

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.says[:48]}"


def strided(*shape, dtype=F16):
    """Every second value of a tensor."""
    return torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]


def misaligned(*shape, dtype=F16):
    """One value beyond an address that is aligned."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1, dtype=dtype)[1:].view(shape)


def rows_apart(tokens, width, stride, dtype=F16):
    return torch.zeros(tokens * stride + width, dtype=dtype).as_strided(
        (tokens, width), (stride, 1)
    )


WRONG = [
    Wrong("rms_norm", {"x": floats(3, 16, dtype=torch.float64)}, "x is float64, not float32 or"),
    Wrong("rms_norm", {"x": floats(16)}, "x has shape [16], not [tokens, width]"),
    Wrong("rms_norm", {"x": strided(3, 16)}, "x is not contiguous: its strides are [32, 2]"),
    Wrong("rms_norm", {"x": misaligned(3, 16)}, "x is not at a multiple of 16 bytes"),
    Wrong("rms_norm", {"weight": floats(8)}, "weight has shape [8], not [width]: width is 16 in x"),
    Wrong("rms_norm", {"weight": floats(16, dtype=F32)}, "weight is float32, not float16"),
    Wrong("rms_norm", {"weight": misaligned(16)}, "weight is not at a multiple of 16 bytes"),
    Wrong(
        "rms_norm", {"residual": floats(4, 16)}, "residual has shape [4, 16], not [tokens, width]"
    ),
    Wrong("rms_norm", {"residual": floats(3, 16, dtype=BF16)}, "residual is bfloat16, not float16"),
    Wrong("rms_norm", {"weight": floats(16).to("meta")}, "weight is on meta, the others on cpu"),
    Wrong(
        "rms_norm",
        {"x": floats(3, 12), "residual": None, "weight": floats(12)},
        "width is 12, not a multiple of 8 (16 bytes)",
    ),
    Wrong("silu_mul", {"x": ints(3, 32)}, "x is int32, not float32 or float16 or bfloat16"),
    Wrong("silu_mul", {"x": floats(3, 2, 16)}, "x has shape [3, 2, 16], not [tokens, 2 * width]"),
    Wrong("silu_mul", {"x": floats(3, 17)}, "2 * width is 17, not a multiple of 2"),
    Wrong("silu_mul", {"x": floats(3, 24)}, "width is 12, not a multiple of 8"),
    Wrong("silu_mul", {"x": misaligned(3, 32)}, "x is not at a multiple of 16 bytes"),
    Wrong("kv_cache_write", {"qkv": floats(3, 504)}, "width is 504, not a multiple of 64"),
    Wrong("kv_cache_write", {"qkv": floats(3, 4 * 64)}, "that leaves 0 query heads"),
    Wrong("kv_cache_write", {"qkv": floats(3, 7 * 64)}, "that leaves 3 query heads"),
    Wrong("kv_cache_write", {"qkv": strided(3, 512)}, "qkv is not contiguous"),
    Wrong(
        "kv_cache_write", {"qkv": rows_apart(3, 512, 516)}, "the rows of qkv are 1032 bytes apart"
    ),
    Wrong("kv_cache_write", {"qkv": rows_apart(3, 512, 64)}, "the rows of qkv are 128 bytes apart"),
    Wrong("kv_cache_write", {"k_cache": floats(5, 2, 16, 64, dtype=BF16)}, "k_cache is bfloat16"),
    Wrong("kv_cache_write", {"v_cache": floats(6, 2, 16, 64)}, "blocks is 5 in k_cache"),
    Wrong("kv_cache_write", {"v_cache": floats(5, 2, 16, 64, dtype=F8)}, "v_cache is float8_e4m3"),
    Wrong(
        "kv_cache_write",
        {"qkv": floats(3, 8 * 64, dtype=F32), "k_cache": floats(5, 2, 16, 64, dtype=F8)},
        "k_cache is float8_e4m3fn, not float32",
    ),
    Wrong("kv_cache_write", {"v_cache": strided(5, 2, 16, 64)}, "v_cache is not contiguous"),
    Wrong("kv_cache_write", {"slots": ints(3)}, "slots is int32, not int64"),
    Wrong("kv_cache_write", {"slots": ints(2, dtype=I64)}, "tokens is 3 in qkv"),
    Wrong("kv_cache_write", {"positions": ints(3, dtype=I64)}, "positions is int64, not int32"),
    Wrong("kv_cache_write", {"positions": ints(4)}, "positions has shape [4], not [tokens]"),
    Wrong("kv_cache_write", {"sin": None}, "cos and sin must both be given, or neither"),
    Wrong("kv_cache_write", {"cos": floats(100, 32)}, "cos is float16, not float32"),
    Wrong("kv_cache_write", {"sin": floats(90, 32, dtype=F32)}, "max_position is 100 in cos"),
    Wrong(
        "kv_cache_write",
        {"cos": floats(9, 40, dtype=F32), "sin": floats(9, 40, dtype=F32)},
        "rotary_half is 40; it must be from 1 to 32",
    ),
    Wrong("kv_cache_write", {"q_norm": floats(32)}, "q_norm has shape [32], not [head_dim]"),
    Wrong("kv_cache_write", {"k_norm": floats(64, dtype=F32)}, "k_norm is float32, not float16"),
    Wrong("paged_attention_decode", {"out": floats(3, 4 * 64, dtype=F32)}, "out is float32"),
    Wrong("paged_attention_decode", {"out": floats(2, 4 * 64)}, "tokens is 3 in q"),
    Wrong(
        "paged_attention_decode", {"items": ints(4, 2)}, "items has shape [4, 2], not [items, 3]"
    ),
    Wrong("paged_attention_decode", {"splits": ints(3)}, "splits has shape [3], not [splits, 3]"),
    Wrong("paged_attention_decode", {"items": ints(4, 3, dtype=I64)}, "items is int64, not int32"),
    Wrong(
        "paged_attention_decode", {"num_partials": 5}, "num_partials is 5; it must be from 0 to 4"
    ),
    Wrong("paged_attention_decode", {"num_partials": 0}, "1 splits have no partial results"),
    Wrong("paged_attention_decode", {"chunk_tokens": 0}, "chunk_tokens is 0; it must be from 64"),
    Wrong("paged_attention_decode", {"chunk_tokens": 96}, "is 96, not a multiple of 64 (keys read"),
    Wrong("paged_attention_decode", {"max_query_tokens": -1}, "max_query_tokens is -1"),
    Wrong("paged_attention_decode", {"max_query_tokens": 40_000}, "blocks is beyond"),
    Wrong(
        "paged_attention_prefill", {"items": ints(4, 3)}, "items has shape [4, 3], not [items, 2]"
    ),
    Wrong("block_copy", {"caches": []}, "there are no caches"),
    Wrong("block_copy", {"addresses": ints(2)}, "addresses is int32, not int64"),
    Wrong("block_copy", {"addresses": ints(3, dtype=I64)}, "addresses has shape [3], not [4]"),
    Wrong("block_copy", {"host_caches": []}, "addresses has shape [4], not [2]"),
    Wrong("block_copy", {"locations": ints(3, 2, dtype=U8)}, "copies is 2 in copies"),
    Wrong(
        "block_copy",
        {"host_caches": [floats(9, 2, 16, 64)]},
        "there are 2 caches, but 1 on the host",
    ),
    Wrong(
        "block_copy",
        {"host_caches": [floats(9, 2, 16, 64), floats(8, 2, 16, 64)]},
        "host blocks is 9 in host_caches[0]",
    ),
    Wrong(
        "block_copy",
        {"host_caches": [floats(9, 2, 8, 64), floats(9, 2, 8, 64)]},
        "block_size is 16 in caches[0]",
    ),
    Wrong(
        "block_copy",
        {"host_caches": [floats(9, 2, 16, 64, dtype=BF16)] * 2},
        "host_caches[0] is bfloat16, not float16",
    ),
    Wrong("block_copy", {"copies": ints(2)}, "copies has shape [2], not [copies, 2]"),
    Wrong(
        "block_copy",
        {"caches": [floats(5, 2, 16, 64), floats(4, 2, 16, 64)]},
        "caches[1] has shape [4, 2, 16, 64], not [blocks, kv_heads, block_size, head_dim]",
    ),
    Wrong(
        "block_copy",
        {"caches": [floats(5, 1, 1, 4)] * 2, "host_caches": [floats(5, 1, 1, 4)] * 2},
        "a block's bytes is 8, not a multiple of 16",
    ),
    Wrong("sampling_reset", {"row_params": ints(4, 8, dtype=U8)}, "row_params has shape [4, 8]"),
    Wrong("sampling_reset", {"row_bias_ids": ints(4, 9)}, "not [rows, 1024]"),
    Wrong("sampling_reset", {"ints": ints(2, 6)}, "ints is int32, not int64"),
    Wrong("sampling_reset", {"floats": floats(3, 6, dtype=F32)}, "resets is 2 in rows"),
    Wrong("sampling_reset", {"bias_ids": ints(4)}, "biases is 4 in bias_ids"),
    Wrong("logit_edits", {"logits": floats(3, 51)}, "vocab_size is 50 in edited"),
    Wrong("logit_edits", {"edited": floats(3, 50)}, "edited is float16, not float32"),
    Wrong("sample", {"logits": floats(3, 51)}, "vocab_size is 51 in logits"),
    Wrong("sample", {"logits": strided(3, 50)}, "logits is not contiguous"),
    Wrong("sample", {"last_tokens": ints(5)}, "rows is 5 in last_tokens"),
    Wrong("sample", {"output_indices": ints(2)}, "samples is 3 in token_ids"),
    Wrong(
        "sample",
        {"logits": floats(3, 0), "row_counts": ints(4, 0)},
        "vocab_size is 0; it must be from 1 to 4194304",
    ),
    Wrong("logprobs", {"out_values": floats(3, 4, dtype=F32)}, "width is 5 in out_ids"),
    Wrong("logprobs", {"num_best": ints(3, dtype=I64)}, "num_best is int64, not int32"),
    Wrong(
        "logprobs",
        {"out_ids": ints(3, 1026), "out_values": floats(3, 1026, dtype=F32)},
        "width is 1026; it must be from 1 to 1025",
    ),
] + [
    replace(wrong, kernel=kernel)
    for kernel in ("paged_attention_decode", "paged_attention_prefill")
    for wrong in (
        Wrong("", {"q": floats(3, 3 * 64), "out": floats(3, 3 * 64)}, "width of q is 192, not a"),
        Wrong("", {"q": misaligned(3, 4 * 64)}, "q is not at a multiple of 16 bytes"),
        Wrong("", {"k_cache": floats(5, 2, 16, 64, dtype=BF16)}, "k_cache is bfloat16"),
        Wrong("", {"v_cache": floats(5, 2, 8, 64)}, "block_size is 16 in k_cache"),
        Wrong("", {"query_start_loc": ints(2)}, "has 2 entries for 2 sequences; it must have one"),
        Wrong("", {"seq_lens": ints(2, dtype=I64)}, "seq_lens is int64, not int32"),
        Wrong("", {"block_table_offsets": ints(4)}, "sequences + 1 is 3 in query_start_loc"),
        Wrong("", {"block_ids": ints(14)[::2]}, "block_ids is not contiguous"),
        Wrong("", {"window": -1}, "window is -1; it must be from 0"),
        Wrong(
            "",
            {
                "q": floats(3, 4 * 72),
                "out": floats(3, 4 * 72),
                "k_cache": floats(5, 2, 16, 72),
                "v_cache": floats(5, 2, 16, 72),
            },
            "head_dim is 72; there are kernels for (64, 80, 96, 128, 256)",
        ),
    )
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_what_does_not_fit_is_refused(wrong):
    launcher = EmulatedLauncher(guards=False)
    arguments = VALID[wrong.kernel]() | wrong.changes
    with pytest.raises(KernelArgumentError) as raised:
        getattr(Kernels(launcher), wrong.kernel)(**arguments)
    assert str(raised.value).startswith(f"{wrong.kernel}: ")
    assert wrong.says in str(raised.value)
    assert not launcher.launched


@pytest.mark.parametrize("kernel", VALID)
def test_what_fits_is_not_refused(kernel):
    """Else the table above would prove nothing."""
    getattr(Kernels(None), kernel)(**VALID[kernel]())


@pytest.mark.parametrize("kernel", VALID)
def test_every_tensor_of_every_kernel_is_checked(kernel):
    """For its device, its dtype and its shape; and the table has a line for every kernel."""
    assert any(wrong.kernel == kernel for wrong in WRONG)
    checked = 0
    for name, value in VALID[kernel]().items():
        if not isinstance(value, torch.Tensor):
            continue
        others = [value.to(torch.complex64), torch.zeros((*value.shape, 1), dtype=value.dtype)]
        if len([v for v in VALID[kernel]().values() if not isinstance(v, float | int)]) > 1:
            others.append(value.to("meta"))
        for other in others:
            with pytest.raises(KernelArgumentError):
                getattr(Kernels(None), kernel)(**VALID[kernel]() | {name: other})
            checked += 1
    assert checked


def test_there_is_an_operator_and_a_table_for_every_kernel():
    assert set(OPERATORS) == set(VALID)
