"""A plan on the device: its arrays at fixed addresses, and the lists that the host adds to them.

Graphs read their inputs at the addresses they were captured with, so every array has one buffer for
all steps, as long as the longest. A plan is copied array by array, straight from the scheduler's
memory; lists that are made for the step (work of attention, indices) go in one copy more. Copies
are ordered with the kernels, so the buffers need no second set; what the host writes for a copy
does: that of the step before may not have begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.errors import UnsupportedStepError
from chairlift.gpu.attention import DecodeLists, DeviceStep, StepWork, padded

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import Int32Array, StepPlan
    from chairlift.gpu.device import Device
    from chairlift.gpu.graphs import GraphShape

IN_FLIGHT = 2
"""Steps whose copies may not have begun when the next plan comes."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest step."""

    tokens: int
    sequences: int
    blocks_per_sequence: int
    chunks_per_sequence: int
    """Chunks of keys that decode attention is cut into."""


class PlanBuffers:
    """The device's copies of plans."""

    def __init__(self, limits: PlanLimits, device: Device) -> None:
        """Reserve them."""

        def zeros(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=device.torch_device)

        tokens, sequences = limits.tokens, limits.sequences
        self._token_ids = zeros(tokens)
        self._positions = zeros(tokens)
        self._slots = zeros(tokens, torch.int64)
        self._query_start_loc = zeros(sequences + 1)
        self._seq_lens = zeros(sequences)
        self._block_table_offsets = zeros(sequences + 1)
        self._block_ids = zeros(sequences * limits.blocks_per_sequence)
        self._lists = ListBuffer(_longest_lists(limits), device)

    def send(
        self,
        plan: StepPlan,
        work: StepWork,
        *,
        shape: GraphShape | None = None,
        more: Sequence[Int32Array] = (),
    ) -> tuple[DeviceStep, list[Tensor]]:
        """Copy a plan, its work, and ``more`` lists.

        With ``shape``, the plan is of decodes and padded to that graph.

        Returns:
            The step, and the lists, on the device; valid as long as the step.
        """
        self._copy(plan)
        lists: list[Int32Array] = []
        if shape is None:
            for cut in work.decode:
                lists += [cut.items, cut.splits]
            if work.prefill is not None:
                lists.append(work.prefill)
        else:
            (cut,) = work.decode
            lists += [padded(cut.items, shape.items), padded(cut.splits, _num_splits(shape))]
            # Nothing is written for padding; its other values are those of some earlier step.
            self._slots[len(plan.rows) : shape.sequences].fill_(-1)
        sent = self._lists.send(plan.step, [*lists, *more])
        rest = sent[len(lists) :]
        if shape is not None:
            return self.padded_step(shape), rest
        decode = tuple(
            DecodeLists(items, splits, cut.num_partials, cut.max_query_tokens)
            for cut, items, splits in zip(work.decode, sent[::2], sent[1::2], strict=False)
        )
        prefill = None if work.prefill is None else sent[len(lists) - 1]
        return self._step(len(plan.token_ids), len(plan.rows), decode, prefill), rest

    def padded_step(self, shape: GraphShape) -> DeviceStep:
        """What the graph of ``shape`` reads."""
        items, splits = self._lists.views([(shape.items, 3), (_num_splits(shape), 3)])
        lists = DecodeLists(items, splits, shape.items if shape.is_split else 0, 1)
        return self._step(shape.sequences, shape.sequences, (lists,), None)

    def clear_padding(self, shape: GraphShape) -> None:
        """Make a step of ``shape`` that has no sequences: nothing is read, nothing is written."""
        self._slots[: shape.sequences].fill_(-1)
        for entries in self._lists.views([(shape.items, 3), (_num_splits(shape), 3)]):
            entries.fill_(-1)

    def _copy(self, plan: StepPlan) -> None:
        for name, buffer, array in (
            ("token_ids", self._token_ids, plan.token_ids),
            ("positions", self._positions, plan.positions),
            ("slot_mapping", self._slots, plan.slot_mapping),
            ("query_start_loc", self._query_start_loc, plan.query_start_loc),
            ("seq_lens", self._seq_lens, plan.seq_lens),
            ("block_table_offsets", self._block_table_offsets, plan.block_table_offsets),
            ("block_ids", self._block_ids, plan.block_ids),
        ):
            if len(array) > len(buffer):
                raise UnsupportedStepError(
                    f"step {plan.step} has {len(array)} {name}; this executor has room for "
                    f"{len(buffer)}"
                )
            buffer[: len(array)].copy_(host_view(array), non_blocking=True)

    def _step(
        self,
        tokens: int,
        sequences: int,
        decode: tuple[DecodeLists, ...],
        prefill: Tensor | None,
    ) -> DeviceStep:
        return DeviceStep(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            slots=self._slots[:tokens],
            query_start_loc=self._query_start_loc[: sequences + 1],
            seq_lens=self._seq_lens[:sequences],
            block_table_offsets=self._block_table_offsets[: sequences + 1],
            block_ids=self._block_ids,
            decode=decode,
            prefill=prefill,
        )


class ListBuffer:
    """Lists of int32 that the host makes for a step, sent in one copy."""

    def __init__(self, capacity: int, device: Device) -> None:
        """Hold ``capacity`` entries of all lists of a step together."""
        self._hosts = [device.host_tensor(capacity, torch.int32) for _ in range(IN_FLIGHT)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device.torch_device)

    def send(self, step: int, lists: Sequence[Int32Array]) -> list[Tensor]:
        """Send the lists of a step, one behind the other; returns them on the device."""
        host = self._hosts[step % IN_FLIGHT]
        values = host.numpy()
        end = 0
        for array in lists:
            begin, end = end, end + array.size
            if end > len(values):
                raise UnsupportedStepError(
                    f"step {step} has more than {len(values)} entries of work lists"
                )
            values[begin:end] = array.ravel()
        self._device[:end].copy_(host[:end], non_blocking=True)
        return self.views([array.shape for array in lists])

    def views(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Where lists of these shapes lie on the device."""
        views, begin = [], 0
        for shape in shapes:
            size = int(np.prod(shape))
            views.append(self._device[begin : begin + size].view(shape))
            begin += size
        return views


def host_view(array: NDArray[np.generic]) -> Tensor:
    """Wrap an array for torch; one that must not be written is copied, or torch would warn."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _num_splits(shape: GraphShape) -> int:
    return shape.sequences if shape.is_split else 0


def _longest_lists(limits: PlanLimits) -> int:
    """Entries of a step's lists at most: items, splits and tiles (of a token at least), and indices
    of tokens and samples."""
    items = limits.sequences * limits.chunks_per_sequence
    return 3 * items + 8 * (limits.sequences + limits.tokens)
