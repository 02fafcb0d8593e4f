"""When a replica falls asleep by itself."""

import asyncio
import time

import pytest

from actors.protocol import ReplicaState
from actors.replica.idle import IdleClock
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
        bench = Bench(idle_timeout_s=0.05, idle_check_interval_s=1000)
        bench.lifecycle.idle = IdleClock(time.monotonic)
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


def test_idle_timeout_null_never_sleeps() -> None:
    async def scenario() -> None:
        bench = Bench(idle_timeout_s=None)
        await bench.awake()
        bench.clock.now_s += 1e9
        await bench.lifecycle.sleep_when_idle()  # returns at once instead of watching
        assert bench.lifecycle.state is AWAKE

    run(scenario)
