"""Log-probabilities of prompts: the values against plain torch, and their way to the caller."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers

from chairlift import LLM, AsyncEngine, InvalidRequestError, SamplingParams, prompt_scores
from chairlift.errors import UnsupportedStepError
from chairlift.executor import STATUS_FAILED, STATUS_OK
from chairlift.testing import ByteTokenizer, ScriptedExecutor
from chairlift.torch_executor import TorchExecutor, TorchExecutorConfig
from plans import make_plan, place, run_step

pytestmark = pytest.mark.usefixtures("steps_in_flight")

BLOCK = 4
VOCAB = 258


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small random model with sharp logits, and where it is."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    directory = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in (1, 2, 16, 41, 90)
    ]


def expected(model, prompt):
    """[len(prompt) - 1, vocab] log-probabilities of what follows each prompt token."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(dim=1)


def check(model, prompt, got, num_best):
    """Compare ``RequestOutput.prompt_logprobs`` with the model's own."""
    assert len(got) == len(prompt)
    assert got[0] is None
    wanted = expected(model, prompt)
    for position, (entry, row) in enumerate(zip(got[1:], wanted, strict=True), start=1):
        own = prompt[position]
        assert next(iter(entry)) == own
        best, ids = row.topk(num_best) if num_best else (row[:0], row[:0])
        assert set(entry) == {own, *ids.tolist()}
        for token, candidate in entry.items():
            assert candidate.logprob == pytest.approx(row[token].item(), abs=2e-4)
        ranks = [entry[token].rank for token in ids.tolist()]
        assert ranks == list(range(1, num_best + 1))
        if own not in ids.tolist():
            assert entry[own].rank is None
            assert num_best == 0 or entry[own].logprob <= best.min().item() + 2e-4


@pytest.mark.parametrize("chunk", [1, 7, 16, 2_048])
def test_values_are_those_of_the_model_whatever_the_chunks(tiny, prompts, chunk, monkeypatch):
    model, directory = tiny
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", 5 * VOCAB * 4)  # five rows
    wanted = [0, 3, 1, 5, 2]
    params = [
        SamplingParams(max_tokens=3, n=1 + k % 2, prompt_logprobs=k, logprobs=k) for k in wanted
    ]
    options = {"dtype": "float32", "num_kv_blocks": 400, "block_size": BLOCK}
    with LLM(
        str(directory), tokenizer=ByteTokenizer(), long_prefill_token_threshold=chunk, **options
    ) as llm:
        # Once cold and once with every block of the prompts in the cache.
        for _ in range(2):
            results = llm.generate(prompts, params, use_tqdm=False)
            for prompt, result, k in zip(prompts, results, wanted, strict=True):
                check(model, prompt, result.prompt_logprobs, k)
                assert result.num_cached_tokens == 0
        plain = llm.generate(prompts[-1], SamplingParams(max_tokens=1), use_tqdm=False)
        assert plain[0].num_cached_tokens == 88
        assert plain[0].prompt_logprobs is None


def test_logits_that_cannot_be_fail_their_own_sequence(tiny, prompts, monkeypatch):
    _, directory = tiny
    executor = TorchExecutor(
        TorchExecutorConfig(directory, "float32", block_size=BLOCK, num_kv_blocks=100)
    )
    sequences = place(prompts[2:4], max_tokens=1, block_size=BLOCK)
    plan = make_plan(sequences, block_size=BLOCK, num_best=1)
    right = run_step(executor, sequences, plan)
    score = executor._model.score

    def spoil(hidden):
        logits = score(hidden)
        if len(logits) == len(plan.score_indices):
            logits[20, 7] = torch.nan  # of the second prompt
        return logits

    monkeypatch.setattr(executor._model, "score", spoil)
    executor.launch(plan)
    result = executor.collect()
    assert result.statuses.tolist() == [STATUS_OK, STATUS_FAILED]
    kept = slice(0, 2 * 15)
    np.testing.assert_array_equal(
        result.prompt_logprobs.values[kept], right.prompt_logprobs.values[kept]
    )


def test_slices_are_bounded(tiny, prompts, monkeypatch):
    _, directory = tiny
    executor = TorchExecutor(
        TorchExecutorConfig(directory, "float32", block_size=BLOCK, num_kv_blocks=100)
    )
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", 8 * VOCAB * 4)
    rows = []
    score = executor._model.score
    monkeypatch.setattr(
        executor._model, "score", lambda hidden: rows.append(len(hidden)) or score(hidden)
    )
    sequences = place(prompts[3:4], max_tokens=1, block_size=BLOCK)
    run_step(executor, sequences, make_plan(sequences, block_size=BLOCK, num_best=0))
    assert rows == [8] * 5 + [1]


