"""Quiet periods, for work that requests would feel."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 2.0  # without a request in flight; between two of one conversation it is longer
LATEST_S = 60.0  # a replica that is never quiet


class Lull:
    """Lets background threads wait for a quiet period. Starts quiet, now."""

    def __init__(
        self,
        quiet_s: float = QUIET_S,
        latest_s: float = LATEST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one.

        Args:
            quiet_s: how long there has been no request.
            latest_s: how long `wait` waits for that.
        """
        self._quiet_s = quiet_s
        self._latest_s = latest_s
        self._now = now
        self._changed = threading.Condition()
        self._in_flight = 0
        self._quiet_since_s = now()
        self._closed = False

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """For as long as a request is in flight."""
        with self._changed:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._changed:
                self._in_flight -= 1
                self._quiet_since_s = self._now()
                self._changed.notify_all()

    def wait(self) -> bool:
        """Block until it has been quiet for long enough, or for too long not; False once closed."""
        latest_s = self._now() + self._latest_s
        with self._changed:
            while not self._closed:
                quiet_s = self._quiet_since_s + self._quiet_s
                due_s = latest_s if self._in_flight else min(latest_s, quiet_s)
                left_s = due_s - self._now()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    def rest(self, seconds: float) -> bool:
        """Block for so long, whatever requests there are; False once closed."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed, seconds)

    def close(self) -> None:
        """Let go whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
