"""Pinning the scheduler's plan memory, so that the device copies plans straight out of it.

The arrays of a plan are vectors that Rust owns and never moves; each plan of the ring is pinned
when it is first seen, and kept and unpinned with the executor: what is freed while it is pinned
could not be pinned by whoever gets it next. Memory is pinned by whole pages, and vectors share
pages, so it is pages that are remembered. Arrays that are not the scheduler's (plans made by hand)
are left alone: their memory comes and goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import fields
from mmap import PAGESIZE
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from chairlift.executor import StepPlan
    from chairlift.gpu.device import Device

    AnyArray = NDArray[np.generic]


class PlanPinning:
    """Pins the memory of plans, each once."""

    def __init__(self, device: Device) -> None:
        """Pin for ``device``, until this object is gone."""
        self._device = device
        self._known: set[int] = set()  # addresses of token_ids, one a plan
        self._pages: set[int] = set()
        self._pinned: list[int] = []  # addresses of ranges
        self._arrays: list[AnyArray] = []  # what is on them
        give_back = weakref.finalize(self, _give_back, device, self._pinned, self._arrays)
        give_back.atexit = False

    def see(self, plan: StepPlan) -> None:
        """Pin the arrays of a plan, if they are new and the scheduler's."""
        first = _owned_by_rust(plan.token_ids)
        if first is None or (address := _address(first)) in self._known:
            return
        self._known.add(address)
        arrays = [getattr(plan, field.name) for field in fields(plan)]
        owned = [whole for array in arrays if (whole := _owned_by_rust(array)) is not None]
        self._arrays += owned
        for begin, end in new_ranges(owned, self._pages):
            self._device.pin(begin * PAGESIZE, (end - begin) * PAGESIZE)
            self._pinned.append(begin * PAGESIZE)


def new_ranges(arrays: Iterable[AnyArray], known: set[int]) -> list[tuple[int, int]]:
    """Return the ranges ``[begin, end)`` of pages under the arrays that are not yet ``known``.

    The pages are added to ``known``.
    """
    pages: set[int] = set()
    for array in arrays:
        if array.nbytes:
            begin = _address(array)
            pages.update(range(begin // PAGESIZE, (begin + array.nbytes - 1) // PAGESIZE + 1))
    ranges: list[tuple[int, int]] = []
    for page in sorted(pages - known):
        if ranges and ranges[-1][1] == page:
            ranges[-1] = (ranges[-1][0], page + 1)
        else:
            ranges.append((page, page + 1))
    known |= pages
    return ranges


def _give_back(device: Device, pinned: list[int], _arrays: list[AnyArray]) -> None:
    """Unpin, while the arrays are still there."""
    for address in pinned:
        device.unpin(address)


def _address(array: AnyArray) -> int:
    return int(array.__array_interface__["data"][0])


def _owned_by_rust(array: object) -> AnyArray | None:
    """Return the whole vector that an array is a slice of, if it is one of the scheduler's."""
    if not isinstance(array, np.ndarray):
        return None
    whole: AnyArray = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    owner = whole.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return whole if type(owner).__name__ == "PlanArray" else None
