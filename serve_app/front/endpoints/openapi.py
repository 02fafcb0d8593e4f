"""Our own OpenAPI document, of the endpoints as `serve_app.front.endpoints.catalogue` describes them.

It says what clients may rely on. Fields that are not in it are ignored in requests; answers have no others
than those in it and those that OpenAI may add.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from serve_app.anthropic import schemas as anthropic_schemas
from serve_app.config.keys import Access, KeyRing
from serve_app.front.dialects import Dialect
from serve_app.front.endpoints.catalogue import (
    COMPLETION,
    DETOKENIZE,
    ENDPOINTS,
    MODEL,
    MODELS,
    TOKENIZE,
)
from serve_app.front.endpoints.endpoint import EVENTS, JSON, TEXT, Answer, Endpoint, Form
from serve_app.openai import schemas
from serve_app.openai.schemas import COUNT, Schema, const, ref
from serve_app.responses import schemas as responses_schemas

_DOCUMENTED = [endpoint for endpoint in ENDPOINTS if endpoint.is_documented]

# Of all that endpoints answer, by name.
ANSWERS: Schema = {
    **schemas.ANSWERS,
    **responses_schemas.ANSWERS,
    **anthropic_schemas.ANSWERS,
}


def document(version: str, models: Sequence[str], keys: KeyRing | None = None) -> Schema:
    """The document of a server with these models.

    Args:
        keys: the server's. What they guard asks for one in the document, too; for the rest, and without
            them, a key may be sent.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "sleepserve", "version": version},
        "paths": {
            each.public_path: {each.method.lower(): _operation(each, models, keys or KeyRing())}
            for each in _DOCUMENTED
        },
        "components": {
            "schemas": {**_request_schemas(models), **ANSWERS},
            "securitySchemes": _SCHEMES,
        },
    }


def _operation(endpoint: Endpoint[Any], models: Sequence[str], keys: KeyRing) -> Schema:
    operation: Schema = {
        "summary": endpoint.summary,
        "operationId": _operation_id(endpoint),
        "responses": _responses(endpoint),
    }
    if parameters := _parameters(endpoint, models):
        operation["parameters"] = parameters
    if endpoint.form.in_body:
        operation["requestBody"] = _body(endpoint.form)
    if endpoint.access is not Access.PUBLIC:
        operation["security"] = _security(endpoint, keys)
    return operation


def _parameters(endpoint: Endpoint[Any], models: Sequence[str]) -> list[Schema]:
    """Of the path and of the query; what a body has, too, is described there."""
    schema = {"schema": {"enum": list(models)}}  # all of them name a model
    in_path = re.findall(r"{(\w+)}", endpoint.public_path)
    found = [{"name": name, "in": "path", "required": True, **schema} for name in in_path]
    if endpoint.form.in_query and not endpoint.form.in_body:
        (form,) = endpoint.form.models
        found += [{"name": name, "in": "query", **schema} for name in form.model_fields]
    return found


def _body(form: Form[Any]) -> Schema:
    forms = [ref(model.__name__) for model in form.models]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return {"required": form.is_required, "content": {JSON: {"schema": schema}}}


def _responses(endpoint: Endpoint[Any]) -> Schema:
    answer = endpoint.answer
    dialect = endpoint.dialect
    found = {
        "200": _response("An answer.", answer, dialect),
        "default": _error(f"{dialect.name}'s error object.", dialect),
    }
    if links := _LINKS.get(endpoint):
        found["200"]["links"] = links
    for status, description in answer.other_statuses.items():
        found[str(status)] = _response(description, answer, dialect)
    for status, description in endpoint.errors.items():
        found[str(status)] = _error(description, dialect)
        if headers := _ERROR_HEADERS.get(status):
            found[str(status)]["headers"] = headers
    return found


def _response(description: str, answer: Answer, dialect: Dialect) -> Schema:
    streamed = {TEXT: schemas.TEXT, EVENTS: _events(dialect)}
    content = {kind: {"schema": streamed.get(kind, answer.schema)} for kind in answer.kinds}
    return {"description": description, "content": content}


def _events(dialect: Dialect) -> Schema:
    """Of what stands in a stream of events OpenAPI 3.1 has no words; a schema would be one of each event."""
    end = "; at last `[DONE]`." if dialect.end else "."
    return {
        "description": "With `stream`: server-sent events, each with a chunk as "
        f"{dialect.name}'s clients read it, or with an {dialect.error_schema}{end}"
    }


def _error(description: str, dialect: Dialect) -> Schema:
    return _response(description, Answer(ref(dialect.error_schema)), dialect)


# --- what an answer is good for ---


def _operation_id(endpoint: Endpoint[Any]) -> str:
    return re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.public_path}").strip("_")


def _link(endpoint: Endpoint[Any], **fields: str) -> Schema:
    """An operation that takes parts of an answer, each by its JSON pointer.

    They are what the path has in braces, or else fields of the body.
    """
    found = {name: f"$response.body#{pointer}" for name, pointer in fields.items()}
    where = (
        "parameters"
        if all(f"{{{name}}}" in endpoint.public_path for name in found)
        else "requestBody"
    )
    return {"operationId": _operation_id(endpoint), where: found}


_LINKS: Mapping[Endpoint[Any], Schema] = {
    MODELS: {"first": _link(MODEL, model_id="/data/0/id")},
    TOKENIZE: {
        "text": _link(DETOKENIZE, tokens="/tokens"),
        "completion": _link(COMPLETION, prompt="/tokens"),
    },
    DETOKENIZE: {"tokens": _link(TOKENIZE, prompt="/prompt")},
}

# --- keys ---

_INFERENCE_KEY, _ADMIN_KEY = "inference_key", "admin_key"


def _header_scheme(header: str) -> str:
    """The name of the scheme whose key is in a header of its own."""
    return header.replace("-", "_")


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
    **{
        _header_scheme(dialect.key_header): {
            "type": "apiKey",
            "in": "header",
            "name": dialect.key_header,
            "description": f"Where {dialect.name}'s clients send a key of either kind. It is looked at before "
            "`Authorization`.",
        }
        for dialect in {endpoint.dialect for endpoint in _DOCUMENTED}
        if dialect.key_header is not None
    },
}

_ERROR_HEADERS: Mapping[int, Schema] = {
    401: {"WWW-Authenticate": {"schema": const("Bearer")}},
    429: {"Retry-After": {"schema": COUNT}},
}


def _security(endpoint: Endpoint[Any], keys: KeyRing) -> list[Schema]:
    """Which keys are taken, and whether a client may do without."""
    names = [_ADMIN_KEY] if endpoint.access is Access.ADMIN else [_INFERENCE_KEY, _ADMIN_KEY]
    if endpoint.dialect.key_header is not None:
        names.append(_header_scheme(endpoint.dialect.key_header))
    optional: list[Schema] = [] if keys.guards(endpoint.access) else [{}]
    return [*optional, *({name: []} for name in names)]


# --- requests ---


def _request_schemas(models: Sequence[str]) -> Schema:
    """Every form of a body and what is in it, by name."""
    forms = {model for each in _DOCUMENTED if each.form.in_body for model in each.form.models}
    ordered = sorted(forms, key=lambda form: form.__name__)
    _, found = models_json_schema(
        [(form, "validation") for form in ordered], ref_template="#/components/schemas/{model}"
    )
    named: Schema = {name.lstrip("_"): schema for name, schema in found["$defs"].items()}
    for form in ordered:
        body = named[form.__name__]
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
