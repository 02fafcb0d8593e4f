"""Who gets memory of a card, who makes room for it, and why. Pure: a card as it is comes in, a plan goes out.

Who asks gets what is free. Otherwise idle models sleep: of the lowest priority first, longest idle first,
weighted by what their wake costs. Busy ones follow after a quarter of the time that the one who asks may wait.
No pinned model sleeps for others, none before its `min_awake_s`, and none that the request that it
was woken for has not reached yet. Nobody is asked to sleep unless all that are asked make enough room.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from actors.card.config import Preempt, Terms, in_words
from actors.protocol import SleepMode

BUSY_AFTER = 0.25  # of `max_wait_s`: from then on busy models make room
FIRST_AFTER = 0.5  # of `max_wait_s`: from then on before all priorities
# A model that was woken for a request whose client has left since is not spared for ever.
UNREACHED_S = 5.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A worker and what it has of its card, in bytes; times by the keeper's clock, in seconds.

    Attributes:
        held: mapped, or granted and about to be.
        kept: of `held`, what a sleep leaves mapped.
        residue: what its process has besides, awake or asleep.
        copies: what its wake copies.
        moving: between awake and asleep; it can make no room until it has settled.
        reached: by the request that it was woken for, if there was one.
        leaving: it was asked to make room, and has not answered.
        gone: its replica is lost, its process about to end.
        spared_until_s: it could not make room a moment ago.
    """

    name: str
    model: str
    terms: Terms
    held: int = 0
    kept: int = 0
    residue: int = 0
    copies: int = 1
    awake: bool = False
    busy: bool = False
    moving: bool = False
    reached: bool = True
    awake_since_s: float = 0.0
    quiet_since_s: float = 0.0
    leaving: bool = False
    gone: bool = False
    spared_until_s: float = -math.inf

    @property
    def frees(self) -> int:
        """Bytes that its sleep gives back."""
        return self.held - self.kept

    @property
    def comes_free(self) -> bool:
        """Its memory is on its way back already."""
        return self.leaving or self.gone


@dataclass(frozen=True, slots=True)
class Ask:
    """Somebody wants memory.

    Attributes:
        size: bytes beside what it holds.
        waits: for room; otherwise it is refused at once where there is none.
        limit_s: until when it waits.
    """

    tenant: str
    number: int
    size: int
    waits: bool
    asked_s: float
    limit_s: float

    @property
    def patience_s(self) -> float:
        return self.limit_s - self.asked_s

    @property
    def busy_from_s(self) -> float:
        return self.asked_s + BUSY_AFTER * self.patience_s

    @property
    def first_from_s(self) -> float:
        return self.asked_s + FIRST_AFTER * self.patience_s


@dataclass(frozen=True, slots=True)
class Card:
    """A card as it is.

    Attributes:
        budget: bytes for all tenants together.
        max_awake: tenants that may be awake at once.
        foreign: bytes of processes that are no tenants, as far as that is known.
        claimed, claimed_slots: what asks that come before will take.
    """

    budget: int
    max_awake: int | None
    tenants: tuple[Tenant, ...]
    foreign: int = 0
    claimed: int = 0
    claimed_slots: int = 0

    @property
    def free(self) -> int:
        return self.budget - self.foreign - sum(t.held + t.residue for t in self.tenants)

    @property
    def free_slots(self) -> float:
        """How many more may be awake."""
        if self.max_awake is None:
            return math.inf
        return self.max_awake - sum(t.awake for t in self.tenants)

    def tenant(self, name: str) -> Tenant:
        return next(t for t in self.tenants if t.name == name)


