"""``AsyncEngine``: requests as streams of deltas on an event loop (asyncio or uvloop).

The loop watches one descriptor, which is readable once per iteration at most, however many
requests run; the callback moves what an iteration said into one inbox per request. A reader that is
slow finds several iterations merged into one delta.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from chairlift import _core
from chairlift.config_file import engine_args
from chairlift.engine import LocalEngine, check_params
from chairlift.engine_args import ConfigSource, EngineOptions
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError, RequestFailedError
from chairlift.outputs import (
    Delta,
    PositionLogprobs,
    RequestStats,
    cut_logprobs,
    failure,
    position_logprobs,
    stop_reason,
)
from chairlift.prompts import ParsedPrompt, parse_prompt
from chairlift.request_args import RequestArgs, RequestOptions

if TYPE_CHECKING:
    from chairlift.engine import TokenizerLike
    from chairlift.prompts import Prompt
    from chairlift.sampling import SamplingParams

_INLINE_CHARACTERS = 2_000
"""A prompt up to this long is tokenised on the loop: handing it to a thread would cost more."""


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
class _Inbox:
    """Where the loop's callback leaves the news of one request."""

    stop_strings: tuple[str, ...]
    num_answers: int
    prompt_logprobs: list[PositionLogprobs | None] | None
    """The stream's own list, if it asked for them."""
    answers: dict[int, _Answer] = field(default_factory=dict)
    """By index, the one with the oldest news first."""
    reader: asyncio.Future[None] | None = None
    """Who waits for news."""
    has_ended: bool = False
    error: ChairliftError | None = None
    stats: RequestStats | None = None

    def put(self, delta: _core.Delta, engine: LocalEngine) -> None:
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
        self, count: int, candidates: list[int], values: list[float], engine: LocalEngine
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
class _Submission:
    """A request that was not submitted yet."""

    prompt: Prompt
    params: SamplingParams
    args: RequestArgs


class DeltaStream:
    """The deltas of one request, as an asynchronous iterator.

    The request is submitted when the first delta is asked for. Cancelling that wait,
    :meth:`aclose`, or dropping the stream (as leaving an ``async for`` does) aborts the request.
    """

    def __init__(self, engine: AsyncEngine, submission: _Submission, request_id: str) -> None:
        """Made by :meth:`AsyncEngine.generate`."""
        self.request_id = request_id
        self.stats: RequestStats | None = None
        """What the request cost; known when it has ended."""
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        """One entry per prompt token, the first of them None, if asked for; known when the first
        delta with a token is there."""
        self.seed: int | None = None
        """Key of the random stream, given or drawn; known when it is submitted."""
        self._engine = engine
        self._submission: _Submission | None = submission
        """What is to be submitted."""
        self._inbox: _Inbox | None = None
        self._core_id: int | None = None
        """The engine's name for the request while it is live."""

    def __aiter__(self) -> Self:
        """Return itself: the stream can be read once."""
        return self

    async def __anext__(self) -> Delta:
        """Wait for news.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be used (first delta only).
            QueueFullError, RateLimitError, OverloadedError: the request is refused at the door
                (first delta only).
            QueueTimeoutError, OverloadedError: it was given up while it waited.
            RequestFailedError: the executor failed on the request.
            EngineDeadError: the engine has ended.
        """
        if self._submission is not None:
            submission, self._submission = self._submission, None
            if submission.params.prompt_logprobs is not None:
                self.prompt_logprobs = [None]
            self._core_id, self.seed, self._inbox = await self._engine._submit(
                submission, self.prompt_logprobs
            )
        inbox = self._inbox
        if inbox is None:
            raise StopAsyncIteration
        while not inbox.answers and not inbox.has_ended:
            inbox.reader = asyncio.get_running_loop().create_future()
            try:
                await inbox.reader
            except BaseException:
                self._abort()
                raise
            finally:
                inbox.reader = None
        delta = self._next_delta(inbox)
        if delta is not None:
            return delta
        self._core_id = None
        self._inbox = None
        self.stats = inbox.stats
        if inbox.error is not None:
            raise inbox.error
        raise StopAsyncIteration

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

    def _next_delta(self, inbox: _Inbox) -> Delta | None:
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


