"""The figures of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TIMES = {
    "ttft_ms": "TTFT",
    "itl_ms": "ITL",
    "tpot_ms": "TPOT",
    "e2e_ms": "E2E",
    "queue_time_ms": "queue time",
}
_STATISTICS = ("mean", "p50", "p90", "p99", "max")
_GROUP_COLUMNS = (
    "requests",
    "refused",
    "failed",
    "requests/s",
    "tokens/s",
    "goodput/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "queue p99",
)


def table(summary: Mapping[str, Any]) -> str:
    """Write a summary (:func:`chairlift.bench.report.summarise`) for people; times in ms."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        ("requests that succeeded", f"{summary['succeeded']:,} of {summary['requests']:,}"),
        ("refused / failed", f"{summary['refused']:,} / {summary['failed']:,}"),
        ("seconds", f"{summary['seconds']:,.2f}"),
        ("prompt tokens", f"{summary['prompt_tokens']:,}"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("requests/s", f"{summary['requests_per_s']:,.2f}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:,.1f}"),
        ("prompt and output tokens/s", f"{summary['total_tokens_per_s']:,.1f}"),
    ]
    if summary["unfinished"]:
        rows.insert(2, ("unfinished", f"{summary['unfinished']:,}"))
    if summary["retries"]:
        rows.insert(2, ("sent again after a refusal", f"{summary['retries']:,}"))
    if "goodput_limits_ms" in summary:
        limits = " ".join(f"{k}:{v:g}" for k, v in summary["goodput_limits_ms"].items())
        rows.append((f"goodput ({limits}), requests/s", _goodput(summary)))
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:<{width}}  {value:>14}" for name, value in rows)
    yield ""
    times = [
        [title, *(f"{summary[key][name]:,.1f}" for name in _STATISTICS)]
        for key, title in _TIMES.items()
        if summary[key] is not None
    ]
    if times:
        yield from _grid([["ms", *_STATISTICS], *times])
    for title, key in (("tenant", "tenants"), ("class", "classes")):
        if summary[key]:
            groups = [[name, *_group(figures)] for name, figures in summary[key].items()]
            yield ""
            yield from _grid([[title, *_GROUP_COLUMNS], *groups])
    if summary["errors"]:
        yield ""
        yield from map(_error, summary["errors"])
    if not summary["client_kept_up"]:
        lateness = summary["client_lateness_ms"]
        yield ""
        yield (
            f"this client could not keep up: it sent requests late, by {lateness['p99']:,.0f} ms "
            f"at p99 and {lateness['max']:,.0f} ms at most, so the load was not what was asked for"
        )
    if summary["interrupted"]:
        yield ""
        yield "interrupted: these are the figures of what had ended"


def _group(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{figures['requests']:,}",
        f"{figures['refused']:,}",
        f"{figures['failed']:,}",
        f"{figures['requests_per_s']:,.2f}",
        f"{figures['output_tokens_per_s']:,.1f}",
        _goodput(figures),
        *(
            "-" if figures[key] is None else f"{figures[key][name]:,.1f}"
            for key, name in (
                ("ttft_ms", "p50"),
                ("ttft_ms", "p99"),
                ("tpot_ms", "p50"),
                ("queue_time_ms", "p99"),
            )
        ),
    ]


def _goodput(figures: Mapping[str, Any]) -> str:
    value = figures.get("goodput_requests_per_s")
    return "-" if value is None else f"{value:,.2f}"


def _error(error: Mapping[str, Any]) -> str:
    status = "no reply" if error["status"] is None else error["status"]
    text = f"{error['count']:,} x {status} {error['code']}: {error['first_message']}"
    waits = error["retry_after_s"]
    if waits is not None:
        text += f" (Retry-After {waits['min']:g} to {waits['max']:g} s)"
    return text


def _grid(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *values in rows:
        cells = (f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True))
        yield "  ".join([f"{name:<{widths[0]}}", *cells])
