"""``POST /v1/chat/completions``: messages to a stream of the engine, its deltas to an answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from chairlift.server.exchange import Exchange, new_id
from chairlift.server.generation import Answer, Generation, check_size, collect
from chairlift.server.logprobs import Shower
from chairlift.server.messages import ChatMessage, chat_messages
from chairlift.server.protocol import ChatRequest
from chairlift.server.sse import Chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chairlift.outputs import Delta
    from chairlift.prompts import ChatPrompt
    from chairlift.sampling import SamplingParams


async def answer_chat(exchange: Exchange[ChatRequest], request: ChatRequest) -> None:
    """Serve one request."""
    service, engine = exchange.service, exchange.engine
    exchange.renames = {"logprobs": "top_logprobs", "max_tokens": _limit_name(request)}
    model = service.check_model(request.model)
    vocabulary, max_model_len = service.vocabulary, engine.limits["max_model_len"]

    def read() -> tuple[SamplingParams, list[dict[str, object]]]:
        check_size(_texts(request.messages), vocabulary, max_model_len, "messages")
        params = request.sampling(
            max_tokens=request.token_limit,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        return params, chat_messages(request.messages)

    params, messages = await exchange.work(read)
    if service.settings.log_prompts:
        exchange.record.prompt = messages
    kwargs = dict(request.chat_template_kwargs or {})
    if request.documents:
        kwargs["documents"] = request.documents
    prompt: ChatPrompt = {
        "messages": messages,
        "add_generation_prompt": request.add_generation_prompt,
        "add_special_tokens": request.add_special_tokens,
        "chat_template_kwargs": kwargs,
    }
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    stream = engine.generate(prompt, params, priority=request.priority, **exchange.options(request))
    generation = Generation([stream], request.n, exchange.usage)
    head: dict[str, object] = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": service.fingerprint,
    }
    shower = Shower(service.vocabulary, as_ids=request.return_tokens_as_token_ids)
    try:
        await exchange.started(generation)
        if request.service_tier is not None:
            head["service_tier"] = exchange.record.request_class
        if request.stream:
            await _stream(exchange, request, generation, head, shower)
        else:
            await _whole(exchange, request, generation, head, shower)
    finally:
        await generation.close()


async def _stream(
    exchange: Exchange[ChatRequest],
    request: ChatRequest,
    generation: Generation,
    head: dict[str, object],
    shower: Shower,
) -> None:
    has_usage = request.stream_options is not None and request.stream_options.include_usage
    chunks = Chunks(head, is_chat=True, has_usage=has_usage)
    choices = [chunks.choice(index) for index in range(request.n)]
    is_detailed = request.logprobs or request.return_token_ids
    send = exchange.send_chunk
    prompt_ids = generation.streams[0].prompt_token_ids if request.return_token_ids else None
    await exchange.begin_stream()
    for choice in choices:
        await send(choice.role(prompt_ids))

    async def on_delta(index: int, delta: Delta) -> None:
        choice = choices[index]
        if is_detailed:
            if delta.text or delta.token_ids:
                logprobs = None
                if delta.logprobs is not None:
                    logprobs = _logprobs(shower.chat(delta.logprobs))
                ids = delta.token_ids if request.return_token_ids else None
                await send(choice.detailed(delta.text, logprobs, ids))
        elif delta.text:
            await send(choice.text(delta.text))
        if delta.finish_reason is not None and delta.finish_reason != "error":
            await send(choice.finish(delta.finish_reason, delta.stop_reason))

    await generation.read(on_delta)
    if has_usage:
        await send(chunks.usage(generation.usage()))
    await exchange.end_stream(generation)


async def _whole(
    exchange: Exchange[ChatRequest],
    request: ChatRequest,
    generation: Generation,
    head: dict[str, object],
    shower: Shower,
) -> None:
    answers = await collect(generation)
    stream = generation.streams[0]

    def content() -> dict[str, object]:
        choices = [_choice(i, answer, request, shower) for i, answer in enumerate(answers)]
        content = {**head, "choices": choices, "usage": generation.usage()}
        if request.return_token_ids:
            content["prompt_token_ids"] = stream.prompt_token_ids
        if request.prompt_logprobs is not None:
            content["prompt_logprobs"] = shower.prompt(stream.prompt_logprobs or [])
        return content

    await exchange.send_json(content, generation)


def _choice(index: int, answer: Answer, request: ChatRequest, shower: Shower) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": index,
        "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
        "logprobs": _logprobs(shower.chat(answer.logprobs)) if request.logprobs else None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def _logprobs(content: list[dict[str, object]]) -> dict[str, object]:
    return {"content": content, "refusal": None}


def _limit_name(request: ChatRequest) -> str:
    """The field that the engine's ``max_tokens`` came from."""
    smaller = request.token_limit
    return "max_tokens" if smaller == request.max_tokens else "max_completion_tokens"


def _texts(messages: list[ChatMessage]) -> Iterator[str]:
    for message in messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (part.text or "" for part in message.content or ())
