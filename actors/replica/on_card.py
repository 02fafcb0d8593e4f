"""Effects of the lifecycle on a card that models share: its keeper is asked before anything is mapped."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from actors.card.messages import KvNow
from actors.card.tenant import CardClient
from actors.errors import DeviceMemoryShort, NoRoom, ReplicaFailed, ServingError, Unavailable
from actors.observer import WakeCause
from actors.protocol import CardStatus, MemoryChange
from actors.replica.effects import Effects, Untouched
from actors.replica.runtime import ModelRuntime
from actors.replica.worker_client import WorkerClient

logger = logging.getLogger(__name__)


class Workers(Effects, Protocol):
    """What computes for a replica."""

    @property
    def runtime(self) -> ModelRuntime:
        """Of the worker that there is, or was until a moment ago."""

    @property
    def restarts(self) -> int:
        """How many workers have taken the place of one that failed."""


class OnCard:
    """Workers that map by grant, and tell the keeper what they have unmapped.

    While the model is awake its KV cache grows and gives back parts, one change at a time and none beside a sleep.
    """

    def __init__(
        self,
        workers: Workers,
        card: CardClient,
        is_pinned: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Around others.

        Args:
            is_pinned: its first wake waits for room.
        """
        self._now = now
        self._wake_s = self._sleep_s = 0.0  # that the last one took
        self._workers = workers
        self._card = card
        self._is_pinned = is_pinned
        self._is_awake = False  # and not on its way to sleep
        self._requests_wait = False  # for a wake
        self._given_up: str | None = None  # why nobody wants the wake that is under way
        self._counts_use = False  # the worker has said what it uses since there are requests
        self._resizing = asyncio.Lock()
        self._growing: set[asyncio.Task[None]] = set()

    @property
    def runtime(self) -> ModelRuntime:
        return self._workers.runtime

    @property
    def restarts(self) -> int:
        return self._workers.restarts

    async def wake(self, cause: WakeCause) -> MemoryChange:
        """See Effects. At the start it waits for no room: nobody needs the model yet.

        What a worker had that failed meanwhile is told when its process has ended: `CardClient.worker_failed`.

        Raises:
            Unavailable, Untouched: it may not map, or nobody wants it to any more.
        """
        self._given_up = None
        waits = self._is_pinned or cause is not WakeCause.START
        asked_twice = False
        while True:
            self._card.resumes(cause is WakeCause.REQUEST and self._only_goes_on)
            try:
                by_grant = await self._card.wake(self.runtime.worker.state.wake_bytes, waits)
            except Unavailable as exc:
                if isinstance(exc, NoRoom):
                    await self._tell_free()
                if asked_twice:
                    raise
                raise Untouched(exc) from None
            granted_s = self._now()
            try:
                change = await self._workers.wake(cause)
            except DeviceMemoryShort:
                # By the driver's word, because there was no keeper; or others than its tenants have the rest.
                worker = self.runtime.worker
                free = None if worker.has_retired else (await worker.read_device("")).free
                self._tell_asleep(free, short=by_grant)
                if asked_twice or not await self._may_ask_again(by_grant):
                    raise
                asked_twice = True
            except Unavailable:
                self._tell_asleep(None)
                raise
            else:
                break
        self._wake_s = self._now() - granted_s
        worker = self._listen()
        is_for_requests = cause is WakeCause.REQUEST or self.runtime.has_requests
        self._card.settled(
            held=self._held,
            residue=worker.state.residue,
            copies=worker.facts.weights_bytes,
            awake=True,
            reached=not is_for_requests,
            kv=self._kv,
            swap_s=self._swap_s,
        )
        self._is_awake = True
        if is_for_requests:
            self.runtime.when_advanced(self._card.reached)
        return change

    async def _may_ask_again(self, by_grant: bool) -> bool:
        """Whether there is a keeper, which hears now what is free.

        Raises:
            Unavailable: given up. Others would sleep for nobody.
        """
        if self._given_up is None and not by_grant:
            by_grant = await self._card.until_there_is_a_keeper()
        if self._given_up is not None:
            raise Unavailable(self._given_up)
        return by_grant

    async def give_back(self, size: int) -> None:
        """Give back so much KV cache, as far as no sequence has anything there. It may be asleep by now."""
        async with self._resizing:
            if self._is_awake:
                await self.runtime.worker.give_back_kv(size)
        self._tell_resized()

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        """See Effects."""
        await self._end_resizing()
        began_s = self._now()
        change = await self._workers.sleep(level, deep)
        self._sleep_s = self._now() - began_s
        self._tell_asleep(self.runtime.worker.state.device_free)
        return change

    async def restart(self) -> None:
        """See Effects."""
        await self._end_resizing()
        await self._workers.restart()
        self.tell_ready()

    def abort_in_flight(self) -> None:
        """See Effects."""
        self._workers.abort_in_flight()

    def fail_in_flight(self, error: ServingError) -> None:
        """See Effects."""
        self._workers.fail_in_flight(error)

    def give_up_waiting(self, reason: str) -> bool:
        """See Effects."""
        self._given_up = reason
        self._card.withdraw(reason)
        return True

    def requests_wait(self, wait: bool) -> None:
        """See Effects."""
        self._requests_wait = wait
        if wait:
            self._card.resumes(False)

    def has_requests(self, busy: bool) -> None:
        """See Effects."""
        self._counts_use = False
        # In one message: who is idle and has nothing to give back is put to sleep.
        self._card.busy(busy, self._kv if self._may_tell else None)

    @property
    def _only_goes_on(self) -> bool:
        """Whether all that a wake is for has had its first token, before a sleep froze it."""
        runtime = self.runtime
        return runtime.has_requests and not (runtime.first_tokens_are_due or self._requests_wait)

    async def look(self) -> CardStatus | None:
        return await self._card.look()

    def tell_ready(self) -> None:
        """A worker is ready, asleep."""
        self._tell_asleep(self._listen().state.device_free)

    def _listen(self) -> WorkerClient:
        """What the worker that there is now says of its KV cache is heard from now on."""
        worker = self.runtime.worker
        worker.short = self._begin_growing
        worker.changed = self._worker_changed
        return worker

    def _begin_growing(self, size: int) -> None:
        growing = asyncio.create_task(self._grow(self.runtime.worker, size))
        self._growing.add(growing)
        growing.add_done_callback(self._growing.discard)

    async def _grow(self, worker: WorkerClient, size: int) -> None:
        device_free = None
        try:
            async with self._resizing:
                granted = self._is_awake and await self._card.grow(size)
                try:
                    await worker.grow_kv(granted)
                except DeviceMemoryShort as exc:
                    logger.info("granted KV cache is not there: %s", exc)
                    device_free = (await worker.read_device("")).free
        except ReplicaFailed as exc:  # what it had is told when its process has ended
            logger.info("no KV cache for a worker that has failed: %s", exc)
        else:
            self._tell_resized(device_free)

    async def _end_resizing(self) -> None:
        """Nothing is resized from now on."""
        self._is_awake = False
        self._card.moves()
        async with self._resizing:
            pass

    def _worker_changed(self) -> None:
        self._counts_use = True
        self._tell_resized()

    @property
    def _may_tell(self) -> bool:
        """Whether the worker's figures are all there is to say: nothing is moving."""
        return self._is_awake and not self._resizing.locked()

    def _tell_resized(self, device_free: int | None = None) -> None:
        if self._may_tell:
            self._card.resized(self._held, self._kv, device_free, short=device_free is not None)

    @property
    def _swap_s(self) -> float:
        """What a sleep and a wake take of the card: beside a GPU bytes go on arriving behind a wake's end."""
        report = self.runtime.worker.state.last_wake
        return self._sleep_s + max(self._wake_s, 0.0 if report is None else report.link_s)

    @property
    def _held(self) -> int:
        """What is mapped, or comes behind a wake without another grant."""
        state = self.runtime.worker.state
        return state.mapped_bytes + state.wake_bytes

    @property
    def _kv(self) -> KvNow:
        facts, state = self.runtime.worker.facts, self.runtime.worker.state
        if not facts.kv_first_bytes:
            return KvNow(state.kv_mapped, facts.kv_bytes)
        grown = max(0, state.kv_mapped - facts.kv_first_bytes)
        # All of it until the worker says more, which is up to 0.1 s later: who is asked for too much gives less.
        spare = state.kv_spare if self._counts_use else grown
        return KvNow(state.kv_mapped, facts.kv_bytes, grown, min(spare, grown))

    async def _tell_free(self) -> None:
        """Where all sleep nobody else would: what strangers had may be free by now, for the next who asks."""
        worker = self.runtime.worker
        if not worker.has_retired:
            with suppress(ServingError):
                self._tell_asleep((await worker.read_device("")).free)

    def _tell_asleep(self, device_free: int | None, short: bool = False) -> None:
        worker = self.runtime.worker
        state = worker.state
        if worker.has_retired:
            self._card.worker_ended()
            device_free = None  # read before its process had ended
        self._card.settled(
            held=state.mapped_bytes,
            residue=state.residue,
            copies=self.runtime.worker.facts.weights_bytes,
            device_free=device_free,
            short=short,
            kv=KvNow(most=self.runtime.worker.facts.kv_bytes),
            swap_s=self._swap_s,
        )
