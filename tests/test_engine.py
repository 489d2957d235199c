"""The threads and the boundary below ``LLM`` and ``AsyncEngine``."""

from __future__ import annotations

import dataclasses
import re
import select
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from chairlift import EngineDeadError, QueueFullError, SamplingParams, _core
from chairlift.engine import LocalEngine
from chairlift.engine_args import CoreSettings, EngineArgs, EngineOptions
from chairlift.errors import (
    InvalidRequestError,
    OverloadedError,
    QueueTimeoutError,
    RequestFailedError,
    TryLaterError,
)
from chairlift.executor import RaggedLogprobs, StepResult
from chairlift.outputs import failure
from chairlift.prompts import ParsedPrompt
from chairlift.request_args import RequestArgs
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("steps_in_flight")


@pytest.fixture
def start():
    """Start engines that are shut down after the test, with their executors let go."""
    started = []

    def go(executor=None, **options):
        executor = executor or ScriptedExecutor()
        engine = LocalEngine(EngineArgs(executor=executor, **options))
        started.append((engine, executor))
        return engine

    yield go
    for engine, executor in started:
        if isinstance(executor, ScriptedExecutor):
            executor.release()
        engine.shutdown()


def request(engine, prompt, max_tokens=5, **options):
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    params = SamplingParams(max_tokens=max_tokens, **options)
    return engine.prepare(ParsedPrompt(token_ids=ids), ids, params)[0]


def submit(engine, prompt, max_tokens=5, **options):
    return engine.client.submit(request(engine, prompt, max_tokens, **options))


def until_ended(engine, *request_ids, before=()):
    """Take batches until these requests have ended; returns all, those of ``before`` too."""
    batches, left = list(before), set(request_ids)
    left -= {ended.request_id for batch in batches for ended in batch.ended()}
    deadline = time.monotonic() + 120
    while left:
        assert time.monotonic() < deadline
        batch = engine.client.wait(1.0)
        if batch is not None:
            batches.append(batch)
            left -= {ended.request_id for ended in batch.ended()}
    return batches


def deltas_of(batches, request_id):
    return [d for batch in batches for d in batch.deltas() if d.request_id == request_id]


def test_options_and_arguments_agree():
    assert set(EngineOptions.__annotations__) | {"model"} == set(EngineArgs.__slots__)
    # What the core reads, it finds: the model says how many tokens there are, the cache what
    # iterations cost, and blocks on the host come of bytes.
    derived = {"vocab_size", "policy", "cost_model", "num_host_kv_blocks"}
    assert set(CoreSettings.__slots__) - derived <= set(EngineArgs.__slots__)


def test_flat_arrays_and_objects_say_the_same(start):
    executor = ScriptedExecutor(scripts={"é": "é→x"}, hold_at_steps=range(2, 6))
    engine = start(executor)
    ids = [submit(engine, "é"), submit(engine, "other", n=2), submit(engine, "third", 3)]
    batches = []
    for _ in executor.hold_at_steps:
        executor.wait_held()
        batches.append(engine.client.wait(60.0))
        executor.release()
    batches = until_ended(engine, *ids, before=batches)
    assert len(batches) >= 4
    for batch in batches:
        deltas = batch.deltas()
        assert len(batch) == len(deltas)
        assert batch.request_ids.tolist() == [delta.request_id for delta in deltas]
        assert batch.indices.tolist() == [delta.index for delta in deltas]
        for delta, (begin, end), (first, last), code in zip(
            deltas, batch.token_ranges, batch.text_ranges, batch.finish_codes, strict=True
        ):
            assert batch.token_ids[begin:end].tolist() == delta.token_ids
            assert batch.text[first:last].decode() == delta.text
            assert (code != 0) == (delta.finish_reason is not None)
    assert batches[0].token_ids.dtype == np.uint32
    assert {name for batch in batches for name, _, _ in batch.scheduled()} == set(ids)
    assert sum(batch.iterations for batch in batches) >= 5
    made = engine.client.metrics()["iterations"]
    assert made - 1 <= sum(batch.iterations for batch in batches) <= made
    codes = [code for batch in batches for code in batch.finish_codes if code]
    assert sorted(codes) == [4, 4, 4, 4]


