#!/usr/bin/env python
"""The simulator beside the real engine: the same requests at the same times.

    python benches/fidelity.py --trace azure2023_conv.csv.gz

Serves slices of a trace with the default model at two loads, open loop. The first slice tells the
capacity, of which the loads are shares. At each load the engine's own cost model learns from one
slice, the lesson; the next is served and measured; and so on, in turns that are short, since a
machine is not as fast in one minute as in the next. The client shares the machine's cores with the
engine, as it would in life. The iterations come from the engine's flight log, which is read when
all has been served. Every measured slice is then simulated in three ways, with several seeds each:

speed not known
    What could have been said before the slice: it is as fast as the lesson was, and as unsteady as
    lessons were so far. Nobody knows when a neighbour will be busy. The aims are judged on this.
speed as the engine knew it
    How much of that is the machine's weather? An input beside the requests is how slow the machine
    was when: of each iteration's start what the engine knew then, a smoothing of those that had
    ended (`chairlift.noise.follow`), which is some four iterations late.
speed as measured
    The same, without the delay: around each iteration, itself left out, how many times as long as
    predicted others took (`chairlift.noise.speed_around`). What is wrong in the coefficients for
    all of them alike is in that, too.

Prints the latencies, of all slices together, and how far they are apart; and how far the cost model
has been off an iteration's time so far, the mean over the ends of slices. The least and the most of
single slices stand beside it. Exits with 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chairlift import AsyncEngine, SamplingParams
from chairlift.config import PolicyConfig
from chairlift.cost_model import CostCoefficients
from chairlift.flight_log import FlightLog
from chairlift.noise import Noise, fit_noise, follow, speed_around
from chairlift.simulation import CostProfile, Floats, Options, Simulation, Workload
from simulation.bench import PROFILES, Bench, Profile
from simulation.traces import read_trace

AIMS = {"TPOT p50": 0.10, "E2E p50": 0.10, "TTFT p99": 0.20}
"""Relative distance that each may have."""
MODEL_AIM = 0.10
"""Mean absolute error of an iteration's predicted time."""
LARGEST_ERROR = 0.5
"""What an iteration of a lesson may be off, as in `chairlift.noise`: a stall is no noise."""
WARM_UP_RATE = 2.0
"""Requests a second of the first slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of ``R`` requests, in seconds; TPOT is NaN where there is one output token."""

    ttft: Floats  # [R]
    tpot: Floats  # [R]
    e2e: Floats  # [R]

    def figures(self) -> dict[str, float]:
        """Medians and tails, in seconds."""
        values = {"TTFT": self.ttft, "TPOT": self.tpot, "E2E": self.e2e}
        return {
            f"{name} p{q}": float(np.nanquantile(of, q / 100))
            for name, of in values.items()
            for q in (50, 99)
        }

    @classmethod
    def joined(cls, parts: Sequence[Latencies]) -> Latencies:
        """Put those of several runs together."""
        return cls(
            ttft=np.concatenate([part.ttft for part in parts]),
            tpot=np.concatenate([part.tpot for part in parts]),
            e2e=np.concatenate([part.e2e for part in parts]),
        )

    @classmethod
    def simulated(cls, result: Simulation) -> Latencies:
        """Take them from a simulation."""
        gaps = np.where(result.output_tokens > 1, result.output_tokens - 1, np.nan)
        return cls(
            ttft=result.first_token_s - result.arrival_s,
            tpot=(result.finished_s - result.first_token_s) / gaps,
            e2e=result.finished_s - result.arrival_s,
        )


