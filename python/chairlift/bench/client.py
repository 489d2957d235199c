"""Sends one request and reads its stream into an outcome.

A token costs two searches of its bytes and one append: JSON is parsed only for the first token, the
finish and the usage. Tokens are counted by the server's usage, never by events.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from chairlift.bench.sse import DONE, EventParser
from chairlift.bench.workload import Endpoint, Request
from chairlift.errors import ServerUnreachableError

_PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_RETRIED = (429, 503)
_DEFAULT_RETRY_AFTER_S = 1.0
_LONGEST_RETRY_AFTER_S = 60.0
_CLASS_HEADER = "X-Request-Class"
_QUEUE_TIME_HEADER = "X-Queue-Time-Ms"

# A quote in a JSON string is escaped, so these find keys and values, never what a model says.
_TOKEN = re.compile(rb'"(?:text|content)"\s*:\s*"(?!")')
_SPECIAL = re.compile(rb'"finish_reason"\s*:\s*"|"usage"\s*:\s*\{|"error"')


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no whole answer."""

    status: int | None
    """Of HTTP; None: no reply came."""
    code: str
    message: str
    retry_after_s: float | None = None

    @property
    def is_refusal(self) -> bool:
        """Whether the server said in time that it would not serve the request."""
        return self.status is not None and self.status != 200


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are those of the client's clock, in seconds."""

    request: Request
    sent_at: float
    """When it was first sent."""
    lateness: float | None = None
    """How much later than it should have been; None: it had no time of its own."""
    token_times: array[float] = field(default_factory=lambda: array("d"))
    """When something to read came."""
    ended_at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    request_class: str | None = None
    """As the server told it in a header, or else as it was asked for."""
    queue_time: float | None = None
    """As the server told it in a header."""
    finish_reason: str | None = None
    refusals: list[Failure] = field(default_factory=list)
    """Those after which it was sent again."""
    failure: Failure | None = None

    @property
    def ttft(self) -> float | None:
        """From sending to the first token; None: there was nothing to read."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean gap between tokens; None: there are not two."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """From sending to the end of the stream."""
        return self.ended_at - self.sent_at


class AnswerReader:
    """Reads the events of one stream into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        """Read into ``outcome``."""
        self._outcome = outcome
        self._events = EventParser()
        self._has_usage = False
        self._is_done = False
        self._error: tuple[str, str] | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at ``now``."""
        times = self._outcome.token_times
        for payload in self._events.feed(data):
            if self._is_done:
                self._error = self._error or ("data_after_done", "an event came after [DONE]")
            elif times and _TOKEN.search(payload) and not _SPECIAL.search(payload):
                times.append(now)
            elif payload == DONE:
                self._is_done = True
                self._outcome.ended_at = now
            else:
                self._parse(payload, now)

    def finish(self, *, must_have_all: bool) -> Failure | None:
        """The stream is over; returns what is wrong with it."""
        outcome = self._outcome
        asked, got = outcome.request.output_tokens, outcome.output_tokens
        if self._error is not None:
            return Failure(200, *self._error)
        if outcome.finish_reason is None:
            return Failure(200, "no_finish_reason", "the stream ended without a finish reason")
        if not self._is_done:
            return Failure(200, "no_done", "the stream ended without [DONE]")
        if not self._has_usage:
            return Failure(
                200, "no_usage", "the stream told no usage, although stream_options asked for it"
            )
        if must_have_all and asked != got:
            message = f"{asked} tokens were asked for, {got} came ({outcome.finish_reason})"
            return Failure(200, "wrong_token_count", f"{message}; --no-ignore-eos allows it")
        return None

    def _parse(self, payload: bytes, now: float) -> None:
        try:
            event = json.loads(payload)
            if event.get("error") is not None:
                self._error = _error_of(event, payload)
            usage = event.get("usage")
            if usage is not None:
                self._has_usage = True
                self._outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                self._outcome.output_tokens = int(usage.get("completion_tokens") or 0)
            for choice in event.get("choices") or ():
                if _has_text(choice):
                    self._outcome.token_times.append(now)
                self._outcome.finish_reason = (
                    choice.get("finish_reason") or self._outcome.finish_reason
                )
        except (ValueError, TypeError, AttributeError):
            self._error = self._error or ("bad_event", f"an event is malformed: {payload[:80]!r}")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(
        delta.get(key)
        for key in ("text", "content", "reasoning_content", "tool_calls", "token_ids")
    )


class Client:
    """Connections to one server, as many as there are requests.

    Raises:
        ServerUnreachableError: by :meth:`models`; what goes wrong later is in an outcome.
    """

    def __init__(
        self,
        base_url: str,
        *,
        endpoint: Endpoint = "completions",
        api_key: str | None = None,
        timeout_s: float = 900.0,
        num_retries: int = 0,
        must_have_all: bool = True,
    ) -> None:
        """Connect when the first request is sent; must be made on the event loop.

        ``num_retries`` is how often a request is sent again after a 429 or 503;
        ``must_have_all`` whether an answer of another length than asked for is a failure.
        """
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._url = self._root + _PATHS[endpoint]
        self._num_retries = num_retries
        self._must_have_all = must_have_all
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=30.0),
            headers=headers,
        )

    async def __aenter__(self) -> Self:
        """Enter a context that ends with the connections closed."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._session.close()

    async def models(self) -> list[str]:
        """Names of the models that the server has; none where it does not tell.

        Raises:
            ServerUnreachableError: there is no server, or it does not let us in.
        """
        try:
            async with self._session.get(f"{self._root}/v1/models") as reply:
                if reply.status in (401, 403):
                    raise ServerUnreachableError(
                        f"{self._root} answers {reply.status} to /v1/models; give an --api-key "
                        "that it knows"
                    )
                if reply.status != 200:
                    return []
                data = json.loads(await reply.read())
                return [str(model["id"]) for model in data["data"]]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerUnreachableError(
                f"no server answers at {self._root}: {_told(error)}"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ServerUnreachableError(
                f"{self._root}/v1/models is not what an OpenAI-compatible server says; is this "
                "the right --base-url?"
            ) from None

    async def send(self, request: Request, lateness: float | None = None) -> Outcome:
        """Send a request and read its answer; whatever goes wrong is in the outcome."""
        outcome = Outcome(
            request, time.perf_counter(), lateness, request_class=request.request_class
        )
        while True:
            failure = await self._attempt(request, outcome)
            if (
                failure is None
                or failure.status not in _RETRIED
                or len(outcome.refusals) == self._num_retries
            ):
                break
            outcome.refusals.append(failure)
            wait_s = failure.retry_after_s
            wait_s = _DEFAULT_RETRY_AFTER_S if wait_s is None else wait_s
            await asyncio.sleep(min(wait_s, _LONGEST_RETRY_AFTER_S))
        outcome.failure = failure
        outcome.ended_at = outcome.ended_at or time.perf_counter()
        return outcome

    async def _attempt(self, request: Request, outcome: Outcome) -> Failure | None:
        reader = AnswerReader(outcome)
        status = None
        try:
            async with self._session.post(
                self._url, data=request.body, headers=request.headers
            ) as reply:
                status = reply.status
                outcome.request_class = reply.headers.get(_CLASS_HEADER, request.request_class)
                if status != 200:
                    return _refusal(reply, await reply.read())
                outcome.queue_time = _seconds(reply.headers.get(_QUEUE_TIME_HEADER), 1e-3)
                content = reply.content
                while data := await content.readany():
                    reader.feed(data, time.perf_counter())
        except TimeoutError:
            return Failure(status, "timeout", "the answer did not end before --timeout")
        except aiohttp.ClientConnectorError as error:
            return Failure(None, "connection_failed", _told(error))
        except (aiohttp.ClientError, OSError) as error:
            return Failure(status, "connection_broken", _told(error))
        return reader.finish(must_have_all=self._must_have_all)


def _refusal(reply: aiohttp.ClientResponse, body: bytes) -> Failure:
    try:
        code, message = _error_of(json.loads(body), body)
    except (ValueError, AttributeError):
        code, message = "http_error", body[:200].decode(errors="replace")
    return Failure(reply.status, code, message, _seconds(reply.headers.get("Retry-After"), 1.0))


def _error_of(event: dict[str, Any], raw: bytes) -> tuple[str, str]:
    """Stable name and message of an error in OpenAI's shape, or of something like it."""
    error = event.get("error")
    if not isinstance(error, dict):
        return "http_error", raw[:200].decode(errors="replace")
    code = error.get("code") or error.get("type") or "http_error"
    return str(code), str(error.get("message", ""))[:200]


def _seconds(header: str | None, unit: float) -> float | None:
    try:
        return None if header is None else float(header) * unit
    except ValueError:
        return None


def _told(error: BaseException) -> str:
    cause = getattr(error, "os_error", None) or error
    number = getattr(cause, "errno", None)
    if isinstance(number, int) and number in errno.errorcode:
        return os.strerror(number).lower()
    return str(cause) or type(cause).__name__
