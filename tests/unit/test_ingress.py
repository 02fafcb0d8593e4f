"""The routes over a FakeModel: shapes, statuses, headers, control, and what clients see."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from starlette.testclient import TestClient

from actors.errors import (
    ContextLengthExceeded,
    DrainTimeout,
    EngineDied,
    HeldAsleep,
    InvalidRequest,
    QueueFull,
    WakeTimeout,
)
from actors.protocol import (
    ChatPrompt,
    FinishReason,
    Grammar,
    GrammarKind,
    MessageForm,
    ReplicaState,
    SamplingParams,
    SleepCommand,
    SleepMode,
)
from serve_app.ingress import HttpSettings, build_asgi
from tests.fakes import PROMPT_TOKENS, FakeModel

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
CHAT_BODY = {"model": "fake", "messages": HI}
TEXT_BODY = {"model": "fake", "prompt": "hi"}
DOCUMENTED_EXTRAS = {
    "stop_reason",
    "reasoning_content",
    "root",
    "parent",
    "max_model_len",
    "status",
}


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@contextmanager
def serving(*models: FakeModel, **settings: Any) -> Iterator[TestClient]:
    served = {model.info.model_id: model for model in models}
    with TestClient(build_asgi(served, HttpSettings(**settings))) as client:
        yield client


@pytest.fixture
def client(model: FakeModel) -> Iterator[TestClient]:
    with serving(model) as client:
        yield client


def extras(value: object, path: str = "") -> list[str]:
    """Every key that openai's types do not know and we do not document."""
    if isinstance(value, BaseModel):
        unknown = [
            f"{path}.{key}" for key in value.model_extra or {} if key not in DOCUMENTED_EXTRAS
        ]
        fields = [extras(getattr(value, key), f"{path}.{key}") for key in value.model_fields_set]
        return unknown + [each for some in fields for each in some]
    if isinstance(value, list):
        return [each for item in value for each in extras(item, f"{path}[]")]
    return []


def conforms(kind: type[BaseModel], data: dict[str, Any]) -> None:
    if kind is Completion:
        # A chunk in mid-stream has finish_reason null, which openai's type does not say.
        choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in data["choices"]]
        data = {**data, "choices": choices}
    assert extras(kind.model_validate(data, strict=True)) == []


def is_error(response: Any, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["param"] == param
    assert response.headers["x-request-id"]
    return body["error"]


def works(client: TestClient) -> None:
    response = client.post(CHAT, json=CHAT_BODY)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "Hello, world"


def chunks_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


# --- chat ---


def test_chat(client, model):
    response = client.post(CHAT, json={**CHAT_BODY, "n": 2, "max_tokens": 9, "temperature": 0})
    body = response.json()
    conforms(ChatCompletion, body)
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello, world"}
    assert body["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 6,
        "total_tokens": PROMPT_TOKENS + 6,
    }
    (request,) = model.requests
    assert request.prompt == ChatPrompt(messages=({"role": "user", "content": "hi"},))
    assert request.sampling == SamplingParams(max_tokens=9, temperature=0.0)
    assert (request.n, request.stream, request.echo) == (2, False, False)
    assert model.closed == []


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream(client, model, include_usage):
    body = {**CHAT_BODY, "stream": True, "n": 2}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    response = client.post(CHAT, json=body)
    chunks = chunks_of(response)
    for chunk in chunks:
        conforms(ChatCompletionChunk, chunk)
        assert ("usage" in chunk) is include_usage
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if include_usage:
        trailer = chunks.pop()
        assert trailer["choices"] == []
        assert trailer["usage"]["completion_tokens"] == 6
        assert {chunk["usage"] for chunk in chunks} == {None}
    assert texts_of(chunks) == {0: "Hello, world", 1: "Hello, world"}
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert model.requests[0].stream


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client, stream):
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = client.post(CHAT, json=body)
    if stream:
        chunks = chunks_of(response)
        for chunk in chunks:
            conforms(ChatCompletionChunk, chunk)
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        entries = [entry for each in logprobs if each for entry in each["content"]]
    else:
        conforms(ChatCompletion, response.json())
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["Hello", ",", " world"]
    assert entries[0]["bytes"] == list(b"Hello")
    assert entries[0]["logprob"] == -0.5
    # -inf is no JSON
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -9999.0]


