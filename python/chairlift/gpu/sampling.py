"""From logits on the device to tokens: greedy rows there, others by the sampler of the CPU.

A row is plain if it takes the best token of the logits as they are. Steps of plain rows stay on the
device: tokens and statuses come back in one copy, and the next step's input tokens are already
there. As soon as one sample is not plain, the step's logits go to the host, where the Rust sampler
has the rows' parameters and histories; so the launch waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.gpu.plan_buffers import IN_FLIGHT, host_view
from chairlift.sampler import Sampler, SamplerOutput
from chairlift.sampler.reference import GREEDY_BELOW

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import RowResets, StepPlan
    from chairlift.gpu.device import Device


class DeviceSampler:
    """Samples tokens for rows that keep their parameters between steps."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        """Start with ``max_rows`` greedy rows."""
        self._sampler = Sampler(max_rows, vocab_size)
        self._is_plain = np.ones(max_rows, dtype=np.bool_)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device.torch_device)
        """[rows] each row's last sampled token, on the device."""
        self._results = [device.host_tensor(2 * max_rows, torch.int32) for _ in range(IN_FLIGHT)]

    def reset(self, resets: RowResets) -> None:
        """Give rows new parameters and histories."""
        self._sampler.reset(resets)
        self._is_plain[resets.rows] = plain_rows(resets)

    def sample(self, logits: Tensor, plan: StepPlan, rows: Tensor) -> Callable[[], SamplerOutput]:
        """Sample from ``logits [S, vocab]`` for ``rows`` ``[S]``, the plan's rows on the device.

        Returns:
            What gives the tokens, once everything that was launched so far is done.
        """
        if self._is_plain[plan.sample_rows].all():
            return self._take_best(logits, plan, rows)
        if logits.dtype == torch.float16:  # which the sampler of the CPU does not know
            logits = logits.float()
        sampled = self._sampler.sample(
            logits.cpu().contiguous(), plan.sample_rows, plan.sample_output_indices
        )
        self.last_tokens[rows] = host_view(sampled.token_ids).to(rows.device)
        return lambda: sampled

    def _take_best(
        self, logits: Tensor, plan: StepPlan, rows: Tensor
    ) -> Callable[[], SamplerOutput]:
        best, tokens = logits.max(dim=1)  # the first of equals
        failed = ~best.isfinite()
        results = torch.stack((tokens.masked_fill(failed, 0), failed), dim=0).int()  # [2, S]
        self.last_tokens[rows] = results[0]
        host = self._results[plan.step % IN_FLIGHT][: results.numel()].view(results.shape)
        host.copy_(results, non_blocking=True)

        def read() -> SamplerOutput:
            token_ids, statuses = host.numpy().copy()
            return SamplerOutput(token_ids, statuses.astype(np.uint8), None)

        return read


def plain_rows(resets: RowResets) -> NDArray[np.bool_]:
    """Tell which rows take the best token of the logits as they are, and only that."""
    temperature, repetition = resets.floats[:, 0], resets.floats[:, 3]
    presence, frequency = resets.floats[:, 4], resets.floats[:, 5]
    is_biased = resets.bias_ranges[:, 1] > resets.bias_ranges[:, 0]
    is_suppressed = resets.suppressed_ranges[:, 1] > resets.suppressed_ranges[:, 0]
    plain: NDArray[np.bool_] = (
        (temperature < GREEDY_BELOW)
        & (repetition == 1.0)
        & (presence == 0.0)
        & (frequency == 0.0)
        & (resets.ints[:, 3] < 0)
        & ~is_biased
        & ~is_suppressed
    )
    return plain
