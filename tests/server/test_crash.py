"""Processes that are killed, stopped or stuck under load: every client gets an end, soon."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from contextlib import suppress

import httpx
from running_server import LONG, events, first_event, http_post
from served import engine_process, finished, serving, wait_until_gone
from test_endings import body_of, long_request
from test_gate_http import parsed

from chairlift.server.tenants import hash_key

TEXT = "/v1/completions"
LOAD = [True, False] * 4
"""Whether each client wants a stream; the first four run, the others wait."""


def load(url, max_tokens=3_000):
    """Clients of a server with four slots, in the order in which they are served."""
    socks = []
    for index, stream in enumerate(LOAD):
        sock = connect(url, http_post(TEXT, body(stream, max_tokens)))
        socks.append(sock)
        wait(lambda index=index: server_load(url) == index + 1)
        if stream and index < 4:
            first_event(sock)
    return socks


def body(stream, max_tokens):
    return {"prompt": "x", "max_tokens": max_tokens, "stream": stream}


def connect(url, data):
    sock = socket.create_connection((url.host, url.port), timeout=LONG)
    sock.sendall(data)
    return sock


def read(sock):
    """A whole answer, or what there is of it when the connection ends."""
    data = b""
    while not (data.endswith(b"\r\n0\r\n\r\n") or parsed(data)):
        part = sock.recv(65_536)
        if not part:
            break
        data += part
    return data


def server_load(url):
    return httpx.get(url.join("/load"), timeout=LONG).json()["server_load"]


def health(url):
    return httpx.get(url.join("/health"), timeout=LONG).status_code


def wait(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.01)


def check_ends(socks, code):
    """Streams that run end with one error event, all others with a status."""
    for index, (sock, stream) in enumerate(zip(socks, LOAD, strict=True)):
        data = read(sock)
        sock.close()
        if stream and index < 4:
            assert data.endswith(b"\r\n0\r\n\r\n")
            last = data[data.rindex(b"data: ") :]
            assert f'"code": "{code}"'.encode() in last
            assert data.count(b'"error"') == 1
            assert b"[DONE]" not in data
        else:
            status, headers, told = parsed(data)
            assert status == 503
            assert int(headers["retry-after"]) >= 1
            assert f'"code": "{code}"'.encode() in told


def check_serves(port):
    """A server can be started on this port and answers."""
    with serving(port=port) as (_, url):
        assert url.port == port
        answer = httpx.post(url.join(TEXT), json=body(False, 4), timeout=LONG)
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_engine_process_is_killed():
    with serving("--max-num-seqs", "4") as (process, url):
        socks = load(url)
        os.kill(engine_process(process), signal.SIGKILL)
        check_ends(socks, "engine_dead")
        code, errors = finished(process)
    assert code == 1
    assert "the engine has ended: the engine is dead" in errors
    assert "SIGKILL" in errors
    assert "Traceback" not in errors
    check_serves(url.port)


def test_the_server_is_killed():
    """Its clients' connections end, and so does the engine's process."""
    with serving("--max-num-seqs", "4") as (process, url):
        socks = load(url)
        engine = engine_process(process)
        process.kill()
        for sock in socks:
            with suppress(ConnectionResetError):
                assert b"[DONE]" not in read(sock)
            sock.close()
        wait_until_gone(engine)
    check_serves(url.port)


def test_a_server_that_is_terminated_leaves_no_process():
    """A signal to the engine's process changes nothing: it is the server's to end."""
    with serving("--max-num-seqs", "4", "--shutdown-grace", "200ms") as (process, url):
        engine = engine_process(process)
        socks = load(url)
        os.kill(engine, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        check_ends(socks, "draining")
        assert finished(process)[0] == 0
        wait_until_gone(engine)


def test_a_step_that_raises_and_a_row_that_fails():
    """What was in the step gets its error; the engine goes on."""
    with serving(executor="Failing") as (process, url):
        with connect(url, long_request(prompt="bad")) as bad:
            chunks = events(body_of(read(bad)))
            assert chunks[-1]["error"]["code"] == "request_failed"
        with (
            connect(url, long_request(max_tokens=3_000)) as streamed,
            connect(url, long_request(max_tokens=3_000, stream=False)) as whole,
        ):
            chunks = events(body_of(read(streamed)))
            assert chunks[-1]["error"]["code"] == "request_failed"
            status, _, told = parsed(read(whole))
            assert status == 500
            assert b'"code": "request_failed"' in told
        assert health(url) == 200
        answer = httpx.post(url.join(TEXT), json=body(False, 4), timeout=LONG)
        assert answer.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        code, errors = finished(process)
    assert code == 0
    assert "an inner secret" in errors, "the log has the reason"


def test_a_step_that_never_returns(tmp_path):
    """Health tells it as soon as it stalls; after the step's timeout all get their ends."""
    sign = tmp_path / "sign"
    flags = ("--max-num-seqs", "4", "--stall-timeout", "1s", "--step-timeout", "4")
    with serving(*flags, executor="Hanging", env={"SIGN": f"{sign}"}) as (process, url):
        socks = load(url)
        sign.touch()
        wait(lambda: health(url) == 503)
        check_ends(socks, "engine_dead")
        code, errors = finished(process)
    assert code == 1
    assert re.search(r"not returned from step \d+ for 4 s \(step_timeout\)", errors)


