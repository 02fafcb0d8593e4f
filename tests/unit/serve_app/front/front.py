"""An application over FakeModels, what to ask it, and what its answers must be."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Completion
from pydantic import BaseModel
from starlette.testclient import TestClient

from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

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


@contextmanager
def serving(*models: FakeModel, **settings: Any) -> Iterator[TestClient]:
    served = {model.info.model_id: model for model in models}
    with client_of(build_asgi(served, HttpSettings(**settings))) as client:
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


def scope_of(path: str, method: str = "POST") -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8000")],
        "scheme": "http",
        "server": ("test", 80),
    }


def count_ids(monkeypatch: pytest.MonkeyPatch, uuid4: str) -> None:
    """Have a module's `uuid4`, by its full name, give 0, 1, 2, ..."""
    numbers = itertools.count()
    monkeypatch.setattr(uuid4, lambda: SimpleNamespace(hex=str(next(numbers))))
