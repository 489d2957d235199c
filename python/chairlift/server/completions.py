"""``POST /v1/completions``: one prompt or many, as text or token ids, with ``echo``.

A request whose ``max_tokens`` is 0 wants its prompt back. With ``logprobs`` the prompt has to be
computed, and the one token that comes with it is dropped; without, the engine has nothing to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chairlift.outputs import PositionLogprobs
from chairlift.server.errors import HttpError, invalid, too_long
from chairlift.server.exchange import Exchange, new_id
from chairlift.server.generation import Answer, Generation, check_size, collect, usage_of
from chairlift.server.logprobs import CompletionLogprobs, Shower
from chairlift.server.protocol import CompletionRequest
from chairlift.server.sse import Chunks
from chairlift.server.vocabulary import TextOffsets, Vocabulary

if TYPE_CHECKING:
    from chairlift.async_engine import AsyncEngine
    from chairlift.delta_stream import DeltaStream
    from chairlift.outputs import Delta
    from chairlift.prompts import Prompt, TextPrompt, TokensPrompt

_INLINE_TOKENS = 1_000
"""A prompt up to this long is shown on the event loop."""
_INLINE_CHARACTERS = 100_000
"""Echoes up to this long are written there."""
TextOrIds = str | list[int]


async def answer_completion(
    exchange: Exchange[CompletionRequest], request: CompletionRequest
) -> None:
    """Serve one request."""
    service, engine = exchange.service, exchange.engine
    model = service.check_model(request.model)
    vocabulary, limits = service.vocabulary, engine.limits

    def read() -> list[TextOrIds]:
        prompts = read_prompts(request.prompt, service.settings.max_prompts)
        for prompt in prompts:
            _check_prompt(prompt, vocabulary, limits)
        return prompts

    prompts = await exchange.work(read)
    if service.settings.log_prompts:
        exchange.record.prompt = prompts
    shape = _Shape(
        request=request,
        shower=Shower(vocabulary, as_ids=request.return_tokens_as_token_ids),
        head={
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        },
    )
    if request.max_tokens == 0 and request.logprobs is None and request.prompt_logprobs is None:
        await _answer_echo(exchange, shape, prompts)
        return
    options = exchange.options(request)
    asked = request
    if request.echo and request.logprobs is not None:
        exchange.renames = {"prompt_logprobs": "logprobs"}
        most = max(request.logprobs, request.prompt_logprobs or 0)
        asked = request.model_copy(update={"prompt_logprobs": most})
    params = await exchange.work(
        lambda: asked.sampling(max_tokens=max(request.max_tokens, 1), logprobs=request.logprobs)
    )
    streams = [
        engine.generate(
            _engine_prompt(prompt, request), params, priority=request.priority, **options
        )
        for prompt in prompts
    ]
    generation = Generation(streams, request.n, exchange.usage)
    try:
        await exchange.started(generation)
        await shape.add_prompts(prompts, streams, engine)
        if request.service_tier is not None:
            shape.head["service_tier"] = exchange.record.request_class
        if request.stream:
            await _stream(exchange, shape, generation)
        else:
            answers = await collect(generation)
            if request.max_tokens == 0:
                _drop_outputs(generation, answers)
            await exchange.send_json(lambda: shape.whole(answers, generation), generation)
    finally:
        await generation.close()


@dataclass(slots=True, kw_only=True)
class _PromptShown:
    """A prompt as the answer shows it."""

    text: str
    token_ids: list[int]
    stream: DeltaStream | None = None

    @property
    def logprobs(self) -> list[PositionLogprobs | None]:
        """Of its tokens, if they were asked for and are known."""
        known = None if self.stream is None else self.stream.prompt_logprobs
        return known or []


@dataclass(slots=True, kw_only=True)
class _Shape:
    """How the answer is written."""

    request: CompletionRequest
    shower: Shower
    head: dict[str, object]
    prompts: list[_PromptShown] = field(default_factory=list)

    async def add_prompts(
        self, prompts: Sequence[TextOrIds], streams: Sequence[DeltaStream], engine: AsyncEngine
    ) -> None:
        """Keep what of the prompts the answer shows."""
        for prompt, stream in zip(prompts, streams, strict=True):
            text = ""
            if self.request.echo:
                text = await self.text(prompt, engine)
            self.prompts.append(
                _PromptShown(text=text, token_ids=stream.prompt_token_ids, stream=stream)
            )

    async def text(self, prompt: TextOrIds, engine: AsyncEngine) -> str:
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        decode, skip = engine.tokenizer.decode, self.request.skip_special_tokens
        if len(prompt) <= _INLINE_TOKENS:
            return decode(prompt, skip)
        return await asyncio.to_thread(decode, prompt, skip)

    def offsets(self, start: int) -> TextOffsets:
        """Where tokens begin in a text that has ``start`` characters already."""
        skip = self.request.skip_special_tokens
        return TextOffsets(self.shower.vocabulary, skip_special_tokens=skip, start=start)

    def prompt_logprobs(self, shown: _PromptShown) -> CompletionLogprobs | None:
        """Log-probabilities of an echoed prompt."""
        wanted = self.request.logprobs
        if wanted is None or not self.request.echo:
            return None
        logprobs = CompletionLogprobs()
        positions = [_cut(position, wanted) for position in shown.logprobs]
        self.shower.completion(logprobs, shown.token_ids, positions, self.offsets(0))
        return logprobs

    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, object]:
        """The response that is no stream."""
        n = self.request.n
        return {
            **self.head,
            "choices": [
                self._choice(index, answer, self.prompts[index // n])
                for index, answer in enumerate(answers)
            ],
            "usage": generation.usage(),
        }

    def _choice(self, index: int, answer: Answer, prompt: _PromptShown) -> dict[str, object]:
        request = self.request
        logprobs = None
        if request.logprobs is not None:
            logprobs = self.prompt_logprobs(prompt) or CompletionLogprobs()
            self.shower.completion(
                logprobs, answer.token_ids, answer.logprobs, self.offsets(len(prompt.text))
            )
        choice: dict[str, object] = {
            "index": index,
            "text": prompt.text + "".join(answer.text),
            "logprobs": None if logprobs is None else logprobs.as_json(),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.shower.prompt(prompt.logprobs)
        if request.return_token_ids:
            choice["token_ids"] = answer.token_ids
            choice["prompt_token_ids"] = prompt.token_ids
        return choice


async def _stream(
    exchange: Exchange[CompletionRequest], shape: _Shape, generation: Generation
) -> None:
    request, n = shape.request, shape.request.n
    has_usage = request.stream_options is not None and request.stream_options.include_usage
    chunks = Chunks(shape.head, is_chat=False, has_usage=has_usage)
    choices = [chunks.choice(index) for index in range(len(shape.prompts) * n)]
    offsets = [shape.offsets(len(shape.prompts[index // n].text)) for index in range(len(choices))]
    to_introduce = set(range(len(choices))) if request.echo or request.return_token_ids else set()
    is_detailed = request.logprobs is not None or request.return_token_ids
    send = exchange.send_chunk

    async def introduce(index: int) -> None:
        """Send the prompt; its log-probabilities are known when the first token is."""
        to_introduce.discard(index)
        prompt = shape.prompts[index // n]

        def chunk() -> bytes:
            logprobs = shape.prompt_logprobs(prompt)
            return choices[index].detailed(
                prompt.text,
                None if logprobs is None else logprobs.as_json(),
                [] if request.return_token_ids else None,
                prompt.token_ids if request.return_token_ids else None,
            )

        is_short = len(prompt.token_ids) <= _INLINE_TOKENS
        await send(chunk() if is_short else await asyncio.to_thread(chunk))

    async def on_delta(index: int, delta: Delta) -> None:
        choice = choices[index]
        if index in to_introduce and (delta.token_ids or delta.finish_reason):
            await introduce(index)
        if request.max_tokens == 0:
            pass
        elif is_detailed:
            if delta.text or delta.token_ids:
                logprobs = None
                if delta.logprobs is not None:
                    shown = CompletionLogprobs()
                    shape.shower.completion(shown, delta.token_ids, delta.logprobs, offsets[index])
                    logprobs = shown.as_json()
                ids = delta.token_ids if request.return_token_ids else None
                await send(choice.detailed(delta.text, logprobs, ids))
        elif delta.text:
            await send(choice.text(delta.text))
        if delta.finish_reason is not None and delta.finish_reason != "error":
            reason = "length" if request.max_tokens == 0 else delta.finish_reason
            await send(choice.finish(reason, delta.stop_reason))

    await exchange.begin_stream()
    if request.logprobs is None:
        for index in sorted(to_introduce):
            await introduce(index)
    await generation.read(on_delta)
    if request.max_tokens == 0:
        generation.num_output_tokens = 0
    if has_usage:
        await send(chunks.usage(generation.usage()))
    await exchange.end_stream(generation)


async def _answer_echo(
    exchange: Exchange[CompletionRequest], shape: _Shape, prompts: Sequence[TextOrIds]
) -> None:
    """Give the prompts back: nothing is computed."""
    engine, request = exchange.engine, shape.request
    limits = engine.limits
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(
                engine.tokenizer.encode, prompt, request.add_special_tokens
            )
        else:
            ids = prompt
        _check_length(len(ids), limits["max_model_len"])
        text = await shape.text(prompt, engine)
        shape.prompts.append(_PromptShown(text=text, token_ids=ids))
    num_characters = sum(len(prompt.text) for prompt in shape.prompts) * request.n
    most = exchange.service.settings.max_request_bytes
    if num_characters > most:
        raise invalid(
            "n",
            f"n is {request.n}; so many echoes of the prompt have {num_characters} characters, but "
            f"an answer that only echoes may have {most}: ask for fewer",
        )
    generation = Generation([], request.n, exchange.usage)
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in shape.prompts)
    usage = usage_of(num_prompt_tokens, 0, cached=0)
    answers = [Answer(finish_reason="length") for _ in range(len(shape.prompts) * request.n)]
    if not request.stream:
        await exchange.send_json(
            lambda: {**shape.whole(answers, generation), "usage": usage},
            generation,
            is_long=num_characters > _INLINE_CHARACTERS,
        )
        return
    has_usage = request.stream_options is not None and request.stream_options.include_usage
    chunks = Chunks(shape.head, is_chat=False, has_usage=has_usage)
    await exchange.begin_stream()
    for index in range(len(answers)):
        choice = chunks.choice(index)
        await exchange.send_chunk(choice.text(shape.prompts[index // request.n].text))
        await exchange.send_chunk(choice.finish("length", None))
    if has_usage:
        await exchange.send_chunk(chunks.usage(usage))
    await exchange.end_stream(generation)


def _drop_outputs(generation: Generation, answers: Sequence[Answer]) -> None:
    """Forget the tokens that only came because the prompts were computed."""
    generation.num_output_tokens = 0
    for answer in answers:
        answer.text, answer.token_ids, answer.logprobs = [], [], []
        answer.finish_reason, answer.stop_reason = "length", None


def read_prompts(value: object, most: int) -> list[TextOrIds]:
    """Tell the four forms of ``prompt`` apart.

    Raises:
        HttpError: 400.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _bad_prompt("prompt must be text, token ids, or a list of either, and not empty")
    if isinstance(value[0], int):
        return [_ids(value, "prompt")]
    if len(value) > most:
        raise _bad_prompt(f"prompt has {len(value)} prompts; at most {most} go into one request")
    prompts: list[TextOrIds] = []
    for index, entry in enumerate(value):
        if isinstance(entry, str):
            prompts.append(entry)
        elif isinstance(entry, list) and entry:
            prompts.append(_ids(entry, f"prompt[{index}]"))
        else:
            raise _bad_prompt(f"prompt[{index}] must be text or token ids, and not empty")
    return prompts


