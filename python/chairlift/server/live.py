"""What the live page shows: :func:`state` makes it small and plain, :class:`Pulse` takes samples.

However many look, the engine is asked at most four times a second, and only while somebody does.
What the page tells of the last minute is the difference of two samples of counters that only grow.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chairlift.outputs import ITERATION_BOUNDS, TIME_BOUNDS

SAMPLE_INTERVAL_S = 0.25
"""The engine is asked no more often."""
WINDOW_S = 60.0
"""What percentiles and rates are of."""
_CHECKPOINT_INTERVAL_S = 1.0
"""Counters of the past are kept this far apart."""
_TRACE_POINTS = 120
"""Points of the iteration times of the last minute."""
_RECENT_ITERATIONS = 48
"""Iterations that are shown one by one."""
_MOST_TENANTS = 8
"""Tenants that are shown by name."""

Groups = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""``group_metrics()``."""


class Engine(Protocol):
    """What is asked of an engine; :class:`chairlift.AsyncEngine` is one."""

    async def group_metrics(self, *, brief: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
        """Counters of classes, tenants and the engine."""

    async def iterations(self, since_step: int = 0) -> dict[str, Any]:
        """The last iterations, rows and longest waits."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment."""

    at: float
    """On a clock that never goes back."""
    groups: Groups
    recent: Mapping[str, Any]
    """``iterations()``."""


@dataclass(frozen=True, slots=True)
class TracePoint:
    """Iterations of half a second."""

    at: float
    """When it ends, on the engine's clock."""
    count: int
    total: float
    """Sum of their times, in seconds."""
    longest: float


@dataclass(frozen=True, slots=True)
class View:
    """All that :func:`state` needs: now, what was counted before, and the iteration times since."""

    now: Sample
    before: Sample
    trace: Sequence[TracePoint]
    model_name: str = ""


def state(view: View) -> dict[str, Any]:
    """Make what the page shows; plain values that JSON can say. Times are seconds."""
    now, before = view.now, view.before
    window = now.at - before.at
    engine = now.groups["engine"][""]
    return {
        "model": view.model_name,
        "window": round(window, 1),
        "running": engine["live"] - engine["waiting"],
        "waiting": engine["waiting"],
        "sequences": engine["running_sequences"],
        "queued_tokens": engine["queued_tokens"],
        "kv": {name: engine[f"{name}_blocks"] for name in ("used", "cached", "free")},
        "rates": _rates(engine, before.groups["engine"][""], window),
        "in_flight": engine["in_flight_us"] / 1e6,
        "classes": _classes(now, before, window),
        "tenants": _tenants(now, before, window),
        "refusals": _refusals(now.groups, before.groups),
        "rows": _rows(now.recent),
        "iterations": _iterations(now.recent),
        "trace": _trace(view.trace, float(now.recent["now"])),
        "iteration_time": _percentiles(
            engine["iteration_time"],
            before.groups["engine"][""]["iteration_time"],
            ITERATION_BOUNDS,
        ),
        "iteration_target": _target(now.groups),
    }


def _rates(
    now: Mapping[str, Any], before: Mapping[str, Any], window: float
) -> dict[str, float | None]:
    names = {"output_tokens": "output", "prompt_tokens": "prompt", "finished": "requests"}
    rates: dict[str, float | None] = {
        short: _rate(now[name] - before[name], window) for name, short in names.items()
    }
    looked_up = now["prompt_tokens"] - before["prompt_tokens"]
    cached = now["cached_tokens"] - before["cached_tokens"]
    rates["cache_hits"] = round(cached / looked_up, 3) if looked_up else None
    return rates


def _rate(count: float, window: float) -> float | None:
    return round(count / window, 2) if window > 0 else None


def _classes(now: Sample, before: Sample, window: float) -> list[dict[str, Any]]:
    shown = []
    for name, group in now.groups["classes"].items():
        old = before.groups["classes"].get(name, group)
        shown.append(
            {
                "name": name,
                "waiting": group["waiting"],
                "running": group["live"] - group["waiting"],
                "oldest": now.recent["oldest_by_class"].get(name),
                "output": _rate(group["output_tokens"] - old["output_tokens"], window),
                "ttft": _percentiles(group["ttft"], old["ttft"], TIME_BOUNDS),
                "ttft_target": group["ttft_target"],
                "itl": _percentiles(group["itl"], old["itl"], ITERATION_BOUNDS),
                "tpot_target": group["tpot_target"],
            }
        )
    return shown


def _tenants(now: Sample, before: Sample, window: float) -> dict[str, Any]:
    """Those with most to do, by name, and how many others there are."""
    device = now.groups["engine"][""]["device_us"] - before.groups["engine"][""]["device_us"]
    tenants = []
    for name, group in now.groups["tenants"].items():
        old = before.groups["tenants"].get(name)
        seconds = group["device_time"] - (old["device_time"] if old else 0.0)
        output = group["output_tokens"] - (old["output_tokens"] if old else 0)
        tenants.append(
            {
                "name": name,
                "waiting": group["waiting"],
                "running": group["live"] - group["waiting"],
                "oldest": now.recent["oldest_by_tenant"].get(name),
                "share": round(min(seconds * 1e6 / device, 1.0), 3) if device > 0 else None,
                "output": _rate(output, window),
            }
        )
    tenants.sort(key=lambda of: (-of["waiting"] - of["running"], -(of["share"] or 0), of["name"]))
    rest = tenants[_MOST_TENANTS:]
    return {
        "shown": tenants[:_MOST_TENANTS],
        "others": len(rest),
        "others_waiting": sum(tenant["waiting"] for tenant in rest),
    }


def _refusals(now: Groups, before: Groups) -> list[dict[str, Any]]:
    """What was refused or given up, by reason: in the window, and ever."""
    counts = {reason: [count, 0] for reason, count in _given_up(now).items()}
    for reason, count in _given_up(before).items():
        counts[reason][1] = count
    return [
        {"reason": reason, "recent": total - old, "total": total}
        for reason, (total, old) in counts.items()
        if total
    ]


def _given_up(groups: Groups) -> dict[str, int]:
    engine = groups["engine"][""]
    return {
        **engine["rejections"],
        "queue_timeout": engine["expired"] - engine["deadline_missed"],
        "deadline_missed": engine["deadline_missed"],
        "shed": engine["shed"],
        "displaced": engine["displaced"],
        "failed": engine["failed"],
        "aborted": engine["aborted"],
    }


def _rows(recent: Mapping[str, Any]) -> str:
    """A letter for each row: ``.`` free, else the class, ``a`` the first: upper case decodes."""
    letters = []
    for number, decodes in zip(
        recent["row_classes"].tolist(), recent["row_decodes"].tolist(), strict=True
    ):
        letter = "." if number < 0 else chr(ord("a") + min(number, 25))
        letters.append(letter.upper() if decodes else letter)
    return "".join(letters)


def _iterations(recent: Mapping[str, Any]) -> list[list[float]]:
    """The last iterations: step, decodes, prefills, finished, seconds."""
    columns = ("step", "decode_sequences", "prefill_sequences", "finished", "duration")
    rows = zip(*(recent[name][-_RECENT_ITERATIONS:].tolist() for name in columns), strict=True)
    return [list(row) for row in rows]


def _trace(points: Sequence[TracePoint], now: float) -> list[list[float]]:
    """Iteration times: seconds ago, mean, longest."""
    return [
        [round(now - point.at, 2), point.total / point.count, point.longest]
        for point in points
        if now - point.at <= WINDOW_S
    ]


def _target(groups: Groups) -> float | None:
    """The shortest time per output token that a class was promised."""
    targets = [group["tpot_target"] for group in groups["classes"].values()]
    return min((target for target in targets if target is not None), default=None)


def _percentiles(
    now: Mapping[str, Any], before: Mapping[str, Any], bounds: Sequence[float]
) -> dict[str, float] | None:
    """Median, 95th and 99th percentile of what came between two samples, within their buckets."""
    counts = [new - old for new, old in zip(now["counts"], before["counts"], strict=True)]
    total = sum(counts)
    if total <= 0:
        return None
    return {
        "p50": quantile(counts, bounds, 0.5),
        "p95": quantile(counts, bounds, 0.95),
        "p99": quantile(counts, bounds, 0.99),
        "count": total,
    }


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """Estimate a quantile of a histogram, straight through its bucket.

    ``counts`` has one more entry than ``bounds``; what is above all bounds counts as the last.
    """
    wanted = share * sum(counts)
    sums: list[int] = []
    for count in counts:
        sums.append(count + (sums[-1] if sums else 0))
    at = bisect.bisect_left(sums, wanted)
    if at >= len(bounds):
        return bounds[-1]
    low = bounds[at - 1] if at else 0.0
    below = sums[at - 1] if at else 0
    return low + (bounds[at] - low) * (wanted - below) / max(counts[at], 1)


class Pulse:
    """The one sampler of all that look."""

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        model_name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine`` returns it once it is loaded."""
        self._engine = engine
        self._model_name = model_name
        self._clock = clock
        self._lock = asyncio.Lock()
        self._samples: deque[Sample] = deque()
        """Of the last minute, a second apart."""
        self._latest: tuple[Sample, bytes] | None = None
        self._trace: deque[TracePoint] = deque(maxlen=_TRACE_POINTS)
        self._last_step = 0
        self.num_samples = 0
        """Times the engine was asked."""

    async def look(self) -> bytes | None:
        """The state as JSON, at most a quarter of a second old; None: there is no engine yet.

        Raises:
            EngineDeadError: the engine has ended.
        """
        async with self._lock:
            if self._latest is not None:
                sample, told = self._latest
                if self._clock() - sample.at < SAMPLE_INTERVAL_S:
                    return told
            engine = self._engine()
            if engine is None:
                return None
            told = self._take(await self._sample(engine))
            return told

    async def _sample(self, engine: Engine) -> Sample:
        self.num_samples += 1
        groups = await engine.group_metrics(brief=True)
        recent = await engine.iterations(max(self._last_step - _RECENT_ITERATIONS, 0))
        return Sample(self._clock(), groups, recent)

    def _take(self, sample: Sample) -> bytes:
        """Keep a sample, and make what is told of it."""
        samples = self._samples
        while samples and sample.at - samples[0].at > WINDOW_S:
            samples.popleft()
        if not samples or sample.at - samples[-1].at >= _CHECKPOINT_INTERVAL_S:
            samples.append(Sample(sample.at, _kept(sample.groups), {}))
        self._trace_iterations(sample.recent)
        view = View(sample, samples[0], self._trace, self._model_name)
        told = json.dumps(state(view), separators=(",", ":"), allow_nan=False).encode()
        self._latest = (sample, told)
        return told

    def _trace_iterations(self, recent: Mapping[str, Any]) -> None:
        """Add the times of iterations that were not seen before, by halves of seconds."""
        width = WINDOW_S / _TRACE_POINTS
        columns = (recent[name].tolist() for name in ("step", "time", "duration"))
        for step, at, duration in zip(*columns, strict=True):
            if step <= self._last_step:
                continue
            self._last_step = step
            end = (at // width + 1) * width
            last = self._trace[-1] if self._trace else None
            if last is not None and last.at >= end:
                self._trace[-1] = TracePoint(
                    last.at, last.count + 1, last.total + duration, max(last.longest, duration)
                )
            else:
                self._trace.append(TracePoint(end, 1, duration, duration))


def _kept(groups: Groups) -> Groups:
    """What the past is needed for: there may be thousands of tenants, and a minute of samples."""
    tenants = groups["tenants"].items()
    needed = ("device_time", "output_tokens")
    return {
        "engine": groups["engine"],
        "classes": groups["classes"],
        "tenants": {name: {key: of[key] for key in needed} for name, of in tenants},
    }
