"""What a replica says to the keeper of its worker's card, and does for it. Lives on one event loop."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import msgspec

from actors.card.config import SharingConfig, Terms
from actors.card.keeper_line import Connect, KeeperLine, Told
from actors.card.messages import (
    NO_KV,
    Account,
    Changed,
    GiveBack,
    Granted,
    Join,
    KvNow,
    MakeRoom,
    Refused,
    Sight,
    Stay,
    ToTenant,
    Waits,
    Want,
)
from actors.errors import NeverFits, NoRoom, Unavailable
from actors.observer import GrantOutcome, GrowthOutcome, Observer
from actors.protocol import CardRoom, CardStatus, SleepMode
from actors.worker.connection import Connection
from actors.worker.watchdog import ROOM_LIMIT_S

logger = logging.getLogger(__name__)

_GROW_LIMIT_S = 1.0  # a keeper says at once
_FIND_LIMIT_S = 30.0  # a process that begins; without a keeper the driver decides

MakesRoom: TypeAlias = Callable[[SleepMode | None, str, str, bool, asyncio.Event], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CardOfWorker:
    """Where a worker computes; bytes."""

    id: str
    total: int
    budget: int  # for all tenants


class CardClient:
    """Speaks for one replica with the keeper of its card, for as long as the replica lives.

    Without a keeper everything is granted: what does not fit is the driver's to refuse. The next one is told
    everything once more.

    Attributes:
        make_room: called with an order, its reason, the model that wants the room and an event that is set if the
            order is taken back; returns when the replica sleeps, or cannot.
        give_back: called with bytes of KV cache that a neighbour waits for; returns when they went, as far as
            nobody uses them.
        sight: how the card was a moment ago; None: no keeper has said.
    """

    def __init__(
        self,
        name: str,
        model: str,
        max_awake: int | None,
        sharing: SharingConfig,
        connect: Connect,
        observer: Observer,
        now: Callable[[], float] = time.monotonic,
        gpus: float = 0.0,
    ) -> None:
        """Make one that is on no card yet; `place` comes next.

        Args:
            name: the replica's, unique.
            max_awake: models on one card.
            gpus: that Ray has set aside for the worker.
        """
        self.sight: Sight | None = None
        self.make_room: MakesRoom = _nobody
        self.give_back: Callable[[int], Awaitable[None]] = _nothing
        self._name = name
        self._model = model
        self._max_awake = max_awake
        self._gpus = gpus
        self._sharing = sharing
        self._observer = observer
        self._now = now
        self._card: CardOfWorker | None = None
        self._line = KeeperLine(name, connect, self._join, self._told, self._lost)
        self._account = Account()
        self._device_free: int | None = None  # when it settled since the last order
        self._awake_since_s = self._quiet_since_s = now()
        self._acquiring = 0  # asks that may have to wait
        self._orders: set[asyncio.Task[None]] = set()
        self._taken_back: dict[int, asyncio.Event] = {}  # by the number of an order to make room

    # --- memory ---

    async def place(self, card: CardOfWorker, process_id: int) -> None:
        """Say where the next worker is. Returns once there is a keeper, or none is found for a while."""
        self._card = card
        self._account = msgspec.structs.replace(self._account, process_id=process_id)
        if self._line.has_begun:
            self._tell()
        else:
            await self._line.find(_FIND_LIMIT_S)

    async def build(self, size: int) -> None:
        """Return when a worker may map so much, to make itself ready.

        Raises:
            NeverFits, NoRoom: it may not.
        """
        if self._account.awake and self._account.moving:
            return  # it starts for a wake, which was granted and takes no less
        await self._acquire(size, waits=True, limit_s=ROOM_LIMIT_S)

    async def wake(self, size: int, waits: bool) -> bool:
        """Return when a wake may map so much: whether a keeper said so, or there was none.

        Args:
            waits: for room. Otherwise there has to be some.

        Raises:
            NeverFits, NoRoom: it may not. `retry_after_s` is from the keeper's queue.
            Unavailable: withdrawn.
        """
        return await self._acquire(size, waits, self._sharing.max_wait_s)

    def room(self, size: int) -> tuple[CardRoom, int]:
        """What a wake of that size would find, and behind how many others it would wait.

        As far as the keeper has said, which decides when it is asked.
        """
        if self._account.awake or self.sight is None:
            return CardRoom.FREE, 0
        if self._line.is_asking or self.sight.waiting:
            return CardRoom.QUEUE, self.sight.waiting
        return (CardRoom.FREE if size <= self.sight.free else CardRoom.EVICT), 0

    @property
    def card_id(self) -> str:
        """Of the card that the worker is on; "" before there was one."""
        return "" if self._card is None else self._card.id

    @property
    def woken_with(self) -> int:
        """Bytes that the wake took, of who is awake."""
        account = self._account
        return max(0, account.held - account.kept - account.kv.grown) if account.awake else 0

    async def until_there_is_a_keeper(self) -> bool:
        """Wait for as long as for room; whether there is one."""
        return await self._line.until_connected(self._sharing.max_wait_s)

    async def grow(self, size: int) -> bool:
        """Whether an awake worker may map so much more KV cache, now; `resized` comes next.

        Not without a keeper: nobody has to have it.
        """
        if self._line.connection is None:
            return False
        number = self._line.next_number()
        try:
            async with asyncio.timeout(_GROW_LIMIT_S):
                answer = await self._ask(Want(number, size, False, _GROW_LIMIT_S, grows=True))
        except TimeoutError:
            logger.warning("%s: the keeper of its card does not answer", self._name)
            answer = None
        except Unavailable:  # withdrawn
            answer = None
        granted = isinstance(answer, Granted)
        if granted:
            self._change(held=self._account.held + size, read_ask=number)
        self._observer.growth_asked(GrowthOutcome.GRANTED if granted else GrowthOutcome.REFUSED)
        return granted

    def resized(
        self, held: int, kv: KvNow, device_free: int | None = None, short: bool = False
    ) -> None:
        """While it is awake: what it has now, after a part came or went, or was left by those who had it."""
        account = self._account
        if (held, kv) != (account.held, account.kv) or short:
            self._change(held=held, kv=kv, device_free=device_free, short=short)

    def withdraw(self, reason: str) -> None:
        """Nobody wants any more what was asked for; who waits for it gets Unavailable."""
        self._line.withdraw(reason)

    def settled(
        self,
        held: int,
        residue: int = 0,
        copies: int = 1,
        awake: bool = False,
        reached: bool = True,
        device_free: int | None = None,
        short: bool = False,
        kv: KvNow = NO_KV,
        swap_s: float = 0.0,
    ) -> None:
        """It is awake, or asleep; see Account."""
        if awake != self._account.awake or self._account.moving:
            self._awake_since_s = self._now()
        kept = self._account.kept if awake else held
        self._device_free = device_free
        self._change(
            held=held,
            kept=kept,
            residue=residue,
            copies=copies,
            awake=awake,
            moving=False,
            reached=reached,
            resumes=False,
            device_free=device_free,
            short=short,
            swap_s=swap_s,
            kv=kv,
        )

    def moves(self) -> None:
        """It is on its way to sleep or to wake."""
        self._change(moving=True)

    def resumes(self, resumes: bool) -> None:
        """Whether what it is about to ask to wake for, or asks for now, has had its first token."""
        if resumes != self._account.resumes:
            self._change(resumes=resumes)

    def reached(self) -> None:
        """Each request that it was woken for has had a token since."""
        if not self._account.reached:
            self._change(reached=True)

    def busy(self, busy: bool, kv: KvNow | None = None) -> None:
        """Requests are in flight, or no more.

        Args:
            kv: of who is awake, now.
        """
        self._quiet_since_s = self._now()
        reached = self._account.reached or not busy
        self._change(busy=busy, reached=reached, kv=self._account.kv if kv is None else kv)

    def worker_ended(self) -> None:
        """Nothing is left of the worker's process, if there was one. What a wake was granted for the next one stays."""
        if not self._account.process_id:
            return
        self._forget_worker(moving=True)

    def worker_failed(self) -> None:
        """Nothing is left of a worker that failed. The next one, if there is any, asks for what it takes, also for a wake."""
        self._forget_worker(moving=False)

    def _forget_worker(self, moving: bool) -> None:
        self._account = Account(
            read_ask=self._account.read_ask,
            answered_order=self._account.answered_order,
            moving=moving,
            busy=self._account.busy,
        )
        self._tell()

    @property
    def is_waiting(self) -> bool:
        """Whether what it asked for to make itself ready, or to wake, is not answered."""
        return self._acquiring > 0

    async def look(self) -> CardStatus | None:
        """What the keeper says of the card; None: it says nothing."""
        return await self._line.look()

    async def close(self) -> None:
        """Leave: who is connected no more has nothing."""
        await self._line.close()
        for order in self._orders:
            order.cancel()

    async def _acquire(self, size: int, waits: bool, limit_s: float) -> bool:
        started_s = self._now()
        if self._line.connection is None:
            self._take(size, self._line.next_number())
            self._observer.granted(GrantOutcome.ALONE, 0.0)
            return False
        number = self._line.next_number()
        self._acquiring += 1
        try:
            answer = await self._ask(Want(number, size, waits, limit_s))
        finally:
            self._acquiring -= 1
        seconds = self._now() - started_s
        if isinstance(answer, Refused):
            self._observer.granted(GrantOutcome.REFUSED, seconds)
            kind = NoRoom if answer.ever else NeverFits
            raise kind(answer.reason, answer.retry_after_s)
        self._take(size, number)
        outcome = GrantOutcome.ALONE
        if answer is not None:
            outcome = GrantOutcome.AT_ONCE if answer.at_once else GrantOutcome.AFTER_ROOM
        self._observer.granted(outcome, seconds)
        return answer is not None

    async def _ask(self, wanted: Want) -> Granted | Refused | None:
        """See KeeperLine.ask."""
        try:
            return await self._line.ask(wanted)
        except BaseException:
            self._change(read_ask=wanted.number)  # it may have been granted by now
            raise

    def _take(self, size: int, number: int) -> None:
        before = self._account
        self._awake_since_s = self._now()
        self._change(
            held=before.held + size, kept=before.held, awake=True, moving=True, read_ask=number
        )

    # --- its account ---

    def _change(self, **fields: object) -> None:
        """Tell what is new. What the driver said is true of one moment only."""
        fields = {"device_free": None, "short": False} | fields
        self._account = msgspec.structs.replace(self._account, **fields)
        self._tell()

    def _tell(self) -> None:
        self._line.send(Changed(self._timed()))

    def _timed(self) -> Account:
        now_s = self._now()
        return msgspec.structs.replace(
            self._account, awake_s=now_s - self._awake_since_s, quiet_s=now_s - self._quiet_since_s
        )

    # --- what the keeper says ---

    def _lost(self) -> None:
        self.sight = None

    def _join(self) -> Join:
        assert self._card is not None
        # This keeper has given no order yet, and numbers its own behind the one that it hears of here.
        self._account = msgspec.structs.replace(
            self._account, answered_order=-1, device_free=None, short=False
        )
        return Join(
            self._name,
            self._model,
            self._card.id,
            self._card.budget,
            self._max_awake,
            self._card.total,
            Terms.of(self._sharing),
            self._timed(),
            self._gpus,
            max(self._taken_back, default=-1),
        )

    def _told(self, message: Told) -> None:
        match message:
            case Waits():
                logger.info("%s waits for room: %s", self._name, message.reason)
            case MakeRoom():
                taken_back = self._taken_back[message.number] = asyncio.Event()
                work = self.make_room(
                    message.mode, message.reason, message.for_model, message.deep, taken_back
                )
                self._begin(message.number, work, None)
            case Stay():
                order = self._taken_back.get(message.number)
                if order is not None:
                    logger.info("%s need not make room: %s", self._name, message.reason)
                    order.set()
            case GiveBack():
                logger.info("%s is to give back KV cache: %s", self._name, message.reason)
                work = self.give_back(message.size)
                self._begin(message.number, work, self._line.connection)
            case Sight():
                self.sight = message
            case _:
                assert_never(message)

    def _begin(
        self, number: int, work: Awaitable[None], keeper: Connection[ToTenant] | None
    ) -> None:
        """Follow an order; `keeper` alone knows of it. None: the next one does, too: it makes room."""
        # What counts is the figure that comes of this: before, others may have had more or less.
        self._device_free = None
        order = asyncio.create_task(self._obey(number, work, keeper))
        self._orders.add(order)
        order.add_done_callback(self._orders.discard)

    async def _obey(
        self, number: int, work: Awaitable[None], keeper: Connection[ToTenant] | None
    ) -> None:
        try:
            await work
        except Exception:
            logger.exception("%s: could not make room", self._name)
        if keeper is None:
            del self._taken_back[number]
        elif self._line.connection is not keeper:
            return
        self._change(answered_order=number, device_free=self._device_free)


async def _nobody(
    mode: SleepMode | None, reason: str, for_model: str, deep: bool, taken_back: asyncio.Event
) -> None:
    """Makes no room."""


async def _nothing(size: int) -> None:
    """Is given back."""
