"""What an iteration costs outside the model: plan, Python, results, deltas.

The executor returns constants at once, so all that is measured is the way of an iteration: the
scheduler plans, hands the plan over, the executor thread shows it to Python, takes the result
arrays, the scheduler commits and publishes, and the client has the deltas in its hands.

Run with ``make bench``. A round of the steady benches takes batches as they come until
``ITERATIONS`` iterations have been delivered; ``extra_info`` has the time of one.
"""

from __future__ import annotations

import numpy as np
import pytest

from chairlift import SamplingParams
from chairlift.engine import EngineArgs, LocalEngine
from chairlift.executor import StepPlan, StepResult
from chairlift.prompts import ParsedPrompt
from chairlift.testing import ByteTokenizer

RUNNING = 256
PROMPT_TOKENS = 512
ITERATIONS = 20


class ConstantExecutor:
    """Answers every sample with the letter ``a``, without looking at the plan."""

    def __init__(self):
        self.tokenizer = ByteTokenizer()
        self._results = {}
        self._shape = (0, 0)

    def launch(self, plan: StepPlan) -> None:
        self._shape = (len(plan.sample_rows), len(plan.rows))

    def collect(self) -> StepResult:
        result = self._results.get(self._shape)
        if result is None:
            samples, rows = self._shape
            result = self._results[self._shape] = StepResult(
                np.full(samples, 97, dtype=np.int32), np.zeros(rows, dtype=np.uint8)
            )
        return result


@pytest.fixture
def engine():
    engine = LocalEngine(
        EngineArgs(
            executor=ConstantExecutor(),
            max_num_seqs=RUNNING,
            max_num_batched_tokens=8_192,
            max_model_len=4_096,
            num_kv_blocks=RUNNING * 256,
        )
    )
    yield engine
    engine.shutdown()


def submit(engine, prompt, max_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request, _ = engine.prepare(ParsedPrompt(None, prompt), prompt, params)
    return engine.client.submit(request)


def start_running(engine):
    """Bring ``RUNNING`` endless requests into decode and take their first news."""
    for number in range(RUNNING):
        prompt = [number % 250] * PROMPT_TOKENS
        submit(engine, prompt, max_tokens=3_500)
    while engine.client.metrics()["prompt_tokens"] < RUNNING * PROMPT_TOKENS:
        engine.client.wait(1.0)
    engine.client.wait(1.0)


def take_iterations(client, look):
    """Take batches as they come until enough iterations were delivered."""
    seen = 0
    while seen < ITERATIONS:
        batch = client.wait(1.0)
        look(batch)
        seen += batch.iterations
    return seen


def per_iteration(benchmark, engine, look):
    """Report seconds per iteration: the engine decides how many a round takes."""
    start_running(engine)
    before = engine.client.metrics()
    benchmark.extra_info["unit"] = f"{ITERATIONS} iterations"
    benchmark.pedantic(take_iterations, (engine.client, look), rounds=40, warmup_rounds=3)
    after = engine.client.metrics()
    steps = after["iterations"] - before["iterations"]
    assert after["running_sequences"] == RUNNING
    assert after["output_tokens"] - before["output_tokens"] >= (steps - 2) * RUNNING
    if benchmark.stats is not None:
        each = benchmark.stats.stats.min / ITERATIONS * 1e6
        benchmark.extra_info["us_per_iteration_best"] = round(each, 1)
        median = benchmark.stats.stats.median / ITERATIONS * 1e6
        benchmark.extra_info["us_per_iteration_median"] = round(median, 1)
        benchmark.extra_info["scheduler_us"] = round(
            (after["scheduler_us"] - before["scheduler_us"]) / steps, 1
        )
        benchmark.extra_info["step_us"] = round((after["step_us"] - before["step_us"]) / steps, 1)
        print("\n", benchmark.extra_info)


def test_iteration_as_one_batch(benchmark, engine):
    def look(batch):
        assert len(batch.token_ids) >= RUNNING

    per_iteration(benchmark, engine, look)


def test_iteration_with_an_object_per_delta(benchmark, engine):
    def look(batch):
        for delta in batch.deltas():
            assert delta.text == "a"
            assert delta.token_ids == [97]

    per_iteration(benchmark, engine, look)


def test_submit_to_first_delta(benchmark, engine):
    prompt = list(range(64))

    def one():
        request_id = submit(engine, prompt, max_tokens=1)
        while True:
            batch = engine.client.wait(1.0)
            for ended in batch.ended():
                if ended.request_id == request_id:
                    return

    one()
    benchmark(one)
