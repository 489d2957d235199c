"""What is refused, how it is told, and that nothing of it is left."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from chairlift.server.completions import read_prompts
from chairlift.server.errors import HttpError
from chairlift.server.protocol import ChatRequest, CompletionRequest, read_request
from chairlift.testing import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def refused(server, path, body, status=400, **options):
    """The error of a request that must be refused, in OpenAI's shape, the same for a stream."""
    errors = []
    for stream in (False, True):
        if isinstance(body, bytes):
            answer = server.post(path, content=body, **options)
        else:
            answer = server.post(path, content=json.dumps(body | {"stream": stream}), **options)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "Traceback" not in answer.text
        errors.append(error)
    assert errors[0] == errors[1]
    if status == 400:
        assert errors[0]["type"] == "invalid_request_error"
    return errors[0]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"test-model","messages":[{"role":"user","content":"hi"}],x}',
        b"",
        b"[1,2,3]",
        b'"text"',
        b"null",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "hi"}',
        b'{"prompt": "hi", "n": ' + b"9" * 5_000 + b"}",
    ],
)
def test_what_is_no_json_object(server, path, body):
    """C01."""
    error = refused(server, path, body)
    assert error["code"] == "invalid_json"
    server.check_alive()


def nested(levels):
    """Lists in lists."""
    return json.loads("[" * levels + "]" * levels)


