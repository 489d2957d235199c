"""``chairlift serve`` as people start it: a process, its words, its signals and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from running_server import LONG
from served import finished, python_path, rest, serving, stream

from chairlift.cli import main
from chairlift.server.lifecycle import bind
from chairlift.server.tenants import hash_key

get, post = partial(httpx.get, timeout=LONG), partial(httpx.post, timeout=LONG)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_sigterm_drains(isolation, tmp_path):
    """C33."""
    sign = tmp_path / "sign"
    flags = {"executor": "Braked", "env": {"SIGN": f"{sign}"}}
    with serving("--isolation", isolation, **flags) as (process, url):
        assert get(url.join("/ready")).status_code == 200
        sock = stream(url, 3_000)
        process.send_signal(signal.SIGTERM)
        while get(url.join("/ready")).status_code == 200:
            time.sleep(0.01)
        answer = post(url.join("/v1/completions"), json={"prompt": "x"})
        assert answer.status_code == 503
        sign.touch()
        assert rest(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        code, errors = finished(process)
    assert code == 0
    assert "draining: 1 requests" in errors
    assert "Traceback" not in errors


def test_the_grace_time_and_a_second_signal():
    """C33."""
    with serving("--shutdown-grace", "300ms") as (process, url):
        sock = stream(url, 5_000)
        process.send_signal(signal.SIGINT)
        assert b'"code": "draining"' in rest(sock)
        assert finished(process)[0] == 0
    with serving() as (process, url), stream(url, 5_000):
        process.send_signal(signal.SIGTERM)
        while get(url.join("/ready")).status_code == 200:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert finished(process)[0] == 128 + signal.SIGTERM


def test_a_text_that_is_being_tokenised_does_not_keep_it():
    """C33: the client is told, and the process ends, whatever its threads do."""
    with serving("--shutdown-grace", "200ms", executor="Tokenising") as (process, url):
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x" * 2_000}
            asked = pool.submit(post, url.join("/tokenize"), json=body)
            while get(url.join("/load")).json() != {"server_load": 1}:
                assert not asked.done(), asked.result().text
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        code, errors = finished(process)
    assert code == 0
    assert "Traceback" not in errors


def test_sighup_reloads(tmp_path):
    path = tmp_path / "chairlift.toml"
    path.write_text("")
    with serving("--config", str(path)) as (process, url):
        models = url.join("/v1/models")
        assert get(models).status_code == 200
        path.write_text(f'[keys.a]\nhash = "{hash_key("sesame")}"\n')
        process.send_signal(signal.SIGHUP)
        while get(models).status_code != 401:
            time.sleep(0.01)
        assert get(models, headers={"authorization": "Bearer sesame"}).status_code == 200
        path.write_text("nonsense")
        process.send_signal(signal.SIGHUP)
        line = process.stderr.readline()
        while "nothing is reloaded" not in line:
            line = process.stderr.readline()
        assert str(path) in line
        process.send_signal(signal.SIGTERM)
        assert finished(process)[0] == 0


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_engine_that_dies(isolation):
    """C21."""
    with serving("--isolation", isolation, executor="Dying") as (process, url):
        sock = stream(url, 5_000)
        data = rest(sock)
        assert b'"code": "engine_dead"' in data
        assert b"secret" not in data
        assert b"[DONE]" not in data
        code, errors = finished(process)
    assert code == 1
    assert "the engine has ended" in errors


def test_while_the_model_is_loaded():
    """The port answers from the beginning, and a signal ends the wait."""
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    command = [sys.executable, "-m", "chairlift", "serve", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--executor", "serve_executors:Endless"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + LONG
        while True:
            try:
                answer = get(f"{url}/ready")
                break
            except httpx.TransportError:
                assert time.monotonic() < end
                time.sleep(0.02)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert get(f"{url}/health").status_code == 200
        answer = post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert finished(process)[0] == 0
    finally:
        process.kill()
        process.communicate(timeout=LONG)


def test_an_engine_that_cannot_start():
    command = [sys.executable, "-m", "chairlift", "serve", "/no/such/model", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("chairlift: ")
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use(capsys):
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert main(["serve", "--port", str(port), "--executor", "serve_executors:Slow"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"chairlift: cannot listen on 127\.0\.0\.1:{port}: address already in use; .*\n", error
    )


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--host", "999.1.1.1"], "cannot listen on 999.1.1.1"),
        (["--api-key", ""], "an API key is empty"),
        (["--trust-tenant-header", "a b"], "--trust-tenant-header must be"),
        (["a", "--model", "b"], "MODEL is 'a' and --model 'b'"),
        (["--config", "/no/such.toml"], "/no/such.toml: it cannot be read"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
    ],
)
def test_flags_that_cannot_be(capsys, flags, error):
    assert main(["serve", *flags]) == 1
    told = capsys.readouterr().err
    last = told.splitlines()[-1]
    assert last.startswith("chairlift: ")
    assert error in last
    assert "Traceback" not in told


def test_flags_of_the_server():
    flags = ["--served-model-name", "one", "two", "--api-key", "sesame", "--max-num-seqs", "3"]
    env = {"CHAIRLIFT_API_KEY": "open up"}
    with serving(*flags, "--max-request-bytes", "1K", env=env) as (process, url):
        for key in ("sesame", "open up"):
            headers = {"authorization": f"Bearer {key}"}
            names = [x["id"] for x in get(url.join("/v1/models"), headers=headers).json()["data"]]
            assert names == ["one", "two"]
        assert get(url.join("/v1/models")).status_code == 401
        answer = post(url.join("/v1/completions"), headers=headers, content=b" " * 2_000)
        assert answer.status_code == 413
        process.send_signal(signal.SIGTERM)
        code, errors = finished(process)
    assert code == 0
    entries = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert [entry["status"] for entry in entries] == [413]
    assert "sesame" not in errors
    assert "open up" not in errors


def test_a_new_key(capsys):
    assert main(["key", "--name", "acme"]) == 0
    key, _, table, line = capsys.readouterr().out.splitlines()
    assert table == "[keys.acme]"
    assert line == f'hash = "{hash_key(key)}"'
    assert len(key) > 40
