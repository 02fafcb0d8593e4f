"""Endpoints are described completely, and once."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.config.http import HttpSettings
from serve_app.front import app
from serve_app.front.app import build_asgi
from serve_app.front.endpoints.catalogue import CHAT, ENDPOINTS, PING, endpoints_table
from serve_app.front.endpoints.endpoint import JSON, Endpoint
from serve_app.front.endpoints.openapi import ANSWERS


@pytest.mark.parametrize("missing", ["methods", "path", "access", "form", "answer", "summary"])
def test_nothing_is_left_out(missing: str) -> None:
    said: dict[str, Any] = {
        each.name: getattr(CHAT, each.name) for each in dataclasses.fields(CHAT)
    }
    del said[missing]
    with pytest.raises(TypeError, match=missing):
        Endpoint(**said)


def test_no_path_is_described_twice() -> None:
    """The gate knows one access of each."""
    assert len({each.path for each in ENDPOINTS}) == len(ENDPOINTS)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.path)
def test_form_and_answer_are_described(endpoint: Endpoint[Any]) -> None:
    form, answer = endpoint.form, endpoint.answer
    assert bool(form.models) == (form.in_body or form.in_query)
    assert not form.in_body or endpoint.method == "POST"
    assert endpoint.summary.endswith(".")
    assert answer.kinds
    assert (JSON in answer.kinds) == (answer.schema is not None)
    name = (answer.schema or {}).get("$ref", "").rpartition("/")[2]
    assert not name or name in ANSWERS


def test_endpoint_that_nobody_answers_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    new = dataclasses.replace(PING, path="/new")
    for described in ((*ENDPOINTS, new), tuple(each for each in ENDPOINTS if each is not PING)):
        monkeypatch.setattr(app, "ENDPOINTS", described)
        with pytest.raises(AssertionError):
            build_asgi({}, HttpSettings())


def test_table_has_a_row_for_each() -> None:
    _, _, *rows = endpoints_table().splitlines()
    assert len(rows) == len(ENDPOINTS)
    for row, endpoint in zip(rows, ENDPOINTS, strict=True):
        assert f"{endpoint.public_path}`" in row
        assert row.count("|") == 7


def test_reference_is_that_of_the_code(project: Path) -> None:
    text = (project / "docs" / "api.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- endpoints: .*? -->\n(.*?)<!-- /endpoints -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == endpoints_table(), (
        "paste what `python -m serve_app.front.endpoints.catalogue` prints"
    )
