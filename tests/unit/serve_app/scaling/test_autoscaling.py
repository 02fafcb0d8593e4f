"""The sleep-aware policy: what it decides for a fleet, and that any fleet has an answer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocol import ReplicaState
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.config.errors import ConfigError, validate
from serve_app.scaling.cards import CardReport, Crowding
from serve_app.scaling.decide import Decision, PolicyState, Why, decide
from serve_app.scaling.fleet import Fleet, ReplicaReport

CONFIG = AutoscalingConfig(
    min_replicas=1,
    max_replicas=6,
    target_ongoing_requests=10,
    upscale_delay_s=30,
    downscale_delay_s=600,
    downscale_to_zero_delay_s=900,
    image_ttl_s=3600,
)
TO_ZERO = CONFIG.model_copy(update={"min_replicas": 0})


def awake(name: str, in_flight: float = 0.0, **told: Any) -> ReplicaReport:
    return ReplicaReport(name, ReplicaState.AWAKE, in_flight, **told)


def asleep(name: str, idle_s: float = 100.0, **told: Any) -> ReplicaReport:
    return ReplicaReport(name, ReplicaState.ASLEEP, idle_s=idle_s, **told)


def waking(name: str, waiting: float, **told: Any) -> ReplicaReport:
    return ReplicaReport(name, ReplicaState.WAKING, waiting_for_wake=waiting, **told)


def fleet(*replicas: ReplicaReport, now_s: float = 0.0, **told: Any) -> Fleet:
    return Fleet(now_s, told.pop("target", len(replicas)), replicas, **told)


def after(
    seconds: float,
    there: Fleet,
    config: AutoscalingConfig = CONFIG,
    state: PolicyState | None = None,
) -> Decision:
    """The decision once a fleet has been as it is for so long."""
    start_s = 0.0 if state is None else state.now_s
    _, state = decide(replace(there, now_s=start_s), config, state)
    return decide(replace(there, now_s=start_s + seconds), config, state)[0]


# --- wake before create ---


@pytest.mark.parametrize(
    ("replicas", "queued", "wanted", "why"),
    [
        ([awake("a", 8)], 0, 1, Why.STEADY),
        ([awake("a", 10), asleep("b")], 8, 2, Why.WAKE),
        ([awake("a", 10), asleep("b"), asleep("c")], 18, 3, Why.WAKE),
        ([awake("a", 10), asleep("b")], 12, 3, Why.CREATE),
        ([awake("a", 10)], 8, 2, Why.CREATE),
        ([awake("a", 10), waking("b", 0, wake_s=5)], 8, 2, Why.STEADY),
        ([awake("a", 30.000001), awake("b"), awake("c")], 0, 3, Why.STEADY),
        ([awake("a", 80)], 0, 6, Why.CREATE),
    ],
)
def test_replicas_that_sleep_are_capacity(
    replicas: list[ReplicaReport], queued: float, wanted: int, why: Why
) -> None:
    decision = after(30, fleet(*replicas, queued=queued))
    assert (decision.replicas, decision.why) == (wanted, why)


def test_what_starts_is_capacity() -> None:
    assert after(30, fleet(awake("a", 18), target=2)).replicas == 2
    assert after(30, fleet(awake("a", 28), target=2)).replicas == 3


def test_one_without_memory_to_wake_into_is_no_capacity() -> None:
    able = asleep("b", device_free_bytes=30e9, wake_bytes=24e9)
    unable = replace(able, device_free_bytes=10e9)
    assert after(30, fleet(awake("a", 10), able, queued=8)).why is Why.WAKE
    assert after(30, fleet(awake("a", 10), unable, queued=8)).replicas == 3


def test_one_that_an_operator_holds_asleep_is_no_capacity() -> None:
    assert after(30, fleet(awake("a", 10), asleep("b", held=True), queued=8)).replicas == 3


def test_hold_of_all_is_no_reason_to_create_more_that_would_be_held() -> None:
    config = CONFIG.model_copy(update={"min_replicas": 2})
    held = asleep("a", held=True), replace(awake("b", 3), state=ReplicaState.DRAINING, held=True)
    for there in (held, (*held, ReplicaReport("c", None))):
        decision = after(1e5, fleet(*there, target=len(there) + 1), config)
        assert (decision.replicas, decision.why) == (len(there) + 1, Why.HELD)
    assert after(1e5, fleet(asleep("a", held=True)), TO_ZERO).why is Why.TO_ZERO


def test_create_waits_for_the_delay_and_starts_over_when_demand_falls() -> None:
    busy, calm = fleet(awake("a", 20)), fleet(awake("a", 5))
    state = PolicyState()
    found = []
    for now_s, there in [(0, busy), (29, busy), (30, calm), (31, busy), (60, busy), (61, busy)]:
        decision, state = decide(replace(there, now_s=now_s), CONFIG, state)
        found.append((decision.replicas, decision.why))
    wait = (1, Why.DELAY_UP)
    assert found == [wait, wait, (1, Why.STEADY), wait, wait, (2, Why.CREATE)]


def test_create_waits_again_after_fewer_were_wanted_and_after_a_create() -> None:
    busy, calm = fleet(awake("a", 12), awake("b", 13)), fleet(awake("a", 5), awake("b"))
    grown = fleet(awake("a", 20), awake("b", 20), target=3)
    state = PolicyState()
    found = []
    steps = [(0, busy), (20, calm), (29, busy), (31, busy), (59, busy), (60, grown), (61, grown)]
    for now_s, there in steps:
        decision, state = decide(replace(there, now_s=now_s), CONFIG, state)
        found.append(decision.why)
    wait = Why.DELAY_UP
    assert found == [wait, Why.DELAY_DOWN, wait, wait, Why.CREATE, wait, wait]


def test_more_than_allowed_is_told() -> None:
    six = [awake(name, 20) for name in "abcdef"]
    decision = after(30, fleet(*six))
    assert (decision.replicas, decision.why) == (6, Why.LIMIT)
    assert "max_replicas is 6" in decision.reason


# --- waiting for a wake ---


def test_waiting_for_a_wake_is_no_demand() -> None:
    decision = after(30, fleet(waking("a", 50, wake_s=5)))
    assert (decision.replicas, decision.why) == (1, Why.WAKE)


def test_waiting_for_a_wake_that_takes_too_long_is() -> None:
    stuck = fleet(waking("a", 15, wake_s=0.3))
    _, state = decide(stuck, CONFIG, PolicyState())
    _, state = decide(replace(stuck, now_s=10.1), CONFIG, state)
    decision, _ = decide(replace(stuck, now_s=41.0), CONFIG, state)
    assert (decision.replicas, decision.why) == (3, Why.CREATE)


def test_waiting_for_room_on_a_shared_card_creates_none() -> None:
    """Others make room there, one after the other, for as long as requests come."""
    waits = fleet(waking("a", 15, wake_s=0.3, card=CardReport(1, 1, 0, 10, 0.1)))
    state = PolicyState()
    for now_s in (0.0, 10.1, 41.0, 200.0):
        decision, state = decide(replace(waits, now_s=now_s), CONFIG, state)
        assert (decision.replicas, decision.why) == (1, Why.WAKE)


def test_a_wake_that_is_always_slow_is_given_its_time() -> None:
    slow = fleet(waking("a", 15, wake_s=20.0))
    assert after(190, slow).replicas == 1
    state = PolicyState()
    for now_s in (0, 201, 240):
        decision, state = decide(replace(slow, now_s=now_s), CONFIG, state)
    assert decision.replicas == 3


# --- the pool ---


def test_pool_is_kept_beyond_those_that_serve() -> None:
    config = CONFIG.model_copy(update={"standby_replicas": 2})
    decision = after(30, fleet(awake("a", 8)), config)
    assert (decision.replicas, decision.why) == (3, Why.REFILL)
    assert after(30, fleet(awake("a", 8), asleep("b"), asleep("c")), config).why is Why.STEADY
    assert after(30, fleet(awake("a", 9), awake("b", 9), asleep("c")), config).replicas == 4


def test_one_that_cannot_wake_is_no_reason_to_enlarge_the_pool() -> None:
    config = CONFIG.model_copy(update={"standby_replicas": 1})
    held = asleep("b", held=True)
    assert after(1e5, fleet(awake("a", 8), held), config).replicas == 2


# --- down ---


def test_down_after_the_delay_the_longest_asleep_first() -> None:
    there = fleet(awake("a", 5), asleep("b", 50), asleep("c", 700), asleep("d", 90))
    assert after(599, there).why is Why.DELAY_DOWN
    decision = after(600, there)
    assert (decision.replicas, decision.why) == (1, Why.REMOVE)
    assert decision.remove_first == ("c", "d", "b")


def test_down_to_the_most_that_was_wanted_meanwhile() -> None:
    state = PolicyState()
    names = ("b", "c", "d")
    for now_s, load in [(0, 5), (300, 15), (310, 5), (600, 5)]:
        there = fleet(awake("a", load), *map(asleep, names), now_s=now_s)
        decision, state = decide(there, CONFIG, state)
    assert (decision.replicas, decision.why) == (2, Why.REMOVE)


def test_each_step_down_has_its_delay() -> None:
    state = PolicyState()
    there = [awake("a", 15), *map(asleep, "bcd")]
    found = []
    for now_s, replicas in [(0, there), (600, there), (601, there[:2]), (602, there[:1])]:
        load = 5.0 if now_s > 600 else 15.0
        seen = fleet(awake("a", load), *replicas[1:], now_s=now_s)
        decision, state = decide(seen, CONFIG, state)
        found.append((decision.replicas, decision.why))
    assert found == [(4, Why.WAKE), (2, Why.REMOVE), (2, Why.DELAY_DOWN), (1, Why.STEADY)]


def test_asleep_goes_before_awake_and_busy_never() -> None:
    there = fleet(awake("a"), awake("b", 5), asleep("c"), awake("d", 1))
    decision = after(600, there)
    assert decision.remove_first == ("c", "a")
    assert decision.replicas == 2, "one is enough, but two are at work"


def test_last_awake_stays_while_requests_run() -> None:
    others = (waking("b", 3, wake_s=100), asleep("c"))
    decision = after(600, fleet(awake("a"), *others))
    assert (decision.replicas, decision.remove_first) == (2, ("c",))
    assert after(600, fleet(awake("a"), others[0])).why is Why.BUSY
    assert after(600, fleet(awake("a"), awake("d"), others[0])).replicas == 2


def test_nobody_goes_when_serve_would_stop_one_at_work() -> None:
    replicas = (asleep("a"), asleep("b"), awake("c", 5))
    newest_busy = fleet(*replicas, stop_order=("c", "b", "a"))
    decision = after(600, newest_busy)
    assert (decision.replicas, decision.why, decision.remove_first) == (3, Why.BUSY, ())
    newest_asleep = fleet(*replicas, stop_order=("b", "c", "a"))
    decision = after(600, newest_asleep)
    assert (decision.replicas, decision.remove_first) == (2, ("b",))


def test_one_that_the_stop_order_does_not_know_keeps_all() -> None:
    there = fleet(asleep("a"), asleep("b"), awake("c", 5), stop_order=("b", "a"))
    assert after(600, there).why is Why.BUSY


def test_what_starts_goes_first() -> None:
    decision = after(600, fleet(awake("a", 5), asleep("b"), target=4))
    assert (decision.replicas, decision.remove_first) == (1, ("b",))
    decision = after(600, fleet(awake("a", 15), asleep("b"), asleep("c"), target=5))
    assert (decision.replicas, decision.remove_first) == (2, ("b",))
    decision = after(600, fleet(awake("a", 5), awake("b", 5), target=3))
    assert (decision.replicas, decision.remove_first) == (2, ())


# --- zero ---


def test_to_zero_after_its_own_delay() -> None:
    there = fleet(asleep("a"))
    assert after(899, there, TO_ZERO).replicas == 1
    decision = after(900, there, TO_ZERO)
    assert (decision.replicas, decision.why) == (0, Why.TO_ZERO)
    assert decision.remove_first == ("a",)
    assert decision.keep_image


def test_to_zero_takes_the_pool_and_the_last_awake_along() -> None:
    config = TO_ZERO.model_copy(update={"standby_replicas": 1})
    decision = after(900, fleet(awake("a"), asleep("b")), config)
    assert (decision.replicas, set(decision.remove_first)) == (0, {"a", "b"})


@pytest.mark.parametrize("queued", [0.1, 5.0])
def test_not_to_zero_while_anything_waits(queued: float) -> None:
    assert after(9000, fleet(asleep("a"), queued=queued), TO_ZERO).replicas == 1


def test_not_to_zero_where_a_minimum_is_kept() -> None:
    assert after(1e6, fleet(asleep("a"))).replicas == 1


@pytest.mark.parametrize(
    ("empty_s", "kept", "why"), [(3599, True, Why.FROM_IMAGE), (3600, False, Why.FROM_DISK)]
)
def test_image_is_kept_for_its_time_and_the_first_replica_loads_from_it(
    empty_s: float, kept: bool, why: Why
) -> None:
    assert after(empty_s, fleet(), TO_ZERO).keep_image is kept
    _, state = decide(fleet(), TO_ZERO, PolicyState())
    decision, _ = decide(fleet(now_s=empty_s, queued=25), TO_ZERO, state)
    assert (decision.replicas, decision.why) == (3, why), "at once"
    assert decision.keep_image


def test_image_without_a_limit_is_kept_for_good() -> None:
    assert after(1e9, fleet(), TO_ZERO.model_copy(update={"image_ttl_s": None})).keep_image


# --- bounds, and reports that cannot be used ---


@pytest.mark.parametrize(("target", "wanted"), [(0, 1), (9, 6)])
def test_number_outside_the_bounds_is_put_right_at_once(target: int, wanted: int) -> None:
    decision, _ = decide(fleet(target=target), CONFIG)
    assert (decision.replicas, decision.why) == (wanted, Why.BOUNDS)


@pytest.mark.parametrize(
    "report",
    [
        ReplicaReport("b", None),
        ReplicaReport("b", "zombie"),  # type: ignore[arg-type]
        awake("b", math.nan),
        awake("b", -3),
        asleep("b", waiting_for_wake=math.inf),
        asleep("b", age_s=31),
        asleep("b", age_s=math.nan),
    ],
)
def test_one_that_told_nothing_useful_keeps_things_as_they_are(report: ReplicaReport) -> None:
    state = PolicyState()
    for now_s in (0, 10_000):
        decision, state = decide(fleet(awake("a", 5), report, now_s=now_s), TO_ZERO, state)
        assert (decision.replicas, decision.why) == (2, Why.STEADY)
    assert "1 told nothing" in decision.reason


def test_one_alone_that_tells_nothing_is_not_taken_for_quiet() -> None:
    assert after(1e5, fleet(ReplicaReport("a", None)), TO_ZERO).why is Why.STEADY


def test_one_that_is_told_twice_counts_once() -> None:
    assert after(30, fleet(awake("a", 8), awake("a", 8), target=1)).why is Why.STEADY


def test_clock_that_goes_backwards_stands_still() -> None:
    there = fleet(asleep("a"))
    _, state = decide(replace(there, now_s=1000.0), TO_ZERO, PolicyState())
    for now_s in (0.0, math.nan, 1899.0):
        decision, state = decide(replace(there, now_s=now_s), TO_ZERO, state)
        assert decision.replicas == 1
    assert decide(replace(there, now_s=1900.0), TO_ZERO, state)[0].replicas == 0


numbers = st.one_of(st.floats(), st.integers(-5, 100), st.sampled_from([0.0, 5.0, 30.0, 1e308]))
reports = st.builds(
    ReplicaReport,
    replica_id=st.sampled_from("abcdefgh"),
    state=st.one_of(st.none(), st.sampled_from([*ReplicaState, "asleep", "zombie", 3])),
    in_flight=numbers,
    waiting_for_wake=numbers,
    idle_s=numbers,
    wake_s=st.one_of(st.none(), numbers),
    device_free_bytes=st.one_of(st.none(), numbers),
    wake_bytes=st.one_of(st.none(), numbers),
    held=st.booleans(),
    age_s=numbers,
)
fleets = st.builds(
    Fleet,
    now_s=numbers,
    target=st.one_of(st.integers(-3, 12), numbers),
    replicas=st.lists(reports, max_size=5),
    queued=numbers,
    stop_order=st.one_of(st.none(), st.lists(st.sampled_from("abcdefgh"), max_size=9)),
)
configs = st.builds(
    lambda least, pool, more, **rest: AutoscalingConfig(
        min_replicas=least,
        standby_replicas=pool,
        max_replicas=max(1, least + pool + more),
        **rest,
    ),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 4),
    target_ongoing_requests=st.floats(1e-3, 100),
    upscale_delay_s=st.sampled_from([0.0, 30.0]),
    downscale_delay_s=st.sampled_from([0.0, 20.0]),
    downscale_to_zero_delay_s=st.sampled_from([None, 25.0]),
    image_ttl_s=st.sampled_from([None, 0.0, 50.0]),
)


@settings(max_examples=100, derandomize=True)
@given(history=st.lists(fleets, min_size=1, max_size=4), config=configs)
def test_any_fleet_has_a_decision_that_can_be_followed(
    history: Sequence[Fleet], config: AutoscalingConfig
) -> None:
    state, before_s = None, -math.inf
    for there in history:
        decision, state = decide(there, config, state)
        assert config.min_replicas <= decision.replicas <= config.max_replicas
        assert isinstance(decision.replicas, int)
        assert len(set(decision.remove_first)) == len(decision.remove_first)
        told = {report.replica_id: report for report in reversed(there.replicas)}
        for name in decision.remove_first:
            assert told[name].state in tuple(ReplicaState)
            assert told[name].in_flight == 0
            assert told[name].waiting_for_wake == 0
        assert decision.reason
        assert before_s <= state.now_s < math.inf
        before_s = state.now_s


loads = st.floats(0, 1000)


@settings(max_examples=50, derandomize=True)
@given(less=loads, more=loads, sleepers=st.integers(0, 5))
def test_more_requests_never_want_fewer_replicas(less: float, more: float, sleepers: int) -> None:
    less, more = sorted((less, more))
    there = [awake("a", 1), *(asleep(name) for name in "bcdef"[:sleepers])]
    wanted = [after(600, fleet(*there, queued=load)).replicas for load in (less, more)]
    assert wanted[0] <= wanted[1]


# --- cards that swap too much ---

ELSEWHERE = Crowding(True, "a card swaps; another card has room")
NOWHERE = Crowding(False, "a card swaps; no other has room")


@pytest.mark.parametrize(
    ("there", "wanted", "why"),
    [
        (fleet(awake("a"), crowding=ELSEWHERE), 2, Why.SPREAD),
        (fleet(asleep("a"), crowding=ELSEWHERE), 2, Why.SPREAD),
        (fleet(awake("a"), crowding=NOWHERE), 1, Why.CROWDED),
        (fleet(awake("a"), awake("b"), crowding=ELSEWHERE), 3, Why.SPREAD),
        (fleet(awake("a", 18), crowding=ELSEWHERE), 2, Why.CREATE),  # requests want it anyway
        (fleet(*map(awake, "abcdef"), crowding=ELSEWHERE), 6, Why.LIMIT),
        (fleet(awake("a"), target=2, crowding=ELSEWHERE), 2, Why.CROWDED),  # one is on its way
        (fleet(asleep("a", held=True), crowding=ELSEWHERE), 1, Why.HELD),
    ],
)
def test_card_that_swaps_too_much_wants_one_replica_more_where_another_has_room(
    there: Fleet, wanted: int, why: Why
) -> None:
    decision = after(30, there)
    assert (decision.replicas, decision.why) == (wanted, why)
    assert why is Why.HELD or "a card swaps" in decision.reason


def test_one_more_for_a_card_that_swaps_waits_for_the_delay_and_for_news_since_the_last_came() -> (
    None
):
    state = PolicyState()
    found = []
    for now_s, replicas, target in [
        *((0, "a", 1), (29, "a", 1), (30, "a", 1)),  # one is asked for
        *((31, "a", 2), (50, "a", 2)),  # it starts
        *((60, "ab", 2), (79, "ab", 2)),  # what is told of swaps is from before it came
        *((80, "ab", 2), (110, "ab", 2)),
    ]:
        there = fleet(*map(awake, replicas), now_s=now_s, target=target, crowding=ELSEWHERE)
        decision, state = decide(there, CONFIG, state)
        found.append((decision.replicas, decision.why))
    wait, steady = Why.DELAY_UP, Why.CROWDED
    assert found == [
        *((1, wait), (1, wait), (2, Why.SPREAD)),
        *((2, steady), (2, steady)),
        *((2, steady), (2, steady)),
        *((2, wait), (3, Why.SPREAD)),
    ]


def test_it_goes_by_the_delay_once_the_card_is_calm() -> None:
    state = PolicyState()
    found = []
    for now_s, crowded in [(0, NOWHERE), (5000, NOWHERE), (5001, None), (5600, None), (5601, None)]:
        there = fleet(awake("a", 2), asleep("b"), now_s=now_s, crowding=crowded)
        decision, state = decide(there, CONFIG, state)
        found.append((decision.replicas, decision.why))
    calm = (2, Why.DELAY_DOWN)
    assert found == [*[(2, Why.CROWDED)] * 2, calm, calm, (1, Why.REMOVE)]


def test_full_card_that_others_share_is_no_reason_for_another_replica() -> None:
    """They make room: one that sleeps there can wake."""
    told = {"device_free_bytes": 10e9, "wake_bytes": 24e9}
    shared = asleep("a", card=CardReport(1, 1, 0, 24e9, 0.25), **told)
    assert after(1e5, fleet(shared)).replicas == 1
    assert after(1e5, fleet(asleep("a", **told))).replicas == 2


@settings(max_examples=100, derandomize=True)
@given(
    history=st.lists(
        st.tuples(st.sampled_from([None, NOWHERE, ELSEWHERE]), st.integers(1, 100)),
        min_size=1,
        max_size=60,
    ),
    most=st.integers(1, 4),
)
def test_swaps_add_replicas_within_bounds_and_where_there_is_room_and_leave_none_behind(
    history: Sequence[tuple[Crowding | None, int]], most: int
) -> None:
    """Few requests, so that nothing else adds any; what is asked for runs by the next look."""
    config = CONFIG.model_copy(update={"max_replicas": most, "downscale_delay_s": 60})
    state, now_s, count = PolicyState(), 0.0, 1

    def look(crowded: Crowding | None) -> int:
        nonlocal state
        replicas = [awake("0", 2), *(asleep(f"{i}") for i in range(1, count))]
        there = fleet(*replicas, now_s=now_s, crowding=crowded)
        decision, state = decide(there, config, state)
        return decision.replicas

    for crowded, seconds in history:
        wanted = look(crowded)
        assert wanted <= most
        if wanted > count:
            assert crowded is ELSEWHERE
            assert wanted == count + 1
        if crowded is not None:
            assert wanted >= count
        count, now_s = wanted, now_s + seconds
    for _ in range(3):
        count, now_s = look(None), now_s + 60
    assert count == 1


# --- configuration ---


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_replicas": 0}, "max_replicas: "),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests: "),
        ({"look_back_period_s": float("inf")}, "look_back_period_s: "),
        ({"standby": 1}, "standby: unknown key; did you mean standby_replicas?"),
        (
            {"min_replicas": 1, "standby_replicas": 3, "max_replicas": 3},
            "max_replicas: 3, but min_replicas 1 and standby_replicas 3 need 4 or more",
        ),
        (
            {"downscale_to_zero_delay_s": 60},
            "downscale_to_zero_delay_s: 60, but downscale_delay_s is 600: "
            "the last replica would go before the others",
        ),
    ],
)
def test_wrong_configuration_is_told_by_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(AutoscalingConfig, data)
    assert str(caught.value).startswith(message)


def test_names_and_defaults_are_serves_where_serve_has_the_same() -> None:
    from ray.serve.config import AutoscalingConfig as ServesConfig

    ours, serves = AutoscalingConfig.model_fields, ServesConfig.model_fields
    assert ours.keys() - serves.keys() == {"standby_replicas", "image_ttl_s", "wake_patience_s"}
    differing = {
        name for name in ours.keys() & serves.keys() if ours[name].default != serves[name].default
    }
    assert differing == {"target_ongoing_requests"}, "a batch has more room than Serve's 2"
