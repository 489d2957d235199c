"""What tests of the server share: one that runs, and how to talk to it by hand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import dataclass

import httpx

from chairlift.async_engine import AsyncEngine
from chairlift.server.lifecycle import Lifecycle
from chairlift.testing import ScriptedExecutor

LONG = 120.0
"""What nothing here takes; reaching it means that something hangs."""


def wait_until(condition):
    """Wait for what the server does in its own time, such as after it has answered."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@dataclass
class RunningServer:
    """A server that serves, and its parts."""

    url: str
    port: int
    lifecycle: Lifecycle
    executor: ScriptedExecutor
    engine: AsyncEngine
    client: httpx.Client
    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread
    exit_code: int | None = None

    @property
    def service(self):
        return self.lifecycle.service

    def post(self, path, body=None, **options):
        """Send a JSON body, or raw ``content``."""
        return self.client.post(path, json=body, **options)

    def complete(self, prompt="hi", **fields):
        """A completion that must succeed."""
        answer = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path, body, **options):
        """All of a stream: the events' data, ``[DONE]`` as text."""
        with self.client.stream("POST", path, json=body | {"stream": True}, **options) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return events(b"".join(answer.iter_bytes()))

    def on_loop(self, coroutine):
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONG)

    def metrics(self):
        return self.on_loop(self.engine.metrics())

    def wait_for(self, **gauges):
        """Wait until the engine's metrics have these values."""
        end = time.monotonic() + LONG
        while True:
            metrics = self.metrics()
            if all(metrics[name] == value for name, value in gauges.items()):
                return metrics
            assert time.monotonic() < end, (gauges, metrics)
            time.sleep(0.005)

    def all_run(self, live, **gauges):
        """Wait until so many requests run, or what else ``gauges`` say, and stand still.

        The first step stands still until all are there, a later one from then on.
        """
        self.executor.wait_held()
        self.wait_for(live=live)
        self.executor.release()
        self.executor.wait_held()
        self.wait_for(**gauges or {"running_sequences": live})

    def check_alive(self):
        """Nothing is left behind, and the next request is served."""
        self.wait_for(live=0, queued=0, running_sequences=0, waiting_sequences=0, used_blocks=0)
        assert self.complete()["usage"]["completion_tokens"] == 4
        assert self.client.get("/health").status_code == 200
        self.wait_for(live=0, queued=0, running_sequences=0, waiting_sequences=0, used_blocks=0)
        assert self.client.get("/load").json() == {"server_load": 0}

    def drain(self):
        self._loop.call_soon_threadsafe(self.lifecycle.drain)

    def join(self):
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "the server does not end"

    def raw(self, data=b""):
        """A socket of its own."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=LONG)
        sock.sendall(data)
        return sock


def first_event(sock) -> bytes:
    """What comes until the first event of a stream is there."""
    data = b""
    while b"data: " not in data:
        part = sock.recv(4_096)
        assert part, data
        data += part
    return data


def events(data: bytes) -> list:
    """Parse a stream strictly: only ``data:`` lines, each event one line and an empty one."""
    text = data.decode("ascii")
    assert text.endswith("\n\n")
    parsed = []
    for event in text[:-2].split("\n\n"):
        assert event.startswith("data: "), event
        assert "\n" not in event, event
        payload = event[len("data: ") :]
        parsed.append(payload if payload == "[DONE]" else json.loads(payload))
    return parsed


def read_response(file) -> tuple[int, dict[str, str], bytes]:
    """The next response of a connection: status, headers, and the body without its framing."""
    line = file.readline()
    assert line.startswith(b"HTTP/1.1 "), line
    headers = {}
    while (header := file.readline()) not in (b"\r\n", b""):
        name, _, value = header.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return int(line.split()[1]), headers, file.read(int(headers["content-length"]))
    body = b""
    while size := int(file.readline(), 16):
        body += file.read(size)
        assert file.read(2) == b"\r\n"
    assert file.read(2) == b"\r\n"
    return int(line.split()[1]), headers, body


def http_post(path: str, body: dict, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = {"host": "x", "content-type": "application/json", "content-length": str(len(data))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (head | (headers or {})).items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data
