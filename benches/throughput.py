"""A first look at speed through ``LLM.generate``: two bursts, one stream, one long prefill.

    python benches/throughput.py [--dtype bfloat16] [--json]
    python benches/throughput.py --profile    # where an iteration's time goes at 32 running

Workloads: W1 is 64 requests of 128 prompt and 64 output tokens at once; W2 is 64 requests of 16 to
512 prompt tokens and lognormal(3.5, 1.0) output tokens, at most 512; then one stream of 128 output
tokens, and one prompt of 1,024. Prompts are random token ids, greedy, to the last token. Medians of
``--reps`` runs, each with prompts of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from chairlift import LLM, SamplingParams
from chairlift.engine_args import DEFAULT_MODEL
from chairlift.torch_executor import TorchExecutor

Request = tuple[list[int], int]
"""Prompt token ids and the number of output tokens."""

_VOCABULARY = range(2, 49_152)


def w1(rng: random.Random) -> list[Request]:
    return [(rng.choices(_VOCABULARY, k=128), 64) for _ in range(64)]


def w2(rng: random.Random) -> list[Request]:
    requests = []
    for _ in range(64):
        prompt = rng.choices(_VOCABULARY, k=rng.randint(16, 512))
        requests.append((prompt, min(512, max(1, int(rng.lognormvariate(3.5, 1.0))))))
    return requests


def one_stream(rng: random.Random) -> list[Request]:
    return [(rng.choices(_VOCABULARY, k=16), 128)]


def prefill(rng: random.Random) -> list[Request]:
    return [(rng.choices(_VOCABULARY, k=1_024), 1)]


def measure(llm: LLM, requests: list[Request]) -> dict[str, float]:
    """Serve the requests at once; throughput by the wall clock."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for _, tokens in requests
    ]
    start = time.perf_counter()
    results = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    output_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    prompt_tokens = sum(len(prompt) for prompt, _ in requests)
    stats = [result.stats for result in results if result.stats is not None]
    tpot = [stat.tpot for stat in stats if stat.tpot is not None]
    return {
        "output_tokens_per_s": output_tokens / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "decode_tokens_per_s": 1 / statistics.median(tpot) if tpot else 0.0,
    }


class Timed:
    """Adds up the time that is spent in a function, under a name."""

    seconds: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*args, **options)
        spent = time.perf_counter() - start
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + spent
        return result


def instrument(executor: TorchExecutor) -> None:
    """Time the parts of the executor's steps."""
    model, backend = executor._model, executor._backend
    linear = ("qkv", "output", "gate_up", "down")
    model._layers = [
        dataclasses.replace(
            layer, **{name: Timed("linear layers", getattr(layer, name)) for name in linear}
        )
        for layer in model._layers
    ]
    model._lm_head = Timed("output layer (lm_head)", model._lm_head)
    model._ops = SimpleNamespace(
        add_rms_norm=Timed("norms, activation", model._ops.add_rms_norm),
        silu_and_mul=Timed("norms, activation", model._ops.silu_and_mul),
    )
    backend.forward = Timed("attention (rope, cache write)", backend.forward)
    backend.prepare = Timed("attention (rope, cache write)", backend.prepare)
    executor._sample = Timed("sampling", executor._sample)
    executor.execute = Timed("execute", executor.execute)


def profile(args: argparse.Namespace) -> None:
    """Print where the time of an iteration goes while 32 sequences decode."""
    rng = random.Random(0)
    requests = [(rng.choices(_VOCABULARY, k=128), 129) for _ in range(32)]
    with LLM(
        args.model,
        dtype=args.dtype,
        max_num_seqs=32,
        max_model_len=2_048,
        max_num_batched_tokens=4_096,
    ) as llm:
        executor = llm._engine._thread.parts().executor
        measure(llm, requests)  # from now on the prompts are in the prefix cache: all but decodes
        instrument(executor)
        before = llm.metrics()
        start = time.perf_counter()
        measure(llm, requests)
        wall = time.perf_counter() - start
        after = llm.metrics()
    iterations = after["iterations"] - before["iterations"]
    seconds = dict(Timed.seconds)
    executed = seconds.pop("execute")
    seconds["rest of the executor (Python, embedding)"] = executed - sum(seconds.values())
    core = (after["scheduler_us"] - before["scheduler_us"]) / 1e6
    seconds["schedule, plan, commit"] = core
    seconds["threads, arrays, delivery"] = wall - executed - core
    print(f"{iterations} iterations of 32 rows, {wall / iterations * 1e3:.2f} ms each")
    for name, spent in sorted(seconds.items(), key=lambda entry: -entry[1]):
        print(f"{name:<42} {spent / iterations * 1e3:7.3f} ms {spent / wall:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2_048)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile(args)
        return
    with LLM(
        args.model,
        dtype=args.dtype,
        max_num_seqs=64,
        max_model_len=2_048,
        max_num_batched_tokens=args.max_num_batched_tokens,
    ) as llm:
        measure(llm, [([5] * 64, 8)])  # threads, caches and lazy set-up
        workloads: dict[str, tuple[Callable[[random.Random], list[Request]], str]] = {
            "W1": (w1, "output_tokens_per_s"),
            "W2": (w2, "output_tokens_per_s"),
            "one stream": (one_stream, "decode_tokens_per_s"),
            "prefill 1,024": (prefill, "prompt_tokens_per_s"),
        }
        figures = {}
        for name, (make, figure) in workloads.items():
            rng = random.Random(name)
            runs = [measure(llm, make(rng))[figure] for _ in range(args.reps)]
            figures[name] = {"median": statistics.median(runs), "runs": runs}
            if not args.json:
                print(f"{name:<14} {statistics.median(runs):8.1f} tokens/s", flush=True)
        if args.json:
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
