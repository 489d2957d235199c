"""A metric, and Prometheus' family of it: its values at the time of a snapshot, with their labels.

Every name has the prefix ``chairlift:``, every value the label ``model_name``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from chairlift.server.readings import Buckets, Reader, Snapshot

PREFIX = "chairlift:"

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name (a counter's without ``_total``), meaning, labels, and where it is."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Reader

    @property
    def exposed_name(self) -> str:
        """The name to ask for, a histogram's without ``_bucket``, ``_sum`` and ``_count``."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    def family(self, snapshot: Snapshot) -> Family:
        """The metric with its values."""
        name, labels = PREFIX + self.name, ("model_name", *self.labels)
        samples = (((snapshot.model_name, *own), value) for own, value in self.read(snapshot))
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(name, self.help, labels=labels)
            for own, value in samples:
                if isinstance(value, Buckets):
                    histogram.add_metric(own, list(_cumulative(value)), value.total)
            return histogram
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(name, self.help, labels=labels)
        for own, value in samples:
            if not isinstance(value, Buckets):
                family.add_metric(own, value)
        return family


def _cumulative(buckets: Buckets) -> Iterator[tuple[str, float]]:
    seen = 0
    bounds = [*(str(float(bound)) for bound in buckets.bounds), "+Inf"]
    for bound, here in zip(bounds, buckets.counts, strict=True):
        seen += here
        yield bound, seen
