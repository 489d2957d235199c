"""``AsyncEngine``: requests as streams of deltas on an event loop (asyncio or uvloop).

The loop watches one descriptor, which is readable once per iteration at most, however many
requests run; the callback moves what an iteration said into one inbox per request, in slices, so
that everything else on the loop has its turn in between. A reader that is slow finds several
iterations merged into one delta. The loop never waits for the engine: questions are posted, and
answered by the same callback.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from chairlift.config_file import engine_args, naming
from chairlift.delta_stream import DeltaStream, Inbox, Submission
from chairlift.engine import Engine, LocalEngine, check_params
from chairlift.engine_args import ConfigSource, EngineOptions
from chairlift.engine_process import ProcessEngine
from chairlift.errors import ConfigError, EngineDeadError, RequestFailedError
from chairlift.outputs import RequestStats
from chairlift.prompts import ParsedPrompt, parse_prompt
from chairlift.request_args import RequestArgs, RequestOptions

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.config import Config
    from chairlift.engine import TokenizerLike
    from chairlift.prompts import Prompt
    from chairlift.sampling import SamplingParams

_INLINE_CHARACTERS = 2_000
"""A prompt up to this long is tokenised on the loop: handing it to a thread would cost more."""
_SLICE = 64
"""Deltas that are handed out before others on the loop have their turn."""
_ISOLATIONS: dict[str, type[Engine]] = {"process": ProcessEngine, "thread": LocalEngine}


class AsyncEngine:
    """A model, loaded and ready to stream many requests at once on one event loop.

    ``model`` is a local Hugging Face directory, ``smollm2-135m`` (the default), or a hub id;
    ``config`` a :class:`chairlift.Config` or the path of a ``chairlift.toml``. For the options,
    which win over it, see :class:`chairlift.engine_args.EngineArgs`. ``isolation`` is where the
    engine runs: ``process``, in a process of its own, so that neither slows the other down; or
    ``thread``, in threads of this process.

    Raises:
        ConfigError: the settings cannot work.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        isolation: Literal["process", "thread"] = "process",
        **options: Unpack[EngineOptions],
    ) -> None:
        """Load the model and start the engine."""
        kind = _ISOLATIONS.get(isolation)
        if kind is None:
            raise ConfigError(
                f"isolation is {isolation!r}; it must be one of {', '.join(_ISOLATIONS)}"
            )
        self._engine = kind(engine_args(model, options))
        self._client = self._engine.client
        self._calls: dict[int, asyncio.Future[Any]] = {}
        """Questions that were posted."""
        self._news: Iterator[None] | None = None
        """What is being handed out."""
        self._inboxes: dict[int, Inbox] = {}
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

    @property
    def end_reason(self) -> str | None:
        """Why the engine has ended; None while it runs."""
        return self._engine.end_reason

    @property
    def config(self) -> Config:
        """What it runs with now."""
        return self._engine.config

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
        submission = Submission(prompt, check_params(sampling_params), args)
        name = f"request-{next(self._names)}" if request_id is None else request_id
        return DeltaStream(self, submission, name)

    async def reload(self, config: ConfigSource) -> None:
        """Go over to the classes' numbers, tenants, weights and quotas of ``config``.

        No request is lost. What a running engine cannot change must be as it was (see
        :meth:`chairlift.engine.Engine.reload`).

        Raises:
            ConfigError: the configuration cannot work, or not here; nothing has changed.
            EngineDeadError: the engine has ended.
        """
        checked = self._engine.check_reload(config)
        with naming(config):
            await self._answer(self._client.post_reload(self._engine.args.over(checked.policy)))
        self._engine.config = checked

    async def metrics(self) -> dict[str, Any]:
        """Counters and gauges of the engine, and histograms of its iterations.

        Raises:
            EngineDeadError: the engine has ended.
        """
        metrics: dict[str, Any] = await self._answer(self._client.post_metrics())
        return metrics

    async def group_metrics(self, *, brief: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
        """Counters and histograms: ``{"classes": {name: {...}}, "tenants": {name: {...}}}``.

        A histogram is ``{"counts": [...], "sum": seconds}``, with the buckets of
        ``chairlift.TIME_BOUNDS``; that of ``itl`` has those of ``chairlift.ITERATION_BOUNDS``.
        ``served`` is priced service, in units of the price. ``groups["engine"][""]`` is what
        :meth:`metrics` says, of the same moment; ``groups["other_tenants"][""]`` are the tenants
        beyond those that are remembered by name. ``brief`` leaves out what tenants have beside
        their counters: there may be a thousand of them.

        Raises:
            EngineDeadError: the engine has ended.
        """
        groups: dict[str, dict[str, dict[str, Any]]] = await self._answer(
            self._client.post_group_metrics(brief=brief)
        )
        return groups

    async def iterations(self, since_step: int = 0) -> dict[str, Any]:
        """The last iterations after number ``since_step``, and the engine as it is now.

        Of ``I`` iterations (256 are kept): ``step``, ``time`` (when it was committed, seconds on
        the engine's clock), ``duration`` (seconds), ``decode_sequences``, ``prefill_sequences``,
        ``decode_tokens``, ``prefill_tokens``, ``finished`` (requests), ``used_blocks``,
        ``waiting`` (sequences after it), each [I]. Of the ``R`` rows: ``row_classes`` [R], an index
        into ``classes`` (names) or -1 where it is free, and ``row_decodes`` [R], 1 where output is
        written. ``oldest_by_class`` and ``oldest_by_tenant``: seconds that the longest-waiting has
        waited. ``now``: the engine's clock.

        Raises:
            EngineDeadError: the engine has ended.
        """
        recent: dict[str, Any] = await self._answer(self._client.post_iterations(since_step))
        return recent

    async def waiting(self, request_id: int) -> tuple[str, dict[str, float]] | None:
        """Why a request waits, and for how many seconds it has waited for what.

        Reasons: ``slots``, ``memory``, ``budget``, ``fairness`` (others that came later went
        ahead), ``rate`` (its tenant's quota or running answers), ``window`` (its batch is not
        formed).
        ``None`` if it was scheduled or is not live.

        Raises:
            EngineDeadError: the engine has ended.
        """
        wait: tuple[str, dict[str, float]] | None = await self._answer(
            self._client.post_waiting(request_id)
        )
        return wait

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
        self._deliver_all()
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

    async def _submit(self, submission: Submission, stream: DeltaStream) -> None:
        """Reserve, tokenise, submit; tells the stream what is known then."""
        params, args = submission.params, submission.args
        parsed = parse_prompt(submission.prompt)
        call, place = self._client.post_reserve(args, n=params.n)
        with place:
            stream.engine_request_id = place.request_id
            stream.request_class = await self._answer(call)
            tokens = await self._tokenise(parsed)
            request, seed = self._engine.prepare(parsed, tokens, params, args)
            core_id = place.request_id
            inbox = Inbox(params.stop_strings, params.n, stream.prompt_logprobs)
            self._inboxes[core_id] = inbox
            try:
                await self._answer(self._client.post_submit(request, place))
            except BaseException:
                self._abandon(core_id)
                raise
        stream.prompt_token_ids, stream.seed = tokens, seed
        stream._core_id, stream._inbox = core_id, inbox

    async def _answer(self, call: int) -> Any:  # noqa: ANN401  # what was asked for
        """Wait for the answer to a question that was posted just now.

        Raises:
            ChairliftError: what was asked for was refused.
            EngineDeadError: nobody answers any more.
        """
        self._watch()
        answer = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        if self._client.is_closed:
            self._deliver_all()
        return await answer

    async def _tokenise(self, prompt: ParsedPrompt) -> list[int]:
        if not prompt.is_longer_than(_INLINE_CHARACTERS):
            return prompt.tokenise(self.tokenizer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenising, self._encode, prompt)

    def _encode(self, prompt: ParsedPrompt) -> list[int]:
        reason = self._client.end_reason
        if reason is not None:
            raise EngineDeadError(reason)
        return prompt.tokenise(self.tokenizer)

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
        """Hand out what was published; the loop's one callback."""
        if self._news is None:
            self._news = self._hand_out()
            self._next_slice()

    def _next_slice(self) -> None:
        """Hand out some of it, and go on when others on the loop had their turn."""
        news = self._news
        if news is None:
            return
        for _ in range(_SLICE):
            if next(news, self) is self:  # it has ended
                self._news = None
                return
        asyncio.get_running_loop().call_soon(self._next_slice)

    def _deliver_all(self) -> None:
        """Hand out everything at once."""
        news, self._news = self._news, None
        for _ in itertools.chain(news or (), self._hand_out()):
            pass

    def _hand_out(self) -> Iterator[None]:
        """Move everything that was published to where it is waited for, a delta at a time.

        What was said before the end is told before the end: an end that comes while this is under
        way is looked at only after another look at what was published.
        """
        client = self._client
        while True:
            is_closed, has_ended = client.is_closed, client.end_reason is not None
            batch = client.drain()
            if batch is not None:
                yield from self._hand_out_batch(batch)
            if has_ended:
                self._tell_the_end(is_closed=is_closed)
            if (client.is_closed, client.end_reason is not None) == (is_closed, has_ended):
                return

    def _hand_out_batch(self, batch: _core.OutputBatch) -> Iterator[None]:
        for call, answer in batch.answers():
            self._settle(call, answer)
        self._tell_starts(batch)
        inboxes = self._inboxes
        for delta in batch.deltas():
            request_id = delta.request_id
            inbox = inboxes.get(request_id)
            if inbox is not None:
                try:
                    inbox.put(delta, self._engine)
                    inbox.wake()
                except Exception as error:
                    self._untold(request_id, inbox, error)
                yield
        for ended in batch.ended():
            inbox = inboxes.pop(ended.request_id, None)
            if inbox is not None:
                inbox.stats = RequestStats.from_core(ended, inbox.num_answers)
                inbox.end()

    def _tell_starts(self, batch: _core.OutputBatch) -> None:
        """Hand out what comes before the first delta of a request."""
        for request_id, num_cached_tokens, queue_time in batch.scheduled():
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.start(num_cached_tokens, queue_time)
        for request_id, count, candidates, values in batch.prompt_logprobs():
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                try:
                    inbox.put_prompt(count, candidates, values, self._engine)
                except Exception as error:
                    self._untold(request_id, inbox, error)

    def _tell_the_end(self, *, is_closed: bool) -> None:
        """The engine has ended: what has no end yet gets none but this."""
        dead = EngineDeadError(self.end_reason or "the engine has ended")
        left, self._inboxes = self._inboxes, {}
        for inbox in left.values():
            inbox.end(dead)
        if is_closed:
            for call in list(self._calls):
                self._settle(call, dead)

    def _settle(self, call: int, answer: object) -> None:
        """Give an answer to who waits for it, if somebody does."""
        waiter = self._calls.pop(call, None)
        if waiter is None or waiter.done() or waiter.get_loop().is_closed():
            return
        if isinstance(answer, BaseException):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)

    def _untold(self, request_id: int, inbox: Inbox, error: Exception) -> None:
        """News could not be left in an inbox: what a tokenizer raises is its request's trouble."""
        self._abandon(request_id)
        failed = RequestFailedError(f"the output cannot be told: {type(error).__name__}: {error}")
        failed.__cause__ = error
        inbox.end(failed)
