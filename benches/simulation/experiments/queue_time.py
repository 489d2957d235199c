"""The longest time in the queue: what expires, what is promoted, and what that costs."""

from __future__ import annotations

from collections import deque

import numpy as np

from chairlift.config import ClassConfig, PolicyConfig
from simulation.bench import Bench, Run
from simulation.measures import (
    Mask,
    everyone,
    mean_batch,
    of_class,
    percentile,
    queue_time,
    throughput,
    tokens,
)
from simulation.mixing import INTERACTIVE_CLASS, mixed
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

BOUND_S = 1.0
TIMER_S = 1e-3
"""What a timer may be late."""
ABOVE_LOAD, ABOVE_BOUND_S = 0.3, 0.1
"""Of the interactive requests above batch work; with 1 s nobody would reach the bound."""


def _alone(**promise: object) -> PolicyConfig:
    return PolicyConfig(classes={"interactive": ClassConfig(**promise)})


POLICIES = {
    "no bound": _alone(),
    "expire": _alone(max_queue_time=BOUND_S, on_timeout="expire"),
    "promote": _alone(max_queue_time=BOUND_S, on_timeout="promote"),
}
ABOVE_BATCH = PolicyConfig(
    classes={
        "interactive": ClassConfig(level=1, max_queue_time=ABOVE_BOUND_S, on_timeout="promote"),
        "batch": ClassConfig(),
    }
)


def run(bench: Bench) -> Report:
    """Bound the queue time at one load, and above batch work."""
    workload = bench.at_load(bench.load)
    runs = {label: bench.run(label, policy, workload) for label, policy in POLICIES.items()}
    above = mixed(bench.at_load(ABOVE_LOAD), bench.batch.at_once())
    runs["promote above batch"] = bench.run("promote above batch", ABOVE_BATCH, above)
    every = list(runs.values())
    masks = [
        of_class(served, INTERACTIVE_CLASS)
        if len(served.workload.tenants) > 1
        else everyone(served)
        for served in every
    ]
    rows: list[list[Cell]] = []
    for served, mask in zip(every, masks, strict=True):
        bound_s = ABOVE_BOUND_S if served.label == "promote above batch" else BOUND_S
        waits = queue_time(served, mask)
        worst = float(waits.max(initial=0.0))
        late = int((waits > bound_s + TIMER_S).sum())
        rows.append([served.label, bound_s, worst, late, mean_batch(served), throughput(served)])
    header = ("run", "bound s", "longest wait s", "over the bound", "mean batch", "tokens/s")
    batch = f"{bench.batch.name} from time 0 under interactive at load {ABOVE_LOAD:g}"
    report = Report(
        "queue-time",
        "Maximum queue time",
        state_of(bench, every[0], batch=batch),
        [
            Table("Queue time of those that were scheduled", header, rows),
            latencies("Latencies", every, masks),
            *engine_tables(every),
        ],
    )
    _check_expire(report, runs["expire"])
    _check_promote(report, runs["promote above batch"], runs["promote"])
    batch_loss = 1 - mean_batch(runs["promote"]) / mean_batch(runs["no bound"])
    loss = 1 - throughput(runs["promote"]) / throughput(runs["no bound"])
    report.state["what promoting costs"] = (
        f"{batch_loss:.1%} of the mean batch, {loss:.1%} of the throughput"
    )
    report.pictures.append(
        Picture(
            name="queue-time",
            title=f"Queue time under a bound of {BOUND_S:g} s, load {bench.load:g}",
            x_label="queue time in s",
            y_label="share of requests that were scheduled",
            series=[
                cdf(served.label, queue_time(served, mask))
                for served, mask in zip(every, masks, strict=True)
            ],
        )
    )
    return report


def _check_expire(report: Report, expire: Run) -> None:
    result = expire.result
    end_s = np.where(
        np.isnan(result.first_scheduled_s), result.finished_s, result.first_scheduled_s
    )
    waits = end_s - result.submitted_s
    expired = result.ended("queue_timeout")
    longest = float(waits.max(initial=0.0))
    claim = f"expire: nobody waits for {TIMER_S * 1_000:g} ms longer than the bound"
    value = f"longest {longest:.6f} s, {expired.sum()} expired"
    report.checks.append(Check(claim, value, longest <= BOUND_S + TIMER_S and bool(expired.any())))
    ran = int((~np.isnan(result.first_scheduled_s[expired])).sum())
    claim = "expire: none of the expired reaches a plan"
    report.checks.append(Check(claim, f"{ran} did", ran == 0))


def _check_promote(report: Report, above: Run, alone: Run) -> None:
    result = above.result
    waited = of_class(above, INTERACTIVE_CLASS) & _reached(above, ABOVE_BOUND_S)
    due_s = (result.submitted_s + ABOVE_BOUND_S)[waited]
    ends = np.append(result.iteration_start_s + result.iteration_s, result.end_s)
    at = np.searchsorted(ends, due_s)
    late = result.first_scheduled_s[waited] > ends[at] + TIMER_S
    claim = "promote, with lower work to preempt: admitted within one iteration of the bound"
    value = f"{late.sum()} of {waited.sum()} that reached the bound were not"
    if waited.any():
        beyond = result.first_scheduled_s[waited] - due_s
        value += f"; p99 {percentile(beyond, 99) * 1_000:.1f} ms beyond it"
    report.checks.append(Check(claim, value, not late.any() and bool(waited.any())))
    missed, room = _iterations_with_room(alone)
    claim = "promote, without: the bound is missed only while there was no room"
    value = f"{room} iterations had room for the first of {missed} that missed it"
    report.checks.append(Check(claim, value, room == 0))


def _reached(run: Run, bound_s: float) -> Mask:
    result = run.result
    return result.first_scheduled_s - result.submitted_s >= bound_s


def _iterations_with_room(run: Run) -> tuple[int, int]:
    """Count the requests that missed the bound, and the iterations with room for the oldest.

    An iteration has room when it leaves a row, tokens of its budget, and memory above the
    watermark.
    """
    result, settings = run.result, run.settings
    late = np.flatnonzero(_reached(run, BOUND_S))
    late = late[np.argsort(result.submitted_s[late], kind="stable")]
    prompts = run.workload.input_tokens[late] + 1
    needed = -(-prompts // settings.block_size) + settings.num_kv_blocks // 100
    open_rows = (result.running < settings.max_num_seqs) & (
        tokens(run) < settings.max_num_batched_tokens
    )
    waiting: deque[int] = deque()
    next_late, room = 0, 0
    for at, start_s in enumerate(result.iteration_start_s):
        while next_late < len(late) and result.submitted_s[late[next_late]] + BOUND_S <= start_s:
            waiting.append(next_late)
            next_late += 1
        while waiting and result.first_scheduled_s[late[waiting[0]]] <= start_s:
            waiting.popleft()
        if waiting and open_rows[at] and result.free_blocks[at] >= needed[waiting[0]]:
            room += 1
    return len(late), room
