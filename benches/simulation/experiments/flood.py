"""One client sends most of the load: what the others feel of it.

The equal-share run of a client has the same requests of it, and of every other client as many,
chosen by chance, as make up at most its fair share. That can be read in two ways, and both are
shown. *Equal part*: the priced tokens of the whole load, divided by the clients; one run does for
all that are within it themselves. *Max-min*: the bound at which all demands fit the capacity, so
that the flooder is cut to what the others leave.
"""

from __future__ import annotations

import numpy as np

from chairlift.config import PolicyConfig
from chairlift.simulation import Floats
from simulation.bench import Bench, Run
from simulation.measures import Mask, of_tenant, percentile, ttft
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
from simulation.traces import Trace


def run(bench: Bench) -> Report:
    """Compare fair sharing and FCFS with the equal-share runs, victim by victim."""
    trace = bench.trace
    flood = _Flood(bench, trace)
    fair = flood.serve("fair", PolicyConfig(sharing="fair"))
    fcfs = flood.serve("fcfs", PolicyConfig())
    equal = flood.serve_cut("equal part", flood.equal_part)
    max_min = flood.serve_cut("max-min", flood.max_min_part())
    runs = [fair, fcfs, equal, max_min]
    slack_s = 3 * percentile(fair.result.iteration_s, 99)
    rows: list[list[Cell]] = []
    excess = []
    for tenant in flood.victims:
        own = equal
        if flood.loads[tenant] > flood.equal_part:
            label = f"equal part of {trace.tenants[tenant]}"
            own = flood.serve_cut(label, flood.equal_part, whole=tenant)
        seen, alone = _p99(fair, tenant), np.array([_p99(own, tenant), _p99(max_min, tenant)])
        bounds = np.maximum(1.25 * alone, alone + slack_s)
        count = int((flood.tenant == tenant).sum())
        cells = [float(cell) for pair in zip(alone, bounds, strict=True) for cell in pair]
        rows.append([trace.tenants[tenant], count, seen, _p99(fcfs, tenant), *cells])
        excess.append(seen / bounds)
    everybody = [np.isin(served.workload.tenant, flood.victims) for served in runs]
    sent = (flood.tenant == flood.flooder).mean()
    flooder = f"{trace.tenants[flood.flooder]} sends {sent:.0%} of the requests"
    header = ("client", "requests", "fair s", "fcfs s", "equal part s", "its bound s")
    header += ("max-min s", "its bound s ")
    report = Report(
        "flood",
        "A flood",
        state_of(bench, fair, flooder=flooder),
        [
            latencies("Latencies of all clients but the flooder", runs, everybody),
            Table("p99 TTFT of each of them", header, rows),
            *engine_tables(runs),
        ],
    )
    for reading, ratios in zip(("equal part", "max-min"), np.transpose(excess), strict=True):
        claim = (
            "p99 TTFT of every other client is at most 1.25 times its equal-share run's, or three "
            f"p99 iteration times ({slack_s:.3f} s) more ({reading})"
        )
        within = int((ratios <= 1).sum())
        value = f"{within} of {len(ratios)} clients; worst {ratios.max():.2f} of its bound"
        report.checks.append(Check(claim, value, within == len(ratios)))
    report.pictures.append(_picture(bench, rows))
    return report


class _Flood:
    """The trace at its load, and cuts of it."""

    def __init__(self, bench: Bench, trace: Trace) -> None:
        if trace.tenant is None or len(trace.tenants) < 2:
            raise ValueError(f"{trace.name} has no clients (column class); a flood needs two")
        self.bench, self.trace, self.tenant = bench, trace, trace.tenant
        cost = trace.input_tokens + 2.0 * trace.output_tokens
        self.loads: Floats = np.bincount(self.tenant, cost, len(trace.tenants))
        self.flooder = int(np.argmax(self.loads))
        self.victims = [at for at in range(len(self.loads)) if at != self.flooder]
        self.equal_part = float(self.loads.mean())
        self.whole = bench.at_load(bench.load)

    def max_min_part(self) -> float:
        """Find the part that, as a bound for everyone, makes all demands fit the capacity."""
        capacity = self.loads.sum() / max(self.bench.load, 1.0)
        rising = np.sort(self.loads)
        before = np.concatenate(([0.0], np.cumsum(rising)[:-1]))
        parts = (capacity - before) / np.arange(len(rising), 0, -1)
        over = np.flatnonzero(rising >= parts)
        return float(parts[over[0]]) if len(over) else float(rising[-1])

    def serve(self, label: str, policy: PolicyConfig) -> Run:
        return self.bench.run(label, policy, self.whole)

    def serve_cut(self, label: str, part: float, whole: int | None = None) -> Run:
        """Cut every client to ``part`` of the priced tokens, but the one that stays whole."""
        chosen = self._cut(part, whole)
        workload = self.trace.where(chosen).at_once()
        workload.arrival_s[:] = self.whole.arrival_s[chosen]
        return self.bench.run(label, PolicyConfig(sharing="fair"), workload)

    def _cut(self, part: float, whole: int | None) -> Mask:
        keep = np.minimum(1.0, part / self.loads)
        if whole is not None:
            keep[whole] = 1.0
        chance = np.random.default_rng(self.bench.seed).random(len(self.trace))
        return chance < keep[self.tenant]


def _p99(served: Run, tenant: int) -> float:
    return percentile(ttft(served, of_tenant(served, tenant)), 99)


def _picture(bench: Bench, rows: list[list[Cell]]) -> Picture:
    rows = sorted(rows, key=lambda row: float(row[6] or 0))
    columns = (("fair", 2), ("fcfs", 3), ("equal part", 4), ("max-min", 6))
    series = [
        Series(name, range(len(rows)), [row[column] for row in rows], "points")
        for name, column in columns
    ]
    return Picture(
        name="flood",
        title=f"A flood: p99 TTFT of the other clients, load {bench.load:g}",
        x_label="client",
        y_label="p99 TTFT in s",
        series=series,
        log_y=True,
    )
