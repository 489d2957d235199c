"""Who is next within a flow: the oldest, the shortest, or the one with the least footprint."""

from __future__ import annotations

from chairlift.config import Order, PolicyConfig
from simulation.bench import Bench
from simulation.measures import e2e, everyone, mean, percentile, queue_time
from simulation.pictures import Picture, cdf
from simulation.report import (
    Cell,
    Report,
    Table,
    engine_tables,
    latencies,
    state_of,
)

ORDERS: tuple[Order, ...] = ("arrival", "shortest", "footprint")


def run(bench: Bench) -> Report:
    """Compare the orders at one load."""
    workload = bench.at_load(bench.load)
    runs = [bench.run(order, PolicyConfig(order=order), workload) for order in ORDERS]
    rows: list[list[Cell]] = []
    for served in runs:
        whole, waits = e2e(served, everyone(served)), queue_time(served, everyone(served))
        worst = float(waits.max(initial=0.0))
        rows.append([served.label, mean(whole), percentile(whole, 95), worst])
    header = ("order", "mean E2E s", "p95 E2E s", "worst wait s")
    return Report(
        "order",
        "Order within a flow",
        state_of(bench, runs[0], ageing=f"{PolicyConfig().ageing:g}"),
        [
            Table("Order", header, rows),
            latencies("Latencies", runs),
            *engine_tables(runs),
        ],
        pictures=[
            Picture(
                name="order",
                title=f"Order within a flow, load {bench.load:g}",
                x_label="E2E in s",
                y_label="share of requests",
                series=[cdf(served.label, e2e(served, everyone(served))) for served in runs],
                log_x=True,
            )
        ],
    )
