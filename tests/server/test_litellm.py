"""LiteLLM, as it is, against a whole server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from running_server import LONG, http_post

from chairlift.config import Config, KeyConfig
from chairlift.server.tenants import hash_key
from chairlift.testing import ScriptedExecutor

# LiteLLM's own types, seen by pydantic at the first stream.
pytestmark = pytest.mark.filterwarnings("ignore:.*using the `ReadOnly` qualifier:UserWarning")

HELLO = [{"role": "user", "content": "Hello!"}]
SHOWN = "user: Hello!\nassistant: "


@pytest.fixture(scope="module")
def litellm(only_this_machine):
    """Imported only here: it takes seconds. It would fetch a price list from the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LITELLM_MODE", "PRODUCTION")  # reads no .env
        import litellm  # noqa: PLC0415

        patch.setattr(litellm, "suppress_debug_info", True)
        yield litellm
        for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
            if isinstance(client, openai.OpenAI):
                client.close()


def settings(server, **fields):
    return {
        "model": "openai/test-model",
        "messages": HELLO,
        "api_base": f"{server.url}/v1",
        "api_key": "EMPTY",
        "max_retries": 0,
        "timeout": LONG,
    } | fields


def told(server, count, child=0):
    return bytes(server.executor.expected(SHOWN, count, child)).decode()


def test_an_answer(server, litellm):
    answer = litellm.completion(**settings(server, max_tokens=4, n=2, logprobs=True))
    assert [choice.message.content for choice in answer.choices] == [
        told(server, 4, 0),
        told(server, 4, 1),
    ]
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.content) == 4
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (24, 8)


def test_a_stream(server, litellm):
    chunks = list(
        litellm.completion(
            **settings(server, max_tokens=5, stream=True, stream_options={"include_usage": True})
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == told(server, 5)
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert whole.choices[0].message.content == told(server, 5)
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (24, 5)


def test_a_completion(server, litellm):
    fields = settings(server, model="text-completion-openai/test-model", max_tokens=4)
    del fields["messages"]
    expected = bytes(server.executor.expected("Hello!", 4)).decode()
    answer = litellm.text_completion(prompt="Hello!", **fields)
    assert answer.choices[0].text == expected
    chunks = litellm.text_completion(prompt="Hello!", stream=True, **fields)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == expected


def test_async(server, litellm):
    async def main():
        whole = await litellm.acompletion(**settings(server, max_tokens=4))
        stream = await litellm.acompletion(**settings(server, max_tokens=4, stream=True))
        chunks = [chunk async for chunk in stream]
        await litellm.close_litellm_async_clients()
        return whole, chunks

    whole, chunks = asyncio.run(main())
    assert whole.choices[0].message.content == told(server, 4)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == told(server, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_errors(start_server, litellm, stream):
    executor = ScriptedExecutor(fail_rows={"user: fail": 0})
    server = start_server(
        executor,
        config=Config(keys={"ours": KeyConfig(hash=hash_key("sk-ours"))}),
        max_num_seqs=1,
        max_queued_requests=1,
    )

    def raises(kind, **fields):
        fields = {"api_key": "sk-ours", "stream": stream} | fields
        with pytest.raises(kind) as caught:
            list(litellm.completion(**settings(server, **fields)))
        return caught.value

    def taking_a_place():
        body = {"prompt": "hi", "max_tokens": 4}
        return server.raw(http_post("/v1/completions", body, {"authorization": "Bearer sk-ours"}))

    raises(litellm.AuthenticationError, api_key="wrong")
    raises(litellm.NotFoundError, model="openai/none")
    assert "temperature" in str(raises(litellm.BadRequestError, temperature=5))
    long = [{"role": "user", "content": "x" * 999}]
    raises(litellm.ContextWindowExceededError, messages=long)
    failing = [{"role": "user", "content": "fail"}]
    # A stream has begun by then.
    kind = litellm.ServiceUnavailableError if stream else litellm.InternalServerError
    assert "the model failed" in str(raises(kind, messages=failing))
    executor.hold()
    with taking_a_place():
        server.wait_for(running_sequences=1)
        raises(litellm.Timeout, timeout=0.2)
        server.wait_for(live=1)
        with taking_a_place():
            server.wait_for(queued=1)
            assert raises(litellm.RateLimitError).response.headers["retry-after"]
            executor.release()
    server.wait_for(live=0, used_blocks=0)
