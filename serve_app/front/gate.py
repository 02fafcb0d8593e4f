"""Who may call what: the middleware that holds to what is said of each endpoint."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config.errors import ConfigError
from serve_app.config.keys import Access, ApiKey, KeyRing
from serve_app.front.browsers import Browsers
from serve_app.front.endpoints.catalogue import ENDPOINTS, METRICS
from serve_app.front.errors import AdminKeyRequired, InvalidApiKey, KeyBusy
from serve_app.front.work import admitted

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0  # at the files of the keys, while there are requests

# Of a route that is not here only operators have the use.
ACCESS: Mapping[str, Access] = {endpoint.path: endpoint.access for endpoint in ENDPOINTS}


def access_of(scope: Scope, routes: Iterable[BaseRoute]) -> Access:
    """The strictest of all routes that this request may go to.

    The routes themselves say which those are, so nothing about a path is understood in two ways. Where there
    is none a client learns 404, if it may infer.
    """
    possible = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
    return max(
        (ACCESS.get(getattr(route, "path", ""), Access.ADMIN) for route in possible),
        default=Access.INFERENCE,
    )


class Gate:
    """Lets through who has the key for a route; keeps a key from having too many requests at once.

    What a request takes on of the budgets of `serve_app.front.work`, it takes on through `scope["admission"]`.

    Plain ASGI, inside `Edge`, which says what the client speaks, and turns what is raised here into an answer.
    Reads the routes of the application that it is in.
    """

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, max_per_key: int | None, browsers: Browsers
    ) -> None:
        """Let nobody in yet.

        Args:
            browsers: looks at requests to routes for which there is no key.
            max_per_key: requests to inference routes at once; reading (GET) does not count. None: no limit.
        """
        self._app = app
        self._keys = keys
        self._max_per_key = max_per_key
        self._browsers = browsers
        self._in_flight: Counter[ApiKey] = Counter()
        self._next_look_s = time.monotonic()
        self._refused = ""  # what is wrong with the files, if anything is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none; what serves files would trip over one
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._look_at_files()
        access = access_of(scope, scope["app"].routes)
        key: ApiKey | None = None
        if self._keys.guards(access):
            key = self._key_for(access, Headers(scope=scope), scope["dialect"].key_header)
        elif access is not Access.PUBLIC and scope["path"] != METRICS.path:
            # A scraper knows a service by any name, and nothing at its path is an order.
            self._browsers.check(scope)
        with admitted(key) as scope["admission"]:
            await self._admit(key, access, scope, receive, send)

    def _look_at_files(self) -> None:
        """Take what they have now; with a mistake in them, the keys of before hold."""
        if not self._keys.files or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_INTERVAL_S
        try:
            found = self._keys.current()
        except ConfigError as error:
            if str(error) != self._refused:
                logger.error("keys have changed, but those of before hold: %s", error)
            self._refused = str(error)
            return
        if found is not self._keys:
            names = ", ".join(key.name for key in found.keys)
            logger.info("keys have changed; there are now %s", names)
        self._keys, self._refused = found, ""

    def _key_for(self, access: Access, headers: Headers, key_header: str | None) -> ApiKey:
        name = "Authorization"
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = ""
        # Empty where a client sends it always, and has its key in the other one.
        if key_header is not None and (own := headers.get(key_header, "")).strip():
            name, token = key_header, own
        if not token.strip():
            other = "" if key_header is None else f", or {key_header}: KEY"
            raise InvalidApiKey(f"this server needs a key: send Authorization: Bearer KEY{other}")
        if (key := self._keys.find(token.strip())) is None:
            raise InvalidApiKey(f"the key of the {name} header is not one of this server's")
        if key.access < access:
            missing = "" if self._keys.has(access) else ", and this server has none"
            raise AdminKeyRequired(f"this route needs an admin key{missing}")
        return key

    async def _admit(
        self, key: ApiKey | None, access: Access, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if key is None or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        elif access is Access.ADMIN:
            logger.info(
                "request %s: %s with the key %s", scope["request_id"], scope["path"], key.name
            )
            await self._app(scope, receive, send)
        else:
            await self._counted(key, scope, receive, send)

    async def _counted(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        if self._max_per_key is not None and self._in_flight[key] >= self._max_per_key:
            raise KeyBusy(
                f"{self._in_flight[key]} requests with the key {key.name} are being answered; the limit is "
                f"{self._max_per_key} (http.max_concurrent_requests_per_key)"
            )
        self._in_flight[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight[key] -= 1
