"""Who answers in ``chairlift chat``: a server, or an engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from chairlift.async_engine import AsyncEngine
from chairlift.bench.client import Client
from chairlift.bench.sse import DONE, EventParser
from chairlift.cli.chat_session import Message
from chairlift.errors import (
    ChairliftError,
    ContextLengthError,
    InvalidRequestError,
    RequestFailedError,
    ServerUnreachableError,
    TryLaterError,
)
from chairlift.sampling import SamplingParams

_DEFAULTS = SamplingParams()
_OPTIONAL = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Sent to a server only where they are not the default: not every server knows them."""


class ChatBackend(Protocol):
    """Answers conversations."""

    model: str
    """What answers."""

    async def answer(
        self, messages: Sequence[Message], on_text: Callable[[str], None]
    ) -> str | None:
        """Answer, handing text over as it comes; returns the finish reason.

        Cancelling it stops the answer.

        Raises:
            ContextLengthError: the conversation is too long.
            ChairliftError: anything else that went wrong, told in its message.
        """

    async def close(self) -> None:
        """Let go of everything."""


class EngineBackend:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine, model: str, params: SamplingParams) -> None:
        """Answer with ``engine``, which is closed in the end."""
        self.model = model
        self._engine = engine
        self._params = params

    async def answer(
        self, messages: Sequence[Message], on_text: Callable[[str], None]
    ) -> str | None:
        """Answer; see :class:`ChatBackend`."""
        finish_reason = None
        async for delta in self._engine.generate({"messages": messages}, self._params):
            on_text(delta.text)
            finish_reason = delta.finish_reason or finish_reason
        return finish_reason

    async def close(self) -> None:
        """Shut the engine down."""
        await self._engine.shutdown()


class ServerBackend:
    """An OpenAI-compatible server."""

    def __init__(
        self, base_url: str, model: str, params: SamplingParams, *, api_key: str | None
    ) -> None:
        """Answer with ``model`` of the server; :meth:`connect` finds out whether it is there."""
        self.model = model
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._body: dict[str, object] = {
            "model": model,
            "stream": True,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }
        for name in _OPTIONAL:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                self._body[name] = getattr(params, name)
        if params.stop_strings:
            self._body["stop"] = list(params.stop_strings)

    @classmethod
    async def connect(
        cls, base_url: str, model: str | None, params: SamplingParams, *, api_key: str | None
    ) -> ServerBackend:
        """Find the server and the name of its model.

        Raises:
            ServerUnreachableError: it does not answer, does not let us in, or tells no model.
        """
        async with Client(base_url, api_key=api_key, timeout_s=30.0) as client:
            names = await client.models()
        if model is None and not names:
            raise ServerUnreachableError(f"{base_url} tells no models; give --model NAME")
        return cls(base_url, model or names[0], params, api_key=api_key)

    async def answer(
        self, messages: Sequence[Message], on_text: Callable[[str], None]
    ) -> str | None:
        """Answer; see :class:`ChatBackend`."""
        body = self._body | {"messages": list(messages)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        try:
            # A session for each answer: between two of them nobody runs the event loop.
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.post(f"{self._root}/v1/chat/completions", json=body) as reply,
            ):
                if reply.status != 200:
                    raise _refusal(reply, await reply.read())
                return await _read(reply.content, on_text)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerUnreachableError(
                f"the connection to {self._root} failed: {error}; is the server still there?"
            ) from None

    async def close(self) -> None:
        """Nothing is held between answers."""


async def _read(content: aiohttp.StreamReader, on_text: Callable[[str], None]) -> str | None:
    events = EventParser()
    finish_reason = None
    while data := await content.readany():
        for payload in events.feed(data):
            if payload == DONE:
                return finish_reason
            event = _parse(payload)
            if event.get("error") is not None:
                raise RequestFailedError(_message(event, payload))
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content")
                if text:
                    on_text(text)
                finish_reason = choice.get("finish_reason") or finish_reason
    raise RequestFailedError("the answer broke off: the server closed the stream before its end")


def _refusal(reply: aiohttp.ClientResponse, body: bytes) -> ChairliftError:
    event = _parse(body, is_error=True)
    message = _message(event, body)
    error = event.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    if code == "context_length_exceeded":
        return ContextLengthError(message)
    if reply.status in (429, 503, 504):
        wait = reply.headers.get("Retry-After")
        again = "" if wait is None else f" (try again in {wait} s)"
        return TryLaterError(f"the server refused: {message}{again}")
    told = f"the server answered {reply.status}: {message}"
    return InvalidRequestError(told) if reply.status < 500 else RequestFailedError(told)


def _parse(payload: bytes, *, is_error: bool = False) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        event = None
    if isinstance(event, dict):
        return event
    if is_error:
        return {}
    raise RequestFailedError(f"the server sent something that is no event: {payload[:80]!r}")


def _message(event: Mapping[str, Any], raw: bytes) -> str:
    error = event.get("error")
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return raw[:200].decode(errors="replace").strip() or "nothing more was said"
