"""``POST /tokenize`` and ``/detokenize``, in vLLM's shapes; on a thread, as texts may be long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chairlift.prompts import template_options
from chairlift.server.errors import invalid
from chairlift.server.messages import chat_messages
from chairlift.server.protocol import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from chairlift.server.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, object]:
    """Token ids of a text or of a chat."""
    engine = service.open_engine()
    tokens = await asyncio.to_thread(_encode, service, request)
    strings = None
    if request.return_token_strs:
        strings = [service.vocabulary.shown(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": engine.limits["max_model_len"],
        "tokens": tokens,
        "token_strs": strings,
    }


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, object]:
    """Text of token ids, control tokens included."""
    tokenizer = service.open_engine().tokenizer
    size = tokenizer.vocab_size
    if any(token >= size for token in request.tokens):
        raise invalid("tokens", f"tokens has an id outside the vocabulary of {size} tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, request.tokens, False)}


def _encode(service: Service, request: TokenizeRequest) -> list[int]:
    tokenizer = service.open_engine().tokenizer
    if request.messages is not None:
        return tokenizer.apply_chat_template(
            chat_messages(request.messages),
            **template_options(request.add_generation_prompt, request.chat_template_kwargs),
        )
    return tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)
