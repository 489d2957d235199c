"""Prompts in the forms that a caller may give: text, token ids, or a dictionary that says which."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from chairlift.errors import InvalidRequestError

if TYPE_CHECKING:
    from chairlift.engine import TokenizerLike


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Requests share prefix-cache entries only with requests of the same salt."""
    add_special_tokens: NotRequired[bool]
    """Whether the tokenizer adds what its own rules say, such as a bos; it does by default."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


class ChatPrompt(TypedDict):
    """A prompt as the messages of a chat, which the model's template makes text of."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: NotRequired[bool]
    """Whether the template begins the answer; it does by default."""
    add_special_tokens: NotRequired[bool]
    """Whether the tokenizer adds what its own rules say to what the template writes (but never a
    second bos); it does not by default."""
    chat_template_kwargs: NotRequired[Mapping[str, object]]
    """Further variables of the template."""
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | ChatPrompt
"""One prompt."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt whose form is known: ``text``, ``messages``, or else ``token_ids``."""

    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    messages: Sequence[Mapping[str, Any]] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    """For ``text``."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, for ``messages``."""

    def is_longer_than(self, num_characters: int) -> bool:
        """Whether there is about more text than that to tokenise; no more is looked at."""
        if self.messages is not None:
            return _left_of(num_characters, (self.messages, self.template_options)) < 0
        return self.text is not None and len(self.text) > num_characters

    def tokenise(self, tokenizer: TokenizerLike) -> list[int]:
        """Token ids of the prompt.

        Raises:
            TokenizerError: there is text that cannot be tokenised, or the template refuses.
        """
        if self.messages is not None:
            return tokenizer.apply_chat_template(self.messages, **self.template_options)
        if self.text is None:
            return self.token_ids
        if self.add_special_tokens:
            return tokenizer.encode(self.text)
        return tokenizer.encode(self.text, add_special_tokens=False)


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Tell the form of a prompt.

    Raises:
        InvalidRequestError: ``invalid_prompt``.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    return ParsedPrompt(token_ids=_token_ids(prompt))


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


_FORMS = {
    "prompt": ("add_special_tokens",),
    "prompt_token_ids": (),
    "messages": ("add_generation_prompt", "add_special_tokens", "chat_template_kwargs"),
}
"""What may stand beside the key that tells the form, and beside ``cache_salt``."""


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    forms = [name for name in _FORMS if name in prompt]
    beside = _FORMS[forms[0]] if len(forms) == 1 else ()
    if len(forms) != 1 or prompt.keys() - {forms[0], "cache_salt", *beside}:
        raise _invalid(
            "a prompt dictionary has one of 'prompt', 'prompt_token_ids' and 'messages', and "
            f"optionally 'cache_salt'; this one has {sorted(map(str, prompt))}"
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise _invalid(f"cache_salt must be a string, not {_kind(salt)}")
    for name in ("add_special_tokens", "add_generation_prompt"):
        if not isinstance(prompt.get(name, True), bool):
            raise _invalid(f"{name} must be True or False, not {_kind(prompt[name])}")
    if "prompt_token_ids" in prompt:
        return ParsedPrompt(token_ids=_token_ids(prompt["prompt_token_ids"]), cache_salt=salt)
    if "messages" in prompt:
        messages = prompt["messages"]
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise _invalid(f"'messages' must be a list of messages, not {_kind(messages)}")
        options = template_options(
            prompt.get("add_generation_prompt", True),
            prompt.get("chat_template_kwargs"),
            add_special_tokens=prompt.get("add_special_tokens", False),
        )
        return ParsedPrompt(messages=messages, cache_salt=salt, template_options=options)
    text = prompt["prompt"]
    if not isinstance(text, str):
        raise _invalid(f"'prompt' must be a string, not {_kind(text)}")
    special = prompt.get("add_special_tokens", True)
    return ParsedPrompt(text, cache_salt=salt, add_special_tokens=special)


def template_options(
    add_generation_prompt: bool,
    further: Mapping[str, object] | None,
    *,
    add_special_tokens: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for ``apply_chat_template``.

    Raises:
        InvalidRequestError: a name is not text, or is an argument's own.
    """
    options: dict[Any, Any] = {"add_generation_prompt": add_generation_prompt}
    options |= further or {}
    for name in options:
        if not isinstance(name, str) or name in ("self", "messages", "add_special_tokens"):
            raise InvalidRequestError(
                f"chat_template_kwargs must not have {name!r}; its keys are names of the template",
                code="invalid_parameter",
            )
    if add_special_tokens:
        options["add_special_tokens"] = True
    return options


def _left_of(num_characters: int, value: object) -> int:
    """What is left of so many characters beside about the text that a template can make of a value;
    once it is negative, nothing more is counted."""
    if isinstance(value, str):
        return num_characters - len(value)
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = itertools.chain.from_iterable(value.items())
    elif isinstance(value, Sequence):
        parts = value
    left = num_characters - 1
    for part in parts:
        left = _left_of(left, part)
        if left < 0:
            break
    return left


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
