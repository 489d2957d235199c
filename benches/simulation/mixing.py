"""Workloads of two classes: interactive requests and work that can wait."""

from __future__ import annotations

import numpy as np

from chairlift.simulation import Workload

INTERACTIVE_CLASS, BATCH = 0, 1
"""Positions of the classes in every policy that is used with :func:`mixed`."""


def mixed(interactive: Workload, batch: Workload | None) -> Workload:
    """Put both into one order of arrival, each a class and a tenant of its own.

    Prefixes and tenants of the traces are left out.
    """
    parts = [interactive] if batch is None else [interactive, batch]
    lengths = [len(part) for part in parts]
    kind = np.repeat(np.arange(len(parts)), lengths)
    arrivals = np.concatenate([part.arrival_s for part in parts])
    order = np.argsort(arrivals, kind="stable")
    return Workload.of(
        arrivals[order],
        np.concatenate([part.input_tokens for part in parts])[order],
        np.concatenate([part.output_tokens for part in parts])[order],
        tenant=kind[order],
        request_class=kind[order],
        tenants=("interactive", "batch"),
    )
