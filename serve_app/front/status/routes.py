"""Routes of the status page. None of them wakes a model, counts as its use, or waits for a wake."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from serve_app import __version__
from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import Files, Handler, Handlers
from serve_app.front.status.feed import ReadImages, StatusFeed
from serve_app.front.stream import HeldResponse
from serve_app.models.registry import ServedModels
from serve_app.openai.requests import NoQuery

STATIC = Path(__file__).parent / "static"

_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    # Nothing from elsewhere, and nothing inline: text of a model can never become a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class StatusRoutes:
    """`/`, the page's files, and the data behind it."""

    def __init__(
        self,
        models: ServedModels,
        shows_names: bool,
        read_images: ReadImages | None,
    ) -> None:
        """Take what the routes show.

        Args:
            shows_names: whether anybody may learn which models there are.
            read_images: asks the weight holder; None where there is none.
        """
        about = {
            "sleepserve": __version__,
            "ray": version("ray"),
            "python": platform.python_version(),
        }
        self._feed = StatusFeed(models, about, read_images)
        self._models = models
        self._shows_names = shows_names

    def handlers(self) -> Handlers:
        return [
            Handler(catalogue.HOME, self.home),
            Files(catalogue.PAGE, _Revalidated(directory=STATIC)),
            Handler(catalogue.STATUS, self.snapshot),
            Handler(catalogue.STATUS_EVENTS, self.events),
        ]

    async def home(self, request: Request, asked: None) -> Response:
        if wants_html(request.headers.get("accept", "")):
            return FileResponse(STATIC / "page.html", headers={**_PAGE_HEADERS, "Vary": "Accept"})
        names = {"models": list(self._models.all)} if self._shows_names else {}
        return JSONResponse(
            {"message": "sleepserve is running.", "version": __version__, **names},
            headers={"Vary": "Accept"},
        )

    async def snapshot(self, request: Request, query: NoQuery) -> Response:
        return JSONResponse(await self._feed.snapshot(), headers={"Cache-Control": "no-store"})

    async def events(self, request: Request, query: NoQuery) -> Response:
        return HeldResponse(self._feed.watch(), "text/event-stream")


class _Revalidated(StaticFiles):
    """Asked for every time, sent when changed: a page must not run with another version's scripts."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


def wants_html(accept: str) -> bool:
    """Whether an Accept header names HTML, and JSON not before it; `*/*` does not name it."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for item in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        if kind in weights:
            weights[kind] = _quality(parameters)
    return weights["text/html"] > 0 and weights["text/html"] >= weights["application/json"]


def _quality(parameters: list[str]) -> float:
    given = next((each[2:] for each in parameters if each.startswith("q=")), "1")
    try:
        return float(given)
    except ValueError:  # no weight that anybody defined
        return 0.0
