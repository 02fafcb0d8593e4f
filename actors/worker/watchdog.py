"""Notices work that never ends. No torch: a hung card is what it is for."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from pydantic import BaseModel, ConfigDict, Field

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
STOOD_STILL_S = 1.0  # so late is who did not run, as in a container that was paused

# How long a worker that starts waits for room on its card.
ROOM_LIMIT_S = 600.0


class WatchdogConfig(BaseModel):
    """How long the device may take before the replica's worker counts as failed and is replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds for one step of the engine, for a pause to come between two, or for a "
        "piece of a prompt whose log-probabilities are asked for.",
    )
    copy_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds for a wake's copies to arrive and be checked."
    )
    memory_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds for memory to be mapped, or unmapped or unpinned by a sleep.",
    )
    silence_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that the worker's process may say nothing: to the first question, once Ray has chosen "
        "it, and from its first word on; it gives a sign of life every second, while it starts as well.",
    )
    other_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds for anything else: the worker's process to import what it needs, the "
        "engine to be made ready, layers to be compiled, graphs to be captured. An image may take half an "
        "hour.",
    )


class Watch:
    """A limit for one kind of work, entered by the one thread that does it.

    Entering and leaving cost an assignment or two, so that a step of the engine can afford them.
    """

    def __init__(self, what: str, limit_s: float, inside: "Watch | None" = None) -> None:
        """Make one that nobody has entered.

        Args:
            inside: what this work is a part of, on the same thread. That watch stands still meanwhile and
                begins anew afterwards: each part has its own limit, and what lies between them has one.
        """
        self.what = what
        self.limit_s = limit_s
        self._inside = inside
        self._inside_was_entered = False
        self._since_s: float | None = None

    def __enter__(self) -> None:
        self._since_s = time.monotonic()
        if self._inside is not None:
            self._inside_was_entered = self._inside._since_s is not None
            self._inside._since_s = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._inside is not None and self._inside_was_entered:
            self._inside._since_s = time.monotonic()
        self._since_s = None

    def overdue_s(self, now_s: float, running_since_s: float = 0.0) -> float | None:
        """How long the work has taken, if that is longer than it may. Any thread may ask.

        Args:
            now_s: by the monotonic clock.
            running_since_s: the process stood still before, and so did the work.
        """
        since_s = self._since_s
        if since_s is None:
            return None
        taken_s = now_s - max(since_s, running_since_s)
        return taken_s if taken_s > self.limit_s else None


class Watchdog:
    """Looks at its watches twice a second, on a thread of its own, and tells of the first that is overdue."""

    def __init__(self, config: WatchdogConfig, bark: Callable[[str], None]) -> None:
        """Start to look.

        Args:
            config: the limits.
            bark: told what hung and for how long, once.
        """
        step_s, memory_s, other_s = (
            config.step_timeout_s,
            config.memory_timeout_s,
            config.other_timeout_s,
        )
        self.step = Watch("a step of the engine", step_s)
        self.open = Watch("opening the device", other_s)
        self.compile = Watch("compiling the layers", other_s)
        # All that the control thread does, whether or not anybody thought of a limit for it.
        self.control = control = Watch("work on the control thread", other_s)
        self.pause = Watch("pausing the engine", step_s, control)
        self.prompt = Watch("a piece of a prompt's log-probabilities", step_s, control)
        self.copy = Watch("copying the weights", config.copy_timeout_s, control)
        self.map = Watch("mapping memory", memory_s, control)
        self.unmap = Watch("unmapping memory", memory_s, control)
        self.unpin = Watch("unpinning the image", memory_s, control)
        self.collect = Watch("taking back what the device has cleared", memory_s, control)
        self.capture = Watch("capturing the engine's graphs", other_s, control)
        # Who grants it has a limit of its own, and says what it waits for.
        self.room = Watch("waiting for room on its card", ROOM_LIMIT_S + memory_s, control)
        self._watches = [each for each in vars(self).values() if isinstance(each, Watch)]
        self._bark = bark
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _look(self) -> None:
        running_since_s = looked_s = time.monotonic()
        while not self._closed.wait(_LOOK_EVERY_S):
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_EVERY_S + STOOD_STILL_S:
                running_since_s = now_s
            looked_s = now_s
            for watch in self._watches:
                taken_s = watch.overdue_s(now_s, running_since_s)
                if taken_s is not None:
                    self._bark(
                        f"{watch.what} has not ended after {taken_s:.1f} s "
                        f"(its limit is {watch.limit_s:g} s)"
                    )
                    return
