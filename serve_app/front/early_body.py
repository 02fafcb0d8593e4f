"""Small bodies travel with their requests: `SendEarly` runs in Serve's proxy, `TakeEarly` in the ingress.

Serve's proxy sends the ingress a request's ASGI scope, and keeps the body until the ingress asks for it by an actor
call (ASGIReceiveProxy in ray/serve/_private/http_util.py, 2.60). Here a body that has arrived goes along in the
scope. The proxy offers it to that call all the same: the cluster's other applications know of no other. Where the
last answer says that the ingress had it early, it offers it a moment later, so that neither process spends that
moment, which is before the first token, on what nobody waits for.

Serve's proxy imports this module, so it imports nothing that Serve does not.
"""

import asyncio
from collections import deque

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Servers name the keys of a scope and of a message. What clients send becomes values, so none can send these.
_BODY = "sleepserve.early_body"
_TAKEN = "sleepserve.early_body_taken"

# Without gRPC, Ray sends arguments of more than 100 KB by its object store (max_direct_call_object_size, 2.60).
MAX_EARLY_BYTES = 64 * 1024
# Many clients send headers and body in two packets, the second right behind the first.
PATIENCE_S = 0.05
HOLD_S = 0.1  # an awake model's first token is there
_MAX_PATHS = 100  # that are remembered; there are a dozen


def proxy_middlewares() -> list[Middleware]:
    """What Serve's proxy calls, by its variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(SendEarly)]


class SendEarly:
    """Puts a small body into the scope, if all of it is what arrives first, and soon."""

    def __init__(
        self, app: ASGIApp, patience_s: float = PATIENCE_S, hold_s: float = HOLD_S
    ) -> None:
        """Know no path yet.

        Args:
            patience_s: for a body to arrive. Without it the request goes on as any other: what refuses it for
                its headers, or because its body is late, must be able to.
            hold_s: how much later the body is offered once more, at a path that needs no second one.
        """
        self._app = app
        self._patience_s = patience_s
        self._hold_s = hold_s
        self._takers: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _announces_small_body(scope):
            await self._app(scope, receive, send)
            return
        first = asyncio.ensure_future(receive())
        again = _Again(first, receive)
        try:
            await asyncio.wait([first], timeout=self._patience_s)
            body = _whole_body(first)
            if body is None:
                await self._app(scope, again, send)
            else:
                await self._early(body, scope, again, send)
        finally:
            again.close()

    async def _early(self, body: bytes, scope: Scope, receive: "_Again", send: Send) -> None:
        path = scope["path"]
        if path in self._takers:
            receive.hold_s = self._hold_s

        async def send_and_learn(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._learn(path, message.get(_TAKEN))
            await send(message)

        await self._app({**scope, _BODY: body}, receive, send_and_learn)

    def _learn(self, path: str, taken: bool | None) -> None:
        if taken is None:
            self._takers.discard(path)  # another application is there now
        elif taken and path not in self._takers:
            if len(self._takers) == _MAX_PATHS:
                self._takers.clear()
            self._takers.add(path)


class _Again:
    """Receives what has been received already, and then what follows."""

    def __init__(self, first: asyncio.Future[Message], receive: Receive) -> None:
        self.hold_s = 0.0  # for the first message, unless another one follows
        self._ahead = deque([first])
        self._receive = receive

    async def __call__(self) -> Message:
        if self.hold_s:
            hold_s, self.hold_s = self.hold_s, 0.0
            # Behind a whole body comes only that the client leaves, of which Serve should hear at once.
            self._ahead.append(following := asyncio.ensure_future(self._receive()))
            await asyncio.wait([following], timeout=hold_s)
        while self._ahead:
            first = self._ahead[0]
            message = await asyncio.shield(first)  # who gives up waiting may come again
            if self._ahead and self._ahead[0] is first:  # nobody else was quicker
                self._ahead.popleft()
                return message
        return await self._receive()

    def close(self) -> None:
        for future in self._ahead:
            future.cancel()


def _announces_small_body(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    length = 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 10:
            length = int(value)
        elif (
            name == b"expect"
        ):  # to receive is to ask for the body, which is for the application to do
            return False
    return 0 < length <= MAX_EARLY_BYTES


def _whole_body(first: asyncio.Future[Message]) -> bytes | None:
    if not first.done() or first.cancelled() or first.exception() is not None:
        return None
    message = first.result()
    if message["type"] != "http.request" or message.get("more_body", False):
        return None
    body: bytes = message.get("body", b"")
    return body if len(body) <= MAX_EARLY_BYTES else None


class TakeEarly:
    """Receives the body that is in the scope, and drops the same one when it is offered again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _BODY not in scope:
            await self._app(scope, receive, send)
            return
        body: bytes | None = scope[_BODY]
        offered_again = False

        async def receive_once() -> Message:
            nonlocal body, offered_again
            if body is not None:
                early, body = body, None
                return {"type": "http.request", "body": early, "more_body": False}
            message = await receive()
            if message["type"] == "http.request" and not offered_again:
                offered_again = True
                message = await receive()
            return message

        async def send_and_tell(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
            ):  # servers ignore the keys that they do not know
                message = {**message, _TAKEN: body is None}
            await send(message)

        rest = {key: value for key, value in scope.items() if key != _BODY}
        await self._app(rest, receive_once, send_and_tell)
