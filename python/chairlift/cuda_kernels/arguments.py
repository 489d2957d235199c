"""The one place where the arguments of kernels are checked, before an address goes down.

A kernel trusts its struct: what is wrong with a tensor is found here, in the words of who called,
or nowhere. Sizes have names: the first tensor that has a size gives it its value, and every other
must agree. What only the device knows (indices inside of tensors) is the scheduler's promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from torch import Tensor

TYPE_NAMES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
"""What the kernels call a type."""
FLOATS = tuple(TYPE_NAMES)
VECTOR_BYTES = 16
"""What one access of a kernel moves."""
MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)
"""Largest grid of any device."""
_MOST_INDEX = 2**31 - 1

Size = int | str
"""A number, or the name of one."""


class KernelArgumentError(ChairliftError, ValueError):
    """A tensor or number that a kernel cannot take."""

    code = "invalid_kernel_argument"


class Arguments:
    """Checks the arguments of one call. Tensors must be where the first one is, but the host's."""

    def __init__(self, kernel: str) -> None:
        """Begin with the name that errors tell."""
        self._kernel = kernel
        self._device: torch.device | None = None
        self._sizes: dict[str, tuple[int, str]] = {}  # name -> value, and the tensor it came from

    def __getitem__(self, name: str) -> int:
        """Return the value of a named size."""
        return self._sizes[name][0]

    def tensor(
        self,
        name: str,
        tensor: Tensor,
        dtype: torch.dtype | Sequence[torch.dtype],
        shape: Sequence[Size],
        *,
        row_stride: bool = False,
        on_host: bool = False,
    ) -> None:
        """Check a tensor; with ``row_stride`` its first dimension may have any stride.

        With ``on_host`` it is in memory of the host, wherever the others are.

        Raises:
            KernelArgumentError: it is elsewhere than the others, of another type or shape, not
                contiguous, or floats at an address that is not a multiple of 16 bytes.
        """
        if not on_host:
            self._check_device(name, tensor)
        elif tensor.device.type not in ("cpu", "meta"):
            raise self.error(f"{name} is on {tensor.device}, not on the host")
        wanted = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in wanted:
            raise self.error(f"{name} is {_short(tensor.dtype)}, not {_any_of(wanted)}")
        self._check_shape(name, tensor, shape)
        self._check_layout(name, tensor, row_stride)

    def number(self, name: str, value: int, low: int, high: int = _MOST_INDEX) -> None:
        """Check that an integer is within bounds.

        Raises:
            KernelArgumentError: it is not.
        """
        if not low <= value <= high:
            raise self.error(f"{name} is {value}; it must be from {low} to {high}")

    def multiple(self, name: str, value: int, of: int, why: str) -> None:
        """Check that a size is a multiple of another.

        Raises:
            KernelArgumentError: it is not.
        """
        if value % of:
            raise self.error(f"{name} is {value}, not a multiple of {of} ({why})")

    def grid(self, grid: tuple[int, int, int]) -> None:
        """Check that a device runs a grid of that many blocks.

        Raises:
            KernelArgumentError: it does not.
        """
        if any(count > most for count, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise self.error(f"a grid of {grid} blocks is beyond {MOST_BLOCKS}: give it less work")

    def error(self, message: str) -> KernelArgumentError:
        """Make an error about this call."""
        return KernelArgumentError(f"{self._kernel}: {message}")

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if self._device is None:
            self._device = tensor.device
        elif tensor.device != self._device:
            raise self.error(f"{name} is on {tensor.device}, the others on {self._device}")

    def _check_shape(self, name: str, tensor: Tensor, shape: Sequence[Size]) -> None:
        found = tuple(tensor.shape)
        if len(found) != len(shape):
            raise self._shape_error(name, found, shape)
        for size, value in zip(shape, found, strict=True):
            if isinstance(size, int):
                if value != size:
                    raise self._shape_error(name, found, shape)
                continue
            known = self._sizes.setdefault(size, (value, name))
            if value != known[0]:
                reason = f"{size} is {known[0]} in {known[1]}"
                raise self._shape_error(name, found, shape, reason)
            if value > _MOST_INDEX:
                raise self.error(f"{name} has {value} {size}, beyond {_MOST_INDEX}")

    def _shape_error(
        self, name: str, found: tuple[int, ...], shape: Sequence[Size], reason: str = ""
    ) -> KernelArgumentError:
        wanted = ", ".join(map(str, shape))
        return self.error(
            f"{name} has shape {list(found)}, not [{wanted}]{f': {reason}' if reason else ''}"
        )

    def _check_layout(self, name: str, tensor: Tensor, row_stride: bool) -> None:
        inner = tensor
        if row_stride and tensor.dim() > 1 and tensor.shape[0] > 1:
            inner = tensor[0]
            step = tensor.stride(0) * tensor.element_size()
            if tensor.stride(0) < inner.numel() or step % VECTOR_BYTES:
                raise self.error(
                    f"the rows of {name} are {step} bytes apart; they must not overlap, and be "
                    f"multiples of {VECTOR_BYTES} apart"
                )
        if not inner.is_contiguous():
            strides = list(tensor.stride())
            raise self.error(f"{name} is not contiguous: its strides are {strides}")
        vectors = tensor.is_floating_point() and not _is_symbolic(tensor)
        if vectors and tensor.data_ptr() % VECTOR_BYTES:
            raise self.error(f"{name} is not at a multiple of {VECTOR_BYTES} bytes")


def _is_symbolic(tensor: Tensor) -> bool:
    """Whether it has no memory: a tensor of the meta device, or one that torch traces with."""
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _any_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(_short, dtypes))
