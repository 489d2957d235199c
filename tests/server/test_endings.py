"""Clients that leave or do not read, executors that fail, time that is up, and the drain."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from running_server import LONG, events, first_event, http_post, wait_until

from chairlift.server.exchange import Exchange
from chairlift.server.generation import Generation
from chairlift.server.protocol import CompletionRequest
from chairlift.server.service import Service
from chairlift.server.settings import ServerSettings
from chairlift.testing import ByteTokenizer, ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def read_all(sock):
    """Everything until the server closes or the body ends."""
    data = b""
    while part := sock.recv(65_536):
        data += part
        if data.endswith(b"0\r\n\r\n"):
            break
    return data


def body_of(data):
    """The body of a response with chunked encoding."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            break
    return body


def long_request(path=TEXT, stream=True, **fields):
    body = {"max_tokens": 200, "stream": stream} | fields
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "x"}]} | body
    return http_post(path, {"prompt": "x"} | body)


class TestDisconnects:
    """C22."""

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    @pytest.mark.parametrize("stream", [False, True])
    def test_while_it_runs(self, start_server, path, stream):
        executor = ScriptedExecutor(hold_at_steps=[10])
        server = start_server(executor)
        sock = server.raw(long_request(path, stream, n=2))
        executor.wait_held()
        if stream:
            first_event(sock)
        sock.close()
        server.wait_for(live=0)
        executor.release()
        metrics = server.wait_for(live=0, used_blocks=0)
        assert metrics["aborted"] == 1
        assert len(executor.steps) == 10
        server.check_alive()

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_it_waits(self, start_server, stream):
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=1)
        executor.hold()
        with server.raw(long_request()):
            server.wait_for(running_sequences=1)
            sock = server.raw(long_request(stream=stream, prompt=["a", "b"]))
            server.wait_for(queued=2)
            sock.shutdown(socket.SHUT_WR)  # a half-closed connection is a client that left
            server.wait_for(queued=0)
            sock.close()
        executor.release()
        server.check_alive()

    def test_within_the_body(self, server):
        sock = server.raw(http_post(TEXT, {"prompt": "x" * 1_000})[:-500])
        sock.close()
        server.check_alive()

    def test_in_a_long_prefill(self, start_server):
        executor = ScriptedExecutor(hold_at_steps=[20], num_kv_blocks=512)
        server = start_server(
            executor, max_num_batched_tokens=32, max_num_seqs=32, max_model_len=4_096
        )
        sock = server.raw(long_request(prompt=[1] * 4_000))
        executor.wait_held()
        sock.close()
        server.wait_for(live=0)
        executor.release()
        server.wait_for(live=0, used_blocks=0)
        assert [step.num_samples for step in executor.steps] == [0] * 20

    def test_many_at_once_and_others_go_on(self, start_server):
        server = start_server(ScriptedExecutor(step_time=0.001), max_num_seqs=64)
        expected = bytes(server.executor.expected("stays", 200)).decode()
        texts = []

        def stay():
            chunks = server.stream(TEXT, {"prompt": "stays", "max_tokens": 200})
            texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]))

        for _ in range(3):
            thread = threading.Thread(target=stay)
            thread.start()
            socks = [server.raw(long_request(prompt=f"{i}")) for i in range(100)]
            for sock in socks[:20]:
                sock.recv(100)
            for sock in socks:
                sock.close()
            thread.join(LONG)
        assert texts == [expected] * 3
        server.check_alive()

    def test_one_that_does_not_read_is_dropped(self, start_server):
        """Its answers merge, then it goes; what it held is free."""
        executor = ScriptedExecutor(step_time=0.0002, num_kv_blocks=4_096)
        server = start_server(executor, max_model_len=16_384, settings={"slow_reader_timeout": 0.3})
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.connect(("127.0.0.1", server.port))
        body = {"logprobs": 20, "n": 4, "max_tokens": 16_000, "ignore_eos": True}
        sock.sendall(long_request(**body))
        server.wait_for(live=1)
        server.wait_for(live=0)
        assert server.metrics()["aborted"] == 1
        sock.settimeout(LONG)
        with suppress(ConnectionError):  # what is unread is lost
            while sock.recv(65_536):
                pass
        sock.close()
        server.check_alive()

    @pytest.mark.parametrize("connection", ["keep-alive", "close"])
    def test_a_whole_answer_that_is_never_read(self, start_server, monkeypatch, connection):
        """The connection is kept as long as an idle one, and no longer."""
        monkeypatch.setattr("chairlift.server.lifecycle._KEEP_ALIVE_S", 0.2)
        server = start_server(ScriptedExecutor(num_kv_blocks=4_096), max_model_len=16_384)
        body = {"prompt": ["x" * 15_000] * 400, "max_tokens": 0, "echo": True}
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(http_post(TEXT, body, {"connection": connection}))
            assert sock.recv(20).startswith(b"HTTP/1.1 200 ")
            connections = server.lifecycle._http.server_state.connections
            wait_until(lambda: not connections)
        server.check_alive()

    def test_a_last_event_that_is_never_read(self):
        """Also where nothing but the end of an answer is left unread."""

        async def answer(exchange, _request):
            await exchange.begin_stream()
            await exchange.end_stream(Generation([], 1, exchange.usage))

        async def main():
            is_dropped, messages = (
                asyncio.Event(),
                [{"type": "http.request", "body": b'{"prompt": "x"}'}],
            )

            async def receive():
                if messages:
                    return messages.pop()
                await is_dropped.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                if message["type"] == "http.response.body":
                    await is_dropped.wait()

            settings = ServerSettings(slow_reader_timeout=0.05)
            service = Service(settings, SimpleNamespace(end_reason=None))
            scope = {"method": "POST", "path": TEXT, "headers": []}
            scope["chairlift.abort"] = is_dropped.set
            exchange = Exchange(service, CompletionRequest, answer)
            async with asyncio.timeout(LONG):
                await exchange(scope, receive, send)
            assert is_dropped.is_set()
            assert not service.live

        asyncio.run(main())


