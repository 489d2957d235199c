"""A head that needs most of the pool comes into a stream of light requests: who goes ahead.

The workload is made here: long answers that fill half of the pool, a steady stream of light
requests, and one head. Each head has a run of its own, with its own seed: until it comes all
policies do the same, so that its start can be compared head by head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chairlift.config import MemoryConfig, PolicyConfig
from chairlift.simulation import Floats, Options, Workload
from simulation.bench import Bench, Run
from simulation.measures import of_tenant, percentile, throughput
from simulation.pictures import Picture, cdf
from simulation.report import Cell, Check, Report, Table, engine_tables

LIGHT, LONG, HEAD = 0, 1, 2
TENANTS = ("light", "long", "head")
POLICIES = {
    "easy": PolicyConfig(memory=MemoryConfig(backfill="easy")),
    "strict": PolicyConfig(memory=MemoryConfig(backfill="off")),
    "unprotected": PolicyConfig(memory=MemoryConfig(backfill="unprotected")),
}
ITERATIONS_PER_HEAD = 500
"""Of ``--iterations``: so many heads are tried."""
HEAD_SHARE = 0.8
LONG_SHARE = 0.5
"""Part of the pool that the long answers hold on average."""
WARM_S, AFTER_S = 40.0, 40.0
"""Time before the head comes, and for which others come after it."""
LIGHTS_PER_S = 30.0
LIGHT_PROMPT, LIGHT_OUTPUT = (32, 96), (16, 96)
LONG_PROMPT, LONG_OUTPUT = 256, (1_000, 2_000)
HEAD_OUTPUT = 64
DECODE_S = 8e-3
"""What a decode takes about, to choose the rate of the long answers."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One head under one policy."""

    run: Run
    start_s: float
    """From its arrival to its first iteration."""
    iterations: int
    """The same in iterations."""


