"""Uvicorn's HTTP protocol with what a server of streams needs beside it.

Bounds on the head of a request, in bytes and in time; errors that are JSON; a way to drop a
connection whose client does not read, as closing it would wait for the client to read what was
written; and a client that left is noticed by the request that is served, though others were sent
behind it.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from chairlift.server.errors import INVALID
from chairlift.server.unread import DroppingUnread

MOST_HEAD_BYTES = 256 * 2**10
"""Longest request line with headers; uvicorn has no bound of its own."""
HEAD_TIMEOUT_S = 60.0
"""How long a client may take to send it; uvicorn has no bound of its own here either."""
_MOST_WAITING = 16
"""Requests that may wait on one connection before it is no longer read."""
_REFUSAL = (
    b"HTTP/1.1 %b\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)


class Connection(DroppingUnread):
    """A client's connection."""

    _head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: so uvicorn tells the last of its requests, and the one that is served hears
        it here."""
        self._stop_head_timer()
        super().connection_lost(exc)
        self._tell_served()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True
        self._await_head()
        self.scope["chairlift.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MOST_WAITING:
            self.flow.resume_reading()  # or nobody would see that the client leaves

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(
                    b"431 Request Header Fields Too Large",
                    f"the headers are longer than {MOST_HEAD_BYTES} bytes",
                    "headers_too_large",
                )

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(b"400 Bad Request", "this is no HTTP request", "invalid_http")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, status: bytes, message: str, code: str) -> None:
        """Say what is wrong with the connection, and close it. An answer under way is cut."""
        if self._may_answer():
            error = {"message": message, "type": INVALID, "param": None, "code": code}
            body = json.dumps({"error": error}).encode()
            self.transport.write(_REFUSAL % (status, len(body), body))
        self._tell_served()
        self.transport.close()

    def _tell_served(self) -> None:
        """Tell the request that is served that nobody is there any more."""
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()

    def _may_answer(self) -> bool:
        """Whether what is written now begins an answer, and nobody else's."""
        served = self._served
        if served is None or served.response_complete:
            return True
        return served is self.cycle and not served.response_started

    def _await_head(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        if not self._is_in_head:  # nothing was asked
            self.transport.close()
            return
        self._refuse(
            b"408 Request Timeout",
            f"the headers did not come within {HEAD_TIMEOUT_S:g} s",
            "headers_too_late",
        )
