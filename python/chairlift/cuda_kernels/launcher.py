"""Launching kernels on a CUDA device: on torch's current stream, with the addresses of tensors.

So the launches are ordered with torch's own, and are captured where torch captures a graph. Kernels
are loaded from the cache of compiled ones when they are first launched; :meth:`CudaLauncher.load`
does that beforehand, which a capture needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, addressof, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt

import torch

from chairlift.cuda_kernels.compiler import CompiledSource
from chairlift.cuda_kernels.kernel_cache import KernelCache
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from torch import Tensor

LOWEST_CAPABILITY = (8, 0)
"""Asynchronous copies and matrices of bfloat16 begin with sm_80."""
_SHARED_WITHOUT_ASKING = 48 << 10
"""Bytes of dynamic shared memory that a kernel may have without an attribute that says so."""


class CudaError(ChairliftError):
    """The CUDA driver refused something; the message has its words."""

    code = "cuda_error"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel that takes one struct."""

    kernel: str
    """Name expression."""
    grid: tuple[int, int, int]
    threads: int
    """Of a block."""
    params: Structure
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""


class Launcher(Protocol):
    """Where kernels run: a CUDA device, or the tests' emulator."""

    def empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make a tensor for a kernel to write, where ``like`` is."""

    def launch(self, launch: Launch) -> None:
        """Run a kernel, after everything launched before."""


class CudaLauncher:
    """Launches on one device."""

    def __init__(self, device: int, kernels: KernelCache) -> None:
        """Check the device.

        Raises:
            CudaError: it is too old, or the packages that load kernels are missing.
        """
        try:
            from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency
            from cuda.core import ObjectCode  # noqa: PLC0415
        except ImportError as error:
            raise CudaError(
                f"CUDA kernels need a package that is missing ({error}): "
                "pip install 'chairlift[cuda]'"
            ) from error
        capability = torch.cuda.get_device_capability(device)
        if capability < LOWEST_CAPABILITY:
            raise CudaError(
                f"{torch.cuda.get_device_name(device)} has compute capability "
                f"{capability[0]}.{capability[1]}; the kernels need 8.0 or newer"
            )
        self._driver = driver
        self._load_cubin = ObjectCode.from_cubin
        self._device = device
        self._architecture = f"sm_{capability[0]}{capability[1]}"
        self._cache = kernels
        self._loaded: dict[str, tuple[Any, Any]] = {}  # kernel -> its handle, what keeps it alive

    def load(self, kernels: Iterable[str]) -> None:
        """Compile, or read from the cache, and load these kernels."""
        wanted = [kernel for kernel in kernels if kernel not in self._loaded]
        for kernel, compiled in self._cache.get_all(wanted, self._architecture).items():
            self._keep(kernel, compiled)

    def empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Take memory from torch."""
        return like.new_empty(shape, dtype=dtype)

    def launch(self, launch: Launch) -> None:
        """Launch on torch's current stream."""
        if 0 in launch.grid:
            return
        loaded = self._loaded.get(launch.kernel)
        if loaded is None:
            self.load((launch.kernel,))
            loaded = self._loaded[launch.kernel]
        arguments = (c_void_p * 1)(addressof(launch.params))
        # cuda.core launches no structs by value, so its kernel is launched by the driver's call,
        # which copies the struct before it returns.
        (status,) = self._driver.cuLaunchKernel(
            loaded[0],
            *launch.grid,
            *(launch.threads, 1, 1),
            launch.shared_bytes,
            torch.cuda.current_stream(self._device).cuda_stream,
            addressof(arguments),
            0,
        )
        self._check(status, f"launching {launch.kernel} with a grid of {launch.grid}")

    def _keep(self, kernel: str, compiled: CompiledSource) -> None:
        loaded = self._load_cubin(compiled.cubin).get_kernel(compiled.symbols[kernel])
        driver = self._driver
        handle = driver.CUkernel(int(loaded.handle))
        status, device = driver.cuDeviceGet(self._device)
        self._check(status, "looking the device up")
        most = torch.cuda.get_device_properties(self._device).shared_memory_per_block_optin
        dynamic = most - compiled.usage[kernel].shared_bytes
        if dynamic > _SHARED_WITHOUT_ASKING:
            (status,) = driver.cuKernelSetAttribute(
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic,
                handle,
                device,
            )
            self._check(status, f"allowing {kernel} {dynamic} bytes of shared memory")
        # A kernel of a library stands for itself in every context (CUDA 12).
        self._loaded[kernel] = (driver.CUfunction(int(handle)), loaded)

    def _check(self, status: SupportsInt, doing: str) -> None:
        if int(status):
            _, text = self._driver.cuGetErrorString(status)
            raise CudaError(f"{doing}: {text.decode()}")


@cache
def launcher_of(device: int) -> CudaLauncher:
    """Return the launcher of a device; it is made once."""
    return CudaLauncher(device, KernelCache())
