"""The HTTP application: each endpoint with what answers it, behind the gate."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access, KeyRing
from serve_app.front.about import About
from serve_app.front.bodies import Bodies
from serve_app.front.browsers import Browsers
from serve_app.front.dialects import OPENAI, Dialect
from serve_app.front.endpoints.catalogue import ENDPOINTS
from serve_app.front.endpoints.endpoint import Handlers
from serve_app.front.errors import Edge, http_exception
from serve_app.front.gate import Gate
from serve_app.front.generation import Generation
from serve_app.front.health import Health
from serve_app.front.metrics_page import Exposition
from serve_app.front.operators import Controls
from serve_app.front.peers import Account, Alone, Everybody
from serve_app.front.status.feed import ReadImages
from serve_app.front.status.routes import StatusRoutes
from serve_app.front.tokenize import Tokenizing
from serve_app.front.work import Budget
from serve_app.models.model_client import ModelClient
from serve_app.models.registry import ServedModels
from serve_app.tracing.front import TracedRequests

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def build_asgi(
    models: Mapping[str, ModelClient],
    settings: HttpSettings,
    *,
    send_request_id: bool = True,
    read_images: ReadImages | None = None,
    keys: KeyRing | None = None,
    everybody: Everybody | None = None,
    tracer: "Tracer | None" = None,
) -> Starlette:
    """The HTTP application for `models`.

    Args:
        models: keyed by the name that clients use.
        settings: limits.
        send_request_id: answer with the header x-request-id. False behind Ray Serve's proxy, which
            adds one to every response (ray/serve/_private/http_util.py, RequestIdMiddleware, 2.60).
        read_images: asks the weight holder, for the status page.
        keys: what `read_keys` read; None: everything is open.
        everybody: this process and the others that serve the same; None: it is alone.
        tracer: of what models generate; None: nobody wants to know.
    """
    keys = keys or KeyRing()
    everybody = everybody or Everybody(Account(models), Alone())
    served = ServedModels(models, settings.status_timeout_s)

    shows_names = not keys.guards(Access.INFERENCE)  # which no change of their files changes

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await everybody.join()
        try:
            yield
        finally:
            await everybody.leave()

    handlers: Handlers = [
        *About(served, everybody, keys).handlers(),
        *Generation(served, settings).handlers(),
        *Tokenizing(served).handlers(),
        *Controls(served).handlers(),
        *Health(served, shows_names).handlers(),
        *Exposition(models, everybody).handlers(),
        *StatusRoutes(served, shows_names, read_images).handlers(),
    ]
    app = Starlette(
        routes=_routes(handlers, settings, everybody.account, tracer),
        middleware=[
            *_cors(
                settings
            ),  # outermost of what answers: a page of another origin may read errors, too
            Middleware(Edge, dialect_of=_dialect_of, send_request_id=send_request_id),
            Middleware(
                Gate,
                keys=keys,
                max_per_key=settings.max_concurrent_requests_per_key,
                browsers=Browsers(settings.allowed_hosts, settings.cors_allow_origins),
            ),
        ],
        exception_handlers={HTTPException: http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect behind a TLS proxy leads to plain HTTP
    return app


_DIALECTS: Mapping[str, Dialect] = {
    endpoint.path: endpoint.dialect for endpoint in ENDPOINTS if endpoint.dialect is not OPENAI
}


def _dialect_of(scope: Scope) -> Dialect:
    """That of the endpoint at this path, with whatever method; elsewhere OpenAI's."""
    routes = scope["app"].routes
    others = [route for route in routes if getattr(route, "path", "") in _DIALECTS]
    return next(
        (_DIALECTS[route.path] for route in others if route.matches(scope)[0] is not Match.NONE),
        OPENAI,
    )


def _routes(
    handlers: Handlers, settings: HttpSettings, account: Account, tracer: "Tracer | None"
) -> list[BaseRoute]:
    answered = [handler.endpoint for handler in handlers]
    assert len(answered) == len(ENDPOINTS)
    assert set(answered) == set(ENDPOINTS), "each endpoint is described, and answered, once"
    body_bytes = Budget.of(settings, "bytes of request bodies", "max_body_bytes_in_flight")
    bodies = Bodies(settings.max_body_bytes, settings.body_timeout_s, body_bytes)
    load = [Middleware(_Counted, account=account)]
    if tracer is not None:
        load.append(Middleware(TracedRequests, tracer=tracer))
    return [handler.route(bodies, settings, load) for handler in handlers]


class _Counted:
    """Counts requests while they are being answered, to the last byte of a stream."""

    def __init__(self, app: ASGIApp, account: Account) -> None:
        self._app = app
        self._account = account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._account.in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._account.in_flight -= 1


def _cors(settings: HttpSettings) -> list[Middleware]:
    if not settings.cors_allow_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # names them one by one, so Authorization is among them
            expose_headers=["x-request-id", "retry-after"],
        )
    ]