MISTYPED_CHATS = [
    ("messages", "hi"),
    ("messages", [123]),
    ("messages", [{}]),
    ("messages", []),
    ("messages", None),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": []}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "Assistant", "content": "x"}]),
    ("messages", [{"role": "nobody", "content": "x"}]),
    ("messages", [{"role": "assistant", "content": None}]),
    ("max_tokens", 0),
    ("max_completion_tokens", -1),
    ("logprobs", 1),
    ("top_logprobs", 2),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]),
    ("messages", [{"role": "\ud800", "content": "x"}]),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"deep": nested(101)}),
    ("documents", [{"deep": nested(101)}]),
    ("messages", [{"role": "user", "content": "x", "extra": nested(101)}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{"id": nested(101)}]}]),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"add_special_tokens": True}),
    ("reasoning_effort", "low"),
    ("verbosity", "high"),
]
MISTYPED = [
    ("max_tokens", "8"),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("temperature", "0"),
    ("temperature", -1),
    ("temperature", 2.5),
    ("top_p", 0),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("n", 1.5),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 10**9),
    ("n", 10**30),
    ("stop", {}),
    ("stop", [1]),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a"] * 100_000),
    ("seed", "x"),
    ("seed", 10**30),
    ("min_tokens", -1),
    ("min_tokens", 100),
    ("priority", "1"),
    ("priority", 1.5),
    ("priority", 10**30),
    ("user", 5),
    ("user", "x" * 2_000),
    ("service_tier", "none such"),
    ("deadline_ms", -1),
    ("deadline_ms", "soon"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**6]),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"258": 5}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", [1]),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": 10**400}),
    ("temperature", 10**400),
    ("deadline_ms", 10**400),
    ("logit_bias", "x"),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", 5),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("functions", [{"name": "f"}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("guided_json", {}),
    ("use_beam_search", True),
    ("bad_words", ["x"]),
    ("modalities", ["audio"]),
    ("model", 5),
    ("cache_salt", 5),
    ("cache_salt", "\ud800"),
    ("model", "\ud800"),
    ("user", "a\udfff"),
    ("stop", ["\ud800"]),
]
MISTYPED_TEXTS = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", [""]),
    ("prompt", ["a", ""]),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", {}),
    ("prompt", 5),
    ("prompt", [258]),
    ("prompt", [-1]),
    ("prompt", [[-1]]),
    ("prompt", [[1, 2], [258]]),
    ("prompt", [4294967295]),
    ("prompt", [10**30]),
    ("prompt", [1.0]),
    ("prompt", [True]),
    ("prompt", [1, "a"]),
    ("prompt", ["a", 1]),
    ("prompt", ["a"] * 1_025),
    ("prompt", "\ud800"),
    ("max_tokens", 0),
    ("best_of", 2),
    ("suffix", "end"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("echo", "yes"),
]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(CHAT, *case) for case in MISTYPED_CHATS + MISTYPED]
    + [(TEXT, *case) for case in MISTYPED_TEXTS + MISTYPED],
)
def test_a_field_that_cannot_be(server, path, name, value):
    """C01, C02, C03, C05, C16, C18, C32, S5, S12."""
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    error = refused(server, path, body | {"max_tokens": 4, name: value})
    assert error["param"] == name
    assert name in error["message"] or error["code"] in ("empty_prompt", "bad_text")
    assert len(error["message"]) < 1_000


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "messages", [1]),
        (CHAT, "messages", [{"role": "user", "content": [1]}]),
        (CHAT, "messages", [{"role": "user", "content": "x", "tool_calls": [1]}]),
        (CHAT, "documents", [1]),
        (TEXT, "stop", [1]),
        (TEXT, "stop_token_ids", ["x"]),
        (TEXT, "logit_bias", {"0": "x"}),
        (TEXT, "prompt", [[]]),
    ],
)
def test_a_field_that_is_wrong_in_many_places(path, name, value):
    """Only the first is described: all of them would take minutes, and gigabytes."""
    body = {"messages": USER, "prompt": "hi"}
    if isinstance(value, dict):
        value = {str(index): "x" for index in range(200_000)}
    elif name == "messages" and isinstance(value[0], dict):
        (many,) = (inner for inner in value[0].values() if isinstance(inner, list))
        many *= 500_000
    else:
        value = value * 500_000

    def read(kind, body):
        request = read_request(kind, body)
        request.sampling(max_tokens=1, logprobs=None)
        read_prompts(request.prompt, 1_000)

    kind = ChatRequest if path == CHAT else CompletionRequest
    tracemalloc.start()
    try:
        with pytest.raises(HttpError) as refusal:
            read(kind, body | {name: value})
        assert refusal.value.param == name
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_stream_is_a_boolean(server):
    """C01, C17."""
    for value in ("true", 1, "x"):
        answer = server.post(TEXT, {"prompt": "hi", "stream": value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "stream"
    answer = server.post(TEXT, {"prompt": "hi", "stream_options": {"include_usage": True}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


def test_nothing_is_left_of_what_was_refused(server):
    server.check_alive()


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "min_p"])
def test_numbers_that_are_none(server, number, name):
    """C02."""
    body = b'{"prompt": "hi", "max_tokens": 4, "%b": %b}' % (name.encode(), number)
    error = refused(server, TEXT, body)
    assert error["param"] == name
    assert name in error["message"]


def test_a_nan_in_a_corner_is_no_json_either(server):
    """C02."""
    refused(server, TEXT, b'{"prompt": "hi", "nobody_knows": NaN}')
    refused(server, TEXT, b'{"prompt": "hi", "nobody_knows": [{"x": Infinity}]}')
    error = refused(server, TEXT, b'{"prompt": "hi", "logit_bias": {"5": NaN}}')
    assert error["code"] in ("invalid_json", "invalid_parameter")
    server.check_alive()


@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-45, 5e-324, 0, 2])
def test_small_temperatures_are_legal(server, temperature):
    """C02."""
    assert server.complete(temperature=temperature)["usage"]["completion_tokens"] == 4


def test_the_ends_of_the_vocabulary_are_legal(server):
    """C03."""
    assert server.complete([0])["usage"]["prompt_tokens"] == 1
    assert server.complete([257])["usage"]["prompt_tokens"] == 1
    assert server.complete(logit_bias={"257": -100, "0": 100})


