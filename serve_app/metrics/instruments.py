"""What happens in a replica, as counts and histograms."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from actors.observer import (
    Course,
    Ending,
    GrantOutcome,
    GrowthOutcome,
    KvChange,
    Observer,
    SleepCause,
    WakeCause,
    WakePhase,
    WakeResult,
)
from actors.protocol import MemoryChange, ReplicaState, WakeReport
from actors.replica.lifecycle import Lifecycle
from serve_app.metrics import catalogue as metrics
from serve_app.metrics.tally import Key, Snapshot, Tally

if TYPE_CHECKING:
    from actors.replica.runtime import ModelRuntime

_HITS = ("image",)
_MISSES = ("missing_key", "no_holder")


class Instruments(Observer):
    """Counts for one replica."""

    def __init__(self, tally: Tally, now: Callable[[], float]) -> None:
        """Begin at nothing.

        Args:
            now: seconds; for what a sleep saves over time.
        """
        self._tally = tally
        self._now = now
        self._numbers = itertools.count()
        self._saved_bytes = 0
        self._saved_since_s = now()

    # --- an Observer ---

    def waited(self, seconds: float) -> None:
        self._tally.observe(metrics.WAKE_WAIT_SECONDS, seconds)

    def woke(self, cause: WakeCause, result: WakeResult, seconds: float) -> None:
        self._tally.add(metrics.WAKES, cause, result)
        if result is WakeResult.OK:
            self._tally.observe(metrics.WAKE_SECONDS, seconds)

    def slept(self, cause: SleepCause, level: int, seconds: float, change: MemoryChange) -> None:
        self._tally.add(metrics.SLEEPS, cause, "deep" if change.deep else str(level))
        self._tally.observe(metrics.SLEEP_SECONDS, seconds)
        # The resident set of a CPU's process, or a card that others use, may have grown meanwhile.
        self._tally.add(metrics.RELEASED_BYTES, by=max(0, change.released_bytes or 0))

    def granted(self, outcome: GrantOutcome, seconds: float) -> None:
        self._tally.add(metrics.GRANTS, outcome)
        self._tally.observe(metrics.GRANT_SECONDS, seconds)

    def drain_taken_back(self) -> None:
        self._tally.add(metrics.DRAINS_TAKEN_BACK)

    def growth_asked(self, outcome: GrowthOutcome) -> None:
        self._tally.add(metrics.GROWTH, outcome)

    def kv_changed(self, change: KvChange, parts: int, size: int) -> None:
        self._tally.add(metrics.KV_PARTS, change, by=parts)
        self._tally.add(metrics.KV_PARTS_BYTES, change, by=size)

    def wake_phase(self, phase: WakePhase, seconds: float) -> None:
        self._tally.observe(metrics.WAKE_PHASE_SECONDS, seconds, phase)

    def restored(self, report: WakeReport) -> None:
        self.wake_phase(WakePhase.COPY, report.link_s)
        self.wake_phase(WakePhase.CHECK, report.check_s)
        self._tally.add(metrics.WAKE_CHECKS, "intact" if report.intact else "corrupted")
        self._tally.add(metrics.RESTORED_BYTES, by=report.copied_bytes)
        if report.copied_bytes and report.link_s > 0:
            self._tally.observe(metrics.RESTORE_RATE, report.copied_bytes / report.link_s)

    def first_token(self, seconds: float) -> None:
        self._tally.observe(metrics.TTFT, seconds)

    def stepped(self, prompt_tokens: int, tokens: int, gaps: Sequence[tuple[float, int]]) -> None:
        if prompt_tokens:
            self._tally.add(metrics.PROMPT_TOKENS, by=prompt_tokens)
        self._tally.add(metrics.GENERATION_TOKENS, by=tokens)
        for seconds, times in gaps:
            self._tally.observe(metrics.INTER_TOKEN, seconds, times=times)

    def looked_up(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._tally.add(metrics.PREFIX_QUERIES, by=prompt_tokens)
        self._tally.add(metrics.PREFIX_HITS, by=cached_tokens)

    def ended(self, course: Course, ending: Ending, now_s: float) -> None:
        observe = self._tally.observe
        self._tally.add(metrics.REQUESTS, ending)
        observe(metrics.LATENCY, now_s - course.arrived_s)
        observe(metrics.REQUEST_PROMPT_TOKENS, course.prompt_tokens)
        observe(metrics.REQUEST_GENERATION_TOKENS, course.tokens)
        if course.first_s is None or course.started_s is None:
            return
        observe(metrics.QUEUE_TIME, max(0.0, course.started_s - course.submitted_s))
        observe(metrics.PREFILL_TIME, course.first_s - course.started_s)
        observe(metrics.DECODE_TIME, course.last_s - course.first_s)
        observe(metrics.INFERENCE_TIME, course.last_s - course.started_s)
        if course.tokens > 1:
            per_token_s = (course.last_s - course.first_s) / (course.tokens - 1)
            observe(metrics.TIME_PER_TOKEN, per_token_s)

    def refused(self, error: Exception) -> None:
        self._tally.add(metrics.REFUSED, type(error).__name__)

    def restarted(self) -> None:
        self._tally.add(metrics.WORKER_RESTARTS)

    def obtained(self, source: str) -> None:
        result = "hit" if source in _HITS else "miss" if source in _MISSES else "fallback"
        self._tally.add(metrics.FASTLOAD, result)
        self._tally.add(metrics.IMAGES_OBTAINED, source)

    # --- what nobody observes ---

    def saves(self, size: int) -> None:
        """From now on a sleep saves so many bytes of device memory; call it at every change."""
        now_s = self._now()
        self._tally.add(
            metrics.DEVICE_SAVED_TIME, by=self._saved_bytes * (now_s - self._saved_since_s)
        )
        self._saved_bytes, self._saved_since_s = size, now_s

    @property
    def kv_given_back_bytes(self) -> int:
        return int(self._tally.count(metrics.KV_PARTS_BYTES, KvChange.GIVEN_BACK))

    def snapshot(
        self, replica_id: str, state: ReplicaState, gauges: Mapping[Key, float]
    ) -> Snapshot:
        return Snapshot(replica_id, next(self._numbers), state, self._tally.sums(), gauges)


def saved_bytes(lifecycle: Lifecycle, runtime: "ModelRuntime") -> int:
    """Device memory that this replica does without now."""
    return runtime.worker.state.wake_bytes if lifecycle.state is ReplicaState.ASLEEP else 0


def gauges(lifecycle: Lifecycle, runtime: "ModelRuntime", waits_for_card: bool) -> dict[Key, float]:
    """What a replica is now, by metric and labels. Asks neither the device nor a driver."""
    worker = runtime.worker.state
    engine, mapped = worker.engine, worker.mapped_bytes
    rest = worker.device_held - mapped
    if worker.left is not None:
        rest = worker.left.total - worker.left.kept_layers
    asleep = lifecycle.state in (ReplicaState.ASLEEP, ReplicaState.WAKING)
    deep = asleep and lifecycle.level == 2
    states = {"awake": not asleep, "weights_offloaded": asleep and not deep, "discard_all": deep}
    return {
        (metrics.RUNNING.name, ()): engine.running,
        (metrics.WAITING.name, ()): engine.waiting + lifecycle.waiting_for_wake,
        (metrics.KV_USAGE.name, ()): engine.kv_used_blocks / max(1, engine.kv_total_blocks),
        **{(metrics.SLEEP_STATE.name, (name,)): float(is_so) for name, is_so in states.items()},
        (metrics.DEVICE_MEMORY.name, ("mapped",)): mapped,
        (metrics.DEVICE_MEMORY.name, ("rest",)): max(0, rest),
        (metrics.CARD_WAITING.name, ()): float(waits_for_card),
        (metrics.DEVICE_SAVED.name, ()): saved_bytes(lifecycle, runtime),
        (metrics.IMAGE_BYTES.name, ("host",)): worker.image_bytes,
        (metrics.IMAGE_BYTES.name, ("device",)): runtime.worker.facts.weights_bytes
        if worker.image_origin
        else 0,
    }
