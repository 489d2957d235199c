"""The attention kernels on the emulated device against the reference, on one table of steps."""

from __future__ import annotations

import pytest
import torch
from emulated_attention import EmulatedBackend
from emulated_device import SCHEDULES

from attention_table import CASES, CHUNK, PREFILL_CASES, TOLERANCES, Case
from chairlift.attention import get_backend

HALF_CASES = [case for case in CASES if case.shape.dtype != torch.float32] + PREFILL_CASES
"""What the prefill kernel is for: it has no fp32."""


def ids(cases: list[Case]) -> list[str]:
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return names


@pytest.mark.parametrize("number", range(len(CASES)), ids=ids(CASES))
def test_decode_agrees_with_the_reference(number):
    check(CASES[number], number, prefill=False)


@pytest.mark.parametrize("number", range(len(HALF_CASES)), ids=ids(HALF_CASES))
def test_prefill_agrees_with_the_reference(number):
    check(HALF_CASES[number], number, prefill=True)


def check(case: Case, number: int, *, prefill: bool) -> None:
    """Run a case: every schedule gets a third of the table, and every tenth case all of them."""
    tolerance = TOLERANCES[case.shape.dtype]
    expected_world = case.world()
    expected_world._implementation = get_backend("reference")
    expected = torch.cat(expected_world.step(case.work))
    schedules = SCHEDULES if number % 10 == 0 else [SCHEDULES[number % len(SCHEDULES)]]
    first = None
    for schedule in schedules:
        world = case.world()
        world._implementation = EmulatedBackend(schedule, CHUNK, prefill)
        found = torch.cat(world.step(case.work))
        error = (found.float() - expected.float()).abs().max().item()
        assert error <= tolerance, f"{schedule}: max error {error:.2e} > {tolerance:.0e}"
        for ours, theirs in (
            (world.k_cache, expected_world.k_cache),
            (world.v_cache, expected_world.v_cache),
        ):
            assert torch.equal(ours.isnan(), theirs.isnan())  # the same slots, nothing else
            error = (ours.float() - theirs.float()).nan_to_num().abs().max().item()
            assert error <= tolerance, f"{schedule}: max error of the cache {error:.2e}"
        first = found if first is None else first
        assert torch.equal(first, found), f"the result depends on the schedule {schedule}"
