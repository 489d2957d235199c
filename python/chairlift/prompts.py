"""Prompts in the forms that a caller may give them: text, token ids, or a dictionary of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NotRequired, TypedDict

from chairlift.errors import InvalidRequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Requests share prefix-cache entries only with requests of the same salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""One prompt."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt whose form is known: ``text``, or ``token_ids``, never both."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Tell the form of a prompt.

    Raises:
        InvalidRequestError: ``invalid_prompt``.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, [])
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    return ParsedPrompt(None, _token_ids(prompt))


def parse_prompts(prompts: object) -> list[ParsedPrompt]:
    """Parse one prompt, or a list of them; a list of integers is one prompt.

    Raises:
        InvalidRequestError: ``invalid_prompt``, with the prompt's index.
    """
    if isinstance(prompts, (str, Mapping)):
        return [parse_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise _invalid(f"prompts must be a prompt or a list of prompts, not {_kind(prompts)}")
    if prompts and isinstance(prompts[0], Integral):
        return [parse_prompt(prompts)]
    parsed = []
    for index, prompt in enumerate(prompts):
        try:
            parsed.append(parse_prompt(prompt))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {index}: {error}", code=error.code) from None
    return parsed


def _parse_mapping(prompt: Mapping[str, object]) -> ParsedPrompt:
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise _invalid(
            "a prompt dictionary has either 'prompt' or 'prompt_token_ids', and optionally "
            f"'cache_salt'; this one has {sorted(map(str, prompt))}"
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise _invalid(f"cache_salt must be a string, not {_kind(salt)}")
    if "prompt_token_ids" in prompt:
        return ParsedPrompt(None, _token_ids(prompt["prompt_token_ids"]), salt)
    text = prompt["prompt"]
    if not isinstance(text, str):
        raise _invalid(f"'prompt' must be a string, not {_kind(text)}")
    return ParsedPrompt(text, [], salt)


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _invalid(f"a prompt is text or a list of token ids, not {_kind(value)}")
    for token in value:
        if (
            isinstance(token, bool)
            or not isinstance(token, Integral)
            or not 0 <= int(token) < 2**31
        ):
            raise _invalid(f"token ids are integers from 0; {token!r} is not")
    return [int(token) for token in value]


def _kind(value: object) -> str:
    return type(value).__name__


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_prompt")
