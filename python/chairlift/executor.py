"""The executor protocol: how the scheduler asks for one iteration to be run.

The scheduler (Rust) writes a :class:`StepPlan`; an executor runs the forward pass and the sampling
and answers with a :class:`StepResult`. The protocol is two calls, ``launch`` and ``collect``, so
that a device can have a step in flight while the host goes on; :class:`BlockingExecutor` makes both
from one ``execute``.

With ``max_in_flight_steps = 2`` a step may be launched before the one before it is collected
(run-ahead). Its decodes then have input tokens that only the executor knows: the last that it
sampled for their rows. What became of a row meanwhile is not known either: if its answer has ended,
or its step has failed, nobody reads what later steps return for it, so an executor need not care
what that is, as long as it does not fail the whole step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from chairlift.errors import UnsupportedStepError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]
    Int64Array = NDArray[np.int64]
    Float32Array = NDArray[np.float32]
    UInt8Array = NDArray[np.uint8]

STATUS_OK = 0
"""The row's step succeeded."""
STATUS_FAILED = 1
"""The row failed by itself: its request ends with an error, its neighbours go on."""
NO_ADAPTER = -1
"""The sequence uses no adapter."""
SOURCE_ID = 0
"""The input token is the one in ``token_ids``."""
SOURCE_LAST_SAMPLED = 1
"""The input token is the last that was sampled for the row, by a step that is in flight."""
LOCATION_DEVICE = 0
"""The block is in the KV arrays that the forward pass reads."""
LOCATION_HOST = 1
"""The block is in memory that the forward pass cannot read."""


@dataclass(frozen=True, slots=True)
class RowResets:
    """Rows that a new (or resumed) sequence takes over in this step; apply before anything else.

    ``R`` rows. Ragged data is given as ``[begin, end)`` ranges into flat arrays, so that the
    children of one request share their prompt's range.
    """

    rows: Int32Array
    """[R] the row to reset."""
    floats: Float32Array
    """[R, 6] temperature (0 = greedy), top_p, min_p, repetition, presence, frequency penalty."""
    ints: Int64Array
    """[R, 6] top_k (0 = all), seed, child index, logprobs wanted (-1 = none, 0 = the sampled token
    only, k = also the k best), number of prompt ids in its id range, min_tokens."""
    id_ranges: Int32Array
    """[R, 2] range of ``ids``: prompt ids, then output ids; empty unless the row has penalties."""
    bias_ranges: Int32Array
    """[R, 2] range of ``bias_ids`` and ``bias_values``: logit_bias."""
    suppressed_ranges: Int32Array
    """[R, 2] range of ``suppressed_ids``: not to be sampled before ``min_tokens`` outputs."""
    ids: Int32Array
    bias_ids: Int32Array
    bias_values: Float32Array
    suppressed_ids: Int32Array

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All of them, in this order, in which samplers take them."""
        return tuple(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, decided: flat arrays, decodes first, then prefill chunks.

    ``N`` scheduled sequences, ``T`` tokens, ``S`` samples, ``P`` scored prompt tokens, ``C`` block
    copies, ``M`` masks. The arrays are views of memory that the scheduler owns: valid from
    ``launch`` until ``collect`` returns, read-only.
    """

    step: int
    """Number of the step, from 1."""
    num_decodes: int
    """The first ``num_decodes`` sequences have one query token each."""
    num_prefills: int
    """The rest are prefill chunks; ``N = num_decodes + num_prefills``."""
    rows: Int32Array
    """[N] stable row of each sequence, ``0 <= row < max_num_seqs``."""
    adapter_ids: Int32Array
    """[N] adapter of each sequence; :data:`NO_ADAPTER` today."""
    query_start_loc: Int32Array
    """[N + 1] where each sequence's tokens begin in the token arrays."""
    seq_lens: Int32Array
    """[N] context length of each sequence after this step."""
    token_ids: Int32Array
    """[T] input tokens."""
    token_sources: UInt8Array
    """[T] :data:`SOURCE_ID` or :data:`SOURCE_LAST_SAMPLED`; the latter only while another step is
    in flight, and the id is 0 then."""
    positions: Int32Array
    """[T] position of each token in its sequence."""
    slot_mapping: Int64Array
    """[T] KV slot each token's K and V go to: ``block * block_size + position % block_size``."""
    block_table_offsets: Int32Array
    """[G * N + 1] where each sequence's block ids begin in ``block_ids``, for each of ``G`` KV
    groups in turn; there is one group."""
    block_ids: Int32Array
    """[B] the block tables, complete, one after the other."""
    logits_indices: Int32Array
    """[S] token whose logits are sampled; children of one request may repeat it."""
    sample_rows: Int32Array
    """[S] the row that each sample belongs to."""
    sample_output_indices: Int32Array
    """[S] how many output tokens the row's sequence has already: counter of its random stream."""
    mask_rows: Int32Array
    """[M] row of each sample whose logits get a mask before it is drawn; empty today."""
    score_indices: Int32Array
    """[P] token whose raw logits give the log-probability of the prompt token after it."""
    score_token_ids: Int32Array
    """[P] that prompt token; it may be in a later chunk than its index."""
    score_num_best: Int32Array
    """[P] how many of the best candidates are told beside it."""
    block_copies: Int32Array
    """[C, 2] (source, destination) blocks to copy before the forward pass. Those to the host come
    first and are made first, for the block that they read may be written by another copy. The
    others may be made in any order, or side by side: what one writes no other reads or writes."""
    block_copy_locations: UInt8Array
    """[C, 2] where source and destination are: :data:`LOCATION_DEVICE` or :data:`LOCATION_HOST`;
    the same block id in another location is another block. All are on the device unless the
    engine has a second tier. No copy is from host to host."""
    resets: RowResets


