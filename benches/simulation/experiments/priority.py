"""Interactive requests above a flood of batch work, and batch work under a flood of interactive.

First: batch requests all wait from the start, interactive ones come at the load. Second, for
ageing: interactive requests alone are more than can be served, and a trickle of batch requests
waits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chairlift.config import ClassConfig, MemoryConfig, PolicyConfig
from chairlift.simulation import Floats, Options, Workload
from simulation.bench import ABORT_SHARE, Bench, Run
from simulation.measures import Mask, of_class, percentile, queue_time, throughput, ttft
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
RESERVE = MemoryConfig(admission="reserve")
BY_ARRIVAL = "preempt to admit, by arrival"
PREEMPTING = {
    BY_ARRIVAL: PolicyConfig(classes=LEVELS),
    "preempt to admit, shortest": PolicyConfig(classes=LEVELS, order="shortest"),
    "preempt to admit, footprint": PolicyConfig(classes=LEVELS, order="footprint"),
    "preempt to admit, by arrival, reserve": PolicyConfig(classes=LEVELS, memory=RESERVE),
}
"""Each stands beside the same policy unloaded."""
POLICIES = {
    **PREEMPTING,
    "levels alone": PolicyConfig(classes=LEVELS, preempt_to_admit=False),
    "fcfs": PolicyConfig(classes={"interactive": ClassConfig(), "batch": ClassConfig()}),
}
SLOWEST = 98.5
"""Percentile of the TTFT above which requests are taken apart."""
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
    alone = {
        label: bench.run(label.replace("preempt to admit", "unloaded"), policy, calm)
        for label, policy in PREEMPTING.items()
    }
    runs = {label: bench.run(label, policy, workload) for label, policy in POLICIES.items()}
    ageing = _ageing_runs(bench)
    every = [*alone.values(), *runs.values()]
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
            _parts_table([alone[BY_ARRIVAL], *(runs[label] for label in PREEMPTING)]),
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


def _served(run: Run) -> Mask:
    """Interactive requests that got a first token."""
    return of_class(run, INTERACTIVE_CLASS) & ~np.isnan(run.result.first_token_s)


def _ttft_by_arrival(run: Run) -> Floats:
    """TTFT of the interactive requests if they had all that decodes leave of the run's iterations.

    Their prompts are computed first come, first served, as a queue with so much service in each
    iteration: what is done by its end is the least, over all iterations before, of what had come
    by then and could be done since.
    """
    result, chosen = run.result, _served(run)
    arrival = result.arrival_s[chosen]
    order = np.argsort(arrival, kind="stable")
    arrival = arrival[order]
    tokens = run.workload.input_tokens[chosen][order].astype(np.int64)
    start = result.iteration_start_s
    came_at = np.searchsorted(start, arrival)
    came = np.cumsum(np.bincount(came_at, weights=tokens, minlength=len(start)))
    service = np.cumsum(run.settings.max_num_batched_tokens - result.num_decodes.astype(np.int64))
    done = service + np.minimum.accumulate(np.minimum(came - service, 0))
    last = np.searchsorted(done, np.cumsum(tokens))
    ends: Floats = (start + result.iteration_s)[last]
    return ends - arrival


def _parts_table(runs: list[Run]) -> Table:
    """Tell where the slowest interactive requests spent their TTFT, on average."""
    rows: list[list[Cell]] = []
    for run in runs:
        result, chosen = run.result, _served(run)
        whole = (result.first_token_s - result.arrival_s)[chosen]
        slowest = whole >= np.percentile(whole, SLOWEST)
        arrival, scheduled, first = (
            times[chosen][slowest]
            for times in (result.arrival_s, result.first_scheduled_s, result.first_token_s)
        )
        start = result.iteration_start_s
        begin, end = np.searchsorted(start, arrival), np.searchsorted(start, first)
        step = np.minimum(start[begin], scheduled) - arrival
        spans = [slice(*span) for span in zip(begin, end, strict=True)]
        rows.append(
            [
                run.label,
                *(float(part.mean()) for part in (step, scheduled - arrival - step)),
                float((first - scheduled).mean()),
                float(run.workload.input_tokens[chosen][slowest].mean()),
                float(np.mean([result.num_decodes[span].mean() for span in spans])),
                float(np.mean([result.iteration_s[span].mean() for span in spans])) * 1_000,
            ]
        )
    header = (
        *("run", "rest of the step s", "behind others s", "own prefill s", "prompt tokens"),
        *("decodes beside it", "iteration ms"),
    )
    return Table(f"The slowest {100 - SLOWEST:g} % of interactive TTFTs, mean", header, rows)


def _check(
    report: Report, alone: dict[str, Run], runs: dict[str, Run], ageing: dict[str, Run]
) -> None:
    def p99(served: Run) -> float:
        return percentile(ttft(served, of_class(served, INTERACTIVE_CLASS)), 99)

    for label in PREEMPTING:
        served = runs[label]
        iteration_s = percentile(served.result.iteration_s, 99)
        unloaded = p99(alone[label])
        above = (p99(served) - unloaded) / iteration_s
        claim = f"{label}: interactive p99 TTFT is at most three p99 iteration times above unloaded"
        value = f"{above:.2f} iterations of {iteration_s * 1_000:.1f} ms above {unloaded:.3f} s"
        report.checks.append(Check(claim, value, above <= 3))
    served = runs[BY_ARRIVAL]
    alike = percentile(_ttft_by_arrival(served), 99)
    claim = f"{BY_ARRIVAL}: that is first come, first served in all that decodes leave, within 1 %"
    value = f"{p99(served):.4f} s and {alike:.4f} s"
    report.checks.append(Check(claim, value, p99(served) <= 1.01 * alike))
    batch = of_class(served, BATCH)
    during = served.result.first_token_s[batch] <= served.workload.arrival_s.max()
    claim = "batch still progresses while interactive requests come"
    report.checks.append(Check(claim, f"{during.sum()} requests got tokens", bool(during.any())))
    aged = ageing["ageing"]
    longest = float(queue_time(aged, of_class(aged, BATCH)).max(initial=0.0))
    claim = f"with ageing, the longest batch wait is under its bound of {MAX_LEVEL_WAIT_S:g} s"
    report.checks.append(Check(claim, f"{longest:.3f} s", longest <= MAX_LEVEL_WAIT_S))
