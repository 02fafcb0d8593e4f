"""OpenAI's own client at /v1/responses, and its own types as the measure of what is streamed."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

SORT: Any = {
    "type": "function",
    "name": "sort",
    "parameters": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "bc"]}},
        "required": ["kind"],
        "additionalProperties": False,
    },
    "strict": False,
}
ASKED: Any = {"model": "Qwen", "input": "hi", "max_output_tokens": 8, "temperature": 0}
FORCED: Any = {**ASKED, "max_output_tokens": 64, "tools": [SORT], "tool_choice": "required"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_text(client: openai.OpenAI) -> None:
    whole = client.responses.create(instructions="Be brief.", **ASKED)
    assert whole.output_text
    assert whole.incomplete_details is not None
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(instructions="Be brief.", **ASKED) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_async(server: str) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="EMPTY") as client:
            answers = await asyncio.gather(*(client.responses.create(**ASKED) for _ in range(8)))
            assert len({answer.output_text for answer in answers}) == 1
            stream = await client.responses.create(stream=True, **ASKED)
            names = [event.type async for event in stream]
            assert (names[0], names[-1]) == ("response.created", "response.incomplete")

    asyncio.run(scenario())


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    whole = client.responses.create(**FORCED)
    (call,) = whole.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) in ({"kind": "a"}, {"kind": "bc"})
    with client.responses.stream(**FORCED) as stream:
        list(stream)
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sorted"}
    conversation: Any = [{"role": "user", "content": "hi"}, call, result]
    assert client.responses.create(**{**ASKED, "input": conversation}, tools=[SORT]).output_text


def test_answers_have_openai_s_types(server: str) -> None:
    with httpx2.Client(base_url=f"{server}/v1", timeout=60) as http:
        for body in (ASKED, FORCED):
            Response.model_validate(http.post("/responses", json=body).json(), strict=True)
            *events, end = http.post("/responses", json={**body, "stream": True}).text.split("\n\n")
            assert end == ""
            for event in events:
                name, data = event.split("\n")
                value = json.loads(data.removeprefix("data: "))
                assert name == f"event: {value['type']}"
                EVENTS.validate_python(value, strict=True)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(previous_response_id="resp_1", **ASKED)
    assert (refused.value.code, refused.value.param) == (
        "unsupported_parameter",
        "previous_response_id",
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt", input="hi")


@pytest.mark.parametrize("stream", [False, True])
def test_a_sleeping_model_wakes_for_the_client(
    server: str, client: openai.OpenAI, stream: bool
) -> None:
    awake = client.responses.create(**ASKED).output_text
    with httpx2.Client(base_url=server, timeout=60) as http:
        assert http.post("/sleep").status_code == 200
        assert http.get("/is_sleeping").json()["is_sleeping"] is True
    if not stream:
        assert client.responses.create(**ASKED).output_text == awake
        return
    with client.responses.stream(
        **ASKED
    ) as woken:  # cut off, so there is no final one for this client
        deltas = [event.delta for event in woken if event.type == "response.output_text.delta"]
    assert "".join(deltas) == awake
