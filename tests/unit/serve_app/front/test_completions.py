"""Completions, and the seed's form of them."""

import json

import pytest
from openai.types import Completion

from actors.errors import EngineDied, QueueFull
from actors.protocol import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from serve_app.openai import requests
from serve_app.openai.answers import CompletionAnswer
from tests.fakes import PROMPT_TOKENS
from tests.unit.serve_app.front.front import (
    TEXT,
    TEXT_BODY,
    chunks_of,
    conforms,
    is_error,
    texts_of,
)


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


@pytest.mark.parametrize(
    ("prompt", "n"),
    [(["a" * 2**21] * 3, 3), ([[1] * 2**18] * 3, 3)],
)
def test_echo_of_more_than_an_answer_should_have_is_refused(client, model, prompt, n, monkeypatch):
    monkeypatch.setattr(requests, "MAX_ECHOED_CHARS", 9 * 2**21 - 1)
    body = {**TEXT_BODY, "prompt": prompt, "n": n, "echo": True}
    is_error(client.post(TEXT, json=body), 400, "invalid_request_error", "echo")
    assert model.requests == []
    monkeypatch.setattr(requests, "MAX_ECHOED_CHARS", 9 * 2**21)
    assert client.post(TEXT, json=body).status_code == 200
    monkeypatch.setattr(requests, "MAX_ECHOED_CHARS", 0)
    assert client.post(TEXT, json={**body, "echo": False}).status_code == 200


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


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_pass_over_what_is_not_in_the_text(stream):
    """As of special tokens, in a prompt of token ids or in an output."""
    ask = requests.parse_completion({**TEXT_BODY, "echo": True, "logprobs": 0, "stream": stream}, 1)
    end = TokenLogprob(2, "<|end|>", b"<|end|>", -1.0, unwritten=7)
    user, text = (TokenLogprob(1, token, token.encode(), -1.0) for token in ("user", " é!"))
    events = [
        TokenEvent(0, "user", (), 3, logprobs=(end, user, end)),
        TokenEvent(0, " é!", (1, 2), 3, FinishReason.LENGTH, logprobs=(text, end)),
    ]
    answer = CompletionAnswer(ask, "fake", 0)
    if stream:
        choices = [chunk["choices"][0] for event in events for chunk in answer.chunks(0, event)]
        offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
    else:
        for event in events:
            answer.add(0, event)
        offsets = json.loads(answer.written())["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 0, 4, 4, 7]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_a_token_behind_it(client, model, stream, logprobs):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    asked = {"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    response = client.post(TEXT, json={"stream": stream, **asked, **options})
    if stream:
        *chunks, trailer = chunks_of(response)
        choices, usage = [chunk["choices"][0] for chunk in chunks], trailer["usage"]
        assert texts_of(chunks) == {0: "one", 1: "one", 2: "two", 3: "two"}
        ends = [each for each in choices if each["finish_reason"]]
    else:
        if (
            logprobs is None
        ):  # of a prompt's first token there is none, which openai's type does not say
            conforms(Completion, response.json())
        ends = choices = response.json()["choices"]
        usage = response.json()["usage"]
        assert [each["text"] for each in choices] == ["one", "one", "two", "two"]
    assert [each["finish_reason"] for each in ends] == ["length"] * 4
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * PROMPT_TOKENS, 0)
    told = [each["logprobs"]["tokens"] for each in choices if each["logprobs"]]
    assert sorted(told) == ([] if logprobs is None else [["one"], ["one"], ["two"], ["two"]])
    assert {request.is_echo_alone for request in model.requests} == {True}


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"echo": None}])
def test_no_token_without_echo_is_refused(client, model, fields):
    response = client.post(TEXT, json={**TEXT_BODY, "max_tokens": 0, **fields})
    error = is_error(response, 400, "invalid_request_error", "max_tokens")
    assert error["message"] == "max_tokens must be at least 1, found 0"
    below = client.post(TEXT, json={**TEXT_BODY, "max_tokens": -1, "echo": True})
    is_error(below, 400, "invalid_request_error", "max_tokens")
    assert model.requests == []


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
