"""Both halves of a model in one process, with a pair of sockets between them: for scripts, benches and tests."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from actors.engine.config import EngineConfig
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.memory.cpu_card import CpuCard
from actors.observer import Observer
from actors.replica.runtime import ModelRuntime
from actors.replica.worker_client import WorkerClient
from actors.text.codec import TextCodec
from actors.text.message_form import ChatConfig
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.connection import Connection
from actors.worker.messages import Sized, ToWorker
from actors.worker.model_worker import ModelWorker
from actors.worker.service import Permission, WorkerService, signs_of_life
from actors.worker.watchdog import WatchdogConfig


class ImageLoad(Protocol):
    """As FastLoad."""

    @property
    def checkpoint(self) -> Path: ...
    async def obtain(self) -> WeightImage: ...
    async def release(self, key: ImageKey) -> None: ...


@dataclass(frozen=True, slots=True)
class InProcessModel:
    """What would be two processes, asleep at first."""

    runtime: ModelRuntime
    worker: ModelWorker
    service: WorkerService

    async def close(self) -> None:
        """Stop the engine and give its memory back, unless something hangs that may use it. Idempotent."""
        try:
            await self.runtime.close()
        finally:
            await self.service.close()
        if self.worker.is_stopped:  # a card's memory outlives the objects, and so may this process
            await asyncio.to_thread(self.worker.memory.unmap, 2)


async def build_in_process(
    module: PreTrainedModel,
    image: WeightImage,
    load: ImageLoad,
    engine: EngineConfig,
    keep_layers: int = 0,
    chat: ChatConfig | None = None,
    observer: Observer | None = None,
    defaults: ResolvedSampling | None = None,
    watchdog: WatchdogConfig | None = None,
    cpu_card: CpuCard | None = None,
    may_begin: Callable[[Sized], Awaitable[None]] | None = None,
    budget_of: Callable[[int], int] | None = None,
) -> InProcessModel:
    """Build one; off the event loop, because it takes seconds. Other arguments as of ModelWorker and ModelRuntime.

    Args:
        load: where `image` came from.
        may_begin: as of WorkerClient.

    Raises:
        ValueError, LayoutMismatch: as ModelWorker.
    """
    loop = asyncio.get_running_loop()
    observer = observer or Observer()
    watchdog = watchdog or WatchdogConfig()
    codec = await asyncio.to_thread(TextCodec.load, load.checkpoint, chat)
    client = WorkerClient(observer, watchdog, may_begin)
    connection: Connection[ToWorker] = Connection(ToWorker, lambda _: None, lambda: None)
    permission = Permission(connection)
    upper, lower = socket.socketpair()
    await loop.create_connection(lambda: client.protocol, sock=upper)
    await loop.create_connection(lambda: connection, sock=lower)
    building = asyncio.create_task(
        asyncio.to_thread(
            ModelWorker,
            module,
            load.checkpoint,
            image,
            load.obtain,
            load.release,
            engine,
            keep_layers,
            connection.send,
            watchdog,
            cpu_card,
            permission.ask,
            budget_of,
        )
    )
    try:
        async with signs_of_life(connection):
            worker = await asyncio.shield(building)
        service = WorkerService(worker, connection)
        await client.ready()
    except BaseException:
        client.close()
        permission.withdraw()
        await _discard(building)
        raise
    runtime = ModelRuntime(
        client,
        codec,
        observer,
        defaults or ResolvedSampling(),
        engine.max_events_per_s,
    )
    return InProcessModel(runtime, worker, service)


async def _discard(building: asyncio.Task[ModelWorker]) -> None:
    """Close what is being built, once it is.

    The thread that builds cannot be stopped, and an engine that nobody stops keeps the process from ending.
    """
    await asyncio.wait({building})
    if building.exception() is None:
        await building.result().close()
