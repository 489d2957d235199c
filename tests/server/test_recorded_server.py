"""``chairlift serve --record``: the log of a server, also of one that was killed."""

from __future__ import annotations

import json
import os
import signal
import time

import httpx
from running_server import LONG
from served import engine_process, finished, serving, stream

from chairlift.cli import main
from chairlift.flight_log import FlightLog


def test_a_server_is_recorded_and_its_log_lines_name_requests(tmp_path, capsys):
    path = tmp_path / "serve.log"
    with serving("--record", str(path)) as (process, url):
        body = {"prompt": "hello", "max_tokens": 5, "service_tier": "auto"}
        answer = httpx.post(url.join("/v1/completions"), json=body, timeout=LONG)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        code, errors = finished(process)
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith('{"event"')]
    (number,) = lines[0]["engine_requests"]
    assert main(["replay", str(path)]) == 0
    assert "every plan came out bit for bit" in capsys.readouterr().out
    assert main(["explain", str(path), str(number)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"request {number}: tenant default, class default, 5 prompt tokens")
    assert "5 output tokens" in told


def test_the_log_of_an_engine_that_was_killed_is_good_up_to_there(tmp_path):
    path = tmp_path / "killed.log"
    with serving("--record", str(path)) as (process, url):
        stream(url, 5_000).close()
        end = time.monotonic() + LONG
        while FlightLog(path).replay().steps == 0:  # an engine that is idle hands its records over
            assert time.monotonic() < end
            time.sleep(0.05)
        with stream(url, 5_000):
            os.kill(engine_process(process), signal.SIGKILL)
        finished(process)
    replay = FlightLog(path).replay()
    assert replay.mismatch is None
    assert replay.steps > 0
