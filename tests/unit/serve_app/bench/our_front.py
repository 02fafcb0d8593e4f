"""Our own HTTP front, in a thread, over a model that takes its time and notes it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import uvicorn

from actors.protocol import GenerateRequest, TokenEvent
from serve_app.config.http import HttpSettings
from serve_app.config.keys import KeyRing
from serve_app.front.app import build_asgi
from tests.fakes import FakeModel


@dataclass(slots=True)
class Generated:
    """One streamed answer as the model saw it; times of the monotonic clock."""

    received_s: float
    yielded_s: list[float] = field(default_factory=list)


class PacedModel(FakeModel):
    """Its first token takes `ttft_s`, each later one `token_s`."""

    def __init__(self, tokens: int, ttft_s: float = 0.0, token_s: float = 0.0) -> None:
        super().__init__(pieces=[f" {number}" for number in range(tokens)])
        self.ttft_s = ttft_s
        self.token_s = token_s
        self.generated: list[Generated] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        seen = Generated(time.monotonic())
        if request.stream:
            self.generated.append(seen)
        async for event in super().generate(request):
            await asyncio.sleep(self.token_s if seen.yielded_s else self.ttft_s)
            seen.yielded_s.append(time.monotonic())
            yield event


class OurFront:
    """Serves models on a free port of loopback. A context manager."""

    def __init__(self, keys: KeyRing | None = None, **models: FakeModel) -> None:
        self._models: Mapping[str, FakeModel] = models
        self._keys = keys

    def __enter__(self) -> Self:
        config = uvicorn.Config(
            build_asgi(self._models, HttpSettings(), keys=self._keys),
            port=0,
            lifespan="off",
            ws="none",
            log_level="warning",
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started.set()
        await serving
