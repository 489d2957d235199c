"""Admission to memory: reserve, optimistic, and a forecast that is told how often it was wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chairlift.config import MemoryConfig, PolicyConfig
from chairlift.simulation import Floats, Options, Workload
from simulation.bench import ABORT_SHARE, Bench, Run
from simulation.measures import (
    e2e,
    everyone,
    mean,
    overflowed,
    percentile,
    predicted_ttft_error,
    throughput,
    tpot,
    ttft,
)
from simulation.pictures import Picture, Series
from simulation.report import Cell, Check, Report, Table, engine_tables, state_of
from simulation.traces import Trace

MODES = {
    "reserve": MemoryConfig(admission="reserve"),
    "optimistic": MemoryConfig(admission="optimistic"),
    "forecast 5%": MemoryConfig(admission="forecast", overflow=0.05),
    "forecast 10%": MemoryConfig(admission="forecast", overflow=0.10),
}
MOST_OUTPUT = 1_024
"""``max_tokens`` on further traces, whose answers are short."""
WARM_UP = 2_000
"""Admissions that a forecast may learn from, at most a quarter of all."""
SHORTER = 4
"""Factor by which the answers of the first half are shorter where lengths change half-way."""
ERROR = 0.15
"""Median relative error that the gate's prediction may have."""
TOLERANCE = 0.02
WINDOW = 1_000
"""Admissions that a point of the picture is the mean of."""


def run(bench: Bench) -> Report:
    """Compare the modes on each trace, and on one whose lengths change half-way."""
    main = _modes(bench, bench.at_load(bench.load))
    reports = {bench.trace.name: main}
    for trace in bench.also:
        other = replace(bench, trace=trace, max_tokens=min(bench.max_tokens, MOST_OUTPUT))
        reports[trace.name] = _modes(other, other.at_load(bench.load))
    changing = _changing(bench.trace)
    changed = _modes(replace(bench, trace=changing), changing.at_once())
    reports[changing.name] = changed
    runs = list(main.values())
    conditions = {
        "further traces": f"max_tokens at most {MOST_OUTPUT:,}",
        "warm-up": f"the first {_warm_up(runs[0]):,} admissions of a trace",
        "lengths change": f"{changing.name}: all there at time 0, and the answers of the first "
        f"half {SHORTER} times shorter",
    }
    report = Report(
        "memory",
        "Memory: reserve, optimistic, forecast",
        state_of(bench, runs[0], **conditions),
        [_table(name, runs) for name, runs in reports.items()],
        pictures=[_picture(bench, main, changed)],
    )
    report.tables += [_change_table(changed), *engine_tables(runs)]
    _check(report, main)
    for trace in bench.also:
        _check_further(report, trace.name, reports[trace.name])
    _check_change(report, changed)
    return report


def _modes(bench: Bench, workload: Workload) -> dict[str, Run]:
    options = Options(abort_share=ABORT_SHARE)
    return {
        label: bench.run(label, PolicyConfig(memory=memory), workload, options)
        for label, memory in MODES.items()
    }


