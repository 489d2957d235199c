"""Answers that were written to the end and are left unread.

Closing a connection waits until its client has read what was written, so one that never reads would
be kept for ever, with its answer.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class DroppingUnread(HttpToolsProtocol):
    """Drops a connection that reads nothing of a whole answer for as long as one may be idle."""

    def on_response_complete(self) -> None:
        """An answer was written."""
        super().on_response_complete()
        self._look_later(self.transport.get_write_buffer_size())

    def _look_later(self, num_unread: int) -> None:
        if num_unread > 0:
            self.loop.call_later(self.timeout_keep_alive, self._look_again, num_unread, self.cycle)

    def _look_again(self, before: int, cycle: object) -> None:
        if self.cycle is not cycle:
            return  # another answer is on its way
        num_unread = self.transport.get_write_buffer_size()
        if num_unread >= before > 0:
            self.transport.abort()
        else:
            self._look_later(num_unread)
