"""How long requests of one model wait for their first token, and how long a refused one should stay away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from actors.errors import Unavailable

_NEWEST = 0.3  # its weight in the mean
_UNKNOWN_S = 5.0


class Patience:
    """Measures waits for the first token and bounds them.

    A wait has everything in it: the queue in front of the replicas, a wake, the prefill. Their mean is when
    somebody who finds the queue full may expect to fare better.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._mean_s: float | None = None
        self.waits = set[Wait]()

    @property
    def longest_s(self) -> float:
        """For how long somebody waits already; 0 while nobody does."""
        now_s = asyncio.get_running_loop().time()
        return max((now_s - wait.began_s for wait in self.waits), default=0.0)

    def end(self, failure: Callable[[], Exception]) -> None:
        """End all waits: nobody will give a token. Each raises one of these from `waiting`."""
        for wait in tuple(self.waits):
            wait.end(failure())

    @property
    def retry_after_s(self) -> float:
        """The mean wait; what came last counts most."""
        return _UNKNOWN_S if self._mean_s is None else self._mean_s

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator["Wait"]:
        """Around one request. One task enters and leaves it.

        Raises:
            Unavailable: `over` was not called in time.
        """
        limit = asyncio.timeout(self._limit_s)
        wait = Wait(self, limit)
        self.waits.add(wait)
        try:
            async with limit:
                yield wait
        except TimeoutError:
            if not limit.expired():
                raise
            if wait.failure is not None:
                raise wait.failure from None
            raise Unavailable(
                f"no token within {self._limit_s:g} s (http.queue_timeout_s)", self.retry_after_s
            ) from None
        finally:
            self.waits.discard(wait)
            # As in `at_most`: neither this frame nor the caller's leads back to the task.
            wait.limit = wait.failure = None
            del limit

    def note(self, seconds: float) -> None:
        """A wait took so long."""
        before_s = seconds if self._mean_s is None else self._mean_s
        self._mean_s = (1 - _NEWEST) * before_s + _NEWEST * seconds


class Wait:
    """One request's wait."""

    def __init__(self, patience: Patience, limit: asyncio.Timeout) -> None:
        self._patience = patience
        self.limit: asyncio.Timeout | None = limit  # None once it is over
        self.failure: Exception | None = None  # that ends it
        self.began_s = asyncio.get_running_loop().time()

    def over(self) -> None:
        """The first token is there."""
        limit, self.limit = self.limit, None
        if limit is None:
            return
        limit.reschedule(None)
        self._patience.waits.discard(self)
        self._patience.note(asyncio.get_running_loop().time() - self.began_s)

    def end(self, failure: Exception) -> None:
        if self.limit is not None:
            self.failure = failure
            self.limit.reschedule(asyncio.get_running_loop().time())
