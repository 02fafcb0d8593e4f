"""A replica's workers, one after the other: whoever fails is replaced."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Protocol

from actors.errors import CannotStart, ReplicaFailed, ServingError, Unavailable
from actors.observer import WakeCause
from actors.protocol import MemoryChange, MemoryLeft
from actors.replica.runtime import ModelRuntime
from actors.replica.worker_client import WorkerClient

logger = logging.getLogger(__name__)

# Attempts in a row. What is wrong for a moment is over after the pauses between so many; what is not, another start
# of the same will not mend.
_MAX_ATTEMPTS = 5
# A row is within so much time with a worker that was ready; one that has answered a request to its end ends it.
# To have woken is not enough: what kills workers over and over lets each of them wake first. One that hangs a step is
# noticed after 120 s (watchdog.step_timeout_s), and five of these have to be a row, too.
# The time of starts is not counted, or five that hang for ten minutes each were none.
_ROW_S = 900.0
_FIRST_PAUSE_S = 1.0  # before the second attempt; then twice as long, 8 s before the fifth
_CLOSE_TIMEOUT_S = 40.0  # a worker gives its device 30


class Worker(Protocol):
    """A worker somewhere."""

    client: WorkerClient

    async def end(self) -> None:
        """End it, whatever it does now, and return when nothing is left of it. Idempotent."""


class ByRuntime:
    """Effects of the lifecycle by the worker that there is; `restart` is for subclasses."""

    runtime: ModelRuntime

    async def wake(self, cause: WakeCause = WakeCause.COMMAND) -> MemoryChange:
        """See Effects. What there is no room for is refused at once."""
        return await self.runtime.wake()

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        """See Effects."""
        return await self.runtime.sleep(level, deep)

    def give_up_waiting(self, reason: str) -> bool:
        """See Effects; nothing waits."""
        return False

    def requests_wait(self, wait: bool) -> None:
        """See Effects; nobody wants to know."""

    def has_requests(self, busy: bool) -> None:
        """See Effects; nobody wants to know."""

    def abort_in_flight(self) -> None:
        """See Effects."""
        self.runtime.abort_in_flight()

    def fail_in_flight(self, error: ServingError) -> None:
        """See Effects."""
        self.runtime.fail_in_flight(error)


class WorkerSupervisor(ByRuntime):
    """Effects of the lifecycle, by whichever worker there is; none while a sleep has ended it.

    Attributes:
        runtime: of the worker that there is, or was until a moment ago; from `start` on.
        restarts: how many have taken the place of one that failed.
    """

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[Worker]],
        make_runtime: Callable[[WorkerClient], Awaitable[ModelRuntime]],
        failed: Callable[[ReplicaFailed], None],
        release_image: Callable[[], Awaitable[None]],
        ends_worker: bool = False,
        ended: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make one without a worker.

        Args:
            start_worker: returns one that is ready.
            failed: told when a worker has failed; has to have `restart` called.
            release_image: what a worker does in a sleep at level 2, for one that has ended.
            ends_worker: every sleep does, not only those that are to be deep where the driver cannot.
            ended: told, in a restart, that nothing is left of the worker that failed, or could not start; there may
                be no other for a while, or for good.
            now: in seconds.
            pause: returns after so many of them.
        """
        self.restarts = 0
        self._start_worker = start_worker
        self._make_runtime = make_runtime
        self._failed = failed
        self._release_image = release_image
        self._ends_worker = ends_worker
        self._ended = ended
        self._worker: Worker | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._closes = False
        self._now = now
        self._pause = pause
        self._ready_s = 0.0  # since when there is the worker
        self._lived_s = 0.0  # how long there have been workers, all together
        self._attempts: list[float] = []  # in a row: the `_lived_s` of each

    async def start(self) -> None:
        """Have the first worker.

        Raises:
            Exception: whatever keeps it from starting.
            CancelledError: closed meanwhile.
        """
        await self._until_closed(self._start())

    async def wake(self, cause: WakeCause = WakeCause.COMMAND) -> MemoryChange:
        """See Effects. Where a sleep has ended the worker, another one is started first, once.

        Raises:
            Exception: whatever keeps it from starting; `restart` tries again.
        """
        if self._worker is None:
            began_s = self._now()
            await self._until_closed(self._start())
            self.runtime.resumed(self._now() - began_s)
        return await super().wake(cause)

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        """See Effects. A deep sleep ends the worker where the driver cannot do it: nothing of the card is left.

        Not while requests are frozen there, of which nothing else knows how far they are.
        """
        if self._worker is None:
            if level == 2:
                await self._release_image()
                self.runtime.worker.image_released()
            return MemoryChange(0, 0, 0, deep=True)
        change = await super().sleep(level, deep and not self._ends_worker)
        client, runtime = self._worker.client, self.runtime
        refused = deep and not (change.deep or client.state.can_suspend)
        if runtime.has_requests or not (self._ends_worker or refused):
            return change
        client.retire()
        self._lived_s += self._now() - self._ready_s
        await self._end()
        logger.info("the worker has ended; the next wake starts another one")
        return _without_process(change)

    async def restart(self) -> None:
        """See Effects. Raises CancelledError if closed meanwhile, and ReplicaFailed once that has begun."""
        if self._closes:  # what was under way failed with the worker
            raise ReplicaFailed("this replica is shut down")
        await self._until_closed(self._restart())

    async def _until_closed(self, work: Coroutine[None, None, None]) -> None:
        self._beginning = asyncio.create_task(work)
        await self._beginning
        if self._worker is not None:  # not closed in this very moment
            # No await follows: whoever is told has left the restart by then.
            self._worker.client.failed.add_done_callback(self._tell)

    async def _start(self) -> None:
        self._worker = worker = await self._start_worker()
        try:
            self.runtime = await self._make_runtime(worker.client)
        except BaseException:
            await self._end()
            raise
        self._ready_s = self._now()

    async def _restart(self) -> None:
        if self._worker is not None:
            self._lived_s += self._now() - self._ready_s
        since_s = self._lived_s if self.runtime.has_answered else self._lived_s - _ROW_S
        self._attempts = [at_s for at_s in self._attempts if at_s > since_s]
        why = ""
        while True:
            await self._end()
            self._ended()
            attempt = len(self._attempts)
            if attempt == _MAX_ATTEMPTS:
                raise ReplicaFailed(
                    f"{_MAX_ATTEMPTS} workers in a row have failed before they had answered a request{why}"
                )
            if attempt:
                await self._pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            self._attempts.append(self._lived_s)
            try:
                await self._start()
            except (CannotStart, Unavailable) as exc:
                why = f"; the last one could not start: {exc}"
                logger.error("a worker could not be started: %s", exc)
            except Exception:
                logger.exception("a worker could not be started")
            else:
                self.restarts += 1
                return

    async def close(self) -> None:
        """Stop the worker in good order, and end it; one that begins is ended at once."""
        self._closes = True
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
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


def _without_process(change: MemoryChange) -> MemoryChange:
    """A sleep whose process has ended as well, and with it what that had left."""
    assert change.left is not None, "of a sleep"
    more = change.left.total

    def with_more(released: int | None) -> int | None:
        return None if released is None else released + more

    return replace(
        change,
        mapped_after_bytes=0,
        released_bytes=with_more(change.released_bytes),
        own_released_bytes=with_more(change.own_released_bytes),
        left=MemoryLeft(0, 0, 0, 0, 0),
        deep=True,
    )