async def serve(engine: AsyncEngine, workload: Workload, seed: int) -> Latencies:
    """Send the requests at their times; what the engine says of each."""
    rng = random.Random(seed)
    vocabulary = range(2, engine.tokenizer.vocab_size)
    start = time.perf_counter()
    over = 0

    async def one(at: int) -> tuple[float, float, float]:
        nonlocal over
        prompt = rng.choices(vocabulary, k=workload.input_tokens[at])
        length = int(workload.output_tokens[at])
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        await asyncio.sleep(max(0.0, start + workload.arrival_s[at] - time.perf_counter()))
        stream = engine.generate(prompt, params)
        async for _ in stream:
            pass
        stats = stream.stats
        over += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\rlive: {over} of {len(workload)} requests\x1b[K")
        return stats.ttft, np.nan if stats.tpot is None else stats.tpot, stats.e2e

    rows = np.array(await asyncio.gather(*map(one, range(len(workload)))))
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return Latencies(ttft=rows[:, 0], tpot=rows[:, 1], e2e=rows[:, 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What was measured in a run at a rate, and what had been learned before."""

    rate: float
    learned: CostCoefficients
    lesson: slice
    """Positions of the lesson's requests in the order of arrival."""
    workload: Workload
    latencies: Latencies
    model_error: float

    @property
    def measured(self) -> slice:
        """Positions of the requests that were measured: those behind the lesson."""
        return slice(self.lesson.stop, self.lesson.stop + len(self.workload))


async def live(bench: Bench, args: argparse.Namespace, log: Path) -> list[Served]:
    """Serve at each rate in turn, on one engine, each time after other requests to learn from."""
    settings = bench.settings(PolicyConfig(), bench.trace.at_once())
    engine = AsyncEngine(
        args.model,
        executor=args.executor,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=False,
        max_queued_requests=1_000_000,
        cost_model_cache=False,
        record=log,
    )
    at = np.arange(len(bench.trace)) - args.warm_up
    of_run, within = np.divmod(at, args.lessons + args.requests)
    served: list[Served] = []
    num_sent = args.warm_up
    try:
        warm_up = bench.trace.where(at < 0).at_rate(WARM_UP_RATE, args.seed)
        await serve(engine, warm_up, args.seed)
        most = capacity(bench, learned(engine))
        tell(f"capacity {most:.2f} requests/s, by what {args.warm_up} requests taught")
        rates = args.rates or [load * most for load in args.loads]
        seconds = args.runs * (args.lessons + args.requests) * sum(1 / rate for rate in rates)
        tell(f"requests will come for {seconds / 60:.0f} minutes")
        for run, rate in itertools.product(range(args.runs), rates):
            tell(f"run {run + 1} of {args.runs} at {rate:.3g} requests/s")
            seed = args.seed + 2 * run
            lessons = bench.trace.where((of_run == run) & (within < args.lessons))
            measured = bench.trace.where((of_run == run) & (within >= args.lessons))
            await serve(engine, lessons.at_rate(rate, seed), seed + 1)
            known = learned(engine)
            workload = measured.at_rate(rate, seed)
            latencies = await serve(engine, workload, seed)
            error = (await engine.metrics())["pace"]["prediction_error"]
            served.append(
                Served(
                    rate=rate,
                    learned=known,
                    lesson=slice(num_sent, num_sent + args.lessons),
                    workload=workload,
                    latencies=latencies,
                    model_error=error,
                )
            )
            num_sent += args.lessons + args.requests
    finally:
        await engine.shutdown()
    return served


def learned(engine: AsyncEngine) -> CostCoefficients:
    """What the engine has learned so far."""
    costs = engine._engine.client.cost_model()
    if costs is None:
        raise RuntimeError("the engine knows no costs yet; warm up with more requests")
    return CostCoefficients.of(costs)


def profile(costs: CostCoefficients, noise: Noise, num_kv_blocks: int) -> Profile:
    """Make a profile of coefficients and of how the machine differs from them."""
    values = costs.profile(noise_sigma=0.0, num_kv_blocks=num_kv_blocks)
    del values["num_kv_blocks"], values["noise_sigma"]
    cost = CostProfile(
        **{name: value * noise.factor for name, value in values.items()},
        noise_sigma=min(noise.noise_sigma, 1.0),
        slow_sigma=min(noise.slow_sigma, 1.0),
        slow_s=noise.slow_s,
    )
    return Profile(name="learned", cost=cost, num_kv_blocks=num_kv_blocks)


def capacity(bench: Bench, costs: CostCoefficients, factor: float = 1.0) -> float:
    """Requests a second of a machine that is always as fast."""
    steady = profile(costs, Noise(factor=factor), bench.profile.num_kv_blocks)
    return bench.on(steady).capacity(bench.trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """Those of a slice."""

    start_s: Floats  # [I], from the slice's start
    took_s: Floats  # [I]
    shapes: Floats  # [I, 6]

    def predicted_s(self, costs: CostCoefficients) -> Floats:  # [I]
        """How long they should have taken."""
        return costs.predict_us(self.shapes) / 1e6

    def noise(self, costs: CostCoefficients) -> Noise:
        """How they differ from the coefficients."""
        return fit_noise(self.start_s, self.took_s, self.predicted_s(costs))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a slice is simulated with, beside the coefficients."""

    noise: Noise
    slowness: list[tuple[float, float]] | None
    """As of :class:`chairlift.simulation.Options`."""


class Recording:
    """The iterations of lessons and of measured slices, out of the flight log."""

    def __init__(self, log: Path, served: Sequence[Served]) -> None:
        """Read the log of what was served."""
        measures = json.loads(FlightLog(log).measure().measures())
        requests = sorted(measures["requests"], key=lambda request: request["id"])
        stats = [request["stats"] for request in requests]
        steps = measures["steps"]
        names = ("sequences", "tokens", "decode_context", "prefill_pairs", "samples", "copies")
        shapes = np.array([[step[name] for name in names] for step in steps], dtype=np.float64)
        start_s = np.array([step["start_us"] for step in steps], dtype=np.float64) / 1e6
        took_s = np.array([max(step["duration_us"], 1) for step in steps], dtype=np.float64) / 1e6

        def of(chosen: slice, arrival_s: Floats) -> Iterations:
            # The client is late by some milliseconds, and least where the slice began.
            came_s = np.array([each["arrival"] for each in stats[chosen]]) / 1e6
            zero = float((came_s - arrival_s).min())
            last = max(each["finished"] for each in stats[chosen]) / 1e6
            within = (start_s >= zero) & (start_s <= last)
            return Iterations(
                start_s=start_s[within] - zero, took_s=took_s[within], shapes=shapes[within]
            )

        self._served = served
        self._lessons = [of(run.lesson, np.zeros(1)) for run in served]
        self._measured = [of(run.measured, run.workload.arrival_s) for run in served]

    def slowdown(self, run: int) -> float:
        """How many times as long as learned the iterations of a measured slice took, in sum."""
        measured = self._measured[run]
        predicted_s = measured.predicted_s(self._served[run].learned)
        return float(measured.took_s.sum() / predicted_s.sum())

    def speed_not_known(self, run: int) -> World:
        """What was known before a run.

        The factor is that of the lesson just before: coefficients are of hundreds of iterations,
        of which those that took long count less, and a machine is as fast as it was a moment ago
        rather than as it is on average. The noise is that of all lessons so far, each beside its
        own factor; so what changes from one lesson to the next is not in it.
        """
        costs = self._served[run].learned
        lessons = self._lessons[: run + 1]
        factors = [lesson.noise(costs).factor for lesson in lessons]
        noise = fit_noise(
            np.concatenate([lesson.start_s for lesson in lessons]),
            np.concatenate([lesson.took_s for lesson in lessons]),
            np.concatenate(
                [
                    lesson.predicted_s(costs) * factor
                    for lesson, factor in zip(lessons, factors, strict=True)
                ]
            ),
        )
        return World(noise=replace(noise, factor=factors[-1]), slowness=None)

    def speed_as_measured(self, run: int) -> World:
        """How slow the machine was in a run."""
        return self._recorded(run, lambda took_s, predicted_s, _: speed_around(took_s, predicted_s))

    def speed_as_known(self, run: int) -> World:
        """How slow the machine was in a run, as the engine knew it: first as in the lesson."""
        return self._recorded(
            run, lambda took_s, predicted_s, factor: follow(took_s, predicted_s, factor)[:-1]
        )

    def _recorded(self, run: int, speed: Callable[[Floats, Floats, float], Floats]) -> World:
        """Take the slowness of a run from it, the noise beside that from the lessons so far.

        ``speed`` tells it of what iterations took, of what they should have taken, and of the
        lesson's factor. The noise has a factor, too: it is to have median 1.
        """
        costs = self._served[run].learned
        logs = []
        for lesson in self._lessons[: run + 1]:
            predicted_s = lesson.predicted_s(costs)
            factor = lesson.noise(costs).factor
            ratios = lesson.took_s / (predicted_s * speed(lesson.took_s, predicted_s, factor))
            logs.append(np.log(np.clip(ratios, 1 - LARGEST_ERROR, 1 + LARGEST_ERROR)))
        log = np.concatenate(logs)
        measured = self._measured[run]
        factors = speed(measured.took_s, measured.predicted_s(costs), factor)
        # Each from when the one before has ended.
        times = [0.0, *(measured.start_s + measured.took_s)[:-1]]
        return World(
            noise=Noise(factor=float(np.exp(log.mean())), noise_sigma=float(log.std())),
            slowness=list(zip(times, map(float, factors), strict=True)),
        )


def compare(measured: list[Latencies], simulated: list[Latencies], *, is_judged: bool) -> bool:
    """Print how far apart both are, of all runs at a load; whether the aims hold.

    What is not judged is told of the figures that have aims, without them.
    """
    holds = True
    ours, theirs = (Latencies.joined(runs).figures() for runs in (measured, simulated))
    each = [(run.figures(), twin.figures()) for run, twin in zip(measured, simulated, strict=True)]
    for name in ours if is_judged else AIMS:
        off = theirs[name] / ours[name] - 1
        singly = np.array([twin[name] / run[name] - 1 for run, twin in each])
        verdict, is_met = judge(off, AIMS.get(name) if is_judged else None)
        holds &= is_met
        values = f"{1e3 * ours[name]:9.1f} {1e3 * theirs[name]:9.1f}"
        print(f"  {name:9} {values} {off:+8.1%} {spread(singly)}{verdict}")
    return holds


def tell(progress: str) -> None:
    """Say on stderr how far it is."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {progress}\n")


def spread(values: Floats) -> str:
    """Least and most of relative figures."""
    return f"({values.min():+.1%} to {values.max():+.1%})"


def judge(off: float, aim: float | None) -> tuple[str, bool]:
    """What to say of a distance, and whether it is within its aim."""
    if aim is None:
        return "", True
    is_met = abs(off) <= aim
    return f"  aim {aim:.0%}: {'holds' if is_met else 'missed'}", is_met


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve and simulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="gzip CSV")
    parser.add_argument("--model", help="as of chairlift generate")
    parser.add_argument("--executor", help="as of chairlift generate")
    parser.add_argument("--divide", type=int, default=8, metavar="N", help="divide lengths")
    parser.add_argument("--warm-up", type=int, default=60, metavar="N", help="to begin with")
    parser.add_argument("--lessons", type=int, default=20, metavar="N", help="to learn from, a run")
    parser.add_argument("--requests", type=int, default=40, metavar="N", help="to measure, a run")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.3, 0.5], metavar="X", help="of the capacity"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="X", help="requests a second instead of loads"
    )
    parser.add_argument("--runs", type=int, default=12, metavar="N", help="of each load")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="to simulate a run with")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    needed = args.warm_up + args.runs * (args.lessons + args.requests)
    trace = read_trace(args.trace).first(needed).divided(args.divide)
    if len(trace) < needed:
        parser.error(f"{args.trace} has {len(trace)} requests; {args.runs} runs need {needed}")
    cost, num_kv_blocks = PROFILES["gpu-8b"]  # for the limits; memory does not bind here
    bench = Bench(
        profile=Profile(name="limits", cost=cost, num_kv_blocks=num_kv_blocks),
        trace=trace,
        batch=trace,
        load=1.0,
        seed=args.seed,
        max_tokens=1,
        quiet=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "flight.log"
        served = asyncio.run(live(bench, args, log))
        recording = Recording(log, served)
    return 0 if judge_all(bench, served, recording, args.seeds) else 1


def judge_all(bench: Bench, served: Sequence[Served], recording: Recording, num_seeds: int) -> bool:
    """Simulate the slices of each load, print how far off that is; whether the aims hold."""
    holds = True
    for rate in dict.fromkeys(run.rate for run in served):
        chosen = [at for at, run in enumerate(served) if run.rate == rate]
        runs = [served[at] for at in chosen]
        slow = [recording.slowdown(at) for at in chosen]
        loads = [
            rate / capacity(bench, run.learned, factor)
            for run, factor in zip(runs, slow, strict=True)
        ]
        print(f"{rate:.3g} requests/s, load {np.median(loads):.2f}, {len(runs)} runs")
        print("  milliseconds, measured and simulated, and how far apart (single runs)")
        measured = [run.latencies for run in runs]
        worlds = [recording.speed_not_known(at) for at in chosen]
        factors = [world.noise.factor for world in worlds]
        last = worlds[-1].noise
        print(
            f"  speed not known: lessons took {min(factors):.2f} to {max(factors):.2f} times as "
            f"long; noise sigma {last.noise_sigma:.2f}, slow sigma {last.slow_sigma:.2f} "
            f"for {last.slow_s:.1f} s"
        )
        holds &= compare(measured, simulated(bench, runs, worlds, num_seeds), is_judged=True)
        errors = np.array([run.model_error for run in runs])
        verdict, is_met = judge(float(errors.mean()), MODEL_AIM)
        holds &= is_met
        print(f"  time of an iteration: off by {errors.mean():.1%} {spread(errors)}{verdict}")
        worlds = [recording.speed_as_known(at) for at in chosen]
        print(f"  speed as the engine knew it: noise sigma {worlds[-1].noise.noise_sigma:.2f}")
        compare(measured, simulated(bench, runs, worlds, num_seeds), is_judged=False)
        worlds = [recording.speed_as_measured(at) for at in chosen]
        print(
            f"  speed as measured: {min(slow):.2f} to {max(slow):.2f} times as long as learned; "
            f"noise sigma {worlds[-1].noise.noise_sigma:.2f}"
        )
        compare(measured, simulated(bench, runs, worlds, num_seeds), is_judged=False)
    return holds


def simulated(
    bench: Bench, runs: Sequence[Served], worlds: Sequence[World], num_seeds: int
) -> list[Latencies]:
    """Simulate each run with several seeds."""
    latencies = []
    for run, world in zip(runs, worlds, strict=True):
        on = bench.on(profile(run.learned, world.noise, bench.profile.num_kv_blocks))
        options = Options(slowness=world.slowness)
        results = [
            replace(on, seed=bench.seed + seed)
            .run("simulated", PolicyConfig(), run.workload, options)
            .result
            for seed in range(num_seeds)
        ]
        latencies.append(Latencies.joined([Latencies.simulated(result) for result in results]))
    return latencies


if __name__ == "__main__":
    sys.exit(main())