def test_chat_logprobs_without_top(client):
    entries = client.post(CHAT, json={**CHAT_BODY, "logprobs": True}).json()["choices"][0][
        "logprobs"
    ]
    assert {len(entry["top_logprobs"]) for entry in entries["content"]} == {0}


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        (FinishReason.STOP, None, {"finish_reason": "stop"}),
        (FinishReason.STOP, "END", {"finish_reason": "stop", "stop_reason": "END"}),
        (FinishReason.STOP, 7, {"finish_reason": "stop", "stop_reason": 7}),
        (FinishReason.LENGTH, None, {"finish_reason": "length"}),
        (FinishReason.ABORT, None, {"finish_reason": "length", "stop_reason": "abort"}),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (TEXT, TEXT_BODY)])
@pytest.mark.parametrize("stream", [False, True])
def test_finish_reasons(finish, stop_reason, expected, path, body, stream):
    with serving(FakeModel(finish_reason=finish, stop_reason=stop_reason)) as client:
        response = client.post(path, json={**body, "stream": stream})
        answer = chunks_of(response)[-1] if stream else response.json()
    kind = ChatCompletion if path == CHAT else Completion
    conforms(ChatCompletionChunk if stream and path == CHAT else kind, answer)
    (choice,) = answer["choices"]
    assert {
        key: choice[key] for key in ("finish_reason", "stop_reason") if key in choice
    } == expected


# --- reasoning and tool calls ---

SUM = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADDING = (*("I", " add", ".\n", "</th", "ink>", "\n\n", "So", ":\n", "<tool_", "call>"),)
ADDED = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_reasoning_and_tool_calls(model, stream, parallel, logprobs):
    model.form = MessageForm("think", "qwen", in_reasoning=True)
    model.pieces = (*ADDING, ADDED, "</tool_call>", "\n<tool_call>", ADDED, "</tool_call>")
    body = {**CHAT_BODY, "tools": [SUM], "parallel_tool_calls": parallel, "stream": stream}
    if logprobs:
        body |= {"logprobs": True}
    with serving(model) as client:
        response = client.post(CHAT, json=body)
    if stream:
        chunks = chunks_of(response)
        for chunk in chunks:
            conforms(ChatCompletionChunk, chunk)
        choices = [chunk["choices"][0] for chunk in chunks]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": ""}
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        finish = [choice["finish_reason"] for choice in choices]
        assert finish[:-1] == [None] * (len(finish) - 1)
        entries = [
            e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]
        ]
        # Each as soon as it is clear what it is.
        assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == [
            "I",
            " add",
            ".",
        ]
    else:
        conforms(ChatCompletion, response.json())
        (choice,) = response.json()["choices"]
        message = choice["message"]
        reasoning, content = message["reasoning_content"], message["content"]
        calls, finish = message["tool_calls"], [choice["finish_reason"]]
        entries = (choice["logprobs"] or {}).get("content", [])
    assert (reasoning, content) == ("I add.", "So:")
    assert len({call.pop("id") for call in calls}) == len(calls)
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert calls == [{"type": "function", "function": function}] * (2 if parallel else 1)
    assert finish[-1] == "tool_calls"
    assert [entry["token"] for entry in entries] == (list(model.pieces) if logprobs else [])


def test_content_is_null_where_there_is_only_reasoning(model):
    model.form = MessageForm("think", in_reasoning=True)
    model.finish_reason = FinishReason.LENGTH
    with serving(model) as client:
        (choice,) = client.post(CHAT, json=CHAT_BODY).json()["choices"]
    assert choice["message"]["reasoning_content"] == "Hello, world"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"


def test_calls_are_text_to_a_client_without_tools(model):
    model.form = MessageForm(tools="qwen")
    model.pieces = ("<tool_call>", ADDED, "</tool_call>")
    with serving(model) as client:
        for body in (CHAT_BODY, {**CHAT_BODY, "tools": [SUM], "tool_choice": "none"}):
            (choice,) = client.post(CHAT, json=body).json()["choices"]
            assert choice["message"]["content"] == "".join(model.pieces)
            assert choice["finish_reason"] == "stop"


def test_continuations_of_a_chat_are_told_apart(model):
    model.form = MessageForm("think", in_reasoning=True)
    model.pieces = ("I add", ".</think>", "4")
    with serving(model) as client:
        chunks = chunks_of(client.post(CHAT, json={**CHAT_BODY, "n": 3, "stream": True}))
    reasoning: dict[int, str] = {}
    for choice in (chunk["choices"][0] for chunk in chunks):
        piece = choice["delta"].get("reasoning_content", "")
        reasoning[choice["index"]] = reasoning.get(choice["index"], "") + piece
    assert reasoning == dict.fromkeys(range(3), "I add.")
    assert texts_of(chunks) == dict.fromkeys(range(3), "4")


# --- completions ---


