"""Cases C02, C03, C05, C06, C18 and S1 with a model that samples: a small one of random weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from chairlift.testing import ByteTokenizer
from chairlift.torch_executor import TorchExecutor, TorchExecutorConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
VOCAB = 288
"""More than the tokenizer has, as in models whose embedding is padded."""


class Model(TorchExecutor):
    """A real executor that has nothing to let go at the end of a test."""

    vocab_size = VOCAB
    num_kv_blocks = 200

    def release(self):
        pass


@pytest.fixture(scope="module")
def model(start_server, tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=257,
    )
    directory = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    executor = Model(TorchExecutorConfig(directory, "float32", block_size=16, num_kv_blocks=200))
    return start_server(executor, tokenizer=ByteTokenizer())


def ids(model, prompt="hi", **fields):
    """The tokens of an answer's choices."""
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True} | fields
    return [choice["token_ids"] for choice in model.complete(prompt, **fields)["choices"]]


def test_tiny_temperatures_are_greedy(model):
    """C02; and C06: null is what a field that is left out means."""
    (greedy,) = ids(model, temperature=0)
    for temperature in (1e-4, 1e-12, 1e-45, 5e-324):
        assert ids(model, temperature=temperature) == [greedy]
        assert ids(model, temperature=temperature, top_k=9_999_999) == [greedy]
    nulls = dict.fromkeys(["top_p", "top_k", "stop", "seed", "logit_bias", "n", "user"])
    assert ids(model, temperature=0, **nulls) == [greedy]
    assert ids(model, temperature=1.5, top_k=1) == [greedy]
    seeded = {"temperature": 1.0, "seed": 7}
    assert ids(model, **seeded) == ids(model, **seeded, top_k=9_999_999) != [greedy]
    model.check_alive()


def test_answers_to_one_prompt(model):
    """C18: alike if greedy; else different ones that a seed repeats."""
    first, second = ids(model, n=2, temperature=0)
    assert first == second
    pair = ids(model, n=2, temperature=1.5, seed=4)
    assert pair[0] != pair[1]
    assert ids(model, n=2, temperature=1.5, seed=4) == pair
    assert ids(model, n=2, temperature=1.5) != ids(model, n=2, temperature=1.5)


def test_log_probabilities_do_not_depend_on_cuts(model):
    """S1: they are of the raw logits."""
    told = []
    for fields in ({}, {"temperature": 0.3}, {"top_p": 0.2}, {"top_k": 2}):
        body = {"seed": 1, "max_tokens": 1, "logprobs": 5, "logit_bias": {"65": 100}} | fields
        choice = model.complete(**body)["choices"][0]
        assert choice["text"] == "A"
        told.append(choice["logprobs"])
    for one in told[1:]:
        assert one["token_logprobs"] == pytest.approx(told[0]["token_logprobs"])
        assert one["top_logprobs"][0] == pytest.approx(told[0]["top_logprobs"][0])


def test_the_vocabulary_is_the_models(model):
    """C03: ids are bounded by it, also those that the tokenizer does not know."""
    for token in (0, 257, 258, VOCAB - 1):
        assert model.complete([token])["usage"]["prompt_tokens"] == 1
        assert ids(model, logit_bias={str(token): 100}, temperature=0) == [[token] * 12]
    for prompt in ([VOCAB], [[1, 2], [VOCAB]], ["fine", [VOCAB]], [[1], [-1]]):
        before = model.metrics()["submitted"]
        answer = model.post(TEXT, {"prompt": prompt, "max_tokens": 4})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert model.metrics()["submitted"] == before
    answer = model.post(TEXT, {"prompt": "x", "logit_bias": {str(VOCAB): 1}})
    assert answer.json()["error"]["param"] == "logit_bias"
    model.check_alive()


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "min_p"])
def test_numbers_that_are_none_beside_a_stream(model, field):
    """C02: a stream goes on unchanged while they are refused."""
    body = {"prompt": "long", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    wanted = model.complete(**body)["choices"][0]["text"]
    with model.client.stream("POST", TEXT, json=body | {"stream": True}) as stream:
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-5"):
            bad = b'{"prompt": "hi", "%b": %b}' % (field.encode(), number)
            answer = model.post(TEXT, content=bad)
            assert answer.status_code == 400
            assert json.loads(answer.text, parse_constant=_no_json)["error"]["param"] == field
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(x[6:])["choices"][0]["text"] for x in lines) == wanted
    model.check_alive()


def _no_json(name):
    raise AssertionError(name)


def test_sizes_that_are_none(model):
    """C05: an empty message is a message; an empty prompt is none."""
    answer = model.post(CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 3})
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for path, body in (
        (CHAT, {"messages": []}),
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": ["a", ""]}),
        (TEXT, {"prompt": "a", "max_tokens": 0}),
        (TEXT, {"prompt": "a", "max_tokens": -1, "echo": True}),
    ):
        assert model.post(path, body).status_code == 400
    echo = {"prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = model.complete(**echo)
    assert answer["choices"][0]["text"] == "Your answer: Yes"
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 16
    model.check_alive()
