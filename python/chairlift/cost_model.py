"""What an engine learned of its iterations' time: its coefficients, and where they are kept.

The core fits them while it runs (``rust/core/src/predict/iteration_time.rs``). When an engine ends,
they go into the user's cache, one file for each model, device and dtype, and the next engine of the
same kind begins with them. A file that cannot be read or is of something else is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("chairlift")

_VERSION = 1
"""Of the file: raise it when the formula changes."""
_FEWEST_OBSERVATIONS = 256
"""Iterations that an engine must have learned from before it is worth keeping."""

Shapes = NDArray[np.float64]
"""``[I, 6]``: sequences, tokens, decode context, prefill pairs, samples, copied blocks of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCoefficients:
    """The time of an iteration as a function of what is in it, in microseconds.

    ``t0 + t_seq * sequences + max(t_weights, t_tok * tokens) + t_ctx * (sum of the decodes'
    contexts) + t_pair * (sum over prefill chunks of chunk * (context before + chunk / 2))
    + t_sample * samples + t_copy * (blocks copied from and to the host)``.
    """

    t0_us: float
    """Every iteration."""
    t_seq_us: float
    """A sequence."""
    t_weights_us: float
    """Reading the weights once."""
    t_tok_us: float
    """A token's arithmetic in the linear layers."""
    t_ctx_us: float
    """A token of a decode's context."""
    t_pair_us: float
    """A pair of a prefill token and a token before it."""
    t_sample_us: float
    """A row of logits that is sampled."""
    most_tokens: float
    """Most tokens of an iteration that they were learned from."""
    t_copy_us: float = 0.0
    """A block that is copied from or to the host; 0 where none was."""

    @classmethod
    def of(cls, learned: Mapping[str, Any]) -> Self:
        """Take them out of what the core says it has learned."""
        values = {"t_copy_us": 0.0, **learned}  # files from before there was a host tier lack it
        return cls(**{item.name: float(values[item.name]) for item in fields(cls)})

    def predict_us(self, shapes: Shapes) -> NDArray[np.float64]:  # [I]
        """Microseconds that iterations of these shapes take."""
        sequences, tokens, context, pairs, samples, copies = shapes.T
        time_us: NDArray[np.float64] = (
            self.t0_us
            + self.t_seq_us * sequences
            + np.maximum(self.t_weights_us, self.t_tok_us * tokens)
            + self.t_ctx_us * context
            + self.t_pair_us * pairs
            + self.t_sample_us * samples
            + self.t_copy_us * copies
        )
        return time_us

    def profile(self, *, noise_sigma: float, num_kv_blocks: int) -> dict[str, float | int]:
        """Return the fields of :class:`chairlift.simulation.CostProfile`, and the pool."""
        return {
            "t0_s": self.t0_us / 1e6,
            "t_seq_s": self.t_seq_us / 1e6,
            "t_w_s": self.t_weights_us / 1e6,
            "t_tok_s": self.t_tok_us / 1e6,
            "t_ctx_s": self.t_ctx_us / 1e6,
            "t_pair_s": self.t_pair_us / 1e6,
            "t_sample_s": self.t_sample_us / 1e6,
            "t_copy_s": self.t_copy_us / 1e6,
            "noise_sigma": noise_sigma,
            "num_kv_blocks": num_kv_blocks,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What coefficients are of."""

    model: str
    device: str
    dtype: str
    threads: int
    """Of the forward pass; 0 where it is not on the CPU."""

    @classmethod
    def on_this_cpu(cls, *, model: str, dtype: str, threads: int) -> Self:
        """Of a model on this machine's processor."""
        return cls(model=model, device=_processor(), dtype=dtype, threads=threads)

    def path(self) -> Path:
        """Where they are kept."""
        from chairlift.default_model import cache_directory  # noqa: PLC0415  # it needs the hub

        text = json.dumps(asdict(self), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cache_directory() / "cost-models" / f"{name}.json"


def load(key: CostKey) -> CostCoefficients | None:
    """Read what an earlier engine learned; None where there is nothing that can be used."""
    path = key.path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION or content["key"] != asdict(key):
            raise ValueError("it is of another model, device, dtype or version")
        coefficients = CostCoefficients.of(content["coefficients"])
        if not all(0 <= value < 1e12 for value in asdict(coefficients).values()):
            raise ValueError("a coefficient is out of range")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the cost model %s is ignored: %s", path, error)
        return None
    return coefficients


def save(key: CostKey, learned: Mapping[str, Any] | None) -> Path | None:
    """Keep what an engine learned, if it is worth it; return where."""
    if learned is None or learned["num_observations"] < _FEWEST_OBSERVATIONS:
        return None
    coefficients = CostCoefficients.of(learned)
    if not all(math.isfinite(value) for value in asdict(coefficients).values()):
        return None
    path = key.path()
    content = {
        "version": _VERSION,
        "key": asdict(key),
        "coefficients": asdict(coefficients),
        "mean_error": learned["mean_error"],
        "num_observations": learned["num_observations"],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False
        ) as file:
            json.dump(content, file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the cost model cannot be kept in %s: %s", path, error)
        return None
    return path


def _processor() -> str:
    """Name of the processor, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