class AsyncEngine:
    """A model, loaded and ready to stream many requests at once on one event loop.

    ``model`` is a local Hugging Face directory, ``smollm2-135m`` (the default), or a hub id;
    ``config`` a :class:`chairlift.Config` or the path of a ``chairlift.toml``. For the options,
    which win over it, see :class:`chairlift.engine_args.EngineArgs`. ``isolation`` is where the
    engine runs: ``thread``, in threads of this process.

    Raises:
        ConfigError: the settings cannot work.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        isolation: Literal["thread", "process"] = "thread",
        **options: Unpack[EngineOptions],
    ) -> None:
        """Load the model and start the engine."""
        if isolation != "thread":
            raise ConfigError(
                f"isolation {isolation!r} is not available yet; use isolation='thread'"
            )
        self._engine = LocalEngine(engine_args(model, options))
        self._client = self._engine.client
        self._inboxes: dict[int, _Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._names = itertools.count()
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="chairlift-tokenise")

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def limits(self) -> Mapping[str, int]:
        """The numbers the engine runs with, after validation."""
        return self._engine.limits

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **options: Unpack[RequestOptions],
    ) -> DeltaStream:
        """Stream one request: ``async for delta in engine.generate(...)``.

        ``request_id`` only names the request in its deltas; it need not be unique. Who asks
        (``tenant``, ``request_class``, ``user``), ``priority`` (lower is sooner) and ``deadline``
        (in seconds) are explained by :class:`chairlift.request_args.RequestArgs`. What can be
        raised later is said at :meth:`DeltaStream.__anext__`.

        Raises:
            InvalidRequestError: an argument is of the wrong type.
        """
        args = RequestArgs(priority=priority, **options)
        submission = _Submission(prompt, check_params(sampling_params), args)
        name = f"request-{next(self._names)}" if request_id is None else request_id
        return DeltaStream(self, submission, name)

    def reload(self, config: ConfigSource) -> None:
        """Go over to the classes' numbers, tenants, weights and quotas of ``config``.

        No request is lost. What a running engine cannot change must be as it was (see
        :meth:`chairlift.engine.LocalEngine.reload`).

        Raises:
            ConfigError: the configuration cannot work, or not here; nothing has changed.
            EngineDeadError: the engine has ended.
        """
        self._engine.reload(config)

    def metrics(self) -> dict[str, int]:
        """Counters and gauges of the engine.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._client.metrics()

    def group_metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Counters and histograms: ``{"classes": {name: {...}}, "tenants": {name: {...}}}``.

        A histogram is ``{"counts": [...], "sum": seconds}``, with the buckets of
        ``chairlift.TIME_BOUNDS``. ``served`` is priced service, in units of the price.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._client.group_metrics()

    def waiting(self, request_id: int) -> tuple[str, dict[str, float]] | None:
        """Why a request waits, and for how many seconds it has waited for what.

        Reasons: ``slots``, ``memory``, ``budget``, ``fairness`` (others that came later went
        ahead), ``rate`` (its tenant's quota or running answers), ``window`` (its batch is not
        formed).
        ``None`` if it was scheduled or is not live.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._client.waiting(request_id)

    async def shutdown(self) -> None:
        """Stop the engine; idempotent, from any loop.

        Live requests end with an ``abort`` delta, those whose prompt is still being tokenised with
        :class:`EngineDeadError`.
        """
        await asyncio.to_thread(self._engine.shutdown)
        loop = self._loop
        if loop is None or loop.is_closed() or loop is asyncio.get_running_loop():
            self._leave()
        else:
            loop.call_soon_threadsafe(self._leave)  # the streams' own loop tells them

    def _leave(self) -> None:
        """Watch no longer, and tell what was said last."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._client.fileno())
        self._loop = None
        self._deliver()
        self._tokenising.shutdown(wait=False)  # what is queued there finds the engine ended

    async def __aenter__(self) -> Self:
        """Enter a context that ends with :meth:`shutdown`."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down."""
        await self.shutdown()

    async def _submit(
        self, submission: _Submission, prompt_logprobs: list[PositionLogprobs | None] | None
    ) -> tuple[int, int, _Inbox]:
        """Reserve, tokenise, submit; returns the core's id, the seed and where news will be."""
        params, args = submission.params, submission.args
        parsed = parse_prompt(submission.prompt)
        self._watch()
        with self._client.reserve(args, n=params.n) as place:
            tokens = await self._tokenise(parsed)
            request, seed = self._engine.prepare(parsed, tokens, params, args)
            core_id = self._client.submit(request, place)
        inbox = _Inbox(params.stop_strings, params.n, prompt_logprobs)
        self._inboxes[core_id] = inbox
        return core_id, seed, inbox

    async def _tokenise(self, prompt: ParsedPrompt) -> list[int]:
        if prompt.text is None:
            return prompt.token_ids
        if len(prompt.text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(prompt.text)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenising, self._encode, prompt.text)

    def _encode(self, text: str) -> list[int]:
        reason = self._client.end_reason
        if reason is not None:
            raise EngineDeadError(reason)
        return self.tokenizer.encode(text)

    def _abandon(self, core_id: int) -> None:
        """Abort a request whose news nobody reads."""
        self._inboxes.pop(core_id, None)
        self._client.abort(core_id)

    def _watch(self) -> None:
        """Have the running loop wake up for output."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._client.end_reason is not None:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this AsyncEngine is in use on another event loop")
        self._loop = loop
        loop.add_reader(self._client.fileno(), self._deliver)

    def _deliver(self) -> None:
        """Move everything that was published into the inboxes; the loop's one callback."""
        batch = self._client.drain()
        if batch is not None:
            inboxes = self._inboxes
            for request_id, count, candidates, values in batch.prompt_logprobs():
                inbox = inboxes.get(request_id)
                if inbox is not None:
                    with self._telling(request_id, inbox):
                        inbox.put_prompt(count, candidates, values, self._engine)
            for delta in batch.deltas():
                inbox = inboxes.get(delta.request_id)
                if inbox is not None:
                    with self._telling(delta.request_id, inbox):
                        inbox.put(delta, self._engine)
                        inbox.wake()
            for ended in batch.ended():
                inbox = inboxes.pop(ended.request_id, None)
                if inbox is not None:
                    inbox.stats = RequestStats.from_core(ended, inbox.num_answers)
                    inbox.end()
        reason = self._client.end_reason
        if reason is not None and self._inboxes:
            # The engine ended without an end for these.
            left, self._inboxes = self._inboxes, {}
            for inbox in left.values():
                inbox.end(EngineDeadError(reason))

    @contextmanager
    def _telling(self, request_id: int, inbox: _Inbox) -> Iterator[None]:
        """Leave news in an inbox. What a tokenizer raises there is its request's trouble only."""
        try:
            yield
        except Exception as error:
            self._abandon(request_id)
            failed = RequestFailedError(
                f"the output cannot be told: {type(error).__name__}: {error}"
            )
            failed.__cause__ = error
            inbox.end(failed)
