"""``LLM``: many prompts in, all results out, in order. Blocking."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from chairlift.config_file import engine_args
from chairlift.engine import LocalEngine, check_params
from chairlift.engine_args import ConfigSource, EngineOptions
from chairlift.errors import (
    ChairliftError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    TryLaterError,
)
from chairlift.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestStats,
    cut_logprobs,
    failure,
    position_logprobs,
    stop_reason,
)
from chairlift.prompts import ParsedPrompt, Prompt, parse_prompts, template_options
from chairlift.request_args import RequestArgs, RequestOptions

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.engine import TokenizerLike
    from chairlift.sampling import SamplingParams

T = TypeVar("T")

_FEED_CHUNK = 256
"""Requests handed over in one command."""


@dataclass(slots=True)
class _Pending:
    """A request that was checked, and where its result goes."""

    request: _core.Request
    params: SamplingParams
    output: RequestOutput


class LLM:
    """A model, loaded and ready; several threads may share it, one generates at a time.

    ``model`` is a local Hugging Face directory, ``smollm2-135m`` (the default), or a hub id;
    ``config`` a :class:`chairlift.Config` or the path of a ``chairlift.toml``. For the options,
    which win over it, see :class:`chairlift.engine_args.EngineArgs`.

    Raises:
        ConfigError: the settings cannot work.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str | None = None, **options: Unpack[EngineOptions]) -> None:
        """Load the model and start the engine."""
        self._engine = LocalEngine(engine_args(model, options))
        self._generating = threading.Lock()
        self._num_requests = 0

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
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Run all prompts through the engine and return their results, in order.

        A prompt is text, a list of token ids, or a dictionary with ``prompt``, ``prompt_token_ids``
        or ``messages``. One set of parameters serves all prompts, or there is one for each. So with
        ``priority`` (lower is sooner); ``tenant``, ``request_class``, ``user`` and
        ``deadline`` (in seconds) are those of all: see :class:`chairlift.request_args.RequestArgs`.

        Everything is checked before anything runs. A request that fails on its own ends with
        ``finish_reason`` ``error`` and :attr:`RequestOutput.error`; one that is refused at the door
        for a promise, or given up while it waits, with the error's code and the error. The others
        go on. Prompts for which the waiting queue has no room wait outside.

        Raises:
            InvalidRequestError: a prompt or a parameter cannot be used; says which.
            QueueFullError: requests that are not of this call fill the queue.
            EngineDeadError: the engine has ended.
        """
        with self._generating:
            pending = self._prepare(prompts, sampling_params, priority, options)
            return self._run(pending, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        priority: int | Sequence[int] = 0,
        **request_options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": ..., "content": ...}``.

        What is not said here is as in :meth:`generate`.

        ``chat_template_kwargs`` are further names for the template; ``add_generation_prompt`` among
        them wins over the argument.

        Raises:
            TokenizerError: the model has no chat template, or it refuses the messages; says which
                conversation.
            InvalidRequestError: as :meth:`generate`, or ``chat_template_kwargs`` cannot be used.
            QueueFullError, EngineDeadError: as :meth:`generate`.
        """
        options = template_options(add_generation_prompt, chat_template_kwargs)
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(self.tokenizer.apply_chat_template(conversation, **options))
            except ChairliftError as error:
                if not one:
                    error.args = (f"conversation {index}: {error}",)
                raise
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, **request_options
        )

    def reload(self, config: ConfigSource) -> None:
        """Go over to the classes' numbers, tenants, weights and quotas of ``config``.

        No request is lost; from any thread, also while one generates. What a running engine cannot
        change must be as it was (see :meth:`chairlift.engine.LocalEngine.reload`).

        Raises:
            ConfigError: the configuration cannot work, or not here; nothing has changed.
            EngineDeadError: the engine has ended.
        """
        self._engine.reload(config)

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges of the engine.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._engine.client.metrics()

    def group_metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Counters and histograms: ``{"classes": {name: {...}}, "tenants": {name: {...}}}``.

        A histogram is ``{"counts": [...], "sum": seconds}``, with the buckets of
        ``chairlift.TIME_BOUNDS``. ``served`` is priced service, in units of the price.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._engine.client.group_metrics()

    def waiting(self, request_id: int) -> tuple[str, dict[str, float]] | None:
        """Why a request waits, and for how many seconds it has waited for what.

        Reasons: ``slots``, ``memory``, ``budget``, ``fairness`` (others that came later went
        ahead), ``rate`` (its tenant's quota or running answers), ``window`` (its batch is not
        formed), ``sla`` (with it, those that run would decode more slowly than promised).
        ``None`` if it was scheduled or is not live.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._engine.client.waiting(request_id)

    def shutdown(self) -> None:
        """Stop the engine; idempotent. Requests that are running end as aborted."""
        self._engine.shutdown()

    def __enter__(self) -> Self:
        """Enter a context that ends with :meth:`shutdown`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        options: RequestOptions,
    ) -> list[_Pending]:
        """Tokenise and check everything; nothing is submitted yet."""
        parsed = parse_prompts(prompts)
        params = _for_each("sampling_params", sampling_params, len(parsed))
        priorities = _for_each("priority", priority, len(parsed))
        pending = []
        for index, prompt in enumerate(parsed):
            try:
                own = check_params(params[index])
                args = RequestArgs(priority=priorities[index], **options)
                pending.append(self._prepare_one(prompt, own, args))
            except ChairliftError as error:
                error.args = (f"prompt {index}: {error}",)
                raise
        return pending

    def _prepare_one(
        self, prompt: ParsedPrompt, params: SamplingParams, args: RequestArgs
    ) -> _Pending:
        tokens = prompt.tokenise(self.tokenizer)
        request, seed = self._engine.prepare(prompt, tokens, params, args)
        self._engine.client.check(request)
        wants_logprobs = params.logprobs is not None
        outputs = [
            CompletionOutput(
                index,
                logprobs=[] if wants_logprobs else None,
                cumulative_logprob=0.0 if wants_logprobs else None,
            )
            for index in range(params.n)
        ]
        output = RequestOutput(str(self._num_requests), prompt.text, tokens, outputs, seed)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        self._num_requests += 1
        return _Pending(request, params, output)

    def _run(self, pending: list[_Pending], *, use_tqdm: bool) -> list[RequestOutput]:
        """Feed the engine as its queue has room, and collect until all have ended."""
        from tqdm.auto import tqdm  # noqa: PLC0415

        with tqdm(total=len(pending), desc="requests", disable=not use_tqdm) as progress:
            _Call(self._engine, pending, progress.update).run()
        for entry in pending:
            if isinstance(entry.output.error, EngineDeadError):
                raise entry.output.error
        return [entry.output for entry in pending]


