"""A configured model in this process, without Ray: for scripts, the ASGI application and benches."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.engine.model.cards import has_nvidia_driver
from actors.errors import ReplicaFailed
from actors.observer import Observer
from actors.replica.runtime import ModelRuntime
from actors.replica.supervisor import ByRuntime
from serve_app.config.model import ModelConfig
from serve_app.metrics.instruments import Instruments
from serve_app.metrics.tally import Tally
from serve_app.process.ending import end_despite
from serve_app.replica.core import Replica, kept_running, sampling_defaults_of
from serve_app.tracing.replica import observed

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from actors.replica.in_process import InProcessModel


logger = logging.getLogger(__name__)

_NAME = "in-process"  # of the replica


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was loaded from disk, asleep, and how long that took."""

    halves: "InProcessModel"
    image_s: float
    engine_s: float


async def load_model(
    config: ModelConfig,
    checkpoint: Path,
    tell: Callable[[str], None] = lambda _: None,
    observer: Observer | None = None,
) -> Loaded:
    """Load one; whoever has it closes it.

    Args:
        tell: told what is being done.

    Raises:
        Exception: whatever is wrong with checkpoint or configuration, as in a replica.
    """
    tell("importing torch")
    from actors.holder.held import ImageRequest
    from actors.holder.obtain import FastLoad
    from actors.replica.in_process import build_in_process
    from actors.worker.model_worker import build_module

    tell("loading the checkpoint")
    request = ImageRequest(config.model_id, config.source, config.dtype)
    load = FastLoad(holder=None, request=request, checkpoint=checkpoint, lessee="in-process")
    module = await asyncio.to_thread(build_module, checkpoint, config.dtype, config.engine.device)
    started_s = time.perf_counter()
    image = await load.obtain()
    image_s = time.perf_counter() - started_s
    tell("building the engine")
    started_s = time.perf_counter()
    halves = await build_in_process(
        module,
        image,
        load,
        config.engine,
        config.sleep.keep_layers,
        config.chat,
        observer,
        sampling_defaults_of(config, checkpoint),
        config.watchdog,
    )
    return Loaded(halves, image_s, time.perf_counter() - started_s)


class _OneWorker(ByRuntime):
    """Workers of a replica, of which there is one: in its own process, none takes its place."""

    restarts = 0
    replica: Replica  # whose they are

    def __init__(self, runtime: ModelRuntime) -> None:
        self.runtime = runtime

    async def restart(self) -> None:
        """See Effects."""
        why = self.replica.lifecycle.reason  # there would have to be another
        raise ReplicaFailed(
            f"{why}. Load the model in another process: none replaces it in its own"
        )


@asynccontextmanager
async def replica_in_process(
    config: ModelConfig, checkpoint: Path, tracer: "Tracer | None" = None
) -> AsyncIterator[Replica]:
    """A replica of a configured model, which sleeps and wakes as Serve's do; closed at the end.

    Raises:
        Exception: as `load_model`.
    """
    if note := config.unused_card(has_nvidia_driver()):
        logger.warning("%s", note)
    config = config.model_copy(update={"engine": config.engine_of_replica})
    instruments = Instruments(Tally(), time.monotonic)
    observer, traced = observed(instruments, tracer, config.model_id, _NAME)
    loaded = await load_model(config, checkpoint, observer=observer)
    workers = _OneWorker(loaded.halves.runtime)
    replica = Replica(
        config, _NAME, socket.gethostname(), workers, instruments, observer, traced=traced
    )
    workers.replica = replica

    def restart(failed: "asyncio.Future[ReplicaFailed]") -> None:
        replica.lifecycle.restart(failed.result())

    failed = workers.runtime.worker.failed
    failed.add_done_callback(restart)
    watches: list[asyncio.Task[None]] = []
    try:
        await replica.begin()
        watches += [
            asyncio.create_task(kept_running(name, watch))
            for name, watch in replica.watches().items()
        ]
        yield replica
    finally:
        for watch in watches:
            watch.cancel()
        failed.remove_done_callback(restart)  # from now on its end is no failure
        await loaded.halves.close()
        if not loaded.halves.worker.is_stopped:
            end_despite("the device does not answer, and a thread of the engine waits for it")
