"""How the streams of an ``AsyncEngine`` end when something else does."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from async_streams import collect, counters, ids_of, is_idle, make, stands_still, tokens, until
from chairlift import (
    EngineDeadError,
    RequestFailedError,
)
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")

# C21: failures end streams with an error.


def test_an_exception_ends_the_streams_of_its_step(run, caplog):
    async def main():
        executor = ScriptedExecutor(raise_at_steps=[5])
        async with make(executor) as engine:
            stream = engine.generate("a", tokens(20))
            got = []

            async def keep_all():
                async for delta in stream:
                    got.append(delta)

            with pytest.raises(RequestFailedError, match="RuntimeError: scripted failure"):
                await keep_all()
            assert ids_of(got) == executor.expected("a", 4)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await is_idle(engine)

    run(main)
    assert "failed in step 5" in caplog.text


def test_a_failed_row_ends_only_its_stream(run):
    async def main():
        executor = ScriptedExecutor(fail_rows={"bad": 5}, step_time=0.001)
        async with make(executor) as engine:
            good = [
                asyncio.create_task(collect(engine.generate(f"good {number}", tokens(30))))
                for number in range(3)
            ]
            with pytest.raises(RequestFailedError):
                await collect(engine.generate("bad", tokens(30)))
            for number, deltas in enumerate(await asyncio.gather(*good)):
                assert ids_of(deltas) == executor.expected(f"good {number}", 30)
            await is_idle(engine)

    run(main)


def test_a_dead_executor_thread_ends_everything(run, caplog):
    async def main():
        executor = ScriptedExecutor(
            raise_at_steps=[5], error=SystemExit("bye"), step_time=0.002, num_kv_blocks=40
        )
        async with make(executor, max_num_seqs=2) as engine:
            streams = [collect(engine.generate(f"{n}", tokens(50))) for n in range(6)]
            results = await asyncio.gather(*streams, return_exceptions=True)
            assert [type(result) for result in results] == [EngineDeadError] * 6
            with pytest.raises(EngineDeadError, match="SystemExit: bye"):
                await collect(engine.generate("late"))

    run(main)
    assert "executor thread has died" in caplog.text


# Shutdown.


def test_shutdown_with_live_requests(run):
    async def main():
        executor = ScriptedExecutor(step_time=0.005)
        engine = make(executor, max_num_seqs=2)
        tasks = [
            asyncio.create_task(collect(engine.generate(f"{n}", tokens(400)))) for n in range(5)
        ]
        await until(lambda: counters(engine)["live"] == 5 and len(executor.steps) > 5)
        await engine.shutdown()
        for deltas in await asyncio.gather(*tasks):
            assert deltas[-1].finish_reason == "abort"
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine.generate("late"))

    run(main)


class _EndsInBetween:
    """A client whose engine ends just after what was published had been taken."""

    def __init__(self, client):
        self._client = client
        self.has_ended = False

    def __getattr__(self, name):
        return getattr(self._client, name)

    def drain(self):
        batch = self._client.drain()
        if batch is not None and not self.has_ended and batch.deltas():
            self.has_ended = True
            self._client.shutdown()
            while not self._client.is_closed:
                time.sleep(0.001)
        return batch


def test_an_end_that_comes_between_two_looks_is_told_in_order(run):
    """The last words of an engine are not lost because its end is known already."""

    async def main():
        executor = ScriptedExecutor(step_time=0.005)
        engine = make(executor)
        engine._client = client = _EndsInBetween(engine._client)
        deltas = await collect(engine.generate("x", tokens(400)))
        assert client.has_ended
        assert deltas[-1].finish_reason == "abort"
        await engine.shutdown()

    run(main)


def test_shutdown_while_a_step_hangs(run, caplog, monkeypatch):
    monkeypatch.setattr("chairlift.engine._JOIN_TIMEOUT_S", 0.2)

    async def main():
        executor = ScriptedExecutor()
        executor.hold()
        engine = make(executor)
        task = asyncio.create_task(collect(engine.generate("a", tokens(4))))
        await stands_still(executor)
        await engine.shutdown()
        (delta,) = await task
        assert delta.finish_reason == "abort"
        executor.release()

    run(main)
    assert "still running" in caplog.text


def test_shutdown_ends_queued_tokenising_as_dead(run):
    async def main():
        executor = ScriptedExecutor()
        started, go_on = threading.Event(), threading.Event()
        encode = executor.tokenizer.encode

        def slow(text):
            started.set()
            assert go_on.wait(120)
            return encode(text)

        executor.tokenizer.encode = slow
        engine = make(executor, max_model_len=6_000)
        tasks = [
            asyncio.create_task(collect(engine.generate(f"{n}" * 5_000, tokens(4))))
            for n in range(3)
        ]
        await asyncio.to_thread(started.wait, 30)
        await engine.shutdown()
        go_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3

    run(main)


def test_shutdown_from_another_loop(run):
    async def main():
        executor = ScriptedExecutor(step_time=0.005)
        engine = make(executor)
        task = asyncio.create_task(collect(engine.generate("a", tokens(400))))
        await until(lambda: len(executor.steps) > 5)
        told_on = []
        deliver = engine._deliver_all
        engine._deliver_all = lambda: told_on.append(threading.current_thread()) or deliver()
        await asyncio.to_thread(lambda: asyncio.run(engine.shutdown()))
        assert (await task)[-1].finish_reason == "abort"
        await until(lambda: engine._loop is None)
        assert set(told_on) == {threading.current_thread()}
        await engine.shutdown()

    run(main)


def test_a_reader_on_a_closed_loop_costs_the_others_nothing():
    executor = ScriptedExecutor()
    executor.hold()
    engine = make(executor)
    left = engine.generate("left", tokens(8))
    loop = asyncio.new_event_loop()
    reading = loop.create_task(anext(left))
    while not engine._inboxes or next(iter(engine._inboxes.values())).reader is None:
        loop.run_until_complete(asyncio.sleep(0.002))
    reading._log_destroy_pending = False  # closed as it is, like a loop that crashed
    loop.close()

    async def main():
        others = [asyncio.create_task(collect(engine.generate(f"{n}", tokens(8)))) for n in (1, 2)]
        await until(lambda: counters(engine)["live"] == 3)
        executor.release()
        for n, deltas in zip((1, 2), await asyncio.gather(*others), strict=True):
            assert ids_of(deltas) == executor.expected(f"{n}", 8)
        await engine.shutdown()

    asyncio.run(main())


def test_a_tokenizer_that_cannot_decode_fails_its_request_only(run):
    async def main():
        executor = ScriptedExecutor()

        def refuse(*_args, **_options):
            raise ValueError("no such token")

        async with make(executor) as engine:
            executor.tokenizer.decode = refuse
            executor.hold()
            names = ["fails", "works"]
            params = [tokens(8, logprobs=1), tokens(8)]
            streams = [
                asyncio.create_task(collect(engine.generate(*each)))
                for each in zip(names, params, strict=True)
            ]
            await until(lambda: counters(engine)["live"] == 2)
            executor.release()
            failed, works = await asyncio.gather(*streams, return_exceptions=True)
            assert isinstance(failed, RequestFailedError)
            assert "ValueError: no such token" in str(failed)
            assert ids_of(works) == executor.expected("works", 8)
            await is_idle(engine)

    run(main)


def test_one_loop_after_the_other():
    executor = ScriptedExecutor()
    engine = make(executor)
    for _ in range(3):
        deltas = asyncio.run(collect(engine.generate("a", tokens(8))))
        assert ids_of(deltas) == executor.expected("a", 8)
    asyncio.run(engine.shutdown())


def test_not_on_two_loops_at_once(run):
    async def main():
        async with make() as engine:
            await collect(engine.generate("a"))

            def elsewhere():
                asyncio.run(collect(engine.generate("a")))

            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(elsewhere)

    run(main)
