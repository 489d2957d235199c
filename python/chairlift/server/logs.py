"""Structured logs: one JSON object a line, written by a thread of its own.

A log that nobody reads (a full pipe) must not stop the event loop: lines wait in a bounded queue,
and what does not fit is lost. A request's line holds no prompt unless it is asked for, and never a
key.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

requests_logger = logging.getLogger("chairlift.server.requests")
_MOST_WAITING = 10_000


@dataclass(slots=True)
class RequestRecord:
    """What the log says about one request; times are in seconds."""

    request_id: str
    method: str
    path: str
    client: str | None = None
    tenant: str | None = None
    request_class: str | None = None
    model: str | None = None
    stream: bool | None = None
    status: int = 0
    """0: nothing was sent."""
    outcome: str = "done"
    """``done``, ``refused``, ``disconnected``, or why it was cut short."""
    error: str | None = None
    """Its code."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_time: float | None = None
    first_byte: float | None = None
    """From arrival to the first token's bytes (or the whole answer's)."""
    duration: float = 0.0
    prompt: object = None
    engine_requests: list[int] | None = None
    """The engine's own numbers, one for each prompt, as ``chairlift explain`` takes them."""

    def line(self) -> str:
        """The JSON; what is not known is left out."""
        entry: dict[str, object] = {"event": "request", "time": round(time.time(), 3)}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None:
                entry[name] = round(value, 6) if isinstance(value, float) else value
        return json.dumps(entry)


class _DroppingHandler(logging.handlers.QueueHandler):
    """Drops what does not fit."""

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a record, or lose it."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)


@contextmanager
def logs_in_background() -> Iterator[None]:
    """Let the root logger's handlers write on a thread."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_WAITING)
    listener = logging.handlers.QueueListener(waiting, *handlers)
    root.handlers = [_DroppingHandler(waiting)]
    listener.start()
    try:
        yield
    finally:
        root.handlers = handlers
        listener.stop()
