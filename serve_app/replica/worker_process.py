"""A replica's worker as a process: placed, connected, and ended."""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import ray
from ray._private.state import actors
from ray.exceptions import RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.errors import CannotStart, ServingError, Unavailable, WorkerLost
from actors.observer import Observer
from actors.replica.worker_client import WorkerClient
from actors.worker.messages import Sized
from serve_app.process.spares import environment_of_worker
from serve_app.replica.worker_actor import WorkerActor, WorkerSettings

logger = logging.getLogger(__name__)

_LEAST_CPUS = 0.001  # Ray knows no empty bundle
_KILL_AFTER_S = 2.0  # Ray's own way to end an actor takes 12 ms, and warns nobody of a death
_END_TIMEOUT_S = 30.0  # of a process whose card does not let go
_PLACE_TIMEOUT_S = 120.0  # for a process, behind one that has not ended
_LOOK_EVERY_S = 0.5  # whether Ray has a process; one that nothing stops answers within half of that


def bundles(num_cpus: float, num_gpus: float) -> list[dict[str, float]]:
    """A replica's placement group: what it takes itself, then what each of its workers takes.

    Beside a card the CPU cores are the replica's; where the worker computes with them, they are its own.
    """
    if num_gpus:
        return [{"CPU": max(num_cpus, _LEAST_CPUS)}, {"GPU": num_gpus}]
    # Together no more than what was asked for: it may be all that the node has.
    return [{"CPU": _LEAST_CPUS}, {"CPU": max(num_cpus - _LEAST_CPUS, _LEAST_CPUS)}]


class WorkerProcess:
    """One worker of this replica, in the second bundle of its placement group."""

    def __init__(self, client: WorkerClient, actor: Any, process_id: int) -> None:
        self.client = client
        self._actor = actor
        self._process_id = process_id
        self._pidfd = os.pidfd_open(process_id)

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        resources: Mapping[str, float],
        observer: Observer,
        may_begin: Callable[[Sized], Awaitable[None]] | None = None,
    ) -> Self:
        """Start one, and return when it is ready.

        Args:
            resources: of its bundle; all of them, so that the next one waits for its end.
            may_begin: as of WorkerClient.

        Raises:
            ReplicaFailed: it says nothing for too long, or has failed.
            Exception: what else kept it from starting. Nothing is left of it.
        """
        watchdog = settings.config.watchdog
        actor = _place(settings, resources)
        ping: asyncio.Future[int] = asyncio.ensure_future(actor.ping.remote())
        try:
            process_id = await _placed(actor, ping)
            client = WorkerClient(observer, watchdog, may_begin)
            worker = cls(client, actor, process_id)
        except BaseException:
            ping.cancel()
            ray.kill(actor)
            raise
        try:
            await _answered(ping, process_id, watchdog.silence_timeout_s)
            await worker._ready()
        except BaseException:
            worker.client.close()
            await worker.end()
            raise
        return worker

    async def _ready(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sleepserve-") as folder:
            socket = str(Path(folder) / "worker")
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: self.client.protocol, socket
            )
            try:
                # A worker that hangs never answers the call; its silence is told by the client.
                await asyncio.gather(self._actor.start.remote(socket), self.client.ready())
            except RayTaskError as error:
                if isinstance(error.cause, CannotStart | Unavailable):
                    raise error.cause from None  # it says all that there is to know
                if isinstance(error.cause, ServingError):
                    raise error.cause from error  # Ray's own, which is of both classes, cannot be pickled
                raise
            finally:
                server.close()

    async def end(self) -> None:
        """Kill it, and return when the process is gone, and with it what it had of its card. Idempotent."""
        if self._pidfd < 0:
            return
        pidfd, self._pidfd = self._pidfd, -1
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            ray.kill(self._actor)
            if not await _happens(gone, _KILL_AFTER_S):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not await _happens(gone, _END_TIMEOUT_S):
                    logger.error(
                        "worker %d does not end; its card does not answer", self._process_id
                    )
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), within_s)
    except TimeoutError:
        return False
    return True


async def _placed(actor: Any, ping: asyncio.Future[int]) -> int:
    """The actor's process, which may be stopped: Ray knows of it before it answers.

    Raises:
        WorkerLost: it has none in time.
    """
    try:
        async with asyncio.timeout(_PLACE_TIMEOUT_S):
            while True:
                await asyncio.wait([ping], timeout=_LOOK_EVERY_S)
                if ping.done():
                    return ping.result()
                if process_id := await asyncio.to_thread(_process_of, actor):
                    return process_id
    except TimeoutError:
        raise WorkerLost(
            f"no process for a worker within {_PLACE_TIMEOUT_S:g} s: its share of the node is taken"
        ) from None


def _process_of(actor: Any) -> int:
    """The one that Ray has chosen, from then on; 0 before. No other one follows: the actor dies with it.

    `ray.util.state.get_actor` would tell it, too, but asks the dashboard, which need not run.
    """
    return int(actors(actor._actor_id.hex())["Pid"])


async def _answered(ping: asyncio.Future[int], process_id: int, within_s: float) -> None:
    """Return once it has. Raises WorkerLost if it does not in time."""
    try:
        await asyncio.wait_for(ping, within_s)
    except TimeoutError:
        raise WorkerLost(
            f"the worker's process {process_id} has not answered within {within_s:g} s "
            "(watchdog.silence_timeout_s)"
        ) from None


def _place(settings: WorkerSettings, resources: Mapping[str, float]) -> Any:
    group = get_current_placement_group()
    assert group is not None, "the deployment has bundles"
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=1
        ),
        "runtime_env": environment_of_worker(),
    }
    return ray.remote(WorkerActor).options(**options).remote(settings)
