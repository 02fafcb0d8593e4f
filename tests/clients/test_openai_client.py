"""OpenAI's own client, and its own types as the measure of what we answer."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

# Ours beyond OpenAI's, all documented.
EXTRAS = {"stop_reason", "reasoning_content", "root", "parent", "max_model_len", "status"}
HI: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "Qwen", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def extras(value: object, path: str = "") -> list[str]:
    if isinstance(value, BaseModel):
        unknown = [f"{path}.{key}" for key in value.model_extra or {} if key not in EXTRAS]
        known = [extras(getattr(value, key), f"{path}.{key}") for key in value.model_fields_set]
        return unknown + [each for some in known for each in some]
    if isinstance(value, list):
        return [each for item in value for each in extras(item, f"{path}[]")]
    return []


def conforms(kind: type[BaseModel], data: dict[str, Any]) -> None:
    assert extras(kind.model_validate(data, strict=True)) == []


def test_sync(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HI, **ASKED)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    chunks = client.chat.completions.create(
        messages=HI, stream=True, stream_options={"include_usage": True}, **ASKED
    )
    *chunks, trailer = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert trailer.usage == whole.usage


def test_async(server: str) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="EMPTY") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(messages=HI, n=2, **ASKED) for _ in range(8))
            )
            texts = {choice.message.content for answer in answers for choice in answer.choices}
            assert len(texts) == 1
            stream = await client.completions.create(prompt="hi", stream=True, **ASKED)
            assert "".join([chunk.choices[0].text async for chunk in stream])

    asyncio.run(scenario())


def test_answers_have_openai_s_types(server: str) -> None:
    with httpx2.Client(base_url=f"{server}/v1", timeout=60) as http:
        conforms(Model, http.get("/models/Qwen").json())
        chat = {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, **ASKED}
        conforms(ChatCompletion, http.post("/chat/completions", json=chat).json())
        text = {"prompt": ["hi", "ho"], "logprobs": 1, **ASKED}
        conforms(Completion, http.post("/completions", json=text).json())
        streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        lines = http.post("/chat/completions", json=streamed).text.split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        for chunk in data:
            conforms(ChatCompletionChunk, json.loads(chunk))


def test_echo_with_logprobs_as_lm_eval_asks(server: str) -> None:
    with httpx2.Client(base_url=server, timeout=60) as http:
        ids = [
            http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
            for prompt in ("The quick brown fox", "jumps over")
        ]
        body = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, **ASKED}
        answer = http.post("/v1/completions", json={**body, "max_tokens": 1}).json()
    for choice, tokens in zip(answer["choices"], ids, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(tokens) + 1


def test_errors_are_openai_s(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(messages=HI, model="Qwen", temperature=9)
    assert (wrong.value.code, wrong.value.param) == ("invalid_request_error", "temperature")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.completions.create(prompt="hi", suffix="x", **ASKED)
    assert unsupported.value.code == "unsupported_parameter"


def test_a_sleeping_model_wakes_for_the_client(server: str, client: openai.OpenAI) -> None:
    awake = client.chat.completions.create(messages=HI, **ASKED)
    with httpx2.Client(base_url=server, timeout=60) as http:
        assert http.post("/sleep").status_code == 200
        assert http.get("/is_sleeping").json()["is_sleeping"] is True
        assert http.post("/tokenize", json={"prompt": "hi"}).status_code == 200
        assert http.get("/is_sleeping").json()["is_sleeping"] is True
    woken = client.chat.completions.create(messages=HI, **ASKED)
    assert woken.choices[0].message.content == awake.choices[0].message.content
