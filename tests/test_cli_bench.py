"""``chairlift bench`` against a server whose delays and faults are known."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from chairlift.bench.client import AnswerReader, Failure, Outcome
from chairlift.bench.lengths import parse_length
from chairlift.bench.load import Load
from chairlift.bench.report import has_broken
from chairlift.bench.sse import EventParser
from chairlift.bench.tenants import Tenant, TenantMix
from chairlift.bench.trace import read_trace
from chairlift.bench.workload import Request, Workload, until
from chairlift.cli import main
from chairlift.errors import ConfigError
from fake_server import Behaviour, FakeServer


def bench(server, capsys, *flags):
    """Run the command; returns its exit status, figures and table."""
    status = main(["bench", "--base-url", server.url, "--json", "-", *flags])
    out = capsys.readouterr().out
    return status, json.loads(out)


def always(**behaviour):
    return FakeServer(lambda number, body: Behaviour(**behaviour))


def test_the_figures_are_those_of_the_delays(capsys):
    begin = time.perf_counter()
    with always(first_s=0.3, gap_s=0.05, queue_time_ms="125") as server:
        status, figures = bench(
            server, capsys, "--num-requests", "4", "--input-tokens", "10", "--output-tokens", "9"
        )
    took_ms = (time.perf_counter() - begin) * 1e3
    assert status == 0
    assert (figures["requests"], figures["succeeded"]) == (4, 4)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (40, 36)
    # Delays are never shorter; how much longer they are is up to the machine, but they are parts of
    # a whole that this test has timed.
    e2e = figures["e2e_ms"]["p50"]
    assert 700 <= e2e <= took_ms
    assert 300 <= figures["ttft_ms"]["p50"] <= e2e - 8 * 49
    assert 49 <= figures["tpot_ms"]["p50"] <= (e2e - 300) / 8
    assert 49 <= figures["itl_ms"]["p50"] <= (took_ms - 300) / 4
    assert figures["queue_time_ms"]["p99"] == pytest.approx(125)
    seconds = figures["seconds"]
    assert seconds >= 0.7
    assert figures["output_tokens_per_s"] == pytest.approx(36 / seconds)
    assert figures["total_tokens_per_s"] == pytest.approx(76 / seconds)
    assert figures["requests_per_s"] == pytest.approx(4 / seconds)


def test_tokens_are_counted_by_usage_not_by_events(capsys):
    with always(gap_s=0.1, tokens_per_event=4) as server:
        _, figures = bench(server, capsys, "--num-requests", "2", "--output-tokens", "12")
    assert figures["output_tokens"] == 24
    assert figures["itl_ms"]["p50"] >= 99, "gaps are between events"
    # 200 ms over 11 gaps between tokens.
    assert 18 <= figures["tpot_ms"]["p50"] <= figures["e2e_ms"]["p50"] / 11


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"finish_reason": None}, "no_finish_reason"),
        ({"has_done": False}, "no_done"),
        ({"has_usage": False}, "no_usage"),
        ({"extra_after_done": True}, "data_after_done"),
        ({"num_tokens": 3}, "wrong_token_count"),
        ({"break_after": 2}, "connection_broken"),
        ({"error_after": 2, "code": "request_failed"}, "request_failed"),
        ({"words": ("\x00",), "error_after": 0, "code": "engine_dead"}, "engine_dead"),
    ],
)
def test_a_stream_that_is_not_whole_has_failed(fault, code, capsys):
    def behave(number, body):
        return Behaviour(**fault) if number == 1 else Behaviour()

    with FakeServer(behave) as server:
        status, figures = bench(
            server, capsys, "--num-requests", "3", "--output-tokens", "5", "--rate", "100"
        )
    assert status == 1
    assert (figures["succeeded"], figures["failed"], figures["refused"]) == (2, 1, 0)
    assert [(each["code"], each["count"]) for each in figures["errors"]] == [(code, 1)]
    assert figures["output_tokens"] == 10, "a failed request is in no figure"


def test_refusals_are_counted_by_status_and_code_and_not_repeated(capsys):
    refusals = [
        Behaviour(status=429, code="queue_full", retry_after="3"),
        Behaviour(status=429, code="queue_full", retry_after="7"),
        Behaviour(status=429, code="rate_exceeded"),
        Behaviour(status=503, code="shed", retry_after="1"),
        Behaviour(status=504, code="queue_timeout"),
    ]

    def behave(number, body):
        return refusals[number] if number < len(refusals) else Behaviour()

    with FakeServer(behave) as server:
        status, figures = bench(server, capsys, "--num-requests", "8", "--rate", "100")
    assert status == 0, "a refusal is a result"
    assert len(server.requests) == 8
    assert (figures["succeeded"], figures["refused"], figures["failed"]) == (3, 5, 0)
    errors = {(each["status"], each["code"]): each for each in figures["errors"]}
    assert {kind: each["count"] for kind, each in errors.items()} == {
        (429, "queue_full"): 2,
        (429, "rate_exceeded"): 1,
        (503, "shed"): 1,
        (504, "queue_timeout"): 1,
    }
    assert errors[429, "queue_full"]["retry_after_s"] == {"min": 3, "max": 7}
    assert errors[429, "rate_exceeded"]["retry_after_s"] is None


def test_retry_waits_for_as_long_as_it_is_told(capsys):
    def behave(number, body):
        if number < 2:
            return Behaviour(status=429, code="queue_full", retry_after="0.4")
        return Behaviour()

    with FakeServer(behave) as server:
        status, figures = bench(server, capsys, "--num-requests", "1", "--retry", "2")
    assert status == 0
    assert (figures["succeeded"], figures["retries"]) == (1, 2)
    assert figures["errors"][0]["count"] == 2
    assert figures["ttft_ms"]["p50"] >= 800, "from when it was first sent"


def test_goodput_counts_who_kept_every_limit(capsys):
    def behave(number, body):
        return Behaviour(first_s=2.0 if number % 2 else 0.0)

    flags = ["--num-requests", "8", "--goodput", "ttft:1900", "tpot:1900"]
    with FakeServer(behave) as server:
        _, figures = bench(server, capsys, *flags)
    good = figures["goodput_requests_per_s"] * figures["seconds"]
    assert good == pytest.approx(4)
    assert figures["goodput_limits_ms"] == {"ttft": 1_900, "tpot": 1_900}


def test_chat_prompts_are_messages_and_the_role_event_is_no_token(capsys):
    with always(first_s=0.3) as server:
        status, figures = bench(server, capsys, "--endpoint", "chat", "--num-requests", "2")
    assert status == 0
    assert figures["ttft_ms"]["p50"] >= 300
    body, _ = server.requests[0]
    assert body["messages"][0]["role"] == "user"
    assert len(body["messages"][0]["content"].split()) == 128
    assert body["stream_options"] == {"include_usage": True}
    assert body["model"] == "fake-model"


def test_tenants_have_shares_classes_keys_and_a_header(tmp_path, capsys):
    mix = tmp_path / "mix.toml"
    mix.write_text('[tenants.big]\nweight = 3\nclass = "gold"\n[tenants.small]\nkey = "sk-small"\n')

    def behave(number, body):
        return Behaviour(first_s=0.3 if body.get("service_tier") == "gold" else 0.0)

    flags = ["--tenants", str(mix), "--tenant", "third=1,class=gold,key=sk-3"]
    flags += ["--tenant-header", "X-Tenant", "--api-key", "sk-all", "--num-requests", "100"]
    with FakeServer(behave, api_key="sk-all") as server:
        status, figures = bench(server, capsys, *flags, "--output-tokens", "2")
    assert status == 0
    tenants, classes = figures["tenants"], figures["classes"]
    assert (
        tenants["big"]["requests"] + tenants["small"]["requests"] + tenants["third"]["requests"]
        == 100
    )
    assert 45 <= tenants["big"]["requests"] <= 75
    assert classes["gold"]["requests"] == 100 - tenants["small"]["requests"]
    assert classes["gold"]["ttft_ms"]["p50"] >= 300
    keys = {headers["X-Tenant"]: headers["Authorization"] for _, headers in server.requests}
    assert keys == {"big": "Bearer sk-all", "small": "Bearer sk-small", "third": "Bearer sk-3"}
    assert "sk-" not in json.dumps(figures)


def test_the_class_is_the_one_that_the_server_tells(capsys):
    def behave(number, body):
        return Behaviour(told_class=None if number else "fallback")

    with FakeServer(behave) as server:
        flags = ["--tenant", "a=1,class=gold", "--num-requests", "3", "--rate", "100"]
        _, figures = bench(server, capsys, *flags)
    counts = {name: each["requests"] for name, each in figures["classes"].items()}
    assert counts == {"fallback": 1, "gold": 2}


def test_a_closed_loop_keeps_so_many_under_way(capsys):
    with always(first_s=0.1, num_together=3) as server:
        status, figures = bench(
            server, capsys, "--mode", "closed", "--concurrency", "3", "--num-requests", "12"
        )
    assert status == 0
    assert figures["requests"] == 12
    assert server.most_live == 3


def test_a_closed_loop_ends_with_the_duration(capsys):
    with always(first_s=0.05) as server:
        status, figures = bench(
            server, capsys, "--mode", "closed", "--concurrency", "2", "--duration", "0.5"
        )
    assert status == 0
    assert 2 <= figures["requests"] <= 22
    assert figures["seconds"] >= 0.5


def test_an_open_loop_does_not_wait_for_answers(capsys):
    with always(first_s=1.0, num_together=20) as server:
        status, figures = bench(server, capsys, "--rate", "40", "--num-requests", "20")
    assert status == 0
    assert server.most_live == 20
    assert figures["client_kept_up"] in (True, False)
    assert figures["client_lateness_ms"]["p50"] < 500, "half of what the quickest answer takes"


def test_a_client_that_is_late_says_so(capsys, monkeypatch):
    slow = threading.Event()
    make = Workload._request

    def request(self, *args):
        slow.set()
        time.sleep(0.05)
        return make(self, *args)

    monkeypatch.setattr(Workload, "_request", request)
    monkeypatch.setattr("chairlift.bench.load._PREPARED", 1)
    with always() as server:
        flags = ["--base-url", server.url, "--rate", "100", "--num-requests", "15"]
        assert main(["bench", *flags]) == 0
    assert slow.is_set()
    assert "this client could not keep up" in capsys.readouterr().out


def test_the_warm_up_is_not_measured_and_has_other_prompts(capsys):
    with always() as server:
        _, figures = bench(server, capsys, "--num-requests", "3", "--warmup", "2")
    assert figures["requests"] == 3
    prompts = [tuple(body["prompt"]) for body, _ in server.requests]
    assert len(set(prompts)) == 5


def test_a_trace_is_replayed(tmp_path, capsys):
    path = tmp_path / "trace.csv.gz"
    rows = ["arrival_s,input_tokens,output_tokens,class"]
    rows += ["10.0,40,8,a", "10.4,80,16,b", "10.2,20,4,a", "99.0,20,4,a"]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(rows))
    flags = ["--mode", "trace", "--trace", str(path), "--length-scale", "4", "--time-scale", "2"]
    with always() as server:
        status, figures = bench(server, capsys, *flags, "--duration", "5")
    assert status == 0
    sent = [(len(body["prompt"]), body["max_tokens"]) for body, _ in server.requests]
    assert sent == [(10, 2), (5, 1), (20, 4)], "by arrival; the last one is after the duration"
    assert figures["seconds"] >= 0.8
    assert {name: each["requests"] for name, each in figures["tenants"].items()} == {"a": 2, "b": 1}


def test_a_table_for_people(capsys):
    with always() as server:
        flags = ["--base-url", server.url, "--num-requests", "2", "--goodput", "ttft:60000"]
        assert main(["bench", *flags, "--tenant", "acme=1"]) == 0
    captured = capsys.readouterr()
    assert "requests that succeeded" in captured.out
    assert "2 of 2" in captured.out
    assert "goodput (ttft:60000), requests/s" in captured.out
    for name in ("TTFT", "ITL", "TPOT", "E2E", "acme"):
        assert f"\n{name} " in captured.out


def test_figures_go_to_a_file_beside_the_table(tmp_path, capsys):
    path = tmp_path / "figures.json"
    with always() as server:
        assert (
            main(["bench", "--base-url", server.url, "--num-requests", "1", "--json", str(path)])
            == 0
        )
    assert json.loads(path.read_text())["settings"]["rate"] == "inf"
    assert "TTFT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--base-url", "127.0.0.1:1"], "must begin with http://"),
        (["--mode", "closed", "--rate", "3"], "--rate is of --mode poisson"),
        (["--mode", "trace"], "needs --trace"),
        (["--rate", "0"], "--rate is 0; it must be above 0"),
        (["--rate", "nan"], "--rate is nan"),
        (["--input-tokens", "9-3"], "'9-3' is no length"),
        (["--output-tokens", "lognormal:1"], "is no length"),
        (["--goodput", "speed:3"], "'speed:3' is no limit"),
        (["--tenant", "=3"], "'=3' is no tenant"),
        (["--tenant", "a=x"], "no number"),
        (["--tenant", "a=0"], "it must be > 0"),
        (["--tenant", "a=1,tier=x"], "'tier'; allowed are weight, class, key"),
        (["--tenant", "a=1", "--tenant", "a=2"], "'a' is there twice"),
        (["--extra-body", "{"], "--extra-body is no JSON"),
        (["--vocab-size", "100"], "--vocab-size is 100"),
        (["--trace", "/no/such"], "/no/such cannot be read"),
        (["--tenants", "/no/such"], "/no/such cannot be read"),
    ],
)
def test_a_mistake_is_one_clear_line(flags, message, capsys):
    assert main(["bench", *flags]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_key_that_the_server_does_not_know(capsys):
    with FakeServer(lambda number, body: Behaviour(), api_key="sk-right") as server:
        assert main(["bench", "--base-url", server.url, "--api-key", "sk-wrong"]) == 1
    error = capsys.readouterr().err
    assert "answers 401" in error
    assert "sk-wrong" not in error


def test_a_run_of_refusals_alone_is_no_result(capsys):
    with always(status=429, code="queue_full") as server:
        status, figures = bench(server, capsys, "--num-requests", "3")
    assert status == 1
    assert figures["ttft_ms"] is None


def test_ctrl_c_prints_what_there_is():
    def behave(number, body):
        return Behaviour(first_s=0.0 if number < 5 else 600.0)

    with FakeServer(behave) as server:
        command = [sys.executable, "-c", "from chairlift.cli import main; raise SystemExit(main())"]
        command += ["bench", "--base-url", server.url, "--num-requests", "20"]
        # Whoever has sent a second request has had its first answer.
        command += ["--mode", "closed", "--concurrency", "5"]
        with subprocess.Popen(
            [*command, "--json", "-"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                deadline = time.monotonic() + 120
                while not (len(server.requests) == 10 and server.num_live == 5):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                out, error = process.communicate(timeout=120)
            finally:
                process.kill()
    assert process.returncode == 130, error
    figures = json.loads(out)
    assert figures["interrupted"]
    assert (figures["succeeded"], figures["unfinished"]) == (5, 5)
    assert "Traceback" not in error


# The parts.


def requests(workload, how_many=200, rate=50.0):
    stream = workload.poisson("m", rate)
    return [next(stream) for _ in range(how_many)]


def test_a_workload_follows_from_its_seed():
    lengths = {"input_tokens": parse_length("5-20"), "output_tokens": parse_length("5-20")}
    first, again, other = (requests(Workload(seed=seed, **lengths)) for seed in (3, 3, 4))
    assert first == again
    assert [each.body for each in first] != [each.body for each in other]
    faster = requests(Workload(seed=3, **lengths), rate=500.0)
    assert [each.body for each in first] == [each.body for each in faster]
    assert first[-1].send_at_s == pytest.approx(faster[-1].send_at_s * 10)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness):
    stream = Workload(input_tokens=parse_length("1")).poisson("m", 10.0, burstiness)
    gaps = np.diff([next(stream).send_at_s for _ in range(4_000)])
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.15)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)


def test_an_infinite_rate_is_all_at_once():
    assert {each.send_at_s for each in requests(Workload(), 5, float("inf"))} == {None}
    assert not list(until(iter(requests(Workload(), 5)), 0.0))


def test_lengths():
    rng = np.random.default_rng(1)
    assert parse_length("7").draw(rng) == 7
    drawn = {parse_length("3-5").draw(rng) for _ in range(100)}
    assert drawn == {3, 4, 5}
    lognormal = [parse_length("lognormal:3.5,1.0,512").draw(rng) for _ in range(2_000)]
    assert 1 <= min(lognormal) < max(lognormal) <= 512
    assert np.median(lognormal) == pytest.approx(np.exp(3.5), rel=0.15)


def test_blocks_of_one_name_are_the_same_tokens(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens,prefix_hashes\n"
        "0,1200,1,7 8 9\n0,1200,1,7 8 10\n0,1200,1,11 8 9\n"
    )
    workload = Workload(trace=read_trace(path, length_scale=4), length_scale=4)
    first, second, third = (json.loads(each.body)["prompt"] for each in workload.replay("m"))
    assert len(first) == len(second) == len(third) == 300
    assert first[:256] == second[:256]
    assert first[256:] != second[256:]
    assert first[:128] != third[:128]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header"),
        ("arrival_s,input_tokens\n0,1\n", "none of output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\nnoon,1,1\n", "line 2"),
    ],
)
def test_a_trace_that_cannot_be_used(text, message, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_dates_and_other_names_of_columns(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert (first.input_tokens, second.output_tokens) == (374, 109)
    assert second.arrival_s == pytest.approx(4.3146, abs=1e-3)


def test_a_trace_without_times_cannot_be_replayed(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("input_tokens,output_tokens\n3,4\n")
    workload = Workload(trace=read_trace(path))
    with pytest.raises(ConfigError, match="no arrival times"):
        workload.replay("m")
    assert next(workload.closed("m")).output_tokens == 4


def test_a_tenant_does_not_show_its_key():
    assert "sk-1" not in repr(Tenant(name="a", api_key="sk-1"))
    assert TenantMix().draw(np.random.default_rng(0)) is None


def outcome(output_tokens=3):
    request = Request(
        index=0,
        send_at_s=0.0,
        body=b"",
        headers={},
        output_tokens=output_tokens,
        tenant=None,
        request_class=None,
    )
    return Outcome(request, sent_at=0.0)


def test_events_are_found_wherever_the_bytes_are_torn():
    stream = b': ping\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream) + 1):
        parser = EventParser()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        found = [payload for piece in pieces for payload in parser.feed(piece)]
        assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_a_closed_loop_does_not_poll_a_server_that_is_gone():
    class Gone:
        async def send(self, request, lateness=None):
            failure = Failure(None, "connection_failed", "connection refused")
            return Outcome(request, sent_at=0.0, failure=failure)

    load = Load(Gone(), lambda _: None)
    result = asyncio.run(load.closed_loop(Workload().closed("m"), 2, duration_s=0.35))
    assert 2 <= len(result.outcomes) <= 10
    assert has_broken(result)


@pytest.mark.parametrize(
    "said",
    ['"finish_reason":"stop"', '"usage":{', '"error"', "[DONE]", "data: [DONE]\n\n", '"text":""'],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_a_model_says_is_never_taken_for_the_protocol(said, separators):
    """The way of a token looks at bytes; text that looks like JSON must not lead it astray."""
    result = outcome(output_tokens=3)
    reader = AnswerReader(result)
    for number in range(3):
        choice = {"index": 0, "text": said, "finish_reason": None}
        event = json.dumps({"choices": [choice], "usage": None}, separators=separators)
        reader.feed(f"data: {event}\n\n".encode(), now=float(number + 1))
    assert list(result.token_times) == [1.0, 2.0, 3.0]
    assert result.finish_reason is None
    end = '{"choices":[{"index":0,"text":"","finish_reason":"length"}]}'
    usage = '{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}'
    reader.feed(f"data: {end}\n\ndata: {usage}\n\ndata: [DONE]\n\n".encode(), now=4.0)
    assert reader.finish(must_have_all=True) is None
    assert list(result.token_times) == [1.0, 2.0, 3.0]
    assert (result.prompt_tokens, result.output_tokens, result.ended_at) == (2, 3, 4.0)


def read_events(result, *events):
    """Read events one second apart."""
    reader = AnswerReader(result)
    for second, event in enumerate(events, start=1):
        payload = event if isinstance(event, str) else json.dumps(event)
        reader.feed(f"data: {payload}\n\n".encode(), now=float(second))
    return reader.finish(must_have_all=True)


def test_an_event_that_says_several_things_is_heard_whole():
    """Text, finish reason and usage at once, as some servers send them."""
    result = outcome(output_tokens=2)
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    first = {"choices": [{"text": "a", "finish_reason": None}], "usage": None}
    last = {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": usage}
    assert read_events(result, first, last, "[DONE]") is None
    assert (list(result.token_times), result.finish_reason) == ([1.0, 2.0], "stop")
    assert result.output_tokens == 2


def test_an_error_beside_text_is_an_error():
    first = {"choices": [{"text": "a", "finish_reason": None}]}
    failure = read_events(outcome(), first, {**first, "error": {"code": "x", "message": "y"}})
    assert failure is not None
    assert failure.code == "x"


def test_an_event_without_text_is_no_token():
    result = outcome(output_tokens=2)
    said = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("", "a", "", "b")]
    read_events(result, *said)
    assert list(result.token_times) == [2.0, 4.0]


@pytest.mark.parametrize("payload", ["{", "[]", "3", '{"choices": 3}', '{"usage": [1]}'])
def test_a_malformed_event_is_a_failure(payload):
    reader = AnswerReader(outcome())
    reader.feed(f"data: {payload}\n\n".encode(), now=1.0)
    failure = reader.finish(must_have_all=False)
    assert failure is not None
    assert failure.code == "bad_event"
