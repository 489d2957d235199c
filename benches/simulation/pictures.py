"""Pictures of experiments, as PNG and SVG. matplotlib is loaded only to draw one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from chairlift.simulation import Floats

_MOST_POINTS = 2_000
"""Of a line: more cannot be seen and make large files."""


class PicturesError(RuntimeError):
    """Pictures cannot be drawn here."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or a cloud of points."""

    label: str
    x: ArrayLike
    y: ArrayLike
    style: Literal["line", "points", "dashed"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is drawn; ``name`` is that of its files."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


def cdf(label: str, values: Floats) -> Series:
    """Share of the values up to each."""
    return Series(label, np.sort(values), np.arange(1, len(values) + 1) / max(len(values), 1))


def draw(picture: Picture, folder: Path) -> list[Path]:
    """Write the picture as PNG and SVG; the same data give the same files.

    Raises:
        PicturesError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        message = "pictures need matplotlib: install chairlift[bench], or leave --out away"
        raise PicturesError(message) from error
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    formats = {"line": "-", "dashed": "--", "points": "o"}
    for series in picture.series:
        x, y = _thinned(np.asarray(series.x), np.asarray(series.y))
        axes.plot(x, y, formats[series.style], label=series.label, markersize=3)
    axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
    if picture.log_x:
        axes.set_xscale("log")
    if picture.log_y:
        axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    paths = [folder / f"{picture.name}.{kind}" for kind in ("png", "svg")]
    with mpl.rc_context({"svg.hashsalt": picture.name}):
        figure.savefig(paths[0], dpi=150, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= _MOST_POINTS:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).astype(int))
    return x[chosen], y[chosen]
