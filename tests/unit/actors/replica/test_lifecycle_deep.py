"""When a sleep gets deep, and what ends that."""

import asyncio

import pytest

from actors.errors import NoRoom
from actors.observer import SleepCause
from actors.protocol import LastSleep, SleepCommand, SleepMode
from actors.replica.effects import Untouched
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    LOST,
    Bench,
    run,
    settled,
    until,
)


async def until_calls(bench: Bench, *calls: str) -> None:
    await until(lambda: bench.effects.calls == list(calls) and bench.lifecycle.state is ASLEEP)


def test_who_has_slept_for_long_sleeps_deep() -> None:
    async def scenario() -> None:
        bench = Bench(deep_after_s=60)
        await bench.awake()
        bench.clock.now_s += 10
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        await until_calls(bench, "sleep 1")
        bench.clock.now_s += 59.9
        await asyncio.sleep(0.01)  # ten looks
        assert not bench.lifecycle.deep
        bench.clock.now_s += 0.1
        await until_calls(bench, "sleep 1", "sleep 1 deep")
        assert bench.lifecycle.deep
        assert bench.lifecycle.level == 1
        bench.clock.now_s += 1000
        await asyncio.sleep(0.01)
        assert bench.effects.calls == ["sleep 1", "sleep 1 deep"]
        watch.cancel()

    run(scenario)


def test_by_default_no_sleep_gets_deep() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        bench.clock.now_s += 10
        await until_calls(bench, "sleep 1")
        bench.clock.now_s += 1e6
        await asyncio.sleep(0.01)
        assert bench.effects.calls == ["sleep 1"]
        watch.cancel()

    run(scenario)


def test_request_wakes_it_whole_and_the_time_begins_anew() -> None:
    async def scenario() -> None:
        bench = Bench(deep_after_s=60)
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand(deep=True))
        assert bench.lifecycle.deep
        assert await bench.request() == "served"
        assert not bench.lifecycle.deep
        await bench.lifecycle.sleep(SleepCommand())
        assert not bench.lifecycle.deep
        assert bench.effects.calls == ["sleep 1 deep", "wake", "sleep 1"]

    run(scenario)


def test_request_that_comes_while_it_gets_deep_is_served() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand())
        bench.effects.gate.clear()
        deepening = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(deep=True)))
        await until(lambda: bench.effects.calls[-1] == "sleep 1 deep")
        request = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        bench.effects.gate.set()
        assert await request == "served"
        await deepening
        assert bench.lifecycle.state is AWAKE
        assert not bench.lifecycle.deep

    run(scenario)


def test_sleeper_is_asked_for_a_deep_sleep_once() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        for command in (
            SleepCommand(),
            SleepCommand(deep=True),
            SleepCommand(),
            SleepCommand(deep=True),
        ):
            await bench.lifecycle.sleep(command)
        assert bench.effects.calls == ["sleep 1", "sleep 1 deep"]
        await bench.lifecycle.sleep(SleepCommand(level=2))
        assert bench.effects.calls[-1] == "sleep 2"

    run(scenario)


def test_image_that_was_dropped_stays_dropped_in_a_deep_sleep() -> None:
    async def scenario() -> None:
        bench = Bench(deep_after_s=60, level=2)
        await bench.awake()
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        bench.clock.now_s += 10
        await until_calls(bench, "sleep 2")
        bench.clock.now_s += 60
        await until_calls(bench, "sleep 2", "sleep 2 deep")
        assert bench.lifecycle.level == 2
        watch.cancel()

    run(scenario)


def test_sleep_that_could_not_get_deep_is_tried_again_as_late() -> None:
    async def scenario() -> None:
        bench = Bench(deep_after_s=60)
        bench.effects.can_deepen = False
        await bench.awake()
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        bench.clock.now_s += 10
        await until_calls(bench, "sleep 1")
        bench.clock.now_s += 60
        await until_calls(bench, "sleep 1", "sleep 1 deep")
        await asyncio.sleep(0.01)
        assert not bench.lifecycle.deep
        assert len(bench.effects.calls) == 2
        bench.effects.can_deepen = True
        bench.clock.now_s += 60
        await until(lambda: bench.lifecycle.deep)
        watch.cancel()

    run(scenario)


def test_wake_without_room_is_no_reason_to_forget_how_deep_it_is() -> None:
    """The worker may have come back whole before it found no room."""

    async def scenario() -> None:
        bench = Bench(deep_after_s=60)
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand(deep=True))
        bench.effects.failure = NoRoom("full", 5.0)
        with pytest.raises(NoRoom):
            await bench.request()
        bench.effects.failure = None
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        bench.clock.now_s += 60
        await until_calls(bench, "sleep 1 deep", "wake", "sleep 1 deep")
        await until(lambda: bench.lifecycle.deep)
        watch.cancel()

    run(scenario)


def test_wake_that_was_refused_before_the_worker_was_asked_changes_nothing() -> None:
    async def scenario() -> None:
        bench = Bench(deep_after_s=60)
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand(level=2, deep=True), cause=SleepCause.IDLE)
        slept = bench.lifecycle.sleeps
        bench.effects.failure = Untouched(NoRoom("full", 5.0))
        with pytest.raises(NoRoom) as refused:
            await bench.request()
        assert refused.value.retry_after_s == 5.0
        assert bench.lifecycle.reason == "could not wake: full"
        assert (bench.lifecycle.level, bench.lifecycle.deep) == (2, True)
        bench.effects.failure = None
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        bench.clock.now_s += 60
        await asyncio.sleep(0.01)  # ten looks
        assert bench.effects.calls == ["sleep 2 deep", "wake"]
        assert bench.lifecycle.sleeps == slept
        assert bench.lifecycle.slept_why() == LastSleep("idle", "", 60.0)
        watch.cancel()
        bench.lifecycle.restart(LOST)
        await settled(bench)
        assert bench.effects.calls[2:] == ["restart", "sleep 2"], "its image goes again"

    run(scenario)


def test_frozen_requests_keep_it_from_getting_deep() -> None:
    async def scenario() -> None:
        bench = Bench(deep_after_s=60)
        await bench.awake()
        request, ends = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        bench.clock.now_s += 100
        await asyncio.sleep(0.01)
        assert bench.effects.calls == ["sleep 1"]
        ends.set()
        await request
        await until(lambda: bench.lifecycle.deep)
        watch.cancel()

    run(scenario)
