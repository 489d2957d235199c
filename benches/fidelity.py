#!/usr/bin/env python
"""The simulator beside the real engine: the same requests at the same times.

    chairlift calibrate --profile cpu.json
    python benches/fidelity.py --trace azure2023_conv.csv.gz --profile cpu.json

Serves a slice of a trace with the default model at two loads, open loop, and serves it again in the
simulator with the costs of the profile, which was fitted before and to other requests. Prints, for
each load, the latencies of both and how far they are apart, and how far the engine's cost model
was off an iteration's time. Exits with 1 where an aim is missed. The client shares the machine's
cores with the engine, as it would in life.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import AsyncEngine, SamplingParams
from chairlift.config import PolicyConfig
from chairlift.simulation import Floats, Options, Simulation, Workload
from simulation.bench import Bench, Profile, read_profile
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
    start = time.perf_counter()
    over = 0

    async def one(at: int) -> tuple[float, float, float]:
        nonlocal over
        prompt = [rng.randrange(100, 29_999) for _ in range(workload.input_tokens[at])]
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


async def live(bench: Bench, loads: list[float]) -> list[tuple[Latencies, dict[str, Any]]]:
    """Serve at each load, on one engine."""
    settings = bench.settings(PolicyConfig(), bench.at_load(1.0))
    engine = AsyncEngine(
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=False,
        max_queued_requests=1_000_000,
    )
    served = []
    try:
        warm_up = bench.at_load(loads[0], bench.trace.first(32))
        await serve(engine, warm_up, bench.seed + 1)
        for load in loads:
            latencies = await serve(engine, bench.at_load(load), bench.seed)
            served.append((latencies, await engine.metrics()))
    finally:
        await engine.shutdown()
    return served


def compare(load: float, measured: Latencies, predicted: Latencies) -> bool:
    """Print the latencies of both; whether the aims hold."""
    holds = True
    print(f"load {load}: milliseconds, measured and simulated")
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


def main() -> int:
    """Serve and simulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="gzip CSV")
    parser.add_argument(
        "--profile", required=True, metavar="FILE", help="JSON of chairlift calibrate"
    )
    parser.add_argument("--divide", type=int, default=8, metavar="N", help="divide lengths")
    parser.add_argument("--requests", type=int, default=500, metavar="N")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8], metavar="X")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    profile: Profile = read_profile(args.profile)
    bench = Bench(
        profile=profile,
        trace=read_trace(args.trace).first(args.requests).divided(args.divide),
        batch=read_trace(args.trace).first(1),
        load=1.0,
        seed=args.seed,
        max_tokens=1,
        divided_by=args.divide,
    )
    print(f"capacity {bench.capacity(bench.trace):.2f} requests/s by the profile")
    served = asyncio.run(live(bench, args.loads))
    holds = True
    for load, (measured, _) in zip(args.loads, served, strict=True):
        run = bench.run("simulated", PolicyConfig(), bench.at_load(load), Options())
        holds &= compare(load, measured, Latencies.simulated(run.result))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
