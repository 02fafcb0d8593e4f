"""OpenAI's responses: what its own client makes of them, the very bytes of streams, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from actors.errors import ContextLengthExceeded, EngineDied, QueueFull
from actors.protocol import FinishReason, GrammarKind, MessageForm
from serve_app.responses.answers import ResponseAnswer
from serve_app.responses.requests import parse_responses
from tests.fakes import PROMPT_TOKENS, FakeModel
from tests.unit.serve_app.front.front import count_ids, extras, is_error, serving

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": "fake", "input": "hi"}
TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(autouse=True)
def ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are 0, 1, 2, ..."""
    count_ids(monkeypatch, "serve_app.responses.answers.uuid4")


@pytest.fixture
def official(client: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's client, of the application in this process."""
    with openai.OpenAI(
        base_url="http://127.0.0.1:8000/v1", api_key="EMPTY", max_retries=0, http_client=client
    ) as made:
        yield made


def events_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert extras(EVENTS.validate_python(found[-1], strict=True)) == []
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def asked(model: FakeModel, **fields: Any) -> dict[str, Any]:
    with serving(model) as client:
        response = client.post(RESPONSES, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert extras(Response.model_validate(body, strict=True)) == []
    return body


def test_text_with_openai_s_client(official, model):
    whole = official.responses.create(**BODY, instructions="Be brief.", max_output_tokens=9)
    assert (whole.output_text, whole.status, whole.id) == ("Hello, world", "completed", "resp_0")
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (PROMPT_TOKENS, 3)
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    with official.responses.stream(**BODY, instructions="Be brief.") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert ("".join(deltas), final.output_text, final.usage) == (
        "Hello, world",
        "Hello, world",
        whole.usage,
    )
    first, _ = model.requests
    assert [message["role"] for message in first.prompt.messages] == ["system", "user"]
    assert (first.sampling.max_tokens, first.stream) == (9, False)


def test_stream_byte_by_byte(client):
    text = client.post(RESPONSES, json={**BODY, "stream": True}).text
    created, progress, *between, completed, end = text.split("\n\n")
    assert created.startswith("event: response.created\ndata: {")
    assert progress.startswith("event: response.in_progress\ndata: {")
    assert completed.startswith("event: response.completed\ndata: {")
    assert end == ""
    part = '{"type":"output_text","text":"","annotations":[]}'
    full = part.replace('""', '"Hello, world"')
    at = '"item_id":"msg_1","output_index":0,"content_index":0'
    head = '{"id":"msg_1","type":"message","status":"in_progress","role":"assistant","content":[]}'
    done = f"{head[:-3]}[{full}]}}".replace("in_progress", "completed")
    expected = [
        ("output_item.added", f'"output_index":0,"item":{head}'),
        ("content_part.added", f'{at},"part":{part}'),
        ("output_text.delta", f'{at},"delta":"Hello","logprobs":[]'),
        ("output_text.delta", f'{at},"delta":",","logprobs":[]'),
        ("output_text.delta", f'{at},"delta":" world","logprobs":[]'),
        ("output_text.done", f'{at},"text":"Hello, world","logprobs":[]'),
        ("content_part.done", f'{at},"part":{full}'),
        ("output_item.done", f'"output_index":0,"item":{done}'),
    ]
    assert between == [
        f'event: response.{kind}\ndata: {{"type":"response.{kind}",{data},"sequence_number":{number}}}'
        for number, (kind, data) in enumerate(expected, start=2)
    ]


@pytest.mark.parametrize("parallel", [True, False])
def test_stream_of_reasoning_text_and_calls_ends_with_the_whole_response(model, parallel):
    model.form = MessageForm("think", "qwen", in_reasoning=True)
    model.pieces = ("I add", ".</think>", "So:", CALL, "\n" + CALL, "\nDone")
    body = {"tools": TOOLS, "parallel_tool_calls": parallel, "metadata": {"a": "b"}}
    whole = asked(model, **body)
    with serving(model) as client:
        events = events_of(client.post(RESPONSES, json={**BODY, **body, "stream": True}))
    calls = ["function_call"] * (2 if parallel else 1)
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", *calls, "message"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "I add."}]
    assert whole["output"][2]["arguments"] == '{"a": 1}'
    assert whole["metadata"] == {"a": "b"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert done == last["output"]
    assert [without_ids(item) for item in done] == [without_ids(item) for item in whole["output"]]
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize("parallel", [True, False])
def test_texts_of_one_message_are_lines_where_a_call_between_is_not_wanted(model, parallel):
    model.form = MessageForm(tools="qwen")
    model.pieces = ("So:\n", CALL, "\nand", " then\n", CALL, "\n\n", "done")
    whole = asked(model, tools=TOOLS, parallel_tool_calls=parallel)
    texts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
    assert texts == (["So:", "and then", "done"] if parallel else ["So:", "and then\ndone"])


def test_reasoning_tokens_are_the_share_of_the_text(model):
    model.form = MessageForm("think", in_reasoning=True)
    model.pieces = ("I think so", "</think>ok")
    usage = asked(model)["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]) == (2, 1)


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_call_and_its_result_with_openai_s_client(model):
    model.form, model.pieces = MessageForm(tools="qwen"), (CALL,)
    with (
        serving(model) as client,
        openai.OpenAI(
            base_url="http://127.0.0.1:8000/v1", api_key="EMPTY", http_client=client
        ) as official,
    ):
        said: list[Any] = [{"role": "user", "content": "1 + 1?"}]
        choice: Any = {"type": "function", "name": "add"}
        first = official.responses.create(input=said, tools=TOOLS, tool_choice=choice)
        (call,) = first.output
        assert call.type == "function_call"
        said += first.output
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        official.responses.create(input=said, tools=TOOLS)
    forced, second = model.requests
    assert forced.prompt.must_call == ("add",)
    function = {"name": "add", "arguments": {"a": 1}}
    assert second.prompt.messages == (
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "2"},
    )


def test_items_of_one_turn_are_one_message(model):
    thought = {"type": "reasoning", "summary": [], "content": [_part("reasoning_text", "Hm")]}
    said = {"type": "message", "role": "assistant", "content": [_part("output_text", "So")]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "?"}
    asked(
        model,
        input=[
            {"role": "developer", "content": [_part("input_text", "a"), _part("input_text", "b")]},
            thought,
            said,
            call,
            hidden,
            {"role": "user", "content": "go on"},
        ],
        reasoning={"effort": "none"},
    )
    prompt = model.requests[0].prompt
    function = {"name": "f", "arguments": {}}
    assert prompt.messages == (
        {"role": "system", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "user", "content": "go on"},
    )
    assert prompt.template_kwargs == {"enable_thinking": False, "thinking": False}


def test_text_and_thoughts_behind_a_call_are_of_its_message(model):
    """A result follows the message with its call, as many templates want it."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    asked(
        model,
        input=[
            {"role": "user", "content": "add"},
            {"type": "reasoning", "content": [_part("reasoning_text", "Hm")]},
            {"role": "assistant", "content": "So:"},
            call,
            {"type": "reasoning", "content": [_part("reasoning_text", "Well")]},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": "Done."},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
        ],
    )
    function = {"name": "f", "arguments": {}}
    assert model.requests[0].prompt.messages == (
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "So:\nDone.",
            "reasoning_content": "Hm\nWell",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    )


def _part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


def test_form_of_the_text(model):
    schema = {"type": "object"}
    asked(model, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    grammar = model.requests[0].sampling.grammar
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT])
def test_text_that_was_cut_off_is_incomplete(finish):
    model = FakeModel(finish_reason=finish)
    whole = asked(model)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
    with serving(model) as client:
        *_, last = events_of(client.post(RESPONSES, json={**BODY, "stream": True}))
    assert last["type"] == "response.incomplete"


def test_response_of_nothing_has_no_item():
    assert asked(FakeModel(pieces=("",)))["output"] == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "unsupported_parameter", "input[0]"),
        ({"max_tokens": 3}, "unsupported_parameter", "max_tokens"),
        (
            {"response_format": {"type": "json_object"}},
            "unsupported_parameter",
            "response_format",
        ),
        ({"guided_json": {}}, "unsupported_parameter", "guided_json"),
        ({"seed": 0}, "unsupported_parameter", "seed"),
        ({"bad_words": ["x"]}, "unsupported_parameter", "bad_words"),
        ({"input": []}, "invalid_request_error", "input"),
        ({"input": None}, "invalid_request_error", "input"),
        ({"max_output_tokens": 0}, "invalid_request_error", "max_output_tokens"),
        ({"tool_choice": "required"}, "invalid_request_error", "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "invalid_request_error", None),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter",
            None,
        ),
    ],
)
def test_refusals_say_what_and_why(client, model, fields, code, param):
    response = client.post(RESPONSES, json={**BODY, **fields})
    error = response.json()["error"]
    is_error(response, 400, code, param or error["param"])
    assert error["param"]
    assert model.requests == []


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        ({"role": "user"}, "input[0].content", "is required"),
        ({"type": "message", "role": "me", "content": "x"}, "input[0].role", "must be 'user'"),
        ({"type": "function_call", "call_id": "1"}, "input[0].name", "is required"),
        (
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "["},
            "input[0].arguments",
            "must be a JSON object",
        ),
        (
            {"type": "function_call_output", "call_id": "1", "output": {"a": 1}},
            "input[0].output",
            "must be a string",
        ),
    ],
)
def test_wrong_item_is_named_by_its_path_in_the_body(client, item, param, message):
    response = client.post(RESPONSES, json={"input": [item]})
    refused = is_error(response, 400, "invalid_request_error", param)
    assert refused["message"].startswith(f"{param} {message}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", '{"a": 1e400}'),
        ("tools", '[{"type": "function", "name": "f", "parameters": {"maximum": [-1e400]}}]'),
        ("tool_choice", '{"type": "function", "name": "add", "more": 1e400}'),
        ("text", '{"format": {"type": "json_schema", "schema": {"maximum": 1e400}}}'),
    ],
)
def test_number_that_the_answer_could_not_repeat_is_refused(client, model, field, value):
    fields = {"tools": json.dumps(TOOLS), field: value}
    body = ", ".join(f'"{name}": {each}' for name, each in fields.items())
    response = client.post(RESPONSES, content=f'{{"input": "hi", {body}}}')
    is_error(response, 400, "invalid_request_error", field)
    assert model.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "text", "x": [1] * 2**17}}},
        {"metadata": {"x": "\u00e9" * 2**18}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "add", "x": "y" * 2**18}},
    ],
)
def test_more_than_an_answer_should_repeat_is_refused(client, model, fields):
    response = client.post(RESPONSES, json={"input": "hi", **fields})
    is_error(response, 400, "invalid_request_error", list(fields)[-1])
    assert model.requests == []


@pytest.mark.parametrize(
    "value",
    [
        True,
        5,
        "some",
        {"type": "function"},
        ["auto"],
        {"name": "add"},
        {"type": None, "name": "add"},
        {"type": ["function"], "name": "add"},
        {"type": "function", "name": ""},
        {"type": "function", "name": None},
        {"type": "function", "name": ["add"]},
    ],
)
def test_tool_choice_that_is_none_is_refused_by_its_name(client, value):
    response = client.post(RESPONSES, json={**BODY, "tools": TOOLS, "tool_choice": value})
    refused = is_error(response, 400, "invalid_request_error", "tool_choice")
    assert refused["message"].startswith('tool_choice must be "none", "auto", "required" or {')


@pytest.mark.parametrize(
    "value",
    [
        {"type": "custom", "name": "add"},
        {"type": "mcp", "server_label": "x", "name": "add"},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
    ],
)
def test_tool_choice_of_a_kind_that_is_not_here_is_refused_as_such(client, value):
    response = client.post(RESPONSES, json={**BODY, "tools": TOOLS, "tool_choice": value})
    refused = is_error(response, 400, "unsupported_parameter", "tool_choice")
    assert refused["message"] == (
        'tool_choice must be "none", "auto", "required" or {"type": "function", "name": ...}, '
        f'found type "{value["type"]}"'
    )


def test_size_of_an_answer_has_what_it_repeats(model):
    body = {"input": "hi", "instructions": "i" * 5000, "metadata": {"x": "y" * 3000}}
    answer = ResponseAnswer(parse_responses(body), "fake", 0)
    assert 8000 < answer.size < 9000


def test_refused_store_says_what_to_do(client):
    refused = client.post(RESPONSES, json={**BODY, "previous_response_id": "resp_1"}).json()
    assert refused["error"]["message"] == (
        'previous_response_id is not supported, found "resp_1": nothing is kept here; '
        "send the whole conversation as input"
    )


def test_fields_of_chats_are_told_what_to_use(client):
    refused = client.post(RESPONSES, json={**BODY, "max_tokens": 3}).json()
    assert refused["error"]["message"] == (
        "max_tokens is not supported, found 3; use max_output_tokens"
    )


def test_what_asks_for_nothing_is_ignored(model):
    harmless = {"store": False, "truncation": "disabled", "user": "me", "service_tier": "auto"}
    harmless |= {"n": 1, "stop": [], "logprobs": False, "logit_bias": {}, "seed": None}
    harmless |= {"presence_penalty": 0, "response_format": {"type": "text"}, "echo": False}
    harmless |= {"stream_options": {"include_obfuscation": False}, "chat_template": ""}
    asked(model, **harmless, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"})
    assert asked(model, text={"format": None})["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthExceeded("too long", "prompt"), 400, "context_length_exceeded"),
        (QueueFull("full", 2.5), 429, "queue_full"),
    ],
)
def test_error_before_the_first_token_has_its_status(client, model, error, status, code):
    model.fail_first = error
    response = client.post(RESPONSES, json={**BODY, "stream": True})
    is_error(response, status, code, "input" if hasattr(error, "param") else None)


def test_error_in_mid_stream_is_told_by_two_events(client, model):
    model.fail_later = EngineDied("the engine died")
    *_, error, failed = events_of(client.post(RESPONSES, json={**BODY, "stream": True}))
    assert (error["type"], error["code"]) == ("error", "engine_dead")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine died"}