@pytest.mark.parametrize(
    ("prompt", "count"), [("hi", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2], [3]], 3)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_prompts(client, model, prompt, count, stream):
    body = {**TEXT_BODY, "prompt": prompt, "n": 2, "stream": stream}
    response = client.post(TEXT, json=body)
    if stream:
        chunks = chunks_of(response)
        for chunk in chunks:
            conforms(Completion, chunk)
        texts = texts_of(chunks)
    else:
        conforms(Completion, response.json())
        assert response.json()["id"].startswith("cmpl-")
        assert response.json()["usage"]["prompt_tokens"] == count * PROMPT_TOKENS
        assert response.json()["usage"]["completion_tokens"] == count * 2 * 3
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
    assert texts == dict.fromkeys(range(count * 2), "Hello, world")
    assert len({request.request_id for request in model.requests}) == count


@pytest.mark.parametrize("stream", [False, True])
def test_completion_echo(client, stream):
    body = {**TEXT_BODY, "prompt": ["one ", "two "], "echo": True, "stream": stream}
    response = client.post(TEXT, json=body)
    if stream:
        texts = texts_of(chunks_of(response))
    else:
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
        assert response.json()["usage"]["completion_tokens"] == 6
    assert texts == {0: "one Hello, world", 1: "two Hello, world"}


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(client, stream):
    response = client.post(TEXT, json={**TEXT_BODY, "logprobs": 2, "stream": stream})
    if stream:
        every = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(response)]
        logprobs = {key: [value for each in every for value in each[key]] for key in every[0]}
    else:
        conforms(Completion, response.json())
        logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["Hello", ",", " world"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{piece: -0.5, "other": -9999.0} for piece in ("Hello", ",", " world")],
        "text_offset": [0, 5, 6],
    }


def test_completion_logprobs_0_has_the_sampled_token(client):
    response = client.post(TEXT, json={**TEXT_BODY, "logprobs": 0})
    assert response.json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"Hello": -0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_completion_echo_with_logprobs_begins_with_the_prompt_s(client, stream):
    """What lm-eval reads: `token_logprobs[ctxlen:-1]` and `top_logprobs`, null for the first token."""
    body = {**TEXT_BODY, "echo": True, "logprobs": 1, "stream": stream}
    response = client.post(TEXT, json=body)
    if stream:
        every = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(response)]
        logprobs = {key: [value for each in every for value in each[key]] for key in every[0]}
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["hi", "Hello", ",", " world"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"Hello": -0.5}, {",": -0.5}, {" world": -0.5}],
        "text_offset": [0, 2, 7, 8],
    }