def test_undrained_iterations_merge(start):
    executor = ScriptedExecutor()
    engine = start(executor)
    ids = [submit(engine, "a", 50), submit(engine, "b", 60)]
    while engine.client.metrics()["finished"] < 2:
        time.sleep(0.005)
    batch = engine.client.drain()
    assert batch.iterations >= 60
    for request_id, prompt, count in zip(ids, "ab", (50, 60), strict=True):
        own = deltas_of([batch], request_id)
        assert [token for delta in own for token in delta.token_ids] == executor.expected(
            prompt, count
        )
        assert (
            "".join(delta.text for delta in own) == bytes(executor.expected(prompt, count)).decode()
        )
    assert engine.client.drain() is None


def test_a_batch_outlives_those_after_it(start):
    executor = ScriptedExecutor(step_time=0.002)
    engine = start(executor)
    request_id = submit(engine, "keep", 20)
    batches = until_ended(engine, request_id)
    tokens = [token for delta in deltas_of(batches, request_id) for token in delta.token_ids]
    assert tokens == executor.expected("keep", 20)


def test_waiting_for_an_end_skips_iterations(start):
    engine = start(ScriptedExecutor(step_time=0.002))
    request_id = submit(engine, "a", 30)
    batch = engine.client.wait(until_end=True)
    assert [ended.request_id for ended in batch.ended()] == [request_id]
    assert batch.iterations >= 30


def test_waiting_ends_in_time(start):
    engine = start()
    begin = time.monotonic()
    assert engine.client.wait(0.25) is None
    assert 0.2 < time.monotonic() - begin < 120
    assert engine.client.wait(0.0) is None


def test_the_descriptor_is_readable_while_there_is_news(start):
    engine = start()
    client = engine.client

    def readable(timeout):
        return bool(select.select([client.fileno()], [], [], timeout)[0])

    assert not readable(0)
    submit(engine, "a")
    assert readable(5)
    while client.metrics()["finished"] < 1:
        time.sleep(0.002)
    assert client.drain() is not None
    assert not readable(0)
    assert client.drain() is None
    engine.shutdown()
    assert readable(5)
    assert "shut down" in client.end_reason


def test_commands_are_served_while_a_step_runs(start):
    executor = ScriptedExecutor()
    engine = start(executor, max_queued_requests=2, max_num_seqs=1)
    client = engine.client
    executor.hold()
    running = submit(engine, "running", 3)
    executor.wait_held()
    time.sleep(0.01)
    assert client.metrics()["in_flight_us"] >= 10_000
    waiting = submit(engine, "waiting", 3)
    assert client.metrics()["queued"] == 1
    place = client.reserve()
    with pytest.raises(QueueFullError):
        client.reserve()
    place.release()
    place.release()
    doomed = submit(engine, "doomed", 3)
    client.abort(doomed)
    batches = until_ended(engine, doomed)
    assert {batch.iterations for batch in batches} == {0}, "a command is no iteration"
    (delta,) = deltas_of(batches, doomed)
    assert delta.finish_reason == "abort"
    client.abort(running)
    (delta,) = deltas_of(until_ended(engine, running), running)
    assert delta.finish_reason == "abort"
    assert len(executor.steps) == 1
    executor.release()
    batches = until_ended(engine, waiting)
    assert not deltas_of(batches, running)
    assert client.metrics()["used_blocks"] == 0


def test_reservations_are_given_back(start):
    engine = start(max_queued_requests=1)
    client = engine.client
    for _ in range(3):
        place = client.reserve()
        assert client.metrics()["queued"] == 1
        del place
        with client.reserve():
            pass
        with pytest.raises(KeyError), client.reserve():
            raise KeyError
    place = client.reserve()
    with pytest.raises(InvalidRequestError):
        client.submit(request(engine, []), place)
    assert client.metrics()["queued"] == 0
    with pytest.raises(RuntimeError, match="used or released"):
        client.submit(request(engine, "a"), place)
    place = client.reserve()
    assert client.submit(request(engine, "a"), place) == place.request_id
    until_ended(engine, place.request_id)


