"""A device that is the CPU: the CUDA executor on it runs every kernel on the emulator.

Its graphs are as strict as real ones: what was captured is replayed operator by operator with the
very tensors of the capture, so a number that the host computed anew, or a tensor at another
address, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chairlift.gpu.device import DeviceMemory


class _Recorder(TorchDispatchMode):
    """Keeps every operator that runs, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value was read on the host: no graph can be captured so")
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result


class ReplayedGraph:
    """A capture, and how often it was replayed."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        with _Recorder() as recorder:
            self.output = work()
        self._calls = recorder.calls
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, result in self._calls:
            inputs = {
                leaf.untyped_storage().data_ptr()
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn
            }
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                is_alias = old is None or old.untyped_storage().data_ptr() in inputs
                if not is_alias:  # neither a view nor written in place
                    old.copy_(new)


class CpuEvent:
    def __init__(self) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded, "an event was waited for that nobody recorded"


class CpuDevice:
    """See :class:`chairlift.gpu.device.Device`."""

    def __init__(self, *, total: int = 1 << 30, used: int = 0, peak: int = 1 << 20) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "the emulator"
        self._memory = DeviceMemory(total, total - used)
        self._peak = peak
        self.loaded: list[str] = []
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[int] = []
        self.graphs: list[ReplayedGraph] = []
        self.profiled = 0

    def active(self):
        return nullcontext()

    def load(self, kernels):
        self.loaded.extend(kernels)

    def memory(self):
        return self._memory

    def peak_bytes(self, work):
        work()
        self.profiled += 1
        return self._peak

    def host_tensor(self, size, dtype):
        return torch.zeros(size, dtype=dtype)

    def pin(self, address, num_bytes):
        self.pinned.append((address, num_bytes))

    def unpin(self, address):
        self.unpinned.append(address)

    def event(self):
        return CpuEvent()

    def capture(self, work):
        work()
        self.graphs.append(ReplayedGraph(work))
        return self.graphs[-1]
