"""Work lists: which block of an attention grid takes what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from chairlift.executor import Int32Array

CHUNK_TOKENS = 256
"""Keys of a chunk. Fixed, so that the batch never changes a sequence's result: small enough that
one short sequence is several blocks, large enough that partial results are a few percent of the
keys and values read."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """What one step's decode attention is cut into."""

    items: Int32Array  # [items, 3]
    """Sequence, chunk, and where the partial result goes (-1: the only chunk)."""
    splits: Int32Array  # [splits, 3]
    """Sequence, first partial result and their number, for sequences of several chunks."""
    num_partials: int
    max_query_tokens: int
    """The most query tokens of any sequence."""


def cut_decode_work(
    query_start_loc: Int32Array,
    seq_lens: Int32Array,
    *,
    window: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> DecodeWork:
    """Cut sequences ``[N]`` into chunks of ``chunk_tokens`` keys, without those nobody sees.

    Chunks begin at multiples of ``chunk_tokens`` of the sequence, whatever the window; a sequence
    without query tokens has none.
    """
    queries = np.diff(query_start_loc)
    first_visible = np.zeros_like(seq_lens)
    if window > 0:
        first_visible = np.maximum(seq_lens - queries + 1 - window, 0)
    first = first_visible // chunk_tokens
    counts = np.where(queries > 0, -(-seq_lens // chunk_tokens) - first, 0)
    split = counts > 1
    partials = np.where(split, counts, 0)
    first_partial = np.cumsum(partials) - partials

    sequence = np.repeat(np.arange(len(seq_lens)), counts)
    nth = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    partial = np.where(split[sequence], first_partial[sequence] + nth, -1)
    items = np.stack((sequence, first[sequence] + nth, partial), axis=1)
    split_sequences = np.flatnonzero(split)
    splits = np.stack(
        (split_sequences, first_partial[split_sequences], counts[split_sequences]), axis=1
    )
    return DecodeWork(
        items.astype(np.int32),
        splits.astype(np.int32),
        int(partials.sum()),
        int(queries.max(initial=0)),
    )


def cut_prefill_work(
    query_start_loc: Int32Array, seq_lens: Int32Array, *, group: int, tile_rows: int
) -> Int32Array:
    """Cut the query tokens of sequences ``[N]`` into tiles of rows: ``[items, 2]`` sequence, tile.

    What sees the most keys comes first, so that no long block begins when the others end.
    """
    queries = np.diff(query_start_loc)
    counts = -(-queries * group // tile_rows)
    sequence = np.repeat(np.arange(len(seq_lens)), counts)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    last_token = np.minimum((tile + 1) * tile_rows // group, queries[sequence])
    keys = seq_lens[sequence] - queries[sequence] + last_token
    order = np.argsort(-keys, kind="stable")
    return np.stack((sequence, tile), axis=1)[order].astype(np.int32)
