"""Events that the lifecycle and the runtime report to metrics. No torch, no Ray, no metric names.

Times are those of `time.perf_counter` where nothing else is said.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING

from actors.protocol import MemoryChange, WakeReport

if TYPE_CHECKING:
    from actors.engine.outputs import EngineOutput

logger = logging.getLogger(__name__)


class WakeCause(StrEnum):
    REQUEST = "request"
    COMMAND = "command"  # an operator, or the end of a hold
    START = "start"  # of a worker
    SCHEDULE = "schedule"  # the hours began in which the model is to be awake


class WakeResult(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # not possible now, as when the device is full; the replica stays asleep
    FAILED = "failed"  # and the replica with it


class SleepCause(StrEnum):
    IDLE = "idle"
    COMMAND = "command"
    ROOM = "room"  # idle, and another model wanted its card's memory
    PREEMPTED = "preempted"  # the same, while it was busy


class GrantOutcome(StrEnum):
    """What came of asking the keeper of a card for memory."""

    AT_ONCE = "at_once"
    AFTER_ROOM = "after_room"  # others slept for it, or ended
    REFUSED = "refused"
    ALONE = "alone"  # there was no keeper; the driver decides


class GrowthOutcome(StrEnum):
    """What came of asking the keeper of a card for more KV cache."""

    GRANTED = "granted"
    REFUSED = "refused"


class KvChange(StrEnum):
    """What became of a part of a KV cache."""

    MAPPED = "mapped"
    GIVEN_BACK = "given_back"


class WakePhase(StrEnum):
    """Parts of a wake. The last two run beside the first requests."""

    RESUME = "resume"  # having back what a deep sleep had given back, or another worker
    IMAGE = "image"  # getting the image again, after a sleep at level 2
    MAP = "map"  # device memory mapped and the copies begun; the engine runs from here on
    COPY = "copy"  # the bytes over the link, by the device's clock
    CHECK = "check"  # checksums of what arrived


class Ending(StrEnum):
    """Why a sequence ended; vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # by a sleep in mode "abort", or its client left
    ERROR = "error"


@dataclass(slots=True)
class Course:
    """One sequence's way through the engine, as far as it has come."""

    prompt_tokens: int
    arrived_s: float  # at the replica
    submitted_s: float  # to the engine; between the two it may have waited for a wake
    started_s: float | None = None  # the engine took it from its queue; None: no token so far
    first_s: float | None = None  # token
    last_s: float = 0.0
    tokens: int = 0
    sequence_id: str = ""  # the request's id, a dash and a number