def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**TEXT_BODY, "stream": True, "stream_options": options}
    *chunks, trailer = chunks_of(client.post(TEXT, json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert trailer["usage"] == chunks[-1]["usage"]


def test_completion_stream_usage(client):
    body = {**TEXT_BODY, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, trailer = chunks_of(client.post(TEXT, json=body))
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert trailer["choices"] == []
    assert trailer["usage"]["total_tokens"] == PROMPT_TOKENS + 3


# --- the seed's form ---


def test_seed_form_streams_plain_text_by_default(client, model):
    response = client.post("/completions", json={})
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.text == "The future of artificial intelligence isHello, world"
    assert model.requests[0].sampling == SamplingParams(max_tokens=50, temperature=0.0)


def test_seed_form_without_stream(client):
    body = {"prompt": "Say ", "max_tokens": 5, "stream": False}
    assert client.post("/completions", json=body).json() == {"output": "Say Hello, world"}


def test_seed_form_without_a_body(client):
    assert client.post("/completions").text.endswith("Hello, world")


def test_seed_form_errors_are_openai_s(client, model):
    is_error(
        client.post("/completions", json={"max_tokens": "many"}),
        400,
        "invalid_request_error",
        "max_tokens",
    )
    model.fail_first = QueueFull("full", 2)
    is_error(client.post("/completions", json={}), 429, "queue_full")
    model.fail_first = None
    model.fail_later = EngineDied("died")
    with pytest.raises(EngineDied):  # plain text cannot say it: the connection is cut
        client.post("/completions", json={})


def test_banner(client):
    assert client.get("/").json()["message"] == "sleepserve is running."


# --- refusals ---

BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"[1, 2]",
    b"3",
    b"null",
    b'"hi"',
    b'{"temperature": NaN}',
    b'{"model": "fake", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:24]))
def test_bad_body_is_400_and_the_next_request_works(client, model, path, body):
    is_error(client.post(path, content=body), 400, "invalid_request_error")
    assert model.requests == []
    works(client)


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (CHAT, {**CHAT_BODY, "temperature": "hot"}, "invalid_request_error", "temperature"),
        (CHAT, {"model": "fake"}, "invalid_request_error", "messages"),
        (CHAT, {**CHAT_BODY, "tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        (TEXT, {"model": "fake"}, "invalid_request_error", "prompt"),
        (TEXT, {**TEXT_BODY, "suffix": "x"}, "unsupported_parameter", "suffix"),
        (TEXT, {**TEXT_BODY, "n": 129}, "invalid_request_error", "n"),
        (TEXT, {**TEXT_BODY, "prompt": ["a"] * 1025}, "invalid_request_error", "prompt"),
        ("/sleep", {"level": 3}, "invalid_request_error", "level"),
        ("/sleep", {"mode": "later"}, "invalid_request_error", "mode"),
        ("/wake_up", {"tags": ["kv"]}, "invalid_request_error", "tags[0]"),
    ],
)
def test_wrong_field_is_400_and_the_next_request_works(client, model, path, body, code, param):
    is_error(client.post(path, json=body), 400, code, param)
    assert model.requests == []
    assert model.orders == []
    works(client)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, {"POST"}),
        ("PUT", TEXT, {"POST"}),
        ("GET", "/sleep", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/health", {"GET", "HEAD", "POST"}),
    ],
)
def test_wrong_method_is_405_with_allow(client, method, path, allow):
    response = client.request(method, path)
    is_error(response, 405, "method_not_allowed")
    assert set(response.headers["allow"].split(", ")) == allow


@pytest.mark.parametrize(
    "path", ["/nowhere", "/v1", "/v1/responses", "/v1/models/", "/v1/completions/"]
)
def test_unknown_path_is_404(client, path):
    response = client.post(path, json={}) if "completions" in path else client.get(path)
    code = "model_not_found" if path == "/v1/models/" else "not_found"
    is_error(response, 404, code, "model" if path == "/v1/models/" else None)


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_limit_is_413(model, declared):
    taken = []

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            taken.append(1)
            yield b" " * 1000

    with serving(model, max_body_bytes=5000) as client:
        content = b" " * 100_000 if declared else pieces()
        is_error(client.post(CHAT, content=content), 413, "payload_too_large")
        works(client)


def test_body_over_the_limit_is_not_read_to_its_end(model):
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": b" " * 1000, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 413

    app = build_asgi({"fake": model}, HttpSettings(max_body_bytes=5000))
    asyncio.run(app(scope_of(CHAT), receive, send))
    assert received == 6


def test_model_may_be_left_out_when_there_is_one(client):
    assert client.post(CHAT, json={"messages": HI}).json()["model"] == "fake"
    with serving(FakeModel("a"), FakeModel("b/c")) as two:
        error = is_error(
            two.post(CHAT, json={"messages": HI}), 400, "invalid_request_error", "model"
        )
        assert "a, b/c" in error["message"]
        assert two.post(CHAT, json={"messages": HI, "model": "b/c"}).json()["model"] == "b/c"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.post(CHAT, json={**CHAT_BODY, "model": "gpt"}),
        lambda client: client.post(TEXT, json={**TEXT_BODY, "model": ""}),
        lambda client: client.get("/v1/models/gpt"),
        lambda client: client.post("/sleep?model=gpt"),
        lambda client: client.post("/wake_up", json={"model": "gpt"}),
        lambda client: client.get("/is_sleeping?model=gpt"),
    ],
)
def test_unknown_model_is_404(client, ask):
    is_error(ask(client), 404, "model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ContextLengthExceeded("too long", "prompt"), 400, "context_length_exceeded", None),
        (QueueFull("full", 2.5), 429, "queue_full", "3"),
        (WakeTimeout("slow", 5.0), 503, "wake_failed", "5"),
        (HeldAsleep("held", 30.0), 503, "model_asleep", "30"),
        (EngineDied("died"), 500, "engine_dead", None),
        (RuntimeError("inside"), 500, "internal_error", None),
    ],
)
def test_error_before_the_first_token_has_its_status(
    client, model, stream, error, status, code, retry_after
):
    model.fail_first = error
    for path, body in ((CHAT, CHAT_BODY), (TEXT, TEXT_BODY)):
        response = client.post(path, json={**body, "stream": stream})
        shown = is_error(response, status, code, getattr(error, "param", None))
        assert "inside" not in shown["message"]
        assert response.headers.get("retry-after") == retry_after
        assert response.headers["content-type"] == "application/json"
    model.fail_first = None
    works(client)


