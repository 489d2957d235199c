"""Chairlift: a language-model serving engine with a gatekeeper."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.async_engine import AsyncEngine
    from chairlift.config import (
        ClassConfig,
        Config,
        JoinConfig,
        KeyConfig,
        MemoryConfig,
        PaceConfig,
        PolicyConfig,
        PriceConfig,
        SheddingConfig,
        TenantConfig,
    )
    from chairlift.delta_stream import DeltaStream
    from chairlift.errors import (
        ChairliftError,
        ConfigError,
        ContextLengthError,
        EngineDeadError,
        InvalidRequestError,
        OverloadedError,
        QueueFullError,
        QueueTimeoutError,
        RateLimitError,
        RequestFailedError,
        TryLaterError,
    )
    from chairlift.llm import LLM
    from chairlift.outputs import (
        ITERATION_BOUNDS,
        SIZE_BOUNDS,
        TIME_BOUNDS,
        CompletionOutput,
        Delta,
        Logprob,
        RequestOutput,
        RequestStats,
    )
    from chairlift.sampling import SamplingParams

# Loaded when first asked for: importing chairlift costs next to nothing.
_HOMES = {
    "AsyncEngine": "async_engine",
    "ChairliftError": "errors",
    "ClassConfig": "config",
    "CompletionOutput": "outputs",
    "Config": "config",
    "ConfigError": "errors",
    "ContextLengthError": "errors",
    "Delta": "outputs",
    "DeltaStream": "delta_stream",
    "EngineDeadError": "errors",
    "InvalidRequestError": "errors",
    "ITERATION_BOUNDS": "outputs",
    "JoinConfig": "config",
    "KeyConfig": "config",
    "LLM": "llm",
    "Logprob": "outputs",
    "MemoryConfig": "config",
    "OverloadedError": "errors",
    "PaceConfig": "config",
    "PolicyConfig": "config",
    "PriceConfig": "config",
    "QueueFullError": "errors",
    "QueueTimeoutError": "errors",
    "RateLimitError": "errors",
    "RequestFailedError": "errors",
    "RequestOutput": "outputs",
    "RequestStats": "outputs",
    "SIZE_BOUNDS": "outputs",
    "SamplingParams": "sampling",
    "SheddingConfig": "config",
    "TIME_BOUNDS": "outputs",
    "TenantConfig": "config",
    "TryLaterError": "errors",
}

__all__ = [
    "ITERATION_BOUNDS",
    "LLM",
    "SIZE_BOUNDS",
    "TIME_BOUNDS",
    "AsyncEngine",
    "ChairliftError",
    "ClassConfig",
    "CompletionOutput",
    "Config",
    "ConfigError",
    "ContextLengthError",
    "Delta",
    "DeltaStream",
    "EngineDeadError",
    "InvalidRequestError",
    "JoinConfig",
    "KeyConfig",
    "Logprob",
    "MemoryConfig",
    "OverloadedError",
    "PaceConfig",
    "PolicyConfig",
    "PriceConfig",
    "QueueFullError",
    "QueueTimeoutError",
    "RateLimitError",
    "RequestFailedError",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SheddingConfig",
    "TenantConfig",
    "TryLaterError",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"chairlift.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
