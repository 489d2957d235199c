"""Who sends the requests: tenants, their shares of them, their classes and their keys."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chairlift.errors import ConfigError

_KEYS = ("weight", "class", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One sender."""

    name: str
    weight: float = 1.0
    """Share of the requests, relative to the other tenants."""
    request_class: str | None = None
    """Sent as ``service_tier``."""
    api_key: str | None = field(default=None, repr=False)
    """Sent instead of the common key."""

    def __post_init__(self) -> None:
        """Check the weight."""
        if not 0 < self.weight < math.inf:
            raise ConfigError(
                f"the weight of tenant {self.name!r} is {self.weight}; it must be > 0"
            )


class TenantMix:
    """The tenants of a run. Without any, requests are nobody's."""

    def __init__(self, tenants: Sequence[Tenant] = ()) -> None:
        """Keep them by name.

        Raises:
            ConfigError: two have one name.
        """
        self.tenants = tuple(tenants)
        self._by_name = {tenant.name: tenant for tenant in tenants}
        if len(self._by_name) < len(tenants):
            names = [tenant.name for tenant in tenants]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"tenant {twice!r} is there twice; name each once")
        weights = np.array([tenant.weight for tenant in tenants])
        self._bounds = np.cumsum(weights) / weights.sum() if tenants else weights

    def draw(self, rng: np.random.Generator) -> Tenant | None:
        """Draw a tenant by weight."""
        if not self.tenants:
            return None
        index = int(np.searchsorted(self._bounds, rng.random(), side="right"))
        return self.tenants[min(index, len(self.tenants) - 1)]

    def named(self, name: str) -> Tenant:
        """Return the tenant of that name; one that was not described has no class and no key."""
        return self._by_name.get(name) or Tenant(name=name)


def parse_tenant(text: str) -> Tenant:
    """Read ``NAME=WEIGHT[,class=NAME][,key=KEY]``.

    Raises:
        ConfigError: it is something else.
    """
    name, equals, rest = text.partition("=")
    weight, *others = rest.split(",")
    values: dict[str, object] = {"weight": weight}
    for other in others:
        key, _, value = other.partition("=")
        values[key] = value
    if not (name and equals):
        raise ConfigError(f"{text!r} is no tenant; write NAME=WEIGHT[,class=NAME][,key=KEY]")
    return _tenant(name, values)


def read_mix(path: Path) -> list[Tenant]:
    """Read a file of tenants: TOML or JSON, ``{"tenants": {NAME: {weight, class, key}}}``.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} does not parse: {error}") from None
    table = data.get("tenants") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not all(isinstance(each, dict) for each in table.values()):
        raise ConfigError(f"{path} has no tables [tenants.NAME] with weight, class and key")
    return [_tenant(name, values) for name, values in table.items()]


def _tenant(name: str, values: Mapping[str, object]) -> Tenant:
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"tenant {name!r} has {key!r}; allowed are {', '.join(_KEYS)}")
    weight, request_class, api_key = (values.get(key) for key in _KEYS)
    try:
        number = float(str(1.0 if weight is None else weight))
    except ValueError:
        raise ConfigError(f"the weight of tenant {name!r} is {weight!r}, no number") from None
    return Tenant(
        name=name,
        weight=number,
        request_class=None if request_class is None else str(request_class),
        api_key=None if api_key is None else str(api_key),
    )
