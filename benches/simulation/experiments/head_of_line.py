"""What batches cost that nobody joins or leaves: static, window and continuous batching.

Whoever is done stays until all of the batch are, and its row is computed all the same (Orca,
OSDI'22).
"""

from __future__ import annotations

from chairlift.config import JoinConfig, PolicyConfig
from simulation.bench import Bench
from simulation.measures import e2e, everyone, percentile, ttft
from simulation.pictures import Picture, cdf
from simulation.report import Check, Report, engine_tables, latencies, state_of

WINDOW = JoinConfig(size=64, delay=0.1)
POLICIES = {
    "static": PolicyConfig(join="static"),
    "window": PolicyConfig(join=WINDOW),
    "continuous": PolicyConfig(),
}


def run(bench: Bench) -> Report:
    """Compare the join modes at one load."""
    workload = bench.at_load(bench.load)
    runs = {label: bench.run(label, policy, workload) for label, policy in POLICIES.items()}
    every = list(runs.values())
    window = f"{WINDOW.size} requests or {WINDOW.delay} s"
    report = Report(
        "head-of-line",
        "Head-of-line blocking",
        state_of(bench, runs["continuous"], window=window),
        [latencies("Latencies", every), *engine_tables(every)],
    )

    def p99(label: str, measure: type(ttft)) -> float:
        return percentile(measure(runs[label], everyone(runs[label])), 99)

    for name, measure, label in (("E2E", e2e, "static"), ("TTFT", ttft, "window")):
        ratio = p99(label, measure) / p99("continuous", measure)
        claim = f"p99 {name} of {label} is at least 3 times that of continuous"
        report.checks.append(Check(claim, f"{ratio:.1f} times", ratio >= 3))
    series = [cdf(run.label, e2e(run, everyone(run))) for run in every]
    report.pictures.append(
        Picture(
            name="head-of-line",
            title=f"Head-of-line blocking, load {bench.load:g}",
            x_label="E2E in s",
            y_label="share of requests",
            series=series,
            log_x=True,
        )
    )
    return report
