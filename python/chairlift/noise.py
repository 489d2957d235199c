"""How iterations' times differ from what is predicted: each by itself, and for seconds.

:func:`fit_noise` takes iterations that were measured and says what noise a
:class:`~chairlift.simulation.CostProfile` must have to be as unsteady as the machine was.
:func:`speed_around` says how slow the machine was when, :func:`follow` what an engine knew of it
then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BORDERS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Of the lags by which pairs of iterations are told apart."""
_SPACING = 1.25
"""Ratio of two distances in iterations at which pairs are looked at: all would be quadratic."""
_FEWEST = 16
"""Iterations, and pairs of a lag, below which nothing is said of them."""
_LEAST_SLOW_S, _MOST_SLOW_S = 0.25, 64.0
"""Lasting noise is looked for between these: beyond, it and a wrong model look alike."""
_NEIGHBOURS = 4
"""Iterations on either side that say how fast the machine was."""
_LARGEST_ERROR = 0.5
"""What an iteration may be off from them, as in ``rust/core/src/predict/iteration_time.rs``."""
_FOLLOWS = 0.25
"""Share of an iteration's error that the engine's cost model takes over, as there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of a cost profile, and what its times are to be multiplied with."""

    factor: float = 1.0
    """Measured over predicted time: its geometric mean over the time that was measured."""
    noise_sigma: float = 0.0
    """Standard deviation of the logarithm of what is each iteration's own."""
    slow_sigma: float = 0.0
    """Standard deviation of the logarithm of what lasts."""
    slow_s: float = 0.0
    """Seconds after which its correlation is 1/e."""


def fit_noise(start_s: Floats, measured_s: Floats, predicted_s: Floats) -> Noise:
    """Estimate the noise of ``I`` iterations by the moments of log(measured / predicted).

    The autocovariance at a lag is the mean product of pairs of iterations whose starts are so far
    apart. At lags up to 32 s, each range of lags counting as much as another, ``slow_sigma**2 *
    exp(-lag / slow_s)`` is fitted to it by least squares: the autocovariance of an
    Ornstein-Uhlenbeck process (Uhlenbeck and Ornstein, 1930). The rest of the variance is each
    iteration's own. Where pairs have no positive correlation, or there are fewer than 16
    iterations, nothing lasts.

    An iteration that was stalled by itself counts as no more than 1.5 times what those around it
    take, and no less than half; slow seconds, in which all take long, count in full.

    Args:
        start_s: ``[I]``, rising; there may be breaks.
        measured_s: ``[I]``, above 0.
        predicted_s: ``[I]``, above 0.

    Raises:
        ValueError: the arrays are of different lengths, or a time is not above 0.
    """
    if not len(start_s) == len(measured_s) == len(predicted_s):
        lengths = f"{len(start_s)}, {len(measured_s)} and {len(predicted_s)}"
        raise ValueError(
            f"starts, measured and predicted times are {lengths}; they must be as many"
        )
    if len(start_s) == 0:
        return Noise()
    if min(measured_s.min(), predicted_s.min()) <= 0:
        raise ValueError("measured and predicted times must be above 0")
    logs = np.log(measured_s / predicted_s)
    around = _running_median(logs)
    logs = _clipped(logs, around)
    variance = float(logs.var())
    slow_variance, slow_s = 0.0, 0.0
    if len(logs) >= _FEWEST:
        lags, covariances = _autocovariance(start_s, logs - logs.mean())
        if len(lags):
            slow_variance, slow_s = _exponential(lags, covariances, variance)
    return Noise(
        factor=math.exp(np.average(logs, weights=predicted_s * np.exp(around))),
        noise_sigma=math.sqrt(max(variance - slow_variance, 0.0)),
        slow_sigma=math.sqrt(slow_variance),
        slow_s=slow_s,
    )


