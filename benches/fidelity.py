#!/usr/bin/env python
"""The simulator beside the real engine: the same requests at the same times.

    python benches/fidelity.py --trace azure2023_conv.csv.gz

Serves slices of a trace with the default model at two rates, open loop. At each rate the engine's
own cost model learns from one slice; with what it knows then the next is simulated, and served.
Prints the latencies of both and how far they are apart, and how far the cost model was off an
iteration's time. Exits with 1 where an aim is missed. The client shares the machine's cores with
the engine, as it would in life.
"""

from __future__ import annotations

import argparse
import asyncio
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
    """What was measured at a rate, and what had been learned before."""

    profile: Profile
    workload: Workload
    latencies: Latencies
    model_error: float


async def live(bench: Bench, args: argparse.Namespace) -> list[Served]:
    """Serve at each rate, on one engine, after other requests of the same kind to learn from."""
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
    lessons = bench.trace.first(args.lessons)
    measured = bench.trace.where(np.arange(len(bench.trace)) >= args.lessons)
    served = []
    try:
        for rate in args.rates:
            await serve(engine, lessons.at_rate(rate, args.seed), args.seed + 1)
            profile = learned_profile(engine, bench.profile.num_kv_blocks)
            workload = measured.at_rate(rate, args.seed)
            latencies = await serve(engine, workload, args.seed)
            error = (await engine.metrics())["pace"]["prediction_error"]
            served.append(
                Served(profile=profile, workload=workload, latencies=latencies, model_error=error)
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


def compare(measured: Latencies, predicted: Latencies) -> bool:
    """Print the latencies of both; whether the aims hold."""
    holds = True
    print("  milliseconds, measured and simulated:")
    ours, theirs = measured.figures(), predicted.figures()
    for name, value in ours.items():
        off = theirs[name] / value - 1
        aim = AIMS.get(name)
        verdict = (
            "" if aim is None else f"  aim {aim:.0%}: {'holds' if abs(off) <= aim else 'missed'}"
        )
        holds &= aim is None or abs(off) <= aim
        print(f"  {name:9} {1e3 * value:9.1f} {1e3 * theirs[name]:9.1f} {off:+8.1%}{verdict}")
    return holds


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve and simulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="gzip CSV")
    parser.add_argument("--model", help="as of chairlift generate")
    parser.add_argument("--executor", help="as of chairlift generate")
    parser.add_argument("--divide", type=int, default=8, metavar="N", help="divide lengths")
    parser.add_argument("--lessons", type=int, default=150, metavar="N", help="to learn from")
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="to measure")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[3.0, 5.0], metavar="X", help="requests a second"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    trace = read_trace(args.trace).first(args.lessons + args.requests).divided(args.divide)
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
    for rate, served in zip(args.rates, asyncio.run(live(bench, args)), strict=True):
        twin = replace(bench, profile=served.profile)
        run = twin.run("simulated", PolicyConfig(), served.workload, Options())
        print(f"{rate:g} requests/s, load {rate / twin.capacity(trace):.2f}")
        holds &= compare(served.latencies, Latencies.simulated(run.result))
        verdict = "holds" if served.model_error <= MODEL_AIM else "missed"
        print(f"  time of an iteration: off by {served.model_error:.1%}", end="")
        print(f"  aim {MODEL_AIM:.0%}: {verdict}")
        holds &= served.model_error <= MODEL_AIM
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
