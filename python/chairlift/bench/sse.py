"""Server-sent events as OpenAI's API writes them: each ``data:`` line is one event."""

from __future__ import annotations

DONE = b"[DONE]"
"""The event that ends a stream."""


class EventParser:
    """Cuts the bytes of a stream into the payloads of its events, wherever they were torn."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are whole now. Comments and other fields are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
