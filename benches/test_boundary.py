"""What an iteration costs outside the model: plan, Python, results, deltas.

The executor returns constants at once, so all that is measured is the way of an iteration: the
scheduler plans, hands the plan over, the executor thread shows it to Python, takes the result
arrays, the scheduler commits and publishes, and the client has the deltas in its hands.

Run with ``make bench``; ``-s`` shows where the time goes. The engine runs freely, so a client that
does not keep up finds several iterations merged: the time of an iteration is then the time of a
batch by the iterations in it (``us_per_iteration``). ``make test`` runs everything once and tiny,
with ``--benchmark-disable``.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from chairlift import SamplingParams
from chairlift.engine import LocalEngine
from chairlift.engine_args import EngineArgs
from chairlift.executor import StepPlan, StepResult
from chairlift.prompts import ParsedPrompt
from chairlift.testing import ByteTokenizer

ROUNDS = 15
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    running: int
    prompt_tokens: int
    round: int
    """Iterations of a round."""


FULL = Scale(running=256, prompt_tokens=512, round=50)
TINY = Scale(running=4, prompt_tokens=8, round=5)


class ConstantExecutor:
    """Answers every sample with the letter ``a``, without looking at the plan."""

    def __init__(self):
        self.tokenizer = ByteTokenizer()
        self._results = {}
        self._shapes = deque()

    def launch(self, plan: StepPlan) -> None:
        self._shapes.append((len(plan.sample_rows), len(plan.rows)))

    def collect(self) -> StepResult:
        shape = self._shapes.popleft()
        result = self._results.get(shape)
        if result is None:
            samples, rows = shape
            result = self._results[shape] = StepResult(
                np.full(samples, 97, dtype=np.int32), np.zeros(rows, dtype=np.uint8)
            )
        return result


class DeviceExecutor(ConstantExecutor):
    """Answers as a device does that takes so many seconds a step and queues what is launched."""

    launches_ahead = True

    def __init__(self, step_time: float):
        super().__init__()
        self.gaps_us: list[float] = []
        """How long the device had nothing to do before each step."""
        self._step_time = step_time
        self._free_at = time.perf_counter()
        self._ends = deque()

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        now = time.perf_counter()
        self.gaps_us.append(max(now - self._free_at, 0.0) * 1e6)
        self._free_at = max(now, self._free_at) + self._step_time
        self._ends.append(self._free_at)

    def collect(self) -> StepResult:
        time.sleep(max(self._ends.popleft() - time.perf_counter(), 0.0))
        return super().collect()


@pytest.fixture
def scale(benchmark):
    return TINY if benchmark.disabled else FULL


@pytest.fixture
def start(scale):
    engines = []

    def go(executor, **options):
        engine = LocalEngine(
            EngineArgs(
                executor=executor,
                max_num_seqs=scale.running,
                max_num_batched_tokens=8_192,
                max_model_len=8_192,
                num_kv_blocks=scale.running * 512,
                **options,
            )
        )
        engines.append(engine)
        return engine

    yield go
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def engine(start):
    return start(ConstantExecutor())


def submit(engine, prompt, max_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request, _ = engine.prepare(ParsedPrompt(None, prompt), prompt, params)
    return engine.client.submit(request)


def start_running(engine, scale):
    """Bring ``scale.running`` endless requests into decode and take their first news."""
    for number in range(scale.running):
        prompt = [number % 250] * scale.prompt_tokens
        submit(engine, prompt, max_tokens=7_500)
    while engine.client.metrics()["prompt_tokens"] < scale.running * scale.prompt_tokens:
        engine.client.wait(1.0)
    engine.client.wait(1.0)


def take_iterations(benchmark, engine, scale, look):
    """Take batches as they come, ``scale.round`` iterations a round."""
    start_running(engine, scale)
    client = engine.client
    before = client.metrics()
    per_iteration = []

    def take():
        taken, begin = 0, time.perf_counter()
        while taken < scale.round:
            batch = client.wait(1.0)
            look(batch)
            taken += batch.iterations
        per_iteration.append((time.perf_counter() - begin) / taken * 1e6)

    benchmark.pedantic(take, rounds=ROUNDS, warmup_rounds=WARM_UP)
    after = client.metrics()
    assert after["running_sequences"] == scale.running
    steps = after["iterations"] - before["iterations"]
    assert after["output_tokens"] - before["output_tokens"] >= (steps - 2) * scale.running
    if benchmark.disabled:
        return
    info = benchmark.extra_info
    info["us_per_iteration_median"] = round(statistics.median(per_iteration[WARM_UP:]), 1)
    info["us_per_iteration_best"] = round(min(per_iteration[WARM_UP:]), 1)
    for name in ("scheduler_us", "step_us"):
        info[name] = round((after[name] - before[name]) / steps, 1)
    print(f"\n{benchmark.name}: {info}")


def test_iteration_as_one_batch(benchmark, engine, scale):
    def look(batch):
        assert len(batch.token_ids) >= scale.running

    take_iterations(benchmark, engine, scale, look)


def test_iteration_with_an_object_per_delta(benchmark, engine, scale):
    def look(batch):
        for delta in batch.deltas():
            assert delta.text == "a"
            assert delta.token_ids == [97]

    take_iterations(benchmark, engine, scale, look)


def measure_gaps(benchmark, start, scale, steps_in_flight):
    """Measure how long a device of 3 ms a step waits for the next one."""
    executor = DeviceExecutor(step_time=0.003)
    engine = start(executor, max_in_flight_steps=steps_in_flight)
    take_iterations(benchmark, engine, scale, lambda batch: None)
    gaps = executor.gaps_us[-scale.round * ROUNDS :]
    if benchmark.disabled:
        return
    benchmark.extra_info["gap_us_median"] = round(statistics.median(gaps), 1)
    benchmark.extra_info["gap_us_mean"] = round(statistics.mean(gaps), 1)
    print(f"{steps_in_flight} in flight: {benchmark.extra_info}")


def test_gap_between_steps(benchmark, start, scale):
    measure_gaps(benchmark, start, scale, steps_in_flight=1)


def test_gap_with_run_ahead(benchmark, start, scale):
    measure_gaps(benchmark, start, scale, steps_in_flight=2)


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