PROMPT = "a prompt of more than one block"


def check_scripted(result_logprobs, prompt, num_best):
    assert result_logprobs[0] is None
    for token, entry in zip(prompt.encode()[1:], result_logprobs[1:], strict=True):
        others = [(token + rank) % 258 for rank in range(1, num_best)]
        assert list(entry) == [token, *others]
        assert [entry[other].logprob for other in others] == [
            -0.5 * rank for rank in range(2, num_best + 1)
        ]
        assert entry[token].decoded_token == chr(token)


def test_preemption_and_siblings_tell_each_position_once():
    executor = ScriptedExecutor(block_size=4, num_kv_blocks=24)
    letters = itertools.cycle("abcdefg")
    prompts = [f"{next(letters)} {PROMPT}" for _ in range(9)]
    params = [SamplingParams(max_tokens=40, n=1 + i % 2, prompt_logprobs=2) for i in range(9)]
    options = {"block_size": 4, "max_model_len": 80, "long_prefill_token_threshold": 3}
    with LLM(executor=executor, **options) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
        assert llm.metrics()["preemptions"] > 3
        assert llm.metrics()["recomputed_tokens"] > 0
    for prompt, result in zip(prompts, results, strict=True):
        check_scripted(result.prompt_logprobs, prompt, 2)


def test_a_stream_has_them_with_its_first_token():
    async def main():
        options = {"long_prefill_token_threshold": 5}
        async with AsyncEngine(
            executor=ScriptedExecutor(), isolation="thread", **options
        ) as engine:
            params = SamplingParams(max_tokens=4, prompt_logprobs=3)
            stream = engine.generate(PROMPT, params)
            assert stream.prompt_logprobs is None
            async for _ in stream:
                check_scripted(stream.prompt_logprobs, PROMPT, 3)
            plain = engine.generate(PROMPT, SamplingParams(max_tokens=4))
            async for _ in plain:
                assert plain.prompt_logprobs is None

    asyncio.run(main())


def test_a_tokenizer_that_cannot_tell_them_fails_the_stream():
    class Mute(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            raise RuntimeError("mute")

    async def main():
        async with AsyncEngine(
            executor=ScriptedExecutor(), tokenizer=Mute(), isolation="thread"
        ) as engine:
            with pytest.raises(Exception, match="cannot be told: RuntimeError: mute"):
                async for _ in engine.generate("abc", SamplingParams(prompt_logprobs=1)):
                    pass
            deltas = [d async for d in engine.generate("abc", SamplingParams(max_tokens=3))]
            assert deltas[-1].finish_reason == "length"

    asyncio.run(main())


def test_wishes_beyond_the_bounds_are_refused():
    with LLM(executor=ScriptedExecutor(), max_logprobs=3) as llm:
        with pytest.raises(InvalidRequestError, match="prompt_logprobs is 4, but the engine gives"):
            llm.generate("a", SamplingParams(prompt_logprobs=4), use_tqdm=False)
        (result,) = llm.generate("a", SamplingParams(prompt_logprobs=3), use_tqdm=False)
        assert result.prompt_logprobs == [None]
    for wrong in (-1, True, 1.5):
        with pytest.raises(InvalidRequestError, match="prompt_logprobs is"):
            SamplingParams(prompt_logprobs=wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_copies": [[0, 9]], "block_copy_locations": [[1, 0]]}, "to or from the host"),
        ({"mask_rows": [0]}, "masks the logits of rows"),
        ({"adapter_ids": [2]}, r"uses adapters \[2\]"),
    ],
)
def test_the_torch_executor_refuses_what_it_cannot_do(tiny, prompts, changes, message):
    _, directory = tiny
    executor = TorchExecutor(TorchExecutorConfig(directory, "float32", num_kv_blocks=20))
    plan = make_plan(place(prompts[2:3], max_tokens=1, block_size=16), block_size=16)
    changes = {
        name: np.array(value, dtype=getattr(plan, name).dtype) for name, value in changes.items()
    }
    executor.launch(dataclasses.replace(plan, **changes))
    with pytest.raises(UnsupportedStepError, match=message):
        executor.collect()
