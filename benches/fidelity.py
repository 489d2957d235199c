#!/usr/bin/env python
"""The simulator beside the real engine: the same requests at the same times.

    python benches/fidelity.py --trace azure2023_conv.csv.gz

Serves slices of a trace with the default model at two loads, open loop. The first slice tells the
capacity, of which the loads are shares. At each load the engine's own cost model learns from one
slice, the lesson; the next is served, and simulated with what was known before it: the
coefficients, how much faster or slower than those the lesson was, and how unsteady lessons were so
far. And so on, in turns that are short, since a machine is not as fast in one minute as in the
next. Each slice is simulated with several seeds, as nobody knows when the slow seconds are.

Prints the latencies of both, of all slices together, and how far they are apart; and how far the
cost model has been off an iteration's time so far, the mean over the ends of slices. The least and
the most of single slices stand beside it. Exits with 1 where an aim is missed. The client shares
the machine's cores with the engine, as it would in life. The iterations come from the engine's
flight log, which is read when all has been served.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chairlift import AsyncEngine, SamplingParams
from chairlift.config import PolicyConfig
from chairlift.cost_model import CostCoefficients
from chairlift.flight_log import FlightLog
from chairlift.noise import Noise, fit_noise
from chairlift.simulation import CostProfile, Floats, Options, Simulation, Workload
from simulation.bench import PROFILES, Bench, Profile
from simulation.traces import read_trace

AIMS = {"TPOT p50": 0.10, "E2E p50": 0.10, "TTFT p99": 0.20}
"""Relative distance that each may have."""
MODEL_AIM = 0.10
"""Mean absolute error of an iteration's predicted time."""
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


class Lessons:
    """The iterations of every lesson, out of the flight log."""

    def __init__(self, log: Path, served: Sequence[Served]) -> None:
        """Read the log of what was served."""
        measures = json.loads(FlightLog(log).measure().measures())
        requests = sorted(measures["requests"], key=lambda request: request["id"])
        steps = measures["steps"]
        names = ("sequences", "tokens", "decode_context", "prefill_pairs", "samples", "copies")
        shapes = np.array([[step[name] for name in names] for step in steps], dtype=np.float64)
        start_us = np.array([step["start_us"] for step in steps], dtype=np.float64)
        took_us = np.array([max(step["duration_us"], 1) for step in steps], dtype=np.float64)
        self._lessons = []
        for run in served:
            stats = [request["stats"] for request in requests[run.lesson]]
            first = min(of["arrival"] for of in stats)
            last = max(of["finished"] for of in stats)
            within = (start_us >= first) & (start_us <= last)
            self._lessons.append((start_us[within] / 1e6, took_us[within] / 1e6, shapes[within]))

    def noise(self, run: int, costs: CostCoefficients) -> Noise:
        """How the machine differs from the coefficients known before a run.

        The factor is that of the lesson just before: coefficients are of hundreds of iterations,
        of which those that took long count less, and a machine is as fast as it was a moment ago
        rather than as it is on average. The noise is that of all lessons so far, each beside its
        own factor; so what changes from one lesson to the next is not in it.
        """
        parts = []
        for start_s, took_s, shapes in self._lessons[: run + 1]:
            predicted_s = costs.predict_us(shapes) / 1e6
            factor = fit_noise(start_s, took_s, predicted_s).factor
            parts.append((start_s, took_s, predicted_s * factor))
        noise = fit_noise(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        return replace(noise, factor=factor)


def compare(measured: list[Latencies], predicted: list[Latencies]) -> bool:
    """Print the latencies of both, of all runs at a rate; whether the aims hold."""
    holds = True
    print("  milliseconds, measured and simulated, and how far apart (single runs)")
    ours, theirs = (Latencies.joined(runs).figures() for runs in (measured, predicted))
    each = [(run.figures(), twin.figures()) for run, twin in zip(measured, predicted, strict=True)]
    for name in ours:
        off = theirs[name] / ours[name] - 1
        singly = np.array([twin[name] / run[name] - 1 for run, twin in each])
        verdict, is_met = judge(off, AIMS.get(name))
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
    parser.add_argument("--lessons", type=int, default=30, metavar="N", help="to learn from, a run")
    parser.add_argument("--requests", type=int, default=65, metavar="N", help="to measure, a run")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.3, 0.5], metavar="X", help="of the capacity"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="X", help="requests a second instead of loads"
    )
    parser.add_argument("--runs", type=int, default=8, metavar="N", help="of each load")
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
        lessons = Lessons(log, served)
    noises = [lessons.noise(at, run.learned) for at, run in enumerate(served)]
    holds = True
    for rate in dict.fromkeys(run.rate for run in served):
        chosen = [at for at, run in enumerate(served) if run.rate == rate]
        runs = [(served[at], noises[at]) for at in chosen]
        holds &= judge_rate(bench, runs, args.seeds)
    return 0 if holds else 1


def judge_rate(bench: Bench, runs: Sequence[tuple[Served, Noise]], num_seeds: int) -> bool:
    """Simulate the runs at a rate, print how far off that is; whether the aims hold."""
    rate = runs[0][0].rate
    load = np.median([rate / capacity(bench, run.learned, noise.factor) for run, noise in runs])
    print(f"{rate:.3g} requests/s, load {load:.2f}, {len(runs)} runs")
    simulated = []
    for run, noise in runs:
        unsteady = profile(run.learned, noise, bench.profile.num_kv_blocks)
        twins = [replace(bench.on(unsteady), seed=bench.seed + seed) for seed in range(num_seeds)]
        results = [
            twin.run("simulated", PolicyConfig(), run.workload, Options()).result for twin in twins
        ]
        simulated.append(Latencies.joined([Latencies.simulated(result) for result in results]))
    holds = compare([run.latencies for run, _ in runs], simulated)
    errors = np.array([run.model_error for run, _ in runs])
    verdict, is_met = judge(float(errors.mean()), MODEL_AIM)
    print(f"  time of an iteration: off by {errors.mean():.1%} {spread(errors)}{verdict}")
    factors = np.array([noise.factor for _, noise in runs])
    last = runs[-1][1]
    print(
        f"  lessons beside what was learned: {factors.min():.2f} to {factors.max():.2f} times as "
        f"long; noise sigma {last.noise_sigma:.2f}, slow sigma {last.slow_sigma:.2f} "
        f"for {last.slow_s:.1f} s"
    )
    return holds and is_met


if __name__ == "__main__":
    sys.exit(main())
