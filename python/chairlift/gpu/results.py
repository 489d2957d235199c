"""The way of results to the host: memory that the device copies to while the host goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chairlift.gpu.plan_buffers import IN_FLIGHT

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.gpu.device import Device


class ResultBuffers:
    """Memory of the host for the results of the steps in flight, as large as the largest so far."""

    def __init__(self, device: Device) -> None:
        """Begin with none."""
        self._device = device
        self._memory = [device.host_tensor(0, torch.uint8) for _ in range(IN_FLIGHT)]

    def fetch(self, step: int, results: Tensor) -> Tensor:
        """Start to copy bytes; they are there when everything launched so far is done, and stay
        until as many steps as may be in flight are launched after this one."""
        index = step % IN_FLIGHT
        if len(self._memory[index]) < len(results):
            self._memory[index] = self._device.host_tensor(2 * len(results), torch.uint8)
        return self._memory[index][: len(results)].copy_(results, non_blocking=True)
