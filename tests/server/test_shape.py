"""What answers look like: whole and streamed, both endpoints; usage, order, indexes, logprobs."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from running_server import events

from chairlift.testing import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


def body_of(path, **fields):
    return (HELLO if path == CHAT else {"prompt": "Hello!", "max_tokens": 4}) | fields


def texts_of(chunks):
    """Text by choice of a stream."""
    texts = defaultdict(str)
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            delta = choice.get("delta")
            texts[choice["index"]] += (
                choice["text"] if delta is None else (delta.get("content") or "")
            )
    return dict(texts)


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_a_chat_answer(server):
    answer = server.post(CHAT, HELLO)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-class"] == "default"
    assert float(answer.headers["x-queue-time-ms"]) >= 0
    content = answer.json()
    expected = bytes(server.executor.expected("user: Hello!\nassistant: ", 4)).decode()
    assert content.pop("id").startswith("chatcmpl-")
    assert content.pop("created") > 1.6e9
    assert content.pop("system_fingerprint").startswith("fp_")
    assert content["usage"].pop("prompt_tokens_details")["cached_tokens"] in (0, 16)
    assert content == {
        "object": "chat.completion",
        "model": "test-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": expected, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 24,
            "completion_tokens": 4,
            "total_tokens": 28,
        },
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_what_the_whole_answer_says(server, path, n):
    """C18, S3: one id and time in all chunks; of each choice a role, deltas, and an empty end."""
    whole = server.post(path, body_of(path, n=n)).json()
    chunks = server.stream(path, body_of(path, n=n))
    assert chunks.count("[DONE]") == 1
    assert chunks.pop() == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"].endswith("chunk") or path == TEXT for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    by_choice = defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert "finish_reason" in choice
        by_choice[choice["index"]].append(choice)
    assert sorted(by_choice) == list(range(n))
    for choices in by_choice.values():
        *before, last = choices
        assert [choice["finish_reason"] for choice in before] == [None] * len(before)
        assert last["finish_reason"] == "length"
        assert last.get("delta", {}) == {}
        assert last.get("text", "") == ""
        if path == CHAT:
            assert before[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in before[1:])
    assert texts_of(chunks) == {choice["index"]: text_of(choice) for choice in whole["choices"]}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_only_where_it_is_asked_for(server, path, options):
    """C17."""
    chunks = server.stream(path, body_of(path, stream_options=options))
    assert all(chunk["choices"] for chunk in chunks[:-1])
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_in_a_last_chunk(server, path, n):
    """C17."""
    body = body_of(path, n=n)
    whole = server.post(path, body).json()["usage"]
    *chunks, last, done = server.stream(path, body | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["id"] == chunks[0]["id"]
    del last["usage"]["prompt_tokens_details"], whole["prompt_tokens_details"]
    assert last["usage"] == whole
    assert whole["completion_tokens"] == 4 * n
    assert whole["total_tokens"] == whole["prompt_tokens"] + 4 * n
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_batch_of_prompts(server):
    """C17: Choices are numbered prompt by prompt, and the usage is of all."""
    prompts = ["one", [116, 119, 111], "three"]
    texts = ["one", "two", "three"]
    body = {"prompt": ["one", "two", "three"], "max_tokens": 3, "n": 2}
    whole = server.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    for index, choice in enumerate(whole["choices"]):
        expected = server.executor.expected(texts[index // 2], 3, child=index % 2)
        assert choice["text"] == bytes(expected).decode()
    assert whole["usage"]["prompt_tokens"] == 11
    assert whole["usage"]["completion_tokens"] == 18
    assert server.complete(**body | {"prompt": prompts})["choices"] == whole["choices"]
    chunks = server.stream(TEXT, body | {"stream_options": {"include_usage": True}})
    assert chunks[-2]["usage"]["total_tokens"] == 29
    assert texts_of(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert chunks.count("[DONE]") == 1


def test_token_ids_get_no_bos(server):
    """C15."""
    usage = server.complete([1, 2, 3, 4, 5, 6, 7, 8])["usage"]
    assert usage["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 5, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 2, "max_completion_tokens": 5}, 2),
    ],
)
def test_token_limits_are_exact(server, fields, count):
    """C20."""
    body = {"messages": HELLO["messages"]} | fields
    whole = server.post(CHAT, body).json()
    assert whole["usage"]["completion_tokens"] == count
    assert whole["choices"][0]["finish_reason"] == "length"
    assert len(whole["choices"][0]["message"]["content"]) == count


def test_an_end_of_sequence_counts_and_is_not_shown(start_server):
    """C20, S4: The token that ended the answer is one of ``completion_tokens``; it has no text."""
    server = start_server(ScriptedExecutor(scripts={"three": "abc"}))
    for limit, reason in ((2, "length"), (3, "length"), (4, "stop"), (9, "stop")):
        body = {"prompt": "three", "max_tokens": limit}
        choice = server.complete(**body)["choices"][0]
        assert choice["text"] == "abc"[:limit]
        assert choice["finish_reason"] == reason
        assert server.complete(**body)["usage"]["completion_tokens"] == min(limit, 4)
        chunks = server.stream(TEXT, body)
        assert texts_of(chunks) == {0: "abc"[:limit]}
        assert chunks[-2]["choices"][0]["finish_reason"] == reason


def test_a_stop_string(start_server):
    """C09."""
    server = start_server(ScriptedExecutor(scripts={"go": "alpha beta gamma delta"}))
    for stop in ("beta gamma", ["nothing", "beta gamma"]):
        choice = server.complete("go", stop=stop, max_tokens=50)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("alpha ", "stop")
        assert choice["stop_reason"] == "beta gamma"
        chunks = server.stream(TEXT, {"prompt": "go", "stop": stop, "max_tokens": 50})
        assert texts_of(chunks) == {0: "alpha "}
        assert chunks[-2]["choices"][0]["stop_reason"] == "beta gamma"
    for stop in ([], None):
        assert server.complete("go", stop=stop, max_tokens=50)["choices"][0]["text"].endswith(
            "delta"
        )


def test_text_cannot_break_the_framing(start_server):
    """C12: One event is one line, whatever the text holds."""
    text = 'in parts: a\u2028b\u2029c\n\nd\r\ne data: [DONE]\n\n{"}\x00 \U0001f600\x85'
    executor = ScriptedExecutor(scripts={"go": text})
    server = start_server(executor)
    size = len(text.encode()) + 1
    body = {"prompt": "go", "max_tokens": size}
    assert server.complete(**body)["choices"][0]["text"] == text
    executor.hold_at_steps = range(size + 2, size + 10)
    data, left = b"", len(executor.hold_at_steps)
    with server.client.stream("POST", TEXT, json=body | {"stream": True}) as answer:
        for part in answer.iter_bytes():
            data += part
            if left:
                executor.wait_held()
                executor.release()
                left -= 1
    chunks = events(data)
    assert texts_of(chunks) == {0: text}
    assert [chunk["choices"][0]["text"] for chunk in chunks[:8]] == list("in parts")


def test_seeds_repeat_and_answers_differ(server):
    """C18."""
    body = {"prompt": "x", "n": 2, "seed": 4242, "max_tokens": 8}
    first, second = (server.complete(**body)["choices"] for _ in range(2))
    assert first == second
    assert first[0]["text"] != first[1]["text"]


class TestLogprobs:
    """The scripted executor says -0.5 for a token, then -0.5, -1, ... for the best."""

    @pytest.mark.parametrize("top", [None, 0, 2])
    def test_chat(self, server, top):
        """S1."""
        body = HELLO | {"logprobs": True, "top_logprobs": top}
        choice = server.post(CHAT, body).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
        for entry in content:
            assert entry["bytes"] == [ord(entry["token"])]
            assert entry["logprob"] == -0.5
            best = entry["top_logprobs"]
            assert [other["logprob"] for other in best] == [-0.5, -1.0][: top or 0]
            assert all(set(other) == {"token", "logprob", "bytes"} for other in best)
        chunks = server.stream(CHAT, body)
        streamed = [
            entry
            for chunk in chunks[:-1]
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content

    def test_completions(self, server):
        """S1."""
        for wanted in (0, 2):
            choice = server.complete("abc", logprobs=wanted)["choices"][0]
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert logprobs["token_logprobs"] == [-0.5] * 4
            assert logprobs["text_offset"] == [0, 1, 2, 3]
            assert [len(best) for best in logprobs["top_logprobs"]] == [max(wanted, 1)] * 4
        assert server.complete("abc", logprobs=None)["choices"][0]["logprobs"] is None

    def test_parts_of_characters(self, start_server):
        """Bytes are right where a token is a part of a character; offsets are in characters."""
        text = "aé😀b"
        server = start_server(ScriptedExecutor(scripts={"go": text}))
        size = len(text.encode())
        choice = server.complete("go", max_tokens=size, logprobs=1)["choices"][0]
        assert choice["text"] == text
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
        assert choice["logprobs"]["tokens"][1] == "bytes:\\xc3"
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        server = start_server(ScriptedExecutor(scripts={"user: x": text}))
        choice = server.post(CHAT, body | {"max_tokens": size}).json()["choices"][0]
        data = [byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]]
        assert bytes(data).decode() == text

    @pytest.mark.parametrize("prompt", ["héllo", list("héllo".encode())])
    @pytest.mark.parametrize("max_tokens", [0, 2])
    def test_echo_covers_the_prompt(self, server, prompt, max_tokens):
        """S2, C05."""
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        answer = server.complete(**body)
        (choice,) = answer["choices"]
        made = bytes(server.executor.expected("héllo", max_tokens)).decode()
        assert choice["text"] == "héllo" + made
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (5 + max_tokens)
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, *range(5, 5 + max_tokens)]
        assert {len(logprobs[name]) for name in logprobs} == {6 + max_tokens}
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
        chunks = server.stream(TEXT, body | {"stream_options": {"include_usage": True}})
        assert chunks[-2]["usage"]["completion_tokens"] == max_tokens
        assert texts_of(chunks) == {0: choice["text"]}
        streamed = defaultdict(list)
        for chunk in chunks[:-2]:
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                streamed[name] += values
        assert streamed == logprobs

    def test_prompt_logprobs(self, server):
        choice = server.complete("abc", prompt_logprobs=2)["choices"][0]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [len(position) for position in others] == [2, 2]
        assert others[0]["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_nothing_else(server, stream):
    """C05: ``max_tokens`` 0 gives the prompt back, and the engine has nothing to do."""
    before = server.metrics()["submitted"]
    body = {"prompt": ["Your answer: Yes", [104, 105]], "max_tokens": 0, "echo": True}
    if stream:
        chunks = server.stream(TEXT, body | {"stream_options": {"include_usage": True}})
        assert texts_of(chunks) == {0: "Your answer: Yes", 1: "hi"}
        usage = chunks[-2]["usage"]
    else:
        answer = server.complete(**body)
        assert [choice["text"] for choice in answer["choices"]] == ["Your answer: Yes", "hi"]
        usage = answer["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == usage["total_tokens"] == 18
    assert server.metrics()["submitted"] == before


def test_echoes_are_bounded(start_server):
    """Nothing is computed for them, so nothing else bounds what they are multiplied by."""
    server = start_server(settings={"max_request_bytes": 1_000})
    body = {"prompt": "x" * 100, "max_tokens": 0, "echo": True, "n": 10}
    for stream in (False, True):
        assert server.post("/v1/completions", body | {"stream": stream}).status_code == 200
        answer = server.post("/v1/completions", body | {"stream": stream, "n": 11})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"


def test_token_ids_are_returned(server):
    choice = server.complete("abc", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    chunks = server.stream(TEXT, {"prompt": "abc", "max_tokens": 4, "return_token_ids": True})
    streamed = [i for chunk in chunks[:-1] for i in chunk["choices"][0].get("token_ids", ())]
    assert streamed == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"abc")
    answer = server.post(CHAT, HELLO | {"return_token_ids": True}).json()
    assert bytes(answer["prompt_token_ids"]).decode() == "user: Hello!\nassistant: "
    chunks = server.stream(CHAT, HELLO | {"return_token_ids": True})
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    streamed = [i for chunk in chunks[:-1] for i in chunk["choices"][0].get("token_ids", ())]
    assert streamed == answer["choices"][0]["token_ids"]
    choice = server.complete("abc", logprobs=0, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord(x)}" for x in choice["text"]]


def test_models_and_small_endpoints(server):
    models = server.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["test-model", "alias"]
    assert server.client.get("/v1/models/alias").json()["max_model_len"] == 256
    assert server.client.get("/v1/models/none").status_code == 404
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/ready").status_code == 200
    assert server.complete(model="alias")["model"] == "alias"


def test_tokenize_and_detokenize(server):
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    chat = server.post("/tokenize", {"messages": HELLO["messages"]}).json()
    assert bytes(chat["tokens"]).decode() == "user: Hello!\nassistant: "
    assert server.post("/detokenize", {"tokens": [300]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_the_description_has_the_bodies(server):
    schema = server.client.get("/openapi.json").json()
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert "messages" in schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert "$defs" not in json.dumps(schema)
    assert server.client.get("/docs").status_code == 200


def test_a_long_answer_is_written_on_a_thread(start_server):
    """What it says is what a short one says, and the event loop goes on meanwhile."""
    executor = ScriptedExecutor(num_kv_blocks=1_024)
    server = start_server(executor, max_model_len=4_096, max_num_batched_tokens=4_096)
    body = {"prompt": [97] * 3_000, "max_tokens": 300, "echo": True, "logprobs": 20}
    choice = server.complete(**body)["choices"][0]
    assert choice["text"].startswith("a" * 3_000)
    assert len(choice["logprobs"]["tokens"]) == 3_300
    chunks = server.stream(TEXT, body)
    assert texts_of(chunks) == {0: choice["text"]}
    tops = [
        top
        for chunk in chunks[:-2]
        for top in (chunk["choices"][0]["logprobs"] or {"top_logprobs": []})["top_logprobs"]
    ]
    assert tops == choice["logprobs"]["top_logprobs"]
