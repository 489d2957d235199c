"""From logits on the device to tokens, on the device: the host only knows who wants what.

Parameters, penalty counts and last tokens of the rows stay there, so a step may be launched before
the host has seen the tokens of the one before. Tokens and statuses come back in one copy,
log-probabilities in another where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import sizeof
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chairlift.cuda_kernels import ops
from chairlift.cuda_kernels.catalogue import MAX_LISTED
from chairlift.cuda_kernels.params import SamplingRow
from chairlift.gpu.logprobs import DeviceLogprobs
from chairlift.gpu.plan_buffers import host_view
from chairlift.gpu.results import ResultBuffers
from chairlift.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import RowResets, StepPlan
    from chairlift.gpu.device import Device


class DeviceSampler:
    """Samples tokens for rows that keep their parameters and history between steps."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        """Start with ``max_rows`` greedy rows."""
        self._device = device
        self._checker = Sampler(max_rows, vocab_size)  # of resets: the kernels trust them
        self._has_edits = np.zeros(max_rows, dtype=np.bool_)
        self._num_best = np.full(max_rows, -1, dtype=np.int32)
        # All zeros are a greedy row without edits.
        self._params = self._zeros((max_rows, sizeof(SamplingRow)), torch.uint8)
        self._counts = self._zeros((max_rows, vocab_size), torch.int32)
        self._lists = (
            self._zeros((max_rows, MAX_LISTED), torch.int32),
            self._zeros((max_rows, MAX_LISTED), torch.float32),
            self._zeros((max_rows, MAX_LISTED), torch.int32),
        )
        # All rows' at once, so that the largest step needs no memory that was not measured.
        self._edited = self._zeros((max_rows, vocab_size), torch.float32)
        self.last_tokens = self._zeros((max_rows,), torch.int32)
        """[rows] each row's last sampled token, on the device."""
        self._results = ResultBuffers(device)
        self._logprobs = DeviceLogprobs(vocab_size, device)

    def reset(self, resets: RowResets) -> None:
        """Give rows new parameters and histories; all, or none on :class:`SamplerError`."""
        if not len(resets.rows):
            return
        self._checker.reset(resets)
        self._has_edits[resets.rows] = rows_with_edits(resets)
        self._num_best[resets.rows] = resets.ints[:, 3]
        state = (self._params, self._counts, *self._lists)
        ops.sampling_reset(*state, *(self._send(array) for array in resets.arrays))

    def sample(self, logits: Tensor, plan: StepPlan, rows: Tensor) -> Callable[[], SamplerOutput]:
        """Sample from ``logits [S, vocab]`` for ``rows`` ``[S]``, the plan's rows on the device.

        Returns:
            What gives the tokens, once everything that was launched so far is done.
        """
        count = len(plan.sample_rows)
        indices = self._send(plan.sample_output_indices)
        edited = None
        if self._has_edits[plan.sample_rows].any():
            edited = self._edited[:count]
            ops.logit_edits(edited, logits, rows, indices, self._params, self._counts, *self._lists)
        results = torch.empty(5 * count, dtype=torch.uint8, device=logits.device)
        token_ids, statuses = results[: 4 * count].view(torch.int32), results[4 * count :]
        ops.sample(
            token_ids,
            statuses,
            self.last_tokens,
            self._counts,
            logits,
            edited,
            rows,
            indices,
            self._params,
        )
        num_best = self._num_best[plan.sample_rows]
        told = None
        if (num_best >= 0).any():
            told = self._logprobs.tell(
                logits.__getitem__,
                token_ids,
                statuses,
                num_best,
                step=plan.step,
                most_rows=count,
            )
        host = self._results.fetch(plan.step, results)

        def read() -> SamplerOutput:
            values = host.numpy().copy()
            statuses = values[4 * count :]
            logprobs = None if told is None else told(statuses)
            return SamplerOutput(values[: 4 * count].view(np.int32), statuses, logprobs)

        return read

    def _send(self, array: NDArray[Any]) -> Tensor:
        return host_view(array).to(self._device.torch_device, non_blocking=True)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device.torch_device)


def rows_with_edits(resets: RowResets) -> NDArray[np.bool_]:
    """Tell which rows have their logits edited, at least for some outputs."""
    repetition, presence, frequency = resets.floats[:, 3:6].T
    is_biased = resets.bias_ranges[:, 1] > resets.bias_ranges[:, 0]
    is_suppressed = resets.suppressed_ranges[:, 1] > resets.suppressed_ranges[:, 0]
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    edited: NDArray[np.bool_] = penalised | is_biased | is_suppressed
    return edited