class TestEqualRequestIds:
    """C25."""

    def test_both_run(self, start_server):
        executor = ScriptedExecutor(hold_at_steps=[1, 5])
        server = start_server(executor)
        same = {"x-request-id": "same"}
        first = server.raw(
            http_post(TEXT, {"prompt": "one", "max_tokens": 200, "stream": True}, same)
        )
        second = server.raw(
            http_post(TEXT, {"prompt": "two", "max_tokens": 200, "stream": True}, same)
        )
        server.all_run(2)
        first.close()
        server.wait_for(live=1)
        executor.release()
        chunks = events(body_of(read_all(second)))
        second.close()
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        assert text == bytes(server.executor.expected("two", 200)).decode()
        assert server.post(TEXT, {"prompt": "x"}, headers=same).headers["x-request-id"] == "same"
        server.check_alive()


class TestFailures:
    """C21."""

    def test_a_row_that_fails(self, start_server):
        """One of four fails at its sixth token: its stream ends with an error, the others go on."""
        executor = ScriptedExecutor(step_time=0.001, fail_rows={"bad": 5})
        server = start_server(executor)
        socks = {
            name: server.raw(long_request(prompt=name, max_tokens=40))
            for name in ("good", "bad", "fine", "well")
        }
        for name, sock in socks.items():
            start = time.monotonic()
            chunks = events(body_of(read_all(sock)))
            sock.close()
            assert time.monotonic() - start < LONG
            texts = "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)
            expected = bytes(executor.expected(name, 40)).decode()
            if name == "bad":
                assert "[DONE]" not in chunks
                error = chunks[-1]["error"]
                assert (error["type"], error["code"]) == ("server_error", "request_failed")
                assert expected.startswith(texts)
                assert len(texts) == 5
                assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])
            else:
                assert chunks[-1] == "[DONE]"
                assert texts == expected
        server.check_alive()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_step_that_raises(self, start_server, stream):
        executor = ScriptedExecutor(raise_at_steps=[5], error=RuntimeError("an inner secret"))
        server = start_server(executor)
        if stream:
            with server.raw(long_request()) as sock:
                chunks = events(body_of(read_all(sock)))
            assert chunks[-1]["error"]["code"] == "request_failed"
            assert "[DONE]" not in chunks
            assert "secret" not in json.dumps(chunks)
        else:
            answer = server.post(TEXT, {"prompt": "x", "max_tokens": 20})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "secret" not in answer.text
        server.check_alive()

    def test_an_engine_that_ends(self, start_server):
        """Every stream gets its error, nothing new is taken, and the server exits with 1."""
        executor = ScriptedExecutor(
            hold_at_steps=[1, 30], raise_at_steps=[30], error=SystemExit("an inner secret")
        )
        server = start_server(executor)
        socks = [server.raw(long_request(stream=stream)) for stream in (True, True, False)]
        server.all_run(3)
        begun = [first_event(sock) for sock in socks[:2]] + [b""]
        executor.release()
        answers = []
        for data, sock in zip(begun, socks, strict=True):
            answers.append(data + read_all(sock))
            sock.close()
        for answer in answers[:2]:
            assert events(body_of(answer))[-1]["error"]["code"] == "engine_dead"
        assert answers[2].startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in answers[2]
        assert not any(b"secret" in answer for answer in answers)
        server.join()
        assert server.exit_code == 1

    def test_a_step_that_takes_too_long(self, start_server):
        executor = ScriptedExecutor()
        server = start_server(executor, settings={"stall_timeout": 0.2})
        assert server.client.get("/health").status_code == 200
        executor.hold()
        with server.raw(long_request()):
            wait_until(lambda: server.client.get("/health").status_code == 503)
            executor.release()
            wait_until(lambda: server.client.get("/health").status_code == 200)
        server.check_alive()

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_engine_that_somebody_shuts_down(self, start_server, stream):
        """What runs gets an error, what waits a status, whether or not it is to be a stream."""
        executor = ScriptedExecutor(step_time=0.01, num_kv_blocks=512)
        server = start_server(executor, max_num_seqs=1, max_model_len=4_096)
        with server.raw(long_request(max_tokens=4_000)) as running:
            server.wait_for(running_sequences=1)
            with server.raw(long_request(stream=stream)) as waiting:
                server.wait_for(queued=1)
                server.on_loop(server.engine.shutdown())
                chunks = events(body_of(read_all(running)))
                assert chunks[-1]["error"]["type"] == "overloaded_error"
                assert "[DONE]" not in chunks
                assert waiting.recv(4_096).startswith(b"HTTP/1.1 503 ")
        server.join()
        assert server.exit_code == 1

    def test_the_request_timeout(self, start_server):
        executor = ScriptedExecutor(hold_at_steps=[10, 20])
        server = start_server(executor, settings={"request_timeout": 0.5})
        answer = server.post(TEXT, {"prompt": "x", "max_tokens": 200})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "request_timeout"
        executor.wait_held()
        executor.release()
        with server.raw(long_request()) as sock:
            *chunks, last = events(body_of(read_all(sock)))
        assert last["error"]["code"] == "request_timeout"
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == bytes(executor.expected("x", 9)).decode()
        executor.wait_held()
        executor.release()
        server.check_alive()


