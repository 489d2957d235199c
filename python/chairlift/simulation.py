"""The simulator: the production scheduler under a virtual clock.

What is simulated is the compiled core itself. Only the clock, the clients and the executor, which
takes the time that a :class:`CostProfile` says, are not real. The same settings, workload and seed
give the same result, to the microsecond.

    args = EngineArgs(config=Config(policy=PolicyConfig(sharing="fair")))
    settings = core_settings(
        args, max_model_len=8_192, num_kv_blocks=GPU_8B_BLOCKS, vocab_size=1
    )
    workload = Workload.of(arrival_s, input_tokens, output_tokens)
    result = simulate(settings, GPU_8B, workload, Options(seed=1))
    ttft_s = result.first_token_s - result.arrival_s

The simulator has a vocabulary of its own, whatever ``settings`` say. The true length of an answer
is hidden from the scheduler: an answer ends when it has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chairlift import _core
from chairlift.engine_args import CoreSettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Progress = Callable[[int], object]
"""Called now and then with the number of requests that are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """The time of an iteration as a function of what is in it, in seconds.

    ``t0 + t_seq * sequences + max(t_w, t_tok * tokens) + t_ctx * (sum of the decodes' contexts)
    + t_pair * (sum over prefill chunks of chunk * (context before + chunk / 2))
    + t_sample * samples + t_copy * (blocks copied from and to the host)``, times lognormal noise.

    One part of the noise is each iteration's own. The other lasts, as a machine is slow for some
    seconds: its logarithm is an Ornstein-Uhlenbeck process in virtual time (Uhlenbeck and Ornstein,
    1930), taken from one iteration's start to the next exactly, however long that is (Gillespie,
    1996). Both have median 1, so their mean is ``exp((noise_sigma**2 + slow_sigma**2) / 2)``.
    """

    t0_s: float
    """Every iteration."""
    t_seq_s: float
    """A sequence."""
    t_w_s: float
    """Reading the weights once."""
    t_tok_s: float
    """A token's arithmetic in the linear layers."""
    t_ctx_s: float
    """A token of a decode's context."""
    t_pair_s: float
    """A pair of a prefill token and a token before it."""
    t_sample_s: float = 0.0
    """A row of logits that is sampled."""
    t_copy_s: float = 0.0
    """A block that is copied from or to the host; by default that takes no time."""
    noise_sigma: float = 0.03
    """Standard deviation of the logarithm of the noise that is each iteration's own."""
    slow_sigma: float = 0.0
    """Standard deviation of the logarithm of the noise that lasts; 0: there is none."""
    slow_s: float = 0.0
    """Seconds after which its correlation is 1/e; with 0 it is each iteration's own, too."""


_costs, _blocks, _small_blocks = _core.gpu_8b()
GPU_8B = CostProfile(**_costs)
"""Llama-3.1-8B in bf16 on one GPU of the H100's class, analytic: 3.0 TB/s and 500 TFLOP/s. The
numbers are the core's (``rust/core/src/sim/profile.rs``)."""
GPU_8B_BLOCKS = _blocks
"""KV blocks of 16 tokens that go with it: 60 GB at 131,072 bytes a token."""
GPU_8B_SMALL_BLOCKS = _small_blocks
"""The same with a small pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``R`` requests in order of arrival."""

    arrival_s: Floats  # [R], from the start
    input_tokens: Ints  # [R]
    output_tokens: Ints  # [R], true lengths, end-of-sequence token included
    tenant: Ints  # [R], positions in tenants
    request_class: Ints  # [R], positions in the policy's classes
    tenants: list[str]
    priority: Ints | None = None  # [R], lower is sooner
    deadline_s: Floats | None = None  # [R], after the arrival; NaN is none
    prefix_offsets: Ints | None = None  # [R + 1], ranges of prefix_hashes
    prefix_hashes: Ints | None = None  # names of prompt blocks: same names, same content
    prefix_block_tokens: int = 512

    @classmethod
    def of(
        cls,
        arrival_s: ArrayLike,
        input_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        tenant: ArrayLike | None = None,
        request_class: ArrayLike | None = None,
        tenants: Sequence[str] = ("default",),
        priority: ArrayLike | None = None,
        deadline_s: ArrayLike | None = None,
    ) -> Self:
        """Make a workload of anything that converts to arrays; by default all is of one tenant."""
        arrivals = np.ascontiguousarray(arrival_s, dtype=np.float64)
        zeros = np.zeros(len(arrivals), dtype=np.int32)
        return cls(
            arrival_s=arrivals,
            input_tokens=_ints(input_tokens),
            output_tokens=_ints(output_tokens),
            tenant=zeros if tenant is None else _ints(tenant),
            request_class=zeros if request_class is None else _ints(request_class),
            tenants=list(tenants),
            priority=None if priority is None else _ints(priority),
            deadline_s=(
                None if deadline_s is None else np.ascontiguousarray(deadline_s, dtype=np.float64)
            ),
        )

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_s)


