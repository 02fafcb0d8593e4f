"""Every route without a key, with a wrong one, with one for inference and with one for operators."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access, KeyRing, read_keys
from serve_app.front import gate
from serve_app.front.app import build_asgi
from serve_app.front.gate import ACCESS
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"
BOTH = read_keys(
    None, None, {"SLEEPSERVE_API_KEYS": f"ann:{USER}", "SLEEPSERVE_ADMIN_KEYS": f"ops:{ADMIN}"}
)
TEXT = {"model": "fake", "prompt": "hi"}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": TEXT,
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/completions": {"prompt": "hi", "stream": False},
    "/tokenize": TEXT,
    "/detokenize": {"model": "fake", "tokens": [104, 105]},
}
REFUSED = (401, 403)


def application(keys: KeyRing, **settings: Any) -> Starlette:
    return build_asgi({"fake": FakeModel()}, HttpSettings(**settings), keys=keys)


@contextmanager
def serving(keys: KeyRing = BOTH, **settings: Any) -> Iterator[TestClient]:
    with client_of(application(keys, **settings)) as client:
        yield client


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def every_route() -> Iterator[tuple[str, str, str]]:
    """Method, path to ask for, path in the table."""
    for route in application(KeyRing()).routes:
        assert isinstance(route, Route | Mount), f"{route} is none that the gate looks at"
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/page.css", route.path
            continue
        path = route.path.replace("{model_id:path}", "fake")
        for method in sorted(route.methods or ()):
            yield method, path, route.path


ROUTES = list(every_route())


def status_of(client: TestClient, method: str, path: str, key: str | None) -> int:
    if path == "/status/events":  # endless: the head of the answer says it
        return asyncio.run(status_of_head(client.app, method, path, key))
    return client.request(method, path, headers=bearer(key), json=BODIES.get(path)).status_code


async def status_of_head(app: Any, method: str, path: str, key: str | None) -> int:
    """Of an answer that is not read to its end, to a path that no client library has tidied up."""
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    headers = [(name.lower().encode(), value.encode()) for name, value in bearer(key).items()]
    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers,
        "root_path": "",
    }  # fmt: skip

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            told.set_result(message["status"])

    async def receive() -> Any:
        if told.done():
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    work = asyncio.create_task(app(scope, receive, send))
    status = await told
    work.cancel()
    await asyncio.wait([work])
    return status


def test_table_has_every_route_and_no_other() -> None:
    assert {listed for _, _, listed in ROUTES} == set(ACCESS)


@pytest.mark.parametrize(("method", "path", "listed"), ROUTES)
def test_route(method: str, path: str, listed: str) -> None:
    with serving() as client:
        found = [status_of(client, method, path, key) for key in (None, "wrong" * 5, USER, ADMIN)]
    without, wrong, user, admin = found
    assert admin not in REFUSED
    assert admin < 400 or path == "/scalein"  # one replica is the least
    refusals = {
        Access.PUBLIC: (admin, admin, admin),
        Access.INFERENCE: (401, 401, admin),
        Access.ADMIN: (401, 401, 403),
    }
    assert (without, wrong, user) == refusals[ACCESS[listed]]


CONTROLS = ["/sleep", "/wake_up", "/wakeup", "/scaleout", "/scalein"]


@pytest.mark.parametrize("path", CONTROLS)
def test_refused_order_does_nothing(path: str) -> None:
    model = FakeModel()
    with client_of(build_asgi({"fake": model}, HttpSettings(), keys=BOTH)) as client:
        for key in (None, "wrong" * 5, USER):
            assert client.post(path, headers=bearer(key)).status_code in REFUSED
    assert model.orders == []
    assert model.scaler.written == []


@pytest.mark.parametrize(
    "path", ["//sleep", "/sleep/", "/sleep\n", "/v1/../sleep", "/Sleep", "/v1/models/../../sleep"]
)
def test_other_spellings_reach_no_order(path: str) -> None:
    model = FakeModel()
    app = build_asgi({"fake": model}, HttpSettings(), keys=BOTH)
    assert asyncio.run(status_of_head(app, "POST", path, USER)) in (403, 404, 405)
    assert asyncio.run(status_of_head(app, "POST", path, None)) == 401
    assert model.orders == []


def test_route_that_nobody_decided_on_is_for_operators() -> None:
    async def new(request: Request) -> Response:
        return PlainTextResponse("new")

    app = application(BOTH)
    app.router.routes.append(Route("/new", new))
    with client_of(app) as client:
        found = [client.get("/new", headers=bearer(key)).status_code for key in (None, USER, ADMIN)]
    assert found == [401, 403, 200]


def test_no_such_route_is_told_to_those_with_a_key() -> None:
    with serving() as client:
        found = [
            client.post("/v1/none", headers=bearer(k)).status_code for k in (None, USER, ADMIN)
        ]
    assert found == [401, 404, 404]


@pytest.mark.parametrize(
    ("keys", "inference", "control"),
    [
        ({}, [200, 200], [200, 200]),
        ({"SLEEPSERVE_API_KEYS": USER}, [401, 200], [401, 403]),
        ({"SLEEPSERVE_ADMIN_KEYS": ADMIN}, [200, 200], [401, 401]),
    ],
)
def test_only_some_keys_are_set(
    keys: dict[str, str], inference: list[int], control: list[int]
) -> None:
    """Asked without a key, and with one for inference."""
    with serving(read_keys(None, None, keys)) as client:
        for path, expected in (("/v1/completions", inference), ("/sleep", control)):
            body = BODIES.get(path)
            found = [
                client.post(path, json=body, headers=bearer(k)).status_code for k in (None, USER)
            ]
            assert found == expected


def test_refusals_are_openai_s() -> None:
    with serving() as client:
        missing = client.get("/v1/models")
        other = client.get("/v1/models", headers={"Authorization": f"Basic {USER}"})
        wrong = client.get("/v1/models", headers=bearer("wrong" * 5))
        lower = client.get("/v1/models", headers={"Authorization": f"bearer {USER}"})
        user = client.post("/sleep", headers=bearer(USER))
    assert lower.status_code == 200
    for response in (missing, other, wrong):
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert "Authorization: Bearer KEY" in missing.json()["error"]["message"]
    assert "wrong" not in wrong.text
    assert user.status_code == 403
    assert user.json()["error"] == {
        "message": "this route needs an admin key",
        "type": "invalid_request_error",
        "param": None,
        "code": "admin_key_required",
    }


def test_orders_are_logged_with_the_name_of_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving() as client:
        client.post("/sleep", headers=bearer(ADMIN))
        client.get("/replicas", headers=bearer(ADMIN))
    lines = [
        record.getMessage() for record in caplog.records if record.name == "serve_app.front.gate"
    ]
    assert [line.partition(": ")[2] for line in lines] == ["/sleep with the key ops"]
    assert ADMIN not in caplog.text


# --- files that change ---


def test_key_that_was_taken_from_its_file_opens_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(gate, "_LOOK_INTERVAL_S", 0.0)
    file = tmp_path / "users"

    def write(text: str) -> None:
        file.write_text(text)
        file.chmod(0o600)

    def found() -> list[int]:
        return [client.get("/load", headers=bearer(key)).status_code for key in (USER, ADMIN)]

    write(f"ann:{USER}")
    with serving(read_keys(str(file), None, {})) as client:
        assert found() == [200, 401]
        write(f"bob:{ADMIN}")
        assert found() == [401, 200]
        assert "there are now bob" in caplog.text
        write("# nobody, so that whoever emptied it gets no open server")
        assert found() == [401, 200]
        assert found() == [401, 200]
        assert caplog.text.count("those of before hold: ") == 1
        write(f"ann:{USER}")
        assert found() == [200, 401]
    assert not any(key in caplog.text for key in (USER, ADMIN))


def test_files_are_not_looked_at_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_LOOK_INTERVAL_S", 3600.0)
    file = tmp_path / "users"
    file.write_text(USER)
    file.chmod(0o600)
    with serving(read_keys(str(file), None, {})) as client:
        assert client.get("/load", headers=bearer(USER)).status_code == 200
        file.write_text(ADMIN)
        assert client.get("/load", headers=bearer(USER)).status_code == 200


# --- how many at once ---


def test_requests_of_a_key_are_limited_each_for_itself() -> None:
    async def run() -> None:
        model = FakeModel()
        model.gate = asyncio.Event()
        keys = read_keys(None, None, {"SLEEPSERVE_API_KEYS": f"ann:{USER},bob:{ADMIN}"})
        settings = HttpSettings(max_concurrent_requests_per_key=2)
        app = build_asgi({"fake": model}, settings, keys=keys)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8000"
        ) as client:

            async def ask(key: str) -> httpx.Response:
                return await client.post("/v1/completions", json=TEXT, headers=bearer(key))

            first = [asyncio.create_task(ask(USER)) for _ in range(2)]
            while len(model.requests) < 2:
                await asyncio.sleep(0)
            third = await ask(USER)
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            assert third.json()["error"]["code"] == "key_busy"
            assert "the key ann" in third.json()["error"]["message"]
            listed = await client.get("/v1/models", headers=bearer(USER))
            assert listed.status_code == 200, "reading does not count"
            other = asyncio.create_task(ask(ADMIN))
            while len(model.requests) < 3:
                await asyncio.sleep(0)
            model.gate.set()
            assert [(await task).status_code for task in (*first, other)] == [200] * 3
            assert (await ask(USER)).status_code == 200

    asyncio.run(run())


def test_request_that_fails_makes_room() -> None:
    with serving(max_concurrent_requests_per_key=1) as client:
        for _ in range(3):
            broken = client.post("/v1/completions", json={"model": 1}, headers=bearer(USER))
            assert broken.status_code == 400


# --- other origins ---

PAGE = {"Origin": "https://chat.example.com"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_no_cors_unless_configured() -> None:
    with serving() as client:
        assert client.options("/v1/models", headers=PREFLIGHT).status_code == 401
        answered = client.get("/v1/models", headers={**PAGE, **bearer(USER)})
    assert not [name for name in answered.headers if name.startswith("access-control")]


def test_cors_of_configured_origins() -> None:
    with serving(cors_allow_origins=["https://chat.example.com"]) as client:
        asked = client.options("/v1/models", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        refused = client.get("/v1/models", headers=PAGE)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE["Origin"]
        other = client.options(
            "/v1/models", headers={**PREFLIGHT, "Origin": "https://evil.example"}
        )
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "origin",
    [
        "chat.example.com",
        "https://chat.example.com/",
        "https://a/b",
        "https://*.a.com",
        "https://A.com",
    ],
)
def test_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        HttpSettings(cors_allow_origins=[origin])


@pytest.mark.parametrize("origin", ["https://a.com:443", "http://a.com:80"])
def test_origin_with_a_port_that_browsers_leave_out_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="without its port"):
        HttpSettings(cors_allow_origins=[origin])
    HttpSettings(cors_allow_origins=[origin.replace("//a.com:", "//a.com:1")])


@pytest.mark.parametrize("host", ["https://a.com", "a.com:8000", "*.a.com", "a.com.", " a.com", ""])
def test_host_that_no_request_names_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is no host's name"):
        HttpSettings(allowed_hosts=["gpu_box-1.Example.com", host])
