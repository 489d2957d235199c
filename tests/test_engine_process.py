"""The engine in a process of its own: same streams, and what happens when a process dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift import (
    AsyncEngine,
    Config,
    ContextLengthError,
    EngineDeadError,
    PolicyConfig,
    QueueFullError,
    SamplingParams,
)
from chairlift.errors import ConfigError
from chairlift.hub import resolve_model
from chairlift.testing import ByteTokenizer, ScriptedExecutor
from chairlift.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("steps_in_flight")


class Slow(ScriptedExecutor):
    """5 ms a step."""

    def __init__(self, **options):
        super().__init__(step_time=0.005, **options)


class Stuck(ScriptedExecutor):
    """Its fifth step never returns."""

    def execute(self, plan):
        if plan.step == 5:
            time.sleep(3_600)
        return super().execute(plan)


class Failing(ScriptedExecutor):
    """Cannot be made."""

    def __init__(self, **options):
        raise RuntimeError("no such device")


def go(main):
    async def limited():
        async with asyncio.timeout(300):
            await main()

    asyncio.run(limited())


def make(executor="chairlift.testing:ScriptedExecutor", **options):
    return AsyncEngine(executor=executor, **options)


async def collect(stream):
    return [delta async for delta in stream]


def ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def tokens(count, **options):
    return SamplingParams(max_tokens=count, **options)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_streams_are_those_of_an_engine_in_this_process():
    async def main():
        expected = ScriptedExecutor()
        async with make() as engine:
            assert engine._engine.pid != os.getpid()
            prompts = [f"prompt {number}" for number in range(40)]
            streams = [
                engine.generate(prompt, tokens(12, n=2, logprobs=1, stop="zzz"))
                for prompt in prompts
            ]
            results = await asyncio.gather(*map(collect, streams))
            for prompt, stream, deltas in zip(prompts, streams, results, strict=True):
                for child in range(2):
                    own = [delta for delta in deltas if delta.index == child]
                    assert ids_of(own) == expected.expected(prompt, 12, child=child)
                    assert own[-1].finish_reason == "length"
                    assert sum(len(delta.logprobs) for delta in own) == 12
                assert stream.stats.num_output_tokens == 24
                assert stream.request_class == "default"
                assert stream.prompt_token_ids == list(prompt.encode())
            metrics = await engine.metrics()
            assert (metrics["finished"], metrics["used_blocks"]) == (40, 0)
            assert (await engine.group_metrics())["classes"]["default"]["finished"] == 40

    go(main)


def test_questions_and_refusals_cross_the_border():
    async def main():
        policy = PolicyConfig(classes={"low": {}, "high": {"level": 1}}, sharing="fair")
        options = {"max_num_seqs": 1, "max_queued_requests": 1, "max_model_len": 2_000}
        async with make(f"{__name__}:Slow", config=Config(policy=policy), **options) as engine:
            first = engine.generate("first", tokens(1_000), request_class="high")
            await first.start()
            assert first.request_class == "high"
            assert first.queue_time is not None
            waiting = engine.generate("waiting", tokens(1))
            task = asyncio.create_task(waiting.start())
            while (await engine.metrics())["queued"] == 0:
                await asyncio.sleep(0.005)
            with pytest.raises(QueueFullError) as full:
                await engine.generate("more", tokens(1)).start()
            assert full.value.code == "queue_full"
            tenants = {"acme": {"weight": 2.0, "default_class": "high"}}
            await engine.reload(
                Config(
                    policy=PolicyConfig(
                        classes={"low": {}, "high": {"level": 1}}, sharing="fair", tenants=tenants
                    )
                )
            )
            with pytest.raises(ConfigError, match="classes"):
                await engine.reload(Config(policy=PolicyConfig(classes={"other": {}})))
            await first.aclose()
            await task
            assert (await collect(waiting))[-1].finish_reason == "length"
            with pytest.raises(ContextLengthError, match="2000"):
                await engine.generate([1] * 2_000, tokens(1)).start()
            stream = engine.generate("a", tokens(1), tenant="acme")
            await collect(stream)
            assert stream.request_class == "high"

    go(main)


def test_every_request_gets_an_error_when_the_process_is_killed():
    async def main():
        async with make(f"{__name__}:Slow", max_num_seqs=4) as engine:
            streams = [engine.generate(f"{number}", tokens(5_000)) for number in range(8)]
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            while (await engine.metrics())["live"] < 8:
                await asyncio.sleep(0.005)
            os.kill(engine._engine.pid, signal.SIGKILL)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
            await until(lambda: engine.end_reason is not None)
            assert "SIGKILL" in engine.end_reason
            with pytest.raises(EngineDeadError):
                await engine.metrics()
            with pytest.raises(EngineDeadError):
                await collect(engine.generate("more"))
        async with make() as engine:
            assert ids_of(await collect(engine.generate("again", tokens(3))))

    go(main)


def test_signals_to_the_group_are_left_to_the_client():
    async def main():
        async with make(f"{__name__}:Slow") as engine:
            stream = engine.generate("a", tokens(30))
            await stream.start()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(engine._engine.pid, number)
            assert len(ids_of(await collect(stream))) == 30

    go(main)


def test_a_step_that_never_returns_ends_the_engine():
    """C21."""

    async def main():
        engine = make(f"{__name__}:Stuck", step_timeout=1)
        told = []

        async def listen():
            async for delta in engine.generate("a", tokens(100)):
                told.extend(delta.token_ids)

        with pytest.raises(EngineDeadError, match=r"not returned from step 5 for 1 s"):
            await listen()
        assert len(told) == 4
        with pytest.raises(EngineDeadError, match="step 5"):
            await collect(engine.generate("b"))
        assert (await engine.metrics())["live"] == 0, "it still answers"
        pid = engine._engine.pid
        await engine.shutdown()
        assert has_ended(pid)

    go(main)


def test_shutdown_ends_streams_and_the_process():
    async def main():
        engine = make(f"{__name__}:Slow")
        stream = engine.generate("a", tokens(5_000))
        await stream.start()
        task = asyncio.create_task(collect(stream))
        pid = engine._engine.pid
        await engine.shutdown()
        assert (await task)[-1].finish_reason == "abort"
        assert has_ended(pid)
        await engine.shutdown()

    go(main)


def test_a_dropped_engine_ends_its_process():
    engine = make()
    pid = engine._engine.pid
    del engine
    assert has_ended(pid)


CLIENT = """
import asyncio, sys
from chairlift import AsyncEngine, SamplingParams

