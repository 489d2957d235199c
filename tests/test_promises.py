"""Classes, tenants and deadlines as a caller meets them: who is refused, given up, or first."""

from __future__ import annotations

import asyncio
import time

import pytest

from chairlift import (
    LLM,
    TIME_BOUNDS,
    AsyncEngine,
    ClassConfig,
    Config,
    InvalidRequestError,
    OverloadedError,
    PolicyConfig,
    QueueFullError,
    QueueTimeoutError,
    RateLimitError,
    SamplingParams,
    TenantConfig,
    TryLaterError,
)
from chairlift.config_file import engine_args
from chairlift.engine import LocalEngine
from chairlift.prompts import ParsedPrompt
from chairlift.request_args import RequestArgs
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")


def policy(**options):
    return Config(policy=PolicyConfig(**options))


@pytest.fixture
def held():
    """Make an engine of one row that is busy with a step until ``executor.release()``."""
    started = []

    def go(config, **options):
        executor = ScriptedExecutor()
        engine = LocalEngine(
            engine_args(None, {"executor": executor, "config": config, "max_num_seqs": 1} | options)
        )
        started.append((engine, executor))
        executor.hold()
        submit(engine, "r", 2)
        executor.wait_held()
        assert engine.client.metrics()["running_sequences"] == 1
        return engine, executor

    yield go
    for engine, executor in started:
        executor.release()
        engine.shutdown()


def request(engine, prompt, max_tokens, n=1, **args):
    ids = list(prompt.encode())
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return engine.prepare(ParsedPrompt(None, ids), ids, params, RequestArgs(**args))[0]


def submit(engine, prompt, max_tokens=2, **args):
    return engine.client.submit(request(engine, prompt, max_tokens, **args))


def ends(engine, *names):
    """The finish reasons of these requests in the order of their ends, and all deltas."""
    reasons, deltas, left = {}, [], set(names)
    deadline = time.monotonic() + 120
    while left:
        assert time.monotonic() < deadline
        batch = engine.client.wait(1.0)
        if batch is not None:
            deltas += batch.deltas()
            left -= {end.request_id for end in batch.ended()}
    for delta in deltas:
        if delta.request_id in names and delta.finish_reason is not None:
            reasons[delta.request_id] = delta.finish_reason
    return reasons, deltas


# The door.


@pytest.mark.parametrize(
    ("config", "args", "code"),
    [
        ({}, {}, "queue_full"),
        ({"classes": {"a": {"max_queued_requests": 2}}}, {}, "class_full"),
        ({"classes": {"a": {"max_queued_tokens": 3}}}, {}, "queue_full"),
        ({"tenants": {"acme": {"max_queued": 2}}}, {"tenant": "acme"}, "tenant_full"),
        ({"default_tenant": {"max_queued": 2}}, {"tenant": "other"}, "tenant_full"),
    ],
)
def test_a_door_that_is_full_is_said_whose(held, config, args, code):
    bound = 2 if not config else 100
    engine, executor = held(policy(**config), max_queued_requests=bound)
    taken = [submit(engine, "a", **args)]
    taken.append(submit(engine, "ab", **args))
    with pytest.raises(QueueFullError) as caught:
        submit(engine, "abc", **args)
    assert caught.value.code == code
    assert engine.client.submit_many([request(engine, "abc", 2, **args)]) == []
    executor.release()
    assert ends(engine, *taken)[0] == dict.fromkeys(taken, "length")


def test_answers_are_counted_at_the_door(held):
    options = {"max_num_seqs": 3, "max_queued_requests": 2, "max_num_batched_tokens": 64}
    engine, _ = held(policy(), **options)  # two slots are free
    client = engine.client
    with client.reserve(n=3):
        assert client.metrics()["queued"] == 3
        with pytest.raises(QueueFullError):
            client.reserve(n=2)
        with client.reserve(n=1):
            assert client.metrics()["queued"] == 4
    assert client.metrics()["queued"] == 0


def test_what_can_never_be_is_no_try_later(held):
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    engine, _ = held(policy(tenants={"acme": {"max_running": 1}}), **options)
    with pytest.raises(InvalidRequestError, match="there is no class gold; the classes are defa"):
        submit(engine, "a", request_class="gold")
    with pytest.raises(InvalidRequestError) as caught:
        submit(engine, "a", tenant="acme", n=2)
    assert caught.value.code == "too_many_answers"
    assert not isinstance(caught.value, TryLaterError)


def test_a_used_up_rate_says_when_to_come_back(held):
    engine, _ = held(
        policy(
            classes={"a": {"max_queue_time": 1}},
            tenants={"acme": {"tokens_per_second": 10, "burst_tokens": 10}},
        )
    )
    many = [request(engine, "ten tokens", 30, tenant="acme")] * 20
    assert len(engine.client.submit_many(many)) < 20
    with pytest.raises(RateLimitError) as caught:
        engine.client.submit_many(many)
    assert caught.value.code == "rate_exceeded"
    assert 0 < caught.value.retry_after < 60


# Waiting.


