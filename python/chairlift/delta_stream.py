"""``DeltaStream``: the deltas of one request, and the inbox that they come from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from chairlift.outputs import (
    Delta,
    PositionLogprobs,
    RequestStats,
    cut_logprobs,
    failure,
    position_logprobs,
    stop_reason,
)

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.async_engine import AsyncEngine
    from chairlift.engine import Engine
    from chairlift.errors import ChairliftError
    from chairlift.prompts import Prompt
    from chairlift.request_args import RequestArgs
    from chairlift.sampling import SamplingParams


@dataclass(slots=True)
class _Answer:
    """What one answer has to say since it was last read."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_failed: bool = False


@dataclass(slots=True)
class Inbox:
    """Where the loop's callback leaves the news of one request."""

    stop_strings: tuple[str, ...]
    num_answers: int
    prompt_logprobs: list[PositionLogprobs | None] | None
    """The stream's own list, if it asked for them."""
    answers: dict[int, _Answer] = field(default_factory=dict)
    """By index, the one with the oldest news first."""
    is_scheduled: bool = False
    queue_time: float | None = None
    num_cached_tokens: int = 0
    reader: asyncio.Future[None] | None = None
    """Who waits for news."""
    has_ended: bool = False
    error: ChairliftError | None = None
    stats: RequestStats | None = None

    def start(self, num_cached_tokens: int, queue_time: float) -> None:
        """The request was scheduled for the first time."""
        self.is_scheduled = True
        self.num_cached_tokens, self.queue_time = num_cached_tokens, queue_time
        self.wake()

    def put(self, delta: _core.Delta, engine: Engine) -> None:
        """Merge a delta into what has not been read."""
        answer = self.answers.get(delta.index)
        if answer is None:
            answer = self.answers[delta.index] = _Answer()
        answer.text.append(delta.text)
        answer.token_ids += delta.token_ids
        logprobs = position_logprobs(delta, engine.decode_token)
        if logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + logprobs
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = stop_reason(delta, self.stop_strings)
            error = failure(delta)
            answer.has_failed = error is not None
            self.error = self.error or error

    def put_prompt(
        self, count: int, candidates: list[int], values: list[float], engine: Engine
    ) -> None:
        """Append what was scored of the prompt."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += cut_logprobs(count, candidates, values, engine.decode_token)

    def end(self, error: ChairliftError | None = None) -> None:
        """No more news will come."""
        self.has_ended = True
        self.error = self.error or error
        self.wake()

    def wake(self) -> None:
        """Let the reader look. One whose loop is closed never will."""
        reader = self.reader
        if reader is not None and not reader.done() and not reader.get_loop().is_closed():
            reader.set_result(None)


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was not submitted yet."""

    prompt: Prompt
    params: SamplingParams
    args: RequestArgs


class DeltaStream:
    """The deltas of one request, as an asynchronous iterator.

    The request is submitted by :meth:`start`, or when the first delta is asked for. Cancelling
    either wait, :meth:`aclose`, or dropping the stream (as leaving an ``async for`` does) aborts
    the request.
    """

    def __init__(self, engine: AsyncEngine, submission: Submission, request_id: str) -> None:
        """Made by :meth:`AsyncEngine.generate`."""
        self.request_id = request_id
        self.stats: RequestStats | None = None
        """What the request cost; known when it has ended."""
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        """One entry per prompt token, the first of them None, if asked for; known when the first
        delta with a token is there."""
        self.prompt_token_ids: list[int] = []
        """Known when it is submitted."""
        self.seed: int | None = None
        """Key of the random stream, given or drawn; known when it is submitted."""
        self.request_class: str | None = None
        """Name of the class that it is served as; known when it is submitted."""
        self.engine_request_id: int | None = None
        """The engine's own number, which flight logs have; known when a place is reserved."""
        self.queue_time: float | None = None
        """Seconds from its submission until it was first scheduled; known then."""
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache had; known when it was scheduled."""
        self._engine = engine
        self._submission: Submission | None = submission
        """What is to be submitted."""
        self._inbox: Inbox | None = None
        self._core_id: int | None = None
        """The engine's name for the request while it is live."""

    def __aiter__(self) -> Self:
        """Return itself: the stream can be read once."""
        return self

    async def start(self) -> None:
        """Submit the request and wait until it is first scheduled; idempotent.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be used.
            TokenizerError: the prompt cannot be tokenised.
            QueueFullError, RateLimitError, OverloadedError: the request is refused at the door.
            QueueTimeoutError, OverloadedError: it was given up while it waited.
            RequestFailedError: the executor failed on the request.
            EngineDeadError: the engine has ended.
        """
        await self._submit()
        inbox = self._inbox
        if inbox is None:
            return
        while not inbox.is_scheduled and not inbox.has_ended:
            await self._news(inbox)
        self.queue_time, self.num_cached_tokens = inbox.queue_time, inbox.num_cached_tokens
        if not inbox.is_scheduled and inbox.error is not None:
            self._close(inbox)
            raise inbox.error

    async def __anext__(self) -> Delta:
        """Wait for news.

        Raises:
            ChairliftError: what :meth:`start` raises, the refusals with the first delta only.
        """
        await self._submit()
        inbox = self._inbox
        if inbox is None:
            raise StopAsyncIteration
        while not inbox.answers and not inbox.has_ended:
            await self._news(inbox)
        self.queue_time, self.num_cached_tokens = inbox.queue_time, inbox.num_cached_tokens
        delta = self._next_delta(inbox)
        if delta is not None:
            return delta
        self._close(inbox)
        if inbox.error is not None:
            raise inbox.error
        raise StopAsyncIteration

    async def _submit(self) -> None:
        if self._submission is None:
            return
        submission, self._submission = self._submission, None
        if submission.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        await self._engine._submit(submission, self)

    async def _news(self, inbox: Inbox) -> None:
        """Wait until the loop's callback has left something."""
        inbox.reader = asyncio.get_running_loop().create_future()
        try:
            await inbox.reader
        except BaseException:
            self._abort()
            raise
        finally:
            inbox.reader = None

    def _close(self, inbox: Inbox) -> None:
        """Everything was told."""
        self._core_id = None
        self._inbox = None
        self.stats = inbox.stats

    async def aclose(self) -> None:
        """Abort the request if it is live; idempotent."""
        self._abort()

    def __del__(self) -> None:
        """Abort a request that nobody reads any more."""
        self._abort()

    def _abort(self) -> None:
        self._submission = None
        self._inbox = None
        core_id, self._core_id = self._core_id, None
        if core_id is not None:
            self._engine._abandon(core_id)

    def _next_delta(self, inbox: Inbox) -> Delta | None:
        """Take the oldest news, if any. An end by error without text is told by the exception."""
        while inbox.answers:
            index = next(iter(inbox.answers))
            answer = inbox.answers.pop(index)
            if answer.has_failed and not answer.token_ids:
                continue
            return Delta(
                request_id=self.request_id,
                index=index,
                text="".join(answer.text),
                token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                logprobs=answer.logprobs,
            )
        return None