def _changing(trace: Trace) -> Trace:
    is_early = np.arange(len(trace)) < len(trace) // 2
    shorter = -(-trace.output_tokens // SHORTER)
    return replace(
        trace,
        name=f"{trace.name}, changing",
        output_tokens=np.where(is_early, shorter, trace.output_tokens).astype(np.int32),
    )


def _warm_up(run: Run) -> int:
    return min(WARM_UP, len(run.workload) // 4)


def _outcomes(run: Run) -> Floats:
    """For each admission, in order of arrival: 1 if somebody was preempted during its life."""
    return overflowed(run).astype(np.float64)


def _realised(run: Run) -> float:
    return mean(_outcomes(run)[_warm_up(run) :])


def _target(label: str) -> float | None:
    memory = MODES[label]
    return memory.overflow if memory.admission == "forecast" else None


def _table(name: str, runs: dict[str, Run]) -> Table:
    rows: list[list[Cell]] = []
    for label, served in runs.items():
        result, chosen = served.result, everyone(served)
        target = _target(label)
        rows.append(
            [
                label,
                throughput(served),
                mean(result.running.astype(np.float64)),
                int(result.iteration_preemptions.sum()),
                result.recomputed_tokens,
                percentile(ttft(served, chosen), 99),
                percentile(tpot(served, chosen), 99) * 1_000,
                percentile(e2e(served, chosen), 99),
                None if target is None else f"{target:.0%}",
                f"{_realised(served):.1%}",
            ]
        )
    header = (
        *("run", "tokens/s", "mean running", "preemptions", "recomputed tokens", "p99 TTFT s"),
        *("p99 TPOT ms", "p99 E2E s", "overflow target", "realised"),
    )
    return Table(name, header, rows)


def _halves(run: Run) -> tuple[float, float]:
    """Realised overflow before the lengths change, and after; each without a warm-up."""
    outcomes = _outcomes(run)
    half = len(outcomes) // 2
    return mean(outcomes[_warm_up(run) : half]), mean(outcomes[half + _warm_up(run) :])


def _change_table(runs: dict[str, Run]) -> Table:
    rows: list[list[Cell]] = []
    for label, served in runs.items():
        outcomes = _outcomes(served)
        at = len(outcomes) // 2
        during = mean(outcomes[at : at + _warm_up(served)])
        before, after = _halves(served)
        rows.append([label, *(f"{share:.1%}" for share in (before, during, after))])
    header = ("run", "before", "in the warm-up after the change", "after it")
    return Table("Realised overflow where lengths change half-way", header, rows)


def _check(report: Report, runs: dict[str, Run]) -> None:
    for label, served in runs.items():
        target = _target(label)
        if target is None:
            continue
        realised = _realised(served)
        claim = f"{label}: realised overflow is within {TOLERANCE * 100:g} points of the target"
        holds = abs(realised - target) <= TOLERANCE
        report.checks.append(Check(claim, f"{realised:.1%}", holds))
    forecast, reserve, optimistic = (
        runs[label] for label in ("forecast 5%", "reserve", "optimistic")
    )
    times = throughput(forecast) / throughput(reserve)
    claim = "forecast 5%: at least 1.5 times the throughput of reserve"
    report.checks.append(Check(claim, f"{times:.2f} times", times >= 1.5))
    ours, theirs = forecast.result.recomputed_tokens, optimistic.result.recomputed_tokens
    claim = "forecast 5%: less than half of the tokens recomputed under optimistic"
    report.checks.append(Check(claim, f"{ours:,} of {theirs:,}", 2 * ours < theirs))
    error = percentile(predicted_ttft_error(forecast), 50)
    claim = f"forecast 5%: median relative error of the predicted TTFT is at most {ERROR:.0%}"
    report.checks.append(Check(claim, f"{error:.1%}", bool(error <= ERROR)))
    preempted = int(reserve.result.iteration_preemptions.sum())
    claim = "reserve: nobody is preempted"
    report.checks.append(Check(claim, f"{preempted} preemptions", preempted == 0))


def _check_further(report: Report, trace: str, runs: dict[str, Run]) -> None:
    """Where memory seldom binds there is less overflow than there may be."""
    for label, served in runs.items():
        target = _target(label)
        if target is None:
            continue
        realised = _realised(served)
        claim = f"{trace}, {label}: within {TOLERANCE * 100:g} points of the target, or below it"
        report.checks.append(Check(claim, f"{realised:.1%}", realised <= target + TOLERANCE))


def _check_change(report: Report, runs: dict[str, Run]) -> None:
    for label, served in runs.items():
        target = _target(label)
        if target is None:
            continue
        _, after = _halves(served)
        claim = f"{label}: within {TOLERANCE * 100:g} points again, a warm-up after lengths changed"
        report.checks.append(Check(claim, f"{after:.1%}", abs(after - target) <= TOLERANCE))


def _picture(bench: Bench, main: dict[str, Run], changed: dict[str, Run]) -> Picture:
    series = []
    for name, runs in ((bench.trace.name, main), ("changing", changed)):
        for label in ("forecast 5%", "forecast 10%"):
            outcomes = _outcomes(runs[label])
            window = min(WINDOW, max(len(outcomes) // 4, 1))
            means = np.convolve(outcomes, np.full(window, 1 / window), "valid")
            at = np.arange(window, len(outcomes) + 1)
            series.append(Series(f"{label}, {name}", at, means * 100))
    return Picture(
        name="memory",
        title="Admissions that overflowed",
        x_label="admissions",
        y_label=f"% of the last {WINDOW:,}",
        series=series,
    )
