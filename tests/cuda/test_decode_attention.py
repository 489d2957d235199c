"""The decode kernels against the reference, on one table of ragged steps, on the emulated device."""

from __future__ import annotations

import pytest
import torch
from decode_cases import CASES, CHUNK, TOLERANCES
from emulated_attention import EmulatedBackend
from emulated_device import SCHEDULES

from chairlift.attention import get_backend

assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_kernels_agree_with_the_reference(number):
    case = CASES[number]
    tolerance = TOLERANCES[case.shape.dtype]
    expected_world = case.world()
    expected_world._implementation = get_backend("reference")
    expected = torch.cat(expected_world.step(case.work))
    # Every schedule gets a third of the table, and every tenth case all of them.
    schedules = SCHEDULES if number % 10 == 0 else [SCHEDULES[number % len(SCHEDULES)]]
    first = None
    for schedule in schedules:
        world = case.world()
        world._implementation = EmulatedBackend(schedule, CHUNK)
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
