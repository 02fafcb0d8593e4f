"""Effects of the lifecycle on a card that models share: its keeper is asked before anything is mapped."""

from typing import Protocol

from actors.card.tenant import CardClient
from actors.errors import DeviceMemoryShort, ServingError, Unavailable
from actors.observer import WakeCause
from actors.protocol import CardStatus, MemoryChange
from actors.replica.effects import Effects
from actors.replica.runtime import ModelRuntime


class Workers(Effects, Protocol):
    """What computes for a replica."""

    @property
    def runtime(self) -> ModelRuntime:
        """Of the worker that there is, or was until a moment ago."""

    @property
    def restarts(self) -> int:
        """How many workers have taken the place of one that failed."""


class OnCard:
    """Workers that map by grant, and tell the keeper what they have unmapped."""

    def __init__(self, workers: Workers, card: CardClient, is_pinned: bool) -> None:
        """Around others.

        Args:
            is_pinned: its first wake waits for room.
        """
        self._workers = workers
        self._card = card
        self._is_pinned = is_pinned

    @property
    def runtime(self) -> ModelRuntime:
        return self._workers.runtime

    @property
    def restarts(self) -> int:
        return self._workers.restarts

    async def wake(self, cause: WakeCause) -> MemoryChange:
        """See Effects. At the start it waits for no room: nobody needs the model yet.

        What a worker had that failed meanwhile is told when its process has ended: `CardClient.worker_ended`.

        Raises:
            NoRoom, NeverFits: it may not map.
        """
        waits = self._is_pinned or cause is not WakeCause.START
        asked_twice = False
        while True:
            by_grant = await self._card.wake(self.runtime.worker.state.wake_bytes, waits)
            try:
                change = await self._workers.wake(cause)
            except DeviceMemoryShort:
                # By the driver's word, because there was no keeper; or others than its tenants have the rest.
                device = await self.runtime.worker.read_device("")
                self._tell_asleep(device.free, short=by_grant)
                if asked_twice or not (by_grant or await self._card.until_there_is_a_keeper()):
                    raise
                asked_twice = True
            except Unavailable:
                self._tell_asleep(None)
                raise
            else:
                break
        state = self.runtime.worker.state
        self._card.settled(
            # The rest of its KV cache is mapped behind the wake.
            held=state.mapped_bytes + state.wake_bytes,
            residue=state.residue,
            copies=self.runtime.worker.facts.weights_bytes,
            awake=True,
            reached=cause is not WakeCause.REQUEST,
        )
        return change

    async def sleep(self, level: int) -> MemoryChange:
        """See Effects."""
        self._card.moves()
        change = await self._workers.sleep(level)
        self._tell_asleep(self.runtime.worker.state.device_free)
        return change

    async def restart(self) -> None:
        """See Effects."""
        self._card.moves()
        await self._workers.restart()
        self.tell_ready()

    def abort_in_flight(self) -> None:
        """See Effects."""
        self._workers.abort_in_flight()

    def fail_in_flight(self, error: ServingError) -> None:
        """See Effects."""
        self._workers.fail_in_flight(error)

    def give_up_waiting(self, reason: str) -> None:
        """See Effects."""
        self._card.withdraw(reason)

    def has_requests(self, busy: bool) -> None:
        """See Effects."""
        self._card.busy(busy)

    async def look(self) -> CardStatus | None:
        return await self._card.look()

    def tell_ready(self) -> None:
        """A worker is ready, asleep."""
        self._tell_asleep(self.runtime.worker.state.device_free)

    def _tell_asleep(self, device_free: int | None, short: bool = False) -> None:
        state = self.runtime.worker.state
        self._card.settled(
            held=state.mapped_bytes,
            residue=state.residue,
            copies=self.runtime.worker.facts.weights_bytes,
            device_free=device_free,
            short=short,
        )
