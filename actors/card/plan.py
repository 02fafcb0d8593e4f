"""Who gets memory of a card, who makes room for it, and why. Pure: a card as it is comes in, a plan goes out.

Who asks gets what is free. Otherwise models that are awake give back what they do not use of their KV caches, idle
ones first. Only where that is not enough, idle models sleep: of the lowest priority first, longest idle first,
weighted by what their wake costs. Then sleepers sleep deep, which takes half a second each, and as long to wake from;
seconds where their process ends for it, or several do it at once. Busy ones follow after a tenth of a second where
they are frozen, which recent sleepers are spared for, and where not after a quarter of the time that who asks may wait.
No pinned model sleeps for others, none before its `min_awake_s`, and none before each request that it was woken for
has had a token. Nobody is asked for anything unless all that are asked make enough room.

Who waits for a first token comes before who was frozen in the middle: that one waits for a quarter, too, and models
that had something to do a moment ago do not sleep for it.

Who is awake and wants more KV cache gets what is free, at once or not at all, and asks again. Idle models give back what
they do not use for that. Where that is not enough those sleep, or sleep deep, that nobody has asked for a while; sooner
where who wants more can be frozen, as they have the room back at once then. No busy model does anything for it.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from actors.card.config import Preempt, in_words
from actors.card.state import FIRST_AFTER, Ask, Card, Tenant
from actors.protocol import SleepMode

# A model whose turn has not given everybody a token is not spared for ever: it may be stuck. Where it was only slow, as
# with a long prompt, its next turn is twice as long.
UNREACHED_S = 5.0
_MOST_DOUBLINGS = 8
# For those that were frozen nobody sleeps who was quiet for less: another request often follows.
QUIET_S = 0.25
# Whose last request is not as old is woken again soon, and a deep sleep costs it seconds then.
RECENT_S = 30.0
# For more KV cache of who can be frozen, models sleep that were quiet for so long. Each second of theirs may cost the
# other half of its tokens, and their next wake costs it some tenths.
GROWTH_QUIET_S = 2.0


class Cause(StrEnum):
    """Why somebody has to make room."""

    IDLE = "idle"
    ASLEEP = "asleep"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Evict:
    """Have a tenant make room.

    Attributes:
        mode: None: only if nothing is in flight there.
        for_model: that wants the room.
        deep: it sleeps, and is to sleep deep.
    """

    tenant: str
    mode: SleepMode | None
    cause: Cause
    reason: str
    for_model: str
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Shrink:
    """Have a tenant give back so much of its KV cache, which nobody uses by its own word."""

    tenant: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stay:
    """Take back what a tenant was asked: it need not make room any more."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """It may map what it asked for."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """It gets nothing.

    Attributes:
        ever: it might at another time.
        grows: it was an ask for more KV cache.
        evict, shrink: who makes room, for when it asks again.
    """

    reason: str
    ever: bool
    grows: bool = False
    evict: tuple[Evict, ...] = ()
    shrink: tuple[Shrink, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """It waits.

    Attributes:
        reason: what ends the wait.
        until_s: when to plan again, if nothing happens before.
        evict: who has to make room for it now.
        shrink: who has to give back KV cache for it now.
        turn_s: when those whom `reason` names may be asked; None: time alone changes nothing.
    """

    reason: str
    until_s: float
    evict: tuple[Evict, ...] = ()
    shrink: tuple[Shrink, ...] = ()
    turn_s: float | None = None


Plan: TypeAlias = Grant | Refuse | Wait


def plan(card: Card, ask: Ask, now_s: float) -> Plan:
    """What becomes of an ask now."""
    who = card.tenant(ask.tenant)
    if ask.grows:
        return _grow(card, ask, who, now_s)
    if why := _never(card, ask, who):
        return Refuse(why, ever=False)
    slot = not who.awake
    free, slots = card.free - card.claimed, card.free_slots - card.claimed_slots
    if ask.size <= free and slot <= slots:
        return Grant()
    if not ask.waits:
        return Refuse(
            f"{in_words(ask.size)} do not fit beside who is awake: {in_words(max(0, free))} are free",
            True,
        )
    wait = _make_room(card, ask, *_missing(card, ask.size, slot), now_s)
    if now_s >= ask.limit_s:
        waited = (
            f"no room for {in_words(ask.size)} within {ask.patience_s:g} s (sharing.max_wait_s)"
        )
        return Refuse(f"{waited}: {wait.reason}", ever=True)
    return replace(wait, until_s=min(wait.until_s, ask.limit_s))


def stays(card: Card, asks: Sequence[Ask]) -> list[Stay]:
    """Who drains for nobody: those who wanted the room have left, or have found it elsewhere.

    No plan asks them again, as long as nothing else happens.

    Args:
        card: as it is once all have been decided; `claimed` is what those take who go on waiting.
        asks: theirs.
    """
    priority = max((card.tenant(ask.tenant).terms.priority for ask in asks), default=0)
    found: list[Stay] = []
    draining = [t for t in card.tenants if t.drains]
    for tenant in sorted(draining, key=lambda t: (-t.terms.priority, t.name)):
        rest = tuple(t for t in card.tenants if t.name != tenant.name)
        without = replace(card, tenants=(*rest, replace(tenant, leaving=False)))
        if not asks:
            reason = "nobody waits for room any more"
        elif all(missing <= 0 for missing in _missing(without, 0, 0)):
            reason = "who waits has room without it"
        elif not _gives_way(tenant, priority):
            reason = "who waits now has a lower priority"
        else:
            continue
        card = without
        found.append(Stay(tenant.name, reason))
    return found


def in_order(asks: Sequence[Ask], card: Card, now_s: float) -> list[Ask]:
    """Who comes before whom: those who have waited for long, then by priority, then as they came.

    Who was frozen in the middle comes behind all of its priority that wait for a first token. Who only wants more
    comes behind all who have nothing yet.
    """

    def rank(ask: Ask) -> tuple[bool, bool, int, bool, float, int]:
        tenant, is_late = card.tenant(ask.tenant), now_s >= ask.first_from_s
        priority, resumes = (0, False) if is_late else (tenant.terms.priority, tenant.resumes)
        return ask.grows, not is_late, -priority, resumes, ask.asked_s, ask.number

    return sorted(asks, key=rank)


def _never(card: Card, ask: Ask, who: Tenant) -> str | None:
    """Why an ask would not fit if everybody made room who ever does; None if it would."""
    others = [t for t in card.tenants if t.name != who.name and not t.gone]
    pinned = [t for t in others if t.terms.pin and t.awake]
    stays = sum(t.held + t.residue - t.kv.grown for t in pinned)
    room = card.budget - stays - who.held - who.residue
    if ask.size > room:
        beside = f" beside {', '.join(t.model for t in pinned)} (sharing.pin)" if pinned else ""
        left = f", {in_words(max(0, room))} of which these leave" if pinned else ""
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


def _grow(card: Card, ask: Ask, who: Tenant, now_s: float) -> Plan:
    """What becomes of an ask for more KV cache."""
    free = card.free - card.claimed
    if ask.size <= free:
        return Grant()
    what = f"{in_words(ask.size)} of KV cache for {who.model}"
    short = ask.size - free - sum(t.coming for t in card.tenants)
    idle = [t for t in card.tenants if t.name != who.name and not t.busy]
    need = _Need(short, 0, {t.name: t.gives(now_s) for t in idle})
    may = [t for t in idle if _may_sleep(t) and _asked_for_growth_from_s(t, ask, who) <= now_s]
    chosen = _enough(_idle_first(may, now_s), need)
    evict, shrink = _orders(chosen, idle, short, what, who.model, now_s)
    return Refuse(f"{what} are not free", ever=True, grows=True, evict=evict, shrink=shrink)


def _asked_for_growth_from_s(tenant: Tenant, ask: Ask, who: Tenant) -> float:
    """When it has been idle for so long that it sleeps for more KV cache of `who`."""
    if tenant.awake and tenant.terms.priority > who.terms.priority:
        return math.inf
    soon = tenant.awake and who.terms.preempt is Preempt.FREEZE
    quiet_s = tenant.quiet_since_s + (GROWTH_QUIET_S if soon else RECENT_S)
    return max(quiet_s, _spared_until_s(tenant, ask))


def _missing(card: Card, size: int, slots: int) -> tuple[int, float]:
    """Bytes, and of those who may be awake: behind asks that come before, once all is there that is on its way."""
    free = card.free - card.claimed + sum(t.coming for t in card.tenants)
    free_slots = card.free_slots - card.claimed_slots
    return size - free, slots - free_slots - sum(t.awake for t in card.tenants if t.comes_free)


def _make_room(card: Card, ask: Ask, short: int, short_slots: float, now_s: float) -> Wait:
    """What ends the wait for so much more, when to look again, and who has to do something for it now."""
    if short <= 0 and short_slots <= 0:
        return Wait(_on_the_way(card), math.inf)
    for_model = card.tenant(ask.tenant).model
    what = f"{in_words(ask.size)} for {for_model}"
    others = [t for t in card.tenants if t.name != ask.tenant]
    if short_slots <= 0 and (shrink := _shrinks(others, short, what, now_s)):
        givers = ", ".join(card.tenant(s.tenant).model for s in shrink)
        return Wait(f"{givers} give back KV cache", math.inf, shrink=shrink)
    need = _Need(short, short_slots, {t.name: t.gives(now_s) for t in others})
    at_last = replace(need, at_last=True)
    may = _who_may(others, card.tenant(ask.tenant).terms.priority, need, now_s)
    resumes = card.tenant(ask.tenant).resumes
    from_s = {t.name: _asked_from_s(t, ask, resumes) for t in may}
    ready = [t for t in may if from_s[t.name] <= now_s]
    order = _idle_first([t for t in ready if not t.busy], now_s)
    order += sorted(
        (t for t in ready if t.busy), key=lambda t: (t.terms.priority, t.awake_since_s, t.name)
    )
    if chosen := _enough(order, need) or _enough(order, at_last):
        orders = _orders(chosen, others, short, what, for_model, now_s)
        return Wait(_on_the_way(card, {t.name for t in chosen}), math.inf, *orders)
    later = [(max(from_s[t.name], now_s), t) for t in may]
    at_s, names = _when_enough(later, at_last)
    # Who gave less than it had said may have more by then.
    again_s = min((t.spare_from_s for t in others if t.spare_from_s > now_s), default=math.inf)
    if at_s is None:
        who = ", ".join(t.model for t in others if t.awake)
        return Wait(f"{who or 'others'} must end first", again_s)
    return Wait(f"{names} may have to make room", min(at_s, again_s), turn_s=at_s)


def _on_the_way(card: Card, chosen: Container[str] = ()) -> str:
    """What ends a wait; the same before and after it is known that the `chosen` have been asked."""
    leaving = ", ".join(t.model for t in card.tenants if t.coming or t.name in chosen)
    if card.claimed or card.claimed_slots:
        leaving = f"{leaving or 'others'}, and those who asked before"
    return f"{leaving} on the way to make room"


def _orders(
    chosen: Sequence[Tenant],
    others: Sequence[Tenant],
    short: int,
    what: str,
    for_model: str,
    now_s: float,
) -> tuple[tuple[Evict, ...], tuple[Shrink, ...]]:
    """The `chosen` of the others make room by sleeping, the rest by what is still short then."""
    rest = [t for t in others if t not in chosen]
    evict = tuple(_evict(t, what, for_model, now_s) for t in chosen)
    return evict, _shrinks(rest, short - sum(t.frees for t in chosen), what, now_s)


def _shrinks(tenants: Sequence[Tenant], short: int, what: str, now_s: float) -> tuple[Shrink, ...]:
    """Who gives back KV cache, so that it is enough together; nobody if it would not be. Idle ones first."""
    if short <= 0 or sum(t.gives(now_s) for t in tenants) < short:
        return ()
    found: list[Shrink] = []
    for tenant in sorted(tenants, key=lambda t: (t.busy, _worth(t, now_s))):
        size = min(short, tenant.gives(now_s))
        if size > 0:
            found.append(Shrink(tenant.name, size, what))
            short -= size
    return tuple(found)


def _who_may(others: Sequence[Tenant], priority: int, need: "_Need", now_s: float) -> list[Tenant]:
    """Who may be asked for room, now or later.

    Not sleepers with recent requests, as long as idle models and those that can be frozen are enough.
    """
    giving = [t for t in others if not t.busy or _gives_way(t, priority)]
    may = [t for t in giving if _may_sleep(t)]
    settling = [t for t in giving if t.moving and t.awake and not t.terms.pin]
    quick = [
        t
        for t in may + settling
        if not _slept_just_now(t, now_s) and (not t.busy or t.terms.preempt is Preempt.FREEZE)
    ]
    return may if need.remains(quick) else [t for t in may if not _slept_just_now(t, now_s)]


def _slept_just_now(tenant: Tenant, now_s: float) -> bool:
    return not tenant.awake and now_s - tenant.quiet_since_s < RECENT_S


def _asked_from_s(tenant: Tenant, ask: Ask, resumes: bool) -> float:
    """When it may be asked for room; `resumes`: for who was frozen in the middle."""
    spared_s = _spared_until_s(tenant, ask)
    if tenant.busy:
        return max(spared_s, ask.busy_from_s(tenant.terms.preempt, resumes))
    return max(spared_s, tenant.quiet_since_s + QUIET_S) if resumes and tenant.awake else spared_s


def _may_sleep(tenant: Tenant) -> bool:
    """For others, at some time."""
    is_settled = not (tenant.moving or tenant.comes_free or tenant.giving)
    if not tenant.awake:  # frozen requests, and those that wait, want it whole
        return is_settled and tenant.frees > 0 and not (tenant.busy or tenant.asks)
    return is_settled and not tenant.terms.pin


def _gives_way(tenant: Tenant, priority: int) -> bool:
    """While it is busy, to who has that priority."""
    return tenant.terms.preempt is not Preempt.NEVER and tenant.terms.priority <= priority


def _spared_until_s(tenant: Tenant, ask: Ask) -> float:
    if not tenant.awake:
        return tenant.spared_until_s
    least_s = tenant.terms.min_awake_s
    if not tenant.reached:
        most_s = max(UNREACHED_S, FIRST_AFTER * ask.patience_s)
        turn_s = UNREACHED_S * 2.0 ** min(tenant.cut_short, _MOST_DOUBLINGS)
        least_s = max(least_s, min(turn_s, most_s))
    return max(tenant.awake_since_s + least_s, tenant.spared_until_s)


def _worth(tenant: Tenant, now_s: float) -> tuple[int, float, str]:
    """Who is worth least comes first."""
    idle_s = now_s - tenant.quiet_since_s
    return tenant.terms.priority, -idle_s / max(1, tenant.copies), tenant.name


def _idle_first(tenants: Sequence[Tenant], now_s: float) -> list[Tenant]:
    """In the order in which they are asked: sleepers, who would sleep deep, behind those that are awake."""
    return sorted(tenants, key=lambda t: (not t.awake, _worth(t, now_s)))


@dataclass(frozen=True, slots=True)
class _Need:
    """What is missing.

    Attributes:
        size: bytes.
        slots: how many fewer may be awake.
        given: bytes that each tenant gives back without sleeping.
        at_last: who falls asleep for this sleeps deep afterwards, where it can; another plan asks for that.
    """

    size: int
    slots: float
    given: Mapping[str, int]
    at_last: bool = False

    def remains(self, chosen: Sequence[Tenant]) -> bool:
        """Whether these do not make enough room."""
        frees = [t.frees_at_last if self.at_last else t.frees for t in chosen]
        made = sum(self.given.values()) + sum(frees) - sum(self.given[t.name] for t in chosen)
        return made < self.size or sum(t.awake for t in chosen) < self.slots


def _enough(order: Sequence[Tenant], need: _Need) -> list[Tenant]:
    """The first ones who make enough room together, without those who need not; none if all do not."""
    chosen: list[Tenant] = []
    for tenant in order:
        if need.remains(chosen):
            chosen.append(tenant)
    if need.remains(chosen):
        return []
    for tenant in reversed(chosen.copy()):  # who is worth most first
        rest = [t for t in chosen if t is not tenant]
        if not need.remains(rest):
            chosen = rest
    return chosen


def _when_enough(later: Sequence[tuple[float, Tenant]], need: _Need) -> tuple[float | None, str]:
    """When those who may sleep by then make enough room, and who they are."""
    chosen: list[Tenant] = []
    for at_s, tenant in sorted(later, key=lambda each: (each[0], each[1].name)):
        chosen.append(tenant)
        if not need.remains(chosen):
            return at_s, ", ".join(t.model for t in chosen)
    return None, ""


def _evict(tenant: Tenant, what: str, for_model: str, now_s: float) -> Evict:
    if not tenant.awake:
        return Evict(tenant.name, None, Cause.ASLEEP, what, for_model, deep=True)
    if not tenant.busy:
        idle_s = now_s - tenant.quiet_since_s
        return Evict(tenant.name, None, Cause.IDLE, f"{what}; idle {idle_s:.1f} s", for_model)
    keeps = tenant.terms.preempt is Preempt.FREEZE
    mode = SleepMode.KEEP if keeps else SleepMode.WAIT
    return Evict(tenant.name, mode, Cause.BUSY, f"{what}; {tenant.terms.preempt}", for_model)
