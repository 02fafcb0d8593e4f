"""Bodies in the scope, between a server that has them and an application that wants them."""

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from serve_app.front.early_body import MAX_EARLY_BYTES, SendEarly, TakeEarly, proxy_middlewares
from serve_app.process.environment import CHEAP_STREAMS
from tests.fakes import FakeModel
from tests.on_loop import on_loop
from tests.unit.asgi_client import client_of
from tests.unit.serve_app.front.front import CHAT, CHAT_BODY, TEXT, TEXT_BODY

NEVER_S = 60.0
GONE: Message = {"type": "http.disconnect"}


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Connection:
    """What a server receives on it, in order; with `left`, at last that the client has gone."""

    def __init__(self, *messages: Message | Exception, left: bool = False) -> None:
        self.asked = 0
        self.sent: list[Message] = []
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        for message in messages:
            self.arrives(message)
        self._gone = asyncio.Event()
        if left:
            self.leave()

    def arrives(self, message: Message | Exception) -> None:
        self._messages.put_nowait(message)

    def leave(self) -> None:
        self.arrives(GONE)

    async def receive(self) -> Message:
        self.asked += 1
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def request(body: bytes = b"", *headers: tuple[bytes, bytes], **changes: Any) -> Scope:
    length = (b"content-length", str(len(body)).encode())
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    return {**scope, "headers": [length, *headers], **changes}