def test_a_refusal_does_not_touch_others(start_server):
    """C02: A long answer goes on unchanged beside all kinds of refused requests."""
    server = start_server(ScriptedExecutor(step_time=0.002))
    body = {"prompt": "long", "max_tokens": 200, "stream": True}
    with server.client.stream("POST", TEXT, json=body) as answer:
        for name, value in MISTYPED[:20]:
            fields = {"prompt": "hi", "max_tokens": 4, name: value}
            assert server.post(TEXT, fields).status_code == 400
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in answer.iter_lines()
            if line.startswith("data: {")
        )
    assert text == bytes(server.executor.expected("long", 200)).decode()
    server.check_alive()


def test_null_is_the_default_and_unknown_fields_are_ignored(server):
    """C06: What clients send: nulls for what they have no opinion on, and fields of their own."""
    plain = {"messages": USER, "max_tokens": 6, "temperature": 0}
    wanted = server.post(CHAT, plain).json()["choices"]
    names = [
        "top_p",
        "seed",
        "stop",
        "n",
        "stream",
        "stream_options",
        "logit_bias",
        "user",
        "model",
    ]
    names += ["logprobs", "top_logprobs", "tools", "presence_penalty", "frequency_penalty"]
    names += ["response_format", "tool_choice", "service_tier", "max_completion_tokens"]
    nulls = dict.fromkeys([*names, "model", "functions", "priority", "deadline_ms"])
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "reasoning_effort": "none",
        "verbosity": "medium",
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"a": "b"},
        "nobody_knows": [1, {"x": 2}],
        "stream_options": None,
    }
    own = [{"role": "user", "content": "hi", "id": 195, "opts": {"visible": True}, "type": "text"}]
    for extra in (nulls, harmless, {"messages": own}):
        answer = server.post(CHAT, plain | extra)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == wanted
    null_limit = server.post(TEXT, {"prompt": "hi", "max_tokens": None, "best_of": None})
    assert null_limit.json()["usage"]["completion_tokens"] == 16


def test_the_last_of_two_equal_keys_counts(server):
    answer = server.post(TEXT, content=b'{"prompt":"a","prompt":"bc","max_tokens":1}').json()
    assert answer["usage"]["prompt_tokens"] == 2


def test_parts_are_joined_and_null_is_no_text(server):
    """C16."""

    def shown(messages):
        tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
        return bytes(tokens).decode()

    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    assert answer.status_code == 200
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "3 C"},
    ]
    answer = server.post(CHAT, {"messages": history, "max_tokens": 1})
    assert answer.status_code == 200
    assert shown(history[:2]).startswith("system: be brief\nuser: weather?\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens", "made"),
    [(254, 1, 1), (255, 1, 1), (254, 16, 2), (255, 2_560, 1), (254, 2_560, 2), (250, 10**9, 6)],
)
def test_the_room_in_the_context(server, stream, length, max_tokens, made):
    """C08: ``max_tokens`` beyond the room ends with ``length`` where the context does."""
    body = {"prompt": [97] * length, "max_tokens": max_tokens}
    if stream:
        chunks = server.stream(TEXT, body | {"stream_options": {"include_usage": True}})
        usage, reason = chunks[-2]["usage"], chunks[-3]["choices"][0]["finish_reason"]
    else:
        answer = server.complete(**body)
        usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
    assert (usage["completion_tokens"], reason) == (made, "length")


