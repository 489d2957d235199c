"""What is measured of a run: latencies, goodput, and what bound.

TTFT, E2E: from the client's first try. Queue time: from the try that was accepted. Requests that
were rejected, expired, shed or given up have no latency and count against goodput.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chairlift.simulation import Floats
from simulation.bench import Run

Mask = NDArray[np.bool_]
SERVED = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request must meet to count for goodput, in seconds."""

    ttft_s: float
    tpot_s: float


INTERACTIVE = Target(ttft_s=2.0, tpot_s=0.050)


def everyone(run: Run) -> Mask:
    """Choose all requests."""
    return np.ones(len(run.workload), dtype=bool)


def of_class(run: Run, position: int) -> Mask:
    """Choose the requests of a class."""
    return run.workload.request_class == position


def of_tenant(run: Run, position: int) -> Mask:
    """Choose the requests of a tenant."""
    return run.workload.tenant == position


def ttft(run: Run, chosen: Mask) -> Floats:
    """Time to first token of those that got one."""
    result = run.result
    return _known((result.first_token_s - result.arrival_s)[chosen])


def queue_time(run: Run, chosen: Mask) -> Floats:
    """Wait of those that were scheduled."""
    result = run.result
    return _known((result.first_scheduled_s - result.submitted_s)[chosen])


def e2e(run: Run, chosen: Mask) -> Floats:
    """Life of those that were served to their end."""
    result = run.result
    served = chosen & result.ended(*SERVED)
    return (result.finished_s - result.arrival_s)[served]


def tpot(run: Run, chosen: Mask) -> Floats:
    """Mean gap of each that was served to its end and has more than one token."""
    return _known(_tpot(run)[chosen & run.result.ended(*SERVED)])


def itl(run: Run, chosen: Mask) -> Floats:
    """Every gap between two tokens."""
    return run.result.gap_s[chosen[run.result.gap_request]].astype(np.float64)


def _tpot(run: Run) -> Floats:
    result = run.result
    gaps = result.output_tokens - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gaps > 0, (result.finished_s - result.first_token_s) / gaps, np.nan)


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def percentile(values: Floats, percent: float) -> float:
    """Return the percentile, NaN of nothing."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def mean(values: Floats) -> float:
    """Return the mean, NaN of nothing."""
    return float(values.mean()) if len(values) else float("nan")


def good(run: Run, chosen: Mask, target: Target) -> Mask:
    """Say which requests were served to their end within their targets."""
    result = run.result
    slow = (result.first_token_s - result.arrival_s > target.ttft_s) | (_tpot(run) > target.tpot_s)
    return chosen & result.ended(*SERVED) & ~slow


def goodput(run: Run, chosen: Mask, target: Target) -> float:
    """Requests a second, of the time in which they arrived or ran, that met their targets."""
    return int(good(run, chosen, target).sum()) / run.result.end_s


def throughput(run: Run) -> float:
    """Prompt and output tokens a second of all that was served to its end."""
    served = run.result.ended(*SERVED)
    tokens = run.workload.input_tokens + run.result.output_tokens
    return int(tokens[served].sum()) / run.result.end_s


def outcomes(run: Run, chosen: Mask | None = None) -> dict[str, int]:
    """Count how requests went, by name."""
    result = run.result
    codes = result.outcome if chosen is None else result.outcome[chosen]
    counts = np.bincount(codes, minlength=len(result.outcome_names))
    named = zip(result.outcome_names, counts, strict=True)
    return {name: int(count) for name, count in sorted(named) if count}


def mean_batch(run: Run) -> float:
    """Sequences in an iteration."""
    return mean(run.result.sequences.astype(np.float64))


def padded(run: Run) -> float:
    """Share of iterations that held a row for somebody who was done."""
    result = run.result
    budget = run.settings.max_num_batched_tokens
    idle = (result.running > result.sequences) & (tokens(run) < budget)
    return mean(idle.astype(np.float64))


def tokens(run: Run) -> NDArray[np.int32]:
    """Tokens of each iteration."""
    return run.result.num_decodes + run.result.prefill_tokens


def overflow(run: Run) -> float:
    """Share of admissions during whose life somebody was preempted for memory."""
    return mean(overflowed(run).astype(np.float64))


def overflowed(run: Run) -> Mask:
    """Say for each request that was admitted whether somebody was preempted during its life."""
    result = run.result
    admitted = ~np.isnan(result.first_scheduled_s)
    end_s = np.where(np.isnan(result.finished_s), result.end_s, result.finished_s)[admitted]
    total = np.concatenate(([0], np.cumsum(result.iteration_preemptions)))
    begins = np.searchsorted(result.iteration_start_s, result.first_scheduled_s[admitted], "right")
    ends = np.searchsorted(result.iteration_start_s, end_s)
    overflowed: Mask = total[np.maximum(ends, begins)] > total[begins]
    return overflowed


def bound_by(run: Run) -> str:
    """Say what kept those waiting who waited, as shares of the iterations in which somebody did.

    Memory: what is free above the watermark does not hold a long prompt (the 95th percentile).
    """
    result = run.result
    waiting = result.waiting > 0
    if not waiting.any():
        return "nothing: nobody waited"
    arithmetic = waiting & (tokens(run) >= run.settings.max_num_batched_tokens)
    slots = waiting & ~arithmetic & (result.running >= run.settings.max_num_seqs)
    prompt = percentile(run.workload.input_tokens.astype(np.float64), 95)
    needed = prompt / run.settings.block_size + run.settings.num_kv_blocks / 100
    memory = waiting & ~arithmetic & ~slots & (result.free_blocks <= needed)
    policy = waiting & ~arithmetic & ~slots & ~memory
    shares = {"arithmetic": arithmetic, "slots": slots, "memory": memory, "policy": policy}
    total = waiting.sum()
    told = [f"{name} {mask.sum() / total:.0%}" for name, mask in shares.items() if mask.any()]
    return f"{', '.join(told)} of the {waiting.mean():.0%} of iterations in which somebody waited"


def predicted_ttft_error(run: Run) -> Floats:
    """Error of the gate's predictions relative to the TTFT that came, where there were both."""
    result = run.result
    actual = result.first_token_s - result.submitted_s
    return _known(np.abs(result.predicted_ttft_s - actual) / actual)


def jain(values: Floats) -> float:
    """Jain's fairness index: 1 is equal (Jain, Chiu, Hawe: DEC-TR-301, 1984)."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))
