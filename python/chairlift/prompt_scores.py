"""Log-probabilities of prompt tokens, in slices of bounded size.

Scoring a whole prefill chunk at once would take ``chunk * vocab`` floats, gigabytes for a long
chunk of a large vocabulary; a slice takes :data:`SLICE_BYTES` at most (or one row).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.executor import RaggedLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import StepPlan

SLICE_BYTES = 1 << 26
"""Most bytes of the float32 logits of one slice."""


def score_prompt(
    plan: StepPlan, hidden: Tensor, score: Callable[[Tensor], Tensor], vocab_size: int
) -> tuple[RaggedLogprobs, NDArray[np.bool_]]:
    """Score the plan's ``P`` prompt tokens.

    Args:
        plan: says which tokens, and how many of the best beside each.
        hidden: ``[P, hidden]`` normed hidden states, in the order of ``plan.score_indices``.
        score: turns ``[rows, hidden]`` into logits ``[rows, vocab_size]``.
        vocab_size: tokens of the vocabulary.

    Returns:
        The log-probabilities, and ``[P]`` whether the logits of a token hold NaN or infinity where
        they must not. Ties among the best are in no particular order.
    """
    count = len(plan.score_token_ids)
    widths = plan.score_num_best + 1
    offsets = np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
    token_ids = np.empty(offsets[-1], dtype=np.int32)
    values = np.empty(offsets[-1], dtype=np.float32)
    token_ids[offsets[:-1]] = plan.score_token_ids
    failed = np.zeros(count, dtype=np.bool_)
    longest = slice_rows(vocab_size)
    for begin in range(0, count, longest):
        rows = slice(begin, begin + longest)
        logits = score(hidden[rows]).float()  # [rows, vocab]
        norm = logits.logsumexp(dim=1)  # [rows]
        own = torch.from_numpy(plan.score_token_ids[rows].astype(np.int64)).to(logits.device)
        values[offsets[:-1][rows]] = (logits.gather(1, own[:, None])[:, 0] - norm).cpu().numpy()
        failed[rows] = ~norm.isfinite().cpu().numpy()
        num_best = int(plan.score_num_best[rows].max())
        if num_best:
            best, ids = logits.topk(num_best, dim=1)
            best -= norm[:, None]
            # Of each row as many as it asked for, behind its own entry.
            row, rank = np.nonzero(np.arange(num_best) < plan.score_num_best[rows, None])
            places = offsets[rows][row] + 1 + rank
            token_ids[places], values[places] = (
                ids.cpu().numpy()[row, rank],
                best.cpu().numpy()[row, rank],
            )
    return RaggedLogprobs(offsets, token_ids, values), failed


def slice_rows(vocab_size: int) -> int:
    """Return how many rows of logits are made at once."""
    return max(1, SLICE_BYTES // (4 * vocab_size))
