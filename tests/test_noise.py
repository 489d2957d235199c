"""Noise that is estimated from iterations: what the simulator was told is found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chairlift.noise import Noise, fit_noise, follow, speed_around
from chairlift.simulation import CostProfile, Options, Workload, simulate
from simulations import settings

PROFILE = CostProfile(
    t0_s=0.05, t_seq_s=0.0, t_w_s=0.0, t_tok_s=0.0, t_ctx_s=0.0, t_pair_s=0.0, noise_sigma=0.0
)
"""Every iteration takes 50 ms."""


def iterations(seed, **noise):
    """Starts and times of 16,000 iterations, some 800 s, with a long break in the middle."""
    answers = Workload.of(np.repeat([0.0, 2_000.0], 10), np.full(20, 1), np.full(20, 800))
    profile = replace(PROFILE, **noise)
    result = simulate(settings(max_num_seqs=1), profile, answers, Options(seed=seed))
    return result.iteration_start_s, result.iteration_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("slow_sigma", "slow_s"), [(0.2, 2.0), (0.3, 8.0), (0.1, 1.0)])
def test_what_the_simulator_was_told_is_found(seed, slow_sigma, slow_s):
    start, took = iterations(seed, noise_sigma=0.1, slow_sigma=slow_sigma, slow_s=slow_s)
    found = fit_noise(start, took, np.full(len(took), 0.04))
    # Some 800 s / (2 * slow_s) draws are independent.
    few = np.sqrt(2 * slow_s / 800)
    assert np.log(found.factor / 1.25) == pytest.approx(0.0, abs=3.5 * few * slow_sigma)
    assert found.noise_sigma == pytest.approx(0.1, rel=0.2)
    assert found.slow_sigma == pytest.approx(slow_sigma, rel=3.5 * few)
    assert found.slow_s == pytest.approx(slow_s, rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_independent_noise_does_not_last(seed):
    start, took = iterations(seed, noise_sigma=0.2)
    found = fit_noise(start, took, np.full(len(took), 0.05))
    assert found.noise_sigma == pytest.approx(0.2, rel=0.06)
    assert found.slow_sigma < 0.03


def test_noise_that_alternates_does_not_last():
    took = np.tile([0.9, 1.1], 100)
    found = fit_noise(np.arange(200.0), took, np.ones(200))
    assert (found.slow_sigma, found.slow_s) == (0.0, 0.0)
    assert found.noise_sigma == pytest.approx(np.log(took).std())


def test_a_stall_is_no_noise():
    start, took = iterations(1, noise_sigma=0.1)
    calm = fit_noise(start, took, np.full(len(took), 0.05))
    took[1_000::1_000] = 5.0
    found = fit_noise(start, took, np.full(len(took), 0.05))
    assert found.factor == pytest.approx(calm.factor, rel=2e-3)
    assert found.noise_sigma == pytest.approx(calm.noise_sigma, rel=0.02)


def test_little_is_known_of_few():
    nothing = np.empty(0)
    assert fit_noise(nothing, nothing, nothing) == Noise()
    start, took = iterations(2, noise_sigma=0.1, slow_sigma=0.3, slow_s=4.0)
    found = fit_noise(start[:15], took[:15], np.full(15, 0.05))
    assert (found.slow_sigma, found.slow_s) == (0.0, 0.0)
    with pytest.raises(ValueError, match="are 3, 2 and 2; they must be as many"):
        fit_noise(start[:3], took[:2], took[:2])
    with pytest.raises(ValueError, match="must be above 0"):
        fit_noise(start[:3], took[:3], np.zeros(3))


def test_how_slow_the_machine_is_is_followed():
    predicted = np.linspace(0.01, 0.2, 60)
    measured = predicted * np.repeat([1.0, 1.3], 30)
    factors = follow(measured, predicted, 1.0)
    assert len(factors) == 61
    np.testing.assert_allclose(factors[:31], 1.0)  # an iteration is not known before it ends
    np.testing.assert_allclose(factors[31:34] - 1.3, -0.3 * 0.75 ** np.arange(1, 4))
    assert factors[-1] == pytest.approx(1.3, rel=1e-3)
    # A stall moves it by an eighth at most, whatever came before.
    np.testing.assert_allclose(follow(np.array([9.0, 1e-9]), np.ones(2), 2.0), [2, 2.25, 1.96875])


def test_how_slow_the_machine_was_is_told_by_those_around():
    predicted = np.linspace(0.01, 0.2, 60)
    measured = predicted * np.repeat([1.0, 1.3], 30)
    factors = speed_around(measured, predicted)
    np.testing.assert_allclose(factors[:26], 1.0)
    assert (np.diff(factors[25:35]) > -0.05).all()
    np.testing.assert_allclose(factors[34:], 1.3)
    # Itself it is not among them, and as a neighbour a stall is 1.5 times what others are.
    measured[10] *= 100
    stalled = speed_around(measured, predicted)
    assert stalled[10] == pytest.approx(1.0)
    np.testing.assert_allclose(stalled[[6, 9, 11, 14]], 1.5 ** (1 / 8))
    np.testing.assert_array_equal(speed_around(np.array([0.3]), np.array([0.1])), [1.0])
    np.testing.assert_allclose(speed_around(np.array([3.0, 2.0]), np.ones(2)), [2.0, 3.0])