@dataclass(frozen=True, slots=True)
class RaggedLogprobs:
    """Log-probabilities of the ``S`` samples that asked for them, or of ``P`` prompt tokens."""

    offsets: Int32Array
    """[S + 1] or [P + 1] range of each; empty where none were asked. For each token 1 + k entries:
    the token itself first, then the k best in descending order."""
    token_ids: Int32Array
    values: Float32Array


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced."""

    token_ids: Int32Array
    """[S] one sampled token for each sample of the plan; with ``token_offsets`` any number of them,
    one after the other."""
    statuses: UInt8Array
    """[N] :data:`STATUS_OK` or :data:`STATUS_FAILED` for each scheduled sequence."""
    logprobs: RaggedLogprobs | None = None
    """Of the samples; None where no sample asked."""
    prompt_logprobs: RaggedLogprobs | None = None
    """Of the scored prompt tokens, whatever is there for those of failed sequences; None only where
    ``P`` is 0."""
    token_offsets: Int32Array | None = None
    """[S + 1] range of each sample's tokens, one at least; None is one each. What comes after a
    token that ends the answer is dropped, and so is what a step that is in flight already samples
    after the first of several; from then on no step of that sequence is launched ahead."""
    graph_rows: int = 0
    """Rows of the CUDA graph that was replayed for the step: its ``N`` sequences, and padding where
    the graph is larger; 0: none was."""


def check_supported(plan: StepPlan, *, has_host_blocks: bool = False) -> None:
    """Refuse a plan with what an executor of plain models cannot do.

    Raises:
        UnsupportedStepError: it copies to or from the host without ``has_host_blocks``, masks
            logits, or uses an adapter.
    """
    if not has_host_blocks and (plan.block_copy_locations != LOCATION_DEVICE).any():
        raise UnsupportedStepError(
            f"step {plan.step} copies blocks to or from the host; this executor keeps all blocks "
            "on the device"
        )
    if len(plan.mask_rows):
        raise UnsupportedStepError(
            f"step {plan.step} masks the logits of rows {plan.mask_rows.tolist()}; this executor "
            "applies no masks"
        )
    if (plan.adapter_ids != NO_ADAPTER).any():
        adapters = np.unique(plan.adapter_ids[plan.adapter_ids != NO_ADAPTER]).tolist()
        raise UnsupportedStepError(
            f"step {plan.step} uses adapters {adapters}; this executor has none"
        )


class Executor(Protocol):
    """Runs steps, in the order in which they are launched. Both calls come from one thread.

    At most ``max_in_flight_steps`` are launched and not collected. An executor whose steps run
    beside that thread (on a device) says so by an attribute ``launches_ahead = True``: then the
    next step, if one is about to be planned, is launched before this one is collected. For others,
    whose ``collect`` does the work, it is enough that the next plan is at hand by then.
    """

    def launch(self, plan: StepPlan) -> None:
        """Start the step. The plan's arrays may be read until its :meth:`collect` returns."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result.

        An exception here or in :meth:`launch` fails the requests of that step, and only those. What
        was not launched is not collected.
        """


class BlockingExecutor:
    """Base class for executors that run a step in one blocking call."""

    _launched: deque[StepPlan] | None = None
    """Steps that were launched, the oldest first; made at the first of them, so that no subclass
    has to call ``__init__``."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the whole step; to be overridden."""
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> None:
        """Take note of the step."""
        if self._launched is None:
            self._launched = deque()
        self._launched.append(plan)

    def collect(self) -> StepResult:
        """Run the oldest step that was launched."""
        if not self._launched:
            raise RuntimeError("collect() without launch()")
        return self.execute(self._launched.popleft())
