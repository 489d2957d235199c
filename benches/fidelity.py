#!/usr/bin/env python
"""The simulator beside the real engine: the same requests at the same times.

    python benches/fidelity.py --trace azure2023_conv.csv.gz

Serves slices of a trace with the default model at two rates, open loop. At each rate the engine's
own cost model learns from one slice; with what it knows then the next is simulated, and served;
and so on, in turns that are short, since a machine is not as fast in one minute as in the next.
Prints the latencies of both, of all slices together, and how far they are apart; and how far the
cost model was off an iteration's time, the mean of the slices. The least and the most of single
slices stand beside it. Exits with 1 where an aim is missed. The client shares the machine's cores
with the engine, as it would in life.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chairlift import AsyncEngine, SamplingParams
from chairlift.config import PolicyConfig
from chairlift.cost_model import CostCoefficients
from chairlift.simulation import CostProfile, Floats, Options, Simulation, Workload
from simulation.bench import PROFILES, Bench, Profile
from simulation.traces import read_trace

AIMS = {"TPOT p50": 0.10, "E2E p50": 0.10, "TTFT p99": 0.20}
"""Relative distance that each may have."""
MODEL_AIM = 0.10
"""Mean absolute error of an iteration's predicted time."""


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
    profile: Profile
    workload: Workload
    latencies: Latencies
    model_error: float


async def live(bench: Bench, args: argparse.Namespace) -> list[Served]:
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
    )
    at = np.arange(len(bench.trace))
    of_run, within = np.divmod(at, args.lessons + args.requests)
    served = []
    try:
        for run, rate in itertools.product(range(args.runs), args.rates):
            seed = args.seed + 2 * run
            lessons = bench.trace.where((of_run == run) & (within < args.lessons))
            measured = bench.trace.where((of_run == run) & (within >= args.lessons))
            await serve(engine, lessons.at_rate(rate, seed), seed + 1)
            profile = learned_profile(engine, bench.profile.num_kv_blocks)
            workload = measured.at_rate(rate, seed)
            latencies = await serve(engine, workload, seed)
            error = (await engine.metrics())["pace"]["prediction_error"]
            served.append(
                Served(
                    rate=rate,
                    profile=profile,
                    workload=workload,
                    latencies=latencies,
                    model_error=error,
                )
            )
    finally:
        await engine.shutdown()
    return served


def learned_profile(engine: AsyncEngine, num_kv_blocks: int) -> Profile:
    """What the engine has learned so far."""
    learned = engine._engine.client.cost_model()
    sigma = math.sqrt(math.pi / 2) * learned["mean_error"]
    values = CostCoefficients.of(learned).profile(noise_sigma=sigma, num_kv_blocks=num_kv_blocks)
    blocks = int(values.pop("num_kv_blocks"))
    return Profile(name="learned", cost=CostProfile(**values), num_kv_blocks=blocks)


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
    parser.add_argument("--lessons", type=int, default=75, metavar="N", help="to learn from, a run")
    parser.add_argument("--requests", type=int, default=150, metavar="N", help="to measure, a run")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[3.0, 5.0], metavar="X", help="requests a second"
    )
    parser.add_argument("--runs", type=int, default=6, metavar="N", help="of each rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    needed = args.runs * (args.lessons + args.requests)
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
    holds = True
    everything = asyncio.run(live(bench, args))
    for rate in args.rates:
        runs = [served for served in everything if served.rate == rate]
        twins = [replace(bench, profile=served.profile) for served in runs]
        simulated = [
            twin.run("simulated", PolicyConfig(), served.workload, Options())
            for twin, served in zip(twins, runs, strict=True)
        ]
        load = float(np.median([rate / twin.capacity(trace) for twin in twins]))
        print(f"{rate:g} requests/s, load {load:.2f}, {len(runs)} runs")
        holds &= compare(
            [served.latencies for served in runs],
            [Latencies.simulated(run.result) for run in simulated],
        )
        errors = np.array([served.model_error for served in runs])
        verdict, is_met = judge(float(errors.mean()), MODEL_AIM)
        holds &= is_met
        print(f"  time of an iteration: off by {errors.mean():.1%} {spread(errors)}{verdict}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