@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (TEXT, TEXT_BODY)])
def test_prescribed_form_reaches_the_model(client, model, path, body):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    assert client.post(path, json={**body, "response_format": form}).status_code == 200
    asked = model.requests[-1].sampling.grammar
    assert asked == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}', "response_format")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_request_error"),
        ({"guided_json": "{"}, "guided_json", "invalid_request_error"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "unsupported_parameter",
        ),
    ],
)
def test_form_that_cannot_be_is_400_and_asks_no_replica(client, model, stream, fields, param, code):
    for path, body in ((CHAT, CHAT_BODY), (TEXT, TEXT_BODY)):
        is_error(client.post(path, json={**body, **fields, "stream": stream}), 400, code, param)
    assert model.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_that_a_replica_refuses_is_400(client, model, stream):
    model.fail_first = InvalidRequest("guided_regex is no valid regular expression", "guided_regex")
    body = {**TEXT_BODY, "guided_regex": "[", "stream": stream}
    is_error(client.post(TEXT, json=body), 400, "invalid_request_error", "guided_regex")


def test_error_in_mid_stream_is_an_event(client, model):
    model.fail_later = EngineDied("the engine died")
    *chunks, error = chunks_of(client.post(CHAT, json={**CHAT_BODY, "stream": True}))
    assert texts_of(chunks) == {0: "Hello"}
    assert error["error"]["code"] == "engine_dead"
    model.fail_later = None
    works(client)


def test_one_failed_prompt_fails_the_batch_and_ends_the_others(client, model):
    model.fail_later = EngineDied("the engine died")
    is_error(client.post(TEXT, json={**TEXT_BODY, "prompt": ["a", "b"]}), 500, "engine_dead")
    assert len(model.closed) == 2


def test_half_an_answer_is_an_error(client, model):
    model.stop_short = True
    is_error(client.post(CHAT, json=CHAT_BODY), 500, "replica_failed")


def test_answer_that_takes_too_long(model):
    with serving(model, request_timeout_s=0.01) as client:
        model.gate = asyncio.Event()
        response = client.post(CHAT, json=CHAT_BODY)
        is_error(response, 408, "request_timeout")
        assert response.headers["x-should-retry"] == "false"
        assert len(model.closed) == 1
        model.gate = None
        works(client)


# --- request ids ---


@pytest.mark.parametrize("given", ["abc", "0f8fad5b-d9cb-469f", "a" * 128, "trace:1/2+3=@x_y.z"])
def test_request_id_is_kept(client, given):
    for path in ("/health", "/nowhere", "/v1/models"):
        assert client.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", ["", "a" * 129, "a b", "a;b", "<script>", "a\u00e9".encode("latin-1")]
)
def test_request_id_that_is_not_sane_is_replaced(client, given):
    got = client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
    assert got != given
    assert len(got) == 32


def test_request_id_header_may_be_left_to_the_proxy(model):
    app = build_asgi({"fake": model}, HttpSettings(), send_request_id=False)
    with TestClient(app) as client:
        assert "x-request-id" not in client.get("/health").headers


def test_generations_have_ids_of_their_own(client, model):
    for _ in range(2):
        client.post(CHAT, json=CHAT_BODY, headers={"x-request-id": "same"})
    assert len({request.request_id for request in model.requests}) == 2


# --- models ---


def test_models(client):
    body = client.get("/v1/models").json()
    assert body["object"] == "list"
    (card,) = body["data"]
    conforms(Model, card)
    assert card == {
        "id": "fake",
        "object": "model",
        "created": 1700000000,
        "owned_by": "sleepserve",
        "root": "checkpoint-of-fake",
        "parent": None,
        "max_model_len": 4096,
        "status": {"value": "loaded"},
    }
    assert client.get("/v1/models/fake").json() == card


def test_model_whose_name_has_slashes():
    with serving(FakeModel("org/name")) as client:
        assert client.get("/v1/models/org/name").json()["id"] == "org/name"


def test_max_model_len_before_there_is_a_replica():
    with serving(FakeModel(states=[])) as client:
        assert client.get("/v1/models/fake").json()["max_model_len"] is None


S = ReplicaState


