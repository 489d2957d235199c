"""The gate as clients meet it: exactly so many of a burst, and the same answer with a stream."""

from __future__ import annotations

import json
import re
import selectors
import time
from contextlib import ExitStack, contextmanager

import pytest
from running_server import LONG, http_post

from chairlift.config import ClassConfig, Config, KeyConfig, PolicyConfig, TenantConfig
from chairlift.config import SheddingConfig as Shedding
from chairlift.server.tenants import hash_key
from chairlift.testing import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def body_for(path, **fields):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return {"max_tokens": 4} | prompt | fields


@contextmanager
def burst(server, count, path=TEXT, headers=None, **fields):
    """Send so many requests at once, each on its own connection."""
    data = http_post(path, body_for(path, **fields), headers)
    with ExitStack() as stack:
        socks = [stack.enter_context(server.raw()) for _ in range(count)]
        for sock in socks:
            sock.sendall(data)
        yield socks


def answers(socks, count, begun=None):
    """The first ``count`` whole answers, by socket; what else came is kept in ``begun``."""
    found, begun = {}, {} if begun is None else begun
    end = time.monotonic() + LONG
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        while len(found) < count:
            ready = selector.select(max(0.0, end - time.monotonic()))
            assert ready, f"{len(found)} of {count} are answered: {found.values()}"
            for key, _ in ready:
                sock = key.fileobj
                part = sock.recv(65_536)
                begun[sock] = begun.get(sock, b"") + part
                answer = parsed(begun[sock])
                if answer is not None:
                    selector.unregister(sock)
                    found[sock] = answer
                else:
                    assert part, begun[sock]
    return found


def parsed(data):
    """Status, headers and body, if all of it is there."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return None
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(entry.lower().split(": ", 1) for entry in lines)
    length = headers.get("content-length")
    is_whole = body.endswith(b"0\r\n\r\n") if length is None else len(body) == int(length)
    return (int(line.split()[1]), headers, body) if is_whole else None


def refusal(answer):
    """The error of an answer without what differs from one request to the next."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    error["message"] = re.sub(r"\d+(\.\d+)?", "#", error["message"])
    return status, error["code"], headers.get("retry-after"), json.dumps(error)


class TestBurst:
    """One may run and two may wait: three of a burst are taken, whoever was scheduled by then."""

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", [CHAT, TEXT])
    @pytest.mark.parametrize("before", [0, 1, 2])
    def test_exactly_three_of_twenty(self, start_server, before, path, stream):
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=1, max_queued_requests=2)
        executor.hold()
        with burst(server, before, path, stream=stream) as early:
            server.wait_for(live=before, running_sequences=min(before, 1))
            with burst(server, 20 - before, path, stream=stream) as late:
                begun = {}
                refused = answers([*early, *late], 17, begun)
                assert {refusal(answer)[:2] for answer in refused.values()} == {(429, "queue_full")}
                assert all(int(answer[1]["retry-after"]) >= 1 for answer in refused.values())
                assert not refused.keys() & set(early)
                server.wait_for(live=3, running_sequences=1, queued=2)
                executor.release()
                taken = [sock for sock in [*early, *late] if sock not in refused]
                for status, headers, body in answers(taken, 3, begun).values():
                    assert status == 200
                    assert ("text/event-stream" in headers["content-type"]) is stream
                    assert (b"data: [DONE]" in body) is stream
        assert server.metrics()["rejected"] == 17
        server.check_alive()

    def test_refusals_have_the_same_body_with_a_stream(self, start_server):
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=1, max_queued_requests=1)
        executor.hold()
        with burst(server, 2):
            server.wait_for(live=2)
            told = set()
            for stream in (False, True):
                for path in (CHAT, TEXT):
                    with burst(server, 1, path, stream=stream) as socks:
                        told |= set(map(refusal, answers(socks, 1).values()))
            assert len(told) == 1
            executor.release()
        server.check_alive()

    def test_answers_count_each(self, start_server):
        """Four slots and two that wait: two requests of three answers."""
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=4, max_queued_requests=2)
        executor.hold()
        with burst(server, 20, n=3) as socks:
            refused = answers(socks, 18)
            assert {answer[0] for answer in refused.values()} == {429}
            executor.release()
            taken = [sock for sock in socks if sock not in refused]
            assert [answer[0] for answer in answers(taken, 2).values()] == [200, 200]
        server.check_alive()

    def test_more_room_as_soon_as_one_is_done(self, start_server):
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=1, max_queued_requests=2)
        for _ in range(3):
            executor.hold()
            with burst(server, 20) as socks:
                refused = answers(socks, 17)
                executor.release()
                answers([sock for sock in socks if sock not in refused], 3)
            server.wait_for(live=0)
        server.check_alive()


def keyed(**policy):
    """A configuration with a key for each of two tenants."""
    keys = {
        name: KeyConfig(hash=hash_key(f"key of {name}"), tenant=name) for name in ("acme", "other")
    }
    return Config(policy=PolicyConfig(**policy), keys=keys)