class TestTheDrain:
    """C33."""

    def test_running_and_queued_requests_go_on(self, start_server):
        executor = ScriptedExecutor(hold_at_steps=[1, 5])
        server = start_server(executor, max_num_seqs=2)
        socks = [server.raw(long_request(max_tokens=40, prompt=f"{i}")) for i in range(4)]
        server.all_run(4, running_sequences=2, queued=2)
        server.drain()
        wait_until(lambda: server.client.get("/ready").status_code == 503)
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").headers["retry-after"]
        for stream in (False, True):
            answer = server.post(TEXT, {"prompt": "new", "stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "draining"
        executor.release()
        for index, sock in enumerate(socks):
            chunks = events(body_of(read_all(sock)))
            sock.close()
            assert chunks[-1] == "[DONE]"
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
            assert text == bytes(executor.expected(f"{index}", 40)).decode()
        server.join()
        assert server.exit_code == 0

    def test_the_grace_time_ends(self, start_server):
        """Streams get an error; what was not begun yet, a status."""
        executor = ScriptedExecutor(step_time=0.02, num_kv_blocks=512)
        server = start_server(
            executor, max_num_seqs=2, max_model_len=4_096, settings={"shutdown_grace": 0.3}
        )
        socks = [server.raw(long_request(max_tokens=4_000)) for _ in range(2)]
        server.wait_for(running_sequences=2)
        waiting = [server.raw(long_request(stream=stream)) for stream in (True, False)]
        server.wait_for(queued=2)
        start = time.monotonic()
        server.drain()
        answers = [read_all(sock) for sock in socks]
        for answer in answers:
            chunks = events(body_of(answer))
            assert chunks[-1]["error"]["code"] == "draining"
            assert "[DONE]" not in chunks
        for sock in waiting:
            answer = sock.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: " in answer
        server.join()
        for sock in socks + waiting:
            sock.close()
        assert server.exit_code == 0
        assert time.monotonic() - start < LONG

    def test_a_client_that_is_behind_hears_of_it(self, start_server):
        """It only was slow: it reads what there is, and then the error."""
        executor = ScriptedExecutor(step_time=0.0005, num_kv_blocks=4_096)
        server = start_server(
            executor, max_model_len=16_384, settings={"shutdown_grace": 0.1, "log_requests": False}
        )
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(long_request(logprobs=20, n=4, max_tokens=16_000, ignore_eos=True))
            wait_until(lambda: server.service.live)
            (exchange,) = server.service.live
            wait_until(
                lambda: time.monotonic() - (exchange._blocked_since or time.monotonic()) > 0.1
            )
            server.drain()
            wait_until(lambda: exchange._interruption is not None)
            chunks = events(body_of(read_all(sock)))
        assert len(chunks) > 10
        assert chunks[-1]["error"]["code"] == "draining"
        server.join()
        assert server.exit_code == 0

    @pytest.mark.parametrize("sent", [1.0, 0.5])
    def test_a_short_request(self, start_server, sent):
        """Also what never comes to the engine has its end: in time, and in the same words."""
        is_open, entered = threading.Event(), threading.Event()

        class Stuck(ByteTokenizer):
            def encode(self, text, add_special_tokens=True):
                entered.set()
                assert is_open.wait(LONG)
                return super().encode(text, add_special_tokens)

        server = start_server(
            ScriptedExecutor(), tokenizer=Stuck(), settings={"shutdown_grace": 0.1}
        )
        request = http_post("/tokenize", {"prompt": "x" * 100})
        with server.raw(request[: int(len(request) * sent)]) as sock:
            if sent == 1:
                assert entered.wait(LONG)
            else:
                wait_until(lambda: server.service.live)  # it is being read
            server.drain()
            answer = b""
            while part := sock.recv(4_096):
                answer += part
        is_open.set()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code": "draining"' in answer
        server.join()
        assert server.exit_code == 0

    def test_nobody_is_there(self, start_server):
        server = start_server()
        server.drain()
        server.join()
        assert server.exit_code == 0
