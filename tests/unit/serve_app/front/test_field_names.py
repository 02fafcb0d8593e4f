"""Errors name fields as the client that gets them does, though whoever raised them knows other names."""

import asyncio
from typing import Any

import pytest

from actors.errors import ContextLengthExceeded, InvalidRequest
from serve_app.front.bodies import MAX_MESSAGE_BYTES
from tests.fakes import FakeModel
from tests.unit.serve_app.front.front import CHAT, HI, TEXT, is_error, serving

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOO_MANY = "the prompt has 9 tokens and {} is 5000; together the limit is 4096"
ASKED: list[tuple[str, dict[str, Any], str, str]] = [
    (TEXT, {"prompt": "hi"}, "prompt", "max_tokens"),
    (CHAT, {"messages": HI}, "messages", "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 5000}, "messages", "max_completion_tokens"),
    (
        CHAT,
        {"messages": HI, "max_completion_tokens": 5000, "max_tokens": 9},
        "messages",
        "max_completion_tokens",
    ),
    (CHAT, {"messages": HI, "max_completion_tokens": None}, "messages", "max_tokens"),
    (RESPONSES, {"input": "hi"}, "input", "max_output_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "prompt", "limit"), ASKED)
def test_too_long_a_prompt_is_told_in_the_client_s_words(
    path: str, body: dict[str, Any], prompt: str, limit: str, stream: bool
) -> None:
    model = FakeModel()
    model.fail_first = ContextLengthExceeded(TOO_MANY.format("max_tokens"), "prompt")
    with serving(model) as client:
        response = client.post(path, json={**body, "stream": stream})
    error = is_error(response, 400, "context_length_exceeded", prompt)
    assert error["message"] == TOO_MANY.format(limit)


def test_anthropic_s_clients_know_max_tokens() -> None:
    model = FakeModel()
    model.fail_first = ContextLengthExceeded(TOO_MANY.format("max_tokens"), "prompt")
    with serving(model) as client:
        response = client.post(MESSAGES, json={"messages": HI, "max_tokens": 5000})
    assert response.json()["error"]["message"] == TOO_MANY.format("max_tokens")


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        *[(path, body, limit) for path, body, _, limit in ASKED],
        (MESSAGES, {"messages": HI, "max_tokens": 5000}, "max_tokens"),
    ],
)
def test_answer_that_takes_too_long_is_told_in_the_client_s_words(
    path: str, body: dict[str, Any], limit: str
) -> None:
    model = FakeModel()
    with serving(model, request_timeout_s=0.01) as client:
        model.gate = asyncio.Event()
        response = client.post(path, json=body)
    assert response.status_code == 408
    assert f'; lower {limit} or use "stream": true' in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "limits", "told"),
    [
        (TEXT, {"max_tokens": 2}, "max_tokens"),
        (CHAT, {"max_tokens": 2}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 2}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 2, "max_tokens": 9}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 2}, "max_tokens"),
    ],
)
def test_min_tokens_beyond_the_limit_are_told_in_the_client_s_words(
    path: str, limits: dict[str, Any], told: str
) -> None:
    prompt = {"prompt": "hi"} if path == TEXT else {"messages": HI}
    with serving(FakeModel()) as client:
        response = client.post(path, json={**prompt, **limits, "min_tokens": 3})
    error = is_error(response, 400, "invalid_request_error", "min_tokens")
    assert error["message"] == f"min_tokens must be at most {told} (2), found 3"


@pytest.mark.parametrize(("path", "body", "prompt"), [each[:3] for each in ASKED[1::4]])
def test_what_a_template_says_stays_as_it_is(path: str, body: dict[str, Any], prompt: str) -> None:
    model = FakeModel()
    said = "the chat template refused: max_tokens of messages"
    model.fail_first = InvalidRequest(said, "messages")
    with serving(model) as client:
        error = is_error(client.post(path, json=body), 400, "invalid_request_error", prompt)
    assert error["message"] == said


@pytest.mark.parametrize(
    ("path", "field"), [(TEXT, "prompt"), (RESPONSES, "input"), (CHAT, "messages")]
)
def test_prompt_that_is_too_long_to_travel_is_named(path: str, field: str) -> None:
    text = "x" * (MAX_MESSAGE_BYTES + 1)
    body = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    with serving(FakeModel()) as client:
        response = client.post(path, json=body)
    is_error(response, 400, "context_length_exceeded", field)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "max_tokens": 0, "max_completion_tokens": 5}, "max_tokens"),
        (RESPONSES, {"input": "hi", "prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_field_that_the_client_sent_keeps_its_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    with serving(FakeModel()) as client:
        assert client.post(path, json=body).json()["error"]["param"] == param