def auth(name):
    return {"authorization": f"Bearer key of {name}"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("policy", "fields", "slots", "code"),
    [
        ({"tenants": {"acme": TenantConfig(max_queued=2)}}, {}, 1, "tenant_full"),
        ({"tenants": {"acme": TenantConfig(max_queued=2, max_running=1)}}, {}, 4, "tenant_full"),
        ({"default_tenant": TenantConfig(max_queued=2)}, {}, 1, "tenant_full"),
        (
            {"classes": {"a": ClassConfig(), "b": ClassConfig(max_queued_requests=2)}},
            {"service_tier": "b"},
            1,
            "class_full",
        ),
    ],
)
def test_the_bounds_of_a_key_and_of_a_class(start_server, *, policy, fields, slots, code, stream):
    """Three of one key's burst are taken; another key, or class, still has its places."""
    executor = ScriptedExecutor()
    server = start_server(executor, config=keyed(**policy), max_num_seqs=slots)
    executor.hold()
    with burst(server, 20, headers=auth("acme"), stream=stream, **fields) as socks:
        begun = {}
        refused = answers(socks, 17, begun)
        assert {refusal(answer)[:2] for answer in refused.values()} == {(429, code)}
        assert all(int(answer[1]["retry-after"]) >= 1 for answer in refused.values())
        with burst(server, 2, headers=auth("other"), stream=stream) as others:
            server.wait_for(live=5)
            executor.release()
            taken = [sock for sock in socks if sock not in refused]
            for status, _, _ in answers([*taken, *others], 5, begun).values():
                assert status == 200
    server.wait_for(live=0, queued=0)


class TestGivenUp:
    """What waits and is given up has its status, with and without a stream."""

    def test_expired(self, start_server):
        executor = ScriptedExecutor()
        config = Config(policy=PolicyConfig(classes={"a": ClassConfig(max_queue_time="60ms")}))
        server = start_server(executor, config=config, max_num_seqs=1)
        executor.hold()
        with burst(server, 1):
            server.wait_for(running_sequences=1)
            told = set()
            for stream in (False, True):
                for path in (CHAT, TEXT):
                    with burst(server, 3, path, stream=stream) as socks:
                        told |= set(map(refusal, answers(socks, 3).values()))
            ((status, code, retry_after, _),) = told
            assert (status, code) == (504, "queue_timeout")
            assert int(retry_after) >= 1
            executor.release()
        assert server.metrics()["expired"] == 12
        server.wait_for(live=0, queued=0, used_blocks=0)

    def test_displaced(self, start_server):
        """Who waits gives way to a higher level; who came last goes first."""
        executor = ScriptedExecutor()
        classes = {"low": ClassConfig(), "high": ClassConfig(level=1)}
        config = Config(policy=PolicyConfig(classes=classes))
        server = start_server(executor, config=config, max_num_seqs=1, max_queued_requests=2)
        executor.hold()
        with burst(server, 1) as first:
            server.wait_for(running_sequences=1)
            told = set()
            for path in (CHAT, TEXT):
                with burst(server, 1, path) as whole:
                    server.wait_for(queued=1)
                    with burst(server, 1, path, stream=True) as streamed:
                        server.wait_for(queued=2)
                        with burst(server, 2, path, service_tier="high"):
                            told |= set(map(refusal, answers([*whole, *streamed], 2).values()))
                server.wait_for(queued=0)
            ((status, code, retry_after, _),) = told
            assert (status, code) == (503, "displaced")
            assert int(retry_after) >= 1
            executor.release()
            assert answers(first, 1)[first[0]][0] == 200
        assert server.metrics()["displaced"] == 4
        server.check_alive()

    def test_shed(self, start_server):
        """Under overload those that wait, and those that come, are told to come later."""
        executor = ScriptedExecutor(step_time=0.01)
        config = Config(
            policy=PolicyConfig(
                classes={"a": ClassConfig(may_be_shed=True)},
                shedding=Shedding(above="400ms", below="200ms"),
            )
        )
        server = start_server(executor, config=config, max_num_seqs=1)
        with burst(server, 4) as socks:  # from which the pace is learned
            assert {answer[0] for answer in answers(socks, 4).values()} == {200}
        told = {False: set(), True: set()}
        end = time.monotonic() + LONG
        for stream, entries in told.items():
            # All of a burst may be there before the engine sees an overload.
            while {entry[:2] for entry in entries} != {(503, "shed"), (503, "shedding")}:
                assert time.monotonic() < end, entries
                with burst(server, 40, stream=stream) as socks:
                    found = answers(socks, 40).values()
                entries |= {refusal(answer) for answer in found if answer[0] != 200}
                server.wait_for(live=0, queued=0)
            assert all(int(entry[2]) >= 1 for entry in entries)
        bodies = [{entry[3] for entry in entries} for entries in told.values()]
        assert bodies[0] == bodies[1]
        server.check_alive()
