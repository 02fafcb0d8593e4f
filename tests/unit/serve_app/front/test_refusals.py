"""Bad requests, failing models: the status, the error, and that nobody else is harmed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from actors.errors import (
    ContextLengthExceeded,
    EngineDied,
    HeldAsleep,
    InvalidRequest,
    NeverFits,
    NoRoom,
    QueueFull,
    WakeTimeout,
)
from actors.protocol import Grammar, GrammarKind
from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from tests.fakes import FakeModel
from tests.unit.serve_app.front.front import (
    CHAT,
    CHAT_BODY,
    HI,
    TEXT,
    TEXT_BODY,
    chunks_of,
    is_error,
    scope_of,
    serving,
    texts_of,
    works,
)

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
        (CHAT, {**CHAT_BODY, "tool_choice": "required"}, "invalid_request_error", "tool_choice"),
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
    "path", ["/nowhere", "/v1", "/v1/embeddings", "/v1/models/", "/v1/completions/"]
)
def test_unknown_path_is_404(client, path):
    response = client.post(path, json={}) if "completions" in path else client.get(path)
    code = "model_not_found" if path == "/v1/models/" else "not_found"
    is_error(response, 404, code, "model" if path == "/v1/models/" else None)


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_embeddings_are_refused_with_the_reason_and_what_to_use(client, model, method):
    """Not with pooled states, which nobody trained to be compared (decision 82)."""
    body = {"model": "fake", "input": "Hello"}
    response = client.request(method, "/v1/embeddings", json=body)
    message = is_error(response, 404, "not_found")["message"]
    assert message.startswith(f"Not Found: {method} /v1/embeddings: embeddings are not offered: ")
    assert "trained" in message
    assert "text-embeddings-inference" in message
    assert model.requests == []
    works(client)


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


LONG = "é" * 20_000


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        (lambda client: client.post(CHAT, json={**CHAT_BODY, "model": LONG}), 400),
        (lambda client: client.post(TEXT, json={**TEXT_BODY, "model": LONG}), 400),
        (lambda client: client.post("/completions", json={"model": LONG}), 400),
        (lambda client: client.post("/tokenize", json={"model": LONG, "prompt": "a"}), 400),
        (lambda client: client.post("/detokenize", json={"model": LONG, "tokens": [1]}), 400),
        (lambda client: client.post("/sleep", json={"model": LONG}), 400),
        (lambda client: client.post("/wake_up", json={"model": LONG}), 400),
        (lambda client: client.post("/scaleout", json={"model": LONG}), 400),
        (lambda client: client.get(f"/is_sleeping?model={'a' * 3000}"), 400),
        (lambda client: client.get(f"/health?model={'a' * 3000}"), 400),
        (lambda client: client.get(f"/v1/models/{'a' * 20_000}"), 404),
        (lambda client: client.get(f"/{'a' * 20_000}"), 404),
        (lambda client: client.get("/status", headers={"host": "a" * 20_000}), 403),
        (
            lambda client: client.post(CHAT, json=CHAT_BODY, headers={"origin": "a" * 20_000}),
            403,
        ),
        (lambda client: client.post(TEXT, json={**TEXT_BODY, "best_of": 10**4000}), 400),
        (lambda client: client.post("/scaleout", json={"replicas": 10**4000}), 400),
    ],
)
def test_what_a_client_sent_is_not_sent_back_whole(client, ask, status):
    response = ask(client)
    assert response.status_code == status
    assert len(response.json()["error"]["message"]) <= 1500
    assert len(response.content) < 3000


def test_message_of_a_template_is_not_sent_back_whole(client, model):
    model.fail_first = InvalidRequest(f"the chat template refused: {LONG}", "messages")
    error = is_error(client.post(CHAT, json=CHAT_BODY), 400, "invalid_request_error", "messages")
    assert error["message"].startswith("the chat template refused: é")
    assert len(error["message"]) == 1500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ContextLengthExceeded("too long", "prompt"), 400, "context_length_exceeded", None),
        (QueueFull("full", 2.5), 429, "queue_full", "3"),
        (WakeTimeout("slow", 5.0), 503, "wake_failed", "5"),
        (HeldAsleep("held", 30.0), 503, "model_asleep", "30"),
        (NoRoom("no room within 30 s", 12.3), 503, "no_room", "13"),
        (NeverFits("never", 1.0), 503, "never_fits", "1"),
        (EngineDied("died"), 500, "engine_dead", None),
        (RuntimeError("inside"), 500, "internal_error", None),
    ],
)
def test_error_before_the_first_token_has_its_status(
    client, model, stream, error, status, code, retry_after
):
    model.fail_first = error
    for path, body, field in ((CHAT, CHAT_BODY, "messages"), (TEXT, TEXT_BODY, "prompt")):
        response = client.post(path, json={**body, "stream": stream})
        shown = is_error(response, status, code, field if hasattr(error, "param") else None)
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


def test_log_probabilities_that_gather_are_limited_and_given_back() -> None:
    asks = CHAT_BODY | {"logprobs": True, "top_logprobs": 2}  # three tokens, three each
    with serving(FakeModel(), max_logprobs_in_flight=8, max_share_per_key=1.0) as client:
        error = is_error(client.post(CHAT, json=asks), 429, "server_busy")
        assert "(http.max_logprobs_in_flight)" in error["message"]
        assert (
            len(chunks_of(client.post(CHAT, json=asks | {"stream": True}))) > 1
        )  # nothing gathers
        works(client)
    with serving(FakeModel(), max_logprobs_in_flight=9, max_share_per_key=1.0) as client:
        for _ in range(3):
            assert client.post(CHAT, json=asks).status_code == 200
