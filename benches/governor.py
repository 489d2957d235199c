"""A long prompt joins decodes on the real CPU engine: gaps of the decodes, and its own TTFT.

    python benches/governor.py [--decodes 32] [--prompt 2048] [--target 200ms] [--json]

First requests of many lengths teach the cost model. Then ``--decodes`` answers are being written
when the prompt comes; told are the gaps of the decodes until its first token, under a target and
under fixed budgets. The simulated twin is ``benches/policies.py --experiment governor``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from chairlift import AsyncEngine, Config, PaceConfig, PolicyConfig, SamplingParams
from chairlift.config import seconds


async def answer(engine: AsyncEngine, prompt: int, output: int, rng: random.Random) -> list[float]:
    """Serve one request; returns when its tokens came."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    vocabulary = range(2, engine.tokenizer.vocab_size)
    tokens = {"prompt_token_ids": rng.choices(vocabulary, k=prompt)}
    return [time.perf_counter() async for _ in engine.generate(tokens, params)]


async def measure(args: argparse.Namespace, target_s: float | None, budget: int) -> dict[str, Any]:
    """Let the prompt join under one policy."""
    rng = random.Random(args.seed)
    policy = PolicyConfig(pace=PaceConfig(iteration_target=target_s))
    longest = args.prompt + 64
    async with AsyncEngine(
        args.model,
        executor=args.executor,
        config=Config(policy=policy),
        max_num_batched_tokens=budget,
        max_model_len=max(longest, 1_024),
        enable_prefix_caching=False,
        cost_model_cache=args.cost_model_cache,
    ) as engine:
        lessons = [
            (int(16 * 2 ** rng.uniform(0, 5)), rng.randint(4, 24)) for _ in range(args.lessons)
        ]
        await asyncio.gather(*(answer(engine, *lesson, rng) for lesson in lessons))
        decodes = [
            asyncio.create_task(answer(engine, 128, args.output, rng)) for _ in range(args.decodes)
        ]
        await asyncio.sleep(args.settle)
        came = time.perf_counter()
        (first,) = await answer(engine, args.prompt, 1, rng)
        times = await asyncio.gather(*decodes)
        pace = (await engine.metrics())["pace"]
    gaps = [
        after - before
        for each in times
        for before, after in itertools.pairwise(each)
        if after > came and before < first
    ]
    p99 = statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else float("nan")
    return {
        "target_ms": None if target_s is None else target_s * 1e3,
        "budget": budget,
        "gaps": len(gaps),
        "p50_ms": statistics.median(gaps) * 1e3 if gaps else float("nan"),
        "p99_ms": p99 * 1e3,
        "max_ms": max(gaps, default=float("nan")) * 1e3,
        "p99_over_target": None if target_s is None else p99 / target_s,
        "ttft_s": first - came,
        "prediction_error": pace["prediction_error"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="as of chairlift generate")
    parser.add_argument("--executor", help="as of chairlift generate")
    parser.add_argument("--lessons", type=int, default=48, help="requests to learn from")
    parser.add_argument("--decodes", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2_048, help="tokens of the long prompt")
    parser.add_argument("--output", type=int, default=200, help="tokens of each decode")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before it comes")
    parser.add_argument("--target", type=seconds, default=0.2, metavar="TIME")
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 2_048])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost-model-cache", action="store_true", help="begin with what is kept")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    runs = [(args.target, max(args.budgets, default=2_048)), *((None, b) for b in args.budgets)]
    results = [asyncio.run(measure(args, target_s, budget)) for target_s, budget in runs]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print("  ".join(f"{name} {_shown(value)}" for name, value in result.items()))


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
