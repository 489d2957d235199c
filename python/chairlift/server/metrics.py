"""Prometheus metrics: one table that says what there is, and :func:`render` that writes it.

Names are vLLM's where the meaning is the same. Everything comes from one reply of the engine
(``group_metrics()``), so that the sums of a scrape add up; the server adds what it counts itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from chairlift.outputs import ITERATION_BOUNDS, SIZE_BOUNDS, TIME_BOUNDS
from chairlift.server.families import Family, Metric
from chairlift.server.readings import (
    Snapshot,
    blocks,
    count,
    finish_reasons,
    graph_rows,
    host_blocks,
    http_requests,
    kv_usage,
    loop_lag,
    of_classes,
    of_classes_by,
    of_engine,
    of_engine_by,
    of_http,
    of_tenants,
    of_tenants_by,
    of_tenants_times,
    outcomes,
    rejections,
    running,
    times,
)

FIGURES = ("mean", "std", "p50", "p95", "p99")
"""Of the time of iterations of late."""
PREDICTION_QUANTILES = ("p50", "p95")
"""Of measured over predicted time."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CLASS = ("class",)
_TENANT = ("tenant",)

METRICS: tuple[Metric, ...] = (
    # What vLLM has, too; summed over the classes it is what vLLM says.
    Metric(
        "num_requests_running",
        "gauge",
        "Requests that were scheduled and have not ended.",
        _CLASS,
        of_classes(running),
    ),
    Metric(
        "num_requests_waiting",
        "gauge",
        "Requests that were submitted and never scheduled.",
        _CLASS,
        of_classes(count("waiting")),
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "Share of the KV blocks in use; 1 is all of them.",
        (),
        of_engine(kv_usage),
    ),
    Metric(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        (),
        of_engine(count("prompt_tokens")),
    ),
    Metric(
        "prefix_cache_hits",
        "counter",
        "Prompt tokens that the prefix cache had.",
        (),
        of_engine(count("cached_tokens")),
    ),
    Metric(
        "num_preemptions",
        "counter",
        "Sequences that were preempted.",
        (),
        of_engine(count("preemptions")),
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "Prompt tokens of requests that were scheduled.",
        _CLASS,
        of_classes(count("prompt_tokens")),
    ),
    Metric(
        "generation_tokens",
        "counter",
        "Output tokens.",
        _CLASS,
        of_classes(count("output_tokens")),
    ),
    Metric(
        "request_success",
        "counter",
        "Requests that were scheduled or aborted, by how they ended: stop, length, abort, error.",
        ("class", "finished_reason"),
        of_classes_by(finish_reasons),
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "Submission to first output token, in seconds.",
        _CLASS,
        of_classes(times("ttft")),
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Each gap between outputs of a sequence, in seconds.",
        _CLASS,
        of_classes(times("itl", ITERATION_BOUNDS)),
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean gap between the output tokens of a request, in seconds.",
        _CLASS,
        of_classes(times("tpot")),
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "Submission to end, in seconds, of requests that ended by themselves.",
        _CLASS,
        of_classes(times("e2e")),
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "Submission to first iteration, in seconds.",
        _CLASS,
        of_classes(times("queue_time")),
    ),
    Metric(
        "iteration_tokens_total",
        "histogram",
        "Tokens scheduled in an iteration.",
        (),
        of_engine(times("iteration_tokens", SIZE_BOUNDS)),
    ),
    # The iterations.
    Metric(
        "iteration_duration_seconds",
        "histogram",
        "Decision to committed results of an iteration, in seconds.",
        (),
        of_engine(times("iteration_time", ITERATION_BOUNDS)),
    ),
    Metric(
        "iteration_sequences",
        "histogram",
        "Sequences in an iteration.",
        (),
        of_engine(times("iteration_sequences", SIZE_BOUNDS)),
    ),
    Metric(
        "scheduled_tokens",
        "counter",
        "Tokens computed, by phase: prefill or decode.",
        ("phase",),
        of_engine_by(lambda of: {phase: of[f"{phase}_tokens"] for phase in ("prefill", "decode")}),
    ),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens computed again after a preemption.",
        (),
        of_engine(count("recomputed_tokens")),
    ),
    Metric(
        "offloaded_blocks",
        "counter",
        "KV blocks copied to host memory when they were evicted.",
        (),
        of_engine(count("offloaded_blocks")),
    ),
    Metric(
        "restored_tokens",
        "counter",
        "Tokens copied back from host memory instead of computed.",
        (),
        of_engine(count("restored_tokens")),
    ),
    Metric(
        "memory_admissions",
        "counter",
        "Admissions of sequences to KV memory that ended, finished or preempted.",
        (),
        of_engine(count("memory_lives")),
    ),
    Metric(
        "memory_overflows",
        "counter",
        "Those of them during whose life somebody was preempted for memory.",
        (),
        of_engine(count("memory_overflows")),
    ),
    Metric(
        "memory_overflow",
        "gauge",
        "The same as a share, of the last thousand or so.",
        (),
        of_engine(count("memory_overflow")),
    ),
    Metric(
        "memory_overflow_target",
        "gauge",
        "The share that the forecast of memory aims at; 0: there is no forecast.",
        (),
        of_engine(count("memory_overflow_target")),
    ),
    Metric(
        "memory_forecast_quantile",
        "gauge",
        "Quantile of the output lengths that the forecast reckons with.",
        (),
        of_engine(count("memory_quantile")),
    ),
    Metric(
        "backfilled_sequences",
        "counter",
        "Sequences admitted ahead of the first of the queue, which did not fit.",
        (),
        of_engine(count("backfilled")),
    ),
    Metric(
        "forecast_slips",
        "counter",
        "Times that the predicted start of the first of the queue was put off.",
        (),
        of_engine(count("forecast_slips")),
    ),
    Metric(
        "iterations_failed",
        "counter",
        "Iterations that the executor failed.",
        (),
        of_engine(count("failed_steps")),
    ),
    Metric(
        "iteration_in_flight_seconds",
        "gauge",
        "For how many seconds the iteration in flight has run; 0: there is none.",
        (),
        of_engine(lambda of: of["in_flight_us"] / 1e6),
    ),
    Metric(
        "iteration_time_recent_seconds",
        "gauge",
        "Time of iterations of late, in seconds: mean, std (standard deviation), p50, p95, p99.",
        ("figure",),
        of_engine_by(lambda of: {name: of["pace"][name] for name in FIGURES}),
    ),
    Metric(
        "iteration_variance_explained",
        "gauge",
        "Share of the variance of iteration time that follows from what was in the iterations.",
        (),
        of_engine(lambda of: of["pace"]["explained_share"]),
    ),
    Metric(
        "iteration_slowdown",
        "gauge",
        "How many times as long as in the long run iterations take now, whatever is in them.",
        (),
        of_engine(lambda of: of["pace"]["slowdown"]),
    ),
    Metric(
        "iteration_prediction_error",
        "gauge",
        "Mean absolute error of predicted iteration time of late, relative to the measured time.",
        (),
        of_engine(lambda of: of["pace"]["prediction_error"]),
    ),
    Metric(
        "iteration_prediction_ratio",
        "gauge",
        "Measured over predicted iteration time of late, at quantiles: p50, p95.",
        ("quantile",),
        of_engine_by(
            lambda of: {name: of["pace"][f"{name}_ratio"] for name in PREDICTION_QUANTILES}
        ),
    ),
    Metric(
        "iteration_gap_seconds",
        "gauge",
        "Mean time of late from the results of an iteration to the decision on the next, "
        "while somebody ran, in seconds.",
        (),
        of_engine(lambda of: of["pace"]["gap"]),
    ),
    Metric(
        "iteration_idle_seconds",
        "counter",
        "Sum of those gaps, in seconds.",
        (),
        of_engine(lambda of: of["pace"]["idle"]),
    ),
    Metric(
        "iteration_padded_share",
        "gauge",
        "Share of the rows of late that were kept for answers that had ended, as batches do that "
        "leave together.",
        (),
        of_engine(lambda of: of["pace"]["padded_share"]),
    ),
    Metric(
        "padded_rows",
        "counter",
        "Rows kept for answers that had ended, summed over the iterations.",
        (),
        of_engine(lambda of: of["pace"]["padded_rows"]),
    ),
    Metric(
        "cuda_graph_steps",
        "counter",
        "Iterations that were replayed as a CUDA graph.",
        (),
        of_engine(count("graph_steps")),
    ),
    Metric(
        "cuda_graph_rows",
        "counter",
        "Rows of those graphs, by kind: sequence, or padding where the graph was larger than the "
        "iteration.",
        ("kind",),
        of_engine_by(graph_rows),
    ),
    Metric(
        "scheduler_seconds",
        "counter",
        "Seconds spent on deciding iterations and applying their results.",
        (),
        of_engine(lambda of: of["scheduler_us"] / 1e6),
    ),
    Metric(
        "num_sequences_running",
        "gauge",
        "Sequences that run: each of a request's n answers is one.",
        (),
        of_engine(count("running_sequences")),
    ),
    Metric(
        "kv_blocks",
        "gauge",
        "KV blocks by state: used, cached (findable, used by nobody), free.",
        ("state",),
        of_engine_by(blocks),
    ),
    Metric(
        "kv_host_blocks",
        "gauge",
        "KV blocks in host memory by state: used (being copied), cached (findable), free.",
        ("state",),
        of_engine_by(host_blocks),
    ),
    # The gate and the queue.
    Metric(
        "queued_answers",
        "gauge",
        "Places taken at the door and in the queue; n answers take n.",
        (),
        of_engine(count("queued")),
    ),
    Metric(
        "queued_tokens",
        "gauge",
        "Prompt tokens of requests that were never scheduled.",
        (),
        of_engine(count("queued_tokens")),
    ),
    Metric(
        "requests_submitted",
        "counter",
        "Requests that came: the accepted and the rejected.",
        (),
        of_engine(count("submitted")),
    ),
    Metric(
        "requests_accepted",
        "counter",
        "Requests let into the queue: all outcomes and the live.",
        _CLASS,
        of_classes(count("accepted")),
    ),
    Metric(
        "requests_rejected",
        "counter",
        "Requests refused, by reason; without a class where the request named none there is.",
        ("class", "reason"),
        rejections,
    ),
    Metric(
        "request_outcomes",
        "counter",
        "Requests that were let in and ended, by outcome: stop, length, abort, error, and of those "
        "never scheduled queue_timeout, deadline_missed, shed, displaced.",
        ("class", "outcome"),
        of_classes_by(outcomes),
    ),
    Metric(
        "requests_live",
        "gauge",
        "Requests that were let in and have not ended.",
        _CLASS,
        of_classes(count("live")),
    ),
    Metric(
        "predicted_queue_time_seconds",
        "histogram",
        "Queue time that the gate predicted, in seconds, of requests that were scheduled.",
        _CLASS,
        of_classes(times("predicted_queue_time")),
    ),
    Metric(
        "queue_time_error_seconds",
        "histogram",
        "By how many seconds that prediction was wrong.",
        _CLASS,
        of_classes(times("queue_time_error")),
    ),
    Metric(
        "device_seconds",
        "counter",
        "Seconds of iterations, shared out by what each class caused, as device time is priced.",
        _CLASS,
        of_classes(count("device_time")),
    ),
    # The tenants.
    Metric(
        "tenant_requests_accepted",
        "counter",
        "Requests of a tenant let into the queue.",
        _TENANT,
        of_tenants(count("accepted")),
    ),
    Metric(
        "tenant_requests_rejected",
        "counter",
        "Requests of a tenant refused, by reason.",
        ("tenant", "reason"),
        of_tenants_by(lambda of: {why: n for why, n in of["rejections"].items() if n}),
    ),
    Metric(
        "tenant_request_outcomes",
        "counter",
        "Requests of a tenant that were let in and ended, by outcome.",
        ("tenant", "outcome"),
        of_tenants_by(outcomes),
    ),
    Metric(
        "tenant_requests_running",
        "gauge",
        "Requests of a tenant that were scheduled and have not ended.",
        _TENANT,
        of_tenants(running),
    ),
    Metric(
        "tenant_requests_waiting",
        "gauge",
        "Requests of a tenant that were submitted and never scheduled.",
        _TENANT,
        of_tenants(count("waiting")),
    ),
    Metric(
        "tenant_prompt_tokens",
        "counter",
        "Prompt tokens of a tenant's requests that were scheduled.",
        _TENANT,
        of_tenants(count("prompt_tokens")),
    ),
    Metric(
        "tenant_cached_tokens",
        "counter",
        "Those of them that the prefix cache had.",
        _TENANT,
        of_tenants(count("cached_tokens")),
    ),
    Metric(
        "tenant_generation_tokens",
        "counter",
        "Output tokens of a tenant.",
        _TENANT,
        of_tenants(count("output_tokens")),
    ),
    Metric(
        "tenant_device_seconds",
        "counter",
        "Seconds of iterations, shared out by what each tenant caused, as device time is priced.",
        _TENANT,
        of_tenants(count("device_time")),
    ),
    Metric(
        "tenant_queue_time_seconds",
        "histogram",
        "Submission to first iteration of a tenant's requests, in seconds.",
        _TENANT,
        of_tenants_times("queue_time", TIME_BOUNDS),
    ),
    Metric(
        "tenant_time_to_first_token_seconds",
        "histogram",
        "Submission to first output token of a tenant's requests, in seconds.",
        _TENANT,
        of_tenants_times("ttft", TIME_BOUNDS),
    ),
    Metric(
        "tenant_inter_token_latency_seconds",
        "histogram",
        "Each gap between outputs of a tenant's sequences, in seconds.",
        _TENANT,
        of_tenants_times("itl", ITERATION_BOUNDS),
    ),
    # The server.
    Metric(
        "http_requests",
        "counter",
        "Requests for chats and completions that were answered; status 0: the client had left.",
        ("method", "route", "status"),
        http_requests,
    ),
    Metric(
        "http_open_streams",
        "gauge",
        "Streams that are being sent.",
        (),
        of_http(lambda http: http.open_streams),
    ),
    Metric(
        "http_disconnects",
        "counter",
        "Clients that left before their answer was complete.",
        (),
        of_http(lambda http: http.disconnects),
    ),
    Metric(
        "http_dropped_readers",
        "counter",
        "Streams ended because their client stopped reading.",
        (),
        of_http(lambda http: http.dropped_readers),
    ),
    Metric(
        "event_loop_lag_seconds",
        "histogram",
        "How much later than asked the server's event loop comes back, in seconds.",
        (),
        of_http(loop_lag),
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
