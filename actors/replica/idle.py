"""When is a replica idle, and for how long may it be? Pure: the clocks are passed in."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from actors.replica.schedule import Wanted


class TimeoutSource(StrEnum):
    """Whose word the idle timeout is."""

    SETTING = "idle_timeout_s"
    KEEP_ALIVE = "keep_alive"  # the last request's
    SCHEDULE = "schedule"
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """How long a replica may be idle before it sleeps."""

    seconds: float  # math.inf: it does not sleep by itself
    source: TimeoutSource


@dataclass(frozen=True, slots=True)
class IdleRules:
    """What a model's settings say.

    Attributes:
        timeout_s: math.inf: never.
        max_keep_alive_s: what a request can ask for at most; math.inf: no bound.
        is_pinned: never, whatever anybody asks for.
    """

    timeout_s: float = math.inf
    max_keep_alive_s: float = math.inf
    is_pinned: bool = False

    def timeout(self, asked: IdleTimeout | None, wanted: Wanted) -> IdleTimeout:
        """What holds now: the longer of what the schedule and those who use the model want.

        Args:
            asked: by the last request, or an operator; None: nothing.
            wanted: by the schedule.
        """
        if self.is_pinned:
            return IdleTimeout(math.inf, TimeoutSource.PIN)
        if wanted is Wanted.AWAKE:
            return IdleTimeout(math.inf, TimeoutSource.SCHEDULE)
        if asked is not None:
            return asked
        if wanted is Wanted.ASLEEP:
            return IdleTimeout(0.0, TimeoutSource.SCHEDULE)
        return IdleTimeout(self.timeout_s, TimeoutSource.SETTING)

    def clipped(self, keep_alive_s: float) -> float:
        """No more than the bound; but who asks for much never gets less than who asks for nothing."""
        return min(keep_alive_s, max(self.max_keep_alive_s, self.timeout_s))


class IdleClock:
    """Seconds since the last inference request ended, and how many there may be: the one owner of both.

    Only inference requests touch it: health checks, metrics, model lists and status reads never do.
    """

    def __init__(
        self,
        now: Callable[[], float],
        rules: IdleRules = IdleRules(),
        wanted: Callable[[], Wanted] = lambda: Wanted.NEITHER,
    ) -> None:
        """Begin to count.

        Args:
            now: seconds, of a clock that does not go backwards.
            wanted: by the schedule, now.
        """
        self._now = now
        self._rules = rules
        self._wanted = wanted
        self._in_flight = 0
        self._quiet_since_s = now()
        self._asked: IdleTimeout | None = None

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def begin(self, keep_alive_s: float | None = None) -> None:
        """A request is in flight. The last one that began decides: without `keep_alive_s`, for the setting."""
        self._in_flight += 1
        self._asked = None
        if keep_alive_s is not None:
            seconds = self._rules.clipped(keep_alive_s)
            self._asked = IdleTimeout(seconds, TimeoutSource.KEEP_ALIVE)

    def end(self) -> None:
        assert self._in_flight > 0, "end() without begin()"
        self._in_flight -= 1
        self._quiet_since_s = self._now()

    def touch(self) -> None:
        """Start counting anew, as with a wake."""
        self._quiet_since_s = self._now()

    def ordered_awake(self) -> None:
        """An operator woke it: it stays awake for its own timeout at least, whatever was asked for before."""
        self.touch()
        own = IdleTimeout(self._rules.timeout_s, TimeoutSource.SETTING)
        if self._asked is None or self._asked.seconds < own.seconds:
            self._asked = own

    def forget(self) -> None:
        """It sleeps, with no request left: what was asked for is over."""
        self._asked = None

    def idle_s(self) -> float:
        """0 while a request is in flight."""
        return 0.0 if self._in_flight else self._now() - self._quiet_since_s

    def timeout(self) -> IdleTimeout:
        """What holds now."""
        return self._rules.timeout(self._asked, self._wanted())

    def left_s(self) -> float:
        """Until it has been idle for long enough; math.inf while a request is in flight."""
        if self._in_flight:
            return math.inf
        return max(0.0, self.timeout().seconds - self.idle_s())
