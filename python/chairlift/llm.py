"""``LLM``: many prompts in, all results out, in order. Blocking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from chairlift.engine import DEFAULT_MODEL, EngineArgs, EngineOptions, LocalEngine, check_params
from chairlift.errors import ChairliftError, EngineDeadError, InvalidRequestError
from chairlift.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestStats,
    cut_logprobs,
    failure,
    position_logprobs,
    stop_reason,
)
from chairlift.prompts import ParsedPrompt, Prompt, parse_prompts

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.engine import TokenizerLike
    from chairlift.sampling import SamplingParams

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

    ``model`` is a local Hugging Face directory, ``smollm2-135m``, or a hub id; for the options see
    :class:`chairlift.engine.EngineArgs`.

    Raises:
        ConfigError: the settings cannot work.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Unpack[EngineOptions]) -> None:
        """Load the model and start the engine."""
        self._engine = LocalEngine(EngineArgs(model=model, **options))
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
    ) -> list[RequestOutput]:
        """Run all prompts through the engine and return their results, in order.

        A prompt is text, a list of token ids, or a dictionary with ``prompt`` or
        ``prompt_token_ids``. One set of parameters serves all prompts, or there is one for each.
        Everything is checked before anything runs. A request that fails on its own ends with
        ``finish_reason`` ``error`` and :attr:`RequestOutput.error`; the others go on.

        Raises:
            InvalidRequestError: a prompt or a parameter cannot be used; says which.
            EngineDeadError: the engine has ended.
        """
        with self._generating:
            return self._run(self._prepare(prompts, sampling_params), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": ..., "content": ...}``.

        ``chat_template_kwargs`` are further names for the template; ``add_generation_prompt`` among
        them wins over the argument.

        Raises:
            TokenizerError: the model has no chat template, or it refuses the messages; says which
                conversation.
            InvalidRequestError: as :meth:`generate`, or ``chat_template_kwargs`` cannot be used.
            EngineDeadError: the engine has ended.
        """
        options = _template_options(add_generation_prompt, chat_template_kwargs)
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
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def metrics(self) -> dict[str, int]:
        """Counters and gauges of the engine.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._engine.client.metrics()

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
    ) -> list[_Pending]:
        """Tokenise and check everything; nothing is submitted yet."""
        parsed = parse_prompts(prompts)
        if isinstance(sampling_params, Sequence):
            params = [check_params(entry) for entry in sampling_params]
        else:
            params = [check_params(sampling_params)] * len(parsed)
        if len(params) != len(parsed):
            raise InvalidRequestError(
                f"there are {len(parsed)} prompts but {len(params)} sampling_params; give one for "
                "all, or one for each",
                code="invalid_parameter",
            )
        pending = []
        for index, (prompt, own) in enumerate(zip(parsed, params, strict=True)):
            try:
                pending.append(self._prepare_one(prompt, own))
            except ChairliftError as error:
                error.args = (f"prompt {index}: {error}",)
                raise
        return pending

    def _prepare_one(self, prompt: ParsedPrompt, params: SamplingParams) -> _Pending:
        tokens = prompt.token_ids if prompt.text is None else self.tokenizer.encode(prompt.text)
        request, seed = self._engine.prepare(prompt, tokens, params)
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

        client = self._engine.client
        waiting = deque(pending)
        live: dict[int, _Pending] = {}
        with tqdm(total=len(pending), desc="requests", disable=not use_tqdm) as progress:
            try:
                self._feed(waiting, live, len(waiting))  # what is refused waits for an iteration
                room = 0
                while live:
                    # As long as prompts wait outside, every iteration may make room; later only
                    # ends are of interest.
                    batch = client.wait(until_end=not waiting)
                    if batch is None:
                        continue
                    progress.update(self._collect(batch, live))
                    room = self._feed(waiting, live, room + len(batch.scheduled()))
            except BaseException:
                # Also what was submitted a moment ago and is not in ``live`` yet.
                client.abort_all()
                raise
        for entry in pending:
            if isinstance(entry.output.error, EngineDeadError):
                raise entry.output.error
        return [entry.output for entry in pending]

    def _feed(self, waiting: deque[_Pending], live: dict[int, _Pending], room: int) -> int:
        """Submit up to ``room`` requests, or until the queue is full; returns the room left."""
        client = self._engine.client
        while waiting and room > 0:
            chunk = [waiting[index] for index in range(min(len(waiting), room, _FEED_CHUNK))]
            ids = client.submit_many([entry.request for entry in chunk])
            for request_id in ids:
                live[request_id] = waiting.popleft()
            room -= len(ids)
            if len(ids) < len(chunk):
                break
        if waiting and not live:
            # Somebody else fills the queue: say so instead of waiting for nothing.
            live[client.submit(waiting[0].request)] = waiting.popleft()
        return room

    def _collect(self, batch: _core.OutputBatch, live: dict[int, _Pending]) -> int:
        """Append what a batch says to the results; returns how many requests ended."""
        for request_id, count, candidates, values in batch.prompt_logprobs():
            entry = live.get(request_id)
            if entry is not None and entry.output.prompt_logprobs is not None:
                decode_token = self._engine.decode_token
                scored = cut_logprobs(count, candidates, values, decode_token)
                entry.output.prompt_logprobs += scored
        for delta in batch.deltas():
            entry = live.get(delta.request_id)
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
        num_ended = 0
        for ended in batch.ended():
            entry = live.pop(ended.request_id, None)
            if entry is not None:
                entry.output.finished = True
                entry.output.stats = RequestStats.from_core(ended, entry.params.n)
                num_ended += 1
        return num_ended


def _template_options(
    add_generation_prompt: bool, further: Mapping[str, object] | None
) -> dict[str, Any]:
    """Keyword arguments for a chat template.

    Raises:
        InvalidRequestError: a name is not text, or is an argument's own.
    """
    options: dict[Any, Any] = {"add_generation_prompt": add_generation_prompt}
    options |= further or {}
    for name in options:
        if not isinstance(name, str) or name in ("self", "messages"):
            raise InvalidRequestError(
                f"chat_template_kwargs must not have {name!r}; its keys are names of the template",
                code="invalid_parameter",
            )
    return options
