"""One module for each experiment; each has ``run(bench)``, which returns its report."""

from __future__ import annotations

from collections.abc import Callable

from simulation.bench import Bench
from simulation.experiments import (
    backfill,
    fairness,
    flood,
    governor,
    head_of_line,
    memory,
    order,
    overload,
    priority,
    queue_time,
)
from simulation.report import Report

EXPERIMENTS: dict[str, Callable[[Bench], Report]] = {
    "head-of-line": head_of_line.run,
    "fairness": fairness.run,
    "flood": flood.run,
    "priority": priority.run,
    "overload": overload.run,
    "queue-time": queue_time.run,
    "order": order.run,
    "memory": memory.run,
    "governor": governor.run,
    "backfill": backfill.run,
}
