"""A model without a model: test everything above the forward pass exactly, in milliseconds.

:class:`ScriptedExecutor` answers with given tokens and keeps a KV pool of *token ids* that it reads
back through the block tables, so that any mistake of the scheduler about blocks, rows or positions
shows as a wrong token or a :class:`PlanError`. :class:`ByteTokenizer` is a tokenizer of 256 bytes.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.errors import TokenizerError
from chairlift.executor import (
    LOCATION_DEVICE,
    LOCATION_HOST,
    SOURCE_LAST_SAMPLED,
    STATUS_FAILED,
    BlockingExecutor,
    RaggedLogprobs,
    StepPlan,
    StepResult,
    check_supported,
)
from chairlift.tokenizer import TokenTableData

if TYPE_CHECKING:
    from chairlift.engine_args import EngineArgs


class ByteTokenizer:
    """Every byte is a token; 256 begins a text, 257 ends one."""

    bos_token_id = 256
    eos_token_id = 257
    vocab_size = 258
    eos_token_ids: Sequence[int] = (257,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of UTF-8; nothing is added.

        Raises:
            TokenizerError: ``bad_text`` if it holds a lone surrogate, which has no UTF-8.
        """
        try:
            return list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise TokenizerError("the text holds a lone surrogate", code="bad_text") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the bytes; special tokens are ``<bos>`` and ``<eos>``, those beyond nothing."""
        special = {} if skip_special_tokens else {256: b"<bos>", 257: b"<eos>"}
        parts = [bytes([token]) if token < 256 else special.get(token, b"") for token in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_table(self, vocab_size: int = 0) -> TokenTableData:
        """Bytes of every token."""
        size = max(self.vocab_size, vocab_size)
        lengths = np.zeros(size, dtype=np.int64)
        lengths[:256], lengths[256:258] = 1, 5
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        special = np.zeros(size, dtype=np.uint8)
        special[256:258] = 1
        return TokenTableData(bytes(range(256)) + b"<bos><eos>", offsets, special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **_kwargs: object,
    ) -> list[int]:
        """One ``role: content`` line per message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))


class PlanError(AssertionError):
    """A plan that breaks the executor protocol, or a KV pool that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a script may look at to choose a token."""

    history: list[int]
    """Prompt and output so far, as read back from the KV pool."""
    output_index: int
    """Output tokens so far."""
    child: int
    """Which of the request's ``n`` answers."""
    seed: int


Script = Sequence[int] | str | Callable[[Sample], int]
"""Output tokens, then end-of-sequence; text stands for its bytes; or a function."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What a step had in it."""

    step: int
    num_decodes: int
    num_prefills: int
    num_tokens: int
    num_samples: int
    num_resets: int
    num_copies: int


@dataclass(slots=True)
class _Row:
    """What the last reset of a row said."""

    child: int = 0
    seed: int = 0
    logprobs: int = -1
    last_sampled: int = 0
    is_broken: bool = False
    """A step of it has failed, so its part of the pool may hold anything."""


def default_token(sample: Sample) -> int:
    """A lower-case letter that depends on the whole history and the child."""
    data = np.array([*sample.history, sample.child], dtype=np.int32).tobytes()
    return 97 + zlib.crc32(data) % 26


