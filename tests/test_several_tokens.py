"""Steps that return more than one token a sample, as speculation will."""

from __future__ import annotations

import pytest

from chairlift import LLM, SamplingParams
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")

PROMPTS = ["hello", "p" * 40, "stops", "n"]
PARAMS = [
    SamplingParams(max_tokens=20, logprobs=1),
    SamplingParams(max_tokens=31),
    SamplingParams(max_tokens=30, stop="STOP", logprobs=2),
    SamplingParams(max_tokens=17, n=3),
]


def run(tokens_per_sample, num_kv_blocks=512):
    executor = ScriptedExecutor(
        scripts={"hello": "world", "stops": "one STOP two"},
        tokens_per_sample=tokens_per_sample,
        num_kv_blocks=num_kv_blocks,
        block_size=4,
    )
    with LLM(executor=executor, block_size=4, max_model_len=80) as llm:
        results = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics["failed"] == metrics["used_blocks"] == 0
    return [result.outputs for result in results], executor, metrics


@pytest.mark.parametrize("tokens_per_sample", [2, 3, 7])
def test_answers_are_those_of_one_token_a_step(tokens_per_sample, steps_in_flight):
    one, single, _ = run(1)
    several, executor, metrics = run(tokens_per_sample)
    assert several == one
    # With run-ahead it computes once what does not count, and then every other step.
    assert len(executor.steps) < len(single.steps) / (1.5 if steps_in_flight == 1 else 1)
    # Both sequences of tokens that a block cannot hold, and siblings that part, were among them.
    assert any(step.num_copies for step in executor.steps)
    tight, _, metrics = run(tokens_per_sample, num_kv_blocks=22)
    assert metrics["preemptions"] > 0
    assert tight == one


@pytest.mark.parametrize(("script", "reason"), [("x", "stop"), ("xyz", "length")])
def test_what_follows_the_end_in_its_step_is_dropped(script, reason, steps_in_flight):
    """Two tokens a step: the first of the last two ends the answer."""
    executor = ScriptedExecutor(scripts={"a": script}, tokens_per_sample=2)
    params = SamplingParams(max_tokens=1 if reason == "length" else 9, logprobs=0)
    with LLM(executor=executor) as llm:
        if reason == "stop":
            params = SamplingParams(max_tokens=9, logprobs=0, stop_token_ids=[ord("x")])
        (result,) = llm.generate("a", params, use_tqdm=False)
    (answer,) = result.outputs
    assert answer.token_ids == [ord("x")]
    assert answer.finish_reason == reason
    assert len(answer.logprobs) == 1
    # One more may have been launched ahead, and run before the engine ended or not.
    assert len(executor.steps) <= (steps_in_flight if reason == "stop" else 1)
    assert result.stats.num_output_tokens == 1
