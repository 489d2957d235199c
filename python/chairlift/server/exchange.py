"""One request for generation, from its headers to the end of its answer.

An exchange is an ASGI application of its own, so that nothing stands between a token and the
socket. It reads and checks the body, watches for the client's leaving, for a client that does not
read, for the time limit and for the end of a drain, and cuts the work short for each: cancelling it
aborts the request wherever it is. Whatever happens, the client gets an end.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from starlette.responses import Response

from chairlift.request_args import RequestOptions
from chairlift.server.body import INLINE_BYTES, ClientGoneError, Message, Receive, parse_body
from chairlift.server.errors import HttpError, as_http, invalid, shut_down
from chairlift.server.generation import Generation
from chairlift.server.logs import RequestRecord, requests_logger
from chairlift.server.protocol import GenerationRequest, read_request
from chairlift.server.sse import DONE, error_event
from chairlift.server.tenants import choose_class

if TYPE_CHECKING:
    from starlette.types import Scope

    from chairlift.async_engine import AsyncEngine
    from chairlift.server.service import Service
    from chairlift.server.usage import TenantUsage

Send = Callable[[Message], Awaitable[None]]
RequestT = TypeVar("RequestT", bound=GenerationRequest)
T = TypeVar("T")

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_MOST_ID_CHARACTERS = 128
INLINE_ENTRIES = 4_000
"""Log-probabilities and ids up to which an answer is written on the event loop."""
_CATCH_UP_S = 0.5
"""How long a client that is behind when its request is cut short has to catch up with its stream:
less than a shutdown waits for last words."""

DISCONNECTED = "disconnected"
SLOW_READER = "slow reader"
TIMED_OUT = "timed out"
SHUT_DOWN = "shut down"


class Exchange(Response, Generic[RequestT]):
    """Serves one request; ``answer`` does what is particular to its endpoint."""

    def __init__(
        self,
        service: Service,
        kind: type[RequestT],
        answer: Callable[[Exchange[RequestT], RequestT], Awaitable[None]],
    ) -> None:
        """Prepare; nothing happens until it is called."""
        self.background = None
        self.service = service
        self.renames: Mapping[str, str] = {}
        """Names of the request's fields behind the engine's parameters, where they differ."""
        self.is_long = False
        """Whether the body is too long for :meth:`work` to be done on the event loop."""
        self._kind = kind
        self._answer = answer
        self._task: asyncio.Task[None] | None = None
        self._interruption: str | None = None
        self._is_started = False
        self._is_stream = False
        self._is_complete = False
        self._blocked_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        self._arrival = time.monotonic()
        self._send = send
        self._abort_connection = scope.get("chairlift.abort")
        self.headers_in = dict(scope["headers"])
        client = scope.get("client")
        self.record = RequestRecord(
            request_id=_request_id(self.headers_in.get(b"x-request-id")),
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else None,
        )
        self._task = asyncio.current_task()
        self.service.enter(self)
        timers = self._set_timers()
        try:
            await self._serve(receive)
        except asyncio.CancelledError:
            if self._interruption is None or self._task is None:
                raise
            self._task.uncancel()
            await self._end_early(self._interruption)
        except ClientGoneError:
            self.record.outcome = DISCONNECTED
        except Exception as error:
            await self._tell(self._translate(error))
        finally:
            self._is_complete = True
            for timer in timers:
                timer.cancel()
            self.service.leave(self)
            self._count()
            self._log()

    @property
    def engine(self) -> AsyncEngine:
        """The engine, if it takes requests."""
        return self.service.open_engine()

    def interrupt(self, reason: str) -> None:
        """Cut the work short, if it is not done."""
        if self._interruption is None and not self._is_complete and self._task is not None:
            self._interruption = reason
            self._task.cancel()

    def options(self, request: RequestT) -> RequestOptions:
        """Who asks, for the engine.

        Raises:
            HttpError: 400, a field or header cannot be.
        """
        request_class = choose_class(request.service_tier, self._caller, self.service.policy)
        options: RequestOptions = {"tenant": self._caller.tenant, "request_class": request_class}
        if request.user:
            options["user"] = request.user
        deadlines = [] if request.deadline_ms is None else [request.deadline_ms]
        header = self.headers_in.get(b"x-request-deadline-ms")
        if header is not None:
            deadlines.append(_deadline(header))
        if deadlines:
            options["deadline"] = min(deadlines) / 1e3
        return options

    async def work(self, work: Callable[[], T]) -> T:
        """Do work that grows with the body: on a thread if that is long."""
        return await asyncio.to_thread(work) if self.is_long else work()

    async def started(self, generation: Generation) -> None:
        """Wait until the engine has scheduled all of it; what it says goes into the headers."""
        await generation.start()
        record = self.record
        record.queue_time = generation.queue_time
        numbers = [stream.engine_request_id for stream in generation.streams]
        record.engine_requests = [number for number in numbers if number is not None]
        record.request_class = generation.streams[0].request_class
        record.prompt_tokens = generation.num_prompt_tokens
        record.cached_tokens = generation.num_cached_tokens

    @property
    def usage(self) -> TenantUsage:
        """Where the tenant's tokens are counted."""
        return self.service.usage.of(self._caller.tenant)

    async def send_json(
        self,
        content: Callable[[], Mapping[str, object]],
        generation: Generation,
        *,
        is_long: bool = False,
    ) -> None:
        """Send a whole answer; it is written on a thread if it has much to say of each token."""
        self.record.completion_tokens = generation.num_output_tokens
        if generation.num_entries <= INLINE_ENTRIES and not is_long:
            body = json.dumps(content()).encode("ascii")
        else:
            body = await asyncio.to_thread(lambda: write_long(content()))
        await self._send_whole(200, body, {})

    async def begin_stream(self) -> None:
        """Send the status line of a stream."""
        self._is_stream = True
        self.service.http.open_streams += 1
        await self._start(200, _EVENTS)

    async def send_chunk(self, data: bytes) -> None:
        """Send an event; waits while the client is behind."""
        await self._push({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, generation: Generation) -> None:
        """Send ``[DONE]`` and the end of the body."""
        self.record.completion_tokens = generation.num_output_tokens
        self._is_complete = True
        await self._push({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _serve(self, receive: Receive) -> None:
        service = self.service
        caller = self._caller = service.caller(self.headers_in)
        self.record.tenant = caller.tenant
        service.usage.of(caller.tenant).requests += 1
        service.open_engine()
        body = await service.read_body(receive, self.headers_in)
        self.is_long = len(body) > INLINE_BYTES
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            request = await parse_body(body, lambda data: read_request(self._kind, data))
            del body
            self.record.model = service.check_model(request.model)
            self.record.stream = request.stream
            await self._answer(self, request)
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Notice that the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(DISCONNECTED)

    def _set_timers(self) -> list[_Timer]:
        settings = self.service.settings
        timers = [_Timer(settings.slow_reader_timeout, self._check_reader)]
        if settings.request_timeout is not None:
            timers.append(_Timer(settings.request_timeout, lambda: self.interrupt(TIMED_OUT)))
        return timers

    def _check_reader(self) -> float | None:
        """Drop a client that has not read for too long; returns when to look again."""
        limit = self.service.settings.slow_reader_timeout
        since = self._blocked_since
        waited = 0.0 if since is None else time.monotonic() - since
        if waited < limit:
            return limit - waited
        if self._is_complete or self._interruption is not None:
            self._drop()  # even the end of its answer is left unread
        else:
            self.interrupt(SLOW_READER)
        return None

    async def _end_early(self, reason: str) -> None:
        self.record.outcome = reason
        if reason == SHUT_DOWN:
            await self._tell(shut_down())
        elif reason == TIMED_OUT:
            limit = self.service.settings.request_timeout
            await self._tell(
                HttpError(
                    504,
                    f"the request took longer than the {limit:g} s that this server allows",
                    code="request_timeout",
                )
            )
        elif reason == SLOW_READER:
            self._drop()

    async def _tell(self, error: HttpError) -> None:
        """Answer with an error: as a response if nothing was sent, else as the last event."""
        record = self.record
        if record.outcome == "done":
            record.outcome = "failed" if self._is_started else "refused"
        record.error = error.code
        if record.tenant is not None:
            self.service.usage.of(record.tenant).refused += 1
        self._is_complete = True
        try:
            # One that is behind may only be slow.
            async with asyncio.timeout(None if self._blocked_since is None else _CATCH_UP_S):
                await self._send_error(error)
        except TimeoutError:
            self._drop()

    async def _send_error(self, error: HttpError) -> None:
        if not self._is_started:
            await self._send_whole(error.status, error.body(), error.headers)
            return
        end = {"body": error_event(error.body()), "more_body": False}
        await self._push({"type": "http.response.body", **end})

    def _drop(self) -> None:
        """Close the connection without waiting for what is unread."""
        if self._abort_connection is not None:
            self._abort_connection()

    async def _send_whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        extra = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, (_JSON, length, *extra))
        self._is_complete = True
        await self._push({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        record = self.record
        own = [(b"x-request-id", record.request_id.encode("ascii"))]
        if record.queue_time is not None:
            own.append((b"x-queue-time-ms", b"%.3f" % (record.queue_time * 1e3)))
        if record.request_class is not None:
            own.append((b"x-request-class", _header_text(record.request_class)))
        record.status = status
        record.first_byte = time.monotonic() - self._arrival
        await self._push(
            {"type": "http.response.start", "status": status, "headers": [*headers, *own]}
        )
        self._is_started = True

    async def _push(self, message: Message) -> None:
        """Send a part of the answer; waits while the client is behind."""
        self._blocked_since = time.monotonic()
        await self._send(message)
        self._blocked_since = None

    def _translate(self, error: Exception) -> HttpError:
        return as_http(error, prompt_field=self._kind.prompt_field, renames=self.renames)

    def _count(self) -> None:
        http, record = self.service.http, self.record
        http.count(record.method, record.path, record.status)
        http.open_streams -= self._is_stream
        http.disconnects += record.outcome == DISCONNECTED
        http.dropped_readers += record.outcome == SLOW_READER

    def _log(self) -> None:
        if self.service.settings.log_requests:
            self.record.duration = time.monotonic() - self._arrival
            requests_logger.info(self.record.line())


def write_long(content: Mapping[str, object]) -> bytes:
    """JSON, written piece by piece: ``json.dumps`` would hold the interpreter's lock throughout."""
    return "".join(json.JSONEncoder().iterencode(content)).encode("ascii")


class _Timer:
    """Calls back after a time, and again where the callback returns a delay."""

    def __init__(self, delay: float, callback: Callable[[], float | None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(delay, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        delay = self._callback()
        if delay is not None:
            self._handle = self._loop.call_later(delay, self._fire)


def new_id(kind: str) -> str:
    """A fresh id of a response."""
    return f"{kind}-{uuid.uuid4().hex}"


def _request_id(given: bytes | None) -> str:
    """The client's own id if it is short and printable ASCII, else a new one."""
    is_fit = given is not None and 1 <= len(given) <= _MOST_ID_CHARACTERS
    if given is not None and is_fit and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode("ascii")
    return new_id("req")


def _deadline(header: bytes) -> float:
    try:
        milliseconds = float(header)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < float("inf"):
        raise invalid(
            "X-Request-Deadline-Ms",
            "the header X-Request-Deadline-Ms must be a number of milliseconds of at least 0",
        )
    return milliseconds


def _header_text(name: str) -> bytes:
    """A class's name as a header may hold it."""
    return "".join(x if x.isascii() and x.isprintable() else "?" for x in name).encode("ascii")