def _ids(value: list[object], name: str) -> list[int]:
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise _bad_prompt(f"{name} holds something that is no token id: an integer from 0")
    return value  # type: ignore[return-value]  # just checked


def _check_prompt(prompt: TextOrIds, vocabulary: Vocabulary, limits: Mapping[str, int]) -> None:
    """Check what can be checked without tokenising, so that one bad prompt refuses all."""
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt", "the prompt is empty; give at least one token", "empty_prompt")
        check_size([prompt], vocabulary, limits["max_model_len"], "prompt")
    else:
        _check_length(len(prompt), limits["max_model_len"])
        largest = max(prompt)
        if largest >= limits["vocab_size"]:
            raise invalid(
                "prompt",
                f"token id {largest} in prompt is outside the vocabulary of "
                f"{limits['vocab_size']} tokens",
                "token_out_of_range",
            )


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens >= max_model_len:
        raise too_long("prompt", f"{num_tokens} tokens", max_model_len)


def _engine_prompt(prompt: TextOrIds, request: CompletionRequest) -> Prompt:
    form: TextPrompt | TokensPrompt
    if isinstance(prompt, str):
        form = {"prompt": prompt, "add_special_tokens": request.add_special_tokens}
    else:
        form = {"prompt_token_ids": prompt}
    if request.cache_salt is not None:
        form["cache_salt"] = request.cache_salt
    return form


def _cut(position: PositionLogprobs | None, wanted: int) -> PositionLogprobs | None:
    """The own token and the best ``wanted``, where more were computed."""
    if position is None or len(position) <= wanted:
        return position
    own = next(iter(position))
    return {
        token: entry
        for token, entry in position.items()
        if token == own or (entry.rank is not None and entry.rank <= wanted)
    }


def _bad_prompt(message: str) -> HttpError:
    return invalid("prompt", message, "invalid_prompt")
