"""The examples that readers of the first project know, word for word but for the server's address."""

import asyncio
from typing import Any

import pytest

ADDRESS = "http://127.0.0.1:8000"
CONVERSATION = [{"role": "user", "content": "hi"}]

SYNC = """
from openai import OpenAI

openai_api_base = "http://127.0.0.1:8000/v1"
openai_api_key = "EMPTY"
client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)

def api_predict(conversation):
    response = client.chat.completions.create(
        model="Qwen",
        messages=conversation
    )
    for chunk in response:
        content = chunk.choices[0].delta.content
        if content:
            yield content
"""

ASYNC = """
from openai import AsyncOpenAI

openai_api_base = "http://127.0.0.1:8000/v1"
openai_api_key = "EMPTY"
client = AsyncOpenAI(api_key=openai_api_key, base_url=openai_api_base)

async def api_predict(conversation):
    response = await client.chat.completions.create(
        model="Qwen",
        messages=conversation,
        stream=True
    )
    async for chunk in response:
        content = chunk.choices[0].delta.content
        if content:
            yield content
"""


def run(snippet: str, server: str) -> dict[str, Any]:
    assert ADDRESS in snippet
    names: dict[str, Any] = {}
    exec(snippet.replace(ADDRESS, server), names)
    return names


def test_sync(server: str) -> None:
    """As printed it asks for no stream and then reads one, which OpenAI's client cannot do."""
    printed = run(SYNC, server)
    with printed["client"], pytest.raises(AttributeError, match="'tuple' object has no attribute"):
        list(printed["api_predict"](CONVERSATION))
    meant = run(SYNC.replace("messages=conversation", "messages=conversation, stream=True"), server)
    with meant["client"]:
        assert "".join(meant["api_predict"](CONVERSATION))


def test_async(server: str) -> None:
    async def scenario() -> None:
        names = run(ASYNC, server)
        async with names["client"]:
            assert "".join([text async for text in names["api_predict"](CONVERSATION)])

    asyncio.run(scenario())
