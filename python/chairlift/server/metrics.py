"""Prometheus metrics: one table that says what there is, and :func:`render` that writes it.

Names are vLLM's where the meaning is the same, after the prefix ``chairlift:``. Everything comes
from one reply of the engine (``group_metrics()``), so that the sums of a scrape add up; the server
adds what it counts itself. Tenants are labels: at most :data:`MOST_TENANTS` of them, the rest is
``other``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from chairlift.outputs import ITERATION_BOUNDS, SIZE_BOUNDS, TIME_BOUNDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "chairlift:"
MOST_TENANTS = 64
"""Tenants that have series of their own."""
OTHER = "other"
"""The label of all other tenants."""

Group = Mapping[str, Any]
"""What the engine says of a class or a tenant."""
Groups = Mapping[str, Mapping[str, Group]]
"""``group_metrics()``."""
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


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
            fresh = [(name, of) for name, of in tenants if name not in self.names]
            fresh.sort(key=lambda item: -(item[1]["accepted"] + item[1]["rejected"]))
            for name, _ in fresh[: MOST_TENANTS - len(self.names)]:
                if name != OTHER:
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


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name (a counter's without ``_total``), meaning, labels, and where it is."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Samples]

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
    for bound, count in zip(bounds, buckets.counts, strict=True):
        seen += count
        yield bound, seen


def _engine(read: Callable[[Group], Value]) -> Callable[[Snapshot], Samples]:
    """One value of the engine."""

    def samples(snapshot: Snapshot) -> Samples:
        if snapshot.groups is not None:
            yield (), read(snapshot.groups["engine"][""])

    return samples


def _engine_by(
    values: Callable[[Group], Mapping[str, float]],
) -> Callable[[Snapshot], Samples]:
    """Values of the engine by one label."""

    def samples(snapshot: Snapshot) -> Samples:
        if snapshot.groups is not None:
            for label, value in values(snapshot.groups["engine"][""]).items():
                yield (label,), value

    return samples


def _classes(read: Callable[[Group], Value]) -> Callable[[Snapshot], Samples]:
    """One value of each class."""

    def samples(snapshot: Snapshot) -> Samples:
        for name, group in (snapshot.groups or {}).get("classes", {}).items():
            yield (name,), read(group)

    return samples


def _classes_by(
    values: Callable[[Group], Mapping[str, float]],
) -> Callable[[Snapshot], Samples]:
    """Values of each class by one label more."""

    def samples(snapshot: Snapshot) -> Samples:
        for name, group in (snapshot.groups or {}).get("classes", {}).items():
            for label, value in values(group).items():
                yield (name, label), value

    return samples


def _tenants(read: Callable[[Group], float]) -> Callable[[Snapshot], Samples]:
    """One number of each tenant; those of the others are added up."""

    def samples(snapshot: Snapshot) -> Samples:
        shown, others = _by_tenant(snapshot)
        for name, group in shown:
            yield (name,), read(group)
        if others:
            yield (OTHER,), sum(map(read, others))

    return samples


def _tenants_by(
    values: Callable[[Group], Mapping[str, float]],
) -> Callable[[Snapshot], Samples]:
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


def _tenant_times(key: str, bounds: Sequence[float]) -> Callable[[Snapshot], Samples]:
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


def _times(key: str, bounds: Sequence[float] = TIME_BOUNDS) -> Callable[[Group], Buckets]:
    return lambda group: _buckets(group, key, bounds)


def _count(key: str) -> Callable[[Group], float]:
    return lambda group: float(group[key])


def _running(group: Group) -> float:
    return float(group["live"] - group["waiting"])


def _finish_reasons(group: Group) -> dict[str, float]:
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


def _outcomes(group: Group) -> dict[str, float]:
    return _finish_reasons(group) | _given_up(group)


def _rejections(snapshot: Snapshot) -> Samples:
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


def _kv_usage(engine: Group) -> float:
    blocks = engine["used_blocks"] + engine["free_blocks"] + engine["cached_blocks"]
    return float(engine["used_blocks"] / blocks) if blocks else 0.0


def _blocks(engine: Group) -> dict[str, float]:
    return {state: engine[f"{state}_blocks"] for state in ("used", "cached", "free")}


def _http_requests(snapshot: Snapshot) -> Samples:
    if snapshot.http is not None:
        for (method, route, status), count in snapshot.http.requests.items():
            yield (method, route, str(status)), count


def _http(read: Callable[[HttpCounters], float]) -> Callable[[Snapshot], Samples]:
    def samples(snapshot: Snapshot) -> Samples:
        if snapshot.http is not None:
            yield (), read(snapshot.http)

    return samples


_CLASS = ("class",)
_TENANT = ("tenant",)

METRICS: tuple[Metric, ...] = (
    # What vLLM has, too; summed over the classes it is what vLLM says.
    Metric(
        "num_requests_running",
        "gauge",
        "Requests that were scheduled and have not ended.",
        _CLASS,
        _classes(_running),
    ),
    Metric(
        "num_requests_waiting",
        "gauge",
        "Requests that were submitted and never scheduled.",
        _CLASS,
        _classes(_count("waiting")),
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "Share of the KV blocks in use; 1 is all of them.",
        (),
        _engine(_kv_usage),
    ),
    Metric(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        (),
        _engine(_count("prompt_tokens")),
    ),
    Metric(
        "prefix_cache_hits",
        "counter",
        "Prompt tokens that the prefix cache had.",
        (),
        _engine(_count("cached_tokens")),
    ),
    Metric(
        "num_preemptions",
        "counter",
        "Sequences that were preempted.",
        (),
        _engine(_count("preemptions")),
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "Prompt tokens of requests that were scheduled.",
        _CLASS,
        _classes(_count("prompt_tokens")),
    ),
    Metric(
        "generation_tokens",
        "counter",
        "Output tokens.",
        _CLASS,
        _classes(_count("output_tokens")),
    ),
    Metric(
        "request_success",
        "counter",
        "Requests that were scheduled or aborted, by how they ended: stop, length, abort, error.",
        ("class", "finished_reason"),
        _classes_by(_finish_reasons),
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "Submission to first output token, in seconds.",
        _CLASS,
        _classes(_times("ttft")),
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Each gap between outputs of a sequence, in seconds.",
        _CLASS,
        _classes(_times("itl", ITERATION_BOUNDS)),
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean gap between the output tokens of a request, in seconds.",
        _CLASS,
        _classes(_times("tpot")),
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "Submission to end, in seconds, of requests that ended by themselves.",
        _CLASS,
        _classes(_times("e2e")),
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "Submission to first iteration, in seconds.",
        _CLASS,
        _classes(_times("queue_time")),
    ),
    Metric(
        "iteration_tokens_total",
        "histogram",
        "Tokens scheduled in an iteration.",
        (),
        _engine(_times("iteration_tokens", SIZE_BOUNDS)),
    ),
    # The iterations.
    Metric(
        "iteration_duration_seconds",
        "histogram",
        "Decision to committed results of an iteration, in seconds.",
        (),
        _engine(_times("iteration_time", ITERATION_BOUNDS)),
    ),
    Metric(
        "iteration_sequences",
        "histogram",
        "Sequences in an iteration.",
        (),
        _engine(_times("iteration_sequences", SIZE_BOUNDS)),
    ),
    Metric(
        "scheduled_tokens",
        "counter",
        "Tokens computed, by phase: prefill or decode.",
        ("phase",),
        _engine_by(lambda of: {phase: of[f"{phase}_tokens"] for phase in ("prefill", "decode")}),
    ),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens computed again after a preemption.",
        (),
        _engine(_count("recomputed_tokens")),
    ),
    Metric(
        "iterations_failed",
        "counter",
        "Iterations that the executor failed.",
        (),
        _engine(_count("failed_steps")),
    ),
    Metric(
        "iteration_in_flight_seconds",
        "gauge",
        "For how many seconds the iteration in flight has run; 0: there is none.",
        (),
        _engine(lambda of: of["in_flight_us"] / 1e6),
    ),
    Metric(
        "scheduler_seconds",
        "counter",
        "Seconds spent on deciding iterations and applying their results.",
        (),
        _engine(lambda of: of["scheduler_us"] / 1e6),
    ),
    Metric(
        "num_sequences_running",
        "gauge",
        "Sequences that run: each of a request's n answers is one.",
        (),
        _engine(_count("running_sequences")),
    ),
    Metric(
        "kv_blocks",
        "gauge",
        "KV blocks by state: used, cached (findable, used by nobody), free.",
        ("state",),
        _engine_by(_blocks),
    ),
    # The gate and the queue.
    Metric(
        "queued_answers",
        "gauge",
        "Places taken at the door and in the queue; n answers take n.",
        (),
        _engine(_count("queued")),
    ),
    Metric(
        "queued_tokens",
        "gauge",
        "Prompt tokens of requests that were never scheduled.",
        (),
        _engine(_count("queued_tokens")),
    ),
    Metric(
        "requests_submitted",
        "counter",
        "Requests that came: the accepted and the rejected.",
        (),
        _engine(_count("submitted")),
    ),
    Metric(
        "requests_accepted",
        "counter",
        "Requests let into the queue: all outcomes and the live.",
        _CLASS,
        _classes(_count("accepted")),
    ),
    Metric(
        "requests_rejected",
        "counter",
        "Requests refused, by reason; without a class where the request named none there is.",
        ("class", "reason"),
        _rejections,
    ),
    Metric(
        "request_outcomes",
        "counter",
        "Requests that were let in and ended, by outcome: stop, length, abort, error, and of those "
        "never scheduled queue_timeout, deadline_missed, shed, displaced.",
        ("class", "outcome"),
        _classes_by(_outcomes),
    ),
    Metric(
        "requests_live",
        "gauge",
        "Requests that were let in and have not ended.",
        _CLASS,
        _classes(_count("live")),
    ),
    Metric(
        "predicted_queue_time_seconds",
        "histogram",
        "Queue time that the gate predicted, in seconds, of requests that were scheduled.",
        _CLASS,
        _classes(_times("predicted_queue_time")),
    ),
    Metric(
        "queue_time_error_seconds",
        "histogram",
        "By how many seconds that prediction was wrong.",
        _CLASS,
        _classes(_times("queue_time_error")),
    ),
    Metric(
        "device_seconds",
        "counter",
        "Seconds of iterations, shared out by the tokens that each class had in them.",
        _CLASS,
        _classes(_count("device_time")),
    ),
    # The tenants.
    Metric(
        "tenant_requests_accepted",
        "counter",
        "Requests of a tenant let into the queue.",
        _TENANT,
        _tenants(_count("accepted")),
    ),
    Metric(
        "tenant_requests_rejected",
        "counter",
        "Requests of a tenant refused, by reason.",
        ("tenant", "reason"),
        _tenants_by(lambda of: {why: n for why, n in of["rejections"].items() if n}),
    ),
    Metric(
        "tenant_request_outcomes",
        "counter",
        "Requests of a tenant that were let in and ended, by outcome.",
        ("tenant", "outcome"),
        _tenants_by(_outcomes),
    ),
    Metric(
        "tenant_requests_running",
        "gauge",
        "Requests of a tenant that were scheduled and have not ended.",
        _TENANT,
        _tenants(_running),
    ),
    Metric(
        "tenant_requests_waiting",
        "gauge",
        "Requests of a tenant that were submitted and never scheduled.",
        _TENANT,
        _tenants(_count("waiting")),
    ),
    Metric(
        "tenant_prompt_tokens",
        "counter",
        "Prompt tokens of a tenant's requests that were scheduled.",
        _TENANT,
        _tenants(_count("prompt_tokens")),
    ),
    Metric(
        "tenant_cached_tokens",
        "counter",
        "Those of them that the prefix cache had.",
        _TENANT,
        _tenants(_count("cached_tokens")),
    ),
    Metric(
        "tenant_generation_tokens",
        "counter",
        "Output tokens of a tenant.",
        _TENANT,
        _tenants(_count("output_tokens")),
    ),
    Metric(
        "tenant_device_seconds",
        "counter",
        "Seconds of iterations, shared out by the tokens that each tenant had in them.",
        _TENANT,
        _tenants(_count("device_time")),
    ),
    Metric(
        "tenant_queue_time_seconds",
        "histogram",
        "Submission to first iteration of a tenant's requests, in seconds.",
        _TENANT,
        _tenant_times("queue_time", TIME_BOUNDS),
    ),
    Metric(
        "tenant_time_to_first_token_seconds",
        "histogram",
        "Submission to first output token of a tenant's requests, in seconds.",
        _TENANT,
        _tenant_times("ttft", TIME_BOUNDS),
    ),
    Metric(
        "tenant_inter_token_latency_seconds",
        "histogram",
        "Each gap between outputs of a tenant's sequences, in seconds.",
        _TENANT,
        _tenant_times("itl", ITERATION_BOUNDS),
    ),
    # The server.
    Metric(
        "http_requests",
        "counter",
        "Answered HTTP requests.",
        ("method", "route", "status"),
        _http_requests,
    ),
    Metric(
        "http_open_streams",
        "gauge",
        "Streams that are being sent.",
        (),
        _http(lambda http: http.open_streams),
    ),
    Metric(
        "http_disconnects",
        "counter",
        "Clients that left before their answer was complete.",
        (),
        _http(lambda http: http.disconnects),
    ),
    Metric(
        "http_dropped_readers",
        "counter",
        "Streams ended because their client stopped reading.",
        (),
        _http(lambda http: http.dropped_readers),
    ),
    Metric(
        "engine_up",
        "gauge",
        "1 while the engine serves, 0 while it loads or after it ended.",
        ("version",),
        lambda snapshot: [((snapshot.version,), float(snapshot.groups is not None))],
    ),
)


class _Collector(Collector):
    """The metrics of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """All of them."""
        return (metric.family(self._snapshot) for metric in METRICS)


def render(snapshot: Snapshot) -> bytes:
    """Write a snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    return generate_latest(registry)
