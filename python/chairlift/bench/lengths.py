"""How long prompts and answers are."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same."""

    tokens: int

    def draw(self, rng: np.random.Generator) -> int:
        """Return the number."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Each number from ``low`` to ``high`` alike."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one."""
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """The exponential of a normal variable, cut to 1 and ``most``."""

    mu: float
    sigma: float
    most: int

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one."""
        return max(1, min(self.most, int(rng.lognormal(self.mu, self.sigma))))


Length = FixedLength | UniformLength | LognormalLength


def parse_length(text: str) -> Length:
    """Read ``128``, ``16-512`` or ``lognormal:MU,SIGMA,MOST``.

    Raises:
        ConfigError: it is none of these.
    """
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return FixedLength(int(text))
    span = re.fullmatch(r"(\d+)-(\d+)", text)
    if span and 1 <= int(span[1]) <= int(span[2]):
        return UniformLength(int(span[1]), int(span[2]))
    name, _, values = text.partition(":")
    if name == "lognormal":
        try:
            mu, sigma, most = values.split(",")
            length = LognormalLength(float(mu), float(sigma), int(most))
            if math.isfinite(length.mu) and 0 <= length.sigma < math.inf and length.most >= 1:
                return length
        except ValueError:
            pass
    raise ConfigError(
        f"{text!r} is no length; write 128, 16-512 or lognormal:MU,SIGMA,MOST "
        "(such as lognormal:3.5,1.0,512), of at least 1 token"
    )
