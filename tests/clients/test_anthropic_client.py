"""Anthropic's own client, and its own types as the measure of what we answer."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.clients.conftest import USER_KEY

HI: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "Qwen", "max_tokens": 8, "extra_body": {"temperature": 0}}
SORT: Any = {
    "name": "sort",
    "description": "Sorts.",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "bc"]}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}
FORCED: Any = {**ASKED, "max_tokens": 64, "tools": [SORT], "tool_choice": {"type": "any"}}


@pytest.fixture
def client(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="EMPTY", max_retries=0) as client:
        yield client


def extras(value: object, path: str = "") -> list[str]:
    """Every field that Anthropic's types do not know."""
    if isinstance(value, BaseModel):
        unknown = [f"{path}.{key}" for key in value.model_extra or {}]
        known = [extras(getattr(value, key), f"{path}.{key}") for key in value.model_fields_set]
        return unknown + [each for some in known for each in some]
    if isinstance(value, list):
        return [each for item in value for each in extras(item, f"{path}[]")]
    return []


def conforms(kind: Any, data: Any) -> None:
    assert extras(TypeAdapter(kind).validate_python(data, strict=True)) == []


def text_of(message: Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_sync(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=HI, system="Be brief.", **ASKED)
    assert text_of(whole)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 8)
    with client.messages.stream(messages=HI, system="Be brief.", **ASKED) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        streamed = stream.get_final_message()
    assert streamed.stop_reason == whole.stop_reason
    assert total(streamed) == total(whole)


def total(message: Message) -> tuple[int, int]:
    """Tokens in and out; what of the first was cached may differ."""
    used = message.usage
    return used.input_tokens + (used.cache_read_input_tokens or 0), used.output_tokens


def test_async(server: str) -> None:
    async def scenario() -> None:
        async with anthropic.AsyncAnthropic(base_url=server, api_key="EMPTY") as client:
            messages = await asyncio.gather(
                *(client.messages.create(messages=HI, **ASKED) for _ in range(8))
            )
            assert len({text_of(message) for message in messages}) == 1
            stream = await client.messages.create(messages=HI, stream=True, **ASKED)
            names = [event.type async for event in stream]
            assert (names[0], names[-1]) == ("message_start", "message_stop")

    asyncio.run(scenario())


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=HI, **FORCED)
    assert whole.stop_reason == "tool_use"
    (call,) = whole.content
    assert call.type == "tool_use"
    assert call.name == "sort"
    assert call.input in ({"kind": "a"}, {"kind": "bc"})
    with client.messages.stream(messages=HI, **FORCED) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sorted"}
    conversation: Any = [*HI, whole.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(messages=conversation, tools=[SORT], **ASKED).content


def test_answers_have_anthropic_s_types(server: str) -> None:
    body = {"messages": HI, "model": "Qwen", "max_tokens": 64}
    with httpx2.Client(base_url=f"{server}/v1", timeout=60) as http:
        for fields in ({}, {"tools": [SORT], "tool_choice": {"type": "tool", "name": "sort"}}):
            conforms(Message, http.post("/messages", json={**body, **fields}).json())
            streamed = http.post("/messages", json={**body, **fields, "stream": True}).text
            *events, end = streamed.split("\n\n")
            assert end == ""
            for event in events:
                name, data = event.split("\n")
                value = json.loads(data.removeprefix("data: "))
                assert name == f"event: {value['type']}"
                conforms(RawMessageStreamEvent, value)
        counted = http.post("/messages/count_tokens", json={"messages": HI}).json()
        conforms(MessageTokensCount, counted)


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(messages=HI, model="Qwen")
    assert counted.input_tokens == total(client.messages.create(messages=HI, **ASKED))[0]


def test_errors_are_anthropic_s(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=1, messages=HI)
    assert missing.value.type == "not_found_error"
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(messages=image, **ASKED)
    assert wrong.value.type == "invalid_request_error"
    assert (wrong.value.api_message or "").endswith('found "image"')


def test_keys(guarded_server: str) -> None:
    asked: Any = {"messages": HI, **ASKED}
    with anthropic.Anthropic(base_url=guarded_server, api_key="wrong" * 5, max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**asked)
        assert refused.value.type == "authentication_error"
        header = {"x-api-key": USER_KEY}
        assert client.messages.create(extra_headers=header, **asked).content
    with anthropic.Anthropic(base_url=guarded_server, api_key=USER_KEY, max_retries=0) as client:
        assert client.messages.create(**asked).content


@pytest.mark.parametrize("stream", [False, True])
def test_a_sleeping_model_wakes_for_the_client(
    server: str, client: anthropic.Anthropic, stream: bool
) -> None:
    awake = text_of(client.messages.create(messages=HI, **ASKED))
    with httpx2.Client(base_url=server, timeout=60) as http:
        assert http.post("/sleep").status_code == 200
        assert http.get("/is_sleeping").json()["is_sleeping"] is True
        assert client.messages.count_tokens(messages=HI, model="Qwen").input_tokens
        assert http.get("/is_sleeping").json()["is_sleeping"] is True
    if not stream:
        assert text_of(client.messages.create(messages=HI, **ASKED)) == awake
        return
    with client.messages.stream(messages=HI, **ASKED) as woken:
        assert "".join(woken.text_stream) == awake
