"""Quiet periods, for work that requests would feel."""

import threading
import time
from collections.abc import Callable

QUIET_S = 2.0  # without a sequence in flight; between two of one conversation it is longer
LATEST_S = 60.0  # a replica that is never quiet

_LOOK_EVERY_S = 0.05


class Lull:
    """Lets background threads wait for a quiet period."""

    def __init__(
        self,
        is_busy: Callable[[], bool],
        quiet_s: float = QUIET_S,
        latest_s: float = LATEST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one.

        Args:
            is_busy: whether anything is in flight now; asked twenty times a second while somebody waits.
            quiet_s: how long there has been nothing.
            latest_s: how long `wait` waits for that.
        """
        self._is_busy = is_busy
        self._quiet_s = quiet_s
        self._latest_s = latest_s
        self._now = now
        self._closed = threading.Event()

    def wait(self) -> bool:
        """Block until it has been quiet for long enough, or for too long not; False once closed."""
        began_s = quiet_since_s = self._now()
        while not self._closed.is_set():
            now_s = self._now()
            if self._is_busy():
                quiet_since_s = now_s
            elif now_s >= quiet_since_s + self._quiet_s:
                return True
            if now_s >= began_s + self._latest_s:
                return True
            self._closed.wait(_LOOK_EVERY_S)
        return False

    def rest(self, seconds: float) -> bool:
        """Block for so long, whatever there is in flight; False once closed."""
        return not self._closed.wait(seconds)

    def close(self) -> None:
        """Let go whoever waits."""
        self._closed.set()
