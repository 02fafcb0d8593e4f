"""Our own OpenAPI document: requests as `serve_app.openai.requests` reads them, answers as we write them.

It says what clients may rely on. Fields that are not in it are ignored in requests; answers have no others
than those in it and those that OpenAI may add.
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from serve_app.config.keys import Access, KeyRing
from serve_app.front.gate import ACCESS
from serve_app.openai.requests import BODIES
from serve_app.openai.schemas import ANSWERS, COUNT, TEXT, Schema, an_object, const, ref

_EVENTS: Schema = {
    "description": "With `stream`: server-sent events, each with a chunk as OpenAI's clients read it, or with an "
    "Error; at last `[DONE]`."
}


def document(version: str, models: Sequence[str], keys: KeyRing | None = None) -> Schema:
    """The document of a server with these models.

    Args:
        keys: the server's. What they guard asks for one in the document, too; for the rest, and without
            them, a key may be sent.
    """
    schemas = _request_schemas(models)
    paths = _paths(models)
    for path, operations in paths.items():
        for method, operation in operations.items():
            operation["operationId"] = _operation_id(method, path)
            if links := _LINKS.get(path):
                operation["responses"]["200"]["links"] = links
            _secure(operation, method, _ACCESS[path], keys or KeyRing())
    return {
        "openapi": "3.1.0",
        "info": {"title": "sleepserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ANSWERS},
            "securitySchemes": _SCHEMES,
        },
    }


def _paths(models: Sequence[str]) -> Schema:
    model = {"name": "model", "in": "query", "schema": {"enum": list(models)}}
    in_path = {"name": "model_id", "in": "path", "required": True, "schema": {"enum": list(models)}}
    return {
        "/v1/models": {"get": _operation("The models; wakes none.", ref("ModelList"))},
        "/v1/models/{model_id}": {
            "get": _operation("One model; does not wake it.", ref("Model"), in_path)
        },
        "/v1/chat/completions": {
            "post": _generation("/v1/chat/completions", "OpenAI's chat.", "ChatCompletion")
        },
        "/v1/completions": {
            "post": _generation("/v1/completions", "OpenAI's completions.", "Completion")
        },
        "/completions": {
            "post": _generation(
                "/completions", "Plain text, or one object.", "Output", "text/plain"
            )
        },
        "/tokenize": {
            "post": _posted("/tokenize", "Token ids of a text or of messages.", "Tokens")
        },
        "/detokenize": {"post": _posted("/detokenize", "The text of token ids.", "Detokenized")},
        "/tokenizer_info": {
            "get": _operation("Special tokens, chat template.", ref("TokenizerInfo"), model)
        },
        "/sleep": {"post": _posted("/sleep", "Give the device memory back.", "Controlled")},
        "/wake_up": {"post": _posted("/wake_up", "Wake, and end a hold.", "Controlled")},
        "/is_sleeping": {
            "get": _operation("Whether every replica is asleep.", ref("IsSleeping"), model)
        },
        "/scaleout": {"post": _posted("/scaleout", "More replicas.", "Scaled")},
        "/scalein": {"post": _posted("/scalein", "Fewer replicas.", "Scaled")},
        "/replicas": {"get": _operation("How many, and how they are.", ref("Replicas"), model)},
        "/health": {"get": _health(model)},
        "/ping": {"get": _operation("Liveness.", an_object(status={"const": "alive"}))},
        "/version": {"get": _operation("Our version.", an_object(version=TEXT))},
        "/load": {"get": _operation("Requests in flight.", an_object(server_load=COUNT))},
        "/openapi.json": {"get": _operation("This document.", {"type": "object"})},
    }


def _operation(summary: str, answer: Schema, *parameters: Schema) -> Schema:
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": _response("An answer.", answer),
            "default": _response("OpenAI's error object.", ref("Error")),
        },
    }
    return operation | ({"parameters": list(parameters)} if parameters else {})


def _posted(path: str, summary: str, answer: str) -> Schema:
    forms = [ref(form.__name__.lstrip("_")) for form in BODIES[path]]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    required = any(
        field.is_required() for form in BODIES[path] for field in form.model_fields.values()
    )
    body = {"required": required, "content": {"application/json": {"schema": schema}}}
    return _operation(summary, ref(answer)) | {"requestBody": body}


def _generation(
    path: str, summary: str, answer: str, stream_type: str = "text/event-stream"
) -> Schema:
    operation = _posted(path, summary, answer)
    # Of what stands in a stream of events OpenAPI 3.1 has no words; a schema would be one of each event.
    streamed = TEXT if stream_type == "text/plain" else _EVENTS
    operation["responses"]["200"]["content"] |= {stream_type: {"schema": streamed}}
    return operation


def _health(model: Schema) -> Schema:
    operation = _operation("Readiness; 200 while asleep, too.", ref("Health"), model)
    operation["responses"]["503"] = _response("All replicas have failed.", ref("Health"))
    return operation


def _response(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


# --- what an answer is good for ---


def _operation_id(method: str, path: str) -> str:
    return re.sub(r"\W+", "_", f"{method}{path}").strip("_")


def _link(method: str, path: str, **fields: str) -> Schema:
    """An operation that takes parts of an answer, each by its JSON pointer.

    They are what the path has in braces, or else fields of the body.
    """
    found = {name: f"$response.body#{pointer}" for name, pointer in fields.items()}
    where = "parameters" if all(f"{{{name}}}" in path for name in found) else "requestBody"
    return {"operationId": _operation_id(method, path), where: found}


_LINKS: Schema = {
    "/v1/models": {"first": _link("get", "/v1/models/{model_id}", model_id="/data/0/id")},
    "/tokenize": {
        "text": _link("post", "/detokenize", tokens="/tokens"),
        "completion": _link("post", "/v1/completions", prompt="/tokens"),
    },
    "/detokenize": {"tokens": _link("post", "/tokenize", prompt="/prompt")},
}

# --- keys ---

_INFERENCE_KEY, _ADMIN_KEY = "inference_key", "admin_key"

_SCHEMES: Schema = {
    _INFERENCE_KEY: {
        "type": "http",
        "scheme": "bearer",
        "description": "A key for inference, of servers that have such keys.",
    },
    _ADMIN_KEY: {
        "type": "http",
        "scheme": "bearer",
        "description": "An admin key; good for everything. The routes of operators take no other, as soon as "
        "the server has keys of any kind.",
    },
}

# By the paths of the document: there a path's parameter has no type.
_ACCESS = {path.replace(":path}", "}"): access for path, access in ACCESS.items()}


def _secure(operation: Schema, method: str, access: Access, keys: KeyRing) -> None:
    """Which keys an operation takes, whether it may do without, and how it refuses."""
    if access is Access.PUBLIC:
        return
    names = [_ADMIN_KEY] if access is Access.ADMIN else [_INFERENCE_KEY, _ADMIN_KEY]
    optional: list[Schema] = [] if keys.guards(access) else [{}]
    operation["security"] = [*optional, *({name: []} for name in names)]
    responses = operation["responses"]
    responses["401"] = _response("No key, or a wrong one.", ref("Error"))
    responses["401"]["headers"] = {"WWW-Authenticate": {"schema": const("Bearer")}}
    if access is Access.ADMIN:
        responses["403"] = _response("A key for inference; an admin key is needed.", ref("Error"))
    elif method != "get":
        responses["429"] = _response("Too many at once, of this key or of all.", ref("Error"))
        responses["429"]["headers"] = {"Retry-After": {"schema": COUNT}}


# --- requests ---


def _request_schemas(models: Sequence[str]) -> Schema:
    """Every form of a body and what is in it, by name."""
    forms = {form for each in BODIES.values() for form in each}
    ordered = sorted(forms, key=lambda form: form.__name__)
    _, found = models_json_schema(
        [(form, "validation") for form in ordered], ref_template="#/components/schemas/{model}"
    )
    named: Schema = {name.lstrip("_"): schema for name, schema in found["$defs"].items()}
    for form in ordered:
        body = named[form.__name__.lstrip("_")]
        body.pop("description", None)
        body["properties"]["model"] = {"enum": list(models)}
        for name, schema in body["properties"].items():
            if name not in body.get("required", ()):  # null means absent
                schema.pop("default", None)
                choices = schema["anyOf"] if list(schema) == ["anyOf"] else [schema]
                if {"type": "null"} not in choices:
                    body["properties"][name] = {"anyOf": [*choices, {"type": "null"}]}
    return _without_underscores(named)  # type: ignore[no-any-return]


def _without_underscores(value: Any) -> Any:
    """Names of classes that are nobody's business do not show."""
    if isinstance(value, list):
        return [_without_underscores(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner.replace("/schemas/_", "/schemas/")
        if key == "$ref"
        else _without_underscores(inner)
        for key, inner in value.items()
        if key != "title" or not isinstance(inner, str)
    }
