"""When is a replica idle? Pure: the clock is passed in."""

from collections.abc import Callable


class IdleClock:
    """Seconds since the last inference request ended.

    Only inference requests touch it: health checks, metrics, model lists and status reads never do.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._in_flight = 0
        self._quiet_since_s = now()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def begin(self) -> None:
        self._in_flight += 1

    def end(self) -> None:
        assert self._in_flight > 0, "end() without begin()"
        self._in_flight -= 1
        self._quiet_since_s = self._now()

    def touch(self) -> None:
        """Start counting anew, as with a wake."""
        self._quiet_since_s = self._now()

    def idle_s(self) -> float:
        """0 while a request is in flight."""
        return 0.0 if self._in_flight else self._now() - self._quiet_since_s
