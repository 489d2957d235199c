"""Errors of the engine and of the server as HTTP: one place for statuses, bodies and headers.

The body is OpenAI's: ``{"error": {"message", "type", "param", "code"}}``. Nothing internal is told:
what an executor or the server itself raised is logged, and the client reads a general sentence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from chairlift.errors import (
    ChairliftError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RateLimitError,
    RequestFailedError,
    TokenizerError,
    TryLaterError,
)

logger = logging.getLogger("chairlift.server")

T = TypeVar("T")
_ANSWER_TIMEOUT_S = 5.0
INVALID = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELD = re.compile(r"(?:token id \S+ in )?([a-z][a-z_]*) (?:is|must|has) ")
_FIELDS = {
    "too_many_answers": "n",
    "unknown_class": "service_tier",
    "stop_string_empty": "stop",
    "too_many_stop_strings": "stop",
    "stop_strings_too_long": "stop",
}
"""By code, the field that a message does not begin with."""
_SUPPLIED_TEXT = ("bad_text", "bad_chat_messages", "chat_template_refused", "chat_template_failed")
"""Codes of a tokenizer's errors that are about the request, not about the model."""


class HttpError(Exception):
    """An answer that is no success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what the client is told. ``retry_after`` is in seconds."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> bytes:
        """The JSON of the body, valid and ASCII whatever the message holds."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, INVALID),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


def invalid(param: str | None, message: str, code: str | None = "invalid_parameter") -> HttpError:
    """A request that names something that cannot be."""
    return HttpError(400, message, code=code, param=param)


def too_long(field: str, length: str, max_model_len: int) -> HttpError:
    """A prompt that leaves no room for an answer, in the core's words."""
    return invalid(
        field,
        f"the prompt is too long: it has {length}, but the model's maximum context length is "
        f"{max_model_len} tokens, at least one of them for the output; shorten the prompt or raise "
        "max_model_len",
        "context_length_exceeded",
    )


def closed(why: str, *, code: str, retry_after: float = 5.0) -> HttpError:
    """The server takes no requests now."""
    return HttpError(503, why, code=code, retry_after=retry_after)


def shut_down() -> HttpError:
    """It is shutting down."""
    return closed("the server is shutting down; use another", code="draining")


async def answer_of(question: Awaitable[T]) -> T:
    """Wait for what the engine is asked about itself.

    It answers at once, also while a step runs; if its process is stopped it answers nobody, and who
    asks must be told.

    Raises:
        HttpError: 503.
    """
    try:
        return await asyncio.wait_for(question, _ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise closed("the engine does not answer", code="engine_stalled") from None


def as_http(error: Exception, *, prompt_field: str, renames: Mapping[str, str]) -> HttpError:
    """Translate what the engine raised.

    ``prompt_field`` is what the request calls its prompt; ``renames`` says which of its fields
    stands behind a parameter of the engine, where the names differ.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ChairliftError):
        return _of_engine(error, prompt_field, renames)
    logger.error("an exception that nobody expected", exc_info=error)
    return HttpError(500, "the server failed on this request", code="internal_error")


def _of_engine(error: ChairliftError, prompt_field: str, renames: Mapping[str, str]) -> HttpError:
    message = str(error)
    if isinstance(error, ContextLengthError) or error.code in ("empty_prompt", "invalid_prompt"):
        return invalid(prompt_field, message, error.code)
    if isinstance(error, InvalidRequestError | ConfigError):
        return _invalid_field(error, prompt_field, renames)
    if isinstance(error, TokenizerError):
        return _tokenizer_error(error, prompt_field)
    if isinstance(error, TryLaterError):
        return HttpError(
            _later_status(error),
            message,
            code=error.code,
            retry_after=1.0 if error.retry_after is None else error.retry_after,
        )
    return _failure(error)


def _failure(error: ChairliftError) -> HttpError:
    """What no client can cause: the log has the reason."""
    logger.error("a request failed: %s", error)
    if isinstance(error, EngineDeadError):
        return closed("the engine has ended; the server will stop", code=error.code)
    if isinstance(error, RequestFailedError):
        return HttpError(500, "the model failed on this request; retry it", code=error.code)
    return HttpError(500, "the server failed on this request", code=error.code)


def _later_status(error: TryLaterError) -> int:
    if isinstance(error, QueueFullError | RateLimitError):
        return 429
    return 504 if isinstance(error, QueueTimeoutError) else 503


def _invalid_field(
    error: ChairliftError, prompt_field: str, renames: Mapping[str, str]
) -> HttpError:
    """Find the field at the beginning of the message; give it the name that the request has."""
    message = str(error)
    match = _FIELD.match(message)
    if match is None:
        return invalid(_FIELDS.get(error.code), message, error.code)
    name = match[1]
    known = {"prompt": prompt_field, "token_ids": prompt_field, **renames}.get(name, name)
    if known != name:
        message = f"{message[: match.start(1)]}{known}{message[match.end(1) :]}"
    return invalid(known, message, error.code)


def _tokenizer_error(error: TokenizerError, prompt_field: str) -> HttpError:
    if error.code in _SUPPLIED_TEXT:
        return invalid(prompt_field, str(error), error.code)
    if error.code == "no_chat_template":
        return invalid("messages", str(error), error.code)
    logger.error("the tokenizer failed: %s", error)
    return HttpError(500, "the tokenizer failed on this request", code=error.code)
