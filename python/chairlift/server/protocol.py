"""What a request may ask for: OpenAI's fields for text, vLLM's extensions, and the checks.

``null`` is the same as a field that is left out. Fields that nobody knows are ignored. Fields that
are known, not supported, and would change the answer are refused (:data:`_UNSUPPORTED`). Ranges of
sampling parameters are the core's to check, so that they are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from chairlift.sampling import SamplingParams
from chairlift.server.errors import HttpError, invalid
from chairlift.server.messages import (
    MOST_LEVELS,
    ChatMessage,
    ContentPart,
    Fields,
    Items,
    Text,
    check_messages,
    is_deep,
    shown,
)

MOST_ANSWERS = 128
"""Largest ``n``, as OpenAI's."""
MOST_ENTRIES = 1_024
"""Most entries of a list that belongs to the sampling, as the core's."""
MOST_NAMES = 1_024
"""Most names in ``chat_template_kwargs``."""

RequestT = TypeVar("RequestT", bound="Body")
Number = Annotated[float, Field(allow_inf_nan=False)]


def _from(least: float, most: float | None = None) -> dict[str, Any]:
    """A range in the description; that a value keeps to it is checked elsewhere."""
    return {"minimum": least} if most is None else {"minimum": least, "maximum": most}


class Body(Fields):
    """What every body has."""

    prompt_field: ClassVar[str]
    """The field that errors of the prompt name."""

    model: Text | None = Field(None, description="one of GET /v1/models; left out: the first")

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            HttpError: 400.
        """


class StreamOptions(Fields):
    """How a stream is told."""

    include_usage: bool = Field(False, description="one last chunk with the usage")


class GenerationRequest(Body):
    """What both endpoints have."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(
        1, description="answers to each prompt", json_schema_extra=_from(1, MOST_ANSWERS)
    )
    temperature: Number = Field(1.0, json_schema_extra=_from(0, 2))
    top_p: Number = Field(1.0, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    seed: int | None = None
    stop: Text | Items[Text] | None = None
    presence_penalty: Number = Field(0.0, json_schema_extra=_from(-2, 2))
    frequency_penalty: Number = Field(0.0, json_schema_extra=_from(-2, 2))
    logit_bias: Any = Field(
        None,
        description="by token id, from -100 to 100",
        json_schema_extra={
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number"}},
                {"type": "null"},
            ]
        },
    )
    user: Text | None = Field(None, description="a sub-flow of the tenant; shares its turn fairly")
    service_tier: Text | None = Field(None, description="auto, default, or the name of a class")
    # vLLM's extensions
    top_k: int = Field(0, json_schema_extra=_from(-1))
    min_p: Number = Field(0.0, json_schema_extra=_from(0, 1))
    repetition_penalty: Number = Field(1.0, json_schema_extra={"exclusiveMinimum": 0})
    min_tokens: int = Field(0, json_schema_extra=_from(0))
    ignore_eos: bool = False
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int = Field(0, description="order within the class; lower is sooner")
    cache_salt: Text | None = None
    # Chairlift's own
    deadline_ms: Number | None = Field(
        None, description="time to the first token after which the answer is of no use"
    )

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            HttpError: 400.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only for stream = true")
        if not 1 <= self.n <= MOST_ANSWERS:
            raise invalid("n", f"n is {shown(self.n)}; it must be from 1 to {MOST_ANSWERS}")
        for name in ("stop", "stop_token_ids", "logit_bias"):
            many = getattr(self, name)
            if isinstance(many, list | dict) and len(many) > MOST_ENTRIES:
                raise invalid(name, f"{name} has {len(many)} entries; give {MOST_ENTRIES} at most")
        if self.stop == "" or (isinstance(self.stop, list) and "" in self.stop):
            raise invalid("stop", "stop has an empty string, which every text holds")
        if not isinstance(self.logit_bias, dict | None):
            raise invalid(
                "logit_bias", f"logit_bias is {shown(self.logit_bias)}; it must be an object"
            )
        if self.deadline_ms is not None and self.deadline_ms < 0:
            raise invalid(
                "deadline_ms", f"deadline_ms is {self.deadline_ms}; it must be at least 0"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs is only for stream = false")
        for name in ("user", "cache_salt"):
            if len(getattr(self, name) or "") > 1_024:
                raise invalid(name, f"{name} has more than 1024 characters")

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters.

        Raises:
            HttpError: 400, a key of ``logit_bias`` is no token id.
            InvalidRequestError: a value cannot be used.
        """
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=_biases(self.logit_bias or {}),
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    prompt_field: ClassVar[str] = "messages"

    messages: Items[ChatMessage] = Field(json_schema_extra={"minItems": 1})
    max_tokens: int | None = Field(None, description="left out: the room left in the context")
    max_completion_tokens: int | None = Field(None, description="of both limits the smaller holds")
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = Field(
        False, description="beside those that the chat template writes; never a second bos"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None

    def check(self) -> None:
        """Check what types cannot say."""
        super().check()
        check_messages(self.messages)
        _check_variables(self.chat_template_kwargs)
        if is_deep(self.documents):
            raise invalid("documents", f"documents is nested deeper than {MOST_LEVELS} levels")
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid(name, f"{name} is {value}; it must be at least 1")
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise invalid("top_logprobs", "top_logprobs is only for logprobs = true")
            if self.top_logprobs < 0:
                raise invalid(
                    "top_logprobs", f"top_logprobs is {self.top_logprobs}; it must be at least 0"
                )

    @property
    def token_limit(self) -> int | None:
        """The smaller of both limits."""
        limits = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        return min(limits, default=None)


_TOKEN_IDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", **_from(0, 2**31 - 1)},
    "minItems": 1,
}


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Any = Field(
        description="text, token ids, or a list of either",
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        },
    )
    max_tokens: int = Field(16, json_schema_extra=_from(0))
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = Field(None, description="only the same as n")
    add_special_tokens: bool = True

    def check(self) -> None:
        """Check what types cannot say."""
        super().check()
        if self.max_tokens < 0 or (self.max_tokens == 0 and not self.echo):
            raise invalid(
                "max_tokens",
                f"max_tokens is {shown(self.max_tokens)}; it must be at least 1, or 0 with echo",
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise invalid("logprobs", f"logprobs is {self.logprobs}; it must be at least 0")
        if self.best_of is not None and self.best_of != self.n:
            raise invalid(
                "best_of",
                f"best_of is {shown(self.best_of)}; only the same as n ({self.n}) is supported",
                "unsupported_parameter",
            )


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``: a prompt, or messages."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Text | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: bool | None = Field(
        None, description="left out: true for a prompt, false for messages"
    )
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    def check(self) -> None:
        """Check what types cannot say."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if self.messages is not None:
            check_messages(self.messages)
        _check_variables(self.chat_template_kwargs)


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    prompt_field: ClassVar[str] = "tokens"

    tokens: Items[int]

    def check(self) -> None:
        """Check what types cannot say."""
        if any(not 0 <= token < 2**31 for token in self.tokens):
            raise invalid("tokens", "tokens has an id that is not from 0 to 2147483647")


def _check_variables(variables: Mapping[str, object] | None) -> None:
    name = "chat_template_kwargs"
    if is_deep(variables):
        raise invalid(name, f"{name} is nested deeper than {MOST_LEVELS} levels")
    if variables is not None and len(variables) > MOST_NAMES:
        raise invalid(name, f"{name} has {len(variables)} names; give {MOST_NAMES} at most")


def _is_set(value: object) -> bool:
    return value not in (False, "", [], {})


def _is_not(*harmless: object) -> Callable[[object], bool]:
    return lambda value: value not in harmless


def _wants_a_format(value: object) -> bool:
    return not (isinstance(value, Mapping) and value.get("type") == "text")


_UNSUPPORTED: dict[str, Callable[[object], bool]] = {
    "tools": _is_set,
    "functions": _is_set,
    "tool_choice": _is_not("none", "auto"),
    "function_call": _is_not("none", "auto"),
    "response_format": _wants_a_format,
    "modalities": _is_not(["text"], []),
    "reasoning_effort": _is_not("none"),
    "verbosity": _is_not("medium"),
    "audio": _is_set,
    "web_search_options": lambda _value: True,
    "suffix": _is_not(""),
    "use_beam_search": _is_not(False),
    "guided_json": lambda _value: True,
    "guided_regex": lambda _value: True,
    "guided_choice": lambda _value: True,
    "guided_grammar": lambda _value: True,
    "structured_outputs": _is_set,
    "bad_words": _is_set,
    "allowed_token_ids": _is_set,
    "logits_processors": _is_set,
    "truncate_prompt_tokens": lambda _value: True,
    "prompt_embeds": _is_set,
    "chat_template": lambda _value: True,
    "continue_final_message": _is_not(False),
}
"""By field, whether a value would change the answer if it were ignored."""


def read_request(kind: type[RequestT], data: dict[str, Any]) -> RequestT:
    """Make a request of a JSON object.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, changes in _UNSUPPORTED.items():
        value = data.get(name)
        if value is not None and name not in kind.model_fields and changes(value):
            raise invalid(
                name,
                f"{name} is not supported by this server; leave it out",
                "unsupported_parameter",
            )
    if issubclass(kind, ChatRequest) and data.get("echo"):
        raise invalid("echo", "echo is only for /v1/completions", "unsupported_parameter")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise _first_error(error) from None
    request.check()
    return request


def _first_error(error: ValidationError) -> HttpError:
    """Say the first problem in our words, with the path of the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    location = first["loc"]
    param = str(location[0]) if location else None
    path = _path(location)
    problem = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return invalid(param, f"{path} is missing; it is required", "missing_parameter")
    return invalid(param, f"{path} is {shown(first['input'])}; {problem}")


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content``; the names of a union's members are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _NAMES or not path:
            path += f".{part}" if path else str(part)
    return path or "the body"


_NAMES = frozenset(
    name for kind in (ChatMessage, ContentPart, StreamOptions) for name in kind.model_fields
)


def _biases(biases: Mapping[str, Any]) -> dict[int, float]:
    parsed = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(
                "logit_bias", f"logit_bias has the key {shown(key)}, which is no token id"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid("logit_bias", f"logit_bias[{key}] is {shown(bias)}; it must be a number")
        parsed[int(key)] = bias
    return parsed
