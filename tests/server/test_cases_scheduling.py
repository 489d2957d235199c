"""Cases C25, C29 to C33, S8 to S12: ids, memory, the prefix cache, levels, the drain, over HTTP."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from running_server import events, http_post, read_response

from chairlift.config import ClassConfig, Config, PolicyConfig
from chairlift.testing import ByteTokenizer, ScriptedExecutor, default_token

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def text(executor, prompt, count, child=0):
    """What the executor says to a prompt."""
    return bytes(executor.expected(prompt, count, child)).decode()


class TestRequestIds:
    """C25."""

    def test_an_id_is_free_at_once(self, start_server):
        """Two with one id get their own answers; when one is cancelled the id may come again."""
        executor = ScriptedExecutor(hold_at_steps=[1, 5])
        server = start_server(executor)
        same = {"x-request-id": "same"}
        bodies = [{"prompt": name, "max_tokens": 100, "stream": True} for name in ("a", "b", "c")]
        first, second = (server.raw(http_post(TEXT, body, same)) for body in bodies[:2])
        server.all_run(2)
        first.close()
        server.wait_for(live=1)
        third = server.raw(http_post(TEXT, bodies[2], same))
        server.wait_for(live=2)
        executor.release()
        for sock, body in ((second, bodies[1]), (third, bodies[2])):
            with sock, sock.makefile("rb") as file:
                status, headers, data = read_response(file)
            assert (status, headers["x-request-id"]) == (200, "same")
            chunks = events(data)[:-1]
            said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert said == text(executor, body["prompt"], 100)
        server.check_alive()

    @pytest.mark.parametrize("value", [b"x" * 1_000_000, b"a\rb", b"a\nb: c", b"\xff\xfe", b"a\0"])
    def test_ids_that_cannot_be(self, server, value):
        body = b'{"prompt": "x", "max_tokens": 2, "stream": true}'
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nx-request-id: %b\r\n\r\n%b"
        with server.raw() as sock, sock.makefile("rb") as file:
            with suppress(ConnectionError):  # it may hear enough before the end
                sock.sendall(head % (TEXT.encode(), len(body), value, body))
            status, headers, data = read_response(file)
            assert status in (200, 400, 431)
            if status == 200:
                assert headers["x-request-id"].startswith("req-") or value == b"a\nb: c"
            assert len(data) < 10_000
        server.check_alive()


@pytest.fixture(scope="module")
def small(start_server):
    executor = ScriptedExecutor(num_kv_blocks=32)
    return start_server(executor, max_model_len=None, max_num_seqs=16)


class TestASmallPool:
    """C29, S10: 32 blocks of 16 tokens."""

    def test_what_can_never_fit_is_refused(self, small):
        answer = small.post(TEXT, {"prompt": [97] * 600, "max_tokens": 1})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "600" in error["message"]
        assert "512" in error["message"]

    def test_one_that_grows_to_the_whole_pool(self, small):
        """The pool is the context: its end is ``length``, as the models list says."""
        assert small.client.get("/v1/models").json()["data"][0]["max_model_len"] == 512
        answer = small.complete([97] * 300, max_tokens=400)
        assert answer["usage"]["completion_tokens"] == 212
        assert answer["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize(("count", "prompt", "output"), [(2, 250, 250), (30, 100, 200)])
    def test_crowds_beyond_the_pool_finish(self, small, count, prompt, output):
        """C30: all get what they would get alone, though most were preempted."""
        before = small.metrics()["preemptions"]
        prompts = [f"{index:02}" + "x" * (prompt - 2) for index in range(count)]
        with ThreadPoolExecutor(count) as pool:
            answers = list(
                pool.map(lambda prompt: small.complete(prompt, max_tokens=output), prompts)
            )
        for given, answer in zip(prompts, answers, strict=True):
            (choice,) = answer["choices"]
            assert choice["text"] == text(small.executor, given, output)
            assert choice["finish_reason"] == "length"
        preempted = small.metrics()["preemptions"] - before
        assert preempted < 20 * count
        if count > 2:  # two may have missed one another
            assert preempted > 0
        small.check_alive()


def test_preemption_is_invisible(start_server):
    """C30: a small pool and a large one: the same events, in characters and stops cut in two."""
    said = "na\u00efve \U0001f40c, caf\u00e9 " * 6 + "the end"
    bodies = [
        {"prompt": f"{index}" + "x" * 60, "max_tokens": 180, "stream": True, "logprobs": 1}
        | {"stop": ["the end"], "n": 1, "stream_options": {"include_usage": True}}
        for index in range(4)
    ]
    results = []
    for num_blocks in (22, 512):
        scripts = {body["prompt"]: said for body in bodies}
        executor = ScriptedExecutor(scripts=scripts, num_kv_blocks=num_blocks)
        server = start_server(executor, max_model_len=256, enable_prefix_caching=False)
        executor.hold()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.stream, TEXT, body) for body in bodies]
            server.wait_for(live=4)
            executor.release()
            streams = [stream.result() for stream in asked]
        told = []
        for chunks in streams:
            choices = [chunk["choices"][0] for chunk in chunks[:-2]]
            tokens = [x for c in choices for x in (c["logprobs"] or {"tokens": []})["tokens"]]
            joined = "".join(choice["text"] for choice in choices)
            told.append((joined, tokens, choices[-1]["finish_reason"], chunks[-2]["usage"]))
        results.append(told)
        preempted = server.metrics()["preemptions"]
        assert (preempted > 2) == (num_blocks == 22)
        server.check_alive()
    assert results[0] == results[1]
    assert results[0][0][0] == said.removesuffix("the end")


def test_edges_of_the_prefix_cache(start_server):
    """C31: whole blocks alone, never all of a prompt, and never another salt's or prompt's."""
    server = start_server(ScriptedExecutor(block_size=16, num_kv_blocks=256))

    def cached(prompt, **fields):
        answer = server.complete(prompt, max_tokens=20, **fields)
        assert answer["choices"][0]["text"] == text(server.executor, prompt, 20)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for length, wanted in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32)):
        prompt = f"{length} " + "p" * (length - 3)
        assert cached(prompt) == 0
        assert cached(prompt) == wanted
        assert cached(prompt, cache_salt="other") == 0
    base = [97] * 33
    assert cached(base) == 0
    for place, wanted in ((0, 0), (15, 0), (16, 16), (31, 16), (32, 32)):
        assert cached([*base[:place], 98, *base[place + 1 :]]) == wanted
    whole = [99] * 17
    assert cached(whole) == 0
    continued = whole + server.executor.expected(whole, 20)
    assert cached(continued) in (16, 32)
    server.check_alive()


def test_a_higher_level_gets_in(start_server):
    """C32: past a full batch of lower ones, which finish all the same, with their own text."""
    classes = {"high": ClassConfig(level=2), "low": ClassConfig(level=1)}
    config = Config(policy=PolicyConfig(classes=classes))
    is_enough, plain = threading.Event(), ScriptedExecutor()
    executor = ScriptedExecutor(
        default=lambda sample: 257 if is_enough.is_set() else default_token(sample),
        step_time=0.002,
        num_kv_blocks=2_048,
    )
    server = start_server(executor, config=config, max_num_seqs=4, max_model_len=8_000)
    low = [
        {"prompt": f"{index}", "max_tokens": 7_000, "stream": True, "service_tier": "low"}
        for index in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(server.stream, TEXT, body) for body in low]
        server.wait_for(running_sequences=4)
        answers = [
            server.post(TEXT, {"prompt": "now", "max_tokens": 3, "service_tier": "high"})
            for _ in range(5)
        ]
        assert not any(stream.done() for stream in streams), "they still run"
        is_enough.set()
        for answer in answers:
            assert answer.json()["choices"][0]["text"] == text(plain, "now", 3)
        for body, stream in zip(low, streams, strict=True):
            chunks = stream.result()
            assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
            said = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
            assert said == text(plain, body["prompt"], len(said))
    is_enough.clear()
    server.check_alive()


def test_a_client_that_does_not_read_does_not_hold_up_the_drain(start_server):
    """C33: it is cut off after the grace time like the others, and the exit is clean."""
    executor = ScriptedExecutor(step_time=0.0005, num_kv_blocks=4_096)
    server = start_server(executor, max_model_len=16_384, settings={"shutdown_grace": 0.3})
    body = {"prompt": "x", "n": 4, "max_tokens": 16_000, "logprobs": 20, "stream": True}
    with server.raw(http_post(TEXT, body)):
        server.wait_for(running_sequences=4)
        server.drain()
        server.join()
    assert server.exit_code == 0


def test_prompt_logprobs_are_bounded(server):
    """S8: no more than ``max_logprobs``, whatever is asked for."""
    for wanted in (21, 258, 10**9, 10**30, -1):
        answer = server.post(TEXT, {"prompt": "x", "prompt_logprobs": wanted})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_logprobs"
    server.check_alive()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_body_that_never_comes(start_server, path):
    """S9: nothing waits for ever for its client; until then it has no place in the queue."""
    server = start_server(settings={"slow_reader_timeout": 0.3}, max_num_seqs=1)
    whole = http_post(path, {"messages": [{"role": "user", "content": "x" * 100}]})
    with server.raw(whole[:-50]) as sock, sock.makefile("rb") as file:
        assert server.complete()["usage"]["completion_tokens"] == 4
        status, headers, data = read_response(file)
        assert status == 408
        assert headers["connection"] == "close"
        assert b"body_too_late" in data
        assert file.read() == b""
    server.check_alive()


def test_a_head_that_never_comes(start_server, monkeypatch):
    """S9: nor does a connection."""
    monkeypatch.setattr("chairlift.server.connection.HEAD_TIMEOUT_S", 0.3)
    server = start_server()
    with server.raw(b"POST /v1/completions HT") as sock, sock.makefile("rb") as file:
        status, _, data = read_response(file)
        assert status == 408
        assert b"headers_too_late" in data
    with server.raw() as sock:
        assert sock.recv(100) == b""
    request = http_post(TEXT, {"prompt": "x", "max_tokens": 2})
    with server.raw(request) as sock, sock.makefile("rb") as file:
        assert read_response(file)[0] == 200
    server.check_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_is_one_answer(start_server, stream):
    """S11: it is told as it is, and nothing is tried again."""
    server = start_server(ScriptedExecutor(scripts={"quiet": ""}))
    before = server.metrics()["submitted"]
    body = {"prompt": "quiet", "max_tokens": 10}
    if stream:
        chunks = server.stream(TEXT, body | {"stream_options": {"include_usage": True}})
        assert chunks[-2]["usage"]["completion_tokens"] == 1
        choice = chunks[-3]["choices"][0]
    else:
        answer = server.complete(**body)
        assert answer["usage"]["completion_tokens"] == 1
        choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert server.metrics()["submitted"] == before + 1


class Gated(ByteTokenizer):
    """Long texts wait until they may be encoded."""

    def __init__(self):
        self.open = threading.Event()
        self.entered = threading.Event()

    def encode(self, text, add_special_tokens=True):
        if len(text) > 2_000:
            self.entered.set()
            assert self.open.wait(120)
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize("way", ["prompt", "messages", "documents", "tools", "tokenize"])
def test_long_texts_are_tokenised_beside_everything_else(start_server, way):
    """C08: while one is, /health answers and streams go on."""
    tokenizer = Gated()
    executor = ScriptedExecutor(num_kv_blocks=1_024)
    server = start_server(executor, tokenizer=tokenizer, max_model_len=4_096)
    long = "x" * 3_000
    messages = [{"role": "user", "content": "hi"}]
    arguments = {"name": "f", "arguments": {"text": long}}
    calls = [{"id": "1", "type": "function", "function": arguments}]
    path, body = {
        "prompt": (TEXT, {"prompt": long}),
        "messages": (CHAT, {"messages": [{"role": "user", "content": long}]}),
        "documents": (CHAT, {"messages": messages, "documents": [{"text": long}]}),
        "tools": (CHAT, {"messages": [*messages, {"role": "assistant", "tool_calls": calls}]}),
        "tokenize": ("/tokenize", {"prompt": long}),
    }[way]
    if way in ("documents", "tools"):
        tokenizer.apply_chat_template = lambda messages, **kwargs: tokenizer.encode(long)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, path, body | {"max_tokens": 2})
        assert tokenizer.entered.wait(120)
        try:
            assert server.client.get("/health").status_code == 200
            chunks = server.stream(TEXT, {"prompt": "short", "max_tokens": 50})
            assert chunks[-1] == "[DONE]"
        finally:
            tokenizer.open.set()
        assert answer.result().status_code == 200
    server.check_alive()


def test_texts_of_clients_that_left_are_not_tokenised(start_server):
    """C22: only those that were begun; the rest is dropped when its client leaves."""
    tokenizer = Gated()
    server = start_server(ScriptedExecutor(), tokenizer=tokenizer)
    begun = []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, special=True: begun.append(text[0]) or encode(text, special)
    request = http_post("/tokenize", {"prompt": "g" + "x" * 3_000})
    socks = [server.raw(request) for _ in range(100)]
    try:
        server.on_loop(_until(lambda: len(_tasks("_answer_to")) == 100))
        for sock in socks:
            sock.close()
        server.on_loop(_until(lambda: not _tasks("_answer_to")))
    finally:
        tokenizer.open.set()
    assert server.post("/tokenize", {"prompt": "last"}).json()["count"] == 4
    assert begun.pop() == "l"
    assert 0 < len(begun) < 50
    server.check_alive()


def _tasks(name):
    return [task for task in asyncio.all_tasks() if task.get_coro().__name__ == name]


def test_health_tells_of_a_step_that_does_not_return(start_server):
    """C21, C22: while it stands still, and no longer."""
    executor = ScriptedExecutor()
    server = start_server(executor, settings={"stall_timeout": 0.2})

    def health():
        return server.client.get("/health").status_code

    executor.hold()
    with server.raw(http_post(TEXT, {"prompt": "x", "max_tokens": 4})) as sock:
        executor.wait_held()
        server.on_loop(_until(lambda: server.service.is_stalled))
        assert health() == 503
        executor.release()
        with sock.makefile("rb") as file:
            assert read_response(file)[0] == 200
    server.on_loop(_until(lambda: not server.service.is_stalled))
    assert health() == 200
    server.check_alive()


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.01)