@pytest.mark.parametrize(
    ("states", "value"),
    [
        ([S.AWAKE], "loaded"),
        ([S.DRAINING], "loaded"),
        ([S.ASLEEP, S.WAKING, S.AWAKE], "loaded"),
        ([S.ASLEEP, S.WAKING], "loading"),
        ([S.ASLEEP, S.FAILED], "sleeping"),
        ([S.FAILED], "unloaded"),
        ([], "unloaded"),
    ],
)
def test_model_status(states, value):
    model = FakeModel(states=states)
    with serving(model) as client:
        assert client.get("/v1/models/fake").json()["status"] == {"value": value}
    assert model.orders == []
    assert model.requests == []


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_silent_replicas_do_not_block(how):
    model, other = FakeModel("a"), FakeModel("b")
    model.hang_status = how == "hangs"
    model.fail_control = RuntimeError("the handle is broken") if how == "fails" else None
    with serving(model, other, status_timeout_s=0.01) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["status"]["value"] for card in cards] == ["unknown", "loaded"]
        assert client.get("/health").status_code == 200
        if how == "hangs":
            is_error(client.get("/is_sleeping"), 503, "unavailable")
        else:
            is_error(client.get("/is_sleeping"), 500, "internal_error")


# --- sleep and wake ---


@pytest.mark.parametrize(
    ("query", "body", "command"),
    [
        ("", None, SleepCommand()),
        ("?level=2&mode=abort&hold=true", None, SleepCommand(2, SleepMode.ABORT, True)),
        ("", {"level": 2, "mode": "keep", "hold": True}, SleepCommand(2, SleepMode.KEEP, True)),
        ("?level=1&mode=keep", {"level": 2}, SleepCommand(2, SleepMode.KEEP)),
        ("?model=fake", {"level": None}, SleepCommand()),
    ],
)
def test_sleep(client, model, query, body, command):
    content = json.dumps(body) if body is not None else b""
    response = client.post(f"/sleep{query}", content=content)
    assert response.json()["code"] == 200
    (replica,) = response.json()["models"]["fake"]
    assert replica["state"] == "asleep"
    assert replica["last_sleep_s"] == 0.2
    assert model.orders == [command]


def test_status_has_the_device_s_figures_and_the_last_wake_s(client):
    client.post("/sleep")
    (replica,) = client.post("/sleep").json()["models"]["fake"]
    assert replica["device_memory"] == {
        "total": 9000,
        "free": 4000,
        "own": None,
        "released_by_last_sleep": 2048,
        "own_released_by_last_sleep": None,
        "left": {
            "context": 600,
            "graphs": 200,
            "kept_layers": 0,
            "torch_reserve": 30,
            "other": 4,
        },
    }
    assert replica["last_wake"] == {
        "copied_bytes": 1024,
        "link_s": 0.5,
        "link_gb_per_s": 2.048e-6,
        "checked_segments": 3,
        "checked_bytes": 1024,
        "check_s": 0.25,
        "intact": True,
    }
    (replica,) = client.post("/wake_up").json()["models"]["fake"]
    (replica,) = client.post("/wake_up").json()["models"]["fake"]
    assert replica["device_memory"]["left"] is None


@pytest.mark.parametrize("path", ["/wake_up", "/wakeup"])
@pytest.mark.parametrize(
    ("query", "body", "tags"),
    [
        ("", None, ()),
        ("?tags=weights", None, ("weights",)),
        ("?tags=weights&tags=kv_cache", None, ("weights", "kv_cache")),
        ("", {"tags": ["kv_cache"]}, ("kv_cache",)),
        ("?tags=weights", {"tags": "kv_cache"}, ("kv_cache",)),
    ],
)
def test_wake_up(client, model, path, query, body, tags):
    response = client.post(f"{path}{query}", content=json.dumps(body) if body else b"")
    assert response.json()["models"]["fake"][0]["state"] == "awake"
    assert model.orders == [tags]


def test_sleep_and_wake_twice(client):
    for _ in range(2):
        assert client.post("/sleep").json()["code"] == 200
        assert client.get("/is_sleeping").json()["sleeping"] is True
    for _ in range(2):
        assert client.post("/wake_up").json()["code"] == 200
        assert client.get("/is_sleeping").json()["sleeping"] is False


def test_sleep_one_of_two_models():
    one, two = FakeModel("one"), FakeModel("two")
    with serving(one, two) as client:
        assert set(client.post("/sleep?model=two").json()["models"]) == {"two"}
        assert one.orders == []
        assert client.get("/is_sleeping").json() == {
            "is_sleeping": False,
            "sleeping": False,
            "models": {"one": False, "two": True},
        }
        assert client.get("/is_sleeping?model=two").json()["is_sleeping"] is True
        assert set(client.post("/sleep").json()["models"]) == {"one", "two"}
        assert client.get("/is_sleeping").json()["is_sleeping"] is True


def test_sleep_that_fails_for_one_model_still_reaches_the_other():
    one, two = FakeModel("one"), FakeModel("two")
    one.fail_control = DrainTimeout("3 requests did not finish", 5)
    with serving(one, two) as client:
        is_error(client.post("/sleep"), 503, "drain_timeout")
    assert two.orders == [SleepCommand()]


