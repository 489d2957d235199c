"""Ten thousand requests, many of them aborted at random moments: nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import Counter
from pathlib import Path

from running_server import LONG, http_post

ROUNDS = 8
REQUESTS = 1_250
CLIENTS = 100
SEED = 20_260
MOST_GROWTH = 5 * 2**20
"""Bytes that a process may grow by in the last five rounds: less than a kilobyte a request."""
LEFT = ("live", "queued", "running_sequences", "waiting_sequences", "used_blocks")


def make_request(chance):
    """The bytes of a request of some kind."""
    path = chance.choice(("/v1/chat/completions", "/v1/completions"))
    content = "x" * chance.choice((1, 20, 200))
    body = {
        "max_tokens": chance.randint(1, 40),
        "stream": chance.random() < 0.6,
        "n": chance.choice((1, 1, 1, 2, 4)),
    }
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": content}]
    else:
        body["prompt"] = [content] * chance.choice((1, 1, 1, 3))
    return http_post(path, body)


async def client(port, requests, chance, outcomes):
    """Send requests one after the other; leave where chance says so."""
    while requests:
        data = requests.pop()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        outcome = await one(reader, writer, data, chance)
        outcomes[outcome] += 1
        writer.transport.abort()


async def one(reader, writer, data, chance):
    kind = chance.random()
    if kind < 0.05:  # before the body is complete
        writer.write(data[: chance.randrange(len(data))])
        await asyncio.sleep(chance.random() * 0.01)
        return "in the body"
    writer.write(data)
    if kind < 0.45:  # in the queue, in prefill or in decode, whatever it comes to
        try:
            async with asyncio.timeout(chance.random() ** 3):
                answer = await whole(reader)
        except TimeoutError:
            return "aborted"
        return told(answer)
    if kind < 0.6:  # after some of the answer
        await reader.read(chance.randrange(1, 2_000))
        return "in the answer"
    async with asyncio.timeout(LONG):
        return told(await whole(reader))


async def whole(reader):
    """An answer, to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"content-length: " in head:
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await reader.readexactly(length)
    return head + await reader.readuntil(b"\r\n0\r\n\r\n")


def told(answer):
    status = int(answer.split(b" ", 2)[1])
    assert status in (200, 429), answer
    is_stream = b"text/event-stream" in answer
    assert answer.count(b"data: [DONE]") == is_stream
    return status


async def run_round(port, chance, outcomes):
    requests = [make_request(chance) for _ in range(REQUESTS)]
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(client(port, requests, chance, outcomes))


def resident(pid):
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def left_behind(server):
    """What of the requests there still is."""
    engine, http = server.engine, server.lifecycle._http.server_state
    metrics = server.metrics()

    async def tasks():
        return len(asyncio.all_tasks()) - 1

    found = {name: metrics[name] for name in LEFT}
    return found | {
        "tasks": server.on_loop(tasks()),
        "served": len(server.service.live),
        "calls": len(engine._calls),
        "inboxes": len(engine._inboxes),
        "connections": len(http.connections),
        "responses": len(http.tasks),
    }


def test_ten_thousand_requests(start_server):
    server = start_server(
        "serve_executors:Quick",
        isolation="process",
        max_num_seqs=32,
        max_queued_requests=64,
        num_kv_blocks=64,
        settings={"log_requests": False},
    )
    engine_pid = server.engine._engine.pid
    chance, outcomes = random.Random(SEED), Counter()
    nothing = left_behind(server)
    assert nothing["live"] == nothing["connections"] == 0
    memory, files = [], []
    for number in range(ROUNDS):
        asyncio.run(run_round(server.port, chance, outcomes))
        end = time.monotonic() + LONG
        while (left := left_behind(server)) != nothing:
            assert time.monotonic() < end, f"round {number} of seed {SEED}: {left}"
            time.sleep(0.01)
        gc.collect()
        pids = (os.getpid(), engine_pid)
        memory.append([resident(pid) for pid in pids])
        files.append([open_files(pid) for pid in pids])
    metrics = server.metrics()
    assert files[-1] == files[1]
    for early, late in zip(memory[2], memory[-1], strict=True):
        assert late - early < MOST_GROWTH, memory
    assert outcomes.total() == ROUNDS * REQUESTS
    assert min(outcomes[kind] for kind in (200, 429, "aborted", "in the body")) > 100, outcomes
    assert metrics["preemptions"] > 0
    ends = ("finished", "aborted", "failed", "rejected", "expired", "shed", "displaced")
    assert metrics["submitted"] == sum(metrics[name] for name in ends)
    assert metrics["failed"] == 0
    assert metrics["aborted"] > 200
    server.check_alive()
