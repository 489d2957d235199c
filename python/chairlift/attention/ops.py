"""Small fused operations between the linear layers of a decoder.

Eager PyTorch runs each as four to eight kernels; here each is one call into Rust for tensors on the
CPU, and plain PyTorch elsewhere (the specification).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chairlift import _core
from chairlift.attention import reference
from chairlift.attention.interface import MODEL_DTYPES, AttentionError
from chairlift.attention.threads import share_openmp_pool

if TYPE_CHECKING:
    from torch import Tensor

share_openmp_pool()


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual and normalise: ``(rms_norm(x + residual) * weight, x + residual)``.

    ``x`` and ``residual`` ``[T, H]`` float32 or bfloat16, ``weight`` ``[H]``. The residual is
    overwritten with the sum (on the CPU) and returned; without one, ``x`` itself is returned.
    Arithmetic in float32; the sum is rounded once before it is normalised.
    """
    if x.device.type != "cpu":
        total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
        return reference.rms_norm(total, weight, eps).to(x.dtype), total
    _check("x", x)
    _check("weight", weight)
    rows, width = x.shape if x.dim() == 2 else (-1, -1)
    if weight.shape != (width,):
        raise AttentionError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if residual is not None:
        _check("residual", residual)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise AttentionError(
                f"residual {tuple(residual.shape)} {residual.dtype} does not fit "
                f"x {tuple(x.shape)} {x.dtype}"
            )
    out = torch.empty_like(x)
    _core.add_rms_norm(
        (
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
        ),
        x.dtype == torch.bfloat16,
        weight.dtype == torch.bfloat16,
        rows,
        width,
        eps,
        torch.get_num_threads(),
    )
    return out, x if residual is None else residual


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate of a SwiGLU layer: ``[T, 2 * I]`` -> ``silu(x[:, :I]) * x[:, I:]`` ``[T, I]``."""
    if x.device.type != "cpu":
        gate, up = x.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)
    _check("x", x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise AttentionError(f"x has shape {tuple(x.shape)}, not [T, 2 * I]")
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, width))
    _core.silu_and_mul(
        x.data_ptr(),
        out.data_ptr(),
        x.dtype == torch.bfloat16,
        rows,
        width,
        torch.get_num_threads(),
    )
    return out


def _check(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in MODEL_DTYPES or not tensor.is_contiguous():
        raise AttentionError(f"{name} must be contiguous float32 or bfloat16, not {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise AttentionError(f"{name} is on {tensor.device}, not on the cpu")
