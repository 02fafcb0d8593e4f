"""One card's account: who has what, who waits, who must make room. No clock, no wire: both come from outside."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from actors.card.config import Terms
from actors.card.messages import Account, Sight
from actors.card.plan import (
    Evict,
    Grant,
    Refuse,
    Shrink,
    Stay,
    Wait,
    in_order,
    plan,
    stays,
)
from actors.card.state import Ask, Card, Tenant
from actors.protocol import CardStatus, CardTenant, CardWait, SleepMode

# Between a tenant that could not make room and another order to it.
_SPARED_S = 0.2
_LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Granting:
    tenant: str
    number: int
    at_once: bool


@dataclass(frozen=True, slots=True)
class Refusing:
    tenant: str
    number: int
    refuse: Refuse
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    tenant: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ordering:
    tenant: str
    number: int
    evict: Evict


@dataclass(frozen=True, slots=True)
class Shrinking:
    tenant: str
    number: int  # of the order
    shrink: Shrink


@dataclass(frozen=True, slots=True)
class Staying:
    tenant: str
    number: int  # of the order that is taken back
    stay: Stay


Decision: TypeAlias = Granting | Refusing | Waiting | Ordering | Shrinking | Staying


class CardLedger:
    """The one owner of a card's account. `decide` follows whatever was told."""

    def __init__(self, budget: int, max_awake: int | None) -> None:
        """An empty one."""
        self.budget = budget
        self.max_awake = max_awake
        self._tenants: dict[str, Tenant] = {}
        self._asks: dict[tuple[str, int], Ask] = {}
        self._waits: dict[tuple[str, int], Wait] = {}  # what was decided last of who waits
        self._granted: dict[str, Ask] = {}  # by tenant, not in its account
        self._orders: dict[str, int] = {}  # tenant -> number of the order that it has not answered
        self._targets: dict[
            str, int
        ] = {}  # tenant -> what it holds once it has given back what it was asked for
        self._last_order = -1
        self._others = 0  # of the device, and of the budget:
        self._foreign = 0
        self._drift = 0  # by the last figure
        self._believed = 0  # by two that agree
        self._last_wait_s = 0.0  # how long the last one waited that got something
        self._seen: tuple[object, ...] = ()  # what `status` told last
        self._seen_s = 0.0  # since when it tells that
        self._evicted_for: set[tuple[str, int]] = set()  # asks that others were told to sleep for
        self._swaps = 0
        self._swap_s = 0.0  # that these took
        self._swap_s_of: dict[str, float] = {}  # by the tenant that woke
        self._swap_costs_s: dict[str, float] = {}  # by tenant: what one took, by its own account
        self._gpus: dict[str, float] = {}  # by tenant, as Ray counts them
        self.next_s = math.inf

    # --- what is told ---

    def join(
        self,
        name: str,
        model: str,
        terms: Terms,
        account: Account,
        now_s: float,
        gpus: float = 0.0,
        order: int = -1,
    ) -> None:
        """A tenant begins, or comes back; `order`: to make room, that it still follows, of a keeper before this one."""
        self._gpus[name] = gpus
        self.forget_asks(name)
        self._granted.pop(name, None)
        self._orders.pop(name, None)
        self._targets.pop(name, None)
        self._tenants[name] = Tenant(name, model, terms, awake_since_s=now_s, quiet_since_s=now_s)
        if order >= 0:
            self._orders[name] = order
            # Or the answer to this one would be taken for that to a later one.
            self._last_order = max(self._last_order, order)
            # It may have begun to sleep; to be told to stay is of no effect then.
            self._tenants[name] = replace(self._tenants[name], leaving=True, drains=True)
        self.account(name, account, now_s)

    def account(self, name: str, account: Account, now_s: float) -> None:
        """What a tenant says of itself."""
        before = self._tenants[name]
        self._swap_costs_s[name] = account.swap_s
        ask = self._granted.get(name)
        if ask is not None and account.read_ask >= ask.number:
            del self._granted[name]
            ask = None
        granted = 0 if ask is None else ask.size
        wakes = ask is not None and not ask.grows
        has_reached = account.awake and account.reached and not wakes
        after = before
        order = self._orders.get(name)
        if order is not None and account.answered_order >= order:
            del self._orders[name]
            after = replace(before, leaving=False, drains=False, giving=0)
            is_as_deep = not before.awake and account.residue >= before.residue
            if before.leaving and (account.awake or is_as_deep):
                after = replace(after, spared_until_s=now_s + _SPARED_S)
            if account.held > self._targets.pop(name, account.held):
                after = replace(after, spare_from_s=now_s + _SPARED_S)
        self._tenants[name] = replace(
            after,
            held=account.held + granted,
            kept=account.kept if account.awake else account.held,
            residue=account.residue,
            copies=account.copies,
            awake=account.awake or wakes,
            busy=account.busy,
            moving=account.moving or wakes,
            reached=account.reached and not wakes,
            cut_short=0 if has_reached else before.cut_short,
            resumes=account.resumes,
            awake_since_s=now_s - account.awake_s,
            quiet_since_s=now_s - account.quiet_s,
            kv=account.kv,
        )

    def lose(self, name: str) -> None:
        """A tenant's replica is lost; what its worker has comes back when that has ended."""
        self.forget_asks(name)
        self._orders.pop(name, None)
        self._targets.pop(name, None)
        self._tenants[name] = replace(self._tenants[name], gone=True, drains=False, giving=0)

    def end(self, name: str) -> None:
        """Nothing is left of a tenant."""
        self.forget_asks(name)
        books: tuple[dict[str, Any], ...] = (
            *(self._tenants, self._granted, self._orders, self._targets),
            *(self._swap_s_of, self._swap_costs_s, self._gpus),
        )
        for book in books:
            book.pop(name, None)

    def ask(
        self,
        name: str,
        number: int,
        size: int,
        waits: bool,
        now_s: float,
        limit_s: float,
        grows: bool = False,
    ) -> None:
        """A tenant wants memory; answered by a decision, in `limit_s` seconds at most."""
        until_s = now_s + limit_s
        self._asks[name, number] = Ask(name, number, size, waits, now_s, until_s, grows)
        self._note_asks(name)

    def withdraw(self, name: str, number: int) -> None:
        """Nobody wants that any more; of no effect on what has been granted."""
        self._asks.pop((name, number), None)
        self._waits.pop((name, number), None)
        self._evicted_for.discard((name, number))
        self._note_asks(name)

    def _note_asks(self, name: str) -> None:
        asks = any(ask.tenant == name and not ask.grows for ask in self._asks.values())
        if (tenant := self._tenants.get(name)) is not None and tenant.asks != asks:
            self._tenants[name] = replace(tenant, asks=asks)

    def forget_asks(self, name: str) -> None:
        for tenant, number in [key for key in self._asks if key[0] == name]:
            self.withdraw(tenant, number)

    def read_device(self, total: int, free: int, short: bool) -> int | None:
        """Compare with the driver's figure, while nothing is on its way.

        Args:
            short: what was granted was not there. Otherwise one figure alone, which may be older than what it
                is compared with, makes no room smaller.

        Returns:
            By how many bytes the device holds more than the ledger knows, as far as two figures in a row say so; None:
            not now.
        """
        # Of who moves the account may have memory that it has not mapped yet, or has not unmapped.
        moves = any(t.moving or t.coming for t in self._tenants.values())
        if not short and (self._granted or self._orders or moves):
            return None
        before, self._drift = self._drift, total - free - self.known
        sure = self._drift if short else min(before, self._drift)
        self._others = max(0, sure)
        self._foreign = max(0, self.budget - (total - sure))
        two = (self._drift, self._drift) if short else (before, self._drift)
        self._believed = sorted((*two, self._believed))[1]
        return self._believed

    def read_from_outside(self, total: int, free: int) -> int | None:
        """The same by a figure that no tenant has read. It may count what the driver keeps, so only a better one counts."""
        if total - free - self.known >= self._drift:
            return None
        return self.read_device(total, free, short=False)

    @property
    def known(self) -> int:
        """Bytes of all tenants."""
        return sum(t.held + t.residue for t in self._tenants.values())

    @property
    def waits_beside_strangers(self) -> bool:
        """Whether a wake waits while processes that are no tenants have some of the budget, by the last figures."""
        return self._foreign > 0 and any(not ask.grows for ask in self._asks.values())

    # --- what follows ---

    def card(self) -> Card:
        return Card(self.budget, self.max_awake, tuple(self._tenants.values()), self._foreign)

    def decide(self, now_s: float) -> Iterator[Decision]:
        """Take the asks in their order, as far as there is anything to decide; sets `next_s`.

        Each decision is part of the account when it comes out.
        """
        self.next_s = math.inf
        claimed, slots = 0, 0
        for ask in in_order(tuple(self._asks.values()), self.card(), now_s):
            card = replace(self.card(), claimed=claimed, claimed_slots=slots)
            key = ask.tenant, ask.number
            outcome = plan(card, ask, now_s)
            if isinstance(outcome, Grant):
                at_once = key not in self._waits
                if not ask.grows:
                    self._last_wait_s = now_s - ask.asked_s
                if key in self._evicted_for:
                    self._count_swap(ask.tenant)
                self._take(ask)
                yield Granting(*key, at_once)
            elif isinstance(outcome, Refuse):
                self.withdraw(*key)
                yield Refusing(*key, outcome, self._retry_after_s(now_s))
                yield from self._evict(outcome.evict)
                yield from self._shrink(outcome.shrink)
            else:
                claimed += ask.size
                slots += not card.tenant(ask.tenant).awake
                yield from self._wait(ask, outcome, now_s)
        yield from self._stay(replace(self.card(), claimed=claimed, claimed_slots=slots))

    def _take(self, ask: Ask) -> None:
        who = self._tenants[ask.tenant]
        assert ask.tenant not in self._granted, "one ask at a time"
        self._granted[ask.tenant] = ask
        after = replace(who, held=who.held + ask.size)
        if not ask.grows:
            after = replace(after, kept=who.held, awake=True, moving=True)
        self._tenants[ask.tenant] = after
        self.withdraw(ask.tenant, ask.number)

    def _count_swap(self, name: str) -> None:
        """Somebody wakes where others had to sleep: by its own account, how long that keeps the card."""
        cost_s = self._swap_costs_s[name]
        self._swaps += 1
        self._swap_s += cost_s
        self._swap_s_of[name] = self._swap_s_of.get(name, 0.0) + cost_s

    def _wait(self, ask: Ask, wait: Wait, now_s: float) -> Iterator[Decision]:
        if wait.evict:
            self._evicted_for.add((ask.tenant, ask.number))
        yield from self._evict(wait.evict)
        yield from self._shrink(wait.shrink)
        self.next_s = min(self.next_s, wait.until_s)
        if now_s < ask.first_from_s:
            self.next_s = min(self.next_s, ask.first_from_s)
        key = ask.tenant, ask.number
        told, self._waits[key] = self._waits.get(key), wait
        if told is None or told.reason != wait.reason:
            turn = "" if wait.turn_s is None else f" in {max(0.0, wait.turn_s - now_s):.1f} s"
            yield Waiting(*key, wait.reason + turn)

    def _stay(self, card: Card) -> Iterator[Decision]:
        """Nothing is known of what becomes of it before it answers: it may sleep by now."""
        wakes = [ask for ask in self._asks.values() if not ask.grows]
        for stay in stays(card, wakes):
            before = self._tenants[stay.tenant]
            self._tenants[stay.tenant] = replace(before, leaving=False, drains=False)
            yield Staying(stay.tenant, self._orders[stay.tenant], stay)

    def _evict(self, evicts: Iterable[Evict]) -> Iterator[Decision]:
        for evict in evicts:
            self._last_order += 1
            self._orders[evict.tenant] = self._last_order
            before = self._tenants[evict.tenant]
            drains = evict.mode is SleepMode.WAIT
            cut_short = before.cut_short + (evict.mode is SleepMode.KEEP and not before.reached)
            self._tenants[evict.tenant] = replace(
                before, leaving=True, drains=drains, cut_short=cut_short
            )
            yield Ordering(evict.tenant, self._last_order, evict)

    def _shrink(self, shrinks: Iterable[Shrink]) -> Iterator[Decision]:
        for shrink in shrinks:
            self._last_order += 1
            self._orders[shrink.tenant] = self._last_order
            tenant = self._tenants[shrink.tenant]
            self._tenants[shrink.tenant] = replace(tenant, giving=shrink.size)
            self._targets[shrink.tenant] = tenant.held - shrink.size
            yield Shrinking(shrink.tenant, self._last_order, shrink)

    def _retry_after_s(self, now_s: float) -> float:
        """When the queue may have moved on: as long as the last one waited, once for each who waits."""
        longest_s = max((now_s - ask.asked_s for ask in self._asks.values()), default=0.0)
        return max(_LEAST_RETRY_S, self._last_wait_s * (len(self._asks) + 1), longest_s)

    def sight(self, name: str) -> Sight:
        """For a tenant's router and policy."""
        card = self.card()
        wakes = [ask for ask in self._asks.values() if not ask.grows]
        slots = card.free_slots - sum(not card.tenant(ask.tenant).awake for ask in wakes)
        return Sight(
            free=max(0, card.free - sum(ask.size for ask in wakes)) if slots > 0 else 0,
            waiting=len(wakes),
            gpus=sum(self._gpus.values()),
            swaps=self._swaps,
            swap_s=self._swap_s,
            own_swap_s=self._swap_s_of.get(name, 0.0),
        )

    def status(self, card_id: str, total: int, now_s: float) -> CardStatus:
        """For people; `total` bytes are the card's."""
        tenants = tuple(_shown(t) for t in self._tenants.values())
        asks = in_order(tuple(self._asks.values()), self.card(), now_s)
        waits = tuple(self._waits.get((a.tenant, a.number)) for a in asks)
        seen = (self.budget, self._others, self._drift, tenants, tuple(asks), waits)
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
        return CardStatus(
            card_id,
            total,
            self.budget,
            sum(t.held + t.residue for t in tenants),
            self._others,
            self._drift,
            tenants,
            tuple(self._shown_wait(*each, now_s) for each in zip(asks, waits, strict=True)),
            self._seen_s,
        )

    def _shown_wait(self, ask: Ask, wait: Wait | None, now_s: float) -> CardWait:
        turn_s = None if wait is None else wait.turn_s
        return CardWait(
            self._tenants[ask.tenant].model,
            ask.tenant,
            ask.size,
            now_s - ask.asked_s,
            ask.patience_s,
            "" if wait is None else wait.reason,
            None if turn_s is None else max(0.0, turn_s - now_s),
        )


def _shown(tenant: Tenant) -> CardTenant:
    return CardTenant(
        tenant.model,
        tenant.name,
        tenant.held,
        tenant.residue,
        tenant.awake,
        tenant.kv.size,
        tenant.kv.most,
        tenant.moving or tenant.comes_free,
    )
