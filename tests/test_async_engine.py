"""``AsyncEngine`` above a scripted model: streams, aborts in every state, wake-ups, refusals."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import aclosing
from itertools import pairwise

import pytest

from async_streams import (
    collect,
    collect_step_by_step,
    counters,
    ids_of,
    is_idle,
    make,
    stands_still,
    text_of,
    tokens,
    until,
)
from chairlift import (
    Config,
    ContextLengthError,
    InvalidRequestError,
    PolicyConfig,
    QueueFullError,
    SamplingParams,
)
from chairlift.errors import ConfigError
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")


def test_one_stream(run):
    async def main():
        executor = ScriptedExecutor(scripts={"hi": "I say grüße 👋"}, hold_at_steps=range(2, 8))
        async with make(executor) as engine:
            stream = engine.generate("hi", tokens(60), request_id="mine")
            deltas = await collect_step_by_step(stream, executor, 6)
        assert text_of(deltas) == "I say grüße 👋"
        assert [delta.text for delta in deltas[:6]] == list("I say ")
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
        executor = ScriptedExecutor(hold_at_steps=range(1, 31))
        async with make(executor) as engine:
            read, wake_ups = [], []

            async def keep(stream):
                async for delta in stream:
                    read.extend(delta.token_ids)

            streams = [engine.generate(f"{number}", tokens(30)) for number in range(50)]
            reading = [asyncio.create_task(keep(stream)) for stream in streams]
            await until(lambda: counters(engine)["live"] == 50)
            for _ in executor.hold_at_steps:
                await stands_still(executor)
                *done, _running = executor.steps
                told = sum(step.num_samples for step in done)
                await until(lambda told=told: len(read) == told)
                wake_ups.append(engine._client.wake_ups)
                executor.release()
            await asyncio.gather(*reading)
        assert len(read) == 1_500
        # By the fourth step all run, also where it was planned ahead, and nobody has ended yet.
        assert executor.steps[3].num_decodes == executor.steps[29].num_decodes == 50
        assert [after - before for before, after in pairwise(wake_ups[3:])] == [1] * 26

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
        executor = ScriptedExecutor(hold_at_steps=range(2, 30))
        async with make(executor) as engine:
            slow = engine.generate("slow", tokens(100))
            first = await anext(slow)
            stream = engine.generate("quick", tokens(120))
            begun = asyncio.create_task(stream.start())
            await until(lambda: counters(engine)["live"] == 2)
            num_held = len(executor.hold_at_steps)
            has_both = False
            while not has_both:  # those that were planned without it, and its first
                await stands_still(executor)
                has_both = executor.steps[-1].num_samples == 2
                executor.release()
                num_held -= 1
            await begun
            quick = await collect_step_by_step(stream, executor, num_held)
            assert [len(delta.token_ids) for delta in quick[:num_held]] == [1] * num_held
            rest = await collect(slow)
            assert len(rest) == 1
            assert ids_of([first, *rest]) == executor.expected("slow", 100)

    run(main)


# C22: aborts in every state.


def test_leaving_the_loop_aborts(run, steps_in_flight):
    async def main():
        executor = ScriptedExecutor(hold_at_steps=[2])
        async with make(executor) as engine:
            async for delta in engine.generate("a", tokens(400)):
                assert delta.text
                await stands_still(executor)
                break
            await until(lambda: counters(engine)["aborted"] == 1)
            executor.release()
            await until(lambda: counters(engine)["used_blocks"] == 0)
            assert len(executor.steps) <= 1 + steps_in_flight, "planned after the abort"
            await is_idle(engine)

    run(main)


def test_closing_aborts(run):
    async def main():
        executor = ScriptedExecutor(hold_at_steps=[2])
        async with make(executor) as engine:
            stream = engine.generate("a", tokens(400))
            async with aclosing(stream):
                await anext(stream)
                await stands_still(executor)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await until(lambda: counters(engine)["aborted"] == 1)
            executor.release()
            never_begun = engine.generate("a", tokens(4))
            await never_begun.aclose()
            assert await collect(never_begun) == []
            assert counters(engine)["submitted"] == 1
            await is_idle(engine)

    run(main)


def test_cancelling_the_task_aborts(run):
    async def main():
        executor = ScriptedExecutor(hold_at_steps=[5])
        async with make(executor) as engine:
            task = asyncio.create_task(collect(engine.generate("a", tokens(400))))
            await stands_still(executor)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: counters(engine)["aborted"] == 1)
            executor.release()
            await is_idle(engine)

    run(main)


def test_cancelling_while_queued_prefilling_and_in_flight(run, steps_in_flight):
    async def main():
        executor = ScriptedExecutor()
        async with make(executor, max_num_seqs=1, long_prefill_token_threshold=16) as engine:
            executor.hold()
            prefilling = asyncio.create_task(collect(engine.generate("p" * 100, tokens(50))))
            await stands_still(executor)
            queued = asyncio.create_task(collect(engine.generate("queued", tokens(50))))
            # Not only at the door, where it would be given back without a trace.
            await until(lambda: counters(engine)["live"] == 2)
            queued.cancel()
            await asyncio.wait([queued])
            await until(lambda: counters(engine)["queued"] == 0)
            prefilling.cancel()
            await asyncio.wait([prefilling])
            await until(lambda: counters(engine)["aborted"] == 2)
            # Its steps are in flight: the memory stays until they have come back.
            assert counters(engine)["used_blocks"] > 0
            executor.release()
            await is_idle(engine)
            prefills = [step for step in executor.steps if step.num_tokens == 16]
            assert len(prefills) == steps_in_flight

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
        executor = ScriptedExecutor(hold_at_steps=[2])
        async with make(executor) as engine:
            stream = engine.generate("a", tokens(400))
            await anext(stream)
            await stands_still(executor)
            del stream
            gc.collect()
            await until(lambda: counters(engine)["aborted"] == 1)
            assert not engine._inboxes
            executor.release()

    run(main)


# Refusals.


def test_a_full_queue_raises_at_once(run):
    async def main():
        executor = ScriptedExecutor()
        executor.hold()
        async with make(executor, max_queued_requests=2, max_num_seqs=1) as engine:
            running = asyncio.create_task(collect(engine.generate("r", tokens(4))))
            await stands_still(executor)
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
