"""The small fused operations against plain PyTorch, and their independence of rows and threads."""

from __future__ import annotations

import pytest
import torch

from chairlift.attention import AttentionError
from chairlift.attention.ops import add_rms_norm, silu_and_mul
from chairlift.attention.reference import rms_norm

F32, BF16 = torch.float32, torch.bfloat16
ROUNDING = {F32: 2e-6, BF16: 2**-8}
"""Relative: a few units of float32; half a unit of bfloat16, which both sides round to once."""


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("width", [8, 37, 576, 2048])
def test_add_rms_norm(dtype, weight_dtype, rows, width):
    x, residual = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1) * 3
    weight = 1 + normal(width, dtype=weight_dtype, seed=2) / 4
    total = x + residual
    out, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert new_residual is residual
    assert torch.equal(new_residual, total)
    expected = rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(out.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)
    alone, same = add_rms_norm(x, None, weight, 1e-5)
    assert same is x
    expected = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(alone.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("width", [8, 37, 1536])
def test_silu_and_mul(dtype, rows, width):
    x = normal(rows, 2 * width, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    found = silu_and_mul(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=1e-30)


def test_silu_of_large_values_does_not_overflow():
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30])
    found = silu_and_mul(torch.cat([gate, torch.ones(7)])[None])[0]
    torch.testing.assert_close(found, torch.nn.functional.silu(gate), rtol=2e-6, atol=1e-35)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_do_not_depend_on_others_or_threads(dtype):
    x, gates = normal(300, 576, dtype=dtype), normal(300, 3072, dtype=dtype)
    weight = normal(576, dtype=dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out, residual = add_rms_norm(x, x.clone(), weight, 1e-5)
            results.append((out, residual, silu_and_mul(gates)))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    for row in (0, 17, 299):
        one = slice(row, row + 1)
        assert torch.equal(
            add_rms_norm(x[one], x[one].clone(), weight, 1e-5)[0], results[0][0][one]
        )
        assert torch.equal(silu_and_mul(gates[one]), results[0][2][one])


def test_no_rows():
    out, residual = add_rms_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), 1e-5)
    assert out.shape == residual.shape == (0, 8)
    assert silu_and_mul(torch.empty(0, 8)).shape == (0, 4)


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 8), torch.ones(8)
    for arguments in (
        (x, None, torch.ones(9)),
        (x, torch.zeros(3, 8), weight),
        (x, torch.zeros(2, 8, dtype=BF16), weight),
        (x.half(), None, weight),
        (torch.zeros(8, 2).T, None, weight),
        (torch.zeros(8), None, weight),
    ):
        with pytest.raises(AttentionError):
            add_rms_norm(*arguments, 1e-5)
    for bad in (torch.zeros(2, 7), torch.zeros(8), torch.zeros(8, 2).T, x.half()):
        with pytest.raises(AttentionError):
            silu_and_mul(bad)
