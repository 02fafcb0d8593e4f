"""The keeper of a node's cards: ledgers behind a socket. Lives on one event loop; no torch, no Ray.

Tenants connect, say what they are, and ask before their workers map. A tenant whose connection ends leaves only
when its worker's process has ended: until then what that has is not free.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias, assert_never

import msgspec

from actors.card.ledger import (
    CardLedger,
    Granting,
    Ordering,
    Refusing,
    Shrinking,
    Staying,
    Waiting,
)
from actors.card.messages import (
    Changed,
    GiveBack,
    Granted,
    Join,
    Look,
    MakeRoom,
    Refused,
    Seen,
    Sight,
    Stay,
    ToKeeper,
    Waits,
    Want,
    Withdraw,
)
from actors.worker.connection import Connection

logger = logging.getLogger(__name__)

# From its first tenant on a keeper grants nothing for so long: those of one before it, if there was one, have memory
# and may not have come back yet.
GATHER_S = 0.5
_DRIFT_TOLD = 256 * 2**20  # bytes
# Behind a change, until tenants are told how the card is: what routers and policies hear is older than that anyway.
_SIGHT_AFTER_S = 0.1
# Between two looks for strangers that may have left, while a wake waits. A look at a GPU takes a process of its own.
_STRANGERS_EVERY_S = 2.0

# What a card of so many bytes has free, for whoever has no process on it; None: that cannot be told.
ReadFree: TypeAlias = Callable[[str, int], Awaitable[int | None]]


async def nobody_reads(card: str, total: int) -> int | None:
    """Of a keeper whose tenants alone say what a card has free."""


class _Member:
    """One tenant's connection."""

    def __init__(self, connection: Connection[ToKeeper]) -> None:
        self.connection = connection
        self.name = ""
        self.card = ""  # "": it has not joined
        self.total = 0
        self.process_id = 0
        self.sight: Sight | None = None  # that it was told last