class Observer:
    """Is told what happens, and does nothing. Whoever counts overrides what it wants to know.

    Called on the event loop, `restored` on the control thread as well. No method may raise or block.
    """

    def waited(self, seconds: float) -> None:
        """A request found the replica not awake and waited, with success or without."""

    def woke(self, cause: WakeCause, result: WakeResult, seconds: float) -> None:
        """A wake is over; with `OK` the replica is awake."""

    def slept(self, cause: SleepCause, level: int, seconds: float, change: MemoryChange) -> None:
        """A sleep is over, after the drain."""

    def drain_taken_back(self) -> None:
        """A drain to make room has ended: nobody wanted the room any more, and the replica is awake."""

    def restarted(self) -> None:
        """Another worker has taken the place of one that failed."""

    def granted(self, outcome: GrantOutcome, seconds: float) -> None:
        """The keeper of the card was asked for memory, and answered after so long."""

    def wake_phase(self, phase: WakePhase, seconds: float) -> None:
        """One part of a wake is over: IMAGE or MAP. The others come with `restored`."""

    def restored(self, report: WakeReport) -> None:
        """The bytes of a wake have arrived and were checked."""

    def first_token(self, seconds: float) -> None:
        """So long after its request had arrived, a sequence got its first token."""

    def stepped(self, prompt_tokens: int, tokens: int, gaps: Sequence[tuple[float, int]]) -> None:
        """The engine made a step.

        Args:
            prompt_tokens: of sequences that got their first token.
            tokens: that all sequences got together.
            gaps: seconds since its token before, and how many sequences had to wait so long.
        """

    def looked_up(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Prompts of sequences that got their first token were looked up in the KV cache.

        Args:
            prompt_tokens: all of theirs.
            cached_tokens: how many of these were found there, and not computed.
        """

    def ended(self, course: Course, ending: Ending, now_s: float) -> None:
        """A sequence is over."""

    def refused(self, error: Exception) -> None:
        """A request got this instead of an answer, or of the rest of one."""

    def obtained(self, source: str) -> None:
        """The replica has an image; `source` is one of `actors.holder.sources.ImageSource`."""

    def growth_asked(self, outcome: GrowthOutcome) -> None:
        """The keeper of the card was asked for more KV cache of a model that is awake."""

    def kv_changed(self, change: KvChange, parts: int, size: int) -> None:
        """Parts of the KV cache of a model that is awake came, or went back: so many bytes."""


class GuardedObserver(Observer):
    """Hands on what it is told, and keeps from who tells what went wrong in the counting.

    A wake must not fail because a histogram did. The first error of each kind of event is logged.
    """

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self._failed: set[str] = set()

    def _tell(self, method: Callable[..., None], *args: object) -> None:
        try:
            method(*args)
        except Exception:
            name = method.__name__
            if name not in self._failed:
                logger.exception("telemetry: %s failed; later failures of it are not logged", name)
            self._failed.add(name)


def _handed_on(event: Callable[..., None]) -> Callable[..., None]:
    @wraps(event)
    def hand_on(self: GuardedObserver, *args: object) -> None:
        self._tell(getattr(self._inner, event.__name__), *args)

    return hand_on


# All that there is to tell, whatever comes to it.
for _event in (each for name, each in vars(Observer).items() if not name.startswith("_")):
    setattr(GuardedObserver, _event.__name__, _handed_on(_event))


class EngineMeter:
    """Follows the sequences of one engine. Lives on the event loop: a few operations per sequence and step."""

    def __init__(self, observer: Observer, now: Callable[[], float] = time.perf_counter) -> None:
        self._observer = observer
        self._now = now
        self._courses: dict[str, Course] = {}

    def submitted(self, sequence_id: str, prompt_tokens: int, arrived_s: float) -> None:
        self._courses[sequence_id] = Course(
            prompt_tokens, arrived_s, self._now(), sequence_id=sequence_id
        )

    def advanced(self, outputs: "Sequence[EngineOutput]") -> None:
        """Take one step's outputs; those of sequences that are over are left out."""
        now = self._now()
        prompt_tokens = tokens = 0
        looked_up = cached_tokens = 0  # of these prompts
        gaps: dict[float, int] = {}  # by when the token before came, which most sequences share
        for output in outputs:
            course = self._courses.get(output.sequence_id)
            if course is None or not output.token_ids:
                continue
            if course.first_s is None:
                course.first_s, course.started_s = now, output.started_s
                prompt_tokens += course.prompt_tokens
                if output.cached_tokens is not None:
                    looked_up += course.prompt_tokens
                    cached_tokens += output.cached_tokens
                self._observer.first_token(now - course.arrived_s)
            else:
                gaps[course.last_s] = gaps.get(course.last_s, 0) + 1
            course.last_s = now
            course.tokens += len(output.token_ids)
            tokens += len(output.token_ids)
        if tokens:
            self._observer.stepped(
                prompt_tokens, tokens, [(now - last, count) for last, count in gaps.items()]
            )

        if looked_up:
            self._observer.looked_up(looked_up, cached_tokens)

    def ended(self, sequence_id: str, ending: Ending) -> None:
        """Tell of a sequence's end; the first call for it counts."""
        course = self._courses.pop(sequence_id, None)
        if course is not None:
            self._observer.ended(course, ending, self._now())
