"""Uvicorn's HTTP protocol with two things that a server of streams needs.

A bound on the head of a request, and a way to drop a connection whose client does not read: closing
it would wait for the client to read what was written.
"""

from __future__ import annotations

from chairlift.server.unread import DroppingUnread

MOST_HEAD_BYTES = 256 * 2**10
"""Longest request line with headers; uvicorn has no bound of its own."""
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)
_BODY = (
    b'{"error": {"message": "the headers are longer than %d bytes", '
    b'"type": "invalid_request_error", "param": null, "code": "headers_too_large"}}'
) % MOST_HEAD_BYTES


class Connection(DroppingUnread):
    """A client's connection."""

    _head_bytes = 0
    _is_in_head = False

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True
        self.scope["chairlift.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LONG % (len(_BODY), _BODY))
                self.transport.close()