class Reader:
    """An application that receives so many messages, and answers."""

    def __init__(self, count: int = 1) -> None:
        self.received: list[Message] = []
        self.scopes: list[Scope] = []
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        for _ in range(self._count):
            self.received.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def between(app: ASGIApp) -> ASGIApp:
    """As Serve sends a request on: its scope is pickled; what is received is asked for, and kept, at once."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        kept: asyncio.Queue[Message] = asyncio.Queue()

        async def keep() -> None:
            while True:
                kept.put_nowait(message := await receive())
                if message == GONE:
                    return

        keeping = asyncio.create_task(keep())
        try:
            await app(pickle.loads(pickle.dumps(scope)), kept.get, send)
        finally:
            keeping.cancel()

    return proxy


# --- both together ---


@on_loop
async def test_body_is_received_once_and_then_that_the_client_leaves() -> None:
    reader = Reader(2)
    app = SendEarly(between(TakeEarly(reader)), hold_s=0.01)
    for _ in range(3):  # from the second on it is offered late
        connection = Connection(part(b"{}"))
        call = asyncio.create_task(app(request(b"{}"), connection.receive, connection.send))
        while len(reader.received) % 2 == 0:
            await asyncio.sleep(0)
        connection.leave()
        await call
        assert reader.received[-2:] == [part(b"{}"), GONE]
        assert [message["type"] for message in connection.sent] == [
            "http.response.start",
            "http.response.body",
        ]
    assert all(scope == request(b"{}") for scope in reader.scopes)


@on_loop
async def test_ingress_waits_for_nothing_but_the_scope() -> None:
    async def silent() -> Message:
        raise AssertionError("nobody asks for what is there")

    reader = Reader()
    connection = Connection(part(b"hi"))

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        await TakeEarly(reader)(pickle.loads(pickle.dumps(scope)), silent, send)

    await SendEarly(proxy)(request(b"hi"), connection.receive, connection.send)
    assert reader.received == [part(b"hi")]


@on_loop
async def test_body_is_offered_late_only_where_the_last_one_was_not_needed() -> None:
    offered: list[str] = []

    def other(name: str) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async with asyncio.timeout(5):
                assert await receive() == part(b"hi")
            offered.append(name)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        return app

    now: list[ASGIApp] = [other("first")]

    async def changing(scope: Scope, receive: Receive, send: Send) -> None:
        await now[0](scope, receive, send)

    app = SendEarly(changing, hold_s=0.02)

    async def ask(path: str = "/v1/completions") -> float:
        connection = Connection(part(b"hi"))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await app(request(b"hi", path=path), connection.receive, connection.send)
        return loop.time() - began_s

    assert await ask() < 0.02
    now[0] = TakeEarly(Reader())
    await ask()
    now[0] = other("second")  # is deployed in its place
    assert await ask("/elsewhere") < 0.02
    assert await ask() >= 0.02
    assert await ask() < 0.02  # only once
    assert offered == ["first", "second", "second", "second"]


@on_loop
async def test_only_an_answer_to_the_body_is_remembered_and_a_refusal_forgets_none() -> None:
    """So clients that ask for what is not there, or have no key, neither fill nor empty the memory."""
    readers = {"/there": Reader(1), "/nowhere": Reader(0)}

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        await TakeEarly(readers[scope["path"]])(scope, receive, send)

    app = SendEarly(either, hold_s=NEVER_S)
    for path in ("/nowhere", "/there"):
        connection = Connection(part(b"hi"))
        await app(request(b"hi", path=path), connection.receive, connection.send)
    readers["/there"] = Reader(0)
    connection = Connection(part(b"hi"))
    await app(request(b"hi", path="/there"), connection.receive, connection.send)
    assert app._takers == {"/there"}


@on_loop
async def test_paths_that_are_remembered_are_bounded() -> None:
    app = SendEarly(TakeEarly(Reader()), hold_s=NEVER_S)
    for number in range(250):
        connection = Connection(part(b"hi"))
        await app(request(b"hi", path=f"/{number}"), connection.receive, connection.send)
    assert 0 < len(app._takers) <= 100


@on_loop
async def test_client_that_leaves_while_the_body_is_held_back_is_noticed_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting = asyncio.create_task(receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        connection.leave()
        assert [await waiting, await receive()] == [part(b"hi"), GONE]

    sending = SendEarly(TakeEarly(Reader()), hold_s=NEVER_S)
    connection = Connection(part(b"hi"))
    await sending(request(b"hi"), connection.receive, connection.send)
    connection = Connection(part(b"hi"))
    sending._app = app
    await sending(request(b"hi"), connection.receive, connection.send)


# --- in the proxy ---


@pytest.mark.parametrize(
    "scope",
    [
        request(b"hi", method="GET"),
        request(b"hi", method="HEAD"),
        request(b"hi", method="DELETE"),
        request(b"hi", method="OPTIONS"),
        request(b""),
        request(headers=[(b"transfer-encoding", b"chunked")]),
        request(headers=[]),
        request(b"hi", (b"expect", b"100-continue")),
        request(headers=[(b"content-length", str(MAX_EARLY_BYTES + 1).encode())]),
        *(
            request(headers=[(b"content-length", value)])
            for value in (b"-1", b"1e3", b"", b" 2", b"9" * 5000, "\u00b2".encode("latin-1"))
        ),
        {"type": "websocket", "path": "/", "headers": [(b"content-length", b"2")]},
        {"type": "lifespan"},
    ],
    ids=lambda scope: f"{scope.get('method', scope['type'])} {scope.get('headers')}"[:60],
)
@on_loop
async def test_what_announces_no_small_body_is_passed_on_untouched(scope: Scope) -> None:
    calls = []

    async def app(*args: Any) -> None:
        calls.append(args)

    connection = Connection(part(b"hi"))
    await SendEarly(app, NEVER_S)(scope, connection.receive, connection.send)
    ((given, receive, send),) = calls
    assert given is scope
    assert (receive, send) == (connection.receive, connection.send)
    assert connection.asked == 0


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"h", more=True), part(b"i")],
        [part(b"", more=True), part(b"h", more=True), part(b"i")],
        [part(b"a" * (MAX_EARLY_BYTES + 1))],
        [GONE],
    ],
    ids=["parts", "empty part", "more than announced", "gone"],
)
@on_loop
async def test_what_is_no_whole_small_body_is_received_as_ever(messages: list[Message]) -> None:
    reader = Reader(len(messages) + 1)
    connection = Connection(*messages, left=True)
    await SendEarly(TakeEarly(reader), NEVER_S)(request(b"hi"), connection.receive, connection.send)
    assert reader.received == [*messages, GONE]
    assert reader.scopes == [request(b"hi")]


@on_loop
async def test_slow_body_does_not_hold_its_request_up() -> None:
    asks = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope == request(b"hi")
        asks.set()
        assert [await receive(), await receive()] == [part(b"hi"), GONE]

    connection = Connection()
    call = asyncio.create_task(
        SendEarly(app, 0.001)(request(b"hi"), connection.receive, connection.send)
    )
    await asks.wait()
    connection.arrives(part(b"hi"))
    connection.leave()
    await call


@on_loop
async def test_who_gives_up_waiting_misses_nothing() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receive(), 0.001)
        connection.arrives(part(b"hi"))
        assert await receive() == part(b"hi")

    connection = Connection()
    await SendEarly(app, 0.001)(request(b"hi"), connection.receive, connection.send)


@on_loop
async def test_two_who_wait_do_not_get_the_same() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting = asyncio.gather(receive(), receive())
        await asyncio.sleep(0)
        connection.arrives(part(b"hi"))
        connection.leave()
        assert await waiting == [part(b"hi"), GONE]

    connection = Connection()
    await SendEarly(app, 0.001)(request(b"hi"), connection.receive, connection.send)


@on_loop
async def test_error_of_the_server_is_the_application_s_to_see() -> None:
    connection = Connection(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        await SendEarly(Reader())(request(b"hi"), connection.receive, connection.send)


@on_loop
async def test_no_task_outlives_its_request() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await SendEarly(app, 0.001)(request(b"hi"), Connection().receive, Connection().send)
    stopped = asyncio.create_task(
        SendEarly(app, NEVER_S)(request(b"hi"), Connection().receive, Connection().send)
    )
    await asyncio.sleep(0)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- in the ingress ---


@on_loop
async def test_without_the_proxy_s_half_nothing_changes() -> None:
    calls = []

    async def app(*args: Any) -> None:
        calls.append(args)

    scope = request(b"hi", (b"sleepserve.early_body", b"not a key of the scope"))
    connection = Connection()
    await TakeEarly(app)(scope, connection.receive, connection.send)
    ((given, receive, send),) = calls
    assert given is scope
    assert (receive, send) == (connection.receive, connection.send)


def early(app: ASGIApp) -> ASGIApp:
    return SendEarly(between(app))


@pytest.mark.parametrize("front", [lambda app: app, early], ids=["as ever", "early"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps(CHAT_BODY).encode(), 200),
        (b"{", 400),
        (b"[" * 1000 + b"]" * 1000, 400),
        (b" " * 3000, 413),
    ],
    ids=["good", "no JSON", "nested", "large"],
)
def test_limits_of_bodies_hold(
    front: Callable[[ASGIApp], ASGIApp], body: bytes, status: int
) -> None:
    app = build_asgi({"fake": FakeModel()}, HttpSettings(max_body_bytes=2000))
    with client_of(app) as client:  # for its lifespan
        client.app = front(app)
        for _ in range(2):
            assert client.post(CHAT, content=body).status_code == status


def test_header_is_no_body() -> None:
    app = build_asgi({"fake": FakeModel()}, HttpSettings())
    with client_of(app) as client:
        client.app = early(app)
        for name in ("sleepserve.early_body", "sleepserve.early_body_taken"):
            answer = client.post(TEXT, json=TEXT_BODY, headers={name: "{}"})
            assert answer.status_code == 200
            assert name not in answer.headers


# --- as Serve finds it ---


def test_serve_finds_it_by_the_variable() -> None:
    path = CHEAP_STREAMS["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    found = validate_http_proxy_callback_return(call_function_from_import_path(path))
    assert [each.cls for each in found] == [each.cls for each in proxy_middlewares()] == [SendEarly]


def test_proxy_imports_nothing_else_of_the_project(project: Path) -> None:
    code = (
        "import sys, ray.serve._private.proxy; before = set(sys.modules); import serve_app.front.early_body;"
        "print(sorted(sys.modules.keys() - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    modules = "['serve_app', 'serve_app.front', 'serve_app.front.early_body']"
    assert run.stdout.splitlines()[-1] == modules
