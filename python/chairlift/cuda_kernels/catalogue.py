"""Which kernels there are: the sources, and every instantiation that may be launched."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass
from importlib.resources import files

from chairlift.cuda_kernels import params

HEAD_DIMS = (64, 80, 96, 128, 256)
DECODE_ROWS = (1, 4, 8)
"""Rows (query tokens times heads of a group) that a block of the decode kernel takes at once."""
DECODE_THREADS = 128
"""Threads of a block of the decode and combine kernels."""
PREFILL_THREADS = 128
"""Threads of a block of the prefill kernel."""
PREFILL_ROWS = 64
"""Rows of a block of the prefill kernel."""
RESET_THREADS = EDIT_THREADS = 256
"""Threads of a block of the kernels that reset rows and that edit logits."""
RESET_TOKENS, EDIT_TOKENS = 8192, 4096
"""Tokens of the vocabulary that a block of theirs takes."""
SAMPLE_THREADS = LOGPROBS_THREADS = 512
"""Threads of a block of the kernels that sample and that tell log-probabilities."""
MAX_LISTED = 1024
"""Entries that a row has room for in its lists of biases and of suppressed tokens, each; also the
most of the best tokens that a row can be told."""
MAX_VOCAB_SIZE = 1 << 22
"""Tokens of the largest vocabulary that is sampled from."""
TYPES = ("float", "Half", "BFloat16")
"""The kernels' names of float32, float16 and bfloat16."""
HALF_TYPES = ("Half", "BFloat16")
"""Those that tensor cores multiply."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One ``.cu`` file."""

    name: str
    """The file, without its suffix."""
    structs: tuple[type[Structure], ...]
    """Its parameter structs."""
    instantiations: tuple[str, ...]
    """C++ name expressions of its kernels."""

    def text(self) -> str:
        """Return the source as it is compiled: the file, then the checks of its structs."""
        return read_source(f"{self.name}.cu") + params.layout_checks(self.structs)


def decode_rows(most_rows: int) -> int:
    """Choose the rows of a block for sequences of up to ``most_rows``; more take several blocks."""
    return next((rows for rows in DECODE_ROWS if rows >= most_rows), DECODE_ROWS[-1])


def decode_kernel(type_name: str, head_dim: int, rows: int) -> str:
    """Name the decode kernel whose blocks take ``rows`` rows."""
    return f"paged_attention_decode<{type_name}, {head_dim}, {rows}>"


def decode_shared_bytes(type_name: str, head_dim: int, rows: int) -> int:
    """Shared memory of a block of the decode kernel (``Meeting`` in its source)."""
    vectors = head_dim * (4 if type_name == "float" else 2) // 16
    lanes = 32 if vectors > 16 else 16 if vectors > 8 else 8
    workers = DECODE_THREADS // lanes
    return 4 * (workers * rows * (head_dim + 2) + 2 * rows)


def prefill_kernel(type_name: str, head_dim: int) -> str:
    """Name the prefill kernel; there is none for ``float``, which the decode kernel serves."""
    return f"paged_attention_prefill<{type_name}, {head_dim}>"


def prefill_shared_bytes(head_dim: int) -> int:
    """Shared memory of a block of the prefill kernel (``Tiles`` in its source)."""
    keys = 32 if head_dim > 128 else 64
    return 2 * (PREFILL_ROWS + 2 * keys) * (head_dim + 8)


def _of_each_type(kernel: str) -> tuple[str, ...]:
    return tuple(f"{kernel}<{type_name}>" for type_name in TYPES)


SOURCES = {
    source.name: source
    for source in (
        KernelSource("block_copy", (params.BlockCopyParams,), ("block_copy",)),
        KernelSource(
            "kv_cache_write", (params.KvCacheWriteParams,), _of_each_type("kv_cache_write")
        ),
        KernelSource(
            "paged_attention_decode",
            (params.PagedAttentionDecodeParams, params.PagedAttentionCombineParams),
            tuple(
                decode_kernel(type_name, head_dim, rows)
                for type_name in TYPES
                for head_dim in HEAD_DIMS
                for rows in DECODE_ROWS
            )
            + _of_each_type("paged_attention_combine"),
        ),
        KernelSource(
            "paged_attention_prefill",
            (params.PagedAttentionPrefillParams,),
            tuple(
                prefill_kernel(type_name, head_dim)
                for type_name in HALF_TYPES
                for head_dim in HEAD_DIMS
            ),
        ),
        KernelSource(
            "sampling_reset",
            (params.SamplingRow, params.SamplingResetParams),
            ("sampling_reset",),
        ),
        KernelSource("logit_edits", (params.LogitEditsParams,), _of_each_type("logit_edits")),
        KernelSource("sample", (params.SampleParams,), _of_each_type("sample")),
        KernelSource("logprobs", (params.LogprobsParams,), _of_each_type("logprobs")),
        KernelSource("rms_norm", (params.RmsNormParams,), _of_each_type("rms_norm")),
        KernelSource("silu_mul", (params.SiluMulParams,), _of_each_type("silu_mul")),
    )
}


def source_of(instantiation: str) -> KernelSource:
    """Return the source that has a kernel.

    Raises:
        KeyError: no source lists it.
    """
    return _SOURCE_OF[instantiation]


_SOURCE_OF = {
    instantiation: source for source in SOURCES.values() for instantiation in source.instantiations
}


def read_source(name: str) -> str:
    """Return the text of a file of ``cuda/``, from a checkout or an installed wheel."""
    return (files("chairlift") / "cuda" / name).read_text(encoding="utf-8")


def header_names() -> list[str]:
    """Return the headers that the sources include."""
    entries = (files("chairlift") / "cuda").iterdir()
    return sorted(entry.name for entry in entries if entry.name.endswith(".cuh"))