def test_a_reservation_is_for_the_request_it_was_made_for(start):
    engine = start()
    client, args = engine.client, RequestArgs(tenant="acme", request_class="default", user="u")
    own = engine.prepare(ParsedPrompt(token_ids=[1]), [1], SamplingParams(n=2, max_tokens=1), args)[
        0
    ]
    for wrong in (
        client.reserve(n=2),
        client.reserve(args),
        client.reserve(RequestArgs(tenant="acme", request_class="default"), n=2),
    ):
        with pytest.raises(RuntimeError, match="another tenant, class, user or number of answers"):
            client.submit(own, wrong)
        wrong.release()
    place = client.reserve(args, n=2)
    assert client.submit(own, place) == place.request_id
    until_ended(engine, place.request_id)
    assert client.metrics()["queued"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tenant", ""),
        ("tenant", None),
        ("tenant", "x" * 129),
        ("tenant", "\ud800"),
        ("request_class", 3),
        ("user", b"u"),
        ("priority", 1.0),
        ("priority", True),
        ("priority", 2**31),
        ("deadline", -1),
        ("deadline", float("nan")),
        ("deadline", "1s"),
    ],
)
def test_who_asks_is_checked(name, value):
    with pytest.raises(InvalidRequestError, match=rf"^{name} is .*; it must be ") as caught:
        RequestArgs(**{name: value})
    assert caught.value.code == "invalid_parameter"


@pytest.mark.parametrize(
    ("reason", "kind", "code"),
    [
        ("queue_timeout", QueueTimeoutError, "queue_timeout"),
        ("deadline_missed", QueueTimeoutError, "deadline_missed"),
        ("shed", OverloadedError, "shed"),
        ("displaced", OverloadedError, "displaced"),
        ("error", RequestFailedError, "request_failed"),
    ],
)
def test_each_way_to_be_given_up_is_an_error_of_its_kind(reason, kind, code):
    error = failure(SimpleNamespace(error="why", finish_reason=reason, engine_died=False))
    assert type(error) is kind
    assert (error.code, str(error)) == (code, "why")
    assert isinstance(error, TryLaterError) == (reason != "error")
    assert getattr(error, "retry_after", None) is None


def test_the_counters_of_what_did_not_run_are_told(start):
    engine = start(max_queued_requests=1, max_num_seqs=1)
    with engine.client.reserve(), engine.client.reserve(), pytest.raises(QueueFullError):
        engine.client.reserve()
    metrics = engine.client.metrics()
    names = ("submitted", "rejected", "expired", "shed", "displaced")
    assert [metrics[name] for name in names] == [1, 1, 0, 0, 0]


def test_submit_many_takes_what_fits(start):
    executor = ScriptedExecutor()
    engine = start(executor, max_queued_requests=3, max_num_seqs=1)
    executor.hold()
    first = submit(engine, "first", 2)
    executor.wait_held()
    ids = engine.client.submit_many([request(engine, f"{n}", 2) for n in range(5)])
    assert len(ids) == 3
    assert engine.client.submit_many([request(engine, "x")]) == []
    with pytest.raises(QueueFullError, match="3 of 3"):
        submit(engine, "y")
    executor.release()
    until_ended(engine, first, *ids)
    with pytest.raises(InvalidRequestError):
        engine.client.submit_many([request(engine, [])])


def test_abort_in_every_state_is_idempotent(start):
    executor = ScriptedExecutor(hold_at_steps=[3])
    engine = start(executor)
    engine.client.abort(10**9)
    request_id = submit(engine, "a", 200)
    executor.wait_held()
    for _ in range(3):
        engine.client.abort(request_id)
    batches = until_ended(engine, request_id)
    executor.release()
    engine.client.abort(request_id)
    last = deltas_of(batches, request_id)[-1]
    assert last.finish_reason == "abort"
    assert engine.client.wait(0.1) is None
    assert engine.client.metrics()["aborted"] == 1


def test_nothing_spins_when_idle(start):
    engine = start()
    until_ended(engine, submit(engine, "a"))
    time.sleep(0.1)
    steps = engine.client.metrics()["iterations"]
    begin, cpu = time.monotonic(), time.process_time()
    time.sleep(1.0)
    # A thread that spins takes all of the time, one that waits next to nothing.
    assert time.process_time() - cpu < 0.8 * (time.monotonic() - begin)
    assert engine.client.metrics()["iterations"] == steps


def test_times_are_in_order(start):
    executor = ScriptedExecutor(step_time=0.01)
    engine = start(executor)
    before = engine.core.now()
    request_id = submit(engine, "a", 4)
    (ended,) = [end for batch in until_ended(engine, request_id) for end in batch.ended()]
    times = [
        before,
        ended.arrival_time,
        ended.first_scheduled_time,
        ended.first_token_time,
        ended.finished_time,
        engine.core.now(),
    ]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert ended.first_token_time - ended.arrival_time >= 0.01
    assert ended.finished_time - ended.first_token_time >= 0.03
    metrics = engine.client.metrics()
    assert metrics["steps"] == metrics["iterations"] == 4
    assert metrics["step_us"] >= 40_000
    assert metrics["in_flight_us"] == 0


