"""Interactive requests above a flood of batch work, and batch work under a flood of interactive.

First: batch requests all wait from the start, interactive ones come at the load. Second, for
ageing: interactive requests alone are more than can be served, and a trickle of batch requests
waits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chairlift.config import ClassConfig, PolicyConfig
from chairlift.simulation import Options, Workload
from simulation.bench import ABORT_SHARE, Bench, Run
from simulation.measures import of_class, percentile, queue_time, throughput, ttft
from simulation.mixing import BATCH, INTERACTIVE_CLASS, mixed
from simulation.pictures import Picture, cdf
from simulation.report import (
    Cell,
    Check,
    Report,
    Table,
    engine_tables,
    latencies,
    state_of,
)

UNLOADED = 0.1
LEVELS = {"interactive": ClassConfig(level=1), "batch": ClassConfig()}
POLICIES = {
    "preempt to admit": PolicyConfig(classes=LEVELS),
    "levels alone": PolicyConfig(classes=LEVELS, preempt_to_admit=False),
    "fcfs": PolicyConfig(classes={"interactive": ClassConfig(), "batch": ClassConfig()}),
}
AGEING_LOAD, TRICKLE_LOAD = 1.2, 0.05
MAX_LEVEL_WAIT_S = 20.0
AGEING = {
    "ageing": PolicyConfig(classes=LEVELS, max_level_wait=MAX_LEVEL_WAIT_S),
    "no ageing": PolicyConfig(classes=LEVELS),
}


def run(bench: Bench) -> Report:
    """Run both scenarios."""
    workload = mixed(bench.at_load(bench.load), bench.batch.at_once())
    calm = mixed(bench.at_load(UNLOADED), None)
    alone = bench.run("unloaded", POLICIES["preempt to admit"], calm)
    runs = {label: bench.run(label, policy, workload) for label, policy in POLICIES.items()}
    ageing = _ageing_runs(bench)
    every = [alone, *runs.values()]
    rows: list[list[Cell]] = [
        [
            served.label,
            percentile(ttft(served, of_class(served, INTERACTIVE_CLASS)), 99),
            percentile(served.result.iteration_s, 99) * 1_000,
            int((of_class(served, BATCH) & served.result.ended("stop", "length")).sum()),
            throughput(served),
        ]
        for served in every
    ]
    header = ("run", "interactive p99 TTFT s", "p99 iteration ms", "batch served", "tokens/s")
    masks = [of_class(served, INTERACTIVE_CLASS) for served in every]
    batch = f"{bench.batch.name}, {len(bench.batch):,} requests, all waiting from time 0"
    report = Report(
        "priority",
        "Priority",
        state_of(bench, every[0], batch=batch),
        [
            Table("Priority", header, rows),
            latencies("Latencies of interactive requests", every, masks),
            *engine_tables([*every, *ageing.values()]),
            _ageing_table(ageing),
        ],
    )
    _check(report, alone, runs, ageing)
    report.pictures.append(
        Picture(
            name="priority",
            title=f"Interactive requests under a batch flood, load {bench.load:g}",
            x_label="TTFT in s",
            y_label="share of interactive requests",
            series=[
                cdf(served.label, ttft(served, mask))
                for served, mask in zip(every, masks, strict=True)
            ],
            log_x=True,
        )
    )
    return report


def _ageing_runs(bench: Bench) -> dict[str, Run]:
    flood = bench.at_load(AGEING_LOAD)
    trickle = _until(bench.at_load(TRICKLE_LOAD, bench.batch), flood.arrival_s[-1])
    workload = mixed(flood, trickle)
    options = Options(abort_share=ABORT_SHARE)
    return {label: bench.run(label, policy, workload, options) for label, policy in AGEING.items()}


def _until(workload: Workload, end_s: float) -> Workload:
    count = max(1, int(np.searchsorted(workload.arrival_s, end_s)))
    return replace(
        workload,
        arrival_s=workload.arrival_s[:count],
        input_tokens=workload.input_tokens[:count],
        output_tokens=workload.output_tokens[:count],
        tenant=workload.tenant[:count],
        request_class=workload.request_class[:count],
        prefix_offsets=None,
        prefix_hashes=None,
    )


def _ageing_table(ageing: dict[str, Run]) -> Table:
    rows: list[list[Cell]] = []
    for label, served in ageing.items():
        row: list[Cell] = [label]
        for position in (BATCH, INTERACTIVE_CLASS):
            waits = queue_time(served, of_class(served, position))
            row += [percentile(waits, 50), float(waits.max(initial=0.0))]
        rows.append(row)
    header = ("run", "batch wait p50 s", "longest s", "interactive wait p50 s", "longest s ")
    title = (
        f"Ageing: interactive at load {AGEING_LOAD:g}, batch at load {TRICKLE_LOAD:g}, "
        f"max_level_wait {MAX_LEVEL_WAIT_S:g} s"
    )
    return Table(title, header, rows)


def _check(report: Report, alone: Run, runs: dict[str, Run], ageing: dict[str, Run]) -> None:
    def p99(served: Run) -> float:
        return percentile(ttft(served, of_class(served, INTERACTIVE_CLASS)), 99)

    best = runs["preempt to admit"]
    iteration_s = percentile(best.result.iteration_s, 99)
    above = (p99(best) - p99(alone)) / iteration_s
    claim = "interactive p99 TTFT is at most three p99 iteration times above unloaded"
    value = f"{above:.2f} iterations of {iteration_s * 1_000:.1f} ms above {p99(alone):.3f} s"
    report.checks.append(Check(claim, value, above <= 3))
    batch = of_class(best, BATCH)
    during = best.result.first_token_s[batch] <= best.workload.arrival_s.max()
    claim = "batch still progresses while interactive requests come"
    report.checks.append(Check(claim, f"{during.sum()} requests got tokens", bool(during.any())))
    aged = ageing["ageing"]
    longest = float(queue_time(aged, of_class(aged, BATCH)).max(initial=0.0))
    claim = f"with ageing, the longest batch wait is under its bound of {MAX_LEVEL_WAIT_S:g} s"
    report.checks.append(Check(claim, f"{longest:.3f} s", longest <= MAX_LEVEL_WAIT_S))
