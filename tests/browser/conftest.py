"""A browser, a front over staged models, and a place for the screenshots."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvicorn

from actors.protocol import HeldImage
from serve_app.config.http import HttpSettings
from serve_app.config.keys import KeyRing
from serve_app.front.app import build_asgi
from tests.browser.staged import CARD, GIB, StagedModel
from tests.conftest import PROJECT

T = TypeVar("T")

CHROMIUM = "Debian: apt-get install chromium; elsewhere a `chromium` or `google-chrome` in PATH"


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where pictures of the page go; caches are not in git."""
    folder = PROJECT / ".pytest_cache" / "page"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright, which brings no browser of its own here."""
    from playwright import sync_api  # of the extra `page`, which other tests do without

    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.fail(f"no chromium here. {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def looking(browser: Any, url: str, expect: str | None = None, **options: Any) -> Iterator[Any]:
    """The page at `url`. Fails if its console has an error or it asks anybody but `url` for anything.

    Args:
        expect: part of an error that the browser itself reports, of an answer that is no success.
    """
    context = browser.new_context(**options)
    page = context.new_page()
    wrong: list[str] = []

    def heard(message: Any) -> None:
        expected = expect is not None and expect in message.text
        if message.type in ("error", "warning") and not expected:
            wrong.append(message.text)

    def asked(request: Any) -> None:
        if not request.url.startswith((url, "data:")):
            wrong.append(f"asked {request.url}")

    page.on("console", heard)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", asked)
    try:
        page.goto(url)
        page.locator("#link[data-link=live]").wait_for()
        yield page
    finally:
        context.close()
    assert wrong == []


class Stage:
    """A front over two staged models that share a card, on a thread of its own."""

    def __init__(self, keys: KeyRing | None = None) -> None:
        self.images: list[HeldImage] = []  # instead of one for each model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage")
        self._thread.start()
        self.chat, self.code = self.run(self._make_models)
        self._models = {model.info.model_id: model for model in (self.chat, self.code)}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        app = build_asgi(self._models, HttpSettings(), read_images=self._images, keys=keys)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._serving = self._submit(self._server.serve([self._socket]))

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` on the front's thread."""

        async def done() -> T:
            return work()

        return self._submit(done()).result(timeout=10)

    def close(self) -> None:
        self._server.should_exit = True  # the pages are closed by now
        self._serving.result(timeout=20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _card_free(self) -> int:
        return CARD - int(1.4 * GIB) - sum(model.holds_bytes for model in self._models.values())

    def _make_models(self) -> tuple[StagedModel, StagedModel]:
        free = self._card_free
        chat = StagedModel("r1-distill-7b", "k3v9qh2m", int(14.19 * GIB), int(8.2 * GIB), free)
        code = StagedModel("coder-3b", "p81xw0ce", int(5.8 * GIB), int(6.1 * GIB), free)
        return chat, code

    async def _images(self) -> list[HeldImage]:
        return self.images or [
            HeldImage(f"{name}@4f1c", model.replica.weights_bytes, 30, 18.3, 1, False, "disk")
            for name, model in self._models.items()
        ]


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
