"""Anthropic's messages: answers, the very bytes of streams, errors and keys."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from actors.errors import (
    ContextLengthExceeded,
    EngineDied,
    HeldAsleep,
    ModelNotFound,
    PayloadTooLarge,
    QueueFull,
)
from actors.protocol import FinishReason, MessageForm, TokenEvent
from serve_app.anthropic.answers import MessageAnswer
from serve_app.anthropic.requests import parse_messages
from serve_app.config.http import HttpSettings
from serve_app.config.keys import read_keys
from serve_app.front.app import build_asgi
from serve_app.front.dialects import ANTHROPIC
from serve_app.front.errors import InvalidApiKey, NotJson, RequestTimeout, describe
from serve_app.front.stream import event_stream
from tests.fakes import PROMPT_TOKENS, FakeModel
from tests.on_loop import on_loop
from tests.unit.asgi_client import client_of
from tests.unit.serve_app.front.front import CHAT, CHAT_BODY, HI, count_ids, is_error, serving

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY = {"model": "fake", "max_tokens": 9, "messages": HI}
TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USAGE = {
    "input_tokens": PROMPT_TOKENS,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 3,
}


@pytest.fixture(autouse=True)
def ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of messages and calls are 0, 1, 2, ..."""
    count_ids(monkeypatch, "serve_app.anthropic.answers.uuid4")


def is_anthropic_s(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def events_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def whole_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, as Anthropic's clients put it together."""
    start, *between, delta, stop = events
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = start["message"]
    calls: dict[int, str] = {}
    for event in between:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block = message["content"][-1]
            change = dict(event["delta"])
            assert change.pop("type").startswith(
                "input_json" if block["type"] == "tool_use" else block["type"]
            )
            ((name, value),) = change.items()
            if name == "partial_json":
                calls[event["index"]] = calls.get(event["index"], "") + value
            else:
                block[name] += value
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
    for index, text in calls.items():
        message["content"][index]["input"] = json.loads(text)
    return {**message, **delta["delta"], "usage": delta["usage"]}


# --- answers ---


def test_message(client, model):
    response = client.post(MESSAGES, json=BODY)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }
    (request,) = model.requests
    assert (request.n, request.stream, request.sampling.max_tokens) == (1, False, 9)