def run(bench: Bench) -> Report:
    """Try every head under every policy."""
    count = max(2, bench.iterations // ITERATIONS_PER_HEAD)
    trials: dict[str, list[_Trial]] = {label: [] for label in POLICIES}
    for number in range(count):
        own = replace(bench, seed=bench.seed + number)
        workload = _workload(own)
        for label, policy in POLICIES.items():
            trials[label].append(_try(own, f"{label}, head {number}", policy, workload))
    runs = [replace(tried[0].run, label=label) for label, tried in trials.items()]
    report = Report(
        "backfill",
        "Backfill",
        _state(bench, runs[0], count),
        [_table(trials), *engine_tables(runs)],
    )
    _check(report, trials)
    report.pictures.append(
        Picture(
            name="backfill",
            title=f"Light requests that came while {count} heads waited",
            x_label="queue time in s",
            y_label="share of light requests",
            series=[cdf(label, _waits(tried, trials["strict"])) for label, tried in trials.items()],
        )
    )
    return report


def _workload(bench: Bench) -> Workload:
    """Make the stream with one head in it."""
    random = np.random.default_rng(bench.seed)
    end_s = WARM_S + AFTER_S
    mean_output = sum(LONG_OUTPUT) / 2
    context = LONG_PROMPT + mean_output / 2
    num_running = LONG_SHARE * bench.profile.num_kv_blocks * 16 / context
    arrivals, lengths, tenants = [], [], []
    for tenant, rate, prompt, output in (
        (LIGHT, LIGHTS_PER_S, LIGHT_PROMPT, LIGHT_OUTPUT),
        (LONG, num_running / (mean_output * DECODE_S), (LONG_PROMPT, LONG_PROMPT), LONG_OUTPUT),
    ):
        number = int(rate * end_s)
        arrivals.append(np.sort(random.uniform(0, end_s, number)))
        lengths.append(
            [random.integers(low, high + 1, number) for low, high in (prompt, output)],
        )
        tenants.append(np.full(number, tenant))
    arrivals.append(np.array([WARM_S]))
    prompt_of_head = int(HEAD_SHARE * bench.profile.num_kv_blocks * 16) - HEAD_OUTPUT
    lengths.append([np.array([prompt_of_head]), np.array([HEAD_OUTPUT])])
    tenants.append(np.array([HEAD]))
    arrival_s = np.concatenate(arrivals)
    order = np.argsort(arrival_s, kind="stable")
    return Workload.of(
        arrival_s[order],
        np.concatenate([inputs for inputs, _ in lengths])[order],
        np.concatenate([outputs for _, outputs in lengths])[order],
        tenant=np.concatenate(tenants)[order],
        tenants=TENANTS,
    )


def _try(bench: Bench, label: str, policy: PolicyConfig, workload: Workload) -> _Trial:
    served = bench.run(label, policy, workload, Options())
    result = served.result
    (head,) = np.flatnonzero(of_tenant(served, HEAD))
    came_s, started_s = float(result.submitted_s[head]), float(result.first_scheduled_s[head])
    starts = result.iteration_start_s
    iterations = int(((starts >= came_s) & (starts < started_s)).sum())
    return _Trial(served, started_s - came_s, iterations)


def _waits(tried: list[_Trial], strict: list[_Trial]) -> Floats:
    """Of the light requests that came while the head waited under strict order."""
    waits = []
    for trial, reference in zip(tried, strict, strict=True):
        result = trial.run.result
        since_s = result.submitted_s - WARM_S
        came = (since_s >= 0) & (since_s < reference.start_s) & of_tenant(trial.run, LIGHT)
        waits.append((result.first_scheduled_s - result.submitted_s)[came])
    return np.concatenate(waits)


def _starts(tried: list[_Trial]) -> Floats:
    return np.array([trial.start_s for trial in tried])


def _table(trials: dict[str, list[_Trial]]) -> Table:
    rows: list[list[Cell]] = []
    for label, tried in trials.items():
        starts, waits = _starts(tried), _waits(tried, trials["strict"])
        results = [trial.run.result for trial in tried]
        rows.append(
            [
                label,
                float(starts.mean()),
                float(starts.max()),
                float(np.mean([trial.iterations for trial in tried])),
                percentile(waits, 50),
                percentile(waits, 90),
                percentile(waits, 99),
                sum(result.backfilled for result in results),
                sum(result.forecast_slips for result in results),
                sum(int(result.iteration_preemptions.sum()) for result in results),
                sum(result.recomputed_tokens for result in results),
                float(np.mean([throughput(trial.run) for trial in tried])),
            ]
        )
    header = (
        "run",
        "head starts s",
        "latest s",
        "iterations",
        "lights wait p50 s",
        "p90 s",
        "p99 s",
    )
    header += ("backfilled", "slips", "preemptions", "recomputed", "tokens/s")
    title = "The heads, and the light requests that came while they waited under strict order"
    return Table(title, header, rows)


def _check(report: Report, trials: dict[str, list[_Trial]]) -> None:
    easy, strict = trials["easy"], trials["strict"]
    more = [a.iterations - b.iterations for a, b in zip(easy, strict, strict=True)]
    slips = sum(trial.run.result.forecast_slips for trial in easy)
    later = sum(count > 0 for count in more)
    claim = "no head starts at a later iteration than under strict order, but for counted slips"
    value = f"{later} of {len(more)} do; at most {max(more)} iterations later; {slips} slips"
    allowed = all(
        count <= trial.run.result.forecast_slips for count, trial in zip(more, easy, strict=True)
    )
    report.checks.append(Check(claim, value, allowed))
    means = [float(_starts(tried).mean()) for tried in (easy, strict, trials["unprotected"])]
    claim = "heads start within 5 % of the time that they take under strict order, on average"
    value = f"{means[0]:.3f} s and {means[1]:.3f} s"
    report.checks.append(Check(claim, value, means[0] <= 1.05 * means[1]))
    claim = "without protection heads start later than under strict order"
    report.checks.append(Check(claim, f"{means[2]:.3f} s", means[2] > means[1]))
    waits = [percentile(_waits(tried, strict), 99) for tried in (easy, strict)]
    claim = "the p99 wait of those light requests is lower than under strict order"
    value = f"{waits[0]:.3f} s and {waits[1]:.3f} s"
    report.checks.append(Check(claim, value, waits[0] < waits[1]))


def _state(bench: Bench, first: Run, count: int) -> dict[str, str]:
    profile, settings = bench.profile, first.settings
    return {
        "profile": f"{profile.name}, noise sigma {profile.cost.noise_sigma:g}",
        "pool": f"{profile.num_kv_blocks:,} blocks of {settings.block_size}",
        "trace": (
            f"made up: {LIGHTS_PER_S:g} light requests a second (prompts {_range(LIGHT_PROMPT)}, "
            f"outputs {_range(LIGHT_OUTPUT)}), long answers ({_range(LONG_OUTPUT)}) in about "
            f"{LONG_SHARE:.0%} of the pool, {count} heads of {HEAD_SHARE:.0%} of it, each in a run "
            "of its own"
        ),
        "load": f"{len(first.workload):,} requests in {WARM_S + AFTER_S:g} s",
        "seed": str(bench.seed),
        "limits": (
            f"max_num_seqs {settings.max_num_seqs}, "
            f"max_num_batched_tokens {settings.max_num_batched_tokens:,}, "
            f"max_tokens {bench.max_tokens:,} or the true length, prefix cache off"
        ),
    }


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]:,} to {bounds[1]:,}"
