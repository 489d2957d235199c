"""What the executor needs of a device: memory, pinned host memory, events, graphs.

:class:`CudaDevice` is the real one. The tests have one that is the CPU, so that the executor runs
from plan to tokens where there is no GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from chairlift.cuda_kernels.launcher import launcher_of
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, in bytes."""

    total: int
    free: int
    """What nobody has taken, of this process or another."""


class Event(Protocol):
    """A moment in the device's work."""

    def record(self) -> None:
        """Let it be when everything launched so far is done."""

    def synchronize(self) -> None:
        """Wait for it."""


class Graph(Protocol):
    """Captured work."""

    output: Tensor
    """What the work makes, at the same address every time."""

    def replay(self) -> None:
        """Launch the work again, on whatever is at the addresses it was captured with."""


class Device(Protocol):
    """Where an executor keeps its tensors and runs its kernels."""

    torch_device: torch.device
    name: str

    def active(self) -> AbstractContextManager[object]:
        """Make it the current device for a while."""

    def load(self, kernels: Sequence[str]) -> None:
        """Get kernels ready, compiled side by side where they are not in the cache."""

    def memory(self) -> DeviceMemory:
        """Tell how much memory there is, after giving back what nobody uses."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run ``work`` and return how much more memory it took at once than before and after."""

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """Make a vector on the host that the device copies from and to without waiting."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Let the device copy from this memory of the host without waiting, and its kernels reach
        it at its own address.

        Raises:
            RuntimeError: so much cannot be pinned.
        """

    def unpin(self, address: int) -> None:
        """Undo a :meth:`pin`, once nothing that was launched needs it any more."""

    def event(self) -> Event:
        """Make an event."""

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """Capture ``work``, which must launch the same every time; it runs once before."""


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """A CUDA device of this machine."""

    def __init__(self, index: int | None = None) -> None:
        """Take a device; None: torch's current one.

        Raises:
            ConfigError: there is none.
        """
        if not torch.cuda.is_available():
            built = torch.version.cuda
            reason = "torch finds none" if built else "torch was built without CUDA"
            raise ConfigError(
                f"device is 'cuda', but there is no CUDA device ({reason}); leave it out to run on "
                "the CPU"
            )
        if index is None:
            index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._graph_memory: Any = None  # a handle of torch
        self._capture_stream: torch.cuda.Stream | None = None

    def active(self) -> AbstractContextManager[object]:
        """See :class:`Device`."""
        return torch.cuda.device(self.torch_device)

    def load(self, kernels: Sequence[str]) -> None:
        """See :class:`Device`."""
        launcher_of(self.torch_device.index).load(kernels)

    def memory(self) -> DeviceMemory:
        """See :class:`Device`."""
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(total, free)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See :class:`Device`."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Device`."""
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def pin(self, address: int, num_bytes: int) -> None:
        """See :class:`Device`. With unified addressing, what is registered is mapped as well."""
        status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            address, num_bytes, 0
        )
        torch.cuda.check_error(int(status))

    def unpin(self, address: int) -> None:
        """See :class:`Device`."""
        torch.cuda.synchronize(self.torch_device)
        status = torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(status))

    def event(self) -> Event:
        """See :class:`Device`."""
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """See :class:`Device`. All graphs share their memory: only one runs at a time."""
        if self._capture_stream is None:
            self._capture_stream = _new_stream(self.torch_device)
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), self._capture_stream
        torch.cuda.synchronize(self.torch_device)
        with torch.cuda.stream(stream):
            work()  # what libraries set up at their first call cannot be captured
            stream.synchronize()
            # Not torch.cuda.graph(): it collects garbage every time, and there are many graphs.
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                output = work()
            finally:
                graph.capture_end()
        return _CudaGraph(graph, output)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
