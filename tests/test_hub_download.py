"""Downloads from a hub: huggingface_hub as it is, and a small hub of our own at a real socket."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 2_000,
    "pytorch_model.bin": b"the same once more",
    "original/consolidated.safetensors": b"and once more",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}
RESOLVE = "import sys; from chairlift.hub import resolve_model; " + (
    "print(resolve_model(sys.argv[1], revision=sys.argv[2] or None))"
)


class Hub(BaseHTTPRequestHandler):
    """One repository, ``owner/tiny``, and one that is gated, ``owner/gated``."""

    protocol_version = "HTTP/1.1"
    fetched: list[str]
    breaks_once: set[str]

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/owner/gated"):
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        info = re.fullmatch(r"/api/models/owner/tiny(?:/(revision|tree)/(\w+))?", path)
        file = re.fullmatch(r"/owner/tiny/resolve/(\w+)/(.+)", path)
        if info:
            return self.tell(info[1], info[2] or "main")
        if file:
            return self.give(file[1], file[2])
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def tell(self, what, revision):
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if commit is None:
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if what == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(body), "oid": etag(commit, body)}
                for name, body in FILES.items()
            ]
        else:
            names = [{"rfilename": name} for name in FILES]
            answer = {"id": "owner/tiny", "sha": commit, "siblings": names}
        return self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def give(self, commit, name):
        body = FILES[name]
        headers = {"ETag": f'"{etag(commit, body)}"', "X-Repo-Commit": commit}
        headers["Accept-Ranges"] = "bytes"
        start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if start:
            begin, end = int(start[1]), int(start[2] or len(body) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(body)}"
            return self.send(206, body[begin : end + 1], headers)
        if self.command == "GET":
            self.fetched.append(name)
        return self.send(200, body, headers, breaks=name in self.breaks_once)

    def send(self, status, body, headers, *, breaks=False):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks:
            self.breaks_once.clear()
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""


def etag(commit, body):
    return hashlib.sha1(commit.encode() + body).hexdigest()


@pytest.fixture
def hub():
    handler = type("OneHub", (Hub,), {"fetched": [], "breaks_once": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(hub, home, name, revision="", **environment):
    """Resolve a model in a process of its own, whose hub is ours."""
    url = f"http://127.0.0.1:{hub.server_address[1]}"
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, name, revision],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_repository_is_fetched_once_and_then_found_offline(hub, tmp_path):
    done = resolve(hub, tmp_path, "owner/tiny")
    assert done.returncode == 0, done.stderr
    directory = done.stdout.strip()
    assert COMMITS["main"] in directory
    found = {name for name in os.listdir(directory) if not name.startswith(".")}
    assert found == WANTED
    assert set(hub.RequestHandlerClass.fetched) == WANTED
    for name in WANTED:
        with open(os.path.join(directory, name), "rb") as file:
            assert file.read() == FILES[name]
    again = resolve(hub, tmp_path, "owner/tiny", HF_HUB_OFFLINE="1")
    assert again.stdout.strip() == directory
    assert len(hub.RequestHandlerClass.fetched) == len(WANTED)


def test_a_revision_is_that_of_the_repository(hub, tmp_path):
    done = resolve(hub, tmp_path, "owner/tiny", "v2")
    assert COMMITS["v2"] in done.stdout, done.stderr


def test_a_connection_that_breaks_is_taken_up_again(hub, tmp_path):
    hub.RequestHandlerClass.breaks_once.add("model.safetensors")
    done = resolve(hub, tmp_path, "owner/tiny")
    assert done.returncode == 0, done.stderr
    assert not hub.RequestHandlerClass.breaks_once, "nothing broke"
    with open(os.path.join(done.stdout.strip(), "model.safetensors"), "rb") as file:
        assert file.read() == FILES["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("owner/tiny", "v3", "the hub's 'owner/tiny' has no revision 'v3'"),
        ("owner/gated", "", "accept them on its page"),
        ("owner/none", "", "nor a repository on the hub"),
    ],
)
def test_what_a_hub_refuses(hub, tmp_path, name, revision, said):
    done = resolve(hub, tmp_path, name, revision)
    assert done.returncode == 1
    assert said in done.stderr.strip().splitlines()[-1]


def test_a_hub_that_is_not_there(hub, tmp_path):
    nowhere = "http://127.0.0.1:9"
    done = resolve(hub, tmp_path, "owner/tiny", HF_ENDPOINT=nowhere)
    assert done.returncode == 1
    assert "the hub cannot be reached" in done.stderr.strip().splitlines()[-1]
