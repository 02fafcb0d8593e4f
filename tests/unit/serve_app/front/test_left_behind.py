"""What a request held goes when the request does: nothing of it waits for the garbage collector.

A body may have megabytes, and the collector comes when many objects have been made, not when they are large.
"""

import asyncio
import json
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from actors.errors import QueueFull, ReplicaFailed
from actors.protocol import GenerateRequest, TokenEvent
from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from serve_app.process.heap import without_collections
from tests.fakes import FakeModel
from tests.on_loop import on_loop
from tests.unit.serve_app.front.front import CHAT, HI, TEXT, scope_of


class Held:
    """Something large."""


class Watched(FakeModel):
    """Whose generations hold something each."""

    def __init__(self) -> None:
        super().__init__()
        self.held = list[weakref.ref[Held]]()
        self.failure: Callable[[], Exception] | None = None
        self.events_before_failure = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        held = Held()
        self.held.append(weakref.ref(held))
        given = 0
        async for event in super().generate(request):
            if self.failure is not None and given == self.events_before_failure:
                raise self.failure()
            given += 1
            yield event


@pytest.fixture
def uncollected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)  # what is written is kept, with its traceback
    with without_collections():
        yield


class Connection:
    """One request's, whose client may leave."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.scope = scope_of(path)
        self.left = asyncio.Event()
        self.begun = asyncio.Event()
        self.status: int | None = None
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.begun.set()


PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": ["a", "b"]},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
ENDS = ["answered", "refused", "broken", "left", "cancelled"]
CASES = [
    *((path, {**body, "stream": stream}, end) for path, body in PATHS.items()
      for stream in (False, True) for end in ENDS),
    *((path, body, "late") for path, body in PATHS.items()),  # streams have no limit
    *(("/completions", {"prompt": "hi"}, end) for end in ENDS),
]  # fmt: skip


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(("path", "body", "end"), CASES)
@on_loop
async def test_nothing_is_left_for_the_garbage_collector(
    path: str, body: dict[str, Any], end: str
) -> None:
    model, connection = Watched(), Connection(path, {"model": "fake", **body})
    settings = HttpSettings(request_timeout_s=0.02) if end == "late" else HttpSettings()
    app = build_asgi({"fake": model}, settings)
    if end == "refused":
        model.failure = lambda: QueueFull("full")
    elif end == "broken":
        model.failure, model.events_before_failure = lambda: ReplicaFailed("broken"), 1
    elif end != "answered":
        model.gate = asyncio.Event()
    call = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
    if end in ("left", "cancelled"):
        while not model.requests:
            await asyncio.sleep(0)
        if end == "left":
            connection.left.set()
        else:
            call.cancel()
    # As Serve does, this one knows the error for as long as it likes.
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    del call
    assert model.held
    assert [each for held in model.held if (each := held()) is not None] == []
    assert isinstance(outcome, asyncio.CancelledError) is (end == "cancelled")
    assert (connection.status is None) is (end in ("left", "cancelled"))
