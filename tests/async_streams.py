"""What the tests of ``AsyncEngine`` share."""

from __future__ import annotations

import asyncio
import time

from chairlift import AsyncEngine, SamplingParams
from chairlift.testing import ScriptedExecutor


def make(executor=None, **options):
    isolation = options.pop("isolation", "thread")
    executor = executor or ScriptedExecutor()
    return AsyncEngine(executor=executor, isolation=isolation, **options)


def counters(engine):
    """The engine's metrics, without a loop."""
    return engine._client.metrics()


def tokens(count, **options):
    return SamplingParams(max_tokens=count, **options)


async def collect(stream):
    return [delta async for delta in stream]


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition, timeout=120.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.002)


async def stands_still(executor):
    """Wait until a step does."""
    await asyncio.to_thread(executor.wait_held)


async def collect_step_by_step(stream, executor, num_steps):
    """The deltas; so many steps are let go, each when what the one before told has been read."""
    deltas = []
    async for delta in stream:
        deltas.append(delta)
        if len(deltas) <= num_steps:
            await stands_still(executor)
            executor.release()
    return deltas


async def is_idle(engine):
    """Nothing runs, waits or holds memory; then a whole request succeeds."""

    def idle():
        metrics = counters(engine)
        return not any(
            metrics[name]
            for name in ("live", "queued", "waiting_sequences", "running_sequences", "used_blocks")
        )

    await until(idle)
    assert len(ids_of(await collect(engine.generate("after all", tokens(5))))) == 5
