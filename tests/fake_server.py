"""A tiny OpenAI-compatible server with known delays and known faults, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(kw_only=True)
class Behaviour:
    """How one request is answered."""

    first_s: float = 0.0
    """Before the first token."""
    gap_s: float = 0.0
    """Between tokens."""
    num_together: int = 1
    """Requests that must have been live at once before the first token."""
    num_tokens: int | None = None
    """None: as many as asked for."""
    words: tuple[str, ...] = ("word ",)
    """What tokens say, in turn."""
    finish_reason: str | None = "length"
    has_usage: bool = True
    has_done: bool = True
    break_after: int | None = None
    """Tokens after which the connection is cut."""
    error_after: int | None = None
    """Tokens after which an error event ends the stream."""
    extra_after_done: bool = False
    status: int = 200
    code: str = ""
    message: str = "no"
    retry_after: str | None = None
    queue_time_ms: str | None = None
    told_class: str | None = None
    tokens_per_event: int = 1
    cut_bytes: bool = False
    """Whether events are torn into single bytes."""


@dataclass
class FakeServer:
    """Remembers what it was asked; ``behave`` says how it answers."""

    behave: Callable[[int, Mapping[str, Any]], Behaviour]
    """Of the request's number and body."""
    models: tuple[str, ...] = ("fake-model",)
    api_key: str | None = None
    requests: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    """Bodies and headers in the order they came."""
    url: str = ""
    num_live: int = 0
    most_live: int = 0

    def __enter__(self) -> FakeServer:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _serve(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main(started))

    async def _main(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        self._more_live = asyncio.Condition()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response(
                {"error": {"message": "no", "code": "invalid_api_key"}}, status=401
            )
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append((body, dict(request.headers)))
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        async with self._more_live:
            self._more_live.notify_all()
        try:
            return await self._reply(request, body, self.behave(number, body))
        finally:
            self.num_live -= 1

    async def _reply(
        self, request: web.Request, body: dict[str, Any], behaviour: Behaviour
    ) -> web.StreamResponse:
        if behaviour.status != 200:
            headers = (
                {} if behaviour.retry_after is None else {"Retry-After": behaviour.retry_after}
            )
            error = {"message": behaviour.message, "type": "refused", "code": behaviour.code}
            return web.json_response({"error": error}, status=behaviour.status, headers=headers)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if behaviour.told_class is not None:
            reply.headers["X-Request-Class"] = behaviour.told_class
        if behaviour.queue_time_ms is not None:
            reply.headers["X-Queue-Time-Ms"] = behaviour.queue_time_ms
        await reply.prepare(request)
        await self._stream(reply, request, body, behaviour)
        return reply

    async def _stream(
        self,
        reply: web.StreamResponse,
        request: web.Request,
        body: dict[str, Any],
        behaviour: Behaviour,
    ) -> None:
        is_chat = "messages" in body

        async def send(payload: str) -> None:
            data = f"data: {payload}\n\n".encode()
            for piece in (
                [data[i : i + 1] for i in range(len(data))] if behaviour.cut_bytes else [data]
            ):
                await reply.write(piece)

        def choice(text: str | None, finish_reason: str | None = None) -> str:
            delta = {} if text is None else {"content": text}
            said = {"delta": delta} if is_chat else {"text": text or ""}
            choices = [{"index": 0, **said, "finish_reason": finish_reason}]
            return json.dumps({"id": "x", "choices": choices, "usage": None})

        if is_chat:
            await send(
                json.dumps(
                    {
                        "choices": [
                            {
                                "index": 0,
                                "delta": {"role": "assistant", "content": ""},
                                "finish_reason": None,
                            }
                        ]
                    }
                )
            )
        num_tokens = behaviour.num_tokens
        num_tokens = body.get("max_tokens", 4) if num_tokens is None else num_tokens
        async with self._more_live, asyncio.timeout(120):
            await self._more_live.wait_for(lambda: self.most_live >= behaviour.num_together)
        await asyncio.sleep(behaviour.first_s)
        for index in range(0, num_tokens, behaviour.tokens_per_event):
            if index and behaviour.gap_s:
                await asyncio.sleep(behaviour.gap_s)
            if behaviour.break_after == index:
                request.transport.abort()
                return
            if behaviour.error_after == index:
                error = {"message": behaviour.message, "code": behaviour.code}
                await send(json.dumps({"error": error}))
                return
            await send(choice(behaviour.words[index % len(behaviour.words)]))
        if behaviour.finish_reason is not None:
            await send(choice(None, behaviour.finish_reason))
        if behaviour.has_usage:
            prompt = body.get("prompt")
            prompt_tokens = len(prompt) if isinstance(prompt, list) else 7
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
            await send(json.dumps({"choices": [], "usage": usage}))
        if behaviour.has_done:
            await send("[DONE]")
        if behaviour.extra_after_done:
            await send(choice("late"))