def _ints(values: ArrayLike) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a workload is served."""

    seed: int = 0
    """Seed of every random stream."""
    max_tokens: int = 1_024
    """Of every request, or its true output length where that is larger."""
    retry: bool = True
    """Whether a rejected client tries once more, after the Retry-After that it was told."""
    abort_share: float = 0.0
    """Share of the requests that are given up at a uniformly random moment of their life. The
    workload is then served twice: a rehearsal without aborts tells how long that is."""
    keep_gaps: bool = False
    """Whether every gap between two tokens is kept."""
    service_interval: int | None = None
    """Iterations between two samples of what each tenant has received; None: no samples."""
    slowness: Sequence[tuple[float, float]] | None = None
    """How slow the machine was, in place of the profile's slow seconds: from when on, in seconds
    from the workload's start, and how many times as long iterations take that begin then, or later
    but before the next entry. Before the first they take as long as the profile says. Times rise.
    :func:`capacity` does without. None: as slow as the profile says."""
    max_iterations: int | None = None
    """Iterations after which the simulation is broken off."""
    gap_weights: Sequence[float] | None = None
    """Weight of each tenant: watches :attr:`Simulation.max_gap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened to ``R`` requests in ``I`` iterations; times in seconds, NaN where none is.

    ``G`` gaps and ``S`` samples of ``T`` tenants, where those were asked for.
    """

    arrival_s: Floats  # [R], of the first try
    submitted_s: Floats  # [R], of the last try
    first_scheduled_s: Floats  # [R]
    first_token_s: Floats  # [R]
    finished_s: Floats  # [R], or rejected for good
    predicted_ttft_s: Floats  # [R], what the gate predicted at submitted_s
    longest_gap_s: Floats  # [R]
    rejections: Ints  # [R]
    preemptions: Ints  # [R]
    cached_tokens: Ints  # [R]
    output_tokens: Ints  # [R], that the client received
    outcome: Ints  # [R], positions in outcome_names
    outcome_names: list[str]
    """Finish reasons, codes of rejections, or ``unfinished``."""

    iteration_start_s: Floats  # [I]
    iteration_s: Floats  # [I]
    num_decodes: Ints  # [I], sequences with one query token
    prefill_tokens: Ints  # [I], query tokens of the others
    sequences: Ints  # [I], in the iteration
    running: Ints  # [I], that hold a row, in the iteration or not
    waiting: Ints  # [I]
    free_blocks: Ints  # [I]
    iteration_preemptions: Ints  # [I]

    gap_request: Ints  # [G]
    gap_s: NDArray[np.float32]  # [G]
    service_at_s: Floats  # [S]
    priced_tokens: Floats  # [S, T]
    device_s: Floats  # [S, T]
    max_gap: float | None
    """Largest gap in service, for their weights, between two tenants while both were backlogged; in
    priced tokens, or seconds of the device where the policy prices those."""
    recomputed_tokens: int
    backfilled: int
    """Sequences admitted ahead of the first of the queue, which did not fit."""
    forecast_slips: int
    """Times that the promised start of the first of the queue was put off."""
    end_s: float

    def ended(self, *names: str) -> NDArray[np.bool_]:  # [R]
        """Say which requests ended so."""
        wanted = [at for at, name in enumerate(self.outcome_names) if name in names]
        return np.isin(self.outcome, wanted)


def simulate(
    settings: CoreSettings,
    profile: CostProfile,
    workload: Workload,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> Simulation:
    """Serve the workload to its end.

    Runs without the GIL; Ctrl-C and exceptions of ``progress`` end it.

    Raises:
        ConfigError: settings, profile, workload or slowness cannot be.
    """
    result = _core.simulate(settings, profile, workload, options or Options(), progress)
    shape = (-1, len(workload.tenants))
    for name in ("priced_tokens", "device_s"):
        result[name] = result[name].reshape(shape)
    return Simulation(**result)


def capacity(
    settings: CoreSettings,
    profile: CostProfile,
    workload: Workload,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> float | None:
    """Requests a second of continuous FCFS when the first 4,000 requests are all there at time 0.

    The policy of ``settings`` does not matter. None where there are no requests.

    Raises:
        ConfigError: settings, profile or workload cannot be.
    """
    return _core.capacity(settings, profile, workload, options or Options(), progress)
