"""OpenAI's own Python package, as it is, against a whole server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict

import openai
import pytest
from running_server import LONG, http_post

from chairlift.config import Config, KeyConfig
from chairlift.server.tenants import hash_key
from chairlift.testing import ScriptedExecutor

MODEL = "test-model"
HELLO = [{"role": "user", "content": "Hello!"}]
SHOWN = "user: Hello!\nassistant: "
"""What the template makes of it."""


def client_of(server, *, asynchronous=False, **options):
    kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    settings = {"api_key": "EMPTY", "max_retries": 0, "timeout": LONG} | options
    return kind(base_url=f"{server.url}/v1", **settings)


@pytest.fixture(scope="module")
def client(server, only_this_machine):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def strict(server):
    """One that checks every answer against its own types.

    They know neither a completion's chunk that is not the last nor the missing log-probability of
    the first token of an echo, though OpenAI sends both as null.
    """
    with client_of(server, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def held(start_server):
    """A server of one place and one more in the queue, both taken, that stands still."""
    executor = ScriptedExecutor(scripts={"through": "in at last"})
    server = start_server(executor, max_num_seqs=1, max_queued_requests=1)
    executor.hold()
    with (
        client_of(server) as client,
        occupied(server, running_sequences=1),
        occupied(server, running_sequences=1, queued=1),
    ):
        yield server, client
        executor.release()
    server.check_alive()


@contextlib.contextmanager
def occupied(server, **gauges):
    """Send a request that nobody reads, and wait for what it leads to."""
    with server.raw(http_post("/v1/completions", {"prompt": "hi", "max_tokens": 4})):
        server.wait_for(**gauges)
        yield


def told(server, prompt, count, child=0):
    """What the executor says to a prompt."""
    return bytes(server.executor.expected(prompt, count, child)).decode()


class TestAnswers:
    def test_a_chat(self, server, strict):
        answer = strict.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content == told(server, SHOWN, 4)
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "length"
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (24, 4)
        assert answer.usage.total_tokens == 28
        assert answer._request_id.startswith("req-")

    def test_a_completion(self, server, strict):
        answer = strict.completions.create(model=MODEL, prompt="Hello!", max_tokens=4)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (told(server, "Hello!", 4), "length")
        assert answer.usage.total_tokens == 10

    def test_several_prompts_with_several_answers(self, server, strict):
        answer = strict.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=3)
        expected = [told(server, prompt, 3, child) for prompt in ("one", "two") for child in (0, 1)]
        assert [choice.text for choice in answer.choices] == expected
        ids = strict.completions.create(model=MODEL, prompt=[111, 110, 101], max_tokens=3)
        assert ids.choices[0].text == expected[0]

    def test_several_answers(self, server, strict):
        answer = strict.chat.completions.create(
            model=MODEL, messages=HELLO, n=3, max_completion_tokens=4
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
        assert texts == [told(server, SHOWN, 4, child) for child in range(3)]
        assert len(set(texts)) == 3
        assert answer.usage.completion_tokens == 12

    def test_log_probabilities_of_a_chat(self, strict):
        answer = strict.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2
        )
        (choice,) = answer.choices
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        for entry in choice.logprobs.content:
            assert bytes(entry.bytes).decode() == entry.token
            assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.0]
            assert entry.top_logprobs[0].token == entry.token
            assert entry.logprob == -0.5

    def test_log_probabilities_of_a_completion(self, client):
        answer = client.completions.create(
            model=MODEL, prompt="Hello!", max_tokens=4, logprobs=2, echo=True
        )
        (choice,) = answer.choices
        assert choice.text.startswith("Hello!")
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset == list(range(10))
        assert choice.logprobs.token_logprobs == [None, *[-0.5] * 9]
        assert len(choice.logprobs.top_logprobs) == 10

    def test_a_stop_string_and_an_end(self, start_server):
        server = start_server(ScriptedExecutor(scripts={"go": "alpha beta gamma"}))
        with client_of(server) as client:
            for stop, text in (("beta", "alpha "), (["x", "gamma"], "alpha beta "), (None, None)):
                answer = client.completions.create(
                    model=MODEL, prompt="go", stop=stop, max_tokens=50
                )
                assert answer.choices[0].finish_reason == "stop"
                assert answer.choices[0].text == (text or "alpha beta gamma")

    def test_a_seed(self, start_server):
        server = start_server(ScriptedExecutor(default=lambda sample: 97 + sample.seed % 26))
        with client_of(server) as client:
            for seed in (3, 4):
                texts = {
                    client.chat.completions.create(
                        model=MODEL, messages=HELLO, seed=seed, max_tokens=3
                    )
                    .choices[0]
                    .message.content
                    for _ in range(2)
                }
                assert len(texts) == 1
                answer = client.completions.create(model=MODEL, prompt="x", seed=seed, max_tokens=3)
                assert answer.system_fingerprint.startswith("fp_")
                assert answer.choices[0].text == texts.pop()

    def test_fields_that_only_we_have(self, server, client):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=2,
            service_tier="default",
            extra_body={"priority": -1, "top_k": 5, "min_tokens": 1},
            extra_headers={"X-Request-Id": "mine"},
        )
        assert answer.headers["x-request-class"] == "default"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.parse().choices[0].message.content == told(server, SHOWN, 2)

    def test_models(self, strict):
        assert [model.id for model in strict.models.list()] == [MODEL, "alias"]
        assert strict.models.retrieve("alias").id == "alias"


class TestStreams:
    def test_a_chat(self, server, strict):
        with strict.chat.completions.create(
            model=MODEL, messages=HELLO, n=2, max_tokens=5, stream=True
        ) as stream:
            chunks = list(stream)
        texts, reasons = defaultdict(str), {}
        for chunk in chunks:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        assert texts == {child: told(server, SHOWN, 5, child) for child in (0, 1)}
        assert reasons == {0: "length", 1: "length"}
        assert {chunk.choices[0].delta.role for chunk in chunks[:1]} == {"assistant"}
        assert all(chunk.usage is None for chunk in chunks)

    def test_a_completion_with_usage(self, server, client):
        *chunks, last = client.completions.create(
            model=MODEL,
            prompt="Hello!",
            max_tokens=5,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == told(server, "Hello!", 5)
        tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
        assert "".join(tokens) == told(server, "Hello!", 5)
        assert last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 5)

    def test_the_clients_own_accumulation(self, start_server):
        """Its helper puts the whole answer together again, log-probabilities and usage too."""
        server = start_server(ScriptedExecutor(scripts={SHOWN: "Good day."}))
        with (
            client_of(server, _strict_response_validation=True) as client,
            client.chat.completions.stream(
                model=MODEL,
                messages=HELLO,
                logprobs=True,
                stream_options={"include_usage": True},
            ) as stream,
        ):
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("Good day.", "stop")
        tokens = [entry.token for entry in choice.logprobs.content]
        assert "".join(tokens[:-1]) == "Good day."
        assert len(tokens) == answer.usage.completion_tokens == 10

    def test_leaving_ends_the_request(self, start_server):
        executor = ScriptedExecutor(step_time=0.0005)
        server = start_server(executor, max_model_len=8_000)
        with client_of(server) as client:
            stream = client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=7_000, stream=True
            )
            next(stream), next(stream)
            assert server.metrics()["live"] == 1
            stream.close()
            server.check_alive()
        assert len(executor.steps) < 6_000


class TestAsync:
    def test_many_at_once(self, server):
        async def one(client, number):
            prompt = f"number {number}"
            if number % 2:
                answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=6)
                return answer.choices[0].text
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=6, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def main():
            async with client_of(server, asynchronous=True) as client:
                return await asyncio.gather(*(one(client, number) for number in range(20)))

        expected = [told(server, f"number {number}", 6) for number in range(20)]
        assert asyncio.run(main()) == expected

    def test_a_cancelled_task(self, start_server):
        executor = ScriptedExecutor(step_time=0.0005)
        server = start_server(executor, max_model_len=8_000)

        async def main():
            async with client_of(server, asynchronous=True) as client:
                task = asyncio.create_task(
                    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=7_000)
                )
                await asyncio.to_thread(server.wait_for, running_sequences=1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.to_thread(server.check_alive)

        asyncio.run(main())
        assert len(executor.steps) < 6_000


BAD = [
    ({"temperature": 5}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"stop": ""}, "stop"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "x" * 999}]}, "messages"),
    ({"messages": []}, "messages"),
]


class TestErrors:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("fields", "param"), BAD, ids=[param for _, param in BAD])
    def test_bad_request(self, client, fields, param, stream):
        body = {"model": MODEL, "messages": HELLO, "stream": stream} | fields
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body)
        assert (caught.value.status_code, caught.value.param) == (400, param)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.code
        assert caught.value.request_id.startswith("req-")

    def test_not_found(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="none", messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("none")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="no such endpoint")

    def test_authentication(self, start_server):
        config = Config(keys={"ours": KeyConfig(hash=hash_key("sk-ours"))})
        server = start_server(config=config)
        with client_of(server) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.chat.completions.create(model=MODEL, messages=HELLO)
            assert caught.value.code == "invalid_api_key"
            known = client.with_options(api_key="sk-ours")
            assert known.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_full_queue(self, held, stream):
        _, client = held
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
        assert caught.value.code == "queue_full"
        assert caught.value.type == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after"]) >= 1

    def test_retries_come_when_they_were_told(self, held):
        """The gate refuses once and then lets in; the client waits for Retry-After in between."""
        server, client = held
        seen = []

        def see(response):
            seen.append(
                (response.status_code, response.headers.get("retry-after"), time.monotonic())
            )
            server.executor.release()

        client._client.event_hooks = {"response": [see]}
        answer = client.with_options(max_retries=1).completions.create(
            model=MODEL, prompt="through", max_tokens=20
        )
        assert answer.choices[0].text == "in at last"
        (refused, retry_after, first), (served, _, second) = seen
        assert (refused, served) == (429, 200)
        assert second - first >= int(retry_after) >= 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_timeout_of_the_client(self, start_server, stream):
        """While its request waits: it leaves the queue."""
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=1)
        executor.hold()
        with client_of(server, timeout=0.2) as client, occupied(server, running_sequences=1):
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
            server.wait_for(queued=0, live=1)
            executor.release()
        server.check_alive()

    def test_the_servers_own_failures(self, start_server):
        executor = ScriptedExecutor(fail_rows={"fail at once": 0, "fail later": 3})
        server = start_server(executor)
        with client_of(server) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model=MODEL, prompt="fail at once")
            assert (caught.value.status_code, caught.value.code) == (500, "request_failed")
            texts = []
            stream = client.completions.create(model=MODEL, prompt="fail later", stream=True)
            with pytest.raises(openai.APIError, match="the model failed") as caught:
                texts.extend(chunk.choices[0].text for chunk in stream)
            assert caught.value.code == "request_failed"
            executor.hold()

    @pytest.mark.parametrize("stream", [False, True])
    def test_late_and_draining(self, start_server, stream):
        executor = ScriptedExecutor()
        server = start_server(executor, max_num_seqs=1)
        executor.hold()
        with client_of(server) as client, occupied(server, running_sequences=1):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(
                    model=MODEL, prompt="late", stream=stream, extra_body={"deadline_ms": 30}
                )
            assert (caught.value.status_code, caught.value.code) == (504, "deadline_missed")
            server.drain()
            while server.client.get("/ready").status_code == 200:
                time.sleep(0.005)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model=MODEL, prompt="x", stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "draining")
            assert caught.value.type == "overloaded_error"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            executor.release()

    def test_nobody_listens(self):
        with (
            openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIConnectionError),
        ):
            client.models.list()
