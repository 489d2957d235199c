"""Figures of a run, as plain data for JSON and as a table for people.

TTFT: sending to first token. ITL: each gap between events with text. TPOT: a request's mean gap by
its token count. E2E: sending to the end of the stream. Queue time: what the server says. Rates are
over the time from the start to the last end; requests that failed are in none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.bench.client import Failure, Outcome
from chairlift.bench.load import LoadResult
from chairlift.errors import ConfigError

_MOST_LATENESS_MS = 50.0
"""p99 of the client's own lateness above which it says that it could not keep up."""
_LIMITS: Mapping[str, str] = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}
_STATISTICS = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as goodput, in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """Whether an answer kept them all."""
        return all(
            limit is None or (value is not None and value * 1e3 <= limit)
            for limit, value in (
                (self.ttft, outcome.ttft),
                # An answer of one token has no gap that could be too long.
                (self.tpot, outcome.tpot if outcome.output_tokens > 1 else 0.0),
                (self.e2e, outcome.e2e),
            )
        )

    def stated(self) -> dict[str, float]:
        """Those that there are."""
        named = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: limit for name, limit in named.items() if limit is not None}


def parse_limits(pairs: Iterable[str]) -> Limits:
    """Read ``ttft:500 tpot:50 e2e:2000``.

    Raises:
        ConfigError: a pair is something else.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[_LIMITS[name]] = float(value)
        except (KeyError, ValueError):
            raise ConfigError(f"{pair!r} is no limit; write ttft:MS, tpot:MS or e2e:MS") from None
    return Limits(**limits)


def summarise(result: LoadResult, limits: Limits) -> dict[str, object]:
    """Make the figures of a run: all of it, then by tenant and by class."""
    outcomes, seconds = result.outcomes, result.seconds
    summary: dict[str, object] = {
        "interrupted": result.is_interrupted,
        "unfinished": result.num_unfinished,
        **_figures(outcomes, seconds, limits),
        "errors": _errors(outcomes),
    }
    statistics = _statistics(
        [outcome.lateness * 1e3 for outcome in outcomes if outcome.lateness is not None]
    )
    summary["client_lateness_ms"] = statistics
    summary["client_kept_up"] = statistics is None or statistics["p99"] <= _MOST_LATENESS_MS
    groups: tuple[tuple[str, Callable[[Outcome], str | None]], ...] = (
        ("tenants", lambda outcome: outcome.request.tenant),
        ("classes", lambda outcome: outcome.request_class),
    )
    for name, key in groups:
        names = sorted({found for outcome in outcomes if (found := key(outcome)) is not None})
        summary[name] = {
            each: _figures(
                [outcome for outcome in outcomes if key(outcome) == each], seconds, limits
            )
            for each in names
        }
    return summary


def has_broken(result: LoadResult) -> bool:
    """Whether an answer broke off or came out wrong, or none came at all.

    A refusal with a status of its own is a result; a run of nothing else is none.
    """
    broken = any(
        outcome.failure is not None and not outcome.failure.is_refusal
        for outcome in result.outcomes
    )
    return broken or all(outcome.failure is not None for outcome in result.outcomes)


def _figures(outcomes: Sequence[Outcome], seconds: float, limits: Limits) -> dict[str, object]:
    good = [outcome for outcome in outcomes if outcome.failure is None]
    refused = sum(1 for each in outcomes if each.failure is not None and each.failure.is_refusal)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    rate = 1.0 / seconds if seconds > 0 else 0.0
    figures: dict[str, object] = {
        "requests": len(outcomes),
        "succeeded": len(good),
        "refused": refused,
        "failed": len(outcomes) - len(good) - refused,
        "retries": sum(len(outcome.refusals) for outcome in outcomes),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(good) * rate,
        "output_tokens_per_s": output_tokens * rate,
        "total_tokens_per_s": (prompt_tokens + output_tokens) * rate,
    }
    if limits.stated():
        figures["goodput_limits_ms"] = limits.stated()
        figures["goodput_requests_per_s"] = sum(map(limits.are_met, good)) * rate
    times: dict[str, list[float | None]] = {
        "ttft": [each.ttft for each in good],
        "itl": [gap for each in good for gap in np.diff(np.array(each.token_times)).tolist()],
        "tpot": [each.tpot for each in good],
        "e2e": [each.e2e for each in good],
        "queue_time": [each.queue_time for each in good],
    }
    for name, values in times.items():
        figures[f"{name}_ms"] = _statistics([value * 1e3 for value in values if value is not None])
    return figures


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    numbers = (np.mean(values), p50, p90, p99, max(values))
    return {name: float(value) for name, value in zip(_STATISTICS, numbers, strict=True)}


def _errors(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """By status and code, refusals that were retried included, the most frequent first."""
    failures = [failure for outcome in outcomes for failure in outcome.refusals]
    failures += [outcome.failure for outcome in outcomes if outcome.failure is not None]
    counts = Counter((failure.status, failure.code) for failure in failures)
    return [
        _error(count, [each for each in failures if (each.status, each.code) == kind])
        for kind, count in counts.most_common()
    ]


def _error(count: int, failures: Sequence[Failure]) -> dict[str, object]:
    first = failures[0]
    waits = [each.retry_after_s for each in failures if each.retry_after_s is not None]
    return {
        "status": first.status,
        "code": first.code,
        "count": count,
        "first_message": first.message,
        "with_retry_after": len(waits),
        "retry_after_s": {"min": min(waits), "max": max(waits)} if waits else None,
    }
