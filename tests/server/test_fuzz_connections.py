"""Random heads of requests, and connections that break off anywhere: no 5xx, no hang, nothing left.

Everything follows from a seed, which the test's name tells.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from running_server import http_post, read_response

from chairlift.testing import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PATHS = [CHAT, TEXT, "/tokenize", "/v1/models", "/v1/models/alias", "/health", "/ready", "/load"]
ODD_PATHS = ["/", "/none", "*", "//", "/%", "/%ff%fe", "/v1/models/%00", "/v1/models/%ff/../x"]
ODD_PATHS += ["/v1/completions?a=%zz&b", "http://x/health", "/h\u00e9".encode(), "/" + "a" * 9_000]
METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "get", "X"]
NAMES = ["authorization", "x-request-id", "x-request-deadline-ms", "content-type", "accept", "x-a"]
NAMES += ["content-length", "transfer-encoding", "expect", "connection", "upgrade", "host", "te"]
NAMES += ["cookie", "x-forwarded-for", "content-encoding", "range", "x-tenant"]
NAMES.append("A" * 300)
VALUES = ["", "0", "-1", "5", "1e400", "nan", "9" * 30, "chunked", "gzip, chunked", "identity"]
VALUES += ["100-continue", "close", "keep-alive", "upgrade", "websocket", "h2c", "Bearer x"]
VALUES += ["application/json; charset=utf-16", "a, b", "x" * 3_000, "\t", '"', "\x7f"]
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
"""What follows a request, so that the server closes."""
SILENCE = 30.0
"""Longer than the server waits for a body."""
FITTING = {
    CHAT: b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}',
    TEXT: b'{"prompt": "hi", "max_tokens": 2}',
    "/tokenize": b'{"prompt": "hi"}',
}
BODIES = [
    b"",
    b"{}",
    b'{"prompt": "hi", "max_tokens": 2}',
    b'{"prompt": "hi", "max_tokens": 2, "stream": true}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}',
    b"5\r\nhello\r\n0\r\n\r\n",
    b"zz\r\n",
]


@pytest.fixture(scope="module")
def fuzzed(start_server):
    executor = ScriptedExecutor(step_time=0.001, num_kv_blocks=4_096)
    settings = {"slow_reader_timeout": 1.0}
    return start_server(
        executor, settings=settings, max_num_seqs=64, max_model_len=512, max_queued_requests=4_096
    )


def odd_request(rng):
    """A request with a strange head."""
    path = rng.choice(PATHS if rng.random() < 0.8 else ODD_PATHS)
    head = [
        (rng.choice(METHODS) if rng.random() < 0.3 else "POST").encode(),
        path if isinstance(path, bytes) else path.encode(),
        rng.choice([b"HTTP/1.1"] * 30 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"FTP/1.1", b""]),
    ]
    body = rng.choice([FITTING.get(path, b"")] * len(BODIES) + BODIES)
    lines = [b"host: x"] if rng.random() < 0.95 else []
    if rng.random() < 0.95:
        lines.append(b"content-length: %d" % len(body))
    for _ in range(rng.randrange(4)):
        value = rng.choice(VALUES).encode("latin-1")
        if rng.random() < 0.15:
            value = rng.randbytes(rng.randrange(1, 20))
        name = rng.choice(NAMES).encode()
        lines.append(name + rng.choice([b": "] * 20 + [b":", b" : ", b""]) + value)
    rng.shuffle(lines)
    end = rng.choice([b"\r\n"] * 20 + [b"\n"])
    return b" ".join(head) + end + b"".join(line + end for line in lines) + end + body


def until_closed(sock):
    """What comes until the server closes or falls silent."""
    data = b""
    try:
        while part := sock.recv(65_536):
            data += part
    except (ConnectionError, TimeoutError):
        pass
    return data


@pytest.mark.parametrize("seed", range(6))
def test_heads(fuzzed, seed):
    rng = random.Random(seed)
    requests = [odd_request(rng) for _ in range(120)]

    def send(data):
        with fuzzed.raw(data + LAST) as sock:
            sock.settimeout(SILENCE)
            return until_closed(sock)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, requests))
    statuses = []
    for request, answer in zip(requests, answers, strict=True):
        version, status, *_ = answer.split(b" ", 2)
        assert version == b"HTTP/1.1", (request, answer)
        is_late = status == b"504" and b"x-request-deadline-ms" in request
        assert int(status) < 500 or is_late, (request, answer)
        statuses.append(int(status))
    assert statuses.count(400) > 10
    assert statuses.count(200) > 5
    fuzzed.check_alive()


def good_request(rng):
    """One that would succeed: of any kind, short or long."""
    path = rng.choice([CHAT, TEXT, TEXT])
    size = rng.choice([1, 30, 400])
    body = {"prompt": "x" * size, "messages": [{"role": "user", "content": "x" * size}]}
    del body["prompt" if path == CHAT else "messages"]
    body |= {"max_tokens": rng.choice([1, 5, 40]), "n": rng.choice([1, 1, 3])}
    if rng.random() < 0.2:
        body["logprobs"] = True if path == CHAT else 2
    if rng.random() < 0.1:
        body["unknown"] = "y" * 200_000
    return http_post(path, body | {"stream": rng.random() < 0.6})


def leave(sock, rng):
    """End a connection one way or the other."""
    how = rng.choice(["close", "reset", "half", "stop reading"])
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        sock.shutdown(socket.SHUT_WR)
        until_closed(sock)
    sock.close()


def misbehave(fuzzed, seed):
    """One client; everything it gets must be right as far as it goes."""
    rng = random.Random(seed)
    requests = [good_request(rng) for _ in range(rng.choice([1, 1, 1, 2, 5, 30]))]
    data = b"".join(requests)
    what = rng.choice(["cut the request", "cut the answer", "cut at once", "read all"])
    if what == "cut the request":
        data = data[: rng.randrange(len(data))]
    sock = fuzzed.raw()
    try:
        place = rng.randrange(len(data) + 1)
        for part in (data[:place], data[place:]):
            sock.sendall(part)
        if what == "cut the answer":
            left = rng.choice([1, 100, 1_000, 20_000])
            while left > 0 and (part := sock.recv(min(left, 4_096))):
                left -= len(part)
                if part.endswith(b"0\r\n\r\n") or b"content-length" in part:
                    break
        elif what == "read all":
            with sock.makefile("rb") as file:
                for _ in requests:
                    status, _, body = read_response(file)
                    assert status == 200, body
    finally:
        leave(sock, rng)
    return what


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_break_off(fuzzed, seed):
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda index: misbehave(fuzzed, seed * 1_000 + index), range(100)))
    assert {done.count(what) > 10 for what in set(done)} == {True}
    assert len(set(done)) == 4
    fuzzed.check_alive()
    assert json.loads(fuzzed.client.get("/load").content) == {"server_load": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [1, 3])
def test_requests_behind_one_that_is_served(start_server, stream, behind):
    """They are answered in order; and a client that leaves is noticed by the first."""
    executor = ScriptedExecutor(step_time=0.005)
    server = start_server(executor)
    texts = [f"number {index}" for index in range(1 + behind)]
    bodies = [{"prompt": text, "max_tokens": 5, "stream": stream} for text in texts]
    with (
        server.raw(b"".join(http_post(TEXT, body) for body in bodies)) as sock,
        sock.makefile("rb") as file,
    ):
        for text in texts:
            status, _, body = read_response(file)
            assert status == 200
            wanted = bytes(executor.expected(text, 5))
            if stream:
                assert b"[DONE]" in body
            else:
                assert json.loads(body)["choices"][0]["text"].encode() == wanted
    server.wait_for(live=0)
    long = http_post(TEXT, {"prompt": "x", "max_tokens": 200, "stream": stream})
    executor.hold()
    sock = server.raw(long)
    server.wait_for(live=1)
    sock.sendall(long * behind)
    sock.close()
    server.wait_for(live=0)
    executor.release()
    assert server.wait_for(used_blocks=0)["aborted"] == 1
    server.check_alive()