def test_a_queue_time_is_over_in_the_middle_of_a_step(held):
    engine, executor = held(policy(classes={"a": {"max_queue_time": "100ms"}, "b": {}}))
    begin = time.monotonic()
    doomed = submit(engine, "doomed")
    other = submit(engine, "other", request_class="b")
    reasons, deltas = ends(engine, doomed)
    assert 0.09 < time.monotonic() - begin < 120
    assert reasons == {doomed: "queue_timeout"}
    assert [delta.error for delta in deltas] == [
        "the request has waited for as long as its class may wait; retry later"
    ]
    assert len(executor.steps) == 1, "the step is still running"
    assert engine.client.metrics()["expired"] == 1
    executor.release()
    assert ends(engine, other)[0][other] == "length"


def test_a_promise_that_cannot_be_kept_yet_does_not_keep_the_thread_busy(held):
    engine, executor = held(
        policy(classes={"a": {"max_queue_time": "50ms", "on_timeout": "promote"}})
    )
    promoted = submit(engine, "promoted")
    time.sleep(0.1)
    begin, cpu = time.monotonic(), time.process_time()
    time.sleep(0.5)
    # A thread that spins takes all of the time, one that waits next to nothing.
    assert time.process_time() - cpu < 0.8 * (time.monotonic() - begin)
    executor.release()
    assert ends(engine, promoted)[0][promoted] == "length"


def test_a_busy_line_does_not_keep_timers_waiting(held):
    engine, _ = held(policy(classes={"a": {"max_queue_time": "50ms"}}))
    doomed = submit(engine, "doomed")
    deadline = time.monotonic() + 60
    while engine.client.metrics()["expired"] == 0:
        assert time.monotonic() < deadline
    assert ends(engine, doomed)[0] == {doomed: "queue_timeout"}


def test_lower_priority_is_sooner(held):
    engine, executor = held(policy())
    names = {submit(engine, f"{value}", priority=value): value for value in (3, -2, 0, 7, -5)}
    executor.release()
    _, deltas = ends(engine, *names)
    order = [names[d.request_id] for d in deltas if d.finish_reason and d.request_id in names]
    assert order == sorted(names.values())


def test_a_more_important_request_takes_a_place(held):
    engine, executor = held(
        policy(classes={"low": {}, "high": {"level": 1}}), max_queued_requests=1
    )
    low = submit(engine, "low", request_class="low")
    high = submit(engine, "high", request_class="high")
    assert ends(engine, low)[0] == {low: "displaced"}
    assert engine.client.metrics()["displaced"] == 1
    executor.release()
    assert ends(engine, high)[0][high] == "length"


def test_a_reload_changes_what_is_let_in(held):
    engine, _ = held(policy(tenants={"acme": {"max_queued": 1}}))
    submit(engine, "a", tenant="acme")
    with pytest.raises(QueueFullError, match="tenant acme is full"):
        submit(engine, "b", tenant="acme")
    engine.reload(policy(tenants={"acme": {"max_queued": 2}}))
    submit(engine, "b", tenant="acme")
    with pytest.raises(QueueFullError, match="tenant acme is full"):
        submit(engine, "c", tenant="acme")


# What the library makes of it.


def test_llm_goes_on_without_what_was_given_up():
    executor = ScriptedExecutor(step_time=0.01)
    config = policy(classes={"a": {"max_queue_time": "150ms"}})
    with LLM(executor=executor, config=config, max_num_seqs=1) as llm:
        prompts = [f"prompt {number}" for number in range(20)]
        results = llm.generate(prompts, SamplingParams(max_tokens=5), use_tqdm=False)
        late = [result for result in results if result.error is not None]
        assert 0 < len(late) < 20
        for result in results:
            (answer,) = result.outputs
            assert result.finished
            if result.error is None:
                assert answer.token_ids == executor.expected(result.prompt, 5)
                continue
            assert isinstance(result.error, QueueTimeoutError)
            assert result.error.code == answer.finish_reason == "queue_timeout"
            assert answer.token_ids == []
            assert result.stats.first_scheduled_time is None
        assert llm.metrics()["expired"] == len(late)


def test_llm_feeds_past_a_small_queue_whose_requests_expire():
    executor = ScriptedExecutor(step_time=0.01)
    config = policy(classes={"a": {"max_queue_time": "30ms", "max_queued_requests": 3}})
    with LLM(executor=executor, config=config, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=6, n=2)
        results = llm.generate(["x"] * 12, params, use_tqdm=False)
        assert all(result.finished for result in results)
        reasons = {answer.finish_reason for result in results for answer in result.outputs}
        assert reasons == {"length", "queue_timeout"}


