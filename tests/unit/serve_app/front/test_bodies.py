"""Bodies within limits: of bytes, of time, of what is in flight, of what they are made of."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from actors.errors import ContextLengthExceeded, InvalidRequest, PayloadTooLarge
from actors.protocol import ChatPrompt
from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access, ApiKey
from serve_app.front.app import build_asgi
from serve_app.front.bodies import MAX_MESSAGE_BYTES, Bodies, check_travels, query_fields
from serve_app.front.endpoints.catalogue import ENDPOINTS
from serve_app.front.errors import KeyBusy, RequestTimeout, ServerBusy
from serve_app.front.work import Budget, admitted
from serve_app.openai import requests as schemas
from serve_app.openai.fields import (
    MAX_BRACKETS,
    MAX_COLONS,
    MAX_COMMAS,
    MAX_INSIDE,
    parse_form,
    parse_json,
    shown,
)
from serve_app.openai.requests import parse_chat, parse_completion, parse_tokenize
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

ANN, BOB = ApiKey("ann", Access.INFERENCE, b"a"), ApiKey("bob", Access.INFERENCE, b"b")


def budget(limit: int = 1000, share_per_key: float = 0.5) -> Budget:
    return Budget("bytes", "max_body_bytes_in_flight", limit, share_per_key)


def read(
    *chunks: bytes, bodies: Bodies | None = None, key: ApiKey | None = None, hang: bool = False
) -> Any:
    async def receive() -> dict[str, Any]:
        if not pending:
            await asyncio.Event().wait()
        chunk = pending.pop(0)
        more = bool(pending) or hang
        return {"type": "http.request", "body": chunk, "more_body": more}

    pending = list(chunks)
    reader = bodies or Bodies(10_000_000, 5.0, budget(10**9))

    async def ask() -> Any:
        scope = {"type": "http", "method": "POST", "headers": [], "query_string": b""}
        with admitted(key) as scope["admission"]:
            return await reader.read(Request(scope, receive), lambda fields: dict(fields))

    return asyncio.run(ask())


def test_body_is_what_its_pieces_say() -> None:
    assert read(b'{"a": ', b"[1, 2]", b"}") == {"a": [1, 2]}


@pytest.mark.parametrize(("size", "thread"), [(10, "MainThread"), (100_000, "large-bodies")])
def test_large_bodies_are_parsed_beside_the_event_loop(size: int, thread: str) -> None:
    body = json.dumps({"a": "x" * size}).encode()
    names: list[str] = []

    def parse(fields: Mapping[str, Any]) -> None:
        names.append(threading.current_thread().name)

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "headers": [], "query_string": b""}
        with admitted(None) as scope["admission"]:
            await Bodies(10**6, 5.0, budget(10**6)).read(Request(scope, receive), parse)

    asyncio.run(ask())
    assert names[0].startswith(thread)


@pytest.mark.parametrize(("size", "given"), [(10, 0), (100_000, 2)])
def test_what_large_bodies_took_is_given_back_beside_them_and_behind_the_last(
    monkeypatch: pytest.MonkeyPatch, size: int, given: int
) -> None:
    """Also if they were refused; not for each of them."""
    threads: list[str] = []

    def give_back() -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr("serve_app.front.bodies.give_back", give_back)
    monkeypatch.setattr("serve_app.front.bodies._GIVE_BACK_AFTER_S", 0.1)
    bodies = Bodies(10**6, 5.0, budget(10**9))
    valid, invalid = json.dumps({"a": "x" * size}).encode(), b'{"a": "' + b"x" * size

    async def ask(body: bytes) -> Any:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "headers": [], "query_string": b""}
        with admitted(None) as scope["admission"]:
            return await bodies.read(Request(scope, receive), lambda fields: dict(fields))

    async def scenario() -> None:
        for body in (valid, invalid, valid):
            with suppress(InvalidRequest):
                await ask(body)
        assert threads == [], "nobody waits for it"
        async with asyncio.timeout(5):
            while bodies._giver is not None or len(threads) < given:
                await asyncio.sleep(0.001)

    asyncio.run(scenario())
    assert len(threads) == given
    assert all(name.startswith("large-bodies") for name in threads)


def test_body_that_does_not_arrive_is_given_up() -> None:
    in_flight = budget()
    slow = Bodies(1000, 0.02, in_flight)
    with pytest.raises(RequestTimeout, match=r"within 0\.02 s \(http\.body_timeout_s\)"):
        read(b"{", bodies=slow, hang=True)
    assert in_flight.in_flight == 0


def test_bytes_count_while_they_arrive_and_no_longer_than_the_request() -> None:
    in_flight = budget(limit=25)
    bodies = Bodies(1000, 5.0, in_flight)
    assert read(b'{"a": "123456789"}', bodies=bodies) == {"a": "123456789"}
    assert in_flight.in_flight == 0
    with pytest.raises(ServerBusy, match=r"30 bytes would be in flight; the limit is 25"):
        read(b'{"a": "12', b'3456789012345678901"}', bodies=bodies)
    with pytest.raises(KeyBusy, match=r"of the key ann .* the limit is 12 \(http\."):
        read(b'{"a": "123456789"}', bodies=bodies, key=ANN)
    with pytest.raises(PayloadTooLarge):
        read(b" " * 20, b" " * 10, bodies=Bodies(24, 5.0, in_flight))
    with pytest.raises(InvalidRequest):
        read(b"{", bodies=bodies)
    assert in_flight.in_flight == 0


def test_one_key_leaves_room_for_others_and_gets_back_what_it_gave_back() -> None:
    one = budget(limit=10)
    with admitted(ANN) as ann:
        ann.take(one, 3)
        ann.take(one, 2)
        with pytest.raises(KeyBusy):
            ann.take(one, 1)
        with admitted(BOB) as bob:
            bob.take(one, 5)
            with pytest.raises(ServerBusy), admitted(None) as nobody:
                nobody.take(one, 1)
        with admitted(None) as nobody:
            nobody.take(one, 5)
    assert one.in_flight == 0
    assert not one._taken
    with admitted(ANN) as ann:
        ann.take(one, 5)
        with pytest.raises(KeyBusy):
            ann.take(one, 1)
    assert (one.in_flight, len(one._taken)) == (0, 0)


# --- what they are made of ---


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Arrays and objects of any keys that may be as long as somebody likes."""
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from unbounded(each, f"{path}[{i}]")
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and not {"maxItems", "prefixItems"} & schema.keys():
        yield path
    keys_are_free = schema.get("additionalProperties") and "properties" not in schema
    if schema.get("type") == "object" and keys_are_free and "maxProperties" not in schema:
        yield path
    for name, each in schema.items():
        yield from unbounded(each, f"{path}.{name}")


