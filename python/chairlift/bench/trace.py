"""Traces of real traffic: CSV, plain or gzipped, of arrivals and lengths."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from chairlift.errors import ConfigError

ARRIVAL = ("arrival_s", "arrival_time", "arrived_at", "timestamp")
INPUT = ("input_tokens", "prompt_tokens", "num_prefill_tokens", "contexttokens", "input_length")
OUTPUT = (
    "output_tokens",
    "completion_tokens",
    "num_decode_tokens",
    "generatedtokens",
    "output_length",
)
TENANT = ("tenant", "client", "client_id", "class")
PREFIXES = ("prefix_hashes", "hash_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float | None
    """Seconds after the first one; None where the trace has lengths only."""
    input_tokens: int
    output_tokens: int
    tenant: str | None
    prefix_hashes: tuple[str, ...]
    """Names of the prompt's first blocks: the same name, the same tokens."""


def read_trace(
    path: Path, *, time_scale: float = 1.0, length_scale: float = 1.0, most: int | None = None
) -> list[TraceRow]:
    """Read a trace, by arrival: times multiplied by one scale, lengths divided by the other.

    Columns are found by name, in any case: one each of ``ARRIVAL`` (seconds, or a date and time),
    ``INPUT`` and ``OUTPUT``, and where there are any, of ``TENANT`` and ``PREFIXES``. ``most`` is
    how many rows to read at most.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    if not time_scale > 0 or not length_scale > 0:
        raise ConfigError(
            f"--time-scale is {time_scale:g} and --length-scale {length_scale:g}; both must be > 0"
        )
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open() as file:
            rows = _read(csv.DictReader(file), path, length_scale, most)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no requests")
    if rows[0].arrival_s is None:
        return rows
    first = min(row.arrival_s or 0.0 for row in rows)
    placed = [
        TraceRow(
            arrival_s=((row.arrival_s or 0.0) - first) * time_scale,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            tenant=row.tenant,
            prefix_hashes=row.prefix_hashes,
        )
        for row in rows
    ]
    return sorted(placed, key=lambda row: row.arrival_s or 0.0)


def _read(
    reader: csv.DictReader[str], path: Path, length_scale: float, most: int | None
) -> list[TraceRow]:
    names = {name.strip().lower(): name for name in reader.fieldnames or ()}
    arrival, inputs, outputs, tenant, prefixes = (
        next((names[name] for name in wanted if name in names), None)
        for wanted in (ARRIVAL, INPUT, OUTPUT, TENANT, PREFIXES)
    )
    for column, wanted in ((inputs, INPUT), (outputs, OUTPUT)):
        if column is None:
            raise ConfigError(
                f"{path} has the columns {', '.join(names) or 'of no header'}, but none of "
                f"{', '.join(wanted)}"
            )
    rows: list[TraceRow] = []
    for number, row in enumerate(reader, start=2):
        if most is not None and len(rows) == most:
            break
        try:
            rows.append(
                TraceRow(
                    arrival_s=None if arrival is None else _seconds(row[arrival]),
                    input_tokens=_length(row, inputs, length_scale),
                    output_tokens=_length(row, outputs, length_scale),
                    tenant=None if tenant is None else row[tenant] or None,
                    prefix_hashes=() if prefixes is None else _names(row[prefixes]),
                )
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"line {number} of {path} cannot be used: {error}") from None
    return rows


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _length(row: Mapping[str, str], column: str | None, scale: float) -> int:
    return max(1, int(float(row[column or ""]) / scale))


def _names(text: str | None) -> tuple[str, ...]:
    parts: Iterable[str] = (text or "").replace(",", " ").strip("[]").split()
    return tuple(parts)
