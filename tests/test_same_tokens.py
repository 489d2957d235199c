"""A request's tokens do not depend on what else the engine does.

The same 20 requests, greedy and with seeded sampling, in fp32: alone, all at once, staggered, with
small and large prefill chunks, with the prefix cache on (cold and warm) and off, and with a pool so
small that sequences are preempted. One rounding is allowed for: where a request's two best
(perturbed) scores are within 1e-3, the sums of a matrix product in another order may swap them. At
most one request a configuration may part there, and it is printed.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np
import pytest

from chairlift import LLM, AsyncEngine, SamplingParams
from chairlift.torch_executor import TorchExecutor
from prompts import PROMPTS

pytestmark = pytest.mark.usefixtures("steps_in_flight")

OUTPUT_TOKENS = 64
MARGIN = 1e-3
MODEL = "smollm2-135m"
OPTIONS = {"dtype": "float32", "max_model_len": 2_048, "max_num_seqs": 64}


def requests() -> list[tuple[str, SamplingParams]]:
    """Every prompt greedy, then every prompt sampled with a seed and filters of its own."""
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    seeded = [
        SamplingParams(
            temperature=0.8,
            top_p=(1.0, 0.9)[seed % 2],
            top_k=(0, 40)[seed // 2 % 2],
            min_p=(0.0, 0.05)[seed // 3 % 2],
            presence_penalty=(0.0, 0.4)[seed // 4 % 2],
            seed=seed,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
        )
        for seed in range(len(PROMPTS))
    ]
    return [(prompt, greedy) for prompt in PROMPTS] + list(zip(PROMPTS, seeded, strict=True))


def run(llm: LLM, of: list[tuple[str, SamplingParams]]) -> list[list[int]]:
    results = llm.generate(
        [prompt for prompt, _ in of], [params for _, params in of], use_tqdm=False
    )
    for result in results:
        assert result.error is None
        assert result.outputs[0].finish_reason == "length"
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Every request by itself on an idle engine, without the prefix cache."""
    with LLM(MODEL, **OPTIONS, enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in requests()]


class _MarginExecutor(TorchExecutor):
    """Also keeps the distance between the two best scores of each sample."""

    margins: ClassVar[list[float]] = []

    def _sample(self, logits, plan):
        margins = np.empty(len(plan.sample_rows), np.float32)
        output = self._sampler.sample(
            logits, plan.sample_rows, plan.sample_output_indices, margins=margins
        )
        self.margins.extend(margins.tolist())
        return output


def margins_of(request: tuple[str, SamplingParams], monkeypatch) -> list[float]:
    """Return the distance of the two best scores at each output token, the request alone."""
    _MarginExecutor.margins.clear()
    monkeypatch.setattr("chairlift.torch_executor.TorchExecutor", _MarginExecutor)
    with LLM(MODEL, **OPTIONS, enable_prefix_caching=False) as llm:
        run(llm, [request])
    monkeypatch.undo()
    return list(_MarginExecutor.margins)


def test_the_margins_are_those_of_every_sample(monkeypatch):
    greedy, seeded = (margins_of(requests()[index], monkeypatch) for index in (0, 20))
    assert len(greedy) == len(seeded) == OUTPUT_TOKENS
    assert min(greedy + seeded) >= 0
    assert max(greedy) > 1


def assert_same(got: list[list[int]], alone: list[list[int]], monkeypatch) -> None:
    parted = [index for index in range(len(alone)) if got[index] != alone[index]]
    for index in parted:
        pairs = zip(got[index], alone[index], strict=True)
        position = next(at for at, (one, other) in enumerate(pairs) if one != other)
        margin = margins_of(requests()[index], monkeypatch)[position]
        print(f"request {index} parts at output {position}; margin {margin:.2e}")
        assert margin <= MARGIN
    assert len(parted) <= 1


def mean_batch(metrics: dict[str, int]) -> float:
    return metrics["scheduled_sequences"] / metrics["iterations"]


CONFIGURATIONS = {
    "at once": {},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "chunks of 64": {"long_prefill_token_threshold": 64},
    "chunks of 512": {"max_num_batched_tokens": 512},
    "without the prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_batched(options, alone, monkeypatch):
    with LLM(MODEL, **(OPTIONS | options)) as llm:
        assert_same(run(llm, requests()), alone, monkeypatch)
        metrics = llm.metrics()
    assert mean_batch(metrics) > 10, "they ran together"
    # The sampled half finds the prompts of the greedy half only if those were computed before.
    assert options.get("enable_prefix_caching", True) or metrics["cached_tokens"] == 0


def test_warm_prefix_cache(alone, monkeypatch):
    """C31."""
    with LLM(MODEL, **OPTIONS) as llm:
        run(llm, requests()[:20])
        before = llm.metrics()["cached_tokens"]
        assert_same(run(llm, requests()), alone, monkeypatch)
        assert llm.metrics()["cached_tokens"] - before > 2_000, "the prompts were found again"


def test_preempted(alone, monkeypatch):
    """C30."""
    with LLM(MODEL, **(OPTIONS | {"max_model_len": 1_024}), num_kv_blocks=128) as llm:
        assert_same(run(llm, requests()), alone, monkeypatch)
        metrics = llm.metrics()
    assert metrics["preemptions"] >= 10, "memory really ran out"
    assert metrics["recomputed_tokens"] > 0


def test_staggered(alone, monkeypatch):
    """Each request is sent when the one before it has told its third token."""

    async def main() -> tuple[list[list[int]], dict[str, int]]:
        engine = AsyncEngine(MODEL, **OPTIONS)
        outputs: list[list[int]] = [[] for _ in alone]
        started = [asyncio.Event() for _ in range(len(alone) + 1)]
        started[0].set()

        async def one(index: int, request: tuple[str, SamplingParams]) -> None:
            await started[index].wait()
            async for delta in engine.generate(*request):
                outputs[index] += delta.token_ids
                if len(outputs[index]) >= 3:
                    started[index + 1].set()

        async with engine:
            async with asyncio.TaskGroup() as tasks:
                for index, request in enumerate(requests()):
                    tasks.create_task(one(index, request))
            return outputs, await engine.metrics()

    outputs, metrics = asyncio.run(main())
    assert_same(outputs, alone, monkeypatch)
    assert 2 < mean_batch(metrics) < 20, "they overlapped, but not all of them"
