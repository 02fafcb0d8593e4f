"""Who gets the page and who the banner; the page's files are there, small, and of our own."""

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from serve_app.front.status.routes import STATIC, wants_html
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_of(build_asgi({"fake": FakeModel()}, HttpSettings())) as client:
        yield client


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (CHROME, True),
        ("text/html", True),
        ("TEXT/HTML ; q=0.5", True),
        ("text/html;q=0", False),
        ("text/html;q=0.5, application/json", False),
        ("application/json, text/html", True),
        ("*/*", False),
        ("application/json", False),
        ("text/html;q=nonsense", False),
        ("", False),
    ],
)
def test_accept(accept: str, html: bool) -> None:
    assert wants_html(accept) is html


def test_home_depends_on_accept(client: TestClient) -> None:
    page = client.get("/", headers={"accept": CHROME})
    banner = client.get("/", headers={"accept": "*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert banner.json()["message"] == "sleepserve is running."
    assert page.headers["vary"] == banner.headers["vary"] == "Accept"


def test_page_names_files_that_are_there_and_no_other_host(client: TestClient) -> None:
    found = set(re.findall(r'(?:src|href)="([^#"]+)"', (STATIC / "page.html").read_text()))
    assert found == {"page/icon.svg", "page/page.css", "page/page.js", "status"}
    scripts = {
        f"page/{name}" for path in STATIC.glob("*.js") for name in _imports(path.read_text())
    }
    for target in found | scripts:
        response = client.get(f"/{target}")
        assert response.status_code == 200, target
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), path


def _imports(script: str) -> list[str]:
    return re.findall(r'from "\./([\w.]+)"', script)


def test_every_script_is_used() -> None:
    used = {name for path in STATIC.glob("*.js") for name in _imports(path.read_text())}
    assert used | {"page.js"} == {path.name for path in STATIC.glob("*.js")}


def test_files_are_asked_for_every_time_and_sent_once(client: TestClient) -> None:
    first = client.get("/page/page.js")
    assert first.headers["cache-control"] == "no-cache"
    assert "javascript" in first.headers["content-type"]
    again = client.get("/page/page.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize("path", ["/page/missing.js", "/page/", "/page/../feed.py"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 70 * 1024


def test_status_is_json_and_not_cached(client: TestClient) -> None:
    response = client.get("/status")
    assert response.headers["cache-control"] == "no-store"
    (replica,) = response.json()["models"]["fake"]["replicas"].values()
    assert replica["state"] == "awake"
    assert replica["device"]["name"] == "fake card"