class _Call:
    """One call of ``generate``: the requests that wait outside, and those in the engine."""

    def __init__(
        self, engine: LocalEngine, pending: list[_Pending], ended: Callable[[int], object]
    ) -> None:
        """Take requests that were checked; ``ended`` is told how many more have ended."""
        self._engine = engine
        self._client = engine.client
        self._ended = ended
        self._waiting = deque(pending)
        self._live: dict[int, _Pending] = {}
        self.room = sum(entry.params.n for entry in pending)
        """Places that the queue may have for this call; nothing is known before it refuses."""

    def run(self) -> None:
        """Feed and collect until all have ended."""
        try:
            self.feed()
            self.room = 0  # what found no place waits for an iteration
            while self._live:
                # As long as prompts wait outside, every iteration may make room; later only ends
                # are of interest.
                batch = self._client.wait(until_end=not self._waiting)
                if batch is not None:
                    self.room += self._places(batch)
                    self._collect(batch)
                    self.feed()
        except BaseException:
            # Also what was submitted a moment ago and is not in ``_live`` yet.
            self._client.abort_all()
            raise

    def feed(self) -> None:
        """Submit what there is room for, or until a request finds no place."""
        while chunk := self._chunk():
            try:
                ids = self._client.submit_many([entry.request for entry in chunk])
            except TryLaterError as error:  # never of a full queue
                self._refuse(self._waiting.popleft(), error)
                continue
            for request_id in ids:
                entry = self._live[request_id] = self._waiting.popleft()
                self.room -= entry.params.n
            if len(ids) < len(chunk):
                break
        while self._waiting and not self._live:
            entry = self._waiting.popleft()
            try:
                self._live[self._client.submit(entry.request)] = entry
            except QueueFullError:
                raise  # somebody else fills the queue: say so instead of waiting for nothing
            except TryLaterError as error:
                self._refuse(entry, error)

    def _chunk(self) -> list[_Pending]:
        """The next requests for which there may be room."""
        chunk: list[_Pending] = []
        room = self.room
        for entry in itertools.islice(self._waiting, _FEED_CHUNK):
            room -= entry.params.n
            if room < 0:
                break
            chunk.append(entry)
        return chunk

    def _places(self, batch: _core.OutputBatch) -> int:
        """Places in the queue that are free again, after a batch."""
        left = [request_id for request_id, _, _ in batch.scheduled()]
        left += [end.request_id for end in batch.ended() if end.first_scheduled_time is None]
        # Others are of a call that was interrupted.
        return sum(self._live[name].params.n for name in left if name in self._live)

    def _refuse(self, entry: _Pending, error: TryLaterError) -> None:
        """End a request at the door."""
        for answer in entry.output.outputs:
            answer.finish_reason = error.code
        entry.output.error = error
        entry.output.finished = True
        self._ended(1)

    def _collect(self, batch: _core.OutputBatch) -> None:
        """Append what a batch says to the results."""
        for request_id, count, candidates, values in batch.prompt_logprobs():
            entry = self._live.get(request_id)
            if entry is not None and entry.output.prompt_logprobs is not None:
                decode_token = self._engine.decode_token
                scored = cut_logprobs(count, candidates, values, decode_token)
                entry.output.prompt_logprobs += scored
        for delta in batch.deltas():
            entry = self._live.get(delta.request_id)
            if entry is None:
                continue  # of a call that was interrupted
            answer = entry.output.outputs[delta.index]
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            if answer.logprobs is not None:
                logprobs = position_logprobs(delta, self._engine.decode_token) or []
                answer.logprobs += logprobs
                answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + sum(
                    next(iter(position.values())).logprob for position in logprobs
                )
            if delta.finish_reason is not None:
                answer.finish_reason = delta.finish_reason
                answer.stop_reason = stop_reason(delta, entry.params.stop_strings)
                entry.output.error = entry.output.error or failure(delta)
        for ended in batch.ended():
            entry = self._live.pop(ended.request_id, None)
            if entry is not None:
                entry.output.finished = True
                entry.output.stats = RequestStats.from_core(ended, entry.params.n)
                self._ended(1)


def _for_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """One value for each of ``count`` prompts: one for all, or a sequence.

    Raises:
        InvalidRequestError: the sequence has another length.
    """
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"there are {count} prompts but {len(given)} {name}; give one for all, or one for each",
            code="invalid_parameter",
        )
    return given
