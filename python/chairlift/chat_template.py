"""Chat templates: messages become the prompt text, and no content can write a control token.

A template comes with a model and is not trusted: it runs in jinja2's immutable sandbox, with what
transformers gives it (``raise_exception``, ``strftime_now``, ``tojson``, loop controls, the
``generation`` tag).

**The rule for control tokens.** What a template writes itself may become control tokens; what came
with the request may not. Wherever the text of a control token begins in a message, a tool, a
document or another argument, a *guard* (one character of Linear A) is put behind its first
character before rendering, so that a template may trim or cut as it likes. After rendering the
guards break the match with the control tokens, and a normalizer removes them before the text is
encoded as ordinary characters (:meth:`chairlift.tokenizer.Tokenizer.apply_chat_template`). A string
that ends with the beginning of a control token gets a guard as well, so that two neighbours cannot
form one. The guard characters themselves are escaped in the content, so every text passes unchanged
(but where a template writes JSON with ``ensure_ascii``, a broken control token shows its guard).

Control tokens are the special ones, and those in brackets that the template names. An assistant's
message may use the latter (``<think>``, ``<tool_call>``): they are the model's own words. ``role``
is not guarded (templates build tokens from it), so only letters, digits, ``_`` and ``-`` may be in
it; a server that knows its roles restricts it further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chairlift.errors import TokenizerError

CONTENT_PART_SEPARATOR = "\n"
"""What joins the text parts of one message (vLLM's rule)."""

GUARD = "\U00010767"
"""Breaks the text of a control token; removed before encoding. Printable, so ``repr`` keeps it."""
ESCAPE = "\U00010766"
"""Begins an escaped literal guard or escape."""
ESCAPED_GUARD = ESCAPE + "0"
ESCAPED_ESCAPE = ESCAPE + "1"

Message = Mapping[str, object]

_ROLE = re.compile(r"[A-Za-z0-9_-]+")


class _TemplateRefusalError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training: here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateRefusalError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, do not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template, and the control tokens that content must not write."""

    def __init__(
        self, source: str, *, special_tokens: Iterable[str], other_added_tokens: Iterable[str]
    ) -> None:
        """Compile ``source``.

        Raises:
            TokenizerError: ``bad_chat_template``, with the line.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template does not parse: line {error.lineno}: {error.message}",
                code="bad_chat_template",
            ) from error
        special = {token for token in special_tokens if len(token) > 1}
        named = {
            token
            for token in other_added_tokens
            if re.fullmatch(r"[<\[].+[>\]]", token, re.DOTALL) and token in source
        }
        self.control_tokens = frozenset(special | named)
        self._guard_special = _Guard(special)
        self._guard_all = _Guard(special | named)

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, object]
    ) -> tuple[str, bool]:
        """Render the prompt text; the flag says whether it holds guards and escapes.

        ``variables`` are further names for the template; those that hold the model's own control
        tokens (``bos_token``) must be given as :class:`Trusted`.

        Raises:
            TokenizerError: ``chat_template_refused`` with the template's own words,
                ``chat_template_failed``, or ``bad_chat_messages``.
        """
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        guarded = any(
            _any_string(message, self._guard_of(message).is_needed) for message in plain
        ) or _any_string(variables, self._guard_all.is_needed)
        if guarded:
            plain = [
                {
                    key: value if key == "role" else _map(value, self._guard_of(message).apply)
                    for key, value in message.items()
                }
                for message in plain
            ]
            variables = _map_items(variables, self._guard_all.apply)
        names = {
            key: value.text if isinstance(value, Trusted) else value
            for key, value in variables.items()
        }
        try:
            return self._template.render(names | {"messages": plain}), guarded
        except _TemplateRefusalError as error:
            message = str(error).replace(GUARD, "")
            raise TokenizerError(
                f"the chat template refused the messages: {message}", code="chat_template_refused"
            ) from error
        except Exception as error:  # whatever a template's own code can raise
            message = str(error).replace(GUARD, "")
            raise TokenizerError(
                f"the chat template failed on these messages: {message}",
                code="chat_template_failed",
            ) from error

    def _guard_of(self, message: Message) -> _Guard:
        return self._guard_special if message["role"] == "assistant" else self._guard_all


class Trusted:
    """A text from the model's own files: it may become control tokens."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        """Mark ``text``."""
        self.text = text


class _Guard:
    """Breaks the text of given control tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(tokens)
        firsts = "".join(sorted({re.escape(token[0]) for token in self._tokens}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")  # `(?!)` never matches
        self._beginnings = {token[:end] for token in self._tokens for end in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=0)

    def _places(self, text: str) -> Iterator[int]:
        """Where a control token begins, or one that the end of the text (spaces aside) cuts off."""
        end = len(text.rstrip())
        for match in self._first.finditer(text):
            begin = match.start()
            if text.startswith(self._tokens, begin) or (
                end - begin < self._longest and text[begin:end] in self._beginnings
            ):
                yield begin

    def is_needed(self, text: str) -> bool:
        """Whether the text holds a control token, or ends with the beginning of one."""
        return next(self._places(text), None) is not None

    def apply(self, text: str) -> str:
        """Escape literal guards; put a guard behind the first character of each control token."""
        cuts = [0, *(place + 1 for place in self._places(text)), len(text)]
        return GUARD.join(_escape(text[begin:end]) for begin, end in pairwise(cuts))


def _escape(text: str) -> str:
    return text.replace(ESCAPE, ESCAPED_ESCAPE).replace(GUARD, ESCAPED_GUARD)


def _any_string(value: object, check: Callable[[str], bool]) -> bool:
    """Whether any string inside plain JSON data passes ``check``."""
    if isinstance(value, str):
        return check(value)
    if isinstance(value, Mapping):
        return any(_any_string(part, check) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return any(_any_string(item, check) for item in value)
    return False


def _map(value: object, change: Callable[[str], str]) -> object:
    """Plain JSON data with every string (keys too) changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return _map_items(value, change)
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return value


def _map_items(mapping: Mapping[str, object], change: Callable[[str], str]) -> dict[str, object]:
    return {change(key): _map(item, change) for key, item in mapping.items()}


def _plain_message(index: int, message: Message) -> dict[str, object]:
    """Join text parts, make null content empty, drop other nulls.

    Many templates crash on a null or print it as ``None``.
    """
    if not isinstance(message, Mapping):
        raise _bad_message(index, f"is a {type(message).__name__}: give a role and a content")
    role = message.get("role")
    if not isinstance(role, str):
        raise _bad_message(index, "has no role: give one, for example user")
    if not _ROLE.fullmatch(role):
        shown = repr(role) if len(role) <= 80 else f"{role[:77]!r}..."
        raise _bad_message(
            index, f"has the role {shown}: only letters, digits, '_' and '-' may be in it"
        )
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list | tuple):
        content = CONTENT_PART_SEPARATOR.join(_part_text(index, part) for part in content)
    elif not isinstance(content, str):
        raise _bad_message(index, "has content that is neither a string nor a list of parts")
    plain = {key: value for key, value in message.items() if value is not None}
    return plain | {"content": content}


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise _bad_message(index, f"has a content part of type {kind}: only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad_message(index, "has a text part without text")
    return text


def _bad_message(index: int, problem: str) -> TokenizerError:
    return TokenizerError(f"message {index} {problem}", code="bad_chat_messages")
