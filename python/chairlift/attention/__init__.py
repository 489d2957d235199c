"""Attention over the paged KV cache, behind one small interface.

``cpu`` is the Rust kernel and the default; ``reference`` is its specification in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

from chairlift.attention.cpu import CpuBackend
from chairlift.attention.interface import (
    AttentionBackend,
    AttentionError,
    AttentionMetadata,
    AttentionParams,
)
from chairlift.attention.reference import ReferenceBackend

__all__ = [
    "AttentionBackend",
    "AttentionError",
    "AttentionMetadata",
    "AttentionParams",
    "backend_names",
    "get_backend",
]

_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}


def backend_names() -> list[str]:
    """Names that :func:`get_backend` knows."""
    return sorted(_BACKENDS)


def get_backend(name: str = "cpu") -> AttentionBackend:
    """Make the backend of that name; raises :class:`AttentionError` for an unknown one."""
    try:
        make = _BACKENDS[name]
    except KeyError:
        known = ", ".join(backend_names())
        raise AttentionError(f"unknown attention backend {name!r}; known are {known}") from None
    return make()
