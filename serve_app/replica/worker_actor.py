"""ModelWorker in a process of its own: a Ray actor in the replica's placement group."""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from actors.card.config import budget_bytes
from actors.errors import EngineDied, Unavailable
from actors.holder.host_memory import ImageUse, Need
from actors.waits import at_most
from actors.worker.connection import Connection
from actors.worker.messages import Logged, Obtained, ToWorker
from serve_app.config.model import ModelConfig
from serve_app.process import spares
from serve_app.process.heap import set_aside, uncollected
from serve_app.process.logs import log_to
from serve_app.replica.start_errors import told_in_one_line

if TYPE_CHECKING:
    from actors.holder.obtain import FastLoad
    from actors.image.layout import CompressedSegment, ImageKey
    from actors.image.store import ByteArray
    from actors.worker.model_worker import ModelWorker


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is to serve, and how."""

    replica_id: str
    config: ModelConfig  # its engine's device decided
    checkpoint: Path
    lessee: str  # of the image: the replica's actor, which outlives its workers
    cpu_card: tuple[Path, int] | None = None  # file and bytes of what stands for a card
    # Of the card, for all its models; None: it is not shared.
    memory_budget: float | str | None = None

    def load(self) -> "FastLoad":
        """How its image is had, and let go of, on this node."""
        from actors.holder.obtain import FastLoad
        from serve_app.weights.holders import HolderOfThisNode, request_for

        request = request_for(self.config)
        return FastLoad(HolderOfThisNode(), request, self.checkpoint, self.lessee)


class WorkerActor:
    """Serves one replica over a local socket; Ray carries its start and its end."""

    def __init__(self, settings: WorkerSettings) -> None:
        spares.taken()
        self._settings = settings
        self._worker: ModelWorker | None = None  # once it is ready

    def __repr__(self) -> str:
        """What Ray puts before the lines that this process prints."""
        return f"Worker of {self._settings.config.model_id}/{self._settings.replica_id}"

    async def ping(self) -> int:
        """The process, as soon as there is one."""
        return os.getpid()

    async def start(self, socket: str) -> None:
        """Return when the worker is ready, asleep.

        Args:
            socket: path of the replica's Unix socket.

        Raises:
            CannotStart: the configuration cannot work for this model here.
            Exception: anything else that is wrong with image or device.
        """
        with told_in_one_line():
            await self._start(socket)

    async def _start(self, socket: str) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        config, limit_s = settings.config, settings.config.watchdog.other_timeout_s
        # Before there is a connection, on which silence counts: imports let nothing else run here meanwhile.
        await spares.imported()
        with uncollected():
            from actors.memory.cpu_card import CpuCard
            from actors.worker.model_memory import select_driver
            from actors.worker.model_worker import ModelWorker, build_module
            from actors.worker.service import Permission, WorkerService, signs_of_life

        connection: Connection[ToWorker] = Connection(ToWorker, lambda _: None, _replica_is_gone)
        permission = Permission(connection)
        await loop.create_unix_connection(lambda: connection, socket)
        log_to(lambda level, name, text: connection.send(Logged(level, name, text)))
        async with signs_of_life(connection):
            # First what needs no weights: a model that cannot be served is refused in a second.
            async with _within(limit_s, "looking at model and device"):
                module = await asyncio.to_thread(
                    build_module, settings.checkpoint, config.dtype, config.engine.device
                )
            load = replace(
                settings.load(),
                worker=ray.get_runtime_context().current_actor,
                on_obtained=lambda source: connection.send(Obtained(source)),
            )

            async def open_device() -> None:
                """Its context takes some tenths of a second, as the image does; whoever is next finds it there."""
                async with _within(limit_s, "opening the device"):
                    await asyncio.to_thread(select_driver, config.engine.device)

            image, _ = await asyncio.gather(load.obtain(), open_device())
            budget = settings.memory_budget
            worker = await asyncio.to_thread(
                ModelWorker,
                module,
                settings.checkpoint,
                image,
                load.obtain,
                load.release,
                config.engine,
                config.sleep.keep_layers,
                connection.send,
                config.watchdog,
                None if settings.cpu_card is None else CpuCard(*settings.cpu_card),
                permission.ask,
                None if budget is None else partial(budget_bytes, budget),
            )
        self._worker = worker
        self._service = WorkerService(worker, connection)
        set_aside()
        await spares.keep_one_more()
        self._compiling = asyncio.create_task(self._set_compiled_aside(worker))
        compressing = worker.compress_image(config.image.compression, load.compress)
        self._compressing = asyncio.create_task(compressing)

    async def image_use(self, key: "ImageKey") -> ImageUse | None:
        """See ImageNeed; one that starts needs its image until it is ready. Asked by the holder of the image."""
        if self._worker is None:
            return ImageUse(Need.CHANGING)
        return self._worker.image.use(key)

    async def let_go(self, key: "ImageKey") -> bool:
        """See ImageNeed. Asked by the holder of the image."""
        return self._worker is not None and await self._worker.image.let_go(key)

    async def compressed_segment(
        self, key: "ImageKey", index: int, view: "ByteArray", offset: int, size: int
    ) -> "CompressedSegment | None":
        """See ModelWorker. Asked by the holder of the image, into an object that it has reserved."""
        if self._worker is None:
            raise Unavailable("this worker still starts")
        from actors.image.store import writable

        out = writable(view, offset, size)
        return await self._worker.compressed_segment(key, index, out)

    async def _set_compiled_aside(self, worker: "ModelWorker") -> None:
        await worker.compiled()
        set_aside()  # what compiling has left


def _within(limit_s: float, what: str) -> AbstractAsyncContextManager[None]:
    """Raises EngineDied if the body waits for longer: for a thread that hangs in a driver, say."""
    text = f"{what} has not ended after {limit_s:g} s (watchdog.other_timeout_s)"
    return at_most(limit_s, EngineDied(text))


def _replica_is_gone() -> None:
    """Nobody is served any more; what the card holds goes with this process."""
    os._exit(0)
