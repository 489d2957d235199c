"""What the metrics read: a snapshot, and the ways to find values in it.

A reader takes a snapshot and yields values with those of their labels. Tenants are labels: at most
:data:`MOST_TENANTS` of them, the rest is :data:`OTHER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.outputs import TIME_BOUNDS
from chairlift.server.loop_lag import LAG_BOUNDS, LoopLag

MOST_TENANTS = 64
"""Tenants that have series of their own."""
OTHER = "other"
"""The label of all other tenants."""

Group = Mapping[str, Any]
"""What the engine says of a class or a tenant."""
Groups = Mapping[str, Mapping[str, Group]]
"""``group_metrics()``."""


@dataclass(slots=True)
class HttpCounters:
    """What the server counts of its own; the application adds to it."""

    requests: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """Answered requests by method, route and status."""
    open_streams: int = 0
    """Streams being sent now."""
    disconnects: int = 0
    """Clients that left before their answer was complete."""
    dropped_readers: int = 0
    """Streams that were ended because their client stopped reading."""
    loop_lag: LoopLag = field(default_factory=LoopLag)

    def count(self, method: str, route: str, status: int) -> None:
        """Count an answer. ``route`` is a path of the application, never one that was asked for."""
        key = (method, route, status)
        self.requests[key] = self.requests.get(key, 0) + 1


@dataclass(slots=True)
class ShownTenants:
    """Which tenants have series of their own: the first that came, those with more traffic first.

    Who is shown stays so: a counter never moves from one label to another.
    """

    names: dict[str, None] = field(default_factory=dict)

    def update(self, groups: Groups) -> Sequence[str]:
        """Take in those that came since, while there is room; returns all that are shown."""
        if len(self.names) < MOST_TENANTS:
            tenants = groups["tenants"].items()
            fresh = [item for item in tenants if item[0] not in (*self.names, OTHER)]
            fresh.sort(key=lambda item: -(item[1]["accepted"] + item[1]["rejected"]))
            for name, _ in fresh[: MOST_TENANTS - len(self.names)]:
                self.names[name] = None
        return tuple(self.names)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be told of one moment."""

    groups: Groups | None
    """``group_metrics()``; None: there is no engine (yet)."""
    model_name: str = ""
    shown_tenants: Sequence[str] = ()
    http: HttpCounters | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: counts by bucket, one more than there are bounds."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    """Sum of the values."""


Value = float | Buckets
Samples = Iterable[tuple[tuple[str, ...], Value]]
"""Values with those of the labels."""
Reader = Callable[[Snapshot], Samples]


def of_engine(read: Callable[[Group], Value]) -> Reader:
    """One value of the engine."""

    def samples(snapshot: Snapshot) -> Samples:
        if snapshot.groups is not None:
            yield (), read(snapshot.groups["engine"][""])

    return samples


def of_engine_by(
    values: Callable[[Group], Mapping[str, float]],
) -> Reader:
    """Values of the engine by one label."""

    def samples(snapshot: Snapshot) -> Samples:
        if snapshot.groups is not None:
            for label, value in values(snapshot.groups["engine"][""]).items():
                yield (label,), value

    return samples


def of_classes(read: Callable[[Group], Value]) -> Reader:
    """One value of each class."""

    def samples(snapshot: Snapshot) -> Samples:
        for name, group in (snapshot.groups or {}).get("classes", {}).items():
            yield (name,), read(group)

    return samples


def of_classes_by(
    values: Callable[[Group], Mapping[str, float]],
) -> Reader:
    """Values of each class by one label more."""

    def samples(snapshot: Snapshot) -> Samples:
        for name, group in (snapshot.groups or {}).get("classes", {}).items():
            for label, value in values(group).items():
                yield (name, label), value

    return samples


def of_tenants(read: Callable[[Group], float]) -> Reader:
    """One number of each tenant; those of the others are added up."""

    def samples(snapshot: Snapshot) -> Samples:
        shown, others = _by_tenant(snapshot)
        for name, group in shown:
            yield (name,), read(group)
        if others:
            yield (OTHER,), sum(map(read, others))

    return samples


def of_tenants_by(
    values: Callable[[Group], Mapping[str, float]],
) -> Reader:
    """Numbers of each tenant by one label more."""

    def samples(snapshot: Snapshot) -> Samples:
        shown, others = _by_tenant(snapshot)
        for name, group in shown:
            for label, value in values(group).items():
                yield (name, label), value
        summed: dict[str, float] = {}
        for group in others:
            for label, value in values(group).items():
                summed[label] = summed.get(label, 0) + value
        for label, value in summed.items():
            yield (OTHER, label), value

    return samples


def of_tenants_times(key: str, bounds: Sequence[float]) -> Reader:
    """One histogram of each tenant."""

    def samples(snapshot: Snapshot) -> Samples:
        shown, others = _by_tenant(snapshot)
        for name, group in shown:
            yield (name,), _buckets(group, key, bounds)
        if others:
            counts = [sum(column) for column in zip(*(of[key]["counts"] for of in others))]  # noqa: B905 - of one length
            yield (OTHER,), Buckets(bounds, counts, sum(of[key]["sum"] for of in others))

    return samples


def _by_tenant(snapshot: Snapshot) -> tuple[list[tuple[str, Group]], list[Group]]:
    """Those that are shown, and the others."""
    if snapshot.groups is None:
        return [], []
    tenants = snapshot.groups["tenants"]
    shown = [(name, tenants[name]) for name in snapshot.shown_tenants if name in tenants]
    names = set(snapshot.shown_tenants)
    others = [group for name, group in tenants.items() if name not in names]
    rest = snapshot.groups["other_tenants"][""]
    if rest["accepted"] + rest["rejected"] > 0:
        others.append(rest)
    return shown, others


def _buckets(group: Group, key: str, bounds: Sequence[float]) -> Buckets:
    return Buckets(bounds, group[key]["counts"], group[key]["sum"])


def times(key: str, bounds: Sequence[float] = TIME_BOUNDS) -> Callable[[Group], Buckets]:
    """A histogram of a group."""
    return lambda group: _buckets(group, key, bounds)


def count(key: str) -> Callable[[Group], float]:
    """A number of a group."""
    return lambda group: float(group[key])


def running(group: Group) -> float:
    """Requests that were scheduled and have not ended."""
    return float(group["live"] - group["waiting"])


def finish_reasons(group: Group) -> dict[str, float]:
    """Ends that are not of those who only waited."""
    return {
        "stop": group["finished"] - group["finished_by_length"],
        "length": group["finished_by_length"],
        "abort": group["aborted"],
        "error": group["failed"],
    }


def _given_up(group: Group) -> dict[str, float]:
    return {
        "queue_timeout": group["expired"] - group["deadline_missed"],
        "deadline_missed": group["deadline_missed"],
        "shed": group["shed"],
        "displaced": group["displaced"],
    }


def outcomes(group: Group) -> dict[str, float]:
    """All ends."""
    return finish_reasons(group) | _given_up(group)


def rejections(snapshot: Snapshot) -> Samples:
    """By class and reason; of those that named no class there is, the class is empty."""
    if snapshot.groups is None:
        return
    classless = dict(snapshot.groups["engine"][""]["rejections"])
    for name, group in snapshot.groups["classes"].items():
        for reason, count in group["rejections"].items():
            classless[reason] -= count
            yield (name, reason), count
    for reason, count in classless.items():
        if count:
            yield ("", reason), count


def kv_usage(engine: Group) -> float:
    """Share of the KV blocks in use."""
    blocks = engine["used_blocks"] + engine["free_blocks"] + engine["cached_blocks"]
    return float(engine["used_blocks"] / blocks) if blocks else 0.0


def blocks(engine: Group) -> dict[str, float]:
    """KV blocks by state."""
    return {state: engine[f"{state}_blocks"] for state in ("used", "cached", "free")}


def graph_rows(engine: Group) -> dict[str, float]:
    """Rows of replayed CUDA graphs by kind."""
    padding = engine["graph_padded_rows"]
    return {"sequence": engine["graph_rows"] - padding, "padding": padding}


def host_blocks(engine: Group) -> dict[str, float]:
    """KV blocks in host memory by state."""
    return {state: engine[f"host_{state}_blocks"] for state in ("used", "cached", "free")}


def http_requests(snapshot: Snapshot) -> Samples:
    """Answers by method, route and status."""
    if snapshot.http is not None:
        for (method, route, status), count in snapshot.http.requests.items():
            yield (method, route, str(status)), count


def loop_lag(http: HttpCounters) -> Buckets:
    """How late the event loop was."""
    return Buckets(LAG_BOUNDS, http.loop_lag.counts, http.loop_lag.total)


def of_http(read: Callable[[HttpCounters], Value]) -> Reader:
    """One value of the server's own."""

    def samples(snapshot: Snapshot) -> Samples:
        if snapshot.http is not None:
            yield (), read(snapshot.http)

    return samples