def test_stream_byte_by_byte(client):
    assert client.post(MESSAGES, json={**BODY, "stream": True}).text == (
        "event: message_start\n"
        'data: {"type":"message_start","message":{"id":"msg_0","type":"message","role":"assistant",'
        '"model":"fake","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":'
        f'{PROMPT_TOKENS},"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
        '"output_tokens":1}}}\n\n'
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":","}}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" world"}}\n\n'
        "event: content_block_stop\n"
        'data: {"type":"content_block_stop","index":0}\n\n'
        "event: message_delta\n"
        'data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        f'"usage":{{"input_tokens":{PROMPT_TOKENS},"cache_creation_input_tokens":0,'
        '"cache_read_input_tokens":0,"output_tokens":3}}\n\n'
        "event: message_stop\n"
        'data: {"type":"message_stop"}\n\n'
    )


def test_stream_of_thinking_text_and_calls_byte_by_byte(model):
    model.form = MessageForm("think", "qwen", in_reasoning=True)
    model.pieces = ("I add", ".</think>", "\n\nSo:\n", CALL, "\n" + CALL, "\nDone")
    with serving(model) as client:
        text = client.post(MESSAGES, json={**BODY, "tools": TOOLS, "stream": True}).text
    _, *events, _, _ = text.split("event: ")[1:]
    assert events == [
        f"{json.loads(data)['type']}\ndata: {data}\n\n"
        for data in (
            '{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"",'
            '"signature":""}}',
            '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"I add"}}',
            '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"."}}',
            '{"type":"content_block_stop","index":0}',
            '{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}',
            '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"So:"}}',
            '{"type":"content_block_stop","index":1}',
            '{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"toolu_1",'
            '"name":"add","input":{}}}',
            '{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta",'
            '"partial_json":"{\\"a\\": 1}"}}',
            '{"type":"content_block_stop","index":2}',
            '{"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"toolu_2",'
            '"name":"add","input":{}}}',
            '{"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta",'
            '"partial_json":"{\\"a\\": 1}"}}',
            '{"type":"content_block_stop","index":3}',
            '{"type":"content_block_start","index":4,"content_block":{"type":"text","text":""}}',
            '{"type":"content_block_delta","index":4,"delta":{"type":"text_delta","text":"Done"}}',
            '{"type":"content_block_stop","index":4}',
        )
    ]


@pytest.mark.parametrize("parallel", [True, False])
def test_whole_message_is_what_the_stream_makes(model, parallel):
    model.form = MessageForm("think", "qwen", in_reasoning=True)
    model.pieces = ("I add.</th", "ink>So:", CALL, "and", CALL, "\n")
    body = {
        **BODY,
        "tools": TOOLS,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": not parallel},
    }
    with serving(model) as client:
        whole = client.post(MESSAGES, json=body).json()
        streamed = whole_of(events_of(client.post(MESSAGES, json={**body, "stream": True})))
    assert [block["type"] for block in whole["content"]] == (
        ["thinking", "text", "tool_use", "text", "tool_use"]
        if parallel
        else ["thinking", "text", "tool_use", "text"]
    )
    assert whole["content"][2]["input"] == {"a": 1}
    assert whole["stop_reason"] == "tool_use"
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_texts_of_one_block_are_lines_where_a_call_between_is_not_wanted(model, parallel, stream):
    model.form = MessageForm(tools="qwen")
    model.pieces = ("So:\n", CALL, "\nand", " then\n", CALL, "\n\n", "done")
    choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
    body = {**BODY, "tools": TOOLS, "tool_choice": choice, "stream": stream}
    with serving(model) as client:
        response = client.post(MESSAGES, json=body)
        message = whole_of(events_of(response)) if stream else response.json()
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    assert texts == (["So:", "and then", "done"] if parallel else ["So:", "and then\ndone"])


@pytest.mark.parametrize(
    ("finish", "stop_reason", "pieces", "expected"),
    [
        (FinishReason.STOP, None, ("a",), ("end_turn", None)),
        (FinishReason.STOP, 7, ("a",), ("end_turn", None)),
        (FinishReason.STOP, "END", ("a",), ("stop_sequence", "END")),
        (FinishReason.STOP, "END", (CALL,), ("tool_use", "END")),
        (FinishReason.LENGTH, None, ("a",), ("max_tokens", None)),
        (FinishReason.LENGTH, None, (CALL,), ("max_tokens", None)),
        (FinishReason.ABORT, None, ("a",), ("max_tokens", None)),
    ],
)
def test_stop_reasons(finish, stop_reason, pieces, expected):
    model = FakeModel(pieces=pieces, finish_reason=finish, stop_reason=stop_reason)
    model.form = MessageForm(tools="qwen")
    body = {**BODY, "tools": TOOLS}
    with serving(model) as client:
        whole = client.post(MESSAGES, json=body).json()
        *_, delta, _ = events_of(client.post(MESSAGES, json={**body, "stream": True}))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == expected


def test_message_of_nothing_has_no_block():
    with serving(FakeModel(pieces=("",))) as client:
        assert client.post(MESSAGES, json=BODY).json()["content"] == []
        events = events_of(client.post(MESSAGES, json={**BODY, "stream": True}))
    assert [event["type"] for event in events] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


def answer() -> MessageAnswer:
    return MessageAnswer(parse_messages({**BODY, "stream": True}), "fake")


def event(text: str, finish: FinishReason | None = None, cached: int = 0) -> TokenEvent:
    return TokenEvent(0, text, (1,), 9, finish_reason=finish, cached_tokens=cached)


def test_cached_tokens_are_counted_apart():
    message = answer()
    (start, *_) = message.chunks(0, event("a"))
    assert start["message"]["usage"]["input_tokens"] == 9
    *_, delta, _ = message.chunks(0, event("b", FinishReason.STOP, cached=4))
    assert delta["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
    }


@on_loop
async def test_pings_until_the_first_event_and_while_a_stream_stands_still():
    first, second = asyncio.Event(), asyncio.Event()

    async def generation() -> AsyncIterator[TokenEvent]:
        await first.wait()
        yield event("a")
        await second.wait()
        yield event("b", FinishReason.STOP)

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    frames = event_stream([generation()], answer(), 0.001, 0.001, "r", ANTHROPIC)
    assert [await anext(frames) for _ in range(2)] == [ping] * 2
    first.set()
    names = []
    while names[-3:] != [b"content_block_delta", b"ping", b"ping"]:
        names.append((await anext(frames)).partition(b"\n")[0].removeprefix(b"event: "))
    second.set()
    rest = [frame async for frame in frames if frame != ping]
    assert rest[-1] == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def test_tokens_are_counted_without_a_replica(client, model):
    response = client.post(COUNT, json={"model": "fake", "messages": HI})
    assert response.json() == {"input_tokens": 2}
    assert model.requests == []
    is_anthropic_s(client.post(COUNT, json={"messages": []}), 400, "invalid_request_error")
    long = [{"role": "user", "content": "a" * 2**20}]
    is_anthropic_s(client.post(COUNT, json={"messages": long}), 400, "invalid_request_error")


# --- errors ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (ContextLengthExceeded("too long", "prompt"), 400, "invalid_request_error", None),
        (QueueFull("full", 2.5), 429, "rate_limit_error", "3"),
        (HeldAsleep("held", 30.0), 503, "overloaded_error", "30"),
        (EngineDied("died"), 500, "api_error", None),
        (RuntimeError("inside"), 500, "api_error", None),
    ],
)
def test_error_before_the_first_token_has_its_status(
    client, model, stream, error, status, kind, retry_after
):
    model.fail_first = error
    response = client.post(MESSAGES, json={**BODY, "stream": stream})
    assert "inside" not in is_anthropic_s(response, status, kind)
    assert response.headers.get("retry-after") == retry_after
    # On other routes errors stay OpenAI's.
    model.fail_first = QueueFull("full", 1.0)
    is_error(client.post(CHAT, json=CHAT_BODY), 429, "queue_full")