@dataclass(kw_only=True)
class ScriptedExecutor(BlockingExecutor):
    """Answers with given tokens.

    A request's script is the one whose *header* is the longest that its history begins with;
    without one it gets :attr:`default`. A header is text (its bytes) or a tuple of token ids.
    Of the sampling parameters only ``seed`` and ``logprobs`` reach it: it ignores temperature and
    cuts, ``logit_bias``, penalties, and the tokens that ``min_tokens`` suppresses.

    Log-probabilities are made up: a token's own is -0.5, and the k best beside it, -0.5, -1, -1.5
    and so on, are the token and those that follow it in the vocabulary. So are those of prompt
    tokens.
    """

    scripts: Mapping[str | tuple[int, ...], Script] = field(default_factory=dict)
    default: Script = default_token
    tokens_per_sample: int = 1
    """Tokens that every sample returns at once, whether or not the answer ends before the last."""
    step_time: float = 0.0
    """Seconds that a step takes."""
    launches_ahead: bool = False
    """Whether the next step is launched before this one is run, if there may be two."""
    raise_at_steps: Sequence[int] = ()
    """Numbers of the steps (from 1) that raise :attr:`error`."""
    error: BaseException = field(default_factory=lambda: RuntimeError("scripted failure"))
    """What they raise; a ``SystemExit`` ends the executor thread."""
    hold_at_steps: Container[int] = ()
    """Numbers of the steps (from 1) that stand still, each until a :meth:`release` of its own."""
    fail_rows: Mapping[str | tuple[int, ...], int] = field(default_factory=dict)
    """By header, the output index at which a request's row fails."""
    num_kv_blocks: int = 512
    num_host_kv_blocks: int = 0
    """Blocks of the second tier."""
    block_size: int = 16
    vocab_size: int = ByteTokenizer.vocab_size
    eos_token_id: int = ByteTokenizer.eos_token_id
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    steps: deque[StepSummary] = field(default_factory=lambda: deque(maxlen=100_000))
    """The steps that came by, failed ones included."""

    def __post_init__(self) -> None:
        """Make the pool, where -1 is a slot that was never written."""
        self._pool = np.full((self.num_kv_blocks, self.block_size), -1, dtype=np.int32)
        self._host_blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._rows: dict[int, _Row] = {}
        self._scripts = {_tokens(header): script for header, script in self.scripts.items()}
        self._fail_rows = {_tokens(header): index for header, index in self.fail_rows.items()}
        self._gate = threading.Condition()
        self._is_on_hold = False
        self._stands_still = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> ScriptedExecutor:
        """Make one for ``--executor chairlift.testing:ScriptedExecutor``."""
        return cls(
            num_kv_blocks=args.num_kv_blocks or 512,
            num_host_kv_blocks=args.kv_host_memory // (4 * args.block_size),  # int32 ids
            block_size=args.block_size,
        )

    def hold(self) -> None:
        """Let the next step (and those after it) stand still until :meth:`release`."""
        with self._gate:
            self._is_on_hold = True

    def release(self) -> None:
        """Let the step that stands still go on, and steps after it."""
        with self._gate:
            self._is_on_hold = self._stands_still = False
            self._gate.notify_all()

    def wait_held(self, timeout: float = 30.0) -> None:
        """Wait until a step stands still.

        Raises:
            TimeoutError: none came.
        """
        with self._gate:
            if not self._gate.wait_for(lambda: self._stands_still, timeout):
                raise TimeoutError(f"no step began within {timeout} s")

    def expected(self, prompt: str | Sequence[int], num_tokens: int, child: int = 0) -> list[int]:
        """Return the first tokens of the answer to ``prompt`` under the same scripts."""
        history = list(_tokens(prompt))
        script = self._script(history)
        output: list[int] = []
        for index in range(num_tokens):
            output.append(self._choose(script, Sample(history + output, index, child, 0)))
            if output[-1] == self.eos_token_id:
                break
        return output

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the whole step."""
        try:
            return self._execute(plan)
        except BaseException:
            for row in plan.rows:
                self._rows.setdefault(int(row), _Row()).is_broken = True
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        self.steps.append(_summary(plan))
        self._stand_still(plan.step)
        if self.step_time:
            time.sleep(self.step_time)
        if plan.step in self.raise_at_steps:
            raise self.error
        check_supported(plan, has_host_blocks=True)
        check_plan(plan, block_size=self.block_size, num_kv_blocks=self.num_kv_blocks)
        self._copy_blocks(plan)
        for row, ints in zip(plan.resets.rows, plan.resets.ints, strict=True):
            self._rows[int(row)] = _Row(
                child=int(ints[2]), seed=int(ints[1]), logprobs=int(ints[3])
            )
        token_ids = plan.token_ids.copy()
        broken = [self._rows[int(row)].is_broken for row in plan.rows]
        for index in (plan.token_sources == SOURCE_LAST_SAMPLED).nonzero()[0]:
            sequence = np.searchsorted(plan.query_start_loc, index, side="right") - 1
            token_ids[index] = self._rows[int(plan.rows[sequence])].last_sampled
            # Of several tokens the first was to come here; nobody reads what follows.
            broken[sequence] |= self.tokens_per_sample > 1
        self._pool.reshape(-1)[plan.slot_mapping] = token_ids
        return self._sample(plan, broken)

    def _copy_blocks(self, plan: StepPlan) -> None:
        copies = zip(plan.block_copies.tolist(), plan.block_copy_locations.tolist(), strict=True)
        for (source, target), (source_location, target_location) in copies:
            if target_location == LOCATION_HOST:
                self._host_blocks[target] = self._pool[source].copy()
            elif source_location == LOCATION_HOST:
                self._pool[target] = self._host_blocks[source]
            else:
                self._pool[target] = self._pool[source]

    def _stand_still(self, step: int) -> None:
        with self._gate:
            if self._is_on_hold or step in self.hold_at_steps:
                self._stands_still = True
                self._gate.notify_all()
                self._gate.wait_for(lambda: not self._stands_still)

    def _sample(self, plan: StepPlan, broken: list[bool]) -> StepResult:
        tokens: list[int] = []
        logprobs: list[list[tuple[int, float]]] = []
        statuses = np.zeros(len(plan.rows), dtype=np.uint8)
        sequences = np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1
        for sample_index, sequence in enumerate(sequences):
            row = self._rows[int(plan.sample_rows[sample_index])]
            if broken[sequence]:
                statuses[sequence] = STATUS_FAILED
                tokens += [0] * self.tokens_per_sample
                logprobs.append([])
                continue
            history = self._history(plan, int(sequence), int(plan.logits_indices[sample_index]))
            output_index = int(plan.sample_output_indices[sample_index])
            candidates = []
            for index in range(output_index, output_index + self.tokens_per_sample):
                sample = Sample(history, index, row.child, row.seed)
                if index == output_index and self._fails(sample):
                    statuses[sequence] = STATUS_FAILED
                token = self._choose(self._script(history), sample)
                tokens.append(token)
                candidates += self._candidates(token, row.logprobs)
                history = [*history, token]
            row.last_sampled = token
            logprobs.append(candidates)
        scored = [
            self._candidates(int(token), int(num_best))
            for token, num_best in zip(plan.score_token_ids, plan.score_num_best, strict=True)
        ]
        offsets = np.arange(0, len(tokens) + 1, self.tokens_per_sample, dtype=np.int32)
        return StepResult(
            token_ids=np.array(tokens, dtype=np.int32),
            statuses=statuses,
            logprobs=_ragged(logprobs),
            prompt_logprobs=_ragged(scored),
            token_offsets=None if self.tokens_per_sample == 1 else offsets,
        )

    def _history(self, plan: StepPlan, sequence: int, token: int) -> list[int]:
        """Read a sequence back through its block table, up to and with its query token."""
        begin, end = plan.block_table_offsets[sequence : sequence + 2]
        pool: list[int] = self._pool[plan.block_ids[begin:end]].reshape(-1).tolist()
        history = pool[: int(plan.positions[token]) + 1]
        if -1 in history:
            raise PlanError(
                f"position {history.index(-1)} of sequence {sequence} was never written"
            )
        return history

    def _script(self, history: Sequence[int]) -> Script:
        header = _longest_header(self._scripts, history)
        return self.default if header is None else self._scripts[header]

    def _choose(self, script: Script, sample: Sample) -> int:
        if callable(script):
            return script(sample)
        output = _tokens(script)
        output += (self.eos_token_id,) * (sample.output_index + 1 - len(output))
        made = tuple(sample.history[len(sample.history) - sample.output_index :])
        if made != output[: sample.output_index]:
            raise PlanError(
                f"the KV pool has {made} as output, but {output[: sample.output_index]} was sampled"
            )
        return output[sample.output_index]

    def _fails(self, sample: Sample) -> bool:
        header = _longest_header(self._fail_rows, sample.history)
        return header is not None and sample.output_index >= self._fail_rows[header]

    def _candidates(self, token: int, wanted: int) -> list[tuple[int, float]]:
        """The token, then as many as were asked for, in steps of -0.5."""
        if wanted < 0:
            return []
        best = [((token + rank) % self.vocab_size, -0.5 * (rank + 1)) for rank in range(wanted)]
        return [(token, -0.5), *best]


@dataclass(kw_only=True)
class PacedExecutor(BlockingExecutor):
    """Answers letters of the alphabet at a given pace, almost for free: for load above the engine.

    It looks at no history and knows no log-probabilities; requests end by ``max_tokens``.
    """

    step_time: float = 0.1
    """Seconds that a step takes."""
    num_kv_blocks: int = 65_536
    block_size: int = 16
    vocab_size: int = ByteTokenizer.vocab_size
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> PacedExecutor:
        """Make one for ``--executor chairlift.testing:PacedExecutor``."""
        return cls(num_kv_blocks=args.num_kv_blocks or 65_536, block_size=args.block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Wait, then go on in every alphabet."""
        time.sleep(self.step_time)
        letters = 97 + (plan.sample_rows + plan.sample_output_indices) % 26
        return StepResult(
            token_ids=letters.astype(np.int32), statuses=np.zeros(len(plan.rows), dtype=np.uint8)
        )


