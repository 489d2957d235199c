"""Linear layers whose weights are stored the way oneDNN multiplies them.

Reordering a weight once saves oneDNN from doing it at every call: measured on two cores, a whole
step of linear layers is 1.3x faster in bf16 and 1.6x to 3x in fp32. The operators are torch's own
but their names are not a promise, so they are looked up once and tried; where they are missing,
layers fall back to :func:`torch.nn.functional.linear`. Only one form of a weight is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger("chairlift")

LinearFn = Callable[[Tensor], Tensor]
"""``x [T, in] -> [T, out]``"""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> LinearFn:
    """Return ``x @ weight.T + bias`` as a function.

    ``weight [out, in]`` and ``bias [out]`` have the dtype of the activations. Where the weight is
    packed, the function holds the packed form alone, so the caller should drop its own reference.
    """
    operators = _onednn_operators(weight.dtype) if weight.device.type == "cpu" else None
    if operators is None:
        return lambda x: functional.linear(x, weight, bias)
    reorder, multiply = operators
    packed = reorder(weight)
    return lambda x: multiply(x, packed, bias, "none", [], "")


@cache
def _onednn_operators(
    dtype: torch.dtype,
) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]] | None:
    """Find oneDNN's reorder and multiply, and try them once; None where they do not work."""
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        multiply = torch.ops.mkldnn._linear_pointwise.default
        weight, x = torch.eye(16, dtype=dtype), torch.arange(32.0, dtype=dtype).view(2, 16)
        works = torch.equal(multiply(x, reorder(weight), None, "none", [], ""), x)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        logger.info("weights are not prepacked, oneDNN's operators do not work here: %s", error)
        return None
    return (reorder, multiply) if works else None