class Cause(StrEnum):
    """Why somebody has to make room."""

    IDLE = "idle"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Evict:
    """Have a tenant make room.

    Attributes:
        mode: None: only if nothing is in flight there.
    """

    tenant: str
    mode: SleepMode | None
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """It may map what it asked for."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """It gets nothing.

    Attributes:
        ever: it might at another time.
    """

    reason: str
    ever: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """It waits.

    Attributes:
        reason: what ends the wait.
        until_s: when to plan again, if nothing happens before.
        evict: who has to make room for it now.
    """

    reason: str
    until_s: float
    evict: tuple[Evict, ...] = ()


Plan: TypeAlias = Grant | Refuse | Wait


def plan(card: Card, ask: Ask, now_s: float) -> Plan:
    """What becomes of an ask now."""
    who = card.tenant(ask.tenant)
    if why := _never(card, ask, who):
        return Refuse(why, ever=False)
    slot = not who.awake
    free, slots = card.free - card.claimed, card.free_slots - card.claimed_slots
    if ask.size <= free and slot <= slots:
        return Grant()
    short, short_slots = ask.size - free, slot - slots
    if not ask.waits:
        return Refuse(
            f"{in_words(ask.size)} do not fit beside who is awake: {in_words(max(0, free))} are free",
            True,
        )
    coming = [t for t in card.tenants if t.comes_free]
    reason, until_s, evict = _make_room(
        card,
        ask,
        short - sum(t.frees + (t.residue if t.gone else 0) for t in coming),
        short_slots - sum(t.awake for t in coming),
        now_s,
    )
    if now_s >= ask.limit_s:
        waited = (
            f"no room for {in_words(ask.size)} within {ask.patience_s:g} s (sharing.max_wait_s)"
        )
        return Refuse(f"{waited}: {reason}", ever=True)
    return Wait(reason, min(until_s, ask.limit_s), evict)


def in_order(asks: Sequence[Ask], card: Card, now_s: float) -> list[Ask]:
    """Who comes before whom: those who have waited for long, then by priority, then as they came."""

    def rank(ask: Ask) -> tuple[bool, int, float, int]:
        is_late = now_s >= ask.first_from_s
        priority = 0 if is_late else card.tenant(ask.tenant).terms.priority
        return not is_late, -priority, ask.asked_s, ask.number

    return sorted(asks, key=rank)


def _never(card: Card, ask: Ask, who: Tenant) -> str | None:
    """Why an ask would not fit if everybody made room who ever does; None if it would."""
    others = [t for t in card.tenants if t.name != who.name and not t.gone]
    pinned = [t for t in others if t.terms.pin and t.awake]
    stays = sum(t.kept + t.residue for t in others) + sum(t.frees for t in pinned)
    room = card.budget - stays - who.held - who.residue
    if ask.size > room:
        beside = f" beside {', '.join(t.model for t in pinned)} (sharing.pin)" if pinned else ""
        left = (
            f", {in_words(max(0, room))} of which sleepers and pinned models leave" if stays else ""
        )
        return (
            f"{who.model} takes {in_words(ask.size)}, which never fit{beside}: the card has "
            f"{in_words(card.budget)} for models (card.memory_budget){left}"
        )
    if not who.awake and card.max_awake is not None and len(pinned) >= card.max_awake:
        return (
            f"{', '.join(t.model for t in pinned)} are pinned and all that may be awake: "
            f"card.max_awake_models is {card.max_awake}"
        )
    return None


def _make_room(
    card: Card, ask: Ask, short: int, short_slots: float, now_s: float
) -> tuple[str, float, tuple[Evict, ...]]:
    """What ends the wait for so much more, when to look again, and who has to sleep for it now."""
    if short <= 0 and short_slots <= 0:
        leaving = ", ".join(t.model for t in card.tenants if t.comes_free)
        if card.claimed or card.claimed_slots:
            leaving = f"{leaving or 'others'}, and those who asked before"
        return f"{leaving} on the way to make room", math.inf, ()
    priority = card.tenant(ask.tenant).terms.priority
    may = [t for t in card.tenants if t.name != ask.tenant and _may_sleep(t)]
    ready = [t for t in may if _spared_until_s(t) <= now_s]
    idle = sorted((t for t in ready if not t.busy), key=lambda t: _worth(t, now_s))
    busy = [t for t in ready if t.busy and _gives_way(t, priority)]
    busy.sort(key=lambda t: (t.terms.priority, t.awake_since_s, t.name))
    model = card.tenant(ask.tenant).model
    order = idle + (busy if now_s >= ask.busy_from_s else [])
    if chosen := _enough(order, short, short_slots):
        evict = tuple(_evict(t, f"{in_words(ask.size)} for {model}", now_s) for t in chosen)
        return f"{', '.join(t.model for t in chosen)} make room", math.inf, evict
    later = [
        (max(_spared_until_s(t), ask.busy_from_s if t.busy else now_s), t)
        for t in may
        if not t.busy or _gives_way(t, priority)
    ]
    at_s, names = _when_enough(later, short, short_slots)
    if at_s is None:
        who = ", ".join(t.model for t in card.tenants if t.awake and t.name != ask.tenant)
        return f"{who or 'others'} must end first", math.inf, ()
    return f"{names} may have to make room in {max(0.0, at_s - now_s):.1f} s", at_s, ()


def _may_sleep(tenant: Tenant) -> bool:
    """For others, at some time."""
    return tenant.awake and not (tenant.moving or tenant.comes_free or tenant.terms.pin)


def _gives_way(tenant: Tenant, priority: int) -> bool:
    """While it is busy, to who has that priority."""
    return tenant.terms.preempt is not Preempt.NEVER and tenant.terms.priority <= priority


def _spared_until_s(tenant: Tenant) -> float:
    least_s = tenant.terms.min_awake_s
    if not tenant.reached:
        least_s = max(least_s, UNREACHED_S)
    return max(tenant.awake_since_s + least_s, tenant.spared_until_s)


def _worth(tenant: Tenant, now_s: float) -> tuple[int, float, str]:
    """Who is worth least comes first."""
    idle_s = now_s - tenant.quiet_since_s
    return tenant.terms.priority, -idle_s / max(1, tenant.copies), tenant.name


def _enough(order: Sequence[Tenant], short: int, short_slots: float) -> list[Tenant]:
    """The first ones who make enough room together, without those who need not; none if all do not."""
    chosen: list[Tenant] = []
    for tenant in order:
        if _lacks(chosen, short, short_slots):
            chosen.append(tenant)
    if _lacks(chosen, short, short_slots):
        return []
    for tenant in reversed(chosen.copy()):  # who is worth most first
        rest = [t for t in chosen if t is not tenant]
        if not _lacks(rest, short, short_slots):
            chosen = rest
    return chosen


def _lacks(chosen: Sequence[Tenant], short: int, short_slots: float) -> bool:
    return sum(t.frees for t in chosen) < short or len(chosen) < short_slots


def _when_enough(
    later: Sequence[tuple[float, Tenant]], short: int, short_slots: float
) -> tuple[float | None, str]:
    """When those who may sleep by then make enough room, and who they are."""
    chosen: list[Tenant] = []
    for at_s, tenant in sorted(later, key=lambda each: (each[0], each[1].name)):
        chosen.append(tenant)
        if not _lacks(chosen, short, short_slots):
            return at_s, ", ".join(t.model for t in chosen)
    return None, ""


def _evict(tenant: Tenant, what: str, now_s: float) -> Evict:
    if not tenant.busy:
        idle_s = now_s - tenant.quiet_since_s
        return Evict(tenant.name, None, Cause.IDLE, f"{what}; idle {idle_s:.1f} s")
    keeps = tenant.terms.preempt is Preempt.FREEZE
    mode = SleepMode.KEEP if keeps else SleepMode.WAIT
    return Evict(tenant.name, mode, Cause.BUSY, f"{what}; {tenant.terms.preempt}")
