"""When a replica falls asleep by itself."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from actors.errors import NoRoom
from actors.protocol import ReplicaState, SleepCommand, SleepMode
from actors.replica.idle import IdleTimeout, TimeoutSource
from actors.replica.schedule_watch import wake_by_schedule
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    Bench,
    run,
    until,
)


@pytest.mark.parametrize(("idle_s", "state"), [(9.9, AWAKE), (10.0, ASLEEP)])
def test_idle_clock_puts_it_to_sleep(idle_s: float, state: ReplicaState) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        assert await bench.request() == "served"
        bench.clock.now_s += idle_s
        looks = 0
        idle = bench.lifecycle.idle.idle_s

        def look() -> float:
            nonlocal looks
            looks += 1
            return idle()

        bench.lifecycle.idle.idle_s = look  # type: ignore[method-assign]
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        await until(lambda: looks >= 3 or bench.lifecycle.state is ASLEEP)
        await until(lambda: bench.lifecycle.state in (AWAKE, ASLEEP))
        assert bench.lifecycle.state is state
        watch.cancel()

    run(scenario)


@pytest.mark.parametrize("how", ["a request", "an operator"])
def test_look_at_the_clock_right_behind_a_wake_finds_nothing_idle(how: str) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.clock.now_s = 1000.0
        enter = bench.lifecycle._enter
        idle_s: list[float] = []

        def look(state: ReplicaState, *rest: object) -> None:
            enter(state, *rest)  # type: ignore[arg-type]
            if state is AWAKE:  # who waits for it has not gone on yet
                idle_s.append(bench.lifecycle.idle.idle_s())

        bench.lifecycle._enter = look  # type: ignore[assignment,method-assign]
        if how == "a request":
            assert await bench.request() == "served"
        else:
            await bench.lifecycle.wake_up()
        assert idle_s == [0.0]

    run(scenario)


def test_idle_replica_sleeps_when_its_time_is_over_not_at_the_next_look() -> None:
    async def scenario() -> None:
        bench = Bench(time.monotonic, idle_timeout_s=0.05, idle_check_interval_s=1000)
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        for _ in range(2):  # after a wake as well
            assert await bench.request() == "served"
            while bench.lifecycle.state is not ASLEEP:
                await asyncio.sleep(0.001)
        watch.cancel()

    run(scenario)


def test_request_in_flight_is_never_idle() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, finish = await bench.in_flight()
        bench.clock.now_s += 1000
        assert bench.lifecycle.idle.idle_s() == 0
        finish.set()
        await running
        assert bench.lifecycle.idle.idle_s() == 0  # counting starts at its end
        bench.clock.now_s += 3
        assert bench.lifecycle.idle.idle_s() == 3

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "keep_alive_s"),
    [
        ({"idle_timeout_s": None}, None),
        ({"is_pinned": True}, None),
        ({"is_pinned": True}, 0.0),  # others' requests do not unpin it
        ({}, math.inf),
        ({"max_keep_alive_s": 5, "idle_timeout_s": None}, math.inf),
    ],
)
def test_model_that_never_sleeps_by_itself(
    settings: dict[str, Any], keep_alive_s: float | None
) -> None:
    async def scenario() -> None:
        bench = Bench(**settings)
        await bench.awake()
        await bench.request(keep_alive_s=keep_alive_s)
        bench.clock.now_s += 1e9
        assert not await sleeps(bench)

    run(scenario)


async def sleeps(bench: Bench) -> bool:
    """Whether it goes to sleep by itself, with the clock standing still."""
    watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
    await looked(bench.lifecycle.idle, "left_s", lambda: bench.lifecycle.state is not AWAKE)
    await until(lambda: bench.lifecycle.state in (AWAKE, ASLEEP))
    watch.cancel()
    return bench.lifecycle.state is ASLEEP


async def looked(at: object, method: str, enough: Callable[[], bool] = lambda: False) -> None:
    """Return when a watch has called a method three times, or there is enough."""
    looks = 0
    original = getattr(at, method)

    def look() -> object:
        nonlocal looks
        looks += 1
        return original()

    setattr(at, method, look)
    while looks < 3 and not enough():
        await asyncio.sleep(0.001)
    setattr(at, method, original)


# --- keep_alive ---


@pytest.mark.parametrize(
    ("keep_alive_s", "bound_s", "idle_s", "asleep"),
    [
        (None, None, 10, True),
        (3, None, 2.9, False),
        (3, None, 3, True),
        (60, None, 59.9, False),
        (60, None, 60, True),
        (0, None, 0, True),
        (60, 30, 29.9, False),
        (60, 30, 30, True),
        (math.inf, 30, 30, True),
        (60, 5, 9.9, False),  # who asks for more gets no less than who asks for nothing
        (60, 5, 10, True),
        (5, 0, 5, True),
    ],
)
def test_keep_alive_of_the_last_request(
    keep_alive_s: float | None, bound_s: float | None, idle_s: float, asleep: bool
) -> None:
    async def scenario() -> None:
        bench = Bench(max_keep_alive_s=bound_s)
        await bench.awake()
        await bench.request(keep_alive_s=keep_alive_s)
        bench.clock.now_s += idle_s
        assert await sleeps(bench) is asleep

    run(scenario)


def test_request_without_keep_alive_brings_the_setting_back() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.request(keep_alive_s=1000)
        await bench.request()
        bench.clock.now_s += 10
        assert await sleeps(bench)

    run(scenario)


def test_keep_alive_of_0_waits_for_everybody_in_flight() -> None:
    async def scenario() -> None:
        bench = Bench(idle_check_interval_s=1000)
        await bench.awake()
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        other, other_ends = await bench.in_flight()
        last, last_ends = await bench.in_flight(keep_alive_s=0)
        last_ends.set()
        await last
        for _ in range(10):
            await asyncio.sleep(0)
        assert bench.lifecycle.state is AWAKE
        other_ends.set()
        await other
        await until(lambda: bench.lifecycle.state is ASLEEP)  # at once, not at the next look
        watch.cancel()

    run(scenario)


def test_what_was_asked_for_ends_with_an_operator_s_sleep() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.request(keep_alive_s=math.inf)
        await bench.lifecycle.sleep(SleepCommand())
        await bench.lifecycle.wake_up()
        bench.clock.now_s += 10
        assert await sleeps(bench)

    run(scenario)


def test_operator_s_wake_is_longer_than_a_keep_alive_of_0() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, ends = await bench.in_flight(keep_alive_s=0)
        await bench.lifecycle.wake_up()
        ends.set()
        await running
        bench.clock.now_s += 9.9
        assert not await sleeps(bench)
        bench.clock.now_s += 0.1
        assert await sleeps(bench)

    run(scenario)


@pytest.mark.parametrize("mode", [None, SleepMode.WAIT])
def test_keep_alive_does_not_keep_others_from_the_card(mode: SleepMode | None) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.request(keep_alive_s=math.inf)
        await bench.lifecycle.make_room(mode, "another model wants it")
        assert bench.lifecycle.state is ASLEEP

    run(scenario)


def test_keep_alive_of_a_frozen_request_holds_when_it_goes_on() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, ends = await bench.in_flight(keep_alive_s=100)
        await bench.lifecycle.make_room(SleepMode.KEEP, "another model wants it")
        await until(lambda: bench.lifecycle.state is AWAKE)
        ends.set()
        await running
        assert bench.lifecycle.idle.timeout() == IdleTimeout(100, TimeoutSource.KEEP_ALIVE)

    run(scenario)


# --- schedule ---

_HOUR_S = 3600.0
OFFICE = {"cron": "0 8 * * *", "duration": "10h"}


def test_awake_window_keeps_it_awake_and_its_end_does_not() -> None:
    async def scenario() -> None:
        bench = Bench(schedule={"awake": [OFFICE]})
        bench.clock.now_s = 9 * _HOUR_S
        await bench.awake()
        await bench.request(keep_alive_s=0)
        bench.clock.now_s = 18 * _HOUR_S - 1
        assert not await sleeps(bench)
        bench.clock.now_s += 1
        assert await sleeps(bench)

    run(scenario)


def test_asleep_window_has_it_sleep_as_soon_as_it_is_idle() -> None:
    async def scenario() -> None:
        bench = Bench(schedule={"asleep": [OFFICE]}, idle_check_interval_s=1000)
        bench.clock.now_s = 9 * _HOUR_S
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        for _ in range(3):  # a request wakes it, and is served before it sleeps again
            assert await bench.request() == "served"
            await until(lambda: bench.lifecycle.state is ASLEEP)
        assert bench.effects.calls == ["wake", "sleep 1"] * 3
        watch.cancel()

    run(scenario)


@pytest.mark.parametrize("how", ["a request that asks for it", "an operator"])
def test_who_wants_it_awake_has_it_in_an_asleep_window(how: str) -> None:
    async def scenario() -> None:
        bench = Bench(schedule={"asleep": [OFFICE]})
        bench.clock.now_s = 9 * _HOUR_S
        if how == "an operator":
            await bench.lifecycle.wake_up()
        else:
            await bench.request(keep_alive_s=10)
        bench.clock.now_s += 9.9
        assert not await sleeps(bench)
        bench.clock.now_s += 0.1
        assert await sleeps(bench)

    run(scenario)


def test_start_of_an_awake_window_wakes_it_once() -> None:
    async def scenario() -> None:
        bench = Bench(schedule={"awake": [OFFICE]})
        bench.clock.now_s = 8 * _HOUR_S - 1
        watch = asyncio.create_task(wake_by_schedule(bench.lifecycle, 0.001))
        await looked(bench.lifecycle.schedule, "wanted")
        assert bench.lifecycle.state is ASLEEP
        bench.clock.now_s += 1
        await until_awake(bench)
        assert bench.lifecycle.reason == "schedule"
        await bench.lifecycle.sleep(SleepCommand())  # an operator knows better
        for hour in (9, 18, 31):
            bench.clock.now_s = hour * _HOUR_S
            await looked(bench.lifecycle.schedule, "wanted")
            assert bench.lifecycle.state is ASLEEP
        bench.clock.now_s = 32 * _HOUR_S  # the next day's
        await until_awake(bench)
        watch.cancel()

    run(scenario)


async def until_awake(bench: Bench) -> None:
    while bench.lifecycle.state is not AWAKE:
        await asyncio.sleep(0.001)


def test_start_of_an_awake_window_does_not_end_a_hold() -> None:
    async def scenario() -> None:
        bench = Bench(schedule={"awake": [OFFICE]})
        bench.lifecycle.held = True
        bench.clock.now_s = 9 * _HOUR_S
        watch = asyncio.create_task(wake_by_schedule(bench.lifecycle, 0.001))
        await looked(bench.lifecycle.schedule, "wanted")
        assert bench.lifecycle.state is ASLEEP
        assert bench.effects.calls == []
        watch.cancel()

    run(scenario)


def test_scheduled_wake_that_is_refused_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.replica.schedule_watch._RETRY_S", 0.001)

    async def scenario() -> None:
        bench = Bench(schedule={"awake": [OFFICE]})
        bench.clock.now_s = 9 * _HOUR_S
        bench.effects.failure = NoRoom("the card is full", 0.001)
        watch = asyncio.create_task(wake_by_schedule(bench.lifecycle, 0.001))
        while bench.effects.calls.count("wake") < 3:
            await asyncio.sleep(0.001)
        bench.effects.failure = None
        await until_awake(bench)
        watch.cancel()

    run(scenario)
