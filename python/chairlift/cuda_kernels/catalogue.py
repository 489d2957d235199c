"""Which kernels there are: the sources, and every instantiation that may be launched."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass
from importlib.resources import files

from chairlift.cuda_kernels import params

HEAD_DIMS = (64, 80, 96, 128, 256)
DECODE_ROWS = (1, 4, 8)
"""Rows (query tokens times heads of a group) that a block of the decode kernel may take at once.
Types of 16 bits have tensor cores, to which eight rows are as one: they always take eight, and a
row's result does not depend on how many there are."""
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
"""Those that tensor cores multiply exactly."""
FP8 = "Fp8"
"""The kernels' name of float8_e4m3fn, which a cache may be of where all else is of 16 bits."""
CACHES = tuple((name, name) for name in TYPES) + tuple((name, FP8) for name in HALF_TYPES)
"""Types of queries and of the cache beside them."""


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


def decode_row_counts(type_name: str) -> tuple[int, ...]:
    """Return how many rows a block of a decode kernel for queries of a type may take."""
    return DECODE_ROWS[-1:] if type_name in HALF_TYPES else DECODE_ROWS


def decode_rows(most_rows: int, type_name: str) -> int:
    """Choose the rows of a block for sequences of up to ``most_rows``; more take several blocks."""
    counts = decode_row_counts(type_name)
    return next((rows for rows in counts if rows >= most_rows), counts[-1])


def kv_cache_write_kernel(type_name: str, cache_name: str | None = None) -> str:
    """Name the kernel that writes the cache; its type is that of the queries if not given."""
    return f"kv_cache_write<{type_name}{_cache_argument(type_name, cache_name)}>"


def decode_kernel(type_name: str, head_dim: int, rows: int, cache_name: str | None = None) -> str:
    """Name the decode kernel whose blocks take ``rows`` rows."""
    cache = _cache_argument(type_name, cache_name)
    return f"paged_attention_decode<{type_name}, {head_dim}, {rows}{cache}>"


def decode_shared_bytes(
    type_name: str, head_dim: int, rows: int, cache_name: str | None = None
) -> int:
    """Shared memory of a block of the decode kernel (``Meeting`` and ``TiledShared``)."""
    if type_name in HALF_TYPES:
        warps, keys = DECODE_THREADS // 32, 16
        tiles = 2 * warps * _tile_bytes(2, keys, head_dim, cache_name)
        return max(tiles, _meeting_bytes(warps, rows, head_dim))
    lanes = 32 if head_dim > 64 else 16
    return _meeting_bytes(DECODE_THREADS // lanes, rows, head_dim)


def prefill_kernel(type_name: str, head_dim: int, cache_name: str | None = None) -> str:
    """Name the prefill kernel."""
    return (
        f"paged_attention_prefill<{type_name}, {head_dim}{_cache_argument(type_name, cache_name)}>"
    )


def prefill_shared_bytes(type_name: str, head_dim: int, cache_name: str | None = None) -> int:
    """Shared memory of a block of the prefill kernel (``Tiles`` in its source)."""
    size = _size_of(type_name)
    keys = (64 if head_dim > 128 else 128) // size
    queries = _tile_bytes(size, PREFILL_ROWS, head_dim, None)
    return queries + 2 * _tile_bytes(size, keys, head_dim, cache_name)


def _cache_argument(type_name: str, cache_name: str | None) -> str:
    return "" if cache_name in (None, type_name) else f", {cache_name}"


def _meeting_bytes(workers: int, rows: int, head_dim: int) -> int:
    return 4 * (workers * rows * (head_dim + 2) + 2 * rows)


def _size_of(type_name: str) -> int:
    return 4 if type_name == "float" else 2


def _tile_bytes(size: int, keys: int, head_dim: int, cache_name: str | None) -> int:
    """Bytes of a tile of padded rows, and of the staging area of an e4m3 cache."""
    return keys * (size * head_dim + 16) + (keys * head_dim if cache_name == FP8 else 0)


def _of_each_type(kernel: str) -> tuple[str, ...]:
    return tuple(f"{kernel}<{type_name}>" for type_name in TYPES)


SOURCES = {
    source.name: source
    for source in (
        KernelSource("block_copy", (params.BlockCopyParams,), ("block_copy",)),
        KernelSource(
            "kv_cache_write",
            (params.KvCacheWriteParams,),
            tuple(kv_cache_write_kernel(*types) for types in CACHES),
        ),
        KernelSource(
            "paged_attention_decode",
            (params.PagedAttentionDecodeParams, params.PagedAttentionCombineParams),
            tuple(
                decode_kernel(type_name, head_dim, rows, cache_name)
                for type_name, cache_name in CACHES
                for head_dim in HEAD_DIMS
                for rows in decode_row_counts(type_name)
            )
            + _of_each_type("paged_attention_combine"),
        ),
        KernelSource(
            "paged_attention_prefill",
            (params.PagedAttentionPrefillParams,),
            tuple(
                prefill_kernel(type_name, head_dim, cache_name)
                for type_name, cache_name in CACHES
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
