"""The sampler in plain NumPy, sorting and double precision: the specification of the tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64Array = NDArray[np.float64]
    UInt64Array = NDArray[np.uint64]

GREEDY_BELOW = 1e-5
"""Temperatures below this take the best token."""


@dataclass
class ReferenceRow:
    """One row's parameters and history."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    seed: int = 0
    child: int = 0
    logprobs: int = -1
    min_tokens: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    suppressed_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ReferenceSample:
    """What came of one sample."""

    token_id: int
    margin: float
    """Best less second-best score."""
    cut_margin: float
    """How close, in nats or probability, a cut came to deciding otherwise; for the tests."""
    logprobs: list[tuple[int, float]]


def sample(raw: Float64Array, row: ReferenceRow, output_index: int) -> ReferenceSample | None:
    """Sample from one row of logits ``[V]``; None for a row that fails."""
    logits = edit(raw, row, output_index)
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return None
    if row.temperature < GREEDY_BELOW:
        scores, cut_margin = logits, np.inf
    else:
        tempered = (logits - logits.max()) / row.temperature
        tempered, cut_margin = cut(tempered, row)
        scores = tempered + gumbel(row.seed, row.child, output_index, len(raw))
    token_id = int(scores.argmax())
    others = np.delete(scores, token_id)
    margin = float(scores[token_id] - others.max()) if len(others) else np.inf
    return ReferenceSample(token_id, margin, cut_margin, log_probabilities(raw, token_id, row))


def edit(raw: Float64Array, row: ReferenceRow, output_index: int) -> Float64Array:
    """Apply bias, suppression and penalties to a copy of the logits."""
    logits = raw.copy()
    for token_id, bias in row.bias.items():
        logits[token_id] += bias
    if output_index < row.min_tokens:
        logits[row.suppressed_ids] = -np.inf
    for token_id in {*row.prompt_ids, *row.output_ids}:
        logit, factor = logits[token_id], row.repetition_penalty
        logits[token_id] = logit / factor if logit > 0 else logit * factor
    for token_id in set(row.output_ids):
        logits[token_id] -= row.frequency_penalty * row.output_ids.count(token_id)
        logits[token_id] -= row.presence_penalty
    return logits


def cut(tempered: Float64Array, row: ReferenceRow) -> tuple[Float64Array, float]:
    """Set to -infinity what min-p, then top-k, then top-p drop."""
    order = np.lexsort((np.arange(len(tempered)), -tempered))  # by logit descending, ties by id
    ranked = tempered[order]
    with np.errstate(divide="ignore"):
        floor = np.log(row.min_p)
    finite = np.isfinite(ranked)
    cut_margin = float(np.abs(ranked[finite] - floor).min(initial=np.inf))
    keep = ranked >= floor
    if row.top_k > 0:
        keep[row.top_k :] = False
    if row.top_p < 1.0:
        weights = np.where(keep, np.exp(ranked), 0.0)
        before = np.cumsum(weights) / weights.sum() - weights / weights.sum()
        cut_margin = min(cut_margin, float(np.abs(before[keep] - row.top_p).min()))
        keep &= before < row.top_p
        keep[0] = True
    kept = np.full_like(tempered, -np.inf)
    kept[order[keep]] = ranked[keep]
    return kept, cut_margin


def gumbel(seed: int, child: int, output_index: int, vocab_size: int) -> Float64Array:
    """Noise of every token: Gumbel by inversion of Philox4x32-10 (Salmon et al. 2011)."""
    ids = np.arange(vocab_size, dtype=np.uint64)
    blocks = ids // np.uint64(64) * np.uint64(16) + ids % np.uint64(16)
    words = philox(blocks, output_index, child, seed)  # [4, V]
    bits = words[(ids // np.uint64(16) % np.uint64(4)).astype(np.int64), np.arange(vocab_size)]
    uniform = (bits.astype(np.float64) + 0.5) / 2**32
    return np.asarray(-np.log(-np.log1p(-uniform)), dtype=np.float64)


def philox(block: UInt64Array, output_index: int, child: int, seed: int) -> UInt64Array:
    """Four words of 32 bits for each block, as ``[4, len(block)]``."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = block.copy(), np.full_like(block, output_index)
    c2, c3 = np.full_like(block, child), np.zeros_like(block)
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(key0),
            product1 & mask,
            (product0 >> shift) ^ c3 ^ np.uint64(key1),
            product0 & mask,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))


def log_probabilities(
    raw: Float64Array, token_id: int, row: ReferenceRow
) -> list[tuple[int, float]]:
    """Of the sampled token, then of the best ones; empty unless the row asks for them."""
    if row.logprobs < 0:
        return []
    values = raw - raw.max()
    values -= np.log(np.exp(values).sum())
    best = np.lexsort((np.arange(len(raw)), -raw))[: row.logprobs].tolist()
    return [(int(i), float(values[i])) for i in [token_id, *best]]
