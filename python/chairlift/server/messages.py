"""Messages of a chat: their shape, the checks, and what a chat template is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from chairlift.server.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MOST_LEVELS = 100
"""How deep JSON that is given to a chat template may be nested."""

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong entry ends the checks: to describe a million takes minutes."""


def _whole_characters(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PydanticCustomError(
                "bad_text", "it must be text without lone surrogates"
            ) from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
"""Text that has a UTF-8: JSON can name halves of characters."""


class Fields(BaseModel):
    """Strict types; null is absent; what is unknown is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class ContentPart(Fields):
    """A part of a message; only text is supported."""

    type: Text = Field(json_schema_extra={"enum": ["text"]})
    text: Text | None = None


class ChatMessage(Fields):
    """A message; what is not named here goes to the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    role: Text = Field(json_schema_extra={"enum": list(ROLES)})
    content: Text | Items[ContentPart] | None = None
    name: Text | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: Text | None = None


def is_deep(value: object) -> bool:
    """Whether JSON is nested deeper than :data:`MOST_LEVELS`."""
    layer = [value]
    for _ in range(MOST_LEVELS + 1):
        inner: list[object] = []
        for entry in layer:
            if isinstance(entry, dict):
                inner += entry.values()
            elif isinstance(entry, list):
                inner += entry
        if not inner:
            return False
        layer = inner
    return True


def shown(value: object) -> str:
    """A value as a message shows it: short, and without work for a long one."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 80 else f"{value[:77]}...")
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list) else json.dumps(value)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check what types cannot say.

    Raises:
        HttpError: 400.
    """
    if not messages:
        raise invalid("messages", "messages is empty; give at least one message")
    for index, message in enumerate(messages):
        _check_message(index, message)


def _check_message(index: int, message: ChatMessage) -> None:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise invalid(
            "messages",
            f"{where}.role is {shown(message.role)}; it must be one of {', '.join(ROLES)}",
        )
    if is_deep(message.model_extra) or is_deep(message.tool_calls):
        raise invalid("messages", f"{where} is nested deeper than {MOST_LEVELS} levels")
    content = message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(
            "messages",
            f"{where}.content is missing; only an assistant's message with tool_calls may lack it",
        )
    if isinstance(content, list):
        if not content:
            raise invalid("messages", f"{where}.content has no parts; give one, or a string")
        for place, part in enumerate(content):
            if part.type != "text" or part.text is None:
                what = "has no text" if part.type == "text" else f"is of type {shown(part.type)}"
                raise invalid(
                    "messages", f"{where}.content[{place}] {what}; only text is supported"
                )


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Messages as a template takes them: ``developer`` is ``system``, arguments are objects."""
    plain: list[dict[str, object]] = []
    for message in messages:
        entry = {"content": "", **message.model_dump(exclude_none=True)}
        if message.role == "developer":
            entry["role"] = "system"
        calls = entry.get("tool_calls")
        if calls:
            entry["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        plain.append(entry)
    return plain


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments as an object; clients send its JSON."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):  # no JSON: the template sees the text
            return call
        if not is_deep(arguments):
            return {**call, "function": {**function, "arguments": arguments}}
    return call