def check_plan(plan: StepPlan, *, block_size: int, num_kv_blocks: int) -> None:
    """Check everything that the executor protocol promises.

    Raises:
        PlanError: says what is broken.
    """
    num_seqs, num_tokens = len(plan.rows), len(plan.token_ids)
    num_samples = len(plan.sample_rows)
    lengths = np.diff(plan.query_start_loc)
    table_lengths = np.diff(plan.block_table_offsets)
    _require(num_seqs > 0, "there is no sequence")
    _require(plan.num_decodes + plan.num_prefills == num_seqs, "the counts do not add up")
    for name in ("token_sources", "positions", "slot_mapping"):
        _require(len(getattr(plan, name)) == num_tokens, f"{name} is not [T]")
    for name in ("logits_indices", "sample_output_indices"):
        _require(len(getattr(plan, name)) == num_samples, f"{name} is not [S]")
    for name in ("seq_lens", "adapter_ids"):
        _require(len(getattr(plan, name)) == num_seqs, f"{name} is not [N]")
    _require(_covers(plan.query_start_loc, num_seqs, num_tokens), "query_start_loc is not [N + 1]")
    _require(
        _covers(plan.block_table_offsets, num_seqs, len(plan.block_ids)),
        "block_table_offsets is not [N + 1]",
    )
    _require(bool((lengths > 0).all()), "a sequence has no token")
    _require(bool((lengths[: plan.num_decodes] == 1).all()), "a decode has several tokens")
    _require(len(np.unique(plan.rows)) == num_seqs, "two sequences share a row")
    _require(len(np.unique(plan.sample_rows)) == num_samples, "a row is sampled twice")
    _require(len(np.unique(plan.slot_mapping)) == num_tokens, "two tokens share a slot")
    _require(bool((plan.block_ids >= 0).all()), "a block id is negative")
    _require(bool((plan.block_ids < num_kv_blocks).all()), "a block id is beyond the pool")
    _require(bool((table_lengths * block_size >= plan.seq_lens).all()), "a block table is short")
    sequence = np.repeat(np.arange(num_seqs), lengths)
    first = plan.seq_lens - lengths
    positions = first[sequence] + np.arange(num_tokens) - plan.query_start_loc[sequence]
    _require(bool((plan.positions == positions).all()), "positions do not follow from seq_lens")
    blocks = plan.block_ids[plan.block_table_offsets[sequence] + positions // block_size]
    slots = blocks.astype(np.int64) * block_size + positions % block_size
    _require(bool((plan.slot_mapping == slots).all()), "slots disagree with the block tables")
    if num_samples:
        _require(
            bool(((plan.logits_indices >= 0) & (plan.logits_indices < num_tokens)).all()),
            "a sample is of no token",
        )
        ends = plan.query_start_loc[1:] - 1
        _require(bool(np.isin(plan.logits_indices, ends).all()), "a sample is not of a last token")
    _require(
        bool(np.isin(plan.mask_rows, plan.sample_rows).all()), "a row is masked but not sampled"
    )
    _check_scores(plan)
    _check_copies(plan, num_kv_blocks)


def _check_scores(plan: StepPlan) -> None:
    indices, num_tokens = plan.score_indices, len(plan.token_ids)
    for name in ("score_token_ids", "score_num_best"):
        _require(len(getattr(plan, name)) == len(indices), f"{name} is not [P]")
    _require(bool(((indices >= 0) & (indices < num_tokens)).all()), "a score is of no token")
    _require(bool((np.diff(indices) > 0).all()), "scores are not in the order of the tokens")
    # Where the scored token is in the step too, it is the next of its sequence.
    inside = ~np.isin(indices + 1, plan.query_start_loc)
    following = plan.token_ids[indices[inside] + 1]
    _require(
        bool((plan.score_token_ids[inside] == following).all()), "a score is of the wrong token"
    )


def _check_copies(plan: StepPlan, num_kv_blocks: int) -> None:
    copies, locations = plan.block_copies, plan.block_copy_locations
    _require(locations.shape == copies.shape, "block_copy_locations is not [C, 2]")
    here = copies[locations == LOCATION_DEVICE]
    _require(bool(((here >= 0) & (here < num_kv_blocks)).all()), "a copy is beyond the pool")
    to_host = locations[:, 1] == LOCATION_HOST
    _require(bool((np.diff(to_host.astype(np.int8)) <= 0).all()), "copies to the host come first")
    _require(bool((locations.sum(axis=1) < 2).all()), "a copy is from host to host")
    places = locations.astype(np.int64) * 2**32 + copies
    for side_by_side in (places[to_host], places[~to_host]):
        named, counts = np.unique(side_by_side, return_counts=True)
        once = named[counts == 1]
        _require(bool(np.isin(side_by_side[:, 1], once).all()), "a copy depends on another")
    written = places[to_host, 1]
    _require(not np.isin(written, places[~to_host]).any(), "a copy depends on another")


def _covers(offsets: np.ndarray[Any, Any], parts: int, total: int) -> bool:
    """Whether ``offsets`` cut ``total`` entries into ``parts``."""
    return len(offsets) == parts + 1 and offsets[0] == 0 and offsets[-1] == total


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PlanError(complaint)


def _tokens(text: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(text.encode("utf-8")) if isinstance(text, str) else tuple(text)


def _longest_header(
    headers: Mapping[tuple[int, ...], object], history: Sequence[int]
) -> tuple[int, ...] | None:
    found = [header for header in headers if tuple(history[: len(header)]) == header]
    return max(found, key=len, default=None)


def _ragged(samples: list[list[tuple[int, float]]]) -> RaggedLogprobs | None:
    entries = list(itertools.chain.from_iterable(samples))
    if not entries:
        return None
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int32)
    ids = np.array([token for token, _ in entries], dtype=np.int32)
    return RaggedLogprobs(offsets, ids, np.array([value for _, value in entries], dtype=np.float32))


def _summary(plan: StepPlan) -> StepSummary:
    return StepSummary(
        step=plan.step,
        num_decodes=plan.num_decodes,
        num_prefills=plan.num_prefills,
        num_tokens=len(plan.token_ids),
        num_samples=len(plan.sample_rows),
        num_resets=len(plan.resets.rows),
        num_copies=len(plan.block_copies),
    )
