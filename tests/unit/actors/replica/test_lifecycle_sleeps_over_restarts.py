"""A worker fails in a sleep or around one: what was ordered holds for the next worker."""

import asyncio

import pytest

from actors.errors import (
    DeviceMemoryError,
    HeldAsleep,
    Unavailable,
    WakeTimeout,
)
from actors.protocol import SleepCommand, SleepMode
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    DRAINING,
    LOST,
    RESTARTING,
    WAKING,
    Bench,
    opened,
    run,
    settled,
    until,
)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("how", ["worker fails", "effect fails", "refused halfway"])
@pytest.mark.parametrize("hold", [False, True])
def test_sleep_that_is_cut_by_a_restart_is_carried_out_afterwards(
    how: str, level: int, hold: bool
) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.gate.clear()
        command = SleepCommand(level=level, hold=hold)
        sleeping = asyncio.create_task(bench.lifecycle.sleep(command))
        await until(lambda: bench.effects.calls == [f"sleep {level}"])
        told = "the generation loop ended"
        if how == "worker fails":
            bench.lifecycle.restart(LOST)
        else:
            told = "could not sleep: no memory" if how == "refused halfway" else "invalid value"
            bench.effects.failure = (
                Unavailable("no memory", 1)
                if how == "refused halfway"
                else DeviceMemoryError("cuMemUnmap: invalid value")
            )
            bench.effects.gate.set()
        await sleeping
        deeper = level == 2  # the next worker starts at level 1
        assert bench.states == [DRAINING, RESTARTING, ASLEEP] + [DRAINING, ASLEEP] * deeper
        assert bench.effects.calls == [f"sleep {level}", "restart"] + ["sleep 2"] * deeper
        assert bench.lifecycle.level == level
        assert bench.lifecycle.held == hold
        assert [type(error) for error in bench.effects.ended_with] != [Unavailable]
        assert told in str(bench.effects.ended_with[0])
        if hold:
            with pytest.raises(HeldAsleep):
                await bench.request()
            await bench.lifecycle.wake_up()
        assert await bench.request() == "served"

    run(scenario)


def test_deep_sleep_stays_one_if_its_worker_fails_right_behind_it() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        loop = asyncio.get_running_loop()

        def fail_next() -> None:
            bench.effects.at_end = lambda: None
            loop.call_soon(bench.lifecycle.restart, LOST)

        bench.effects.at_end = fail_next
        await bench.lifecycle.sleep(SleepCommand(level=2))
        assert bench.states == [DRAINING, ASLEEP, RESTARTING, ASLEEP, DRAINING, ASLEEP]
        assert bench.lifecycle.level == 2

    run(scenario)


async def asleep_at_2(**config: object) -> Bench:
    bench = Bench(**config)
    await bench.awake()
    await bench.lifecycle.sleep(SleepCommand(level=2))
    bench.states.clear()
    bench.effects.calls.clear()
    return bench


def test_next_worker_of_a_deep_sleeper_gives_the_image_back_as_well() -> None:
    async def scenario() -> None:
        bench = await asleep_at_2()
        for _ in range(2):
            bench.lifecycle.restart(LOST)
            await settled(bench)
            assert bench.lifecycle.level == 2
        assert bench.states == [RESTARTING, ASLEEP, DRAINING, ASLEEP] * 2
        assert bench.effects.calls == ["restart", "sleep 2"] * 2
        assert bench.lifecycle.reason == "to sleep at level 2, as before its worker failed"
        assert await bench.request() == "served"
        bench.effects.calls.clear()
        bench.lifecycle.restart(LOST)  # it is awake now, and the sleep long over
        await settled(bench)
        assert bench.effects.calls == ["restart", "wake"]

    run(scenario)


def test_next_worker_that_fails_as_it_gives_the_image_back_is_replaced_and_the_third_does() -> None:
    async def scenario() -> None:
        bench = await asleep_at_2()
        bench.effects.next_gate = asyncio.Event()
        bench.lifecycle.restart(LOST)
        await until(lambda: bench.effects.calls == ["restart", "sleep 2"])
        bench.effects.next_gate = opened()
        bench.lifecycle.restart(LOST)
        await settled(bench)
        assert bench.effects.calls == ["restart", "sleep 2"] * 2
        assert bench.lifecycle.level == 2

    run(scenario)


@pytest.mark.parametrize("who", ["request", "request that needs a worker first", "operator"])
def test_deep_sleeper_that_somebody_wants_awake_by_then_does_not_load_its_image_twice(
    who: str,
) -> None:
    async def scenario() -> None:
        bench = await asleep_at_2()

        async def ask() -> None:
            if who == "operator":
                await bench.lifecycle.wake_up()
                return
            if who != "request":
                await bench.lifecycle.restarted()
                await asyncio.sleep(0)  # the worker checks its grammar
            assert await bench.request() == "served"

        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        asking = asyncio.create_task(ask())
        await until(lambda: bench.effects.calls == ["restart"])
        assert bench.lifecycle.waiting_for_wake == (who != "operator")
        bench.effects.restart_gate.set()
        await asking
        assert bench.effects.calls == ["restart", "wake"]
        assert bench.lifecycle.waiting_for_wake == 0

    run(scenario)


