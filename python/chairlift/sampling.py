"""Sampling parameters, in the shape and with the meaning that vLLM's users know.

Types and non-numbers are refused here, with the field's name; ranges are the core's, which checks
them at submission (``rust/core/src/request.rs``), so that they are written once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from chairlift.errors import InvalidRequestError

_INT32_MAX = 2**31 - 1
_FLOAT_MAX = sys.float_info.max
_SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the output of one request is drawn, and when it ends.

    Raises:
        InvalidRequestError: ``invalid_parameter``; a field has the wrong type, or is not a number.
    """

    n: int = 1
    """Answers to the same prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Least probability mass of the candidates, best first."""
    top_k: int = 0
    """Most candidates; 0 or -1 is all."""
    min_p: float = 0.0
    """Least probability of a candidate, relative to the best."""
    seed: int | None = None
    """Key of the random stream; None or -1: the engine draws one, from its own seed."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt and the output; 1 is none."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the output, once per occurrence."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output. Kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output. Kept as a tuple."""
    max_tokens: int | None = 16
    """Most output tokens; None is the room that is left in the context."""
    min_tokens: int = 0
    """Output tokens before which nothing but ``max_tokens`` ends the output."""
    ignore_eos: bool = False
    """Whether end-of-sequence tokens are ordinary ones."""
    logprobs: int | None = None
    """None: no log-probabilities; k: the sampled token's and those of the k best."""
    prompt_logprobs: int | None = None
    """None: none of the prompt; k: for each prompt token but the first, its own log-probability and
    those of the k best. The whole prompt is then computed: the prefix cache is not read."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens. Kept as a dictionary."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""
    include_stop_str_in_output: bool = False
    """Whether the stop string (or stop token) stays in the text."""

    def __post_init__(self) -> None:
        """Check types, and give sequences one form."""
        for name in ("n", "min_tokens"):
            _integer(name, getattr(self, name), 0, _INT32_MAX)
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, _INT32_MAX)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        if self.seed is not None:
            _integer("seed", self.seed, -1, _SEED_MAX)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _number(name, getattr(self, name))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        tokens = _sequence("stop_token_ids", self.stop_token_ids)
        for token in tokens:
            _integer("stop_token_ids", token, 0, _INT32_MAX)
        object.__setattr__(self, "stop_token_ids", tokens)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as it is kept."""
        return cast(tuple[str, ...], self.stop)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is in no range, and an integer may be beyond every float.
    if not is_number or not -_FLOAT_MAX <= cast(float, value) <= _FLOAT_MAX:
        raise _invalid(name, value, "a finite number")


def _sequence(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise _invalid(name, value, "a list")
    return tuple(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _sequence(name, value)
    for string in strings:
        if not isinstance(string, str):
            raise _invalid(name, string, "a string or a list of strings")
        try:
            string.encode("utf-8")
        except UnicodeEncodeError:
            raise _invalid(name, string, "text without lone surrogates") from None
    return cast(tuple[str, ...], strings)


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _invalid("logit_bias", value, "a dictionary of token ids and numbers")
    for token, bias in value.items():
        _integer("logit_bias", token, 0, _INT32_MAX)
        _number("logit_bias", bias)
    return dict(value)


def _invalid(name: str, value: object, allowed: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; it must be {allowed}", code="invalid_parameter")
