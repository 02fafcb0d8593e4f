"""Notices work that never ends. No torch: a hung card is what it is for."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from pydantic import BaseModel, ConfigDict, Field

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


class WatchdogConfig(BaseModel):
    """How long the device may take before its replica counts as failed and is replaced."""

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
        default=60.0, gt=0, description="Seconds for memory to be mapped, or unmapped by a sleep."
    )


class Watch:
    """A limit for one kind of work, entered by the one thread that does it.

    Entering and leaving cost an assignment each, so that a step of the engine can afford them.
    """

    def __init__(self, what: str, limit_s: float) -> None:
        self.what = what
        self.limit_s = limit_s
        self._since_s: float | None = None

    def __enter__(self) -> None:
        self._since_s = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._since_s = None

    def overdue_s(self) -> float | None:
        """How long the work has taken, if that is longer than it may. Any thread may ask."""
        since_s = self._since_s
        if since_s is None:
            return None
        taken_s = time.monotonic() - since_s
        return taken_s if taken_s > self.limit_s else None


class Watchdog:
    """Looks at its watches twice a second, on a thread of its own, and tells of the first that is overdue."""

    def __init__(self, config: WatchdogConfig, bark: Callable[[str], None]) -> None:
        """Start to look.

        Args:
            config: the limits.
            bark: told what hung and for how long, once.
        """
        self.step = Watch("a step of the engine", config.step_timeout_s)
        self.pause = Watch("pausing the engine", config.step_timeout_s)
        self.prompt = Watch("a piece of a prompt's log-probabilities", config.step_timeout_s)
        self.copy = Watch("copying the weights", config.copy_timeout_s)
        self.map = Watch("mapping memory", config.memory_timeout_s)
        self.unmap = Watch("unmapping memory", config.memory_timeout_s)
        self._watches = (self.step, self.pause, self.prompt, self.copy, self.map, self.unmap)
        self._bark = bark
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            for watch in self._watches:
                taken_s = watch.overdue_s()
                if taken_s is not None:
                    self._bark(
                        f"{watch.what} has not ended after {taken_s:.1f} s "
                        f"(its limit is {watch.limit_s:g} s)"
                    )
                    return
