"""When the next step is to be launched: as late as the device allows, so that it holds whoever comes meanwhile."""

from collections import deque

from actors.engine.batching.inputs import StepSize

_DEVIATIONS = 4  # of what was measured, to be on the safe side
_FIRST_LEAD_S = 0.002


class Spread:
    """Mean and mean deviation of a series, recent values counting more.

    As TCP estimates round trips (Jacobson: Congestion avoidance and control, 1988).
    """

    def __init__(self, value: float) -> None:
        self._mean = value
        self._deviation = value / 2

    def note(self, value: float) -> None:
        error = value - self._mean
        self._mean += error / 8
        self._deviation += (abs(error) - self._deviation) / 4

    @property
    def low(self) -> float:
        """What hardly any value is below."""
        return self._mean - _DEVIATIONS * self._deviation

    @property
    def high(self) -> float:
        """What hardly any value is above."""
        return self._mean + _DEVIATIONS * self._deviation


class LaunchTimer:
    """Tells how long launching may wait while a step computes.

    Of the step under way it knows when it began and, from earlier ones of its size, when it ends at the earliest;
    of a launch, how long after the moment chosen for it the step was enqueued at the latest. Pure arithmetic: whoever
    asks says what time it is, in seconds on one clock.
    """

    def __init__(self) -> None:
        self._seconds: dict[StepSize, Spread] = {}
        self._lead = Spread(_FIRST_LEAD_S)
        self._launched: deque[tuple[StepSize, float]] = deque()  # not done; and since when
        self._free_s = 0.0  # when the device had done all the others
        self._due_s: float | None = None  # the moment chosen for the next launch

    def launched(self, size: StepSize, now_s: float) -> None:
        """A step was enqueued."""
        if self._due_s is not None:
            self._lead.note(now_s - self._due_s)
            self._due_s = None
        self._launched.append((size, now_s))

    def done(self, seconds: float | None, now_s: float) -> None:
        """The oldest step was seen to be done.

        Args:
            seconds: that it took on the device; None if those of its size take another time.
        """
        size, launched_s = self._launched.popleft()
        if seconds is None:
            self._free_s = now_s
            return
        self._free_s = min(now_s, max(self._free_s, launched_s) + seconds)
        if size in self._seconds:
            self._seconds[size].note(seconds)
        else:
            self._seconds[size] = Spread(seconds)

    def spare_s(self, now_s: float) -> float:
        """Seconds for which the next launch may wait; 0 unless a step of a known size is under way, and it alone."""
        self._due_s = now_s
        if len(self._launched) == 1:
            size, launched_s = self._launched[0]
            known = self._seconds.get(size)
            if known is not None:
                end_s = max(self._free_s, launched_s) + known.low
                self._due_s = max(now_s, end_s - self._lead.high)
        return self._due_s - now_s
