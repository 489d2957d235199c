"""LangChain's client for OpenAI, as it is, against a whole server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from running_server import LONG

from chairlift.testing import ScriptedExecutor


@pytest.fixture(scope="module")
def langchain(only_this_machine):
    """Imported only here: it takes seconds."""
    import langchain_openai  # noqa: PLC0415

    return langchain_openai


def settings(server, **fields):
    return {
        "model": "test-model",
        "base_url": f"{server.url}/v1",
        "api_key": "EMPTY",
        "max_tokens": 5,
        "max_retries": 0,
        "timeout": LONG,
    } | fields


@pytest.fixture(scope="module")
def chat(server, langchain):
    return langchain.ChatOpenAI(**settings(server))


def told(server, message):
    prompt = f"user: {message}\nassistant: "
    return bytes(server.executor.expected(prompt, 5)).decode()


def test_invoke(server, chat):
    answer = chat.invoke("Hello!")
    assert answer.content == told(server, "Hello!")
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "test-model"
    assert answer.usage_metadata["input_tokens"] == 24
    assert answer.usage_metadata["output_tokens"] == 5


def test_a_conversation(start_server, langchain):
    server = start_server(
        ScriptedExecutor(
            scripts={"system: Be brief.\nuser: Hi\nassistant: Ho\nuser: Hi\nassistant: ": "Hm"}
        )
    )
    chat = langchain.ChatOpenAI(**settings(server, model="alias"))
    history = [("system", "Be brief."), ("human", "Hi"), ("ai", "Ho"), ("human", "Hi")]
    assert chat.invoke(history).content == "Hm"


def test_stream(start_server, langchain):
    executor = ScriptedExecutor(hold_at_steps=range(2, 6))
    server = start_server(executor)
    chat = langchain.ChatOpenAI(**settings(server))
    chunks, left = [], len(executor.hold_at_steps)
    for chunk in chat.stream("Hello!", stream_usage=True):
        chunks.append(chunk)
        if chunk.content and left:
            executor.wait_held()
            executor.release()
            left -= 1
    assert [chunk.content for chunk in chunks if chunk.content] == list(told(server, "Hello!"))
    whole = sum(chunks[1:], start=chunks[0])
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 5


def test_batch(server, chat):
    messages = [f"number {number}" for number in range(8)]
    answers = chat.batch(messages)
    assert [answer.content for answer in answers] == [told(server, text) for text in messages]


def test_async(server, langchain):
    async def main():
        async with openai.DefaultAsyncHttpxClient() as client:  # its own would stay open
            chat = langchain.ChatOpenAI(**settings(server, http_async_client=client))
            whole = await chat.ainvoke("Hello!")
            chunks = [chunk async for chunk in chat.astream("Hello!")]
            batch = await chat.abatch(["one", "two"])
            return whole, chunks, batch

    whole, chunks, batch = asyncio.run(main())
    assert whole.content == told(server, "Hello!")
    assert "".join(chunk.content for chunk in chunks) == told(server, "Hello!")
    assert [answer.content for answer in batch] == [told(server, "one"), told(server, "two")]


def test_log_probabilities(chat):
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello!")
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer.content


def test_completions(server, langchain):
    model = langchain.OpenAI(**settings(server, max_tokens=4))
    expected = bytes(server.executor.expected("Hello!", 4)).decode()
    assert model.invoke("Hello!") == expected
    assert "".join(model.stream("Hello!")) == expected
    texts = [bytes(server.executor.expected(prompt, 4)).decode() for prompt in ("one", "two")]
    assert model.batch(["one", "two"]) == texts


def test_errors(chat):
    from langchain_core.exceptions import ContextOverflowError  # noqa: PLC0415

    with pytest.raises(openai.BadRequestError) as caught:
        chat.bind(temperature=5).invoke("Hello!")
    assert caught.value.param == "temperature"
    with pytest.raises(ContextOverflowError) as caught:
        list(chat.stream("x" * 999))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        chat.bind_tools([{"type": "function", "function": {"name": "f"}}]).invoke("Hello!")
    assert caught.value.param == "tools"
