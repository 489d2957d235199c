"""Serving traces: gzip CSV files with arrivals and lengths, and what workloads are made of them.

The columns are ``input_tokens`` and ``output_tokens``, and any of ``arrival_s`` (seconds from the
start, rising), ``prefix_hashes`` (ids of prompt blocks, separated by spaces) and ``class`` (the
client, which is a tenant here). Files without arrivals get Poisson arrivals.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from chairlift.simulation import Floats, Ints, Workload

T = TypeVar("T")

COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "prefix_hashes", "class")
PREFIX_BLOCK_TOKENS = 512
_MOST_TOKENS = 10_000_000


class TraceError(ValueError):
    """A trace that cannot be read; says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """``R`` requests as they were in life, or their lengths alone."""

    name: str
    input_tokens: Ints  # [R]
    output_tokens: Ints  # [R]
    arrival_s: Floats | None = None  # [R], from 0; None: lengths only
    tenant: Ints | None = None  # [R]
    tenants: tuple[str, ...] = ("default",)
    prefix_offsets: Ints | None = None  # [R + 1]
    prefix_hashes: Ints | None = None
    prefix_block_tokens: int = PREFIX_BLOCK_TOKENS

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.input_tokens)

    def first(self, count: int | None) -> Trace:
        """Take the first ``count`` requests; None: all."""
        if count is None:
            return self
        return self.where(np.arange(len(self)) < count)

    def where(self, chosen: NDArray[np.bool_]) -> Trace:
        """Take some of the requests, in order."""
        offsets, hashes = self.prefix_offsets, self.prefix_hashes
        if offsets is not None and hashes is not None:
            lengths = np.diff(offsets)
            hashes = hashes[np.repeat(chosen, lengths)]
            offsets = np.concatenate(([0], np.cumsum(lengths[chosen]))).astype(np.int32)
        return replace(
            self,
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            arrival_s=None if self.arrival_s is None else self.arrival_s[chosen],
            tenant=None if self.tenant is None else self.tenant[chosen],
            prefix_offsets=offsets,
            prefix_hashes=hashes,
        )

    def divided(self, factor: int) -> Trace:
        """Divide all lengths, to fit a small model; what is shared stays shared.

        Raises:
            ValueError: prefix blocks cannot be divided by it.
        """
        if factor < 1 or self.prefix_block_tokens % factor:
            blocks = self.prefix_block_tokens
            raise ValueError(f"lengths cannot be divided by {factor}: {blocks} must be a multiple")
        return replace(
            self,
            input_tokens=-(-self.input_tokens // factor),
            output_tokens=-(-self.output_tokens // factor),
            prefix_block_tokens=self.prefix_block_tokens // factor,
        )

    def at_rate(self, requests_per_s: float, seed: int) -> Workload:
        """Scale the arrivals to this mean rate; Poisson arrivals where the trace has none."""
        if self.arrival_s is None:
            gaps = np.random.default_rng(seed).exponential(1.0, len(self))
            arrivals = np.cumsum(gaps) - gaps[:1].sum()
        else:
            arrivals = self.arrival_s - self.arrival_s[:1].sum()
        span = arrivals[-1] if len(self) > 1 else 0.0
        if span > 0:
            arrivals = arrivals * ((len(self) - 1) / requests_per_s / span)
        return self._workload(arrivals)

    def at_once(self) -> Workload:
        """Let every request be there at time 0."""
        return self._workload(np.zeros(len(self)))

    def _workload(self, arrivals: Floats) -> Workload:
        workload = Workload.of(
            arrivals,
            self.input_tokens,
            self.output_tokens,
            tenant=self.tenant,
            tenants=self.tenants,
        )
        return replace(
            workload,
            prefix_offsets=self.prefix_offsets,
            prefix_hashes=self.prefix_hashes,
            prefix_block_tokens=self.prefix_block_tokens,
        )


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file cannot be read, or something in it; with file, line and column.
    """
    try:
        with _open(path) as lines:
            return _read(path, csv.reader(lines))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


@dataclass(slots=True)
class _Reader:
    """Where in a file we are, for messages."""

    path: Path
    columns: list[str]
    line: int = 1

    def value(self, row: list[str], column: str, parse: Callable[[str], T]) -> T:
        text = row[self.columns.index(column)]
        try:
            return parse(text)
        except ValueError as error:
            self.refuse(column, f"{text!r} is not {error}")

    def refuse(self, column: str, why: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {self.line}, column {column}: {why}")


def _read(path: Path, rows: Iterator[list[str]]) -> Trace:
    columns = next(rows, [])
    reader = _Reader(path, columns)
    for column in ("input_tokens", "output_tokens"):
        if column not in columns:
            reader.refuse(column, "there is no such column")
    for column in columns:
        if column not in COLUMNS or columns.count(column) > 1:
            reader.refuse(column, f"columns are {', '.join(COLUMNS)}, each at most once")
    values: dict[str, list[float]] = {"arrival_s": [], "input_tokens": [], "output_tokens": []}
    tenants: dict[str, int] = {}
    hashes: list[int] = []
    tenant: list[int] = []
    offsets = [0]
    last_s = 0.0
    for reader.line, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            at = columns[min(len(row), len(columns) - 1)]
            reader.refuse(at, f"the line has {len(row)} values; it must have {len(columns)}")
        for column in ("input_tokens", "output_tokens"):
            values[column].append(reader.value(row, column, _tokens))
        if "arrival_s" in columns:
            arrival_s = reader.value(row, "arrival_s", _seconds)
            if arrival_s < last_s:
                reader.refuse("arrival_s", f"{arrival_s} is before {last_s}, the line above")
            values["arrival_s"].append(arrival_s)
            last_s = arrival_s
        if "class" in columns:
            name = reader.value(row, "class", str)
            tenant.append(tenants.setdefault(name, len(tenants)))
        if "prefix_hashes" in columns:
            hashes.extend(reader.value(row, "prefix_hashes", _hashes))
            offsets.append(len(hashes))
    if not values["input_tokens"]:
        reader.refuse("input_tokens", "there are no requests")
    arrivals = np.array(values["arrival_s"])
    return Trace(
        name=path.name.removesuffix(".gz").removesuffix(".csv"),
        input_tokens=np.array(values["input_tokens"], dtype=np.int32),
        output_tokens=np.array(values["output_tokens"], dtype=np.int32),
        arrival_s=spread(arrivals) if "arrival_s" in columns else None,
        tenant=np.array(tenant, dtype=np.int32) if tenants else None,
        tenants=tuple(tenants) or ("default",),
        prefix_offsets=np.array(offsets, dtype=np.int32) if hashes else None,
        prefix_hashes=_renumbered(hashes) if hashes else None,
    )


def spread(arrivals: Floats) -> Floats:
    """Spread arrivals that were logged in batches evenly until the next batch.

    They were where most requests have the time of the one before them.
    """
    times, counts = np.unique(arrivals, return_counts=True)
    if len(times) < 2 or 2 * len(times) > len(arrivals):
        return arrivals
    gaps = np.diff(times, append=2 * times[-1] - times[-2])
    within = np.concatenate([np.arange(count) / count for count in counts])
    return arrivals + within * np.repeat(gaps, counts)


def _renumbered(hashes: list[int]) -> Ints:
    return np.unique(hashes, return_inverse=True)[1].astype(np.int32)


def _tokens(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= (tokens := int(text)) <= _MOST_TOKENS:
        return tokens
    raise ValueError(f"a number of tokens from 1 to {_MOST_TOKENS}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds < math.inf:
        return seconds
    raise ValueError("a number of seconds of at least 0")


def _hashes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError("a list of integers separated by spaces") from None