def test_error_in_mid_stream_is_the_last_event(client, model):
    model.fail_later = EngineDied("the engine died")
    response = client.post(MESSAGES, json={**BODY, "stream": True})
    assert response.text.endswith(
        "event: error\n"
        'data: {"type":"error","error":{"type":"api_error","message":"the engine died"}}\n\n'
    )
    names = [event["type"] for event in events_of(response)]
    assert names == ["message_start", "content_block_start", "content_block_delta", "error"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ModelNotFound("x"), 404, "not_found_error"),
        (PayloadTooLarge("x"), 413, "request_too_large"),
        (RequestTimeout("x"), 408, "timeout_error"),
        (InvalidApiKey("x"), 401, "authentication_error"),
        (NotJson("x"), 415, "invalid_request_error"),
    ],
)
def test_types_follow_from_the_status(error, status, kind):
    problem = describe(error, "r", ANTHROPIC)
    assert problem.status == status
    assert problem.body == {"type": "error", "error": {"type": kind, "message": "x"}}
    assert problem.headers == describe(error, "r").headers


def test_refusals_on_the_route_are_anthropic_s(client, model):
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    refused = client.post(MESSAGES, json={**BODY, "messages": [image]})
    message = is_anthropic_s(refused, 400, "invalid_request_error")
    assert message.startswith("messages[0].content[0] may only be of type ")
    assert message.endswith(', found "image"')
    unknown = client.post(MESSAGES, json={**BODY, "model": "claude"})
    is_anthropic_s(unknown, 404, "not_found_error")
    is_anthropic_s(client.post(MESSAGES, content=b"{"), 400, "invalid_request_error")
    is_anthropic_s(client.get(MESSAGES), 405, "invalid_request_error")
    is_error(client.get(f"{MESSAGES}/batches"), 404, "not_found")
    assert model.requests == []


@on_loop
async def test_work_is_limited_as_that_of_chats() -> None:
    model = FakeModel()
    model.gate = asyncio.Event()
    settings = HttpSettings(
        max_continuations=1, max_continuations_in_flight=1, max_share_per_key=1.0
    )
    transport = httpx.ASGITransport(build_asgi({"fake": model}, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        first = asyncio.create_task(client.post(MESSAGES, json=BODY))
        while not model.requests:
            await asyncio.sleep(0)
        busy = await client.post(MESSAGES, json=BODY)
        model.gate.set()
        assert (await first).status_code == 200
    is_anthropic_s(busy, 429, "rate_limit_error")
    assert busy.headers["retry-after"]


# --- keys ---

USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_key_is_taken_from_either_header_on_this_route_alone(path):
    keys = read_keys(
        None, None, {"SLEEPSERVE_API_KEYS": USER, "SLEEPSERVE_ADMIN_KEYS": f"ops:{ADMIN}"}
    )
    app = build_asgi({"fake": FakeModel()}, HttpSettings(), keys=keys)
    with client_of(app) as client:

        def asked(**headers: str) -> Any:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return client.post(path, json=BODY, headers=named)

        for headers in (
            {"x_api_key": USER},
            {"x_api_key": ADMIN},
            {"authorization": f"Bearer {USER}"},
            {"x_api_key": USER, "authorization": "Bearer EMPTY"},
            {"x_api_key": "", "authorization": f"Bearer {USER}"},
            {"x_api_key": " \t", "authorization": f"Bearer {USER}"},
        ):
            assert asked(**headers).status_code == 200
        for headers in ({}, {"x_api_key": ""}, {"x_api_key": " ", "authorization": "Bearer "}):
            without = is_anthropic_s(asked(**headers), 401, "authentication_error")
            assert without == (
                "this server needs a key: send Authorization: Bearer KEY, or x-api-key: KEY"
            )
        wrong = is_anthropic_s(
            asked(x_api_key="", authorization="Bearer " + "wrong" * 5), 401, "authentication_error"
        )
        assert wrong == "the key of the Authorization header is not one of this server's"
        wrong = is_anthropic_s(asked(x_api_key="wrong" * 5), 401, "authentication_error")
        assert wrong == "the key of the x-api-key header is not one of this server's"
        elsewhere = client.post(CHAT, json=CHAT_BODY, headers={"x-api-key": USER})
        is_error(elsewhere, 401, "invalid_api_key")
