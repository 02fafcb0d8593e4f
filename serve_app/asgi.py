"""The HTTP front over models in this process, without Ray: `uvicorn serve_app.asgi:app`.

SLEEPSERVE_MODELS names the models' files, as in configs/, separated by colons; the demo model's when it names none.
Keys come from SLEEPSERVE_API_KEYS and SLEEPSERVE_ADMIN_KEYS. One process, so one replica of each model; where it
fails, its requests fail until the process is started anew.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from actors.checkpoints.download import ensure_checkpoint
from actors.errors import QueueFull
from actors.protocol import (
    GenerateRequest,
    Refusal,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
)
from serve_app.config.compose import shipped
from serve_app.config.files import check_names, load_model_config
from serve_app.config.http import HttpSettings
from serve_app.config.keys import read_keys
from serve_app.config.model import ModelConfig
from serve_app.front.app import build_asgi
from serve_app.models.first_token import Patience
from serve_app.models.model_client import ModelInfo, Scrape
from serve_app.models.tokenizer import LocalTokenizer
from serve_app.replica.core import Replica
from serve_app.replica.in_process import replica_in_process
from serve_app.scaling.manual import Scale
from serve_app.tracing.tracer import start_tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class OneReplica:
    """Scaler of a model that has one replica, for good."""

    async def read(self) -> Scale:
        return Scale(target=1, least=1, most=1, most_setting="serve_app.asgi")

    async def write(self, replicas: int) -> None:
        """Never called: there is nothing within bounds but what there is."""


class LocalClient:
    """ModelClient over a replica in this process."""

    replica: Replica  # from the start of the application on

    def __init__(self, config: ModelConfig, patience: Patience) -> None:
        self.config = config
        self.scaler = OneReplica()
        self.info = ModelInfo(
            model_id=config.model_id,
            max_model_len=config.engine.max_model_len,
            root=config.source.id,
            created=int(time.time()),
            tokenizer=LocalTokenizer(config.source, config.chat),
            aliases=config.aliases,
        )
        self._patience = patience
        self._open = 0  # requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Events of the replica.

        Raises:
            QueueFull: as many requests are open as the configuration allows.
            InvalidRequest, Unavailable, ReplicaFailed: the replica's refusal.
        """
        most = self.config.most_ongoing + self.config.max_queued_requests
        if self._open >= most and self.config.max_queued_requests >= 0:
            name = self.config.model_id
            raise QueueFull(
                f"{self._open} requests of {name} are open", self._patience.retry_after_s
            )
        self._open += 1
        try:
            async with (
                self._patience.waiting() as first,
                aclosing(self.replica.generate(request)) as events,
            ):
                async for event in events:
                    if isinstance(event, Refusal):
                        raise event.error
                    first.over()
                    yield event
        finally:
            self._open -= 1

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        return [await self.replica.sleep(command)]

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        return [await self.replica.wake_up()]

    async def status(self) -> Sequence[ReplicaStatus]:
        return [await self.replica.status()]

    async def replica_states(self) -> Sequence[ReplicaState]:
        return [self.replica.lifecycle.state]

    async def metrics(self, within_s: float) -> Scrape:
        return Scrape([await self.replica.metrics()])


def make_app(
    configs: Sequence[ModelConfig],
    environment: Mapping[str, str],
    tracer: "Tracer | None" = None,
    *,
    files: Sequence[str] | None = None,
) -> Starlette:
    """The application, which loads the models when it is started and lets go of them when it is stopped.

    Args:
        files: where each model is configured, for messages.

    Raises:
        ConfigError: two models have one name, or a key of the environment is none.
    """
    check_names(configs, files or [f"models.{index}" for index in range(len(configs))])
    settings = HttpSettings()
    clients = {
        config.model_id: LocalClient(config, Patience(settings.queue_timeout_s))
        for config in configs
    }
    app = build_asgi(clients, settings, keys=read_keys(None, None, environment), tracer=tracer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as open_until_the_end:
            for client in clients.values():
                checkpoint = await asyncio.to_thread(ensure_checkpoint, client.config.source)
                client.replica = await open_until_the_end.enter_async_context(
                    replica_in_process(client.config, checkpoint, tracer)
                )
            yield

    app.router.lifespan_context = lifespan  # the front's own is for several processes
    return app


def _named(files: str) -> list[str]:
    """What SLEEPSERVE_MODELS names. An empty name would be the current directory's."""
    named = [file for file in files.split(os.pathsep) if file.strip()]
    return named or [str(shipped("configs/demo.yaml"))]


_files = _named(os.environ.get("SLEEPSERVE_MODELS", ""))
app = make_app(
    [load_model_config(file) for file in _files],
    os.environ,
    start_tracer(os.environ),
    files=_files,
)
