"""Random bodies, headers, and connections that break off: never a 5xx, never a hang, nothing left.

Everything follows from a seed, which the test's name tells.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from running_server import events

from chairlift.testing import ScriptedExecutor
from chairlift.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hé"}, {"type": "text", "text": "x"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "user", "content": "hi", "name": "me"},
]
SAMPLING = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "n": 2,
    "seed": 5,
    "stop": ["q", "zz"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 1.5},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "user": "me",
    "service_tier": "auto",
    "priority": 1,
    "cache_salt": "s",
    "return_token_ids": True,
    "model": "test-model",
}
BODIES = [
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} | SAMPLING),
    (
        CHAT,
        {"messages": MESSAGES[-1:], "stream": True, "stream_options": {"include_usage": True}}
        | {"max_completion_tokens": 4, "chat_template_kwargs": {"a": 1}, "documents": [{"b": "c"}]},
    ),
    (TEXT, {"prompt": "hello", "logprobs": 1, "echo": True, "stream": True} | SAMPLING),
    (TEXT, {"prompt": [[1, 2, 3], [4, 5]], "prompt_logprobs": 2, "best_of": 2} | SAMPLING),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 0, "echo": True}),
    ("/tokenize", {"prompt": "hé", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [104, 195, 169]}),
]


def _nested(depth, kind):
    value = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


ODD_VALUES = [
    None,
    True,
    False,
    *(0, -1, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(-(2**31), -(2**63), -(10**30)),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e30, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "\x00", "\ud800", "\U0001f600", "<|im_end|>", "a" * 10_000, "{", "{}", "null"),
    *("[" * 100_000, "[" * 300 + "]" * 300),
    *([], {}, [[]], [{}], [None], ["x"], [1, "a"], [1.5], {"": ""}, {"x": None}, {"\ud800": 1}),
    *([0] * 5_000, ["a"] * 5_000, [[]] * 5_000, [{}] * 5_000),
    *(_nested(depth, kind) for depth in (3, 100, 300, 2_000, 20_000) for kind in (list, dict)),
]
ODD_NAMES = ["nobody_knows", "tools", "response_format", "echo", "deadline_ms", "name", "x" * 5_000]


def _places(value, where=()):
    """Paths to everything inside a JSON value."""
    found = []
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in inner:
        found.append((*where, key))
        if isinstance(entry, dict | list):
            found += _places(entry, (*where, key))
    return found


def _dumps(value):
    """JSON, however deep."""
    try:
        return json.dumps(value)
    except RecursionError:
        depth, kind = 0, type(value)
        while isinstance(value, dict | list):
            value, depth = value["a" if kind is dict else 0], depth + 1
        return (
            ('{"a":' if kind is dict else "[") * depth
            + "1"
            + ("}" if kind is dict else "]") * depth
        )


def mutated(rng):
    """A path and the bytes of a body in which something is odd, or nothing."""
    path, body = copy.deepcopy(rng.choice(BODIES))
    odd = {}
    for number in range(rng.choice([0, 1, 1, 1, 2, 3])):
        *outer, last = rng.choice(_places(body))
        holder = body
        for key in outer:
            holder = holder[key]
        marker = f"@odd{number}@"
        if rng.random() < 0.15:
            holder.pop(last)
            if not body:
                body[marker] = None
            continue
        if rng.random() < 0.2 and isinstance(holder, dict):
            last = rng.choice(ODD_NAMES)
        holder[last] = marker
        odd[marker] = _dumps(rng.choice(ODD_VALUES))
    text = json.dumps(body)
    for marker, value in odd.items():
        text = text.replace(f'"{marker}"', value)
    if rng.random() < 0.1:  # a key again
        text = text[:-1] + f', "{rng.choice(list(body))}": {_dumps(rng.choice(ODD_VALUES))}}}'
    data = text.encode()
    spoil = rng.random()
    if spoil < 0.05:
        data = data[: rng.randrange(len(data))]
    elif spoil < 0.1:
        place = rng.randrange(len(data))
        data = data[:place] + rng.randbytes(rng.randrange(1, 5)) + data[place + 1 :]
    elif spoil < 0.12:
        data = text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]))
    elif spoil < 0.13:
        data = gzip.compress(data)
    return path, data


def _no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def check_answer(answer, *, may_be_late=False):
    """No 5xx; JSON that is JSON; a stream that ends well."""
    late = {504} if may_be_late else set()
    assert answer.status_code in {200, 400, 404, 413} | late, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        *chunks, done = events(answer.content)
        assert done == "[DONE]"
        assert all("error" not in chunk for chunk in chunks)
        return
    assert answer.headers["content-type"] == "application/json"
    content = json.loads(answer.content, parse_constant=_no_constant)
    if answer.status_code != 200:
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert len(content["error"]["message"]) < 2_000


@pytest.fixture(scope="module")
def fuzzed(start_server):
    executor = ScriptedExecutor(step_time=0.0005, num_kv_blocks=2_048)
    return start_server(executor, max_model_len=512)


@pytest.fixture(scope="module")
def fuzzed_template(start_server, model_directory):
    """The default model's tokenizer and chat template."""
    tokenizer = Tokenizer.from_directory(model_directory)
    executor = ScriptedExecutor(
        num_kv_blocks=2_048, vocab_size=tokenizer.vocab_size, default=lambda sample: 100
    )
    return start_server(executor, max_model_len=512, tokenizer=tokenizer)


@pytest.mark.parametrize("seed", range(6))
def test_bodies(fuzzed, seed):
    send_bodies(fuzzed, seed)


@pytest.mark.parametrize("seed", range(6, 9))
def test_bodies_and_a_real_template(fuzzed_template, seed):
    send_bodies(fuzzed_template, seed)


def send_bodies(server, seed):
    """Many bodies of one seed, several at once."""
    rng = random.Random(seed)
    cases = [mutated(rng) for _ in range(150)]

    def send(case):
        path, data = case
        try:
            answer = server.client.post(path, content=data)
            check_answer(answer, may_be_late=b"deadline_ms" in data)
        except Exception as error:
            raise AssertionError(f"{path} {data[:2_000]!r}") from error
        return answer.status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(send, cases))
    assert 20 < statuses.count(200) < 130
    assert statuses.count(400) > 20
    server.check_alive()
