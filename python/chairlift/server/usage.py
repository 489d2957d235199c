"""What each tenant has used since the server started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MOST_TENANTS = 10_000
"""Tenants that are counted apart: behind a trusted header their names are not ours to bound."""
OTHERS = "(others)"
"""Where the rest is counted; no tenant has this name unless a gateway says so."""


@dataclass(slots=True)
class TenantUsage:
    """Sums over a tenant's requests, refused ones included."""

    requests: int = 0
    refused: int = 0
    """Of the requests, those that were answered with an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those that the prefix cache had."""
    completion_tokens: int = 0


class UsageBook:
    """The sums by tenant."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._tenants: dict[str, TenantUsage] = {}

    def of(self, tenant: str) -> TenantUsage:
        """The sums of a tenant, to be added to."""
        usage = self._tenants.get(tenant)
        if usage is None:
            if len(self._tenants) >= MOST_TENANTS:
                tenant = OTHERS
            usage = self._tenants.setdefault(tenant, TenantUsage())
        return usage

    def report(self, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, object]]:
        """By tenant, with what the engine alone knows of it (``group_metrics()["tenants"]``)."""
        report: dict[str, dict[str, object]] = {}
        for name, usage in sorted(self._tenants.items()):
            engine = groups.get(name, {})
            report[name] = {
                **asdict(usage),
                "device_time_seconds": engine.get("device_time"),
                "served": engine.get("served"),
            }
        return report
