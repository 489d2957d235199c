"""What a request says about its order, and promises that cannot be kept, as HTTP tells them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from running_server import http_post
from test_gate_http import answers, auth, burst, keyed, refusal

from chairlift.config import ClassConfig, Config, PolicyConfig, TenantConfig
from chairlift.testing import ScriptedExecutor

TEXT = "/v1/completions"


def served_in_order(start_server, requests, config=None):
    """The requests in the order in which one slot serves them; all wait before the first is.

    Their prompts have different lengths, and each is a step of its own.
    """
    executor = ScriptedExecutor()
    server = start_server(executor, config=config or Config(), max_num_seqs=1)
    executor.hold()
    with ExitStack() as stack:
        socks = []
        for place, fields in enumerate([{}, *requests]):
            body = {"prompt": "x" * (place + 1), "max_tokens": 1} | fields
            socks.append(stack.enter_context(server.raw(http_post(TEXT, body))))
            server.wait_for(running_sequences=1, queued=place)
        executor.release()
        assert {answer[0] for answer in answers(socks, len(socks)).values()} == {200}
    _, *lengths = [step.num_tokens for step in executor.steps]
    assert sorted(lengths) == list(range(2, len(requests) + 2))
    server.check_alive()
    return [length - 2 for length in lengths]


def test_priority_orders_within_the_class(start_server):
    """Lower is sooner; equal ones stay as they came."""
    given = [3, 0, -2, 0, 7, -2]
    order = served_in_order(start_server, [{"priority": priority} for priority in given])
    assert order == sorted(range(6), key=lambda place: given[place])


def test_users_of_a_tenant_take_turns(start_server):
    """The one request of another user does not wait for all of the first one's."""
    requests = [{"user": "many"}] * 6 + [{"user": "one"}]
    config = Config(policy=PolicyConfig(sharing="fair"))
    assert served_in_order(start_server, requests, config).index(6) <= 1
    assert served_in_order(start_server, requests) == list(range(7))


@pytest.mark.parametrize("stream", [False, True])
def test_a_quota_that_is_used_up(start_server, stream):
    """What could not be served in time is refused at once, with when to come back."""
    policy = {
        "classes": {"a": ClassConfig(max_queue_time=1)},
        "tenants": {"acme": TenantConfig(tokens_per_second=10, burst_tokens=10)},
    }
    executor = ScriptedExecutor()
    server = start_server(executor, config=keyed(**policy), max_num_seqs=4)
    executor.hold()
    with burst(server, 20, headers=auth("acme"), stream=stream, max_tokens=30) as socks:
        refused = answers(socks, 10)
        assert {refusal(answer)[:2] for answer in refused.values()} == {(429, "rate_exceeded")}
        assert all(1 <= int(answer[1]["retry-after"]) < 600 for answer in refused.values())
        with burst(server, 1, headers=auth("other"), stream=stream) as others:
            executor.release()
            assert next(iter(answers(others, 1).values()))[0] == 200
    server.wait_for(live=0, queued=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_target_that_would_be_missed(start_server, stream):
    executor = ScriptedExecutor(step_time=0.02)
    config = Config(policy=PolicyConfig(classes={"a": ClassConfig(ttft_target="300ms")}))
    server = start_server(executor, config=config, max_num_seqs=1)
    with burst(server, 2) as socks:  # from which the pace is learned
        assert answers(socks, 2)
    with burst(server, 30, stream=stream, max_tokens=10) as socks:
        found = answers(socks, 30).values()
    told = {refusal(answer)[:2] for answer in found if answer[0] != 200}
    assert told == {(429, "ttft_unreachable")}
    assert {answer[0] for answer in found} == {200, 429}
    assert all(int(answer[1]["retry-after"]) >= 1 for answer in found if answer[0] != 200)
    server.check_alive()