@pytest.mark.parametrize("length", [256, 257, 1_024])
@pytest.mark.parametrize("max_tokens", [1, 2_560, None])
def test_a_prompt_that_does_not_fit(server, length, max_tokens):
    """C08."""
    before = server.metrics()["iterations"]
    for prompt in ([97] * length, "a" * length):
        body = {"prompt": prompt, "max_tokens": max_tokens}
        error = refused(server, TEXT, body)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert str(length) in error["message"]
        assert "prompt is too long" in error["message"]  # what clients look for
        assert "maximum context length is 256 tokens" in error["message"]
    body = {"messages": [{"role": "user", "content": "a" * length}]}
    error = refused(server, CHAT, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert server.metrics()["iterations"] == before


def test_five_megabytes_of_text(start_server):
    """C08: Refused by its size alone, while others are served."""
    server = start_server()
    error = refused(server, TEXT, {"prompt": "a" * 5_000_000})
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in error["message"]
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": "é" * 2_500_000}]})
    assert error["code"] == "context_length_exceeded"
    assert "prompt is too long" in error["message"]
    server.check_alive()


@pytest.mark.parametrize("part", ['"a"', "[]", "{}", "7", "1.5", "null"])
def test_a_long_body_of_many_parts(server, part):
    """Parsed on a thread, by one scanner or the other; what it says is the same."""
    many = ",".join([part] * 100_000)
    body = f'{{"prompt": "hi", "max_tokens": 2, "nobody_knows": [{many}]}}'.encode()
    answer = server.post(TEXT, content=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2
    for broken in (body[:-1], body + b"x", body[:-2] + b"NaN]}", b"\xef\xbb\xbf" + body):
        assert refused(server, TEXT, broken)["code"] == "invalid_json"


def test_a_long_answer_to_tokenize(server):
    answer = server.post("/tokenize", {"prompt": "ab" * 150_000}).json()
    assert answer["count"] == 300_000
    assert answer["tokens"] == [97, 98] * 150_000


def test_a_body_above_the_limit(start_server):
    """C08."""
    server = start_server(settings={"max_request_bytes": 10_000})
    body = json.dumps({"prompt": "a" * 20_000}).encode()
    assert refused(server, TEXT, body, status=413)["code"] == "request_too_large"
    in_chunks = server.client.post(TEXT, content=iter([body[:6_000], body[6_000:]]))
    assert in_chunks.status_code == 413
    assert server.post("/tokenize", content=body).status_code == 413
    server.check_alive()


def test_paths_methods_and_models(server):
    """C01."""
    for method, path, status in (
        ("GET", "/none", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", TEXT, 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
    ):
        answer = server.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "hi"})):
        error = refused(server, path, body | {"model": "none"}, status=404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_full_queue(start_server):
    """Refused at once, with when to come again; the same with and without a stream."""
    executor = ScriptedExecutor()
    server = start_server(executor, max_num_seqs=1, max_queued_requests=1)
    executor.hold()
    socks = []
    for running, queued in ((1, 0), (1, 1)):
        socks.append(server.raw(_raw_completion()))
        server.wait_for(running_sequences=running, queued=queued)
    for stream in (False, True):
        for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "hi"})):
            answer = server.post(path, body | {"stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    executor.release()
    for sock in socks:
        assert b"200 OK" in sock.recv(1_000)
        sock.close()
    server.check_alive()


def test_one_refused_prompt_refuses_all(start_server):
    """C03: Of three prompts two have a place: nothing of any is left."""
    executor = ScriptedExecutor()
    server = start_server(executor, max_num_seqs=1, max_queued_requests=1)
    executor.hold()
    with server.raw(_raw_completion()):
        server.wait_for(running_sequences=1)
        answer = server.post(TEXT, {"prompt": ["a", "b", "c"]})
        assert answer.status_code == 429
        assert server.wait_for(live=1)["queued"] == 0
    executor.release()
    server.check_alive()


def test_a_wait_that_is_too_long(start_server):
    executor = ScriptedExecutor()
    server = start_server(executor, max_num_seqs=1)
    executor.hold()
    with server.raw(_raw_completion()):
        server.wait_for(running_sequences=1)
        for stream in (False, True):
            for late in (
                {"json": {"deadline_ms": 30}},
                {"headers": {"x-request-deadline-ms": "30"}},
            ):
                body = {"prompt": "hi", "stream": stream} | late.pop("json", {})
                answer = server.post(TEXT, body, **late)
                assert answer.status_code == 504
                assert answer.json()["error"]["code"] == "deadline_missed"
                assert answer.json()["error"]["type"] == "timeout_error"
        answer = server.post(TEXT, {"prompt": "hi"}, headers={"x-request-deadline-ms": "soon"})
        assert answer.status_code == 400
    executor.release()
    server.check_alive()


def _raw_completion():
    body = b'{"prompt": "hi", "max_tokens": 4}'
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        TEXT.encode(),
        len(body),
        body,
    )
