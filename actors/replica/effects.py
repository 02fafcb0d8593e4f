"""What the lifecycle of a replica has done: the Protocol between it and memory, worker and requests."""

from typing import Protocol

from actors.errors import ServingError, Unavailable
from actors.observer import WakeCause
from actors.protocol import MemoryChange


class Untouched(Exception):
    """A wake was refused before the worker was asked: it sleeps as deep as before."""

    def __init__(self, refusal: Unavailable) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Effects(Protocol):
    """What a transition does. The lifecycle never runs two of them at once."""

    async def wake(self, cause: WakeCause) -> MemoryChange:
        """Bring the weights back; on a card that others use, it may wait for room.

        Raises:
            Unavailable: not possible now; the replica stays asleep, perhaps less deep.
            Untouched: the same, and nothing has changed.
        """

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        """Give memory back. Requests that are still running are frozen and go on after the wake.

        Args:
            deep: also what the worker's process has of the device besides, by the driver or by the end of that process.
        """

    async def restart(self) -> None:
        """Have another worker in the place of the one that failed; it starts asleep.

        Raises:
            ReplicaFailed: none lives.
        """

    def give_up_waiting(self, reason: str) -> bool:
        """Let a wake that still waits for room raise Unavailable; of no effect on one that has its room.

        Returns:
            Whether wakes wait for room at all: one that is only about to begin need not, then.
        """

    def requests_wait(self, wait: bool) -> None:
        """The first request waits for a wake now, or none any more."""

    def has_requests(self, busy: bool) -> None:
        """The first request is in flight now, or none any more."""

    def abort_in_flight(self) -> None:
        """End every request in flight now, with finish reason "abort"."""

    def fail_in_flight(self, error: ServingError) -> None:
        """End every request in flight now, with `error`. Those that have ended are left as they are."""
