"""A long prompt joins a batch that decodes: what its prefill costs the others, and itself.

The trace is not used: 32 answers are being written when one prompt of 64k tokens comes. Until then
the cost model has seen only their own short prompts.
"""

from __future__ import annotations

import numpy as np

from chairlift.config import ClassConfig, PaceConfig, PolicyConfig
from chairlift.simulation import Floats, Options, Workload
from simulation.bench import Bench, Run
from simulation.measures import percentile
from simulation.pictures import Picture, Series
from simulation.report import Check, Report, Table, engine_tables

DECODES = 32
SHORTEST, LONGEST = 200, 2_000
"""Of their prompts."""
OUTPUT_TOKENS = 3_000
COMES_AT_S = 5.0
LONG_PROMPT = 65_536
TARGET_S = 0.025
CLASS_TARGET_S = 0.050
MOST = 1.3
"""Times the target that the 99th percentile of the gaps may take."""
BUDGET = 8_192

TARGET = f"target {TARGET_S * 1e3:g} ms"
PROMISE = f"TPOT {CLASS_TARGET_S * 1e3:g} ms promised"
RUNS = {
    TARGET: (PolicyConfig(pace=PaceConfig(iteration_target=TARGET_S)), BUDGET, TARGET_S),
    PROMISE: (
        PolicyConfig(classes={"interactive": ClassConfig(tpot_target=CLASS_TARGET_S)}),
        BUDGET,
        CLASS_TARGET_S,
    ),
    "budget 2,048": (PolicyConfig(), 2_048, None),
    "budget 8,192": (PolicyConfig(), BUDGET, None),
}
"""Policy, token budget and target of each run."""


def run(bench: Bench) -> Report:
    """Compare governed iterations with fixed token budgets."""
    workload = _workload(bench.seed)
    runs = {
        label: bench.run(
            label, policy, workload, Options(keep_gaps=True), max_num_batched_tokens=budget
        )
        for label, (policy, budget, _) in RUNS.items()
    }
    rows = [_row(run) for run in runs.values()]
    header = ("run", "iterations", "mean ms", "sd ms", "p50 ms", "p99 ms", "max ms", "TTFT s")
    title = "Gaps of the decodes while the long prompt is computed, and its own TTFT"
    every = list(runs.values())
    report = Report("governor", "A long prompt joins", _state(bench), [Table(title, header, rows)])
    report.tables += engine_tables(every)
    for label, (_, _, target_s) in RUNS.items():
        if target_s is not None:
            ratio = percentile(_gaps(runs[label]), 99) / target_s
            claim = f"p99 gap with {label} is at most {MOST:g} times the target"
            report.checks.append(Check(claim, f"{ratio:.2f} times", ratio <= MOST))
    report.pictures.append(
        Picture(
            name="governor",
            title=f"A prompt of {LONG_PROMPT:,} tokens joins {DECODES} decodes",
            x_label="s after it came",
            y_label="gap of the decodes in ms",
            series=[_series(run) for run in every],
            log_y=True,
        )
    )
    return report


def _workload(seed: int) -> Workload:
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.uniform(0, COMES_AT_S / 2, DECODES))
    prompts = random.integers(SHORTEST, LONGEST, DECODES, endpoint=True)
    return Workload.of(
        [*arrivals, COMES_AT_S],
        [*prompts, LONG_PROMPT],
        [*[OUTPUT_TOKENS] * DECODES, 32],
    )


def _during(run: Run) -> np.ndarray:
    """Iterations that had some of the long prompt in them."""
    result = run.result
    begin, end = result.first_scheduled_s[-1], result.first_token_s[-1]
    return (result.iteration_start_s >= begin) & (
        result.iteration_start_s + result.iteration_s <= end + 1e-9
    )


def _gaps(run: Run) -> Floats:
    """Return the gaps: every decode gets a token in every iteration, and none waits in between."""
    return run.result.iteration_s[_during(run)]


def _row(run: Run) -> list[str | float | int | None]:
    gaps = _gaps(run) * 1_000
    ttft = float(run.result.first_token_s[-1] - run.result.arrival_s[-1])
    percentiles = [percentile(gaps, percent) for percent in (50, 99, 100)]
    return [run.label, len(gaps), float(gaps.mean()), float(gaps.std()), *percentiles, ttft]


def _series(run: Run) -> Series:
    start = run.result.iteration_start_s - COMES_AT_S
    shown = (start > -0.5) & (start < 20)
    return Series(run.label, start[shown], run.result.iteration_s[shown] * 1_000)


def _state(bench: Bench) -> dict[str, str]:
    profile = bench.profile
    return {
        "profile": f"{profile.name}, noise sigma {profile.cost.noise_sigma:g}",
        "pool": f"{profile.num_kv_blocks:,} blocks of 16",
        "trace": (
            f"none: {DECODES} prompts of {SHORTEST} to {LONGEST:,} tokens with {OUTPUT_TOKENS:,} "
            f"output tokens each; after {COMES_AT_S:g} s a prompt of {LONG_PROMPT:,} tokens"
        ),
        "load": "the prompt joins a batch that only decodes",
        "seed": str(bench.seed),
        "limits": f"max_num_batched_tokens as told, {BUDGET:,} where there is a target",
        "cost model": "knows nothing at the start",
    }