async def main():
    engine = AsyncEngine(executor="test_engine_process:Slow")
    stream = engine.generate("a", SamplingParams(max_tokens=100_000), request_id="a")
    await stream.start()
    print(engine._engine.pid, flush=True)
    async for _ in stream:
        pass

asyncio.run(main())
"""


def started(program):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
    )


def wait_for_the_end(pid):
    deadline = time.monotonic() + 120
    while not has_ended(pid):
        assert time.monotonic() < deadline, "the engine outlives its client"
        time.sleep(0.02)


def test_the_engine_ends_with_a_client_that_is_killed():
    with started(CLIENT) as client:
        pid = int(client.stdout.readline())
        assert not has_ended(pid)
        client.kill()
        client.wait()
        wait_for_the_end(pid)


class Loading(ScriptedExecutor):
    """Is never there."""

    def __init__(self, **options):
        print(os.getpid(), flush=True)
        time.sleep(3_600)


def test_an_engine_that_still_loads_ends_with_its_client():
    start = 'from chairlift import AsyncEngine; AsyncEngine(executor="test_engine_process:Loading")'
    with started(start) as client:
        pid = int(client.stdout.readline())
        client.kill()
        client.wait()
        wait_for_the_end(pid)


def test_what_cannot_be_made_there_is_told_here():
    with pytest.raises(RuntimeError, match="no such device"):
        make(f"{__name__}:Failing")
    with pytest.raises(ConfigError, match="nowhere:Nothing"):
        make("nowhere:Nothing")
    executor = ScriptedExecutor(default=lambda sample: 97)
    with pytest.raises(ConfigError, match=r"executor cannot go to the engine's process.*module:Cl"):
        make(executor)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make(max_num_seqs=0)


class Loud(ByteTokenizer):
    """Shouts."""

    def encode(self, text, add_special_tokens=True):
        return super().encode(text.upper(), add_special_tokens)


def test_a_tokenizer_object_goes_over():
    async def main():
        async with make(tokenizer=Loud()) as engine:
            stream = engine.generate("a", tokens(1))
            await collect(stream)
            assert stream.prompt_token_ids == [ord("A")]

    go(main)


def test_a_tokenizer_is_the_same_after_a_pickle():
    tokenizer = Tokenizer.from_directory(resolve_model("smollm2-135m"))
    again = pickle.loads(pickle.dumps(tokenizer))
    text = "Où est <|im_end|> l'été?"
    assert again.encode(text) == tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert again.eos_token_ids == tokenizer.eos_token_ids
