"""What a recorded run would have been under other settings.

The requests of a flight log are served again by the simulator. What an iteration costs is fitted to
the log's own steps (:func:`fit_profile`), so no other calibration is needed; the recorded settings
are simulated, too, and stand beside what was measured, so that one sees how far off the simulator
is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.engine_args import CoreSettings
from chairlift.errors import ConfigError
from chairlift.flight_log import FlightLog, Progress, Replay
from chairlift.simulation import CostProfile, Options

Floats = NDArray[np.float64]

_KNEES = (0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Tokens below which an iteration may cost the same: reading the weights takes longer."""
_ROUNDS = 3
_QUANTILES = (50, 95, 99)
MEASURES = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s")
"""Per request: until it is scheduled, until its first token, mean gap after that, until its end."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost profile and how well it fits the steps it was fitted to."""

    profile: CostProfile
    steps: int
    mean_abs_error: float
    """Mean of ``|predicted - measured| / measured``."""
    total_error: float
    """``predicted / measured - 1`` of the sum of all steps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the requests of a run went."""

    requests: int
    """Requests; each answer counts as one where it was simulated."""
    finished: int
    """Those that came to their own end."""
    output_tokens: int
    span_s: float
    """From the first arrival to the last end."""
    quantiles: dict[str, dict[str, float]]
    """Of :data:`MEASURES`: ``p50``, ``p95``, ``p99``, ``mean``, in seconds."""
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.span_s if self.span_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was measured, and what the simulator says of the same requests."""

    replay: Replay
    fit: Fit
    measured: Outcome
    recorded: Outcome
    """Simulated with the settings of the log."""
    changed: Outcome | None
    """Simulated with the changes; None: there are none."""
    guessed: int
    """Answers whose true length the log does not know; they have the median of their class."""
    reloads: int
    """Reloads, which are not simulated: the first policy is in force throughout."""


def predict(
    log: FlightLog,
    changed: CoreSettings | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Prediction:
    """Simulate the requests of a log with the recorded settings and with others.

    Raises:
        ConfigError: the log does not replay, or has no steps to learn from.
    """
    run = log.measure(progress=progress)
    replay = Replay.of(json.loads(run.report))
    if replay.mismatch is not None:
        raise ConfigError(
            f"{log.path} does not replay, so nothing can be told of it: {replay.message}"
        )
    measures = json.loads(run.measures())
    fit = fit_profile(measures["steps"])
    options = Options(seed=seed, retry=False)  # a second try is a request of its own in the log

    def simulated(settings: CoreSettings) -> tuple[Outcome, int]:
        result = run.simulate(settings, fit.profile, options)
        return _simulated(result), int(result["num_guessed"])

    recorded, guessed = simulated(log.settings())
    return Prediction(
        replay=replay,
        fit=fit,
        measured=_measured(measures["requests"]),
        recorded=recorded,
        changed=None if changed is None else simulated(changed)[0],
        guessed=guessed,
        reloads=measures["reloads"],
    )


def fit_profile(steps: list[dict[str, Any]]) -> Fit:
    """Fit a cost profile to measured steps by least squares, no term below zero.

    The terms are those of :class:`~chairlift.simulation.CostProfile`, but for samples, which come
    and go with sequences; the knee of the roofline is the best of a few. Copies from and to the
    host cost nothing where none was made. Errors count in relation to the prediction (iteratively
    reweighted), so that short steps count as much as long ones. The time between two steps in a row
    is part of the constant term.

    Raises:
        ConfigError: there are fewer than ten steps.
    """
    if len(steps) < 10:
        raise ConfigError(
            f"the log has {len(steps)} steps; at least 10 are needed to predict from it"
        )
    names = ("sequences", "tokens", "decode_context", "prefill_pairs", "copies", "duration_us")
    columns = {
        name: np.array([step[name] for step in steps], dtype=np.float64) for name in names
    }  # [I] each
    seconds = np.maximum(columns["duration_us"], 1.0) / 1e6
    fits = [(*_fit_knee(columns, seconds, knee), knee) for knee in _KNEES]
    _, costs, knee = min(fits, key=lambda fit: fit[0])
    predicted = _terms(columns, knee) @ costs
    gaps_us = [step["gap_us"] for step in steps if step["gap_us"] is not None]
    gap_s = float(np.median(gaps_us)) / 1e6 if gaps_us else 0.0
    profile = CostProfile(
        t0_s=float(costs[0]) + gap_s,
        t_seq_s=float(costs[1]),
        t_w_s=float(costs[2]) * knee,
        t_tok_s=float(costs[2]),
        t_ctx_s=float(costs[3]),
        t_pair_s=float(costs[4]),
        t_copy_s=float(costs[5]),
        noise_sigma=0.0,
    )
    return Fit(
        profile=profile,
        steps=len(steps),
        mean_abs_error=float(np.mean(np.abs(predicted - seconds) / seconds)),
        total_error=float(predicted.sum() / seconds.sum() - 1),
    )


def _terms(columns: Mapping[str, Floats], knee: float) -> Floats:  # [I, 6]
    """What the coefficients of a profile are multiplied with."""
    tokens = np.maximum(columns["tokens"], knee)
    others = [columns[name] for name in ("decode_context", "prefill_pairs", "copies")]
    return np.stack([np.ones_like(tokens), columns["sequences"], tokens, *others], axis=1)


def _fit_knee(columns: Mapping[str, Floats], seconds: Floats, knee: float) -> tuple[float, Floats]:
    """Mean squared relative error, and the coefficients."""
    terms = _terms(columns, knee)
    weights = 1 / seconds
    costs = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        costs = _non_negative(terms * weights[:, None], seconds * weights)
        weights = 1 / np.maximum(terms @ costs, 1e-6)
    return float(np.mean(((terms @ costs - seconds) * weights) ** 2)), costs


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with no coefficient below zero (Lawson and Hanson, 1974)."""
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    gram = (matrix / scale).T @ (matrix / scale)
    moments = (matrix / scale).T @ target
    count = len(moments)
    free = np.zeros(count, dtype=bool)
    found = np.zeros(count)
    for _ in range(3 * count):
        gradient = moments - gram @ found
        gradient[free] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10 * max(1.0, float(np.abs(moments).max())):
            break
        free[entering] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moments[free], rcond=None)[0]
            if (trial[free] > 0).all():
                found = trial
                break
            # As far towards the trial as nothing falls below zero; what hits zero leaves.
            falling = free & (trial <= 0)
            steps = found[falling] / np.maximum(found[falling] - trial[falling], 1e-300)
            found = found + float(steps.min()) * (trial - found)
            free &= found > 1e-15
            found[~free] = 0.0
    result: Floats = found / scale
    return result