@pytest.mark.parametrize(
    ("states", "sleeping"),
    [
        ([S.ASLEEP, S.ASLEEP], True),
        ([S.ASLEEP, S.WAKING], False),
        ([S.DRAINING], False),
        ([], False),
    ],
)
def test_is_sleeping(states, sleeping):
    with serving(FakeModel(states=states)) as client:
        assert client.get("/is_sleeping").json() == {
            "is_sleeping": sleeping,
            "sleeping": sleeping,
            "models": {"fake": sleeping},
        }


# --- how many replicas ---


@pytest.mark.parametrize(
    ("path", "body", "before", "target", "message"),
    [
        ("/scaleout", {}, 2, 3, "2 -> 3: 1 will start"),  # the seed's curl has no body
        ("/scaleout", {"replicas": 4}, 2, 4, "2 -> 4: 2 will start"),
        ("/scaleout", {"replicas": 2}, 2, 2, "2 replicas are wanted already"),
        ("/scaleout", {"replicas": 1}, 2, 2, "2 replicas are wanted already"),
        ("/scalein", {}, 2, 1, "2 -> 1: 1 will stop, after what it has in flight"),
        ("/scalein", {"replicas": 1}, 3, 1, "3 -> 1: 2 will stop, after what it has in flight"),
        ("/scaleout", {"replicas": 0}, 2, 2, "2 replicas are wanted already"),
        ("/scalein", {"replicas": 4}, 3, 3, "3 replicas are wanted already"),
        ("/scalein", {"replicas": 5}, 3, 3, "3 replicas are wanted already"),
    ],
)
def test_scale(path, body, before, target, message):
    model = FakeModel(states=[S.AWAKE] * before)
    with serving(model) as client:
        answer = client.post(path, content=json.dumps(body) if body else b"").json()
        assert answer == {
            "code": 200,
            "model": "fake",
            "before": before,
            "target": target,
            "message": message,
        }
        assert model.scaler.written == ([target] if target != before else [])
        if "replicas" in body:  # saying it twice changes nothing
            again = client.post(path, json=body).json()
            assert (again["before"], again["target"]) == (target, target)
            assert len(model.scaler.written) <= 1


@pytest.mark.parametrize(
    ("path", "replicas", "said"),
    [("/scaleout", 5, "more than 4"), ("/scalein", 0, "fewer than 1"), ("/scalein", -1, "")],
)
def test_scale_out_of_bounds_is_refused(client, model, path, replicas, said):
    response = client.post(f"{path}?replicas={replicas}")
    is_error(response, 400, "invalid_request_error", "replicas")
    assert said in response.json()["error"]["message"]
    assert model.scaler.written == []


def test_scale_needs_a_model_where_there_are_two():
    one, two = FakeModel("one"), FakeModel("two")
    with serving(one, two) as client:
        is_error(client.post("/scaleout"), 400, "invalid_request_error", "model")
        assert client.post("/scaleout?model=two").json()["target"] == 2
        is_error(client.post("/scalein?model=three"), 404, "model_not_found", "model")
    assert one.scaler.written == []


def test_replicas_tells_what_is_wanted_and_what_there_is():
    with serving(FakeModel(states=[S.AWAKE, S.ASLEEP])) as client:
        client.post("/scaleout?replicas=3")
        told = client.get("/replicas").json()["models"]["fake"]
    assert (told["target"], told["min_replicas"], told["max_replicas"]) == (3, 1, 4)
    assert [replica["state"] for replica in told["replicas"]] == ["awake", "asleep"]


# --- health and the rest ---


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ([S.AWAKE], 200),
        ([S.ASLEEP], 200),
        ([S.WAKING], 200),
        ([S.FAILED, S.ASLEEP], 200),
        ([], 200),
        ([S.FAILED], 503),
        ([S.FAILED, S.FAILED], 503),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(states, status, method, path):
    with serving(FakeModel("ok"), FakeModel("fake", states=states)) as client:
        response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["failed"] == (["fake"] if status == 503 else [])


def test_version(client):
    version = client.get("/version").json()["version"]
    assert client.get("/").json()["version"] == version
    fingerprint = client.post(CHAT, json=CHAT_BODY).json()["system_fingerprint"]
    assert fingerprint == f"sleepserve-{version}"


# --- connections ---


def scope_of(path: str, method: str = "POST") -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"test")],
        "scheme": "http",
        "server": ("test", 80),
    }


