"""Who gets a card's memory, who makes room, who is refused: one card, one ask, one answer."""

import math
from dataclasses import replace

import pytest

from actors.card.config import Preempt, Terms
from actors.card.messages import KvNow
from actors.card.plan import (
    GROWTH_QUIET_S,
    QUIET_S,
    RECENT_S,
    UNREACHED_S,
    Cause,
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
from actors.protocol import SleepMode

GIB = 2**30
NOW_S = 100.0


def sleeper(name: str = "new", **terms: object) -> Tenant:
    return Tenant(name, name, Terms(**terms))  # type: ignore[arg-type]


def awake(name: str, size: int = 30, idle_s: float = 10.0, **fields: object) -> Tenant:
    """Awake for 50 s."""
    terms = fields.pop("terms", Terms())
    tenant = Tenant(name, name, terms, held=size * GIB, copies=size * GIB, awake=True)  # type: ignore[arg-type]
    tenant = replace(tenant, awake_since_s=NOW_S - 50, quiet_since_s=NOW_S - idle_s)
    return replace(tenant, **fields)  # type: ignore[arg-type]


def ask(size: int = 30, tenant: str = "new", waited_s: float = 0.0, **fields: object) -> Ask:
    asked_s = NOW_S - waited_s
    return replace(Ask(tenant, 1, size * GIB, True, asked_s, asked_s + 20), **fields)  # type: ignore[arg-type]


def card(*tenants: Tenant, budget: int = 100, **fields: object) -> Card:
    return Card(budget * GIB, fields.pop("max_awake", None), (sleeper(), *tenants), **fields)  # type: ignore[arg-type]


def resuming(*tenants: Tenant) -> Card:
    """A card whose sleeper wants to go on with what was frozen."""
    return Card(100 * GIB, None, (replace(sleeper(), resumes=True), *tenants))


def evicted(outcome: object) -> list[str]:
    assert isinstance(outcome, Wait), outcome
    return [evict.tenant for evict in outcome.evict]


def test_what_fits_is_granted() -> None:
    assert plan(card(awake("a"), awake("b")), ask(40), NOW_S) == Grant()


def test_one_byte_too_much_is_not() -> None:
    tight = replace(ask(40), size=40 * GIB + 1)
    assert evicted(plan(card(awake("a"), awake("b")), tight, NOW_S)) == ["a"]


# --- KV cache that nobody uses ---


def shrunk(outcome: object) -> dict[str, int]:
    assert isinstance(outcome, Wait | Refuse), outcome
    return {shrink.tenant: shrink.size // GIB for shrink in outcome.shrink}


def cached(name: str, size: int = 30, spare: int = 10, **fields: object) -> Tenant:
    """Awake, with KV cache that nobody uses."""
    kv = KvNow(spare * GIB, grown=spare * GIB, spare=spare * GIB)
    return awake(name, size, kv=kv, **fields)  # type: ignore[arg-type]


def test_cache_that_nobody_uses_goes_before_anybody_sleeps() -> None:
    full = card(cached("a", 50, 25), awake("b", 40))
    outcome = plan(full, ask(30), NOW_S)
    assert (evicted(outcome), shrunk(outcome)) == ([], {"a": 20})
    assert isinstance(outcome, Wait)
    assert outcome.shrink == (Shrink("a", 20 * GIB, "30.00 GiB for new"),)
    assert outcome.reason == "a give back KV cache"


def test_idle_ones_give_back_first_and_nobody_more_than_is_missing() -> None:
    tenants = (cached("busy", 30, 20, busy=True), cached("short", 30, 5, idle_s=1))
    full = card(*tenants, cached("long", 40, 5, idle_s=9))
    assert shrunk(plan(full, ask(3), NOW_S)) == {"long": 3}
    assert shrunk(plan(full, ask(8), NOW_S)) == {"long": 5, "short": 3}
    assert shrunk(plan(full, ask(12), NOW_S)) == {"long": 5, "short": 5, "busy": 2}


def test_busy_pinned_and_just_woken_ones_give_back_at_once() -> None:
    terms = Terms(pin=True, min_awake_s=1e6, preempt=Preempt.NEVER)
    full = card(cached("a", 100, 60, busy=True, terms=terms))
    assert shrunk(plan(full, ask(60), NOW_S)) == {"a": 60}


def test_what_is_not_enough_alone_spares_some_of_those_who_sleep() -> None:
    full = card(cached("a", 40, 20, idle_s=1), awake("b", 30, idle_s=9), awake("c", 30, idle_s=5))
    outcome = plan(full, ask(50), NOW_S)
    assert (evicted(outcome), shrunk(outcome)) == (["b"], {"a": 20})


def test_what_is_on_its_way_back_is_waited_for_and_asked_for_once() -> None:
    full = card(cached("a", 60, 30, giving=30 * GIB), awake("b", 40))
    outcome = plan(full, ask(30), NOW_S)
    assert (evicted(outcome), shrunk(outcome)) == ([], {})
    assert isinstance(outcome, Wait)
    assert outcome.reason == "a on the way to make room"
    assert evicted(plan(full, ask(40), NOW_S)) == ["b"]


def test_who_gave_less_than_it_had_said_is_asked_again_later() -> None:
    later_s = NOW_S + 0.2
    mean = cached("a", 100, 30, busy=True, spare_from_s=later_s)
    outcome = plan(card(mean), ask(20), NOW_S)
    assert isinstance(outcome, Wait)
    assert (shrunk(outcome), outcome.until_s) == ({}, later_s)
    assert shrunk(plan(card(mean), ask(20), later_s)) == {"a": 20}


def test_pinned_cache_that_grew_is_no_reason_why_another_never_fits() -> None:
    pinned = replace(
        cached("a", 90, 60, busy=True, terms=Terms(pin=True)), kv=KvNow(60 * GIB, grown=60 * GIB)
    )
    assert isinstance(plan(card(pinned), ask(60), NOW_S), Wait)
    outcome = plan(card(pinned), ask(71), NOW_S)
    assert isinstance(outcome, Refuse)
    assert not outcome.ever


MORE = ask(10, "a", grows=True, waits=False)


def full_beside(neighbour: Tenant, **terms: object) -> Card:
    """`a` has the rest of the card, and wants more."""
    taken = 100 - (neighbour.held + neighbour.residue) // GIB
    return card(awake("a", taken, busy=True, terms=Terms(**terms)), neighbour)  # type: ignore[arg-type]


def slept_for_growth(outcome: object) -> list[Evict]:
    assert isinstance(outcome, Refuse), outcome
    assert (outcome.ever, outcome.grows, outcome.shrink) == (True, True, ())
    return list(outcome.evict)


def test_growth_gets_what_is_free() -> None:
    assert plan(card(awake("a", 80), awake("b", 10)), MORE, NOW_S) == Grant()


@pytest.mark.parametrize(
    ("preempt", "idle_s"),
    [(Preempt.FREEZE, GROWTH_QUIET_S), (Preempt.DRAIN, RECENT_S), (Preempt.NEVER, RECENT_S)],
)
def test_growth_has_those_sleep_who_were_quiet_for_long(preempt: Preempt, idle_s: float) -> None:
    """Who wakes next has its room back sooner where the other can be frozen."""
    brief = full_beside(awake("b", 20, idle_s=idle_s - 0.1), preempt=preempt)
    assert slept_for_growth(plan(brief, MORE, NOW_S)) == []
    long = full_beside(awake("b", 20, idle_s=idle_s), preempt=preempt)
    (evict,) = slept_for_growth(plan(long, MORE, NOW_S))
    assert (evict.tenant, evict.mode, evict.cause, evict.deep) == ("b", None, Cause.IDLE, False)
    assert evict.reason == f"10.00 GiB of KV cache for a; idle {idle_s:.1f} s"


@pytest.mark.parametrize(
    "changes",
    [
        {"busy": True},
        {"moving": True},
        {"leaving": True},
        {"terms": Terms(pin=True)},
        {"terms": Terms(priority=1)},
        {"terms": Terms(min_awake_s=51)},
        {"spared_until_s": NOW_S + 1},
    ],
)
def test_growth_has_nobody_else_sleep(changes: dict[str, object]) -> None:
    neighbour = awake("b", 20, idle_s=1000, **changes)
    full = full_beside(neighbour, preempt=Preempt.FREEZE)
    assert slept_for_growth(plan(full, MORE, NOW_S)) == []


def test_growth_has_no_more_sleep_than_it_takes() -> None:
    idle = (awake("b", 20, idle_s=50), awake("c", 20, idle_s=40), cached("d", 20, 4))
    full = card(awake("a", 40, busy=True), *idle)
    assert [e.tenant for e in slept_for_growth(plan(full, MORE, NOW_S))] == ["b"]
    outcome = plan(full, replace(MORE, size=23 * GIB), NOW_S)
    assert isinstance(outcome, Refuse)
    assert [evict.tenant for evict in outcome.evict] == ["b"]
    assert shrunk(outcome) == {"d": 3}
    pair = card(awake("a", 50, busy=True), awake("b", 25, idle_s=50), awake("c", 25, idle_s=40))
    everybody = slept_for_growth(plan(pair, replace(MORE, size=40 * GIB), NOW_S))
    assert [evict.tenant for evict in everybody] == ["b", "c"]
    assert slept_for_growth(plan(pair, replace(MORE, size=51 * GIB), NOW_S)) == []


@pytest.mark.parametrize(("quiet_s", "expected"), [(RECENT_S - 0.1, []), (RECENT_S, ["b"])])
def test_growth_has_sleepers_sleep_deep_that_nobody_asks(
    quiet_s: float, expected: list[str]
) -> None:
    asleep = replace(sleeper("b"), residue=20 * GIB, quiet_since_s=NOW_S - quiet_s)
    found = slept_for_growth(plan(full_beside(asleep, preempt=Preempt.FREEZE), MORE, NOW_S))
    assert [evict.tenant for evict in found] == expected
    assert all(evict.deep and evict.cause is Cause.ASLEEP for evict in found)


def test_growth_waits_for_what_is_on_its_way() -> None:
    idle = awake("b", 20, idle_s=1000), awake("c", 20, idle_s=1000, leaving=True)
    full = card(awake("a", 60, busy=True), *idle)
    assert slept_for_growth(plan(full, MORE, NOW_S)) == []


def test_growth_has_idle_ones_give_back_and_no_busy_ones() -> None:
    idle, busy = cached("b", 20, 10), cached("b", 20, 10, busy=True)
    assert shrunk(plan(card(awake("a", 80), idle), MORE, NOW_S)) == {"b": 10}
    assert shrunk(plan(card(awake("a", 80), busy), MORE, NOW_S)) == {}


def test_growth_comes_behind_who_has_nothing_yet() -> None:
    older = ask(10, "a", waited_s=5, grows=True, waits=False)
    assert in_order([older, ask()], card(awake("a")), NOW_S) == [ask(), older]
    claimed = card(awake("a", 80), claimed=15 * GIB)
    assert isinstance(plan(claimed, older, NOW_S), Refuse)


# --- who makes room ---


def test_the_longest_idle_sleeps_first() -> None:
    full = card(awake("a", idle_s=5), awake("b", idle_s=9), awake("c", idle_s=7))
    assert evicted(plan(full, ask(), NOW_S)) == ["b"]


def test_idle_time_is_weighed_by_what_the_wake_costs() -> None:
    small, large = awake("small", 30, idle_s=8), awake("large", 60, idle_s=10)
    assert evicted(plan(card(small, large), ask(), NOW_S)) == ["small"]


def test_nobody_sleeps_who_need_not() -> None:
    """The one that is idle longest is too small, so a larger one sleeps as well: then that alone is enough."""
    full = card(awake("small", 20, idle_s=20), awake("large", 80, idle_s=1))
    assert evicted(plan(full, ask(60), NOW_S)) == ["large"]


def test_several_sleep_where_one_is_not_enough() -> None:
    full = card(awake("a", 30, idle_s=3), awake("b", 30, idle_s=2), awake("c", 40, idle_s=1))
    assert evicted(plan(full, ask(60), NOW_S)) == ["a", "b"]


def test_nobody_sleeps_in_vain() -> None:
    """All that may sleep do not make enough room."""
    full = card(awake("a", 30), awake("b", 70, busy=True))
    outcome = plan(full, ask(50), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert outcome.reason == "a, b may have to make room"
    assert outcome.turn_s == outcome.until_s == NOW_S + 5


def test_lower_priority_sleeps_first() -> None:
    high = awake("high", idle_s=40, terms=Terms(priority=1))
    full = card(high, awake("low", idle_s=1), awake("c", 40, idle_s=0, busy=True))
    assert evicted(plan(full, ask(), NOW_S)) == ["low"]


def test_pinned_never_sleeps() -> None:
    full = card(awake("pinned", 60, terms=Terms(pin=True)), awake("b", 40, busy=True))
    assert evicted(plan(full, ask(), NOW_S)) == []


def test_nobody_sleeps_before_min_awake_s() -> None:
    young = awake("young", 100, awake_since_s=NOW_S - 0.4, terms=Terms(min_awake_s=1.0))
    outcome = plan(card(young), ask(), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert outcome.until_s == pytest.approx(NOW_S + 0.6)
    assert evicted(plan(card(young), ask(), NOW_S + 0.6)) == ["young"]


def test_evicted_before_its_first_request() -> None:
    """llama.cpp #28698: a model that was just loaded went before its own request had reached it."""
    new = awake("woken", 100, idle_s=0, awake_since_s=NOW_S - 2, reached=False)
    outcome = plan(card(new), ask(), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    # Its client may have left, so not for ever.
    assert outcome.until_s == NOW_S - 2 + UNREACHED_S


@pytest.mark.parametrize(
    ("patience_s", "cut_short", "turn_s"),
    [(30, 0, 5), (30, 1, 10), (30, 2, 15), (30, 9999, 15), (6, 3, 5), (200, 3, 40)],
)
def test_turn_that_gave_nobody_a_token_is_longer_the_next_time(
    patience_s: float, cut_short: int, turn_s: float
) -> None:
    """A prompt that takes longer than that is computed some time; who asks waits for half of its limit at most."""
    slow = awake("slow", 100, busy=True, terms=Terms(preempt=Preempt.FREEZE), cut_short=cut_short)
    slow = replace(slow, awake_since_s=NOW_S, reached=False)
    wants = ask(limit_s=NOW_S + patience_s)
    outcome = plan(card(slow), wants, NOW_S + 1)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert outcome.until_s == NOW_S + turn_s
    assert evicted(plan(card(slow), wants, NOW_S + turn_s)) == ["slow"]


def test_who_was_frozen_in_the_middle_has_nobody_sleep_who_was_asked_a_moment_ago() -> None:
    """Its next request would have to wait for another swap, and that one's first token with it."""
    quiet, asked = awake("quiet", 50, idle_s=QUIET_S), awake("asked", 50, idle_s=QUIET_S / 2)
    assert evicted(plan(resuming(quiet, asked), ask(), NOW_S)) == ["quiet"]
    outcome = plan(resuming(replace(asked, held=100 * GIB)), ask(), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert outcome.until_s == pytest.approx(NOW_S + QUIET_S / 2)
    # For a first token it does sleep.
    assert evicted(plan(card(replace(asked, held=100 * GIB)), ask(), NOW_S)) == ["asked"]


def test_who_was_frozen_in_the_middle_freezes_others_no_sooner_than_it_would_drain_them() -> None:
    busy = awake("busy", 100, busy=True, terms=Terms(preempt=Preempt.FREEZE))
    assert evicted(plan(card(busy), ask(waited_s=1), NOW_S)) == ["busy"]
    assert evicted(plan(resuming(busy), ask(waited_s=4.9), NOW_S)) == []
    assert evicted(plan(resuming(busy), ask(waited_s=5), NOW_S)) == ["busy"]


def test_who_moves_makes_no_room() -> None:
    assert evicted(plan(card(awake("a", 100, moving=True)), ask(waited_s=15), NOW_S)) == []


# --- who sleeps deep ---


def asleep(name: str, residue: int = 5, **fields: object) -> Tenant:
    tenant = Tenant(name, name, Terms(), residue=residue * GIB)
    return replace(tenant, **fields)  # type: ignore[arg-type]


def test_sleepers_sleep_deep_where_no_idle_model_is_enough() -> None:
    """To sleep deep takes twenty times as long as to sleep, and what is given back is small."""
    full = card(awake("a", 60), awake("b", 30, busy=True), asleep("c"), asleep("d"))
    assert evicted(plan(full, ask(60), NOW_S)) == ["a"]
    outcome = plan(full, ask(65), NOW_S)
    assert isinstance(outcome, Wait)
    assert [(e.tenant, e.deep, e.cause) for e in outcome.evict] == [
        ("a", False, Cause.IDLE),
        ("c", True, Cause.ASLEEP),
    ]


def test_sleepers_sleep_deep_before_anybody_busy_sleeps() -> None:
    full = card(awake("a", 90, busy=True), asleep("b"), asleep("c"))
    assert evicted(plan(full, ask(10, waited_s=6), NOW_S)) == ["b", "c"]


@pytest.mark.parametrize(
    ("neighbour", "chosen"),
    [
        ({"terms": Terms(preempt=Preempt.FREEZE)}, ["a"]),
        ({"terms": Terms(preempt=Preempt.FREEZE), "moving": True}, []),  # until it has settled
        ({"terms": Terms(preempt=Preempt.FREEZE, priority=1)}, ["b", "c"]),  # gives no way
        ({"terms": Terms(preempt=Preempt.FREEZE, priority=1), "moving": True}, ["b", "c"]),
        ({}, ["b", "c"]),  # drained, which may take long
    ],
)
def test_sleepers_with_recent_requests_are_spared_where_a_model_can_be_frozen(
    neighbour: dict[str, object], chosen: list[str]
) -> None:
    hot = awake("a", 90, busy=True, **neighbour)
    quiet_s = NOW_S - RECENT_S
    full = card(hot, *(asleep(name, quiet_since_s=quiet_s + 1) for name in "bc"))
    assert evicted(plan(full, ask(10, waited_s=1.5), NOW_S)) == chosen
    long_asleep = card(hot, *(asleep(name, quiet_since_s=quiet_s) for name in "bc"))
    assert evicted(plan(long_asleep, ask(10, waited_s=1.5), NOW_S)) == ["b", "c"]


def test_who_falls_asleep_for_somebody_sleeps_deep_next_if_that_is_what_it_takes() -> None:
    victim = awake("a", 95, residue=5 * GIB)
    assert evicted(plan(card(victim), ask(100), NOW_S)) == ["a"]
    fallen_asleep = asleep("a")
    outcome = plan(card(fallen_asleep), ask(100), NOW_S)
    assert isinstance(outcome, Wait)
    assert [(e.tenant, e.deep) for e in outcome.evict] == [("a", True)]


def test_kept_layers_go_with_a_deep_sleep() -> None:
    sleeper = asleep("a", held=10 * GIB, kept=10 * GIB)
    assert sleeper.frees == 15 * GIB
    assert evicted(plan(card(sleeper), ask(100), NOW_S)) == ["a"]


@pytest.mark.parametrize(
    "why",
    [
        {"moving": True},
        {"busy": True},
        {"asks": True},
        {"leaving": True},
        {"spared_until_s": NOW_S + 1},
    ],
)
def test_some_cannot_sleep_deep_now(why: dict[str, object]) -> None:
    outcome = plan(card(awake("b", 80), asleep("a", 20, **why)), ask(100), NOW_S)
    assert "a" not in evicted(outcome)


def test_deep_sleep_makes_no_place_among_those_that_may_be_awake() -> None:
    full = card(awake("a", 1, busy=True), asleep("b"), max_awake=1)
    assert evicted(plan(full, ask(1), NOW_S)) == []


def test_what_only_deep_sleeps_leave_room_for_fits() -> None:
    assert evicted(plan(card(*(asleep(str(i), 1) for i in range(9))), ask(92), NOW_S)) == ["0"]
    pinned = awake("p", 10, residue=GIB, terms=Terms(pin=True))
    assert isinstance(plan(card(pinned), ask(90), NOW_S), Refuse)


# --- busy models ---


def test_busy_models_make_room_after_a_quarter_of_the_wait() -> None:
    full = card(awake("a", 50, busy=True), awake("b", 50, busy=True))
    assert evicted(plan(full, ask(waited_s=4.9), NOW_S)) == []
    outcome = plan(full, ask(waited_s=5), NOW_S)
    assert isinstance(outcome, Wait)
    (evict,) = outcome.evict
    assert (evict.tenant, evict.mode, evict.cause) == ("a", SleepMode.WAIT, Cause.BUSY)


@pytest.mark.parametrize(("patience_s", "after_s"), [(20.0, 0.1), (1e6, 0.1), (0.2, 0.05)])
def test_models_that_can_be_frozen_make_room_at_once_but_for_a_moment(
    patience_s: float, after_s: float
) -> None:
    full = card(awake("a", 100, busy=True, terms=Terms(preempt=Preempt.FREEZE)))
    for waited_s, asked in ((0.9 * after_s, []), (1.1 * after_s, ["a"])):
        ends_s = NOW_S - waited_s + patience_s
        outcome = plan(full, ask(waited_s=waited_s, limit_s=ends_s), NOW_S)
        assert evicted(outcome) == asked


@pytest.mark.parametrize(
    ("preempt", "mode"), [(Preempt.DRAIN, SleepMode.WAIT), (Preempt.FREEZE, SleepMode.KEEP)]
)
def test_a_busy_model_suffers_what_its_configuration_says(
    preempt: Preempt, mode: SleepMode
) -> None:
    busy = awake("a", 100, busy=True, terms=Terms(preempt=preempt))
    outcome = plan(card(busy), ask(waited_s=6), NOW_S)
    assert isinstance(outcome, Wait)
    assert [e.mode for e in outcome.evict] == [mode]


def test_never_means_never() -> None:
    busy = awake("a", 100, busy=True, terms=Terms(preempt=Preempt.NEVER))
    outcome = plan(card(busy), ask(waited_s=6), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert outcome.reason == "a must end first"


def test_a_busy_model_gives_way_to_none_of_a_lower_priority() -> None:
    busy = awake("a", 100, busy=True, terms=Terms(priority=1))
    assert evicted(plan(card(busy), ask(waited_s=6), NOW_S)) == []


def test_idle_models_go_before_busy_ones() -> None:
    full = card(awake("busy", 50, busy=True), awake("idle", 50, idle_s=0.1))
    assert evicted(plan(full, ask(waited_s=6), NOW_S)) == ["idle"]


# --- who drained for nobody ---

DRAINS: dict[str, object] = {"busy": True, "leaving": True, "drains": True}


def test_drain_ends_when_nobody_waits_any_more() -> None:
    draining = card(awake("a", 100, **DRAINS), awake("frozen", 0, busy=True, leaving=True))
    assert stays(draining, []) == [Stay("a", "nobody waits for room any more")]
    strangers = replace(draining, foreign=50 * GIB)
    assert [stay.tenant for stay in stays(strangers, [])] == ["a"]


def test_drain_goes_on_for_whoever_needs_its_room() -> None:
    draining = card(awake("a", 100, **DRAINS), claimed=30 * GIB, claimed_slots=1)
    assert stays(draining, [ask()]) == []
    place = card(awake("a", 10, **DRAINS), max_awake=1, claimed=30 * GIB, claimed_slots=1)
    assert stays(place, [ask()]) == []


def test_drain_ends_when_who_waits_finds_room_elsewhere() -> None:
    tenants = awake("a", 50, **DRAINS), awake("b", 50, **DRAINS)
    for claimed, stay in ((50, ["a"]), (51, [])):
        draining = card(*tenants, claimed=claimed * GIB, claimed_slots=1)
        assert [each.tenant for each in stays(draining, [ask(claimed)])] == stay
    first = awake("b", 50, **DRAINS, terms=Terms(priority=1))
    draining = card(tenants[0], first, claimed=50 * GIB, claimed_slots=1)
    asks = [ask(50), ask(1, "b")]  # somebody of b's priority
    assert stays(draining, asks) == [Stay("b", "who waits has room without it")]


def test_drain_ends_when_all_who_wait_have_a_lower_priority() -> None:
    busy = awake("a", 100, **DRAINS, terms=Terms(priority=1))
    draining = card(busy, claimed=30 * GIB, claimed_slots=1)
    assert stays(draining, [ask()]) == [Stay("a", "who waits now has a lower priority")]


def test_nobody_who_stays_is_asked_again_at_once() -> None:
    """What a plan asks for is not taken back, nor is that asked for which was taken back."""
    for size in range(10, 101, 10):
        wanted = ask(size, waited_s=6)
        full = card(awake("a", 40, busy=True), awake("b", 60, busy=True), foreign=-5 * GIB)
        ordered = evicted(plan(full, wanted, NOW_S))
        tenants = [replace(t, **DRAINS) if t.name in ordered else t for t in full.tenants]  # type: ignore[arg-type]
        waits = replace(full, tenants=tuple(tenants), claimed=size * GIB, claimed_slots=1)
        assert stays(waits, [wanted]) == []
        all_drain = tuple(replace(t, **DRAINS) if t.awake else t for t in full.tenants)  # type: ignore[arg-type]
        staying = {stay.tenant for stay in stays(replace(waits, tenants=all_drain), [wanted])}
        after = [replace(t, leaving=t.leaving and t.name not in staying) for t in all_drain]
        outcome = plan(replace(full, tenants=tuple(after)), wanted, NOW_S)
        assert isinstance(outcome, Grant) or evicted(outcome) == []


# --- who waits ---


def test_victim_on_its_way_is_waited_for() -> None:
    """Ollama #17408: nobody else is asked, and a victim that lives again is seen at the next look."""
    full = card(awake("a", 50, leaving=True), awake("b", 50))
    outcome = plan(full, ask(40), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert "a on the way" in outcome.reason
    revived = card(awake("a", 50, busy=True, spared_until_s=NOW_S + 0.2), awake("b", 50))
    assert evicted(plan(revived, ask(40), NOW_S)) == ["b"]


def test_memory_that_is_not_back_yet_is_not_given() -> None:
    """llama.cpp #23668: the next one was loaded before the last one's memory was free."""
    ending = awake("ending", 80, gone=True, residue=5 * GIB)
    outcome = plan(card(ending), ask(40), NOW_S)
    assert isinstance(outcome, Wait)
    assert not outcome.evict


def test_all_that_a_lost_replica_has_is_on_its_way_back_and_nobody_sleeps_for_it() -> None:
    ending = awake("ending", 60, gone=True, kept=30 * GIB)
    outcome = plan(card(ending, awake("idle", 40)), ask(60), NOW_S)
    assert evicted(outcome) == []
    assert isinstance(outcome, Wait)
    assert "ending on the way" in outcome.reason


def test_claims_of_those_before_come_first() -> None:
    """Nobody small overtakes for ever who is large."""
    free = card(awake("a", 50, busy=True), claimed=60 * GIB)
    assert isinstance(plan(free, ask(30), NOW_S), Wait)


def test_limit_of_the_wait_ends_it_with_the_reason() -> None:
    outcome = plan(
        card(awake("a", 100, busy=True, terms=Terms(pin=False, preempt=Preempt.NEVER))),
        ask(waited_s=20),
        NOW_S,
    )
    assert isinstance(outcome, Refuse)
    assert outcome.ever
    assert outcome.reason == (
        "no room for 30.00 GiB within 20 s (sharing.max_wait_s): a must end first"
    )


def test_who_does_not_wait_is_refused_at_once() -> None:
    outcome = plan(card(awake("a", 100)), ask(waits=False), NOW_S)
    assert outcome == Refuse("30.00 GiB do not fit beside who is awake: 0.00 MiB are free", True)


# --- what never fits ---


def test_model_that_never_fits_is_refused_at_once() -> None:
    """Ollama #18282: one that could not fit had all others evicted, in a loop."""
    outcome = plan(card(awake("a", 50)), ask(101), NOW_S)
    assert outcome == Refuse(
        "new takes 101.00 GiB, which never fit: the card has 100.00 GiB for models (card.memory_budget)",
        ever=False,
    )


def test_sleepers_that_keep_memory_count_and_have_to_give_it_back() -> None:
    """vLLM #47654: a neighbour that slept badly kept its memory, and the others' wakes failed with an OOM."""
    bad = Tenant("bad", "bad", Terms(), held=30 * GIB, kept=30 * GIB, residue=5 * GIB)
    assert isinstance(plan(card(bad), ask(65), NOW_S), Grant)
    outcome = plan(card(bad), ask(66), NOW_S)
    assert isinstance(outcome, Wait)
    assert [(e.tenant, e.deep) for e in outcome.evict] == [("bad", True)]


def test_what_pinned_models_leave_is_all_there_is() -> None:
    outcome = plan(card(awake("p", 60, terms=Terms(pin=True))), ask(41), NOW_S)
    assert isinstance(outcome, Refuse)
    assert not outcome.ever
    assert "beside p (sharing.pin)" in outcome.reason
    assert "40.00 GiB of which these leave" in outcome.reason


# --- how many ---


def test_no_more_are_awake_than_may_be() -> None:
    two = card(awake("a", 1, idle_s=3), awake("b", 1, idle_s=8), max_awake=2)
    assert evicted(plan(two, ask(1), NOW_S)) == ["b"]
    assert plan(replace(two, max_awake=3), ask(1), NOW_S) == Grant()


def test_pinned_models_that_are_all_that_may_be_awake() -> None:
    outcome = plan(card(awake("p", 1, terms=Terms(pin=True)), max_awake=1), ask(1), NOW_S)
    assert isinstance(outcome, Refuse)
    assert "card.max_awake_models is 1" in outcome.reason


# --- the order ---


def test_first_come_first_served_among_equals() -> None:
    tenants = card(sleeper("a"), sleeper("b"))
    asks = [ask(tenant="b", waited_s=1), ask(tenant="a", waited_s=2)]
    assert [a.tenant for a in in_order(asks, tenants, NOW_S)] == ["a", "b"]


def test_priority_comes_first_until_somebody_has_waited_for_half_of_the_limit() -> None:
    tenants = card(sleeper("high", priority=5), sleeper("low"))
    high, low = ask(tenant="high"), ask(tenant="low", waited_s=9.9)
    assert [a.tenant for a in in_order([low, high], tenants, NOW_S)] == ["high", "low"]
    assert [a.tenant for a in in_order([low, high], tenants, NOW_S + 0.1)] == ["low", "high"]


def test_first_tokens_come_before_who_was_frozen_in_the_middle_until_that_is_late() -> None:
    tenants = card(replace(sleeper("frozen"), resumes=True))
    frozen, new = ask(tenant="frozen", waited_s=9.9), ask(tenant="new")
    assert [a.tenant for a in in_order([frozen, new], tenants, NOW_S)] == ["new", "frozen"]
    assert [a.tenant for a in in_order([frozen, new], tenants, NOW_S + 0.1)] == ["frozen", "new"]


def test_frozen_ones_of_a_higher_priority_come_before_first_tokens() -> None:
    tenants = card(replace(sleeper("frozen", priority=1), resumes=True))
    asks = [ask(), ask(tenant="frozen")]
    assert [a.tenant for a in in_order(asks, tenants, NOW_S)] == ["frozen", "new"]


def test_every_wait_ends() -> None:
    for outcome in (
        plan(card(awake("a", 100, busy=True)), ask(), NOW_S),
        plan(card(awake("a", 100, leaving=True)), ask(), NOW_S),
        plan(card(awake("a", 100, terms=Terms(preempt=Preempt.NEVER), busy=True)), ask(), NOW_S),
    ):
        assert isinstance(outcome, Wait)
        assert outcome.until_s < math.inf
        assert outcome.reason


def test_reason_names_who_and_what_for() -> None:
    outcome = plan(card(awake("a", 100, idle_s=12.34)), ask(), NOW_S)
    assert isinstance(outcome, Wait)
    assert outcome.evict == (Evict("a", None, Cause.IDLE, "30.00 GiB for new; idle 12.3 s", "new"),)