def test_refused_wake_ends_a_deep_sleep_for_the_next_worker_as_well() -> None:
    """It may have the image by then; the next one has."""

    async def scenario() -> None:
        bench = await asleep_at_2()
        bench.effects.failure = Unavailable("another process holds the card", 7)
        with pytest.raises(Unavailable):
            await bench.request()
        bench.lifecycle.restart(LOST)
        await settled(bench)
        assert bench.effects.calls == ["wake", "restart"]
        assert bench.lifecycle.level == 1

    run(scenario)


def test_wait_for_a_restart_ends_as_one_for_a_wake_does() -> None:
    async def scenario() -> None:
        bench = await asleep_at_2(wake_timeout_s=0.01)
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        with pytest.raises(WakeTimeout, match=r"0\.01 s"):
            await bench.lifecycle.restarted()
        holding = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(level=2, hold=True)))
        await until(lambda: bench.lifecycle.held)
        with pytest.raises(HeldAsleep):
            await bench.lifecycle.restarted()
        assert bench.lifecycle.waiting_for_wake == 0
        bench.effects.restart_gate.set()
        await holding
        assert bench.effects.calls == ["restart", "sleep 2"], "nobody waited any longer"

    run(scenario)


def test_sleep_asked_for_during_a_restart_follows_it() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        sleeping = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(level=2)))
        await until(lambda: bench.effects.calls == ["restart"])
        bench.effects.restart_gate.set()
        await sleeping
        assert bench.effects.calls == ["restart", "wake", "sleep 2"]
        assert bench.states == [RESTARTING, ASLEEP, WAKING, AWAKE, DRAINING, ASLEEP]

    run(scenario)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_restart_keeps_a_hold_and_wakes_nobody(when: str) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        if when == "before":
            await bench.lifecycle.sleep(SleepCommand(hold=True))
        bench.states.clear()
        bench.effects.calls.clear()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        if when == "meanwhile":  # an awake one would be woken again
            holding = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True)))
            await until(lambda: bench.lifecycle.held)
        with pytest.raises(HeldAsleep):
            await bench.request()
        bench.effects.restart_gate.set()
        if when == "meanwhile":
            await holding
        await settled(bench)
        assert bench.states == [RESTARTING, ASLEEP]
        assert bench.effects.calls == ["restart"]
        assert bench.lifecycle.held
        with pytest.raises(HeldAsleep):
            await bench.request()
        await bench.lifecycle.wake_up()
        assert await bench.request() == "served"

    run(scenario)


def test_wake_up_during_a_restart_waits_and_ends_the_hold() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.lifecycle.sleep(SleepCommand(hold=True))
        bench.effects.calls.clear()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        waking = asyncio.create_task(bench.lifecycle.wake_up())
        await until(lambda: not bench.lifecycle.held)
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.lifecycle.state is RESTARTING
        assert not waking.done()
        bench.effects.restart_gate.set()
        await waking
        assert bench.lifecycle.state is AWAKE
        assert bench.effects.calls == ["restart", "wake"]

    run(scenario)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", SleepMode)
def test_request_that_came_behind_a_sleep_that_a_restart_cut_is_served_and_not_put_to_sleep(
    mode: SleepMode, level: int
) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.gate.clear()
        command = SleepCommand(mode=mode, level=level)
        sleeping = asyncio.create_task(bench.lifecycle.sleep(command))
        await until(lambda: bench.effects.calls[-1:] == [f"sleep {level}"])
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        request, ends = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with bench.lifecycle.serving("late"):
                request.set()
                await ends.wait()

        late = asyncio.create_task(serve())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        for _ in range(20):  # until both wait for the restart, the request first
            await asyncio.sleep(0)
        bench.effects.restart_gate.set()
        await asyncio.gather(request.wait(), sleeping)
        await settled(bench)
        assert bench.lifecycle.state is AWAKE
        assert bench.states == [DRAINING, RESTARTING, ASLEEP, WAKING, AWAKE]
        assert bench.effects.calls.count("abort") == (mode is SleepMode.ABORT)
        ends.set()
        await late

    run(scenario)


@pytest.mark.parametrize("level", [1, 2])
def test_wake_up_ends_the_hold_of_a_sleep_that_a_restart_has_just_cut(level: int) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.gate.clear()
        command = SleepCommand(level=level, hold=True)
        sleeping = asyncio.create_task(bench.lifecycle.sleep(command))
        await until(lambda: bench.effects.calls == [f"sleep {level}"])
        bench.lifecycle.restart(LOST)
        await asyncio.gather(bench.lifecycle.wake_up(), sleeping)
        assert not bench.lifecycle.held
        assert await bench.request() == "served"

    run(scenario)


def test_idle_watch_outlives_a_restart_in_the_middle_of_its_sleep() -> None:
    async def scenario() -> None:
        bench = Bench()
        watch = asyncio.create_task(bench.lifecycle.sleep_when_idle())
        for sleep in range(2):
            await bench.lifecycle.wake_up()
            bench.effects.calls.clear()
            if sleep == 0:
                bench.effects.gate.clear()
            bench.clock.now_s += 10
            await until(lambda: bench.effects.calls == ["sleep 1"])
            if sleep == 0:
                bench.lifecycle.restart(LOST)
            await until(lambda: bench.lifecycle.state is ASLEEP)
        assert not watch.done()
        watch.cancel()

    run(scenario)