def test_an_engine_process_that_is_stopped(tmp_path):
    """It neither dies nor answers: health says so, clients may leave, and it can go on."""
    sign = tmp_path / "sign"
    flags = ("--max-num-seqs", "4", "--stall-timeout", "1s")
    with serving(*flags, executor="Braked", env={"SIGN": f"{sign}"}) as (process, url):
        socks = load(url)
        engine = engine_process(process)
        wait(lambda: health(url) == 200)
        os.kill(engine, signal.SIGSTOP)
        try:
            wait(lambda: health(url) == 503)
            with connect(url, long_request(max_tokens=2)) as late:
                status, _, body = parsed(read(late))
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_stalled")
            assert httpx.get(f"{url}/ready", timeout=LONG).status_code == 503
            for sock in (socks.pop(0), socks.pop()):
                sock.close()
            wait(lambda: server_load(url) == len(socks))
            sign.touch()
        finally:
            os.kill(engine, signal.SIGCONT)
        wait(lambda: health(url) == 200)
        for sock, stream in zip(socks, LOAD[1:-1], strict=True):
            data = read(sock)
            assert (b"data: [DONE]" in data) if stream else (parsed(data)[0] == 200)
            sock.close()
        wait(lambda: server_load(url) == 0)
        process.send_signal(signal.SIGTERM)
        assert finished(process)[0] == 0


def test_questions_to_an_engine_that_is_stopped(start_server, monkeypatch):
    """Whoever asks is told that nobody answers; nothing waits for ever."""
    monkeypatch.setattr("chairlift.server.errors._ANSWER_TIMEOUT_S", 0.2)
    server = start_server(
        "serve_executors:Quick",
        isolation="process",
        num_kv_blocks=64,
        settings={"api_keys": ("sesame",)},
    )
    client = httpx.Client(
        base_url=server.url, timeout=LONG, headers={"authorization": "Bearer sesame"}
    )
    paths = ("/metrics", "/live", "/admin/usage")
    with client:
        os.kill(server.engine._engine.pid, signal.SIGSTOP)
        try:
            metrics, *others = [client.get(path) for path in paths]
        finally:
            os.kill(server.engine._engine.pid, signal.SIGCONT)
        monkeypatch.setattr("chairlift.server.errors._ANSWER_TIMEOUT_S", LONG)
        assert metrics.status_code == 200
        assert "\nchairlift:num_requests_running{" not in metrics.text
        for answer in others:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_stalled"
            assert answer.headers["retry-after"]
        metrics, *others = [client.get(path) for path in paths]
        assert "\nchairlift:num_requests_running{" in metrics.text
        assert {answer.status_code for answer in others} == {200}


def test_a_reload_of_an_engine_that_is_stopped(start_server, monkeypatch, tmp_path):
    """It is told that nobody answers; when the engine goes on, it and the server reload both."""
    monkeypatch.setattr("chairlift.server.errors._ANSWER_TIMEOUT_S", 0.2)
    path = tmp_path / "chairlift.toml"
    path.write_text("")
    server = start_server(
        "serve_executors:Quick",
        isolation="process",
        num_kv_blocks=64,
        settings={"api_keys": ("sesame",), "config_source": path},
    )
    path.write_text(f'[tenants.acme]\nweight = 7\n[keys.a]\nhash = "{hash_key("new")}"\n')

    def models(key):
        headers = {"authorization": f"Bearer {key}"}
        return server.client.get("/v1/models", headers=headers).status_code

    os.kill(server.engine._engine.pid, signal.SIGSTOP)
    try:
        answer = server.client.post("/admin/reload", headers={"authorization": "Bearer sesame"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
        assert models("new") == 401
    finally:
        os.kill(server.engine._engine.pid, signal.SIGCONT)
    wait(lambda: models("new") == 200)
    assert server.engine.config.policy.tenants["acme"].weight == 7
