"""More than can be served: goodput with the gate and without, and how well the gate predicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chairlift.config import ClassConfig, PolicyConfig
from simulation.bench import Bench, Run
from simulation.measures import (
    INTERACTIVE,
    everyone,
    good,
    goodput,
    percentile,
    predicted_ttft_error,
)
from simulation.pictures import Picture, Series
from simulation.report import (
    Cell,
    Check,
    Report,
    Table,
    engine_tables,
    latencies,
    state_of,
)

LOADS = (1.0, 2.0, 3.0)
"""Times the load that was asked for."""
LIGHT_LOADS = (0.5, 0.8)
"""The same, for the gate's predictions where it rejects next to nobody."""
ERROR = 0.15
"""Median relative error that these may have."""
MAX_NUM_BATCHED_TOKENS = 512
"""With 2,048 an iteration full of prefill alone takes longer than the TPOT target of 50 ms."""
PROMISES = ClassConfig(
    ttft_target=INTERACTIVE.ttft_s, tpot_target=INTERACTIVE.tpot_s, on_doomed="drop"
)
POLICIES = {
    "gate": PolicyConfig(classes={"interactive": PROMISES}),
    "no gate": PolicyConfig(classes={"interactive": ClassConfig()}),
}


def run(bench: Bench) -> Report:
    """Raise the load."""
    budget = min(bench.max_num_batched_tokens, MAX_NUM_BATCHED_TOKENS)
    bench = replace(
        bench,
        max_num_batched_tokens=budget,
        max_num_seqs=min(bench.max_num_seqs, budget),
    )
    runs: dict[tuple[str, float], Run] = {}
    for load in (bench.load * times for times in LOADS):
        workload = bench.at_load(load)
        for label, policy in POLICIES.items():
            runs[label, load] = bench.run(f"{label}, load {load:g}", policy, workload)
    light = {
        ("gate", load): bench.run(f"gate, load {load:g}", POLICIES["gate"], bench.at_load(load))
        for load in (bench.load * times for times in LIGHT_LOADS)
    }
    rows: list[list[Cell]] = []
    for (label, load), served in (light | runs).items():
        everybody, met = everyone(served), good(served, everyone(served), INTERACTIVE)
        error = predicted_ttft_error(served)
        rows.append(
            [
                label,
                load,
                goodput(served, everybody, INTERACTIVE),
                f"{met.mean():.1%}",
                f"{(served.result.rejections > 0).mean():.1%}",
                percentile(error, 50),
                percentile(error, 95),
            ]
        )
    header = ("policy", "load", "goodput /s", "met their targets", "rejected once or more")
    header += ("TTFT error p50", "TTFT error p95")
    every = list(runs.values())
    targets = f"TTFT {INTERACTIVE.ttft_s:g} s, TPOT {INTERACTIVE.tpot_s * 1_000:g} ms"
    report = Report(
        "overload",
        "Overload",
        state_of(bench, every[0], targets=targets),
        [
            Table("Goodput (all requests count, served or not)", header, rows),
            latencies("Latencies of those that were served", every),
            *engine_tables(every),
        ],
    )
    _check(report, runs)
    _check_predictions(report, light | runs)
    loads = sorted({load for _, load in runs})
    series = [
        Series(
            label,
            loads,
            [
                goodput(runs[label, load], everyone(runs[label, load]), INTERACTIVE)
                for load in loads
            ],
        )
        for label in POLICIES
    ]
    report.pictures.append(
        Picture(
            name="overload",
            title="Goodput under overload",
            x_label="load",
            y_label="requests/s within their targets",
            series=series,
        )
    )
    return report


def _check(report: Report, runs: dict[tuple[str, float], Run]) -> None:
    rates: dict[str, list[float]] = {label: [] for label in POLICIES}
    for (label, _), served in runs.items():
        rates[label].append(goodput(served, everyone(served), INTERACTIVE))
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = {label: np.divide(rate[-1], max(rate)) for label, rate in rates.items()}
    claim = "with the gate, goodput at the highest load is at least 90 % of the best"
    report.checks.append(Check(claim, f"{kept['gate']:.1%}", bool(kept["gate"] >= 0.9)))
    claim = "without it, it collapses: less than half of the best"
    report.checks.append(Check(claim, f"{kept['no gate']:.1%}", bool(kept["no gate"] < 0.5)))


def _check_predictions(report: Report, runs: dict[tuple[str, float], Run]) -> None:
    predicted = [predicted_ttft_error(run) for (label, _), run in runs.items() if label == "gate"]
    medians = [percentile(error, 50) for error in predicted]
    claim = f"median relative error of the predicted TTFT is at most {ERROR:.0%} at every load"
    value = ", ".join(f"{median:.1%}" for median in medians)
    report.checks.append(Check(claim, value, all(median <= ERROR for median in medians)))
