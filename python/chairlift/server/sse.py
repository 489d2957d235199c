"""Server-sent events, built by hand: what a chunk has in common with the last is made once.

A stream of one answer is: the role (chat), deltas, a chunk with the finish reason and nothing else.
After all answers come the usage, if asked for, and ``[DONE]``. JSON is ASCII, so nothing in a text
can be taken for the end of an event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

compact = json.JSONEncoder(separators=(",", ":")).encode
"""JSON without spaces."""
DONE = b"data: [DONE]\n\n"


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + body + b"\n\n"


class Chunks:
    """The chunks of one response."""

    def __init__(self, head: dict[str, object], *, is_chat: bool, has_usage: bool) -> None:
        """``head`` is what all chunks begin with: id, object, created, model, fingerprint."""
        self._begin = "data: " + compact(head)[:-1] + ',"choices":['
        self._end = '],"usage":null}\n\n' if has_usage else "]}\n\n"
        self._is_chat = is_chat

    def choice(self, index: int) -> ChoiceChunks:
        """The chunks of one answer."""
        return ChoiceChunks(self._begin, self._end, index, is_chat=self._is_chat)

    def usage(self, usage: dict[str, object]) -> bytes:
        """The chunk that only tells the usage."""
        return f'{self._begin}],"usage":{compact(usage)}}}\n\n'.encode("ascii")


class ChoiceChunks:
    """The chunks of one answer: a prefix and a suffix around its text."""

    def __init__(self, begin: str, end: str, index: int, *, is_chat: bool) -> None:
        """Join what never changes."""
        content = '"delta":{"content":' if is_chat else '"text":'
        close = "}" if is_chat else ""
        nothing = '"delta":{}' if is_chat else '"text":""'
        self._before = f'{begin}{{"index":{index},{content}'
        self._after = f'{close},"logprobs":null,"finish_reason":null}}{end}'
        self._close = close
        self._end = end
        self._finish = f'{begin}{{"index":{index},{nothing},"logprobs":null'
        self._role = (
            f'{begin}{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            '"logprobs":null,"finish_reason":null'
        )

    def role(self, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The first chunk of a chat's answer."""
        ids = _ids("prompt_token_ids", prompt_token_ids)
        return f"{self._role}}}]{ids}{self._end[1:]}".encode("ascii")

    def text(self, text: str) -> bytes:
        """A delta: the one path that every token takes."""
        return (self._before + quoted(text) + self._after).encode("ascii")

    def detailed(
        self,
        text: str,
        logprobs: dict[str, object] | None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """A delta with log-probabilities or ids."""
        return (
            f'{self._before}{quoted(text)}{self._close},"logprobs":{compact(logprobs)},'
            f'"finish_reason":null{_ids("token_ids", token_ids)}'
            f"{_ids('prompt_token_ids', prompt_token_ids)}}}{self._end}"
        ).encode("ascii")

    def finish(self, reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of the answer."""
        return (
            f'{self._finish},"finish_reason":{quoted(reason)},'
            f'"stop_reason":{json.dumps(stop_reason)}}}{self._end}'
        ).encode("ascii")


def _ids(name: str, ids: Sequence[int] | None) -> str:
    return "" if ids is None else f',"{name}":{compact(list(ids))}'
