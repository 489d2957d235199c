"""The streams behind one answer: started together, read together, closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chairlift.outputs import Delta, PositionLogprobs
from chairlift.server.errors import closed, invalid, too_long

if TYPE_CHECKING:
    from chairlift.delta_stream import DeltaStream
    from chairlift.server.usage import TenantUsage
    from chairlift.server.vocabulary import Vocabulary

OnDelta = Callable[[int, Delta], Awaitable[None]]


class Generation:
    """One stream for each prompt, ``n`` answers in each; choices are numbered prompt by prompt."""

    def __init__(self, streams: Sequence[DeltaStream], n: int, usage: TenantUsage) -> None:
        """``usage`` is where the tokens are counted as well."""
        self.streams = streams
        self.n = n
        self.num_output_tokens = 0
        self._num_output_entries = 0
        """Log-probabilities, or else tokens, of the outputs."""
        self._usage = usage

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, once started."""
        return sum(len(stream.prompt_token_ids) for stream in self.streams)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts' tokens, those that the prefix cache had."""
        return sum(stream.num_cached_tokens for stream in self.streams)

    @property
    def num_entries(self) -> int:
        """Log-probabilities (or else tokens) that there are to tell, about."""
        prompts = (
            len(position or ())
            for stream in self.streams
            for position in stream.prompt_logprobs or ()
        )
        return self._num_output_entries + self.num_prompt_tokens + sum(prompts)

    @property
    def queue_time(self) -> float:
        """Seconds until the last of the streams was scheduled."""
        return max(stream.queue_time or 0.0 for stream in self.streams)

    async def start(self) -> None:
        """Wait until all are first scheduled.

        Raises:
            ChairliftError: one is refused or given up.
        """
        if len(self.streams) == 1:
            await self.streams[0].start()
        else:
            await _together(stream.start() for stream in self.streams)
        if any(stream.queue_time is None for stream in self.streams):
            raise closed("the server is shutting down; use another", code="aborted")
        self._usage.prompt_tokens += self.num_prompt_tokens
        self._usage.cached_tokens += self.num_cached_tokens

    async def read(self, on_delta: OnDelta) -> None:
        """Hand every delta over with the number of its choice.

        Raises:
            ChairliftError, HttpError: one of them failed.
        """
        if len(self.streams) == 1:
            await self._read(0, on_delta)
        else:
            await _together(self._read(place, on_delta) for place in range(len(self.streams)))

    async def close(self) -> None:
        """Abort what is live."""
        for stream in self.streams:
            await stream.aclose()

    def usage(self) -> dict[str, object]:
        """``usage`` of the response."""
        return usage_of(
            self.num_prompt_tokens, self.num_output_tokens, cached=self.num_cached_tokens
        )

    async def _read(self, place: int, on_delta: OnDelta) -> None:
        first = place * self.n
        async for delta in self.streams[place]:
            count = len(delta.token_ids)
            self.num_output_tokens += count
            self._usage.completion_tokens += count
            logprobs = delta.logprobs
            self._num_output_entries += count if logprobs is None else sum(map(len, logprobs))
            if delta.finish_reason == "abort":
                raise closed("the server is shutting down; use another", code="aborted")
            await on_delta(first + delta.index, delta)


@dataclass(slots=True)
class Answer:
    """What has come of one choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append news."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


async def collect(generation: Generation) -> list[Answer]:
    """Read all answers to their ends."""
    answers = [Answer() for _ in range(len(generation.streams) * generation.n)]

    async def add(choice: int, delta: Delta) -> None:
        answers[choice].add(delta)

    await generation.read(add)
    return answers


def usage_of(prompt: int, completion: int, *, cached: int) -> dict[str, object]:
    """``usage`` of a response."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def check_size(
    texts: Iterable[str], vocabulary: Vocabulary, max_model_len: int, field: str
) -> None:
    """Refuse text that no tokenising could make fit, before it is tokenised.

    Raises:
        HttpError: 400.
    """
    longest = vocabulary.longest
    try:
        num_bytes = sum(_num_bytes(text, longest * max_model_len) for text in texts)
    except UnicodeEncodeError:
        raise invalid(
            field,
            f"{field} holds a lone surrogate (\\ud800 to \\udfff), which has no UTF-8: remove it",
            "bad_text",
        ) from None
    if num_bytes > longest * max_model_len:
        num_tokens = -(-num_bytes // longest)
        length = f"{num_bytes} bytes or more, which are at least {num_tokens} tokens"
        raise too_long(field, length, max_model_len)


def _num_bytes(text: str, most: int) -> int:
    """Bytes of the text's UTF-8; of one that is too long anyway, at least so many."""
    return len(text) if text.isascii() or len(text) > most else len(text.encode("utf-8"))


async def _together(parts: Iterable[Awaitable[None]]) -> None:
    """Run all; the first that fails ends the others, and its exception is raised."""

    async def run(part: Awaitable[None]) -> None:
        await part

    try:
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(run(part))
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
