"""Who asks, and for what: everything about a request but its prompt and its sampling."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TypedDict

from chairlift.errors import InvalidRequestError

DEFAULT_TENANT = "default"
_MOST_BYTES = 128
_INT32_MAX = 2**31 - 1


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``; :class:`RequestArgs` explains them."""

    tenant: str
    request_class: str | None
    user: str | None
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArgs:
    """What the gate and the waiting queue look at.

    Raises:
        InvalidRequestError: a value is of the wrong type.
    """

    tenant: str = DEFAULT_TENANT
    """Who pays; a tenant that the policy does not name has the settings of ``default_tenant``."""
    request_class: str | None = None
    """Name of a class; None: the tenant's default."""
    user: str | None = None
    """One of the tenant's users, who share equally."""
    priority: int = 0
    """Order within its class before everything else: lower is sooner."""
    deadline: float | None = None
    """Seconds from its submission after which its first token is of no use any more."""

    def __post_init__(self) -> None:
        """Check types."""
        _name("tenant", self.tenant)
        for name in ("request_class", "user"):
            if getattr(self, name) is not None:
                _name(name, getattr(self, name))
        value: object = self.priority
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _INT32_MAX:
            raise _invalid("priority", value, f"an integer from {-_INT32_MAX} to {_INT32_MAX}")
        value = self.deadline
        if value is not None and (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value <= sys.float_info.max
        ):
            raise _invalid("deadline", value, "a number of seconds of at least 0")


def _name(field: str, value: object) -> None:
    if (
        not isinstance(value, str)
        or not 1 <= len(value.encode("utf-8", "replace")) <= _MOST_BYTES
        or any(0xD800 <= ord(character) < 0xE000 for character in value)
    ):
        raise _invalid(field, value, f"text of 1 to {_MOST_BYTES} bytes")


def _invalid(field: str, value: object, allowed: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(
        f"{field} is {shown}; it must be {allowed}", code="invalid_parameter"
    )