def test_llm_tells_a_refusal_beside_the_others():
    executor = ScriptedExecutor()
    config = policy(
        classes={"a": {"max_queue_time": "200ms"}},
        tenants={"acme": {"tokens_per_second": 20, "burst_tokens": 20}},
    )
    with LLM(executor=executor, config=config) as llm:
        prompts = ["ten tokens"] * 9
        params = SamplingParams(max_tokens=10)
        results = llm.generate(prompts, params, tenant="acme", use_tqdm=False)
        assert results[0].error is None
        refused = [result for result in results if isinstance(result.error, RateLimitError)]
        assert refused
        for result in refused:
            assert result.outputs[0].finish_reason == result.error.code == "rate_exceeded"
            assert result.stats is None
            assert result.finished
        assert llm.metrics()["live"] == 0
        (other,) = llm.generate("other", params, use_tqdm=False)
        assert other.error is None


def test_a_deadline_is_from_the_submission():
    executor = ScriptedExecutor(step_time=0.02)
    with LLM(executor=executor, max_num_seqs=1) as llm:
        params = SamplingParams(max_tokens=10)
        results = llm.generate(["a", "b", "c"], params, deadline=0.1, use_tqdm=False)
        assert [result.outputs[0].finish_reason for result in results] == [
            "length",
            "deadline_missed",
            "deadline_missed",
        ]
        assert isinstance(results[1].error, QueueTimeoutError)
        assert results[1].error.code == "deadline_missed"
        (later,) = llm.generate("d", params, deadline=0.1, use_tqdm=False)
        assert later.error is None


def test_a_stream_raises_what_became_of_its_request():
    async def main():
        executor = ScriptedExecutor()
        config = policy(
            classes={"low": {"max_queue_time": "100ms"}, "high": {"level": 1}},
        )
        options = {"config": config, "max_num_seqs": 1, "max_queued_requests": 1}
        async with AsyncEngine(executor=executor, isolation="thread", **options) as engine:
            executor.hold()
            first = asyncio.create_task(collect(engine, "first", "low"))
            await asyncio.to_thread(executor.wait_held)
            with pytest.raises(QueueTimeoutError) as late:
                await collect(engine, "late", "low")
            assert late.value.code == "queue_timeout"
            low = asyncio.create_task(collect(engine, "low", "low"))
            while (await engine.metrics())["queued"] == 0:
                await asyncio.sleep(0.001)
            high = asyncio.create_task(collect(engine, "high", "high"))
            with pytest.raises(OverloadedError) as displaced:
                await low
            assert displaced.value.code == "displaced"
            with pytest.raises(QueueFullError):
                await collect(engine, "more", "high")
            executor.release()
            for task in (first, high):
                assert (await task)[-1].finish_reason == "length"
            metrics = await engine.metrics()
            assert (metrics["expired"], metrics["displaced"], metrics["rejected"]) == (1, 1, 1)

    asyncio.run(asyncio.wait_for(main(), 300))


async def collect(engine, prompt, request_class):
    stream = engine.generate(prompt, SamplingParams(max_tokens=2), request_class=request_class)
    return [delta async for delta in stream]


def test_why_a_request_waits_and_what_became_of_all(held):
    tenants = {"a": TenantConfig(weight=3), "b": TenantConfig()}
    config = Config(
        policy=PolicyConfig(
            sharing="fair",
            tenants=tenants,
            classes={"chat": ClassConfig(), "bulk": ClassConfig(level=-1)},
        )
    )
    engine, executor = held(config)
    first = submit(engine, "one", tenant="a", request_class="chat")
    second = submit(engine, "two", tenant="b", request_class="bulk")
    reason, times = engine.client.waiting(second)
    assert reason == "budget"  # a step is running; nobody has been turned away yet
    assert times.keys() == {"slots", "memory", "budget", "fairness", "rate", "window", "sla"}
    executor.release()
    ended = ends_of(engine, first, second)
    assert engine.client.waiting(second) is None
    waited = ended[second].wait_times
    queue_time = ended[second].first_scheduled_time - ended[second].arrival_time
    assert sum(waited.values()) == pytest.approx(queue_time, abs=1e-5)
    assert waited["slots"] > 0  # there is one row, and it was taken
    groups = engine.client.group_metrics()
    chat, bulk = groups["classes"]["chat"], groups["classes"]["bulk"]
    assert (chat["accepted"], chat["finished"]) == (2, 2)  # with the one that kept it busy
    assert (bulk["accepted"], bulk["finished"], bulk["prompt_tokens"]) == (1, 1, 3)
    assert sum(bulk["queue_time"]["counts"]) == 1
    assert bulk["queue_time"]["sum"] == pytest.approx(queue_time, abs=1e-5)
    assert len(bulk["ttft"]["counts"]) == len(TIME_BOUNDS) + 1
    tenant = groups["tenants"]["a"]
    assert (tenant["weight"], tenant["running"], tenant["queued"]) == (3.0, 0, 0)
    # Three prompt tokens at 1, two output tokens at 2.
    assert tenant["served"] == pytest.approx(7.0)


def ends_of(engine, *ids):
    """What the core says at the end of each of these requests."""
    ended = {}
    deadline = time.monotonic() + 120
    while not ended.keys() >= set(ids):
        assert time.monotonic() < deadline
        batch = engine.client.wait(1.0)
        for end in batch.ended() if batch is not None else ():
            ended[end.request_id] = end
    return ended
