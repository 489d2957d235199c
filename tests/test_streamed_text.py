"""Text that streams out is the text that went into the default model's own tokenizer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from chairlift import AsyncEngine, SamplingParams
from chairlift.testing import ScriptedExecutor
from chairlift.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("steps_in_flight")

LINES = [
    json.loads(line)["text"]
    for line in (Path(__file__).parent / "data" / "utf8_strings.jsonl")
    .read_text(encoding="utf-8")
    .split("\n")
    if line
]
"""Texts that are hard to cut."""


@pytest.fixture(scope="module")
def own_tokenizer(model_directory):
    return Tokenizer.from_directory(model_directory)


def test_deltas_join_to_the_text(own_tokenizer):
    prompts = [[1000, 2000 + index] for index in range(len(LINES))]
    scripts = [own_tokenizer.encode(line) for line in LINES]
    executor = ScriptedExecutor(
        scripts={tuple(prompt): script for prompt, script in zip(prompts, scripts, strict=True)},
        vocab_size=own_tokenizer.vocab_size,
        eos_token_id=own_tokenizer.eos_token_ids[0],
        step_time=0.005,  # a reader that is slower finds deltas merged
    )

    async def stream(engine, prompt, script):
        # Several lines hold tokens that end an answer.
        params = SamplingParams(max_tokens=len(script), ignore_eos=True, skip_special_tokens=False)
        return [delta async for delta in engine.generate({"prompt_token_ids": prompt}, params)]

    async def main():
        async with AsyncEngine(
            executor=executor, tokenizer=own_tokenizer, isolation="thread"
        ) as engine:
            pairs = zip(prompts, scripts, strict=True)
            return await asyncio.gather(*(stream(engine, *pair) for pair in pairs))

    streams = asyncio.run(main())
    for line, script, deltas in zip(LINES, scripts, streams, strict=True):
        assert [token for delta in deltas for token in delta.token_ids] == script
        assert "".join(delta.text for delta in deltas) == line
        if "\ufffd" not in line:
            assert not any("\ufffd" in delta.text for delta in deltas)
    assert any(len(deltas) > 3 for deltas in streams), "they really streamed"