class CardKeeper:
    """Ledgers of all cards of a node, and who has to be told what."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        gather_s: float = GATHER_S,
        read_free: ReadFree = nobody_reads,
    ) -> None:
        """One that nobody has joined. Its protocols are made by `accept`.

        Args:
            gather_s: 0 where it has the place of no other one.
            read_free: for when no tenant reads its device; those whose process a sleep has ended cannot.
        """
        self._now = now
        self._gather_s = gather_s
        self._read_free = read_free
        self._ledgers: dict[str, CardLedger] = {}
        self._members: dict[str, _Member] = {}  # by tenant
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by card
        self._sights: dict[str, asyncio.TimerHandle] = {}  # by card: about to be told
        self._drifts: dict[str, int] = {}  # by card, as last told
        self._looks: dict[str, asyncio.Task[None]] = {}  # by card: for strangers
        self._gathers_until_s: float | None = None
        self._pidfds: dict[str, int] = {}  # of those whose process is about to end

    @property
    def has_members(self) -> bool:
        return bool(self._members or self._pidfds)

    def accept(self) -> asyncio.Protocol:
        """For a tenant that connects."""
        connection: Connection[ToKeeper] = Connection(
            ToKeeper, lambda message: self._receive(member, message), lambda: self._lost(member)
        )
        member = _Member(connection)
        return connection

    def close(self) -> None:
        """Forget everything. Tenants look for the next one."""
        for timer in (*self._timers.values(), *self._sights.values()):
            timer.cancel()
        for look in self._looks.values():
            look.cancel()
        for name in list(self._pidfds):
            self._forget_process(name)
        members, self._members = self._members, {}
        for member in members.values():
            member.connection.close()

    def _receive(self, member: _Member, message: ToKeeper) -> None:
        now_s = self._now()
        if isinstance(message, Join):
            self._join(member, message, now_s)
        elif self._members.get(member.name) is not member:
            return  # a newer connection of the same tenant is there
        else:
            ledger = self._ledgers[member.card]
            match message:
                case Changed(account):
                    ledger.account(member.name, account, now_s)
                    member.process_id = account.process_id
                    if account.device_free is not None:
                        drift = ledger.read_device(member.total, account.device_free, account.short)
                        self._tell_drift(member.card, drift)
                case Want():
                    ledger.ask(
                        member.name,
                        message.number,
                        message.size,
                        message.waits,
                        now_s,
                        message.limit_s,
                        message.grows,
                    )
                case Withdraw(number):
                    ledger.withdraw(member.name, number)
                case Look():
                    seen = ledger.status(member.card, member.total, now_s)
                    member.connection.send(Seen(seen))
                    return
                case _:
                    assert_never(message)
        self._decide(member.card)

    def _tell_drift(self, card: str, drift: int | None) -> None:
        """Once for each that there is."""
        if drift is None or abs(drift - self._drifts.get(card, 0)) <= _DRIFT_TOLD:
            return
        self._drifts[card] = drift
        level = logging.WARNING if abs(drift) > _DRIFT_TOLD else logging.INFO
        logger.log(level, "%s: the device holds %d bytes more than is known", card, drift)

    def _join(self, member: _Member, join: Join, now_s: float) -> None:
        member.name, member.card, member.total = join.tenant, join.card, join.device_total
        member.process_id = join.account.process_id
        if self._gathers_until_s is None:
            self._gathers_until_s = now_s + self._gather_s
        ledger = self._ledgers.setdefault(join.card, CardLedger(join.budget, join.max_awake))
        ledger.budget, ledger.max_awake = join.budget, join.max_awake
        self._forget_process(join.tenant)
        before, self._members[join.tenant] = self._members.get(join.tenant), member
        if before is not None:
            before.connection.close()
        ledger.join(join.tenant, join.model, join.terms, join.account, now_s, join.gpus, join.order)
        logger.info("%s of %s joins %s", join.tenant, join.model, join.card)

    def _lost(self, member: _Member) -> None:
        if self._members.get(member.name) is not member:
            return
        del self._members[member.name]
        ledger = self._ledgers[member.card]
        try:
            # A process that has ended is no process.
            pidfd = os.pidfd_open(member.process_id) if member.process_id else None
        except OSError:
            pidfd = None
        if pidfd is None:
            ledger.end(member.name)
        else:
            ledger.lose(member.name)
            self._pidfds[member.name] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._process_ended, member)
        self._decide(member.card)

    def _process_ended(self, member: _Member) -> None:
        self._forget_process(member.name)
        self._ledgers[member.card].end(member.name)
        self._decide(member.card)

    def _forget_process(self, name: str) -> None:
        pidfd = self._pidfds.pop(name, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _decide(self, card: str) -> None:
        """Do what follows from what a card's ledger has been told, and look again when it says so."""
        timer = self._timers.pop(card, None)
        if timer is not None:
            timer.cancel()
        now_s, loop = self._now(), asyncio.get_running_loop()
        if self._gathers_until_s is not None and now_s < self._gathers_until_s:
            self._timers[card] = loop.call_later(self._gathers_until_s - now_s, self._decide, card)
            return
        ledger = self._ledgers[card]
        for decision in ledger.decide(now_s):
            answer: msgspec.Struct
            match decision:
                case Granting(tenant, number, at_once):
                    answer = Granted(number, at_once)
                case Refusing(tenant, number, refuse, retry_after_s):
                    # More KV cache is asked for again and again while it is short.
                    level = logging.DEBUG if refuse.grows else logging.INFO
                    logger.log(level, "%s: %s is refused: %s", card, tenant, refuse.reason)
                    answer = Refused(number, refuse.reason, refuse.ever, retry_after_s)
                case Waiting(tenant, number, reason):
                    logger.info("%s: %s waits: %s", card, tenant, reason)
                    answer = Waits(number, reason)
                case Ordering(tenant, number, evict):
                    logger.info(
                        "%s: %s is to make room (%s): %s", card, tenant, evict.cause, evict.reason
                    )
                    answer = MakeRoom(number, evict.mode, evict.reason, evict.for_model, evict.deep)
                case Staying(tenant, number, stay):
                    logger.info("%s: %s need not make room: %s", card, tenant, stay.reason)
                    answer = Stay(number, stay.reason)
                case Shrinking(tenant, number, shrink):
                    logger.info(
                        "%s: %s is to give back %d bytes of KV cache: %s",
                        card,
                        tenant,
                        shrink.size,
                        shrink.reason,
                    )
                    answer = GiveBack(number, shrink.size, shrink.reason)
                case _:
                    assert_never(decision)
            member = self._members.get(tenant)
            if member is not None:
                member.connection.send(answer)
        if ledger.next_s != float("inf"):
            # A hair later, so that it is the time by then.
            delay_s = max(0.0, ledger.next_s - now_s) + 1e-3
            self._timers[card] = loop.call_later(delay_s, self._decide, card)
        if ledger.waits_beside_strangers and card not in self._looks:
            self._looks[card] = asyncio.create_task(self._look_for_strangers(card))
        if card not in self._sights:
            self._sights[card] = loop.call_later(_SIGHT_AFTER_S, self._tell_sights, card)

    async def _look_for_strangers(self, card: str) -> None:
        """Have a wake that waits beside them wait no longer than they are there, whoever could tell."""
        ledger = self._ledgers[card]
        try:
            while ledger.waits_beside_strangers:
                try:
                    await self._look_once(card, ledger)
                except Exception:
                    logger.exception("%s: cannot look for others' memory", card)
                await asyncio.sleep(_STRANGERS_EVERY_S)
        finally:
            del self._looks[card]

    async def _look_once(self, card: str, ledger: CardLedger) -> None:
        total, known = next(m.total for m in self._members.values() if m.card == card), ledger.known
        free = await self._read_free(card, total)
        # Where tenants' bytes have moved, it is older than what it would be compared with.
        if free is not None and ledger.known == known:
            self._tell_drift(card, ledger.read_from_outside(total, free))
            self._decide(card)

    def _tell_sights(self, card: str) -> None:
        """Tell the tenants of a card how it is, if it is not what they were told last."""
        del self._sights[card]
        for member in self._members.values():
            if member.card == card:
                sight = self._ledgers[card].sight(member.name)
                if sight != member.sight:
                    member.sight = sight
                    member.connection.send(sight)
