"""A replica's workers, one after the other: whoever fails is replaced."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from actors.errors import ReplicaFailed, ServingError
from actors.protocol import MemoryChange
from actors.replica.runtime import ModelRuntime
from actors.replica.worker_client import WorkerClient

logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 5  # workers of which none got as far as a wake whose bytes were intact
_CLOSE_TIMEOUT_S = 40.0  # a worker gives its device 30


class Worker(Protocol):
    """A worker somewhere."""

    client: WorkerClient

    async def end(self) -> None:
        """End it, whatever it does now, and return when nothing is left of it. Idempotent."""


class WorkerSupervisor:
    """Effects of the lifecycle, by whichever worker there is.

    Attributes:
        runtime: of the worker that there is, or was until a moment ago; from `start` on.
        restarts: how many have taken the place of one that failed.
    """

    runtime: ModelRuntime

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[Worker]],
        make_runtime: Callable[[WorkerClient], Awaitable[ModelRuntime]],
        failed: Callable[[ReplicaFailed], None],
    ) -> None:
        """Make one without a worker.

        Args:
            start_worker: returns one that is ready.
            failed: told when a worker has failed; has to have `restart` called.
        """
        self.restarts = 0
        self._start_worker = start_worker
        self._make_runtime = make_runtime
        self._failed = failed
        self._worker: Worker | None = None
        self._failures_in_a_row = 0

    async def start(self) -> None:
        """Have the first worker.

        Raises:
            Exception: whatever keeps it from starting.
        """
        self._worker = worker = await self._start_worker()
        self.runtime = await self._make_runtime(worker.client)
        worker.client.failed.add_done_callback(self._tell)

    async def restart(self) -> None:
        """See Effects."""
        self._failures_in_a_row = 0 if self.runtime.has_settled else self._failures_in_a_row + 1
        while True:
            await self._end()
            if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
                raise ReplicaFailed(
                    f"{_MAX_FAILURES_IN_A_ROW} workers in a row have failed before they served"
                )
            try:
                await self.start()
            except Exception:
                logger.exception("a worker could not be started")
                self._failures_in_a_row += 1
            else:
                self.restarts += 1
                return

    async def wake(self) -> MemoryChange:
        """See Effects."""
        return await self.runtime.wake()

    async def sleep(self, level: int) -> MemoryChange:
        """See Effects."""
        return await self.runtime.sleep(level)

    def abort_in_flight(self) -> None:
        """See Effects."""
        self.runtime.abort_in_flight()

    def fail_in_flight(self, error: ServingError) -> None:
        """See Effects."""
        self.runtime.fail_in_flight(error)

    async def close(self) -> None:
        """Stop the worker in good order, and end it."""
        worker, self._worker = self._worker, None  # from now on its end is no failure
        if worker is not None:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self.runtime.close()
            except TimeoutError:
                logger.error("the worker does not stop; it is killed")
            finally:
                await worker.end()

    def _tell(self, failed: asyncio.Future[ReplicaFailed]) -> None:
        if self._worker is not None and failed is self._worker.client.failed:
            self._failed(failed.result())

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()
