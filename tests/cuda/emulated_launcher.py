"""Kernels of :mod:`chairlift.cuda_kernels.kernels`, and torch's operators, on the emulated device.

Tensors stay where torch has them, on the CPU; what the kernels make is between guards and begins as
not-a-number. With :meth:`EmulatedLauncher.guard` their inputs are between guards too.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from emulated_attention import decode_library, prefill_library, write_library
from emulated_device import SCHEDULES, EmulatedDevice, KernelLibrary, Schedule, library_of

from chairlift.cuda_kernels.arguments import TYPE_NAMES
from chairlift.cuda_kernels.catalogue import FP8, source_of
from chairlift.cuda_kernels.kernels import Kernels
from chairlift.cuda_kernels.launcher import Launch
from chairlift.cuda_kernels.ops import OPERATORS

_OF_A_TYPE = {
    "kv_cache_write": write_library,
    "paged_attention_decode": decode_library,
    "paged_attention_prefill": prefill_library,
}


@cache
def library_with(kernel: str) -> KernelLibrary:
    """The compilation that has a kernel: for attention, the one that other tests use."""
    source = source_of(kernel).name
    make = _OF_A_TYPE.get(source)
    if make is None:
        return library_of(source, (kernel,))
    names = kernel.partition("<")[2].rstrip(">").split(", ")
    dtype = next(dtype for dtype, name in TYPE_NAMES.items() if name == names[0])
    return make(dtype, torch.float8_e4m3fn if names[-1] == FP8 else dtype)


class EmulatedLauncher:
    """Runs every launch to its end, under one schedule."""

    def __init__(self, schedule: Schedule = SCHEDULES[0], *, guards: bool = True) -> None:
        self.schedule = schedule
        self.guards = guards
        """Whether results are guarded; they then need memory until :meth:`free_all`."""
        self.launched: list[Launch] = []
        """What ran, in order."""

    def guard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into guarded memory."""
        copy = self.empty(tuple(tensor.shape), tensor, tensor.dtype)
        return copy.copy_(tensor)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor of guarded memory that is all ones: not-a-number, or -1."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size or not self.guards:
            tensor = like.new_empty(shape, dtype=dtype)
            tensor.view(torch.uint8).fill_(0xFF)
            return tensor
        memory = library_with("block_copy")
        address = memory.allocate("a tensor", size, self.schedule.at_end, fill=True)
        buffer = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def free_all(self) -> None:
        """Give guarded memory back; tensors of it must not be used any more."""
        library_with("block_copy").free_all()

    def launch(self, launch: Launch) -> None:
        self.launched.append(launch)
        if 0 in launch.grid:
            return
        device = EmulatedDevice(library_with(launch.kernel), self.schedule)
        device.launch(
            launch.kernel, launch.grid, launch.threads, launch.params, launch.shared_bytes
        )


class _Current:
    """Where operators of tensors on the CPU are sent; set by :func:`emulate`."""

    kernels: Kernels | None = None


def emulate(launcher: EmulatedLauncher | None) -> None:
    """Let torch's operators of tensors on the CPU launch there; None: nowhere."""
    _Current.kernels = None if launcher is None else Kernels(launcher)


def _register(name: str) -> None:
    def run(*arguments):
        assert _Current.kernels is not None, "no emulator was chosen"
        return getattr(_Current.kernels, name)(*arguments)

    OPERATORS[name].register_kernel("cpu", run)


for _name in OPERATORS:
    _register(_name)