def speed_around(measured_s: Floats, predicted_s: Floats) -> Floats:  # [I]
    """How many times as long as predicted iterations took around each of ``I``, itself left out.

    It is the geometric mean of the four on either side, of which one that was stalled counts as no
    more than 1.5 times their median, and no less than half of it; 1 where there are none. What an
    iteration took is not in its own factor, and the factor does not lag.

    Args:
        measured_s: ``[I]``, above 0.
        predicted_s: ``[I]``, above 0.
    """
    logs = np.log(measured_s / predicted_s)
    factors = np.ones(len(logs))
    for at in range(len(logs)):
        before = logs[max(at - _NEIGHBOURS, 0) : at]
        others = np.concatenate((before, logs[at + 1 : at + 1 + _NEIGHBOURS]))
        if len(others):
            factors[at] = math.exp(_clipped(others, float(np.median(others))).mean())
    return factors


def _clipped(logs: Floats, around: Floats | float) -> Floats:
    """Logarithms of which none is further off than the largest error."""
    clipped: Floats = around + np.clip(
        logs - around, math.log(1 - _LARGEST_ERROR), math.log(1 + _LARGEST_ERROR)
    )
    return clipped


def follow(measured_s: Floats, predicted_s: Floats, factor: float) -> Floats:  # [I + 1]
    """How many times as long as predicted iterations take, before each of ``I`` and after the last.

    It begins with ``factor`` and follows the iterations by exponential smoothing, as the engine's
    own cost model does (``rust/core/src/predict/iteration_time.rs``): what is said of the moment
    before an iteration comes from those before it alone. An iteration that was stalled moves it by
    an eighth at most.

    Args:
        measured_s: ``[I]``.
        predicted_s: ``[I]``, above 0.
        factor: above 0.
    """
    factors = [factor]
    for ratio in measured_s / predicted_s:
        error = min(max(ratio / factors[-1] - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        factors.append(factors[-1] * (1 + _FOLLOWS * error))
    return np.array(factors)


def _running_median(logs: Floats) -> Floats:  # [I]
    """Of each and its neighbours."""
    padded = np.pad(logs, _NEIGHBOURS, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBOURS + 1)
    median: Floats = np.median(around, axis=1)
    return median


def _autocovariance(start_s: Floats, logs: Floats) -> tuple[Floats, Floats]:  # [L] each
    """Mean lag of each range, in seconds, and the mean product of the pairs in it."""
    ranges = len(_BORDERS_S) - 1
    count, lag_s, product = np.zeros(ranges), np.zeros(ranges), np.zeros(ranges)
    for distance in _distances(len(logs)):
        lags = start_s[distance:] - start_s[:-distance]
        where = np.digitize(lags, _BORDERS_S) - 1
        near = (where >= 0) & (where < ranges)
        if not near.any():
            break
        products = logs[distance:] * logs[:-distance]
        where = where[near]
        count += np.bincount(where, minlength=ranges)
        lag_s += np.bincount(where, weights=lags[near], minlength=ranges)
        product += np.bincount(where, weights=products[near], minlength=ranges)
    known = count >= _FEWEST
    return lag_s[known] / count[known], product[known] / count[known]


def _distances(count: int) -> Iterator[int]:
    """Distances in iterations, ever further apart."""
    distance = 1
    while distance < count:
        yield distance
        distance = max(distance + 1, int(distance * _SPACING))


def _exponential(lags: Floats, covariances: Floats, variance: float) -> tuple[float, float]:
    """Variance and seconds of the exponential that is nearest; zeros where none is above zero."""
    best = (math.inf, 0.0, 0.0)
    for slow_s in np.geomspace(_LEAST_SLOW_S, _MOST_SLOW_S, 97):
        shape = np.exp(-lags / slow_s)
        scale = min(float(shape @ covariances / max(shape @ shape, 1e-300)), variance)
        if scale > 0:
            error = float(((covariances - scale * shape) ** 2).sum())
            best = min(best, (error, scale, float(slow_s)))
    return best[1], best[2]
