"""Chats: their shapes with and without stream, reasoning and tool calls."""

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from actors.protocol import ChatPrompt, FinishReason, MessageForm, SamplingParams
from tests.fakes import PROMPT_TOKENS, FakeModel
from tests.unit.serve_app.front.front import (
    CHAT,
    CHAT_BODY,
    TEXT,
    TEXT_BODY,
    chunks_of,
    conforms,
    serving,
    texts_of,
)


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
        "prompt_tokens_details": {"cached_tokens": 0},
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


def chat(model: FakeModel, stream: bool, **fields: Any) -> tuple[str, int, str]:
    """Content, how many calls, and the finish reason."""
    model.form = MessageForm(tools="qwen")
    with serving(model) as client:
        response = client.post(CHAT, json={**CHAT_BODY, "tools": [SUM], "stream": stream, **fields})
    if not stream:
        (choice,) = response.json()["choices"]
        message = choice["message"]
        return message["content"] or "", len(message.get("tool_calls", ())), choice["finish_reason"]
    chunks = chunks_of(response)
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    return texts_of(chunks)[0], len(calls), chunks[-1]["choices"][0]["finish_reason"]


CALLED = f"<tool_call>\n{ADDED}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me see.\n{CALLED}\n\nDone now.", "Let me see.\nDone now.", 1),
        (f"Let me see.\n{CALLED}\n{CALLED}\n\nDone\nnow.\n", "Let me see.\nDone\nnow.\n", 2),
        (f"a {CALLED} b {CALLED} c\n{CALLED}\n", "a\nb\nc", 3),
        (f"\n{CALLED}\n\nDone {CALLED}now.", "Done\nnow.", 2),
        (f"a\n\n{CALLED}\n<tool_call> b", "a\n<tool_call> b", 1),
    ],
)
def test_texts_around_a_call_are_lines(model, stream, parallel, each, text, content, calls):
    model.pieces = tuple(text) if each else (text,)
    found = chat(model, stream, parallel_tool_calls=parallel)
    assert found == (content, calls if parallel else 1, "tool_calls")


def test_line_break_between_texts_comes_with_the_second(model):
    model.form = MessageForm(tools="qwen")
    model.pieces = ("Let me see.\n", CALLED, "\n", "\n", "Done", " now.")
    with serving(model) as client:
        chunks = chunks_of(client.post(CHAT, json={**CHAT_BODY, "tools": [SUM], "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    told = [delta.get("content", "call") for delta in deltas if delta]
    assert told == ["", "Let me see.", "call", "\nDone", " now."]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "reason"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")]
)
def test_last_call_needs_no_closing_mark(model, stream, finish, reason):
    model.pieces, model.finish_reason = ("So:\n<tool_call>\n", ADDED), finish
    assert chat(model, stream) == ("So:", 1, reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_closing_mark_as_an_argument(model, stream, choice):
    argument = '{"name": "add", "arguments": {"text": "use </tool_call> tags"}}'
    model.pieces = ("<tool_call>\n", argument, "\n</tool_call>")
    assert chat(model, stream, tool_choice=choice) == ("", 1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (
            "Write it as\n\n<tool_call>\nname and args\n</tool_call>\n\nlike this.",
            FinishReason.STOP,
            "stop",
        ),
        ('Sure.\n\n<tool_call>\n{"name": "ad', FinishReason.LENGTH, "length"),
    ],
)
def test_what_is_no_call_comes_back_as_it_was_written(model, stream, text, finish, reason):
    model.finish_reason = finish
    for pieces in ((text,), tuple(text)):
        model.pieces = pieces
        assert chat(model, stream) == (text, 0, reason)


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
