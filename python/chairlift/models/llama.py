"""The decoder: Llama and the families that differ from it only in their configuration.

Plain functions over tensors, no ``nn.Module``: a decode step of a small model is some 240 short
calls, and what Python spends between them is time the model is not running. Per layer: norm, fused
qkv, attention (which rotates and writes the cache), output projection, norm, fused gate and up,
SwiGLU, down projection. The residual is added inside the norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from chairlift.attention import AttentionParams
from chairlift.attention import ops as cpu_ops
from chairlift.models.linear import LinearFn, make_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chairlift.attention.interface import LayerAttention, Metadata_contra
    from chairlift.models.config import ModelConfig, RopeConfig
    from chairlift.models.weights import Checkpoint

    LayerCache = tuple[Tensor, Tensor]


class DecoderOps(Protocol):
    """What stands between the linear layers; :mod:`chairlift.attention.ops` explains both."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add the residual and normalise."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Gate of a SwiGLU layer."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [H]
    qkv: LinearFn
    attention: AttentionParams
    output: LinearFn
    post_norm: Tensor  # [H]
    gate_up: LinearFn
    down: LinearFn


class LlamaModel:
    """A decoder with its weights, run without gradients where the weights are."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Checkpoint,
        max_model_len: int,
        ops: DecoderOps = cpu_ops,
    ) -> None:
        """Take all weights out of the checkpoint.

        A tied embedding is kept twice where weights are packed: as the table that token ids look
        up, and packed as the output layer, which reads all of it at every step.

        Raises:
            WeightsError: a tensor is missing, of the wrong shape, or has no place in the model.
        """
        self.config = config
        self._eps = config.norm_eps
        self._ops = ops
        cos, sin = rope_tables(config.rope, config.head_dim, max_model_len)
        cos_sin = (cos.to(weights.device), sin.to(weights.device))
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", shape)
        self._layers = [
            _load_layer(config, weights, f"model.layers.{index}.", cos_sin)
            for index in range(config.num_layers)
        ]
        self._final_norm = weights.take("model.norm.weight", (config.hidden_size,))
        if config.tie_embeddings:
            weights.ignore("lm_head.weight")
            self._lm_head = make_linear(self._embedding)
        else:
            self._lm_head = make_linear(weights.take("lm_head.weight", shape))
        weights.check_all_taken()

    def forward(
        self,
        token_ids: Tensor,
        scored: Tensor | None,
        caches: Sequence[LayerCache],
        backend: LayerAttention[Metadata_contra],
        metadata: Metadata_contra,
    ) -> Tensor:
        """Run the step's tokens through all layers; :meth:`score` turns the result into logits.

        Args:
            token_ids: ``[T]`` integers.
            scored: ``[S]`` indices into the tokens; None is every token, in order.
            caches: K and V of each layer.
            backend: runs attention and writes the caches.
            metadata: what ``backend`` prepared for the step.

        Returns:
            Normed hidden states ``[S, hidden]``. What follows the last attention is computed for
            the scored tokens only.
        """
        eps, attend = self._eps, backend.forward
        add_rms_norm, silu_and_mul = self._ops.add_rms_norm, self._ops.silu_and_mul
        hidden = functional.embedding(token_ids, self._embedding)  # [T, H]
        residual: Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            hidden, residual = add_rms_norm(hidden, residual, layer.input_norm, eps)
            k_cache, v_cache = caches[index]
            hidden = attend(layer.qkv(hidden), k_cache, v_cache, metadata, layer.attention)
            if index == last and scored is not None:
                if not len(scored):
                    return hidden.new_empty((0, self.config.hidden_size))
                hidden, residual = hidden[scored], residual[scored]  # [S, ...]
            hidden, residual = add_rms_norm(layer.output(hidden), residual, layer.post_norm, eps)
            hidden = layer.down(silu_and_mul(layer.gate_up(hidden)))
        hidden, _ = add_rms_norm(hidden, residual, self._final_norm, eps)
        return hidden

    def score(self, hidden: Tensor) -> Tensor:
        """Return logits ``[S, vocab]`` in the model's dtype for hidden states ``[S, hidden]``."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size))
        return self._lm_head(hidden)


def _load_layer(
    config: ModelConfig, weights: Checkpoint, prefix: str, cos_sin: tuple[Tensor, Tensor]
) -> _Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim

    def linear(parts: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> LinearFn:
        names = [f"{prefix}{part}" for part in parts]
        return make_linear(
            weights.take_rows([f"{name}.weight" for name in names], rows, columns),
            weights.take_entries([f"{name}.bias" for name in names], rows) if bias else None,
        )

    def norm(name: str, size: int) -> Tensor:
        return weights.take(f"{prefix}{name}.weight", (size,))

    def scale(of: str) -> float:
        """Of keys or values in a cache of 8 bits, as compressed-tensors or ModelOpt name it."""
        return weights.take_scale(
            [f"{prefix}self_attn.{of}_scale", f"{prefix}self_attn.{of}_proj.{of}_scale"]
        )

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return _Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(qkv, (q_rows, kv_rows, kv_rows), hidden, config.qkv_bias),
        attention=AttentionParams(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            cos_sin=cos_sin,
            q_norm=norm("self_attn.q_norm", dim) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", dim) if config.qk_norm else None,
            norm_eps=config.norm_eps,
            k_scale=scale("k"),
            v_scale=scale("v"),
        ),
        output=linear(("self_attn.o_proj",), (hidden,), q_rows, config.output_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias),
        down=linear(("mlp.down_proj",), (hidden,), inner, config.mlp_bias),
    )


def rope_tables(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every position, fp32 ``[max_position, head_dim / 2]`` each.

    Su et al. 2021; ``llama3`` stretches the slow frequencies by ``factor``, leaves the fast ones,
    and interpolates between (``apply_scaling`` in Meta's llama-models).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        fast = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        frequencies = fast * frequencies + (1 - fast) * frequencies / rope.factor
    angles = torch.outer(torch.arange(max_position).float(), frequencies)
    return angles.cos(), angles.sin()
