"""The document at /openapi.json: complete, and true of what we answer."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from actors.protocol import MessageForm
from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access, read_keys
from serve_app.front.app import build_asgi
from serve_app.front.endpoints import openapi
from serve_app.front.gate import ACCESS
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

HI = [{"role": "user", "content": "hi"}]
CALLED = [
    {"type": "thinking", "thinking": "I add.", "signature": ""},
    {"type": "text", "text": "So:"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
]
ANSWERED = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "2"}]}
    ],
}
IMAGE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def client(model: FakeModel) -> Iterator[TestClient]:
    with client_of(build_asgi({"fake": model}, HttpSettings())) as client:
        yield client


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def check(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    rooted = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator.check_schema(rooted)
    jsonschema.Draft202012Validator(rooted).validate(value)


def test_paths_are_routes_and_openai_s_routes_are_paths(document, client):
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    paths = {(method, path) for path, each in document["paths"].items() for method in each}
    assert paths <= routes
    ours = {
        (method, path)
        for method, path in routes
        if method != "head" and path.startswith(("/v1/", "/token", "/detoken", "/completions"))
    }
    assert ours <= paths


def test_links_lead_from_what_is_answered_to_what_is_taken(document):
    operations = {
        operation["operationId"]: (path, operation)
        for path, each in document["paths"].items()
        for operation in each.values()
    }
    assert len(operations) == sum(len(each) for each in document["paths"].values())
    links = [
        (operation, link)
        for _, operation in operations.values()
        for link in operation["responses"]["200"].get("links", {}).values()
    ]
    assert links
    for operation, link in links:
        (told,) = properties(document, operation["responses"]["200"])
        path, taken = operations[link["operationId"]]
        for name, expression in link.get("requestBody", {}).items():
            assert any(name in form for form in properties(document, taken["requestBody"]))
            assert expression.removeprefix("$response.body#/") in told
        for name, expression in link.get("parameters", {}).items():
            assert f"{{{name}}}" in path
            assert expression.removeprefix("$response.body#/").partition("/")[0] in told


def properties(document: dict[str, Any], content: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each form that a body may have."""
    schema = content["content"]["application/json"]["schema"]
    names = [form["$ref"].rpartition("/")[2] for form in schema.get("anyOf", [schema])]
    return [document["components"]["schemas"][name]["properties"] for name in names]


def test_every_reference_leads_somewhere(document):
    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    names = {reference.rpartition("/")[2] for reference in references(document)}
    assert names <= set(document["components"]["schemas"])
    assert not any(name.startswith("_") for name in document["components"]["schemas"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/v1/chat/completions", {"messages": HI}),
        (
            "post",
            "/v1/chat/completions",
            {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2},
        ),
        (
            "post",
            "/v1/chat/completions",
            {"messages": HI, "tools": TOOLS, "stop": "x", "model": None},
        ),
        (
            "post",
            "/v1/completions",
            {"prompt": [[1], [2]], "echo": True, "logprobs": 2, "stop": ["x"]},
        ),
        ("post", "/v1/responses", {"input": "hi"}),
        (
            "post",
            "/v1/responses",
            {
                "input": [*HI, {"type": "function_call_output", "call_id": "1", "output": "2"}],
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                "tool_choice": {"type": "function", "name": "f"},
                "instructions": None,
            },
        ),
        ("post", "/v1/messages", {"messages": HI, "max_tokens": 9}),
        (
            "post",
            "/v1/messages",
            {
                "messages": [*HI, {"role": "assistant", "content": CALLED}, ANSWERED],
                "max_tokens": 9,
                "system": [{"type": "text", "text": "Add."}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                "stop_sequences": ["END"],
                "temperature": None,
            },
        ),
        ("post", "/v1/messages/count_tokens", {"messages": HI}),
        ("post", "/completions", {"stream": False}),
        ("post", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("post", "/tokenize", {"messages": HI}),
        ("post", "/detokenize", {"tokens": [104]}),
        ("post", "/sleep", {"level": 2}),
        ("post", "/wake_up", {"tags": "weights"}),
        ("post", "/scaleout", {"replicas": 2}),
        ("post", "/scalein", {"replicas": 1}),
        ("get", "/tokenizer_info", None),
        ("get", "/v1/models", None),
        ("get", "/v1/models/{model_id}", None),
        ("get", "/is_sleeping", None),
        ("get", "/replicas", None),
        ("get", "/health", None),
        ("get", "/version", None),
        ("get", "/load", None),
        ("get", "/openapi.json", None),
    ],
)
def test_requests_and_answers_are_as_documented(document, client, model, method, path, body):
    model.form = MessageForm("think", "qwen", in_reasoning=True)
    model.pieces = ("I add", ".</think>", '4<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    operation = document["paths"][path][method]
    if body is not None:
        check(document, operation["requestBody"]["content"]["application/json"]["schema"], body)
    response = client.request(method, path.replace("{model_id}", "fake"), json=body)
    assert response.status_code == 200, response.text
    check(
        document,
        operation["responses"]["200"]["content"]["application/json"]["schema"],
        response.json(),
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": HI, "n": 0}),
        ("/v1/chat/completions", {"messages": HI, "model": "gpt"}),
        ("/v1/chat/completions", {"messages": HI, "tool_choice": "maybe"}),
        ("/v1/responses", {"input": []}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 0}),
        ("/v1/messages", {"messages": HI}),
        ("/v1/messages", {"messages": HI, "max_tokens": 0}),
        ("/v1/messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [IMAGE], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": []}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": "hi", "logprobs": 6}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/sleep", {"level": 3}),
    ],
)
def test_what_is_refused_is_not_documented(document, client, path, body):
    operation = document["paths"][path]["post"]
    with pytest.raises(jsonschema.ValidationError):
        check(document, operation["requestBody"]["content"]["application/json"]["schema"], body)
    response = client.post(path, json=body)
    assert 400 <= response.status_code < 500
    check(
        document,
        operation["responses"]["default"]["content"]["application/json"]["schema"],
        response.json(),
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_events_of_a_stream_are_no_strings(document, client, path):
    """schemathesis holds the schema of a stream against each of its events."""
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HI, "max_tokens": 9}
    answer = client.post(path, json=body | {"stream": True})
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    schema = content[answer.headers["content-type"].partition(";")[0]]["schema"]
    for line in filter(None, answer.text.split("\n")):
        check(document, schema, {"event": "message", "data": line.removeprefix("data: ")})


