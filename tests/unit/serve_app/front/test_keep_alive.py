"""`keep_alive` in the bodies that wake a model."""

import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.fakes import FakeModel
from tests.unit.serve_app.front.front import HI, serving

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/completions": {"prompt": "hi", "stream": False},
}


def post(client: TestClient, path: str, **fields: Any) -> Any:
    return client.post(path, json={"model": "fake", **BODIES[path], **fields})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        ("0", 0.0),
        (300, 300.0),
        (1.5, 1.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("300ms", 0.3),
        (-1, math.inf),
        ("-1m", math.inf),
        (10**400, math.inf),
    ],
)
def test_keep_alive_reaches_the_replica(path: str, value: object, seconds: float | None) -> None:
    model = FakeModel()
    with serving(model) as client:
        assert post(client, path, keep_alive=value).status_code == 200
    assert [request.keep_alive_s for request in model.requests] == [seconds]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["", "5", "soon", "5 m", True, [], {}, "9" * 100 + "s"])
def test_keep_alive_that_is_none_is_refused_by_its_name(path: str, value: object) -> None:
    model = FakeModel()
    with serving(model) as client:
        response = post(client, path, keep_alive=value)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("keep_alive must be a number of seconds, or a duration such as")
    assert model.requests == []


def test_without_keep_alive_nothing_is_asked_for() -> None:
    model = FakeModel()
    with serving(model) as client:
        for path in BODIES:
            assert post(client, path).status_code == 200
    assert {request.keep_alive_s for request in model.requests} == {None}


def test_every_prompt_of_a_request_asks_for_it() -> None:
    model = FakeModel()
    with serving(model) as client:
        post(client, "/v1/completions", prompt=["a", "b"], keep_alive="1h")
    assert [request.keep_alive_s for request in model.requests] == [3600, 3600]
