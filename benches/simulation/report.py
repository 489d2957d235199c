"""What an experiment has to say: tables, checks and pictures; as text, Markdown and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from simulation import measures
from simulation.bench import Bench, Run
from simulation.measures import Mask, everyone
from simulation.pictures import Picture

Cell = str | float | int | None
Header = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; numbers keep their value until they are shown."""

    title: str
    header: Header
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must be shown, and whether it was."""

    claim: str
    value: str
    holds: bool


@dataclass(slots=True)
class Report:
    """All that an experiment found, and under which conditions."""

    name: str
    title: str
    state: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def text(self) -> str:
        """Tables for a terminal."""
        lines = [self.title, *(f"  {key}: {value}" for key, value in self.state.items())]
        for table in [*self.tables, *self._check_table()]:
            cells = [table.header, *([_shown(cell) for cell in row] for row in table.rows)]
            widths = [max(len(row[at]) for row in cells) for at in range(len(table.header))]
            lines += ["", table.title]
            for row in cells:
                first, *rest = [
                    cell.ljust(width) if at == 0 else cell.rjust(width)
                    for at, (cell, width) in enumerate(zip(row, widths, strict=True))
                ]
                lines.append("  ".join(["", first, *rest]).rstrip())
        return "\n".join(lines) + "\n"

    def markdown(self, pictures: str) -> str:
        """Make a section of a page that lies beside the folder ``pictures``."""
        state = "; ".join(f"{key} {value}" for key, value in self.state.items())
        lines = [f"## {self.title}", "", f"Conditions: {state}."]
        for table in [*self._check_table(), *self.tables]:
            lines += ["", f"{table.title}:", "", _row(table.header)]
            lines.append(_row(["---", *["---:"] * (len(table.header) - 1)]))
            lines += [_row([_shown(cell) for cell in row]) for row in table.rows]
        for picture in self.pictures:
            lines += ["", f"![{picture.title}]({pictures}/{picture.name}.svg)"]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Everything but the pictures, for programs; what is not a number is null."""
        tables = [
            {"title": table.title, "rows": [_named(table.header, row) for row in table.rows]}
            for table in self.tables
        ]
        checks = [
            {"claim": check.claim, "value": check.value, "holds": check.holds}
            for check in self.checks
        ]
        content = {"experiment": self.name, "state": self.state, "tables": tables, "checks": checks}
        return json.dumps(content, indent=2, allow_nan=False)

    def _check_table(self) -> list[Table]:
        rows = [(c.claim, c.value, "yes" if c.holds else "NO") for c in self.checks]
        return [Table("What must be shown", ("claim", "measured", "holds"), rows)] if rows else []


def _named(header: Header, row: Sequence[Cell]) -> dict[str, Cell]:
    values = (None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row)
    return dict(zip(header, values, strict=True))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _shown(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    if isinstance(cell, float):
        decimals = 0 if abs(cell) >= 1_000 else 1 if abs(cell) >= 100 else 3
        return f"{cell:,.{decimals}f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def state_of(bench: Bench, run: Run, **more: str) -> dict[str, str]:
    """Conditions under which a run was made."""
    profile, settings = bench.profile, run.settings
    divided = "" if bench.divided_by == 1 else f", lengths divided by {bench.divided_by}"
    cost = profile.cost
    noise = f"noise sigma {cost.noise_sigma:g}"
    if cost.slow_sigma:
        noise += f", slow sigma {cost.slow_sigma:g} for {cost.slow_s:g} s"
    return {
        "profile": f"{profile.name}, {noise}",
        "pool": f"{profile.num_kv_blocks:,} blocks of {settings.block_size}",
        "trace": f"{bench.trace.name}, {len(bench.trace):,} requests{divided}",
        "load": f"{bench.load:g} of a capacity of {bench.capacity(bench.trace):.2f} requests/s",
        "seed": str(bench.seed),
        "limits": (
            f"max_num_seqs {settings.max_num_seqs}, "
            f"max_num_batched_tokens {settings.max_num_batched_tokens:,}, "
            f"max_tokens {bench.max_tokens:,}, "
            f"prefix cache {'on' if settings.enable_prefix_caching else 'off'}"
        ),
        **more,
    }


def _bound_table(runs: Sequence[Run]) -> Table:
    """Say what bound each run."""
    return Table("What bound", ("run", "by"), [[run.label, measures.bound_by(run)] for run in runs])


_LATENCIES = (
    ("TTFT s", measures.ttft, 1),
    ("ITL ms", measures.itl, 1_000),
    ("TPOT ms", measures.tpot, 1_000),
    ("E2E s", measures.e2e, 1),
    ("queue time s", measures.queue_time, 1),
)


def latencies(title: str, runs: Sequence[Run], chosen: Sequence[Mask] | None = None) -> Table:
    """Percentiles of every latency, of the chosen requests of each run."""
    masks = [everyone(run) for run in runs] if chosen is None else chosen
    rows: list[list[Cell]] = []
    for name, measure, scale in _LATENCIES:
        for run, mask in zip(runs, masks, strict=True):
            values = measure(run, mask) * scale
            percentiles = [measures.percentile(values, percent) for percent in (50, 95, 99)]
            rows.append([name, run.label, *percentiles])
    return Table(title, ("latency", "run", "p50", "p95", "p99"), rows)


def _engine_table(runs: Sequence[Run]) -> Table:
    """What the engine did: throughput, batches, iterations, preemptions."""
    header = (
        *("run", "tokens/s", "batch", "padded", "iterations", "mean ms", "sd ms", "p99 ms"),
        *("preemptions", "overflow", "recomputed"),
    )
    rows: list[list[Cell]] = []
    for run in runs:
        result = run.result
        times = result.iteration_s * 1_000
        rows.append(
            [
                run.label,
                measures.throughput(run),
                measures.mean_batch(run),
                f"{measures.padded(run):.1%}",
                len(times),
                measures.mean(times),
                float(np.std(times)) if len(times) else math.nan,
                measures.percentile(times, 99),
                int(result.iteration_preemptions.sum()),
                f"{measures.overflow(run):.1%}",
                result.recomputed_tokens,
            ]
        )
    return Table("Engine", header, rows)


def _outcome_table(runs: Sequence[Run]) -> Table:
    """How requests went; everything but ``stop`` and ``length`` counts against goodput."""
    counts = [measures.outcomes(run) for run in runs]
    names = sorted({name for count in counts for name in count})
    rows = [
        [run.label, *(count.get(name, 0) for name in names)]
        for run, count in zip(runs, counts, strict=True)
    ]
    return Table("Outcomes (requests)", ["run", *names], rows)


def engine_tables(runs: Sequence[Run]) -> list[Table]:
    """What bound, what the engine did, and how requests went."""
    return [_bound_table(runs), _engine_table(runs), _outcome_table(runs)]


def write_section(page: Path, report: Report, pictures: str) -> None:
    """Put the report's section into a page in place of the one that was there, or at its end."""
    begin, end = f"<!-- begin {report.name} -->\n", f"<!-- end {report.name} -->\n"
    section = begin + report.markdown(pictures) + end
    text = page.read_text(encoding="utf-8") if page.exists() else "# Policies, measured\n"
    before, found, rest = text.partition(begin)
    if found:
        _, closed, after = rest.partition(end)
        if not closed:
            raise ValueError(f"{page}: {begin.strip()} has no {end.strip()}")
        text = before + section + after
    else:
        text = f"{text.rstrip()}\n\n{section}"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
