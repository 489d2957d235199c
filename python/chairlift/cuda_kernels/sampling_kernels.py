"""Calls of the sampling kernels: part of :class:`chairlift.cuda_kernels.kernels.Kernels`.

All of them read the state that rows keep between steps, which is five tensors of ``max_rows`` rows:
parameters ``[rows, bytes of SamplingRow]`` uint8; counts ``[rows, V]`` int32; and with room for
:data:`~chairlift.cuda_kernels.catalogue.MAX_LISTED` entries each, ids and values of biases, and
suppressed ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import sizeof
from typing import TYPE_CHECKING

import torch

from chairlift.cuda_kernels.arguments import FLOATS, TYPE_NAMES, Arguments
from chairlift.cuda_kernels.catalogue import (
    EDIT_THREADS,
    EDIT_TOKENS,
    LOGPROBS_THREADS,
    MAX_LISTED,
    MAX_VOCAB_SIZE,
    RESET_THREADS,
    RESET_TOKENS,
    SAMPLE_THREADS,
)
from chairlift.cuda_kernels.launcher import Launch
from chairlift.cuda_kernels.params import (
    LogitEditsParams,
    LogprobsParams,
    SampleParams,
    SamplingResetParams,
    SamplingRow,
)

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.cuda_kernels.launcher import Launcher

_INTS, _LONGS, _BYTES = torch.int32, torch.int64, torch.uint8


def check_state(check: Arguments, row_params: Tensor, row_counts: Tensor) -> None:
    """Check the parameters and counts of the rows."""
    check.tensor("row_params", row_params, _BYTES, ("rows", sizeof(SamplingRow)))
    check.tensor("row_counts", row_counts, _INTS, ("rows", "vocab_size"))


def check_lists(check: Arguments, lists: Sequence[Tensor]) -> None:
    """Check the lists of the rows: ids and values of biases, suppressed ids."""
    names = ("row_bias_ids", "row_bias_values", "row_suppressed_ids")
    for name, dtype, tensor in zip(names, (_INTS, torch.float32, _INTS), lists, strict=True):
        check.tensor(name, tensor, dtype, ("rows", MAX_LISTED))


def check_samples(
    check: Arguments, logits: Tensor, sample_rows: Tensor, output_indices: Tensor
) -> None:
    """Check the logits of samples and whose they are."""
    check.tensor("logits", logits, FLOATS, ("samples", "vocab_size"))
    check.number("vocab_size", check["vocab_size"], 1, MAX_VOCAB_SIZE)
    check.tensor("sample_rows", sample_rows, _INTS, ("samples",))
    check.tensor("output_indices", output_indices, _INTS, ("samples",))


class SamplingKernels:
    """The kernels that make tokens of logits, on one device."""

    _launcher: Launcher | None

    def sampling_reset(
        self,
        row_params: Tensor,
        row_counts: Tensor,
        row_bias_ids: Tensor,
        row_bias_values: Tensor,
        row_suppressed_ids: Tensor,
        rows: Tensor,
        floats: Tensor,
        ints: Tensor,
        id_ranges: Tensor,
        bias_ranges: Tensor,
        suppressed_ranges: Tensor,
        ids: Tensor,
        bias_ids: Tensor,
        bias_values: Tensor,
        suppressed_ids: Tensor,
    ) -> None:
        """Give rows new parameters and histories, as :class:`chairlift.executor.RowResets` says.

        Raises:
            KernelArgumentError: an argument does not fit, as in every method here.
        """
        check = Arguments("sampling_reset")
        check_state(check, row_params, row_counts)
        check_lists(check, (row_bias_ids, row_bias_values, row_suppressed_ids))
        check.tensor("rows", rows, _INTS, ("resets",))
        check.tensor("floats", floats, torch.float32, ("resets", 6))
        check.tensor("ints", ints, _LONGS, ("resets", 6))
        for name, ranges in (
            ("id_ranges", id_ranges),
            ("bias_ranges", bias_ranges),
            ("suppressed_ranges", suppressed_ranges),
        ):
            check.tensor(name, ranges, _INTS, ("resets", 2))
        check.tensor("ids", ids, _INTS, ("ids",))
        check.tensor("bias_ids", bias_ids, _INTS, ("biases",))
        check.tensor("bias_values", bias_values, torch.float32, ("biases",))
        check.tensor("suppressed_ids", suppressed_ids, _INTS, ("suppressed",))
        grid = (check["resets"], -(-check["vocab_size"] // RESET_TOKENS), 1)
        check.grid(grid)
        if self._launcher is None:
            return
        params = SamplingResetParams(
            rows=rows.data_ptr(),
            floats=floats.data_ptr(),
            ints=ints.data_ptr(),
            id_ranges=id_ranges.data_ptr(),
            bias_ranges=bias_ranges.data_ptr(),
            suppressed_ranges=suppressed_ranges.data_ptr(),
            ids=ids.data_ptr(),
            bias_ids=bias_ids.data_ptr(),
            bias_values=bias_values.data_ptr(),
            suppressed_ids=suppressed_ids.data_ptr(),
            row_params=row_params.data_ptr(),
            row_counts=row_counts.data_ptr(),
            row_bias_ids=row_bias_ids.data_ptr(),
            row_bias_values=row_bias_values.data_ptr(),
            row_suppressed_ids=row_suppressed_ids.data_ptr(),
            vocab_size=check["vocab_size"],
        )
        self._launcher.launch(Launch("sampling_reset", grid, RESET_THREADS, params))

    def logit_edits(
        self,
        edited: Tensor,
        logits: Tensor,
        sample_rows: Tensor,
        output_indices: Tensor,
        row_params: Tensor,
        row_counts: Tensor,
        row_bias_ids: Tensor,
        row_bias_values: Tensor,
        row_suppressed_ids: Tensor,
    ) -> None:
        """Write edited logits of the samples that have edits.

        Args:
            edited: ``[S, V]`` float32; other samples' are left as they are.
            logits: ``[S, V]``.
            sample_rows: ``[S]`` the row of each; below zero: padding.
            output_indices: ``[S]`` output tokens that its sequence has already.
            row_params: state of the rows, as the rest.
            row_counts: the same.
            row_bias_ids: the same.
            row_bias_values: the same.
            row_suppressed_ids: the same.
        """
        check = Arguments("logit_edits")
        check.tensor("edited", edited, torch.float32, ("samples", "vocab_size"))
        check_samples(check, logits, sample_rows, output_indices)
        check_state(check, row_params, row_counts)
        check_lists(check, (row_bias_ids, row_bias_values, row_suppressed_ids))
        grid = (check["samples"], -(-check["vocab_size"] // EDIT_TOKENS), 1)
        check.grid(grid)
        if self._launcher is None:
            return
        params = LogitEditsParams(
            logits=logits.data_ptr(),
            edited=edited.data_ptr(),
            sample_rows=sample_rows.data_ptr(),
            output_indices=output_indices.data_ptr(),
            row_params=row_params.data_ptr(),
            row_counts=row_counts.data_ptr(),
            row_bias_ids=row_bias_ids.data_ptr(),
            row_bias_values=row_bias_values.data_ptr(),
            row_suppressed_ids=row_suppressed_ids.data_ptr(),
            vocab_size=check["vocab_size"],
        )
        name = f"logit_edits<{TYPE_NAMES[logits.dtype]}>"
        self._launcher.launch(Launch(name, grid, EDIT_THREADS, params))

    def sample(
        self,
        token_ids: Tensor,
        statuses: Tensor,
        last_tokens: Tensor,
        row_counts: Tensor,
        logits: Tensor,
        edited: Tensor | None,
        sample_rows: Tensor,
        output_indices: Tensor,
        row_params: Tensor,
    ) -> None:
        """Take a token for each sample, and count it for its row.

        Args:
            token_ids: ``[S]`` int32, written; 0 where a sample failed.
            statuses: ``[S]`` uint8, written: 1 where the logits hold NaN or +infinity, or no finite
                one.
            last_tokens: ``[rows]`` int32, written: the token of each row.
            row_counts: state of the rows, as ``row_params``.
            logits: ``[S, V]``.
            edited: ``[S, V]`` of :meth:`logit_edits`; None: no sample has edits.
            sample_rows: ``[S]`` the row of each; below zero: padding, not written.
            output_indices: ``[S]`` output tokens that its sequence has already.
            row_params: state of the rows.
        """
        check = Arguments("sample")
        check.tensor("token_ids", token_ids, _INTS, ("samples",))
        check.tensor("statuses", statuses, _BYTES, ("samples",))
        check.tensor("last_tokens", last_tokens, _INTS, ("rows",))
        check_samples(check, logits, sample_rows, output_indices)
        check_state(check, row_params, row_counts)
        if edited is not None:
            check.tensor("edited", edited, torch.float32, ("samples", "vocab_size"))
        if self._launcher is None:
            return
        params = SampleParams(
            logits=logits.data_ptr(),
            edited=None if edited is None else edited.data_ptr(),
            sample_rows=sample_rows.data_ptr(),
            output_indices=output_indices.data_ptr(),
            row_params=row_params.data_ptr(),
            row_counts=row_counts.data_ptr(),
            last_tokens=last_tokens.data_ptr(),
            token_ids=token_ids.data_ptr(),
            statuses=statuses.data_ptr(),
            vocab_size=check["vocab_size"],
        )
        name = f"sample<{TYPE_NAMES[logits.dtype]}>"
        self._launcher.launch(Launch(name, (check["samples"], 1, 1), SAMPLE_THREADS, params))

    def logprobs(
        self,
        out_ids: Tensor,
        out_values: Tensor,
        statuses: Tensor,
        logits: Tensor,
        token_ids: Tensor,
        num_best: Tensor,
    ) -> None:
        """Tell log-probabilities of the raw logits.

        Args:
            out_ids: ``[R, W]`` int32, written: the token of each row, then its best ones.
            out_values: ``[R, W]`` float32, written: their log-probabilities.
            statuses: ``[R]`` uint8, becomes 1 where a row's logits hold NaN or +infinity, or no
                finite one; nothing else of it is written.
            logits: ``[R, V]``.
            token_ids: ``[R]`` int32.
            num_best: ``[R]`` int32 how many of the best are told, less than ``W`` and at most
                :data:`~chairlift.cuda_kernels.catalogue.MAX_LISTED`; below zero: nothing at all.
        """
        check = Arguments("logprobs")
        check.tensor("out_ids", out_ids, _INTS, ("rows", "width"))
        check.tensor("out_values", out_values, torch.float32, ("rows", "width"))
        check.tensor("statuses", statuses, _BYTES, ("rows",))
        check.tensor("logits", logits, FLOATS, ("rows", "vocab_size"))
        check.tensor("token_ids", token_ids, _INTS, ("rows",))
        check.tensor("num_best", num_best, _INTS, ("rows",))
        check.number("width", check["width"], 1, 1 + MAX_LISTED)
        check.number("vocab_size", check["vocab_size"], 1, MAX_VOCAB_SIZE)
        if self._launcher is None:
            return
        params = LogprobsParams(
            logits=logits.data_ptr(),
            token_ids=token_ids.data_ptr(),
            num_best=num_best.data_ptr(),
            out_ids=out_ids.data_ptr(),
            out_values=out_values.data_ptr(),
            statuses=statuses.data_ptr(),
            vocab_size=check["vocab_size"],
            stride=check["width"],
        )
        name = f"logprobs<{TYPE_NAMES[logits.dtype]}>"
        self._launcher.launch(Launch(name, (check["rows"], 1, 1), LOGPROBS_THREADS, params))
