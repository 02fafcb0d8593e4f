"""A loopback server that speaks enough of OpenAI's API, sleeps, misbehaves, and notes its own times.

Use it as a context manager. What it does is plain attributes, which may change between requests.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

Fault = Literal["500", "broken", "stream_error", "not_json"]

TOKENS_PER_WORD = 2
EXTRA_TOKENS = 3


@dataclass(slots=True)
class Served:
    """One request as the server saw it; times of the monotonic clock."""

    body: dict[str, Any]
    headers: dict[str, str]
    received_s: float
    asleep: bool = False
    written_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0  # of a stream


@dataclass
class FakeOpenAI:
    """Serves one model. A probe is a request for one token without a stream; it wakes the model, too.

    Attributes:
        ttft_s, token_s, wake_s: how long it takes its time.
        tokens_per_event: as a server that coalesces.
        faults: request number, probes not counted -> what goes wrong.
        refuse: status of every generation.
        tells_usage: whether answers carry their usage.
        on_request: called with each request's number as it arrives, probes not counted.
        hold_from: requests from this number on get no answer.
        served: what came, probes not counted.
    """

    ttft_s: float = 0.0
    token_s: float = 0.0
    wake_s: float = 0.0
    tokens_per_event: int = 1
    faults: dict[int, Fault] = field(default_factory=dict)
    refuse: int | None = None
    tells_usage: bool = True
    can_sleep: bool = True
    asleep: bool = False
    version: str | None = None
    model_ids: tuple[str, ...] = ("fake",)
    on_request: Callable[[int], None] = lambda number: None
    hold_from: int | None = None
    served: list[Served] = field(default_factory=list)
    sleeps: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)))
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_get("/version", self._version)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (self.port,) = (address[1] for address in runner.addresses)
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.model_ids]})

    async def _sleep(self, request: web.Request) -> web.Response:
        if not self.can_sleep:
            raise web.HTTPNotFound
        self.asleep = True
        self.sleeps += 1
        return web.json_response({})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        if not self.can_sleep:
            raise web.HTTPNotFound
        return web.json_response({"is_sleeping": self.asleep})

    async def _version(self, request: web.Request) -> web.Response:
        if self.version is None:
            raise web.HTTPNotFound
        return web.json_response({"version": self.version})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuse is not None:
            return _error(self.refuse, "not with us")
        if body["max_tokens"] == 1 and not body.get("stream"):
            self.asleep = False
            return web.json_response(self._whole(body, 1))  # a probe
        number = len(self.served)
        served = Served(body, dict(request.headers), time.monotonic(), asleep=self.asleep)
        self.served.append(served)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request, number, served)
        finally:
            self.in_flight -= 1

    async def _answer(
        self, request: web.Request, number: int, served: Served
    ) -> web.StreamResponse:
        self.on_request(number)
        if self.hold_from is not None and number >= self.hold_from:
            await self._stop.wait()
        fault = self.faults.get(number)
        if fault == "500":
            return _error(500, "out of luck")
        await asyncio.sleep(self.ttft_s + (self.wake_s if self.asleep else 0.0))
        self.asleep = False
        tokens = served.body["max_tokens"]
        if not served.body.get("stream"):
            return web.json_response(self._whole(served.body, tokens))
        return await self._stream(request, served, tokens, fault)

    async def _stream(
        self, request: web.Request, served: Served, tokens: int, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in served.body
        await response.write(b": keep-alive\n\n")
        if chat:
            role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await response.write(_event({"choices": [role]}))
        sizes = [self.tokens_per_event] * (tokens // self.tokens_per_event)
        for place, size in enumerate(sizes):
            if place:
                await asyncio.sleep(size * self.token_s)
            if place == 1 and fault == "broken":
                assert request.transport is not None
                request.transport.abort()
                return response
            if place == 1 and fault == "stream_error":
                await response.write(_event({"error": {"message": "the card is on fire"}}))
                return response
            if place == 1 and fault == "not_json":
                await response.write(b"data: {\n\n")
                return response
            text = "x" * size
            part = {"delta": {"content": text}} if chat else {"text": text}
            served.written_s.append(time.monotonic())
            await response.write(_event({"choices": [{**part, "finish_reason": None}]}))
        end = {"delta": {}} if chat else {"text": ""}
        await response.write(_event({"choices": [{**end, "finish_reason": "length"}]}))
        if self.tells_usage and served.body.get("stream_options", {}).get("include_usage"):
            await response.write(_event({"choices": [], "usage": _usage(served.body, tokens)}))
        await response.write(b"data: [DONE]\n\n")
        served.ended_s = time.monotonic()
        return response

    def _whole(self, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        answer: dict[str, Any] = {"choices": [{"text": "x" * tokens}]}
        return {**answer, "usage": _usage(body, tokens)} if self.tells_usage else answer


def _usage(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    prompt = TOKENS_PER_WORD * len(text.split()) + EXTRA_TOKENS
    cached = {"cached_tokens": prompt // 2}
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": cached}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
