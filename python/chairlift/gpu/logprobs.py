"""Log-probabilities on the device, of samples and prompt tokens, read with the step's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.cuda_kernels import ops
from chairlift.executor import RaggedLogprobs
from chairlift.gpu.plan_buffers import host_view
from chairlift.gpu.results import ResultBuffers
from chairlift.prompt_scores import slice_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import Int32Array, StepPlan
    from chairlift.gpu.device import Device


class DeviceLogprobs:
    """Tells log-probabilities of rows of logits."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        """Begin with a device and the tokens that are scored."""
        self._vocab_size = vocab_size
        self._device = device
        self._told = ResultBuffers(device)

    def tell(
        self,
        logits_of: Callable[[slice], Tensor],
        token_ids: Tensor,
        statuses: Tensor,
        num_best: Int32Array,
        *,
        step: int,
        most_rows: int,
    ) -> Callable[[NDArray[np.uint8]], RaggedLogprobs]:
        """Launch what tells them.

        Args:
            logits_of: gives the logits ``[rows, vocab]`` of a slice of the rows.
            token_ids: ``[R]`` int32, the token of each row.
            statuses: ``[R]`` uint8, become 1 where a row's logits are unsound.
            num_best: ``[R]`` how many of the best are told beside it; below zero: nothing at all.
            step: number of the step.
            most_rows: of a slice; a multiple of 4 unless it is all.

        Returns:
            What reads them once everything launched so far is done, given the statuses ``[R]``;
            failed rows have no entries.
        """
        count, width = len(num_best), 1 + min(int(num_best.max()), self._vocab_size)
        # Ids, then values, which begin at a multiple of 16 bytes.
        results = torch.empty(
            (2, -(-width // 4) * 4 * count), dtype=torch.int32, device=statuses.device
        )
        ids, values = (half[: count * width].view(count, width) for half in results)
        values = values.view(torch.float32)
        wanted = host_view(num_best).to(statuses.device, non_blocking=True)
        for begin in range(0, count, most_rows):
            rows = slice(begin, begin + most_rows)
            logits = logits_of(rows)
            ops.logprobs(
                ids[rows], values[rows], statuses[rows], logits, token_ids[rows], wanted[rows]
            )
        host = self._told.fetch(step, results.view(torch.uint8).flatten())

        def read(statuses: NDArray[np.uint8]) -> RaggedLogprobs:
            halves = host.numpy().view(np.int32).reshape(2, -1)[:, : count * width]
            ids, bits = halves.reshape(2, count, width)
            lengths = np.where(statuses == 0, 1 + np.minimum(num_best, self._vocab_size), 0)
            is_told = np.arange(width) < lengths[:, None]
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            return RaggedLogprobs(offsets, ids[is_told], bits[is_told].view(np.float32))

        return read


class PromptScores:
    """Log-probabilities of prompt tokens: slice by slice, since their logits are many."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        """Begin with a device and the tokens that are scored."""
        self._device = device
        self._logprobs = DeviceLogprobs(vocab_size, device)
        self._statuses = ResultBuffers(device)
        self._most_rows = max(4, slice_rows(vocab_size) // 4 * 4)

    def score(
        self, plan: StepPlan, hidden: Tensor, score: Callable[[Tensor], Tensor]
    ) -> Callable[[], tuple[RaggedLogprobs, NDArray[np.bool_]]]:
        """Launch what scores the plan's ``P`` prompt tokens.

        ``hidden`` ``[P, hidden]`` and ``score`` are those of
        :func:`chairlift.prompt_scores.score_prompt`, and so is what the result returns once
        everything launched so far is done.
        """
        device = self._device.torch_device
        statuses = torch.zeros(len(hidden), dtype=torch.uint8, device=device)
        told = self._logprobs.tell(
            lambda rows: score(hidden[rows]),
            host_view(plan.score_token_ids).to(device, non_blocking=True),
            statuses,
            plan.score_num_best,
            step=plan.step,
            most_rows=self._most_rows,
        )
        host = self._statuses.fetch(plan.step, statuses)

        def read() -> tuple[RaggedLogprobs, NDArray[np.bool_]]:
            failed = host.numpy().copy()
            return told(failed), failed.astype(np.bool_)

        return read