def _measured(requests: list[dict[str, Any]]) -> Outcome:
    rows = [request for request in requests if request["stats"] is not None]
    stats = [request["stats"] for request in rows]

    def column(name: str) -> Floats:
        values = [np.nan if stat[name] is None else stat[name] for stat in stats]
        return np.array(values, dtype=np.float64) / 1e6

    whole = [all(is_whole for _, is_whole in request["answers"]) for request in rows]
    tokens = np.array([stat["num_output_tokens"] for stat in stats], dtype=np.float64)
    arrival = column("arrival")
    return _outcome(
        requests=len(requests),
        whole=np.array(whole, dtype=bool),
        times=(arrival, column("first_scheduled"), column("first_token"), column("finished")),
        tokens=tokens,
        answers=np.array([len(request["answers"]) for request in rows], dtype=np.float64),
        preemptions=sum(stat["num_preemptions"] for stat in stats),
    )


def _simulated(result: dict[str, Any]) -> Outcome:
    names = result["outcome_names"]
    whole = np.isin(result["outcome"], [names.index(n) for n in ("stop", "length") if n in names])
    times = ("arrival_s", "first_scheduled_s", "first_token_s", "finished_s")
    arrival, scheduled, first, finished = (np.asarray(result[name]) for name in times)
    return _outcome(
        requests=len(arrival),
        whole=whole,
        times=(arrival, scheduled, first, finished),
        tokens=np.asarray(result["output_tokens"], dtype=np.float64),
        answers=np.ones(len(arrival)),
        preemptions=int(np.sum(result["preemptions"])),
    )


def _outcome(
    *,
    requests: int,
    whole: NDArray[np.bool_],
    times: tuple[Floats, Floats, Floats, Floats],
    tokens: Floats,
    answers: Floats,
    preemptions: int,
) -> Outcome:
    arrival, scheduled, first, finished = times
    gaps = tokens / np.maximum(answers, 1) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(gaps > 0, (finished - first) / gaps, np.nan)
    columns = {
        "queue_time_s": scheduled - arrival,
        "ttft_s": first - arrival,
        "tpot_s": tpot,
        "e2e_s": finished - arrival,
    }
    span = float(np.nanmax(finished) - np.nanmin(arrival)) if len(arrival) else 0.0
    return Outcome(
        requests=requests,
        finished=int(whole.sum()),
        output_tokens=int(tokens.sum()),
        span_s=span,
        quantiles={name: _quantiles(values[whole]) for name, values in columns.items()},
        preemptions=preemptions,
    )


def _quantiles(values: Floats) -> dict[str, float]:
    values = values[np.isfinite(values)]
    if not len(values):
        return {f"p{each}": float("nan") for each in _QUANTILES} | {"mean": float("nan")}
    quantiles = np.percentile(values, _QUANTILES)
    found = {f"p{each}": float(value) for each, value in zip(_QUANTILES, quantiles, strict=True)}
    return found | {"mean": float(values.mean())}
