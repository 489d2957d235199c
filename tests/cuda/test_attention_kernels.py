"""The attention kernels on the emulated device against the reference, on one table of steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from emulated_attention import EmulatedBackend
from emulated_device import SCHEDULES, Schedule

from attention_table import CASES, CHUNK, FP8_CASES, PREFILL_CASES, TOLERANCES, Case
from chairlift.attention import get_backend
from fp8_reference import OnItsCache

TILED_CASES = CASES + PREFILL_CASES
"""What the prefill kernel attends to."""


def ids(cases: list[Case]) -> list[str]:
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return names


@pytest.mark.parametrize("number", range(len(CASES)), ids=ids(CASES))
def test_decode_agrees_with_the_reference(number):
    check(CASES[number], number, prefill=False)


@pytest.mark.parametrize("number", range(len(TILED_CASES)), ids=ids(TILED_CASES))
def test_prefill_agrees_with_the_reference(number):
    check(TILED_CASES[number], number, prefill=True)


@pytest.mark.parametrize("number", range(len(FP8_CASES)), ids=ids(FP8_CASES))
def test_caches_of_8_bits_agree_with_the_reference(number):
    """What has few query tokens by the decode kernel, the rest by the prefill kernel."""
    case = FP8_CASES[number]
    prefill = max(queries for _, queries in case.sequences) > 4
    backend = OnItsCache()
    for schedule in schedules_of(number):
        world = case.world()
        world._implementation = EmulatedBackend(schedule, chunk_of(number), prefill)
        found = torch.cat(world.step(case.work))
        backend.caches = world.k_cache, world.v_cache
        expected_world = case.world()
        expected_world._implementation = backend
        expected = torch.cat(expected_world.step(case.work))
        error = (found.float() - expected.float()).abs().max().item()
        assert error <= TOLERANCES[case.shape.dtype], f"{schedule}: max error {error:.2e}"


def schedules_of(number: int) -> Sequence[Schedule]:
    """Every schedule gets a third of the table, and every tenth case all of them."""
    return SCHEDULES if number % 10 == 0 else [SCHEDULES[number % len(SCHEDULES)]]


def chunk_of(number: int) -> int:
    """Chunks of odd cases are four times as long, so that a worker has several turns."""
    return CHUNK if number % 2 == 0 else 4 * CHUNK


def check(case: Case, number: int, *, prefill: bool) -> None:
    tolerance = TOLERANCES[case.shape.dtype]
    expected_world = case.world()
    expected_world._implementation = get_backend("reference")
    expected = torch.cat(expected_world.step(case.work))
    first = None
    for schedule in schedules_of(number):
        world = case.world()
        world._implementation = EmulatedBackend(schedule, chunk_of(number), prefill)
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
