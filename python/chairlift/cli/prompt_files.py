"""Files of prompts and files of answers, both JSON Lines.

A line of prompts is a string, ``{"prompt": ...}``, ``{"messages": [...]}``, or one of OpenAI's
batch files, whose ``body`` is one of the two. Beside them stand an ``id`` and sampling parameters
of the line's own. A line is named by its number from 0, its *index*; the file of answers keeps it,
and so tells which lines are done when the same command runs again.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from chairlift.errors import ConfigError, InvalidRequestError
from chairlift.sampling import SamplingParams

LineId = str | int | None

_FIRST_KEY = b'{"index": '
"""How every line of answers begins."""
_NOT_PER_LINE = ("n", "logprobs", "prompt_logprobs")
_OVERRIDES = tuple(
    field.name for field in fields(SamplingParams) if field.name not in _NOT_PER_LINE
)
_UNSUPPORTED = ("tools", "functions", "response_format", "logprobs", "prompt_logprobs")
"""Would change the answer, so a line that has one must not pass as if it had not."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One request of a file."""

    index: int
    """Number of the line, from 0."""
    id: LineId
    prompt: str | list[int] | None
    """Text or token ids; None where there are messages."""
    messages: list[Mapping[str, object]] | None
    is_raw: bool
    """Whether the text is continued as it is, without a chat template."""
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that no request can be made of."""

    index: int
    id: LineId
    error: InvalidRequestError


def read_prompts(
    lines: Iterator[bytes], params: SamplingParams, *, seed: int, is_raw: bool
) -> Iterator[PromptLine | BadLine]:
    """Parse lines one by one; blank ones are skipped, but counted.

    A line's seed is ``seed`` plus its index unless it says its own: its answer depends neither on
    the other lines nor on where a run was interrupted.
    """
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        data: object = None
        try:
            data = _parse_json(line)
            defaults = replace(params, seed=(seed + index) % 2**63)
            yield _prompt_line(index, data, defaults, is_raw=is_raw)
        except InvalidRequestError as error:
            yield BadLine(index, _id(data), error)


def _parse_json(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the line is no JSON: {error}") from None


def _prompt_line(index: int, data: object, defaults: SamplingParams, *, is_raw: bool) -> PromptLine:
    if isinstance(data, str):
        return PromptLine(index, None, data, None, is_raw, defaults)
    if not isinstance(data, dict):
        raise _bad("a line is a string or an object with 'prompt' or 'messages'")
    body = data
    if "body" in data:
        body = data["body"]
        if not isinstance(body, dict):
            raise _bad("'body' is no object")
        is_raw = is_raw or str(data.get("url", "")).endswith("/v1/completions")
    given = [name for name in ("prompt", "messages") if body.get(name) is not None]
    if len(given) != 1:
        raise _bad("a line has 'prompt' or 'messages', and not both")
    prompt, messages = body.get("prompt"), body.get("messages")
    if messages is not None and not (
        isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    ):
        raise _bad("'messages' is no list of objects with 'role' and 'content'")
    if prompt is not None and not isinstance(prompt, (str, list)):
        raise _bad("'prompt' is neither a string nor a list of token ids")
    return PromptLine(index, _id(data), prompt, messages, is_raw, _own_params(body, defaults))


def _own_params(body: Mapping[str, object], defaults: SamplingParams) -> SamplingParams:
    for name in _UNSUPPORTED:
        value = body.get(name)
        if not (value is None or value is False or value in ([], {"type": "text"})):
            raise _bad(f"{name!r} is not supported in a file of prompts; remove it")
    if body.get("n") not in (None, 1):
        raise _bad(f"n is {body['n']!r}; a line has one answer, so repeat the line instead")
    own = {name: body[name] for name in _OVERRIDES if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        own["max_tokens"] = body["max_completion_tokens"]
    biases = own.get("logit_bias")
    if isinstance(biases, dict):
        try:
            own["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        except ValueError:
            raise _bad("the keys of 'logit_bias' must be token ids") from None
    return replace(defaults, **own)  # type: ignore[arg-type] # SamplingParams checks the types


def _id(data: object) -> LineId:
    if not isinstance(data, dict):
        return None
    for name in ("id", "custom_id"):
        value = data.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return value
    return None


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="bad_line")


class AnswerFile:
    """The file that answers are appended to, one flushed line each.

    Opening it finds out what an earlier run has written and cuts off a last line that was torn when
    that run was stopped. One process at a time may have it.

    Raises:
        ConfigError: it cannot be written, another process has it, or it is a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``."""
        self.path = path
        self.num_answers = 0
        """Lines without an error, those of earlier runs included."""
        self.num_errors = 0
        self._marks = bytearray()
        """By index: 0 where no line was written, else a checksum of the line's id."""
        try:
            self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another run; wait for its end") from None
        except BaseException:
            self._file.close()
            raise

    def has(self, line: PromptLine | BadLine) -> bool:
        """Whether the answer to ``line`` is there.

        Raises:
            ConfigError: there is one to that line number, but with another id.
        """
        if line.index >= len(self._marks) or not self._marks[line.index]:
            return False
        if self._marks[line.index] != _mark(line.id):
            raise ConfigError(
                f"{self.path} answers another file: line {line.index} has the id {line.id!r} now; "
                "choose another --output"
            )
        return True

    def write(self, line: PromptLine | BadLine, answer: Mapping[str, object]) -> None:
        """Append the answer to ``line``.

        Raises:
            ConfigError: the file cannot be written; what was written before stays.
        """
        record: dict[str, object] = {"index": line.index}
        if line.id is not None:
            record["id"] = line.id
        text = json.dumps(record | dict(answer), ensure_ascii=False)
        try:
            # A lone surrogate of an id has no UTF-8; the escape is JSON's own.
            self._file.write(text.encode("utf-8", errors="backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None
        self._count(line.index, line.id, has_error="error" in answer)

    def __enter__(self) -> Self:
        """Enter a context that ends with the file closed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        end_of_whole_lines = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                if not line.startswith(_FIRST_KEY[: len(line)]):
                    raise self._foreign(number)
                break
            try:
                record = json.loads(line)
                index, has_error = record["index"], "error" in record
                self._count(index, record.get("id"), has_error=has_error)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._foreign(number) from None
            end_of_whole_lines += len(line)
        self._file.truncate(end_of_whole_lines)
        self._file.seek(0, os.SEEK_END)

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path} has a line that is no answer (line {number}); choose another --output"
        )

    def _count(self, index: int, line_id: LineId, *, has_error: bool) -> None:
        if index >= len(self._marks):
            self._marks.extend(bytes(index + 1 - len(self._marks)))
        self._marks[index] = _mark(line_id)
        self.num_errors += has_error
        self.num_answers += not has_error


def _mark(line_id: LineId) -> int:
    return 1 + zlib.crc32(repr(line_id).encode("utf-8", errors="backslashreplace")) % 255
