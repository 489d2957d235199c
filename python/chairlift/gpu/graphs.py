"""Which CUDA graphs there are, and which one a step of decodes takes.

A graph has one grid for every launch, so a step takes the smallest graph that it fits and is padded
to it. Two things size the grids of decoding: sequences, and items of attention (chunks of their
contexts). Sequences climb a ladder whose rungs are at most a quarter apart. Items begin at one a
sequence, where no context is longer than a chunk and nothing has to be combined, and go up by
factors of four: a padding item is a block that returns at once, a few per cent of one that works.
"""

from __future__ import annotations

from dataclasses import dataclass

_ITEM_FACTOR = 4
_RUNG = 8
"""Rungs above four sequences are multiples of this."""


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """What one graph is captured for."""

    sequences: int
    items: int
    """Items of decode attention."""
    is_split: bool
    """Whether sequences may have several items, to be combined."""


@dataclass(slots=True)
class GraphUse:
    """How the steps that were only decodes were run."""

    replays: int = 0
    eager: int = 0
    """Steps that no graph fits."""
    sequences: int = 0
    """Of all replays."""
    padding: int = 0
    """Rows of all replays that were no sequence's."""

    def __str__(self) -> str:
        """Say it in one line."""
        rows = self.sequences + self.padding
        share = self.padding / rows if rows else 0.0
        return (
            f"{self.replays:,} decode steps replayed ({share:.1%} of their rows padding), "
            f"{self.eager:,} launched one by one"
        )


class GraphLadder:
    """The shapes that graphs are captured for."""

    def __init__(self, *, max_num_seqs: int, max_chunks: int, most_items: int) -> None:
        """Cover steps of up to ``max_num_seqs`` sequences.

        ``max_chunks`` is of the longest sequence, ``most_items`` of a step; a step with more of
        either is launched without a graph.
        """
        self.shapes: list[GraphShape] = []
        """Ascending in both sizes."""
        for sequences in _rungs(max_num_seqs):
            self.shapes.append(GraphShape(sequences, sequences, is_split=False))
            largest = min(sequences * max_chunks, most_items)
            items = sequences
            while items < largest:
                items = min(items * _ITEM_FACTOR, largest)
                self.shapes.append(GraphShape(sequences, items, is_split=True))

    def choose(self, sequences: int, items: int, *, is_split: bool) -> GraphShape | None:
        """Return the smallest shape that a step fits; None if none does."""
        rung = next(
            (shape.sequences for shape in self.shapes if shape.sequences >= sequences), None
        )
        for shape in self.shapes:
            if shape.sequences == rung and shape.is_split == is_split and shape.items >= items:
                return shape
        return None


def _rungs(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8 that grow by a quarter at most, up to ``largest`` itself."""
    rungs = [rung for rung in (1, 2, 4) if rung < largest]
    rung = _RUNG
    while rung < largest:
        rungs.append(rung)
        rung += max(_RUNG, rung // 4 // _RUNG * _RUNG)
    return [*rungs, largest]
