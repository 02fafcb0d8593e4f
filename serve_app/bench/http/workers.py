"""Who sends a load: this process, or several. Each has an event loop, and watches how late it is."""

import asyncio
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, Protocol

from serve_app.bench.http.client import Client, RequestRecord, Target, until
from serve_app.bench.http.workload import Load, Requests, Share

OnRecord = Callable[[RequestRecord], None]
Send = Callable[[int], Coroutine[Any, Any, None]]  # a request by its index

_PER_WORKER = 32.0  # streams, or requests per second, that leave a process most of its time
_MAX_WORKERS = 16
_LAG_INTERVAL_S = 0.005
_STOP_S = 5.0


class BenchError(Exception):
    """What ends a measurement. The message is for the user."""


class Worker(Protocol):
    """Sends its share of each segment."""

    async def work(self, workload: Requests, share: Share, on_record: OnRecord) -> list[float]:
        """Send a share, and tell of each request as it ends. Returns after the last answer.

        Returns:
            By how many seconds the event loop was late, each time it looked.
        """


def workers_for(load: Load) -> int:
    """How many processes a load needs, and the machine has cores for."""
    needed = ceil((load.concurrency or load.request_rate or 1) / _PER_WORKER)
    return min(needed, os.cpu_count() or 1, _MAX_WORKERS)


class LocalWorker:
    """This process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def work(self, workload: Requests, share: Share, on_record: OnRecord) -> list[float]:
        async def send(index: int) -> None:
            segment = share.segment.number
            on_record(await self._client.send(workload, share.round_number, segment, index))

        loop = _closed_loop if share.request_rate is None else _open_loop
        await until(share.starts_s)
        async with watched_loop() as lags_s:
            await loop(share, send)
        return lags_s


class ProcessWorker:
    """A process of its own. It ends with ours, and leaves Ctrl-C to us."""

    def __init__(self, target: Target) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_process, args=(theirs, target), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is ready, or has ended, within that time; before `ready`, without an event loop."""
        return self._connection.poll(timeout_s)

    async def ready(self) -> None:
        """Returns when `work` can begin at once."""
        await self._receive()  # whatever comes first

    async def work(self, workload: Requests, share: Share, on_record: OnRecord) -> list[float]:
        self._connection.send((workload, share))
        try:
            while isinstance(message := await self._receive(), RequestRecord):
                on_record(message)
        except asyncio.CancelledError:
            with suppress(EOFError, ConnectionError):
                while self._connection.poll():  # what was measured until then is not lost
                    if isinstance(message := self._connection.recv(), RequestRecord):
                        on_record(message)
            raise
        lags_s: list[float] = message
        return lags_s

    def stop(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join(_STOP_S)

    async def _receive(self) -> Any:
        try:
            return await _receive(self._connection)
        except (EOFError, ConnectionError) as exc:
            self._process.join(_STOP_S)
            raise BenchError(
                f"a client process died (exit code {self._process.exitcode}); "
                "the machine may be short of memory"
            ) from exc


@contextmanager
def processes(count: int, target: Target) -> Iterator[Sequence[ProcessWorker]]:
    """Enter in the main thread, before there is an event loop: they must start with SIGINT ignored."""
    workers: list[ProcessWorker] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        try:
            workers.extend(ProcessWorker(target) for _ in range(count))
        finally:
            signal.signal(signal.SIGINT, before)
        yield workers
    finally:
        for worker in workers:
            worker.stop()


async def _closed_loop(share: Share, send: Send) -> None:
    indices = share.indices()

    async def place() -> None:
        for index in indices:
            if time.monotonic() >= share.ends_s:
                return
            await send(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(share.places):
            group.create_task(place())


async def _open_loop(share: Share, send: Send) -> None:
    async with asyncio.TaskGroup() as group:
        for index, due_s in share.arrivals():
            if due_s >= share.ends_s:
                return
            await until(due_s)
            group.create_task(send(index))


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """Gives a list that grows by the seconds by which a timer of this event loop was late."""
    lags_s: list[float] = []

    async def watch() -> None:
        while True:
            due_s = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            lags_s.append(time.monotonic() - due_s)

    watcher = asyncio.create_task(watch())
    try:
        yield lags_s
    finally:
        watcher.cancel()


# --- in the other process ---


def _process(connection: Connection, target: Target) -> None:
    allow_many_connections()
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):  # whoever asked has gone
        asyncio.run(_serve(connection, target))


async def _serve(connection: Connection, target: Target) -> None:
    async with Client(target) as client:
        worker = LocalWorker(client)
        connection.send("ready")
        while True:
            workload, share = await _receive(connection)
            connection.send(await worker.work(workload, share, connection.send))


async def _receive(connection: Connection) -> Any:
    """Raises EOFError when the other side is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
    return connection.recv()


def allow_many_connections() -> None:
    """An open loop may have thousands, and each is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