class Answering(ScriptedExecutor):
    """Lets a test spoil the result of the second step."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def execute(self, plan):
        result = super().execute(plan)
        return self.spoil(result) if plan.step == 2 else result


def replaced(**changes):
    def spoil(result):
        fields = {
            "token_ids": result.token_ids,
            "statuses": result.statuses,
            "logprobs": result.logprobs,
        }
        return StepResult(**(fields | changes))

    return spoil


def logprobs(offsets, ids, values):
    return RaggedLogprobs(
        np.array(offsets, dtype=np.int32),
        np.array(ids, dtype=np.int32),
        np.array(values, dtype=np.float32),
    )


def two_tokens(offsets):
    return {
        "token_ids": np.array([97, 98], dtype=np.int32),
        "token_offsets": np.array(offsets, dtype=np.int32),
    }


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            replaced(token_ids=np.array([97], dtype=np.int64)),
            "StepResult.token_ids must be a contiguous one-dimensional int32 array; it is "
            "1 dimension(s) of format 'l', contiguous",
        ),
        (replaced(token_ids=[97]), "StepResult.token_ids must be .*; it is a list"),
        (replaced(token_ids=np.zeros((1, 1), dtype=np.int32)), "it is 2 dimension"),
        (replaced(token_ids=np.zeros(2, dtype=np.int32)), "token_ids has 2 entries, .* needs 1"),
        (
            replaced(token_ids=np.array([258], dtype=np.int32)),
            "StepResult.token_ids has token 258, which is outside the vocabulary of 258",
        ),
        (replaced(token_ids=np.array([-1], dtype=np.int32)), "has token -1"),
        (replaced(token_ids=None), "it is a NoneType"),
        (replaced(statuses=np.zeros(3, dtype=np.uint8)), "statuses has 3 entries"),
        (replaced(statuses=np.zeros(1, dtype=np.int8)), "statuses must be .* uint8"),
        (replaced(logprobs=logprobs([0], [], [])), "logprobs.offsets has 1 entries, .* needs 2"),
        (replaced(logprobs=logprobs([0, 2], [1], [0.0])), "must rise from 0 to the 1 entries"),
        (replaced(logprobs=logprobs([0, 1], [1], [])), "logprobs.values has 0 entries"),
        (replaced(logprobs=logprobs([0, 1], [999], [0.0])), "logprobs.token_ids has token 999"),
        (
            replaced(logprobs=logprobs([0, 1], [9], [0.0]), **two_tokens([0, 2])),
            "logprobs has 1 entries, but the step needs 2",
        ),
        (
            replaced(prompt_logprobs=logprobs([0, 1], [9], [0.0])),
            "prompt_logprobs.offsets has 2 entries, .* needs 1",
        ),
        (replaced(**two_tokens([0, 1])), "token_offsets must rise, by 1 or more, from 0 to the 2"),
        (replaced(**two_tokens([1, 2])), "they begin with 1 and end with 2"),
        (replaced(**two_tokens([0, 1, 2])), "token_offsets has 3 entries, .* needs 2"),
        (replaced(graph_rows=-1), "graph_rows is -1; it must be 0, or an integer not below the 1"),
        (replaced(graph_rows=0.5), "graph_rows is 0.5; it must be 0"),
        (lambda _: "?", "AttributeError: 'str' object has no attribute 'statuses'"),
    ],
)
def test_a_wrong_result_is_named_and_fails_the_step(start, spoil, message):
    engine = start(Answering(spoil))
    request_id = submit(engine, "a", 5)
    last = deltas_of(until_ended(engine, request_id), request_id)[-1]
    assert last.finish_reason == "error"
    assert re.search(message.replace("(s)", r"\(s\)"), last.error)
    until_ended(engine, submit(engine, "b", 5))
    assert engine.client.metrics()["failed"] == 1


@pytest.mark.parametrize("name", ["query_start_loc", "logits_indices"])
def test_a_plan_that_was_written_to_fails_the_step(start, name):
    class Writing(Answering):
        def execute(self, plan):
            result = super().execute(plan)
            if plan.step == 2:
                getattr(plan, name)[:] = 10**6 if name == "query_start_loc" else -1
            return result

    engine = start(Writing(replaced(token_ids=np.array([-5], dtype=np.int32))))
    request_id = submit(engine, "a", 5)
    last = deltas_of(until_ended(engine, request_id), request_id)[-1]
    assert "sample 0 belongs to none of the plan's 1 sequences any more" in last.error
    until_ended(engine, submit(engine, "b", 5))
    assert engine.client.metrics()["failed"] == 1


def test_no_openmp_function_is_no_pool():
    pool = _core.kernel_pool()
    assert not _core.use_openmp(0)
    assert _core.kernel_pool() == pool


def test_a_failed_rows_token_is_not_looked_at(start):
    garbage = replaced(
        token_ids=np.array([-5], dtype=np.int32), statuses=np.ones(1, dtype=np.uint8)
    )
    engine = start(Answering(garbage))
    request_id = submit(engine, "a", 5)
    last = deltas_of(until_ended(engine, request_id), request_id)[-1]
    assert "failed on this request" in last.error
    assert engine.client.metrics()["failed_steps"] == 0


def test_prompt_log_probabilities_that_do_not_come_fail_the_step(start):
    class Forgetful(ScriptedExecutor):
        def execute(self, plan):
            return dataclasses.replace(super().execute(plan), prompt_logprobs=None)

    engine = start(Forgetful())
    request_id = submit(engine, "abc", 5, prompt_logprobs=1)
    last = deltas_of(until_ended(engine, request_id), request_id)[-1]
    assert "prompt_logprobs is None, but the step scores 2 prompt tokens" in last.error
    until_ended(engine, submit(engine, "abc", 5))
    assert engine.client.metrics()["failed"] == 1


def test_failing_every_step_never_ends_the_engine(start, caplog):
    executor = ScriptedExecutor(raise_at_steps=range(1, 21))
    engine = start(executor)
    for _ in range(20):
        until_ended(engine, submit(engine, "a", 2))
    request_id = submit(engine, "a", 2)
    assert deltas_of(until_ended(engine, request_id), request_id)[-1].finish_reason == "length"
    assert len(caplog.records) == 20


def test_a_message_of_each_step_is_its_own(start):
    class Counting(ScriptedExecutor):
        def execute(self, plan):
            raise ValueError(f"number {plan.step}")

    engine = start(Counting())
    ids = []
    for _ in range(3):
        ids.append(submit(engine, "a", 2))
        while engine.client.metrics()["failed"] < len(ids):
            time.sleep(0.002)
    batch = engine.client.drain()
    errors = {delta.request_id: delta.error for delta in batch.deltas()}
    told = [re.search(r"step (\d+): ValueError: number \1$", errors[each]) for each in ids]
    assert all(told)
    assert len({match[1] for match in told}) == 3


def test_plans_are_views_that_hold_until_the_result(start):
    seen = []

    class Looking(ScriptedExecutor):
        def execute(self, plan):
            result = super().execute(plan)
            check = {name: np.array(getattr(plan, name)) for name in ("rows", "token_ids")}
            time.sleep(0.005)
            assert all((getattr(plan, name) == kept).all() for name, kept in check.items())
            seen.append((plan.block_ids.ctypes.data, plan.block_ids.base is not None))
            return result

    engine = start(Looking())
    until_ended(engine, submit(engine, "a", 9))
    # Two sets in a ring, none of them copied.
    assert len({address for address, _ in seen}) == 2
    assert all(is_view for _, is_view in seen)


def test_one_executor_thread_only(start):
    engine = start()
    until_ended(engine, submit(engine, "a"))
    with pytest.raises(RuntimeError, match="executor thread already"):
        engine.core.run_executor(ScriptedExecutor())


def test_an_executor_thread_that_comes_after_the_shutdown_has_nothing_to_do(start):
    engine = start()
    engine.shutdown()
    engine.core.run_executor(ScriptedExecutor())


def test_shutdown_from_many_threads(start):
    engine = start(ScriptedExecutor(step_time=0.005))
    submit(engine, "a", 400)
    threads = [threading.Thread(target=engine.shutdown) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    batch = engine.client.drain()
    assert [delta.finish_reason for delta in batch.deltas()][-1] == "abort"
    with pytest.raises(EngineDeadError):
        engine.client.wait()
    with pytest.raises(EngineDeadError):
        submit(engine, "b")
    with pytest.raises(EngineDeadError):
        engine.client.reserve()
    engine.client.abort(1)