class Call:
    """One request, seen message by message. `leave` hangs up."""

    def __init__(self, app: Any, path: str, body: object, method: str = "POST") -> None:
        self._body = json.dumps(body).encode()
        self._read = False
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.create_task(app(scope_of(path, method), self._receive, self._sent.put))

    async def message(self) -> dict[str, Any]:
        return await self._sent.get()

    async def body(self) -> bytes:
        return (await self.message())["body"]

    def silent(self) -> bool:
        return self._sent.empty()

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test; one that hangs fails."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(20):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


async def reached(model: FakeModel, count: int = 1) -> None:
    for _ in range(1000):
        if len(model.requests) >= count:
            return
        await asyncio.sleep(0)
    raise AssertionError("the request did not reach the model")


@on_loop
async def test_headers_wait_for_the_first_token(model):
    model.gate = asyncio.Event()
    call = Call(build_asgi({"fake": model}, HttpSettings()), CHAT, {**CHAT_BODY, "stream": True})
    await reached(model)
    for _ in range(20):
        await asyncio.sleep(0)
    assert call.silent()
    model.gate.set()
    assert (await call.message())["status"] == 200
    await call.task


@pytest.mark.parametrize("include_usage", [False, True])
@on_loop
async def test_long_wake_is_bridged_by_keep_alives(model, include_usage):
    model.gate = asyncio.Event()
    settings = HttpSettings(keepalive_after_s=0.001, keepalive_interval_s=0.001)
    options = {"include_usage": include_usage}
    body = {**CHAT_BODY, "stream": True, "stream_options": options}
    call = Call(build_asgi({"fake": model}, settings), CHAT, body)
    assert (await call.message())["status"] == 200
    for _ in range(3):
        data = await call.body()
        if include_usage:
            chunk = json.loads(data.removeprefix(b"data: "))
            conforms(ChatCompletionChunk, chunk)
            assert (chunk["choices"], chunk["usage"]) == ([], None)
        else:
            assert data == b": keep-alive\n\n"
    model.gate.set()
    await call.task


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/completions"])
@on_loop
async def test_client_that_leaves_during_a_wake_cancels(model, path, stream):
    model.gate = asyncio.Event()
    app = build_asgi({"fake": model}, HttpSettings())
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    call = Call(app, path, {**prompt, "stream": stream})
    await reached(model)
    call.leave()
    await call.task
    assert model.closed == [request.request_id for request in model.requests]
    assert call.silent()


@on_loop
async def test_client_that_leaves_a_stream_cancels_every_prompt(model):
    model.pieces = ("x",) * 100_000
    app = build_asgi({"fake": model}, HttpSettings())
    call = Call(app, TEXT, {"prompt": ["a", "b"], "stream": True})
    assert (await call.message())["status"] == 200
    await call.body()
    call.leave()
    await call.task
    assert sorted(model.closed) == sorted(request.request_id for request in model.requests)
    assert len(model.closed) == 2


@on_loop
async def test_load_counts_what_is_being_answered(model):
    model.gate = asyncio.Event()
    app = build_asgi({"fake": model}, HttpSettings())

    async def load() -> int:
        call = Call(app, "/load", {}, method="GET")
        await call.message()
        return json.loads(await call.body())["server_load"]

    assert await load() == 0
    calls = [Call(app, CHAT, {**CHAT_BODY, "stream": stream}) for stream in (True, False)]
    await reached(model, 2)
    assert await load() == 2
    calls[0].leave()
    await calls[0].task
    assert await load() == 1
    model.gate.set()
    await calls[1].task
    assert await load() == 0


# --- the official client ---


@on_loop
async def test_openai_client(model):
    httpx2 = pytest.importorskip("httpx2")  # what openai 3 is built on
    from openai import APIError, AsyncOpenAI, NotFoundError

    transport = httpx2.ASGITransport(build_asgi({"fake": model}, HttpSettings()))
    async with AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    ) as client:
        assert [card.id async for card in client.models.list()] == ["fake"]
        chat = await client.chat.completions.create(model="fake", messages=HI)
        assert chat.choices[0].message.content == "Hello, world"
        assert chat._request_id
        text = await client.completions.create(model="fake", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in text.choices] == ["Hello, world"] * 2
        stream = await client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        pieces = [c.delta.content for chunk in chunks for c in chunk.choices]
        assert "".join(piece or "" for piece in pieces) == "Hello, world"
        assert chunks[-1].usage.completion_tokens == 3

        with pytest.raises(NotFoundError) as missing:
            await client.chat.completions.create(model="gpt", messages=HI)
        assert missing.value.code == "model_not_found"
        model.fail_later = EngineDied("the engine died")
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        with pytest.raises(APIError) as broken:
            _ = [chunk async for chunk in stream]
        assert broken.value.code == "engine_dead"
