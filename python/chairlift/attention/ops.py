"""Small fused operations between the linear layers of a decoder.

Eager PyTorch runs each as four to eight kernels; here each is one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chairlift.attention import reference

if TYPE_CHECKING:
    from torch import Tensor


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual and normalise: ``(rms_norm(x + residual) * weight, x + residual)``.

    ``x`` and ``residual`` ``[T, H]`` float32 or bfloat16, ``weight`` ``[H]``. ``residual`` may be
    overwritten with the sum; without one, the returned residual is ``x`` itself. Arithmetic in
    float32, the sum rounded once before it is normalised.
    """
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    return reference.rms_norm(total, weight, eps).to(x.dtype), total


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate of a SwiGLU layer: ``[T, 2 * I]`` -> ``silu(x[:, :I]) * x[:, I:]`` ``[T, I]``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
