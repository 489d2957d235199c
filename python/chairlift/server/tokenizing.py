"""``POST /tokenize`` and ``/detokenize``, in vLLM's shapes; on a thread, as texts may be long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chairlift.prompts import template_options
from chairlift.server.errors import invalid
from chairlift.server.messages import chat_messages
from chairlift.server.protocol import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from chairlift.engine import TokenizerLike
    from chairlift.server.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, object]:
    """Token ids of a text or of a chat."""
    engine = service.open_engine()
    tokens, strings = await asyncio.to_thread(_encode, service, request)
    return {
        "count": len(tokens),
        "max_model_len": engine.limits["max_model_len"],
        "tokens": tokens,
        "token_strs": strings,
    }


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, object]:
    """Text of token ids, control tokens included."""
    tokenizer = service.open_engine().tokenizer
    return {"prompt": await asyncio.to_thread(_decode, tokenizer, request.tokens)}


def _encode(service: Service, request: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    tokenizer = service.open_engine().tokenizer
    if request.messages is not None:
        tokens = tokenizer.apply_chat_template(
            chat_messages(request.messages),
            **template_options(
                request.add_generation_prompt,
                request.chat_template_kwargs,
                add_special_tokens=request.add_special_tokens is True,
            ),
        )
    else:
        tokens = tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)
    if not request.return_token_strs:
        return tokens, None
    return tokens, [service.vocabulary.shown(token) for token in tokens]


def _decode(tokenizer: TokenizerLike, tokens: list[int]) -> str:
    size = tokenizer.vocab_size
    if any(token >= size for token in tokens):
        raise invalid("tokens", f"tokens has an id outside the vocabulary of {size} tokens")
    return tokenizer.decode(tokens, False)
