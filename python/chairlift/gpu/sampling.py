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
from chairlift.executor import RaggedLogprobs
from chairlift.gpu.plan_buffers import IN_FLIGHT, host_view
from chairlift.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import Int32Array, RowResets, StepPlan
    from chairlift.gpu.device import Device


class DeviceSampler:
    """Samples tokens for rows that keep their parameters and history between steps."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        """Start with ``max_rows`` greedy rows."""
        self._device = device
        self._vocab_size = vocab_size
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
        self._results = [_HostBuffer(device) for _ in range(IN_FLIGHT)]
        self._told = [_HostBuffer(device) for _ in range(IN_FLIGHT)]

    def reset(self, resets: RowResets) -> None:
        """Give rows new parameters and histories; all, or none on :class:`SamplerError`."""
        if not len(resets.rows):
            return
        self._checker.reset(resets)
        self._has_edits[resets.rows] = rows_with_edits(resets)
        self._num_best[resets.rows] = resets.ints[:, 3]
        arrays: tuple[NDArray[Any], ...] = (
            resets.rows,
            resets.floats,
            resets.ints,
            resets.id_ranges,
            resets.bias_ranges,
            resets.suppressed_ranges,
            resets.ids,
            resets.bias_ids,
            resets.bias_values,
            resets.suppressed_ids,
        )
        state = (self._params, self._counts, *self._lists)
        ops.sampling_reset(*state, *(self._send(array) for array in arrays))

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
            told = self._tell(logits, token_ids, statuses, num_best, plan.step)
        host = self._results[plan.step % IN_FLIGHT].fetch(results)

        def read() -> SamplerOutput:
            values = host.numpy().copy()
            statuses = values[4 * count :]
            logprobs = None if told is None else told(statuses)
            return SamplerOutput(values[: 4 * count].view(np.int32), statuses, logprobs)

        return read

    def _tell(
        self, logits: Tensor, token_ids: Tensor, statuses: Tensor, num_best: Int32Array, step: int
    ) -> Callable[[NDArray[np.uint8]], RaggedLogprobs]:
        """Launch the log-probabilities; returns what reads them, given the statuses."""
        count, width = len(num_best), 1 + min(int(num_best.max()), self._vocab_size)
        # Ids, then values, which begin at a multiple of 16 bytes.
        results = torch.empty(
            (2, -(-width // 4) * 4 * count), dtype=torch.int32, device=logits.device
        )
        ids, values = (half[: count * width].view(count, width) for half in results)
        values = values.view(torch.float32)
        ops.logprobs(ids, values, statuses, logits, token_ids, self._send(num_best))
        host = self._told[step % IN_FLIGHT].fetch(results.view(torch.uint8).flatten())

        def read(statuses: NDArray[np.uint8]) -> RaggedLogprobs:
            halves = host.numpy().view(np.int32).reshape(2, -1)[:, : count * width]
            ids, bits = halves.reshape(2, count, width)
            lengths = np.where(statuses == 0, 1 + np.minimum(num_best, self._vocab_size), 0)
            is_told = np.arange(width) < lengths[:, None]
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            return RaggedLogprobs(offsets, ids[is_told], bits[is_told].view(np.float32))

        return read

    def _send(self, array: NDArray[Any]) -> Tensor:
        return host_view(array).to(self._device.torch_device, non_blocking=True)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device.torch_device)


class _HostBuffer:
    """Memory of the host that results are copied to, as large as the largest so far."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.host_tensor(0, torch.uint8)

    def fetch(self, results: Tensor) -> Tensor:
        """Start to copy bytes; they are there when everything launched so far is done."""
        if len(self._memory) < len(results):
            self._memory = self._device.host_tensor(2 * len(results), torch.uint8)
        return self._memory[: len(results)].copy_(results, non_blocking=True)


def rows_with_edits(resets: RowResets) -> NDArray[np.bool_]:
    """Tell which rows have their logits edited, at least for some outputs."""
    repetition, presence, frequency = resets.floats[:, 3:6].T
    is_biased = resets.bias_ranges[:, 1] > resets.bias_ranges[:, 0]
    is_suppressed = resets.suppressed_ranges[:, 1] > resets.suppressed_ranges[:, 0]
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    edited: NDArray[np.bool_] = penalised | is_biased | is_suppressed
    return edited
