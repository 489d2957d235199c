"""``chairlift serve`` as a process, and what tests do with it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from running_server import LONG, first_event, http_post


@contextmanager
def serving(*flags, executor="Slow", env=None, port=0):
    """A server on a free port; yields the process and its address."""
    command = [sys.executable, "-m", "chairlift", "serve", "--port", f"{port}"]
    command += ["--executor", f"serve_executors:{executor}", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()} | (env or {}),
    )
    try:
        line = process.stdout.readline()
        match = re.fullmatch(r"serving (\S+) at (http://127\.0\.0\.1:\d+) \((.*)\)\n", line)
        assert match, line + process.stderr.read()
        yield process, httpx.URL(match[2])
    finally:
        process.kill()
        process.communicate(timeout=LONG)


def python_path():
    here = os.path.dirname(__file__)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def stream(url, max_tokens):
    """Begin a stream; returns its socket when the first event is there."""
    sock = socket.create_connection((url.host, url.port), timeout=LONG)
    body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
    sock.sendall(http_post("/v1/completions", body))
    first_event(sock)
    return sock


def rest(sock):
    data = b""
    with sock:
        while part := sock.recv(65_536):
            data += part
            if data.endswith(b"0\r\n\r\n"):
                break
    return data


def finished(process):
    """Exit code and what was logged."""
    _, errors = process.communicate(timeout=LONG)
    return process.returncode, errors


def engine_process(process):
    """The process of a server's engine."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                if b"chairlift.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
        time.sleep(0.01)
    raise AssertionError("there is no engine process")


def wait_until_gone(pid):
    """Wait until a process has ended, whether or not anybody has asked how."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} does not end")
