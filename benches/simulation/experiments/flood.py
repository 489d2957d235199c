"""One client sends most of the load: what the others feel of it.

The equal-share run has the same requests of every client that sends no more than its fair share of
the load (an equal part of the priced tokens), and of the others as many, chosen by chance, as make
up their share.
"""

from __future__ import annotations

import numpy as np

from chairlift.config import PolicyConfig
from simulation.bench import Bench, Run
from simulation.measures import Mask, of_tenant, percentile, ttft
from simulation.pictures import Picture, Series
from simulation.report import (
    Cell,
    Check,
    Report,
    Table,
    engine_table,
    latencies,
    outcome_table,
    state_of,
)
from simulation.traces import Trace


def fair_share(trace: Trace, seed: int) -> Mask:
    """Choose the requests of the equal-share run."""
    assert trace.tenant is not None
    cost = trace.input_tokens + 2.0 * trace.output_tokens
    loads = np.bincount(trace.tenant, cost, len(trace.tenants))
    keep = np.minimum(1.0, loads.sum() / len(loads) / loads)
    return np.random.default_rng(seed).random(len(trace)) < keep[trace.tenant]


def run(bench: Bench) -> Report:
    """Compare fair sharing and FCFS with the equal-share run, victim by victim."""
    trace = bench.trace
    if trace.tenant is None or len(trace.tenants) < 2:
        raise ValueError(f"{trace.name} has no clients (column class); flood needs at least two")
    flooder = int(np.argmax(np.bincount(trace.tenant)))
    victims = [tenant for tenant in range(len(trace.tenants)) if tenant != flooder]
    rate = bench.load * bench.capacity(trace)
    chosen = fair_share(trace, bench.seed)
    whole = trace.at_rate(rate, bench.seed)
    kept = trace.where(chosen).at_rate(rate, bench.seed)
    kept.arrival_s[:] = whole.arrival_s[chosen]  # each at its own time, not faster
    fair = bench.run("fair", PolicyConfig(sharing="fair"), whole)
    fcfs = bench.run("fcfs", PolicyConfig(), whole)
    equal = bench.run("equal share", PolicyConfig(sharing="fair"), kept)
    runs = [fair, fcfs, equal]

    def p99(served: Run, tenant: int) -> float:
        return percentile(ttft(served, of_tenant(served, tenant)), 99)

    slack_s = 3 * percentile(fair.result.iteration_s, 99)
    rows: list[list[Cell]] = []
    excess = []
    for tenant in victims:
        alone = p99(equal, tenant)
        bound = max(1.25 * alone, alone + slack_s)
        row = [p99(fair, tenant), p99(fcfs, tenant), alone, bound]
        requests = int((whole.tenant == tenant).sum())
        rows.append([trace.tenants[tenant], requests, *row])
        excess.append(row[0] / bound)
    header = ("client", "requests", "fair s", "fcfs s", "equal share s", "bound s")
    sent = (whole.tenant == flooder).mean()
    share = f"{trace.tenants[flooder]} sends {sent:.0%} of the requests"
    everybody = [np.isin(served.workload.tenant, victims) for served in runs]
    report = Report(
        "flood",
        "A flood",
        state_of(bench, runs, flooder=share),
        [
            latencies("Latencies of all clients but the flooder", runs, everybody),
            Table("p99 TTFT of each of them", header, rows),
            engine_table(runs),
            outcome_table(runs),
        ],
    )
    within = [ratio <= 1 for ratio in excess if not np.isnan(ratio)]
    claim = (
        "p99 TTFT of every other client is at most 1.25 times its equal-share run's, or three p99 "
        f"iteration times ({slack_s:.3f} s) more"
    )
    value = f"{sum(within)} of {len(within)} clients; worst {max(excess):.2f} of its bound"
    report.checks.append(Check(claim, value, all(within)))
    order = np.argsort([row[5] for row in rows])
    for_client = range(len(rows))
    columns = (("fair", 2), ("fcfs", 3), ("equal share", 4))
    series: list[Series] = [
        Series(name, for_client, [rows[at][column] for at in order], "points")
        for name, column in columns
    ]
    series.append(Series("bound", for_client, [rows[at][5] for at in order], "dashed"))
    report.pictures.append(
        Picture(
            name="flood",
            title=f"A flood: p99 TTFT of the other clients, load {bench.load:g}",
            x_label="client",
            y_label="p99 TTFT in s",
            series=series,
            log_y=True,
        )
    )
    return report
