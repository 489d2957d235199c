"""The body of a request: read within a bound, and its JSON, off the event loop where it is long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # not in the stubs
from typing import Any, TypeVar

from chairlift.server.errors import HttpError, invalid

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_MANY_PARTS = 50_000
INLINE_BYTES = 256 * 2**10
"""A body up to this long is parsed on the event loop."""


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], *, most_bytes: int, patience: float
) -> bytes:
    """Read the whole body; ``patience`` is how many seconds nothing may come.

    Raises:
        HttpError: 413, a longer one is not kept; 408, it does not come.
        ClientGoneError: the client left before its end.
    """
    length = headers.get(b"content-length", b"")
    if length.isdigit() and len(length) < 20 and int(length) > most_bytes:
        raise _too_large(int(length), most_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        try:
            async with asyncio.timeout(patience):
                message = await receive()
        except TimeoutError:
            raise HttpError(
                408,
                f"nothing of the body came for {patience:g} s",
                code="body_too_late",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > most_bytes:
            raise _too_large(num_bytes, most_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def unless(end: Awaitable[None], work: Coroutine[Any, Any, T]) -> T:
    """Do work, unless the end comes first: it raises something, and the work is cancelled."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            ending.result()
        return await working
    finally:
        working.cancel()
        if ending.done():
            ending.exception()  # it came as well: that is no news
        ending.cancel()


async def until_gone(receive: Receive) -> None:
    """Wait until the client of a body that was read leaves.

    Raises:
        ClientGoneError: it has.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


async def parse_body(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """Parse a JSON object and ``read`` it, both on a thread if it is long.

    Raises:
        HttpError: 400, or what ``read`` raises.
    """
    if len(body) <= INLINE_BYTES:
        return read(_parse(body))
    return await asyncio.to_thread(lambda: read(_parse(body, is_long=True)))


def _parse(body: bytes, is_long: bool = False) -> dict[str, Any]:
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name)

    decoder = json.JSONDecoder(parse_constant=constant, parse_int=_integer if is_long else None)
    if is_long and _has_many_parts(body):
        decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined]
    try:
        value = decoder.decode(_text(body))
    except UnicodeDecodeError as error:
        raise _bad_json(f"it is no UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _bad_json("it is nested too deeply") from None
    except ValueError:
        raise _bad_json("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _bad_json(f"it is a {_kind(value)}, and must be an object")
    for name, entry in value.items():
        if constants and isinstance(entry, float) and entry - entry != 0:
            raise invalid(name[:80], f"{name[:80]} is {constants[0]}, which is no JSON")
    if constants:
        raise _bad_json(f"it holds {constants[0]}, which is no JSON")
    return value


def _text(body: bytes) -> str:
    text = body.decode("utf-8")
    if text.startswith("\ufeff"):
        raise _bad_json("it begins with a byte order mark")
    return text


def _integer(digits: str) -> int:
    """What ``json`` would do itself; but its scanner is C and holds the interpreter's lock, and a
    call of Python now and then gives the event loop its turn."""
    return int(digits)


def _has_many_parts(body: bytes) -> bool:
    """Whether there is so much between the integers that the C scanner would hold the lock for
    long; the one in Python is slower and does not."""
    return body.count(b'"') + body.count(b"[") + body.count(b"{") > _MANY_PARTS


def _kind(value: object) -> str:
    kinds = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _bad_json(why: str) -> HttpError:
    return invalid(None, f"the body cannot be read as JSON: {why}", "invalid_json")


def _too_large(num_bytes: int, most_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"the body has {num_bytes} bytes or more, but this server takes {most_bytes} at most; send "
        "less, or raise --max-request-bytes",
        code="request_too_large",
    )
