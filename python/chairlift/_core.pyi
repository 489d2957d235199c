"""The Rust extension. Kept by hand; ``make check`` compares it with the module (mypy.stubtest)."""

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import numpy as np
from numpy import float32, float64, int32, int64, uint8
from numpy.typing import NDArray

from chairlift.config import PolicyConfig
from chairlift.engine import CoreVocabulary
from chairlift.engine_args import CoreSettings
from chairlift.executor import Executor
from chairlift.flight_log import Recording
from chairlift.request_args import RequestArgs
from chairlift.sampling import SamplingParams
from chairlift.simulation import CostProfile, Options, Workload

@final
class Request:
    """A request that can be checked and submitted, any number of times."""

    def __new__(
        cls,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        args: RequestArgs | None = None,
        *,
        seed: int,
        cache_salt: str | None = None,
    ) -> Self: ...

@final
class Reservation:
    """A place at the door; released when dropped, closed or used up."""

    @property
    def request_id(self) -> int: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Delta:
    """News of one answer."""

    @property
    def request_id(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_token_id(self) -> int | None: ...
    @property
    def stop_string_index(self) -> int | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def engine_died(self) -> bool: ...
    @property
    def logprobs(self) -> tuple[list[int], list[float]] | None: ...

@final
class Ended:
    """The end of a request; times are seconds on the engine's clock."""

    @property
    def request_id(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def first_scheduled_time(self) -> float | None: ...
    @property
    def first_token_time(self) -> float | None: ...
    @property
    def finished_time(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def predicted_ttft(self) -> float | None: ...
    @property
    def wait_times(self) -> dict[str, float]: ...

@final
class OutputBatch:
    """Everything that one or more iterations tell the client; ``N`` deltas, ``T`` tokens."""

    @property
    def iterations(self) -> int: ...
    @property
    def request_ids(self) -> NDArray[np.uint64]: ...  # [N]
    @property
    def indices(self) -> NDArray[np.int32]: ...  # [N]
    @property
    def token_ranges(self) -> NDArray[np.int64]: ...  # [N, 2]
    @property
    def token_ids(self) -> NDArray[np.uint32]: ...  # [T]
    @property
    def text_ranges(self) -> NDArray[np.int64]: ...  # [N, 2], bytes of UTF-8
    @property
    def text(self) -> bytes: ...
    @property
    def finish_codes(self) -> NDArray[np.uint8]: ...  # [N], 0 to 12: see the docstring
    def __len__(self) -> int: ...
    def deltas(self) -> list[Delta]: ...
    def scheduled(self) -> list[tuple[int, int, float]]: ...
    def answers(self) -> list[tuple[int, Any]]: ...
    def prompt_logprobs(self) -> list[tuple[int, int, list[int], list[float]]]: ...
    def ended(self) -> list[Ended]: ...

@final
class EngineClient:
    """The client of an engine."""

    @staticmethod
    def connect(fd: int) -> EngineClient: ...
    def check(self, request: Request) -> None: ...
    def reserve(self, args: RequestArgs | None = None, *, n: int = 1) -> Reservation: ...
    def post_reserve(
        self, args: RequestArgs | None = None, *, n: int = 1
    ) -> tuple[int, Reservation]: ...
    def submit(self, request: Request, reservation: Reservation | None = None) -> int: ...
    def post_submit(self, request: Request, reservation: Reservation) -> int: ...
    def submit_many(self, requests: Sequence[Request]) -> list[int]: ...
    def abort(self, request_id: int) -> None: ...
    def abort_all(self) -> None: ...
    def shutdown(self) -> None: ...
    def wait(
        self, timeout: float | None = None, *, until_end: bool = False
    ) -> OutputBatch | None: ...
    def drain(self) -> OutputBatch | None: ...
    def fileno(self) -> int: ...
    @property
    def end_reason(self) -> str | None: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def wake_ups(self) -> int: ...
    @property
    def limits(self) -> dict[str, int]: ...
    def reload(self, policy: PolicyConfig) -> None: ...
    def post_reload(self, policy: PolicyConfig) -> int: ...
    def metrics(self) -> dict[str, Any]: ...
    def post_metrics(self) -> int: ...
    def group_metrics(self, *, brief: bool = False) -> dict[str, dict[str, dict[str, Any]]]: ...
    def post_group_metrics(self, *, brief: bool = False) -> int: ...
    def iterations(self, since_step: int = 0) -> dict[str, Any]: ...
    def post_iterations(self, since_step: int = 0) -> int: ...
    def waiting(self, request_id: int) -> tuple[str, dict[str, float]] | None: ...
    def post_waiting(self, request_id: int) -> int: ...
    def cost_model(self) -> dict[str, Any] | None: ...

@final
class EngineCore:
    """A running engine: the scheduler thread, and the work of the executor thread."""

    def __new__(
        cls,
        settings: CoreSettings,
        vocabulary: CoreVocabulary,
        *,
        step_timeout: int | None = None,
        record: Recording | None = None,
    ) -> Self: ...
    @property
    def client(self) -> EngineClient: ...
    def run_executor(self, executor: Executor) -> None: ...
    def serve(self, fd: int) -> None: ...
    def shutdown(self) -> None: ...
    def learned(self) -> dict[str, Any] | None: ...
    def now(self) -> float: ...

def time_bounds() -> list[float]: ...
def iteration_bounds() -> list[float]: ...
def size_bounds() -> list[int]: ...
def check_settings(settings: CoreSettings) -> None: ...
def check_policy(policy: PolicyConfig) -> None: ...
def settings_json(settings: CoreSettings | None = None) -> str: ...
def fit_cost_model(
    shapes: NDArray[float64], time_us: NDArray[float64]
) -> dict[str, Any] | None: ...

# Flight log

@final
class FlightLog:
    """A log on disk; results are JSON."""

    def __new__(cls, path: str) -> Self: ...
    @property
    def package(self) -> str: ...
    @property
    def about(self) -> str: ...
    def replay(
        self,
        settings: CoreSettings | None = None,
        progress: Callable[[int, float], object] | None = None,
    ) -> str: ...
    def explain(
        self, request: int, progress: Callable[[int, float], object] | None = None
    ) -> str: ...
    def measure(self, progress: Callable[[int, float], object] | None = None) -> RecordedRun: ...

@final
class RecordedRun:
    """What a recorded run was asked for and what it measured."""

    @property
    def report(self) -> str: ...
    def measures(self) -> str: ...
    def simulate(
        self,
        settings: CoreSettings,
        profile: CostProfile,
        options: Options,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Any]: ...

# Simulator

def gpu_8b() -> tuple[dict[str, float], int, int]: ...
def simulate(
    settings: CoreSettings,
    profile: CostProfile,
    workload: Workload,
    options: Options,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]: ...
def capacity(
    settings: CoreSettings,
    profile: CostProfile,
    workload: Workload,
    options: Options,
    progress: Callable[[int], object] | None = None,
) -> float | None: ...

# Kernels

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
        q_norm: tuple[int, str] | None,
        k_norm: tuple[int, str] | None,
        norm_eps: float,
        window: int,
        soft_cap: float,
        scales: tuple[float, float],
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
    dtypes: tuple[str, str],
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
def silu_and_mul(x: int, out: int, is_bf16: bool, rows: int, width: int, threads: int) -> None: ...
def use_openmp(gomp_parallel: int) -> bool: ...
def kernel_pool() -> str: ...
def limit_instruction_set(name: str) -> None: ...