# --- keys ---

USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"
USERS = {"SLEEPSERVE_API_KEYS": USER}
ADMINS = {"SLEEPSERVE_ADMIN_KEYS": ADMIN}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, Access, dict[str, Any]]]:
    """Method, path, access, operation; of all."""
    listed = {path.replace(":path", ""): access for path, access in ACCESS.items()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, listed[path], operation


@pytest.mark.parametrize(
    ("environ", "inference", "control"),
    [
        ({}, True, True),
        (USERS, False, False),
        (ADMINS, True, False),
        (USERS | ADMINS, False, False),
    ],
)
def test_keys_are_required_where_they_are(environ, inference, control):
    """And optional elsewhere; the two flags say where a client may do without."""
    document = openapi.document("1", ["fake"], read_keys(None, None, environ))
    schemes = document["components"]["securitySchemes"]
    assert {name: (each["type"], each.get("scheme")) for name, each in schemes.items()} == {
        "inference_key": ("http", "bearer"),
        "admin_key": ("http", "bearer"),
        "x_api_key": ("apiKey", None),
    }
    seen = set()
    for _, path, access, operation in operations(document):
        seen.add(access)
        if access is Access.PUBLIC:
            assert "security" not in operation
            continue
        ways = operation["security"]
        assert ({} in ways) is (inference if access is Access.INFERENCE else control), path
        takes = {name for way in ways for name in way}
        assert takes <= set(schemes)
        assert ("inference_key" in takes) is (access is Access.INFERENCE)
        assert "admin_key" in takes
        assert ("x_api_key" in takes) is path.startswith("/v1/messages")
    assert seen == set(Access)


def test_served_document_knows_the_keys(model):
    keys = read_keys(None, None, USERS | ADMINS)
    with client_of(build_asgi({"fake": model}, HttpSettings(), keys=keys)) as client:
        answer = client.get("/openapi.json", headers={"Authorization": f"Bearer {USER}"})
    paths = answer.json()["paths"]
    assert paths["/sleep"]["post"]["security"] == [{"admin_key": []}]
    assert {} not in paths["/v1/completions"]["post"]["security"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/completions"])
def test_header_of_a_scheme_carries_the_key_where_the_document_says_so(model, path):
    keys = read_keys(None, None, USERS | ADMINS)
    document = openapi.document("1", ["fake"], keys)
    scheme = document["components"]["securitySchemes"]["x_api_key"]
    assert scheme["in"] == "header"
    taken = {"x_api_key": []} in document["paths"][path]["post"]["security"]
    body = {"messages": HI, "prompt": "hi", "max_tokens": 9}
    with client_of(build_asgi({"fake": model}, HttpSettings(), keys=keys)) as client:
        for key in (USER, ADMIN):
            answer = client.post(path, json=body, headers={scheme["name"]: key})
            assert answer.status_code == (200 if taken else 401)
        wrong = client.post(path, json=body, headers={scheme["name"]: "wrong" * 5})
        assert wrong.status_code == 401


def test_refusals_are_as_documented():
    keys = read_keys(None, None, USERS | ADMINS)
    document = openapi.document("1", ["fake"], keys)
    with client_of(build_asgi({"fake": FakeModel()}, HttpSettings(), keys=keys)) as client:
        for method, path, access, operation in operations(document):
            expected = {Access.PUBLIC: (), Access.INFERENCE: (401,), Access.ADMIN: (401, 403)}
            documented = {int(code) for code in operation["responses"] if code in ("401", "403")}
            assert documented == set(expected[access]), path
            for code, key in ((401, None), (401, "wrong" * 5), (403, USER)):
                if code not in documented:
                    continue
                answer = client.request(
                    method,
                    path.replace("{model_id}", "fake"),
                    headers={} if key is None else {"Authorization": f"Bearer {key}"},
                )
                assert answer.status_code == code, path
                told = operation["responses"][str(code)]
                check(document, told["content"]["application/json"]["schema"], answer.json())
                for name, header in told.get("headers", {}).items():
                    check(document, header["schema"], answer.headers[name])
