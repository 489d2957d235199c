"""From logits to tokens: the Rust sampler behind a small class.

Per sample, in this order: log-probabilities of the raw logits, where asked for; ``logit_bias``;
suppression before ``min_tokens``; repetition penalty (tokens of prompt and output), frequency and
presence penalties (tokens of the output); then greedy rows (temperature below 1e-5) take the best
token, ties going to the lowest id. Others divide by the temperature, drop what min-p, top-k and
top-p cut, and take the token whose logit plus Gumbel noise is largest. The noise is a pure function
of (seed, child, output index, token id): neither batch nor preemption changes an output.
:mod:`chairlift.sampler.reference` is the specification in plain NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from chairlift import _core
from chairlift.attention.threads import share_openmp_pool
from chairlift.errors import ChairliftError
from chairlift.executor import RaggedLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.executor import Float32Array, Int32Array, RowResets, UInt8Array

__all__ = ["Sampler", "SamplerError", "SamplerOutput"]


class SamplerError(ChairliftError, ValueError):
    """Sizes, logits, row resets or samples that do not fit the sampler or each other."""

    code = "invalid_sampling"


class SamplerOutput(NamedTuple):
    """What one call of :meth:`Sampler.sample` produced, ``S`` samples."""

    token_ids: Int32Array
    """[S] sampled tokens; 0 where the status is failed."""
    statuses: UInt8Array
    """[S] 1 (failed) where the logits hold NaN or +infinity, or no finite one; else 0."""
    logprobs: RaggedLogprobs | None
    """Log-probabilities, if any sample asked for them; no entries for failed samples."""


class Sampler:
    """Samples tokens for rows that keep their parameters and history between steps."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        """Start with ``max_rows`` greedy rows; :class:`SamplerError` if there can be none."""
        share_openmp_pool()
        try:
            self._sampler = _core.Sampler(max_rows, vocab_size)
        except (ValueError, OverflowError) as error:
            raise SamplerError(str(error)) from None
        self._vocab_size = vocab_size

    def reset(self, resets: RowResets) -> None:
        """Give rows new parameters and histories; all of them, or none on :class:`SamplerError`."""
        if resets.rows.size == 0:
            return
        try:
            self._sampler.reset(*resets.arrays)
        except ValueError as error:
            raise SamplerError(str(error)) from None

    def sample(
        self,
        logits: Tensor,
        sample_rows: Int32Array,
        sample_output_indices: Int32Array,
        *,
        margins: Float32Array | None = None,
    ) -> SamplerOutput:
        """Sample one token per row of ``logits`` and add it to its row's history.

        ``logits`` is ``[S, vocab_size]``, contiguous, float32 or bfloat16, on the CPU, and is left
        as it is; ``sample_rows`` and ``sample_output_indices`` are the plan's. ``margins`` ``[S]``,
        if given, is filled with the best less the second-best score (tempered and perturbed unless
        greedy). Raises :class:`SamplerError` when an argument does not fit.
        """
        count = len(sample_rows)
        if logits.shape != (count, self._vocab_size):
            raise SamplerError(
                f"logits have shape {tuple(logits.shape)}, not [{count}, {self._vocab_size}]"
            )
        if logits.dtype not in (torch.float32, torch.bfloat16) or not logits.is_contiguous():
            raise SamplerError(f"logits must be contiguous float32 or bfloat16, not {logits.dtype}")
        if logits.device.type != "cpu":
            raise SamplerError(f"logits are on {logits.device}, not on the cpu")
        token_ids = np.empty(count, np.int32)
        statuses = np.empty(count, np.uint8)
        try:
            found = self._sampler.sample(
                logits.data_ptr(),
                logits.dtype == torch.bfloat16,
                count,
                sample_rows,
                sample_output_indices,
                token_ids,
                statuses,
                margins,
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise SamplerError(str(error)) from None
        logprobs = None
        if found is not None:
            offsets, ids, values = found
            logprobs = RaggedLogprobs(
                np.array(offsets, np.int32), np.array(ids, np.int32), np.array(values, np.float32)
            )
        return SamplerOutput(token_ids, statuses, logprobs)
