"""``AsyncEngine`` above a scripted model: streams, aborts in every state, wake-ups, ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import aclosing

import pytest
import uvloop

from chairlift import (
    AsyncEngine,
    Config,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    PolicyConfig,
    QueueFullError,
    RequestFailedError,
    SamplingParams,
)
from chairlift.errors import ConfigError
from chairlift.testing import ScriptedExecutor


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function on a fresh loop of each kind; nothing may hang."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def go(main):
        async def limited():
            async with asyncio.timeout(60):
                await main()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(limited())

    return go


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


async def until(condition, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.002)


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


def test_one_stream(run):
    async def main():
        executor = ScriptedExecutor(scripts={"hi": "grüße 👋"}, step_time=0.002)
        async with make(executor) as engine:
            stream = engine.generate("hi", tokens(60), request_id="mine")
            deltas = await collect(stream)
        assert text_of(deltas) == "grüße 👋"
        assert len(deltas) > 5
        assert {delta.request_id for delta in deltas} == {"mine"}
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == "stop"
        assert stream.stats.num_output_tokens == len(ids_of(deltas))
        assert stream.stats.ttft > 0

    run(main)


def test_many_streams_at_once(run):
    async def main():
        executor = ScriptedExecutor(num_kv_blocks=2_000)
        async with make(executor) as engine:
            prompts = [f"prompt {number}" for number in range(100)]
            executor.hold()
            streams = [
                asyncio.create_task(collect(engine.generate(prompt, tokens(30))))
                for prompt in prompts
            ]
            await until(lambda: counters(engine)["live"] == 100)
            executor.release()
            results = await asyncio.gather(*streams)
        for prompt, deltas in zip(prompts, results, strict=True):
            assert ids_of(deltas) == executor.expected(prompt, 30)
        assert max(step.num_decodes for step in executor.steps) == 100

    run(main)


def test_several_answers_and_logprobs(run):
    async def main():
        executor = ScriptedExecutor()
        async with make(executor) as engine:
            deltas = await collect(engine.generate("n", tokens(20, n=3, logprobs=1)))
        for child in range(3):
            own = [delta for delta in deltas if delta.index == child]
            assert ids_of(own) == executor.expected("n", 20, child=child)
            assert own[-1].finish_reason == "length"
            positions = [position for delta in own for position in delta.logprobs]
            assert [next(iter(position)) for position in positions] == ids_of(own)

    run(main)


def test_who_asks_is_checked_at_once(run):
    async def main():
        async with make() as engine:
            with pytest.raises(InvalidRequestError, match="priority is 'high'"):
                engine.generate("a", priority="high")
            stream = engine.generate(
                "a", tokens(3), tenant="acme", user="u", priority=-3, deadline=60.0
            )
            assert len(ids_of(await collect(stream))) == 3

    run(main)


def test_reload_while_streams_run(run):
    async def main():
        executor = ScriptedExecutor(step_time=0.002)
        async with make(executor) as engine:
            stream = engine.generate("a", tokens(30))
            deltas = [await anext(stream)]
            await engine.reload(Config(policy=PolicyConfig(tenants={"acme": {"weight": 2}})))
            with pytest.raises(ConfigError, match="classes is other; it must be the same classes"):
                await engine.reload(Config(policy=PolicyConfig(classes={"other": {}})))
            deltas += await collect(stream)
            assert ids_of(deltas) == executor.expected("a", 30)

    run(main)


def test_a_long_prompt_is_tokenised_off_the_loop(run):
    async def main():
        executor = ScriptedExecutor()
        async with make(executor, max_model_len=6_000) as engine:
            prompt = "y" * 5_000
            deltas = await collect(engine.generate(prompt, tokens(3)))
            assert ids_of(deltas) == executor.expected(prompt, 3)

    run(main)


def test_deltas_of_one_iteration_are_one_wake_up(run):
    async def main():
        executor = ScriptedExecutor(step_time=0.01)
        async with make(executor) as engine:
            client = engine._client
            streams = [engine.generate(f"{number}", tokens(30)) for number in range(50)]
            await asyncio.gather(*(stream.start() for stream in streams))
            before = client.wake_ups, counters(engine)["iterations"]
            results = await asyncio.gather(*map(collect, streams))
            assert sum(len(ids_of(deltas)) for deltas in results) == 1_500
            wake_ups, iterations = client.wake_ups, counters(engine)["iterations"]
        assert iterations - before[1] >= 28
        assert 28 <= wake_ups - before[0] <= iterations - before[1] + 2

    run(main)


def test_a_stalled_loop_finds_iterations_merged(run):
    async def main():
        executor = ScriptedExecutor()
        async with make(executor) as engine:
            stream = engine.generate("stalled", tokens(200))
            first = await anext(stream)
            before = engine._client.wake_ups
            while len(executor.steps) < 200:
                time.sleep(0.01)  # blocks the loop
            rest = await collect(stream)
            assert engine._client.wake_ups <= before + 4
            assert ids_of([first, *rest]) == executor.expected("stalled", 200)
            assert len(rest) <= 5

    run(main)


def test_a_slow_reader_merges_and_stalls_nobody(run):
    async def main():
        executor = ScriptedExecutor(step_time=0.001)
        async with make(executor) as engine:
            slow = engine.generate("slow", tokens(100))
            first = await anext(slow)
            quick = await collect(engine.generate("quick", tokens(120)))
            assert len(quick) > 20
            rest = await collect(slow)
            assert len(rest) == 1
            assert ids_of([first, *rest]) == executor.expected("slow", 100)

    run(main)


# C22: aborts in every state.


def test_leaving_the_loop_aborts(run):
    async def main():
        executor = ScriptedExecutor(step_time=0.002)
        async with make(executor) as engine:
            async for delta in engine.generate("a", tokens(400)):
                assert delta.text
                break
            await until(lambda: counters(engine)["aborted"] == 1)
            steps = len(executor.steps)
            await asyncio.sleep(0.05)
            assert len(executor.steps) <= steps + 2
            await is_idle(engine)

    run(main)


def test_closing_aborts(run):
    async def main():
        async with make(ScriptedExecutor(step_time=0.002)) as engine:
            stream = engine.generate("a", tokens(400))
            async with aclosing(stream):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await until(lambda: counters(engine)["aborted"] == 1)
            never_begun = engine.generate("a", tokens(4))
            await never_begun.aclose()
            assert await collect(never_begun) == []
            assert counters(engine)["submitted"] == 1
            await is_idle(engine)

    run(main)


def test_cancelling_the_task_aborts(run):
    async def main():
        async with make(ScriptedExecutor(step_time=0.002)) as engine:
            task = asyncio.create_task(collect(engine.generate("a", tokens(400))))
            await until(lambda: counters(engine)["output_tokens"] > 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: counters(engine)["aborted"] == 1)
            await is_idle(engine)

    run(main)


def test_cancelling_while_queued_prefilling_and_in_flight(run):
    async def main():
        executor = ScriptedExecutor()
        async with make(executor, max_num_seqs=1, long_prefill_token_threshold=16) as engine:
            executor.hold()
            prefilling = asyncio.create_task(collect(engine.generate("p" * 100, tokens(50))))
            await asyncio.to_thread(executor.wait_held)
            queued = asyncio.create_task(collect(engine.generate("queued", tokens(50))))
            await until(lambda: counters(engine)["queued"] == 1)
            queued.cancel()
            await asyncio.wait([queued])
            await until(lambda: counters(engine)["queued"] == 0)
            prefilling.cancel()
            await asyncio.wait([prefilling])
            await until(lambda: counters(engine)["aborted"] == 2)
            # Its step is in flight: the memory stays until the step has come back.
            assert counters(engine)["used_blocks"] > 0
            executor.release()
            await is_idle(engine)
            prefills = [step for step in executor.steps if step.num_tokens == 16]
            assert len(prefills) == 1

    run(main)


def test_many_clients_leave_at_once_again_and_again(run):
    async def main():
        executor = ScriptedExecutor(num_kv_blocks=2_000)
        async with make(executor) as engine:
            for _ in range(5):
                stays = asyncio.create_task(collect(engine.generate("stays", tokens(60))))
                leaving = [
                    asyncio.create_task(collect(engine.generate(f"{number}", tokens(500))))
                    for number in range(200)
                ]
                await asyncio.sleep(0.02)
                for task in leaving:
                    task.cancel()
                await asyncio.wait(leaving)
                assert ids_of(await stays) == executor.expected("stays", 60)
            await is_idle(engine)
            assert not engine._inboxes

    run(main)


def test_dropping_a_stream_unread_aborts(run):
    async def main():
        async with make(ScriptedExecutor(step_time=0.002)) as engine:
            stream = engine.generate("a", tokens(400))
            await anext(stream)
            del stream
            gc.collect()
            await until(lambda: counters(engine)["aborted"] == 1)
            assert not engine._inboxes

    run(main)


# Refusals.


def test_a_full_queue_raises_at_once(run):
    async def main():
        executor = ScriptedExecutor()
        executor.hold()
        async with make(executor, max_queued_requests=2, max_num_seqs=1) as engine:
            running = asyncio.create_task(collect(engine.generate("r", tokens(4))))
            await asyncio.to_thread(executor.wait_held)
            waiting = [
                asyncio.create_task(collect(engine.generate(f"w{number}", tokens(4))))
                for number in range(2)
            ]
            await until(lambda: counters(engine)["queued"] == 2)
            with pytest.raises(QueueFullError, match="2 of 2 requests are waiting") as caught:
                await collect(engine.generate("too many", tokens(4)))
            assert caught.value.code == "queue_full"
            assert len(executor.steps) == 1, "it did not wait for room"
            executor.release()
            for deltas in await asyncio.gather(running, *waiting):
                assert len(ids_of(deltas)) == 4
            await is_idle(engine)

    run(main)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("x" * 64, {}, ContextLengthError),
        ([300], {}, InvalidRequestError),
        ({}, {}, InvalidRequestError),
        ("a", {"temperature": -1.0}, InvalidRequestError),
        ("a", {"stop": [""]}, InvalidRequestError),
        ("a", {"logprobs": 21}, InvalidRequestError),
    ],
)
def test_a_refused_request_leaves_nothing(run, prompt, params, error):
    async def main():
        async with make(max_model_len=64, max_queued_requests=1) as engine:
            for _ in range(3):
                with pytest.raises(error):
                    await collect(engine.generate(prompt, SamplingParams(**params)))
            await is_idle(engine)

    run(main)


def test_a_tokenizer_that_raises_gives_the_place_back(run):
    async def main():
        executor = ScriptedExecutor()

        def refuse(_text):
            raise ValueError("no such text")

        async with make(executor, max_queued_requests=1) as engine:
            encode, executor.tokenizer.encode = executor.tokenizer.encode, refuse
            with pytest.raises(ValueError, match="no such text"):
                await collect(engine.generate("a"))
            executor.tokenizer.encode = encode
            await is_idle(engine)

    run(main)


def test_an_unknown_isolation_is_refused():
    with pytest.raises(ConfigError, match="'fork'; it must be one of process, thread"):
        make(isolation="fork")


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
        await until(lambda: len(executor.steps) > 5)
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
        await asyncio.to_thread(executor.wait_held)
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
            assert go_on.wait(30)
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
