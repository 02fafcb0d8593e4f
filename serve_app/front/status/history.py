"""The changes of state that somebody was there to see: a bounded list."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from actors.protocol import ReplicaState, ReplicaStatus


class Unknown(StrEnum):
    """In the place of a state."""

    SILENT = "silent"  # it does not answer
    GONE = "gone"  # there is no such replica any more
    UNSEEN = "unseen"  # nobody was watching


@dataclass(frozen=True, slots=True)
class Change:
    """From `at` on a replica was in `state`."""

    at: float  # seconds since the epoch, as the front saw it
    model: str
    replica: str
    state: ReplicaState | Unknown
    reason: str
    seconds: float | None = None  # what the sleep or wake that ended here took, by the replica
    missed: int = 0  # sleeps and wakes that began and ended between two looks


class History:
    """Compares each look at a model with the one before."""

    def __init__(self, limit: int = 300) -> None:
        self._limit = limit
        self._entries: dict[str, dict[str, Any]] = {}
        self._next = 0
        self._last: dict[tuple[str, str], ReplicaStatus] = {}
        self._silent: set[str] = set()

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Number -> fields of a `Change`, oldest first. Numbers only grow. Not to be changed."""
        return self._entries

    def saw(self, model: str, statuses: Sequence[ReplicaStatus], at: float) -> None:
        """All replicas of `model` answered."""
        was_silent = model in self._silent
        self._silent.discard(model)
        for status in statuses:
            change = _change(self._last.get((model, status.replica_id)), status, was_silent, at)
            self._last[model, status.replica_id] = status
            if change is not None:
                self._add(change)
        present = {status.replica_id for status in statuses}
        for replica in self._replicas(model) - present:
            del self._last[model, replica]
            self._add(Change(at, model, replica, Unknown.GONE, "replica has stopped"))

    def silent(self, model: str, why: str, at: float) -> None:
        """The replicas of `model` did not answer."""
        if model in self._silent:
            return
        self._silent.add(model)
        for replica in sorted(self._replicas(model)):
            self._add(Change(at, model, replica, Unknown.SILENT, why))

    def unseen(self, at: float) -> None:
        """Nobody looked from `at` until now."""
        for model, replica in self._last:
            self._add(Change(at, model, replica, Unknown.UNSEEN, "nobody was watching"))
        self._last.clear()
        self._silent.clear()

    def _replicas(self, model: str) -> set[str]:
        return {replica for known, replica in self._last if known == model}

    def _add(self, change: Change) -> None:
        kept = list(self._entries.items())[-(self._limit - 1) :]
        self._entries = {**dict(kept), str(self._next): asdict(change)}
        self._next += 1


def _change(
    before: ReplicaStatus | None, now: ReplicaStatus, was_silent: bool, at: float
) -> Change | None:
    if before is None:
        return Change(at, now.model_id, now.replica_id, now.state, now.reason)
    slept, woke = now.sleeps - before.sleeps, now.wakes - before.wakes
    if now.state is before.state and not slept and not woke and not was_silent:
        return None
    seconds = None
    if now.state is ReplicaState.AWAKE and woke:
        seconds = now.last_wake_s
    elif now.state is ReplicaState.ASLEEP and slept:
        seconds = now.last_sleep_s
    missed = slept + woke - (seconds is not None)
    return Change(at, now.model_id, now.replica_id, now.state, now.reason, seconds, missed)
