"""What comes out of an engine: whole results (``LLM``) and streamed pieces (``AsyncEngine``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chairlift import _core
from chairlift.errors import (
    ChairliftError,
    EngineDeadError,
    OverloadedError,
    QueueTimeoutError,
    RequestFailedError,
    TryLaterError,
)

_GIVEN_UP: dict[str, type[TryLaterError]] = {
    "queue_timeout": QueueTimeoutError,
    "deadline_missed": QueueTimeoutError,
    "shed": OverloadedError,
    "displaced": OverloadedError,
}
"""By finish reason, what became of a request that was accepted and never scheduled."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate for one position."""

    logprob: float
    """Natural log-probability under the raw logits."""
    rank: int | None
    """1 is the best; None for the position's own token if it is not among the best asked for."""
    decoded_token: str
    """Its text, by itself."""


TIME_BOUNDS: tuple[float, ...] = tuple(_core.time_bounds())
"""Upper bounds of the buckets of ``group_metrics()``, in seconds; the last bucket has none. Those
of ``itl`` are :data:`ITERATION_BOUNDS`."""

ITERATION_BOUNDS: tuple[float, ...] = tuple(_core.iteration_bounds())
"""Upper bounds of the buckets of iteration times and of gaps between outputs, in seconds."""

SIZE_BOUNDS: tuple[int, ...] = tuple(_core.size_bounds())
"""Upper bounds of the buckets of the numbers of sequences and of tokens of iterations."""

PositionLogprobs = dict[int, Logprob]
"""Candidates for one position by token id: the one that is there first, then the best."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """When things happened to a request, in seconds on the engine's clock, and what it cost."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    num_output_tokens: int
    """Of all answers; a token that ended one counts."""
    num_preemptions: int
    num_answers: int = 1
    """The request's ``n``."""
    predicted_ttft: float | None = None
    """Seconds to the first token that the gate predicted; ``None`` before anything was measured."""
    wait_times: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which it waited for ``slots``, ``memory``, ``budget``, ``fairness``, ``rate``,
    ``window`` and ``sla`` before it was scheduled; together the queue time."""

    @classmethod
    def from_core(cls, ended: _core.Ended, num_answers: int) -> RequestStats:
        """Copy what the core says."""
        return cls(
            arrival_time=ended.arrival_time,
            first_scheduled_time=ended.first_scheduled_time,
            first_token_time=ended.first_token_time,
            finished_time=ended.finished_time,
            num_prompt_tokens=ended.num_prompt_tokens,
            num_cached_tokens=ended.num_cached_tokens,
            num_output_tokens=ended.num_output_tokens,
            num_preemptions=ended.num_preemptions,
            num_answers=num_answers,
            predicted_ttft=ended.predicted_ttft,
            wait_times=ended.wait_times,
        )

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first iteration."""
        return _span(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return _span(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Mean seconds between output tokens.

        None for fewer than two, and for several answers: their tokens come side by side, so that
        the times of the request say nothing about the gaps of one answer.
        """
        if self.num_answers != 1 or self.first_token_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the end."""
        return self.finished_time - self.arrival_time


def _span(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one answer of a streamed request."""

    request_id: str
    index: int
    """Which of the request's ``n`` answers."""
    text: str
    """New text; it may lag behind the tokens, and is whole at the end."""
    token_ids: list[int]
    """New tokens; the one that ended the answer is among them, even if it has no text."""
    finish_reason: str | None = None
    """In the answer's last delta: ``stop``, ``length``, ``abort``, or ``error`` (raised next)."""
    stop_reason: int | str | None = None
    """The stop token or stop string; None for the end-of-sequence token."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token, if asked for."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error``; of a request that never ran, the code of
    :attr:`RequestOutput.error`."""
    stop_reason: int | str | None = None
    """The stop token or stop string; None for the end-of-sequence token."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token, if asked for."""
    cumulative_logprob: float | None = None
    """Sum over the sampled tokens, if log-probabilities were asked for."""


@dataclass(slots=True)
class RequestOutput:
    """Everything about one request that has ended."""

    request_id: str
    prompt: str | None
    """The prompt's text, if it was given as text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int = 0
    """Key of the random stream, given or drawn: the same seed gives the same tokens again."""
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token, the first of them None, if asked for."""
    error: ChairliftError | None = None
    """Why the request failed, or why it never ran."""
    stats: RequestStats | None = None
    """None: it was refused at the door."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return 0 if self.stats is None else self.stats.num_cached_tokens


def failure(delta: _core.Delta) -> ChairliftError | None:
    """Return the error that ended the delta's answer, if one did."""
    message = delta.error
    if message is None:
        return None
    given_up = _GIVEN_UP.get(delta.finish_reason or "")
    if given_up is not None:
        return given_up(message, code=delta.finish_reason)
    return EngineDeadError(message) if delta.engine_died else RequestFailedError(message)


def stop_reason(delta: _core.Delta, stop_strings: tuple[str, ...]) -> int | str | None:
    """Return the stop token or the stop string that ended the delta's answer."""
    string = delta.stop_string_index
    return delta.stop_token_id if string is None else stop_strings[string]


def position_logprobs(
    delta: _core.Delta, decode_token: Callable[[int], str]
) -> list[PositionLogprobs] | None:
    """Cut the flat log-probabilities of a delta into one entry per token."""
    flat = delta.logprobs
    if flat is None:
        return None
    return cut_logprobs(len(delta.token_ids), *flat, decode_token)


def cut_logprobs(
    count: int, tokens: list[int], values: list[float], decode_token: Callable[[int], str]
) -> list[PositionLogprobs]:
    """Cut flat log-probabilities into ``count`` entries: a position's own token, then the best."""
    width = len(tokens) // count
    entries = []
    for begin in range(0, len(tokens), width):
        best = {
            token: Logprob(value, rank, decode_token(token))
            for rank, (token, value) in enumerate(
                zip(
                    tokens[begin + 1 : begin + width],
                    values[begin + 1 : begin + width],
                    strict=True,
                ),
                start=1,
            )
        }
        own = tokens[begin]
        first = best.get(own) or Logprob(values[begin], None, decode_token(own))
        entries.append({own: first} | best)
    return entries
