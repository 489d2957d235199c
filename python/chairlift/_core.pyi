"""Types of the Rust extension; kept by hand, checked by mypy.stubtest."""

from typing import final

from numpy import float32, int32, int64, uint8
from numpy.typing import NDArray

@final
class AttentionBatch:
    """Where the tokens of one step stand, checked and copied once per step."""

    def __new__(
        cls,
        query_start_loc: NDArray[int32],
        seq_lens: NDArray[int32],
        positions: NDArray[int32],
        slot_mapping: NDArray[int64],
        block_table_offsets: NDArray[int32],
        block_ids: NDArray[int32],
    ) -> AttentionBatch: ...
    @property
    def num_tokens(self) -> int: ...

@final
class AttentionLayer:
    """One attention layer: sizes, and the addresses of its tables and weights."""

    def __new__(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rope: tuple[int, int, int, int] | None,
        q_norm: tuple[int, bool] | None,
        k_norm: tuple[int, bool] | None,
        norm_eps: float,
    ) -> AttentionLayer: ...

@final
class Sampler:
    """Sampling state of all rows."""

    def __new__(cls, max_rows: int, vocab_size: int) -> Sampler: ...
    def reset(
        self,
        rows: NDArray[int32],
        floats: NDArray[float32],
        ints: NDArray[int64],
        id_ranges: NDArray[int32],
        bias_ranges: NDArray[int32],
        suppressed_ranges: NDArray[int32],
        ids: NDArray[int32],
        bias_ids: NDArray[int32],
        bias_values: NDArray[float32],
        suppressed_ids: NDArray[int32],
    ) -> None: ...
    def sample(
        self,
        logits: int,
        is_bf16: bool,
        rows: int,
        sample_rows: NDArray[int32],
        output_indices: NDArray[int32],
        token_ids: NDArray[int32],
        statuses: NDArray[uint8],
        margins: NDArray[float32] | None,
        threads: int,
    ) -> tuple[list[int], list[int], list[float]] | None: ...

def attention_forward(
    batch: AttentionBatch,
    layer: AttentionLayer,
    tensors: tuple[int, int, int, int],
    is_bf16: bool,
    cache_is_bf16: bool,
    num_blocks: int,
    block_size: int,
    threads: int,
) -> None: ...
def add_rms_norm(
    tensors: tuple[int, int, int, int],
    is_bf16: bool,
    weight_is_bf16: bool,
    rows: int,
    width: int,
    eps: float,
    threads: int,
) -> None: ...
def silu_and_mul(
    x: int, out: int, is_bf16: bool, rows: int, width: int, threads: int
) -> None: ...
def use_openmp(gomp_parallel: int) -> bool: ...
def kernel_pool() -> str: ...
def limit_instruction_set(name: str) -> None: ...
