"""What pages of others may do through their visitors' browsers: nothing, where no key protects us."""

import socket
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect

from serve_app.config.http import HttpSettings
from serve_app.config.keys import read_keys
from serve_app.front.app import build_asgi
from serve_app.front.status.routes import STATIC
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

ADMIN = "admin-key-1234567890"
KEYS = read_keys(
    None, None, {"SLEEPSERVE_ADMIN_KEYS": ADMIN, "SLEEPSERVE_API_KEYS": "user-key-1234567890"}
)
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
FOREIGN = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}


def ask(
    method: str, path: str, keys: Any = None, model: FakeModel | None = None, **given: Any
) -> Any:
    settings = HttpSettings(**given.pop("settings", {}))
    app = build_asgi({"fake": model or FakeModel()}, settings, keys=keys)
    with client_of(app) as client:
        return client.request(method, path, **given)


def error_of(response: Any, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code
    return str(response.json()["error"]["message"])


def test_page_of_another_site_puts_nobody_to_sleep() -> None:
    """As `fetch(url, {method: "POST", mode: "no-cors"})` sends it: no preflight, no body."""
    model = FakeModel()
    response = ask("POST", "/sleep?hold=true", model=model, headers=FOREIGN)
    assert "https://evil.example" in error_of(response, 403, "foreign_page")
    assert "http.cors_allow_origins" in response.json()["error"]["message"]
    assert model.orders == []


@pytest.mark.parametrize(
    "path", ["/sleep", "/wake_up", "/wakeup", "/scaleout", "/scalein", "/v1/chat/completions",
             "/v1/completions", "/completions", "/tokenize", "/detokenize"]
)  # fmt: skip
@pytest.mark.parametrize(
    "headers",
    [
        FOREIGN,
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},  # another port is another site
        {"origin": "https://127.0.0.1"},
        {"origin": "http://127.0.0.1:8000.evil.example"},
        {"origin": "http://127.0.0.1:99999999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_orders_and_inference_are_not_for_pages_of_others(
    path: str, headers: dict[str, str]
) -> None:
    error_of(ask("POST", path, json={}, headers=headers), 403, "foreign_page")


@pytest.mark.parametrize(
    ("host", "settings"),
    [
        ("127.0.0.1:8000", {}),
        ("localhost:8000", {}),
        ("LOCALHOST", {}),
        ("api.localhost:8000", {}),
        ("[::1]:8000", {}),
        ("192.168.1.20:8000", {}),  # no name, so nobody else's
        (f"{socket.gethostname()}:8000", {}),
        ("gpu-box.example.com", {"allowed_hosts": ["GPU-box.example.com"]}),
    ],
)
def test_own_names_and_pages_are_served(host: str, settings: dict[str, Any]) -> None:
    response = ask(
        "POST", "/v1/chat/completions", json=CHAT, headers={"host": host}, settings=settings
    )
    assert response.status_code == 200
    origin = {"host": host, "origin": f"http://{host.lower()}", "sec-fetch-site": "same-origin"}
    assert ask("POST", "/sleep", headers=origin, settings=settings).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "a:b:c"],
)
@pytest.mark.parametrize("path", ["/sleep", "/v1/models", "/status", "/v1/chat/completions"])
def test_name_that_somebody_made_point_here_is_not_answered(host: str, path: str) -> None:
    method = "GET" if path in ("/v1/models", "/status") else "POST"
    response = ask(method, path, headers={"host": host})
    assert "http.allowed_hosts" in error_of(response, 403, "foreign_page")


@pytest.mark.parametrize("path", ["/ping", "/health", "/version", "/metrics", "/"])
def test_probes_and_scrapers_know_a_service_by_any_name(path: str) -> None:
    assert ask("GET", path, headers={"host": "sleepserve.default.svc:8000"}).status_code == 200


def test_allowed_origins_may_use_the_server() -> None:
    settings = {"cors_allow_origins": ["https://chat.example.com"]}
    allowed = {"origin": "https://chat.example.com", "sec-fetch-site": "cross-site"}
    assert (
        ask(
            "POST", "/v1/chat/completions", json=CHAT, headers=allowed, settings=settings
        ).status_code
        == 200
    )
    error_of(ask("POST", "/sleep", headers=FOREIGN, settings=settings), 403, "foreign_page")
    everybody = {"cors_allow_origins": ["*"]}
    assert ask("POST", "/sleep", headers=FOREIGN, settings=everybody).status_code == 200


def test_behind_tls_a_page_of_ours_is_ours() -> None:
    settings = {"allowed_hosts": ["llm.example.com"]}
    headers = {"host": "llm.example.com", "origin": "https://llm.example.com"}
    assert ask("POST", "/sleep", headers=headers, settings=settings).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_body_that_any_page_may_send_unasked_is_refused(kind: str) -> None:
    response = ask("POST", "/sleep", content=b'{"hold": true}', headers={"content-type": kind})
    assert "application/json" in error_of(response, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"]
)
def test_json_by_any_of_its_names_is_taken(kind: str) -> None:
    assert (
        ask("POST", "/sleep", content=b'{"hold": true}', headers={"content-type": kind}).status_code
        == 200
    )


def test_order_without_a_body_needs_no_type() -> None:
    assert ask("POST", "/sleep?level=1", headers={"content-type": ""}).status_code == 200


def test_a_key_protects_by_itself() -> None:
    """No browser sends one for a page that does not know it."""
    headers = {**FOREIGN, "host": "anything.example", "authorization": f"Bearer {ADMIN}"}
    assert ask("POST", "/sleep", keys=KEYS, headers=headers).status_code == 200
    form = {**headers, "content-type": "text/plain"}
    assert ask("POST", "/sleep", keys=KEYS, headers=form, content=b"{}").status_code == 200
    assert ask("POST", "/sleep", keys=KEYS, headers=FOREIGN).status_code == 401


def test_names_of_models_are_for_those_with_a_key() -> None:
    for path in ("/", "/health", "/health?model=other"):
        assert "fake" in ask("GET", path).text
        assert "fake" not in ask("GET", path, keys=KEYS).text


@pytest.mark.parametrize("path", ["/", "/page/page.html", "/page/page.js", "/page/icon.svg"])
def test_page_and_its_files_are_framed_by_nobody(path: str) -> None:
    headers = ask("GET", path, headers={"accept": "text/html"}).headers
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert (STATIC / "page.html").exists()


@pytest.mark.parametrize("path", ["/page/page.js", "/", "/sleep", "/nowhere"])
def test_websocket_is_closed(path: str) -> None:
    with client_of(build_asgi({"fake": FakeModel()}, HttpSettings())) as client:
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass
        assert client.get("/ping").status_code == 200
