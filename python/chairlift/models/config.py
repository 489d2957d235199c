"""What a model is made of, read from a Hugging Face ``config.json`` and validated.

One decoder (:mod:`chairlift.models.llama`) serves every supported architecture; what differs
between them is said here in plain settings, so that the decoder never asks for a model's name.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes without saying so in its configuration."""

    qkv_bias: bool = False  # always there, as in Qwen2
    bias_option: bool = False  # 'attention_bias' adds one to q, k, v and o
    qk_norm: bool = False
    windows: bool = False  # 'sliding_window' holds for every layer unless told otherwise


_FAMILIES = {
    "LlamaForCausalLM": _Family(bias_option=True),
    "MistralForCausalLM": _Family(windows=True),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(bias_option=True, qk_norm=True),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
"""Architectures by the name in ``config.json``; Llama includes SmolLM2, Qwen2 includes Qwen2.5."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base and how its frequencies are stretched."""

    theta: float
    kind: str = "default"
    """``default``, ``linear`` or ``llama3``."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    """These three belong to ``llama3``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and settings of one decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Positions the model was made for."""
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each query and key head before the rotation (Qwen3)."""
    sliding_window: int | None
    """Tokens a layer looks back at, where at least one layer is so limited."""
    eos_token_ids: tuple[int, ...]
    """All tokens that end an answer, from ``generation_config.json`` too."""

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def max_model_len(self) -> int:
        """The longest sequence that is computed exactly: positions, or the sliding window."""
        return min(self.max_position, self.sliding_window or self.max_position)

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json``, if any) of a model directory.

        Raises:
            ModelNotFoundError: the directory does not exist.
            ModelFileError: a file is missing, is not JSON, or lacks or contradicts a value.
            UnsupportedModelError: the architecture, or a setting of it, is not supported.
        """
        if not directory.is_dir():
            raise ModelNotFoundError(f"model directory {str(directory)!r} does not exist")
        path = directory / "config.json"
        if not path.is_file():
            raise ModelFileError(
                f"{directory} has no config.json; give a directory in Hugging Face's format"
            )
        generation = directory / "generation_config.json"
        generation_values = _read_json(generation) if generation.is_file() else {}
        return _parse(_Values(_read_json(path), path), generation_values)


class _Values:
    """The values of a configuration file, each checked as it is taken."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.all = values
        self.path = path

    def size(self, name: str, default: int | None = None) -> int:
        """Take a positive integer."""
        value = self.all.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.invalid(name, "a positive integer", value)
        return value

    def number(self, name: str, default: float) -> float:
        """Take a positive number."""
        value = self.all.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.invalid(name, "a positive number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        """Take a boolean; absent means false."""
        value = self.all.get(name)
        if not isinstance(value, bool | None):
            raise self.invalid(name, "true or false", value)
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        """Take an object; absent or null means an empty one."""
        value = self.all.get(name) or {}
        if not isinstance(value, dict):
            raise self.invalid(name, "an object", value)
        return value

    def invalid(self, name: str, wanted: str, value: object) -> ModelFileError:
        """Make the error for a value that is absent or wrong."""
        got = "is missing" if value is None else f"is {value!r}"
        return ModelFileError(f"{self.path}: {name} {got}; it must be {wanted}")

    def refuse(self, what: str) -> UnsupportedModelError:
        """Make the error for a setting that is understood but not supported."""
        return UnsupportedModelError(f"{self.path}: {what} is not supported")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} does not hold a JSON object; fetch it again")
    return values


def _parse(values: _Values, generation: dict[str, Any]) -> ModelConfig:
    architecture = _architecture(values)
    family = _FAMILIES[architecture]
    _refuse_unsupported(values)
    bias = family.bias_option and values.flag("attention_bias")
    heads, hidden = values.size("num_attention_heads"), values.size("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=values.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.size("intermediate_size"),
        num_layers=values.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=values.size("num_key_value_heads", default=heads),
        # Qwen3's own default; the others' configurations leave it out when it follows from the rest
        head_dim=values.size("head_dim", default=128 if family.qk_norm else hidden // heads),
        max_position=values.size("max_position_embeddings"),
        norm_eps=values.number("rms_norm_eps", default=1e-6),
        rope=_rope(values),
        tie_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=values.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(values, family),
        eos_token_ids=_eos_token_ids(values.all, generation),
    )
    if config.num_heads % config.num_kv_heads:
        raise values.invalid(
            "num_key_value_heads", f"a divisor of {config.num_heads} heads", config.num_kv_heads
        )
    if config.head_dim < 8 or config.head_dim % 8:
        raise values.refuse(f"head_dim {config.head_dim} (only multiples of 8)")
    return config


def _architecture(values: _Values) -> str:
    names = values.all.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return str(name)
    found = ", ".join(map(str, names)) or f"of type {values.all.get('model_type', 'unknown')}"
    raise UnsupportedModelError(
        f"{values.path}: architecture {found} is not supported; supported are "
        + ", ".join(SUPPORTED_ARCHITECTURES)
    )


def _refuse_unsupported(values: _Values) -> None:
    quantization = values.table("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise values.refuse(f"a quantised checkpoint ({method})")
    activation = values.all.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise values.refuse(f"hidden_act {activation!r}")


def _rope(values: _Values) -> RopeConfig:
    """Read ``rope_theta`` and ``rope_scaling``, or transformers 5's ``rope_parameters``."""
    scaling = values.table("rope_parameters") or values.table("rope_scaling")
    rope = _Values(scaling, values.path)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise values.refuse(f"rope scaling {kind!r} (of default, linear, llama3)")
    partial = scaling.get("partial_rotary_factor", values.all.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise values.refuse(f"partial_rotary_factor {partial}")
    theta = rope.number("rope_theta", default=values.number("rope_theta", default=10_000.0))
    if kind == "default":
        return RopeConfig(theta)
    if scaling.get("factor") is None:
        raise values.invalid("the rope scaling's factor", "a positive number", None)
    factor = rope.number("factor", default=1.0)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    config = RopeConfig(
        theta,
        "llama3",
        factor,
        low_freq_factor=rope.number("low_freq_factor", default=1.0),
        high_freq_factor=rope.number("high_freq_factor", default=4.0),
        original_max_position=rope.size("original_max_position_embeddings"),
    )
    if config.high_freq_factor <= config.low_freq_factor:
        raise values.invalid(
            "high_freq_factor", f"above {config.low_freq_factor}", config.high_freq_factor
        )
    return config


def _sliding_window(values: _Values, family: _Family) -> int | None:
    """Return the window that limits at least one layer, or None."""
    if values.all.get("sliding_window") is None:
        return None
    window = values.size("sliding_window")
    layer_types = values.all.get("layer_types")
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    if family.windows:
        return window
    if not values.flag("use_sliding_window"):
        return None
    full_layers = values.all.get("max_window_layers", 28)  # transformers' default
    return window if full_layers < values.size("num_hidden_layers") else None


def _eos_token_ids(values: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    both = [*_token_ids(generation.get("eos_token_id")), *_token_ids(values.get("eos_token_id"))]
    return tuple(dict.fromkeys(both))


def _token_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in (value if isinstance(value, list) else [value])]