# A JSON schema is a tree of any shape; what is compiled of it has a limit of characters.
ANY_SHAPE = {
    ".FunctionTool.properties.parameters.anyOf[0]",
    "._Function.properties.parameters",
    ".ToolParam.properties.input_schema",
    ".ToolUseBlock.properties.input",
}


@pytest.mark.parametrize(
    "form",
    dict.fromkeys(
        model for endpoint in ENDPOINTS if endpoint.form.in_body for model in endpoint.form.models
    ),
)
def test_every_list_of_every_form_has_a_limit(form: type[BaseModel]) -> None:
    schema = form.model_json_schema(mode="validation")
    found = {path.removeprefix(".$defs") for path in unbounded(schema)}
    assert found <= ANY_SHAPE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": ""}] * 4097}, "messages must have at most 4096"),
        ({"messages": [1] * 4000}, "messages[0] must be an object, found 1"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must have at most 1024 elements"),
        ({"tools": [1] * 1025}, "tools must have at most 1024 elements"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must have at most 1024"),
        ({"guided_choice": ["a"] * 4097}, "guided_choice must have at most 4096 elements"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(129)}}, "at most 128 elements"),
        ({"messages": [{"role": "user", "content": [1] * 1025}]}, "at most 1024 elements"),
        ({"messages": [{"role": "assistant", "tool_calls": [1] * 1025}]}, "at most 1024 elements"),
    ],
)
def test_list_that_is_too_long_or_wrong_is_refused_at_its_first_element(
    fields: dict[str, Any], message: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat)
    assert message in str(caught.value)
    with pytest.raises(ValidationError) as collected:
        schemas.ChatBody.model_validate(chat)
    assert collected.value.error_count() == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * (2**20 + 1), "prompt must have at most 1048576 elements"),
        ([[1] * (2**20 + 1)], "prompt must have at most 1048576 elements"),
        (["a"] * 65_537, "prompt must have at most 65536 elements"),
        ([[1]] * 65_537, "prompt must have at most 65536 elements"),
    ],
)
def test_prompts_have_limits(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_completion({"prompt": prompt}, 1024)


def test_long_prompts_of_token_ids_are_taken() -> None:
    ask = parse_completion({"prompt": list(range(2**17))}, 1024)
    assert ask.prompts == (tuple(range(2**17)),)


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    return {"id": "a", "type": "function", "function": function}


MANY: list[Any] = [[]] * MAX_INSIDE


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": MANY}}}]},
         "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "more": MANY}]}, "tools"),
        ({"chat_template_kwargs": {"documents": MANY}}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "tool_calls": [call({"a": MANY})]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [call({"a": MANY[: MAX_INSIDE // 2]})]}] * 2},
         "messages"),
    ],
    ids=["parameters", "tool", "options", "arguments", "arguments of all"],
)  # fmt: skip
@pytest.mark.parametrize("parse", [parse_chat, parse_tokenize])
def test_values_of_any_shape_have_a_limit_in_all(
    parse: Callable[[Any], Any], fields: dict[str, Any], param: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(InvalidRequest, match="at most 65536 values inside, found more") as caught:
        parse(chat)
    assert caught.value.param == param


def test_tools_and_calls_of_many_values_are_taken() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    messages = [{"role": "assistant", "tool_calls": [call({"rows": [[1, 2, 3]] * 10})]}] * 1000
    ask = parse_chat({"messages": messages, "tools": [tool] * 1000})
    assert len(ask.tools) == len(ask.prompts[0].messages) == 1000  # type: ignore[union-attr]


def test_what_was_found_is_shown_without_being_written_out() -> None:
    class Huge(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("written out")

    assert shown([Huge([1] * 100)]) == "an array of 1"
    assert shown({"a": Huge([1] * 100)}) == "an object"
    assert shown("x" * 10_000_000) == json.dumps("x" * 81)[:77] + "..."
    assert shown([1, "a", None]) == '[1, "a", null]'


def test_body_of_millions_of_small_values_is_parsed_without_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gc

    enabled: list[bool] = []
    monkeypatch.setattr(
        "serve_app.openai.fields.from_json", lambda *_, **__: enabled.append(gc.isenabled()) or {}
    )
    parse_json(b"{}")
    assert enabled == [False]
    assert gc.isenabled()


def groups(depth: int, count: int) -> bytes:
    """So many lists in one another, again and again, until there are about `count`."""
    return b",".join([b"[" * depth + b"]" * depth] * (count // depth))


@pytest.mark.parametrize(
    ("most", "more", "message"),
    [
        (b"1" + b",1" * MAX_COMMAS, b"1" + b",1" * (MAX_COMMAS + 1),
         "has 2097153 commas; the limit is 2097152"),
        (groups(2, MAX_BRACKETS - 2), groups(2, MAX_BRACKETS),
         "has 524290 brackets; the limit is 524288"),
        (groups(100, MAX_BRACKETS - 2), groups(100, 4_000_000), "has 4000002 brackets"),
        (b"{}" + b",{}" * (MAX_BRACKETS - 3), b"{}" + b",{}" * MAX_BRACKETS,
         "has 524291 brackets; the limit"),
        (b'{"a":1' + b',"a":1' * (MAX_COLONS - 2) + b"}", b'{"a":1' + b',"a":1' * MAX_COLONS + b"}",
         "has 524290 colons; the limit is 524288"),
        (b"{}" + b',{"a":1}' * (3 * 2**17 - 2), b"{}" + b',{"a":1}' * (3 * 2**17),
         "has 786436 brackets and colons; the limit is 786432"),
    ],
    ids=["values", "lists", "lists in lists", "objects", "keys", "all"],
)  # fmt: skip
def test_body_with_more_values_than_any_request_needs_is_refused_before_it_is_parsed(
    most: bytes, more: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_json(b'{"prompt":[' + most + b"]}")["prompt"]
    monkeypatch.setattr("serve_app.openai.fields.from_json", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(PayloadTooLarge, match=message):
        parse_json(b'{"prompt":[' + more + b"]}")


def test_long_texts_full_of_marks_are_taken() -> None:
    """They are counted where they say nothing of values, too."""
    code = "for (int i[2] = {0, 1}; i[0] < std::max({a, b}); ++i[0]) { f(x[i[0]], y); }\n"
    data = '[12.5,{"lat":1.25,"lon":[3]}]\n'
    for text in (code, data):
        prompt = text * (MAX_MESSAGE_BYTES // len(text))
        assert parse_json(json.dumps({"prompt": prompt}).encode())["prompt"] == prompt


def test_values_in_the_text_of_arguments_are_counted_as_those_of_the_body() -> None:
    """A body may write a bracket as an escape."""
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * (MAX_BRACKETS + 1)}}
    with pytest.raises(PayloadTooLarge, match="is called with has 524289 brackets"):
        parse_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]})


@pytest.mark.parametrize(
    "prompt",
    ["x" * (MAX_MESSAGE_BYTES + 1), "é" * (MAX_MESSAGE_BYTES // 2 + 1), (100_000,) * 2**20,
     ChatPrompt(({"role": "user", "content": "x" * (MAX_MESSAGE_BYTES + 1)},))],
    ids=["text", "two bytes a character", "token ids", "chat"],
)  # fmt: skip
def test_prompt_that_is_too_long_to_travel_is_refused(prompt: Any) -> None:
    """Serve's gRPC between replicas would end with an internal error."""
    with pytest.raises(ContextLengthExceeded, match="the limit of a prompt, which is 3145728"):
        check_travels(prompt)


def test_prompt_is_weighed_no_further_than_the_limit() -> None:
    class Never:
        def __reduce__(self) -> str:
            pytest.fail("weighed")

    heavy = {"role": "user", "content": "x" * (MAX_MESSAGE_BYTES + 1)}
    with pytest.raises(ContextLengthExceeded):
        check_travels(ChatPrompt((heavy, {"role": "user", "content": Never()})))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/completions", {"prompt": "x" * 100_000, "stream": False}),
        ("/tokenize", {"prompt": "x" * 100_000}),
    ],
)
def test_large_prompts_are_weighed_beside_the_event_loop(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        "serve_app.front.endpoints.catalogue.check_travels",
        lambda *_: names.append(threading.current_thread().name),
    )
    with client_of(build_asgi({"fake": FakeModel()}, HttpSettings())) as client:
        assert client.post(path, json=fields).status_code == 200
    assert [name.startswith("large-bodies") for name in names] == [True]


def test_long_prompts_that_fit_travel() -> None:
    check_travels("x" * (MAX_MESSAGE_BYTES - 100))
    check_travels(tuple(range(2**18)))
    check_travels(ChatPrompt(({"role": "user", "content": "hi"},)))


def test_unknown_keys_of_an_order_are_refused_at_the_first() -> None:
    with pytest.raises(InvalidRequest, match="key 0 is unknown here"):
        parse_form(schemas.SleepForm, {f"key {i}": 1 for i in range(100_000)})
    with pytest.raises(ValidationError) as collected:
        schemas.SleepForm.model_validate({f"key {i}": 1 for i in range(100)})
    assert collected.value.error_count() == 100, "or this is not needed any more"


# --- queries ---


def query(text: bytes) -> Request:
    return Request({"type": "http", "method": "GET", "headers": [], "query_string": text})


def test_query_of_twenty_thousand_keys_is_refused_at_once() -> None:
    request = query(b"&".join(b"%d=" % i for i in range(20_000)))
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="20000 pairs; the limits are 4096 and 64"):
        parse_form(schemas.ModelQuery, query_fields(request))
    assert time.thread_time() - began_s < 0.05


def test_query_within_the_limits_is_read_whole() -> None:
    found = parse_form(schemas.WakeForm, query_fields(query(b"tags=weights&model=m&tags=kv_cache")))
    assert (found.model, found.tags) == ("m", ("weights", "kv_cache"))
    with pytest.raises(InvalidRequest, match="x63 is unknown here"):
        parse_form(
            schemas.WakeForm, query_fields(query(b"&".join(b"x%d=" % (63 - i) for i in range(64))))
        )
