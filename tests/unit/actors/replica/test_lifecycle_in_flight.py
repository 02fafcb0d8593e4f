"""What a sleep does with the requests that are in flight: they are waited for, aborted or frozen."""

import asyncio

import pytest

from actors.errors import (
    DrainTimeout,
    FrozenTooLong,
    HeldAsleep,
    Unavailable,
)
from actors.protocol import SleepCommand, SleepMode
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    DRAINING,
    WAKING,
    Bench,
    run,
    until,
)


def test_request_during_drain_waits_then_wakes() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, finish = await bench.in_flight()
        sleeping = asyncio.create_task(bench.lifecycle.sleep(SleepCommand()))
        await until(lambda: bench.lifecycle.state is DRAINING)
        late = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        assert bench.effects.calls == []  # nothing is unmapped under a running request
        finish.set()
        await asyncio.gather(running, sleeping, late)
        assert bench.states == [DRAINING, ASLEEP, WAKING, AWAKE]
        assert bench.effects.calls == ["sleep 1", "wake"]

    run(scenario)


def test_drain_that_takes_too_long_leaves_it_awake() -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=0.01)
        await bench.awake()
        running, finish = await bench.in_flight()
        with pytest.raises(DrainTimeout, match="1 requests still run"):
            await bench.lifecycle.sleep(SleepCommand())
        assert bench.lifecycle.state is AWAKE
        assert await bench.request() == "served"
        finish.set()
        assert await running == "served"

    run(scenario)


def test_drain_that_takes_too_long_ends_no_hold() -> None:
    """Or whoever tries again and again to have it sleep would find requests that came in between."""

    async def scenario() -> None:
        bench = Bench(drain_timeout_s=0.01)
        await bench.awake()
        running, finish = await bench.in_flight()
        with pytest.raises(DrainTimeout, match="1 requests still run"):
            await bench.lifecycle.sleep(SleepCommand(hold=True))
        assert (bench.lifecycle.state, bench.lifecycle.held) == (AWAKE, True)
        with pytest.raises(HeldAsleep):
            await bench.request()
        finish.set()
        assert await running == "served"
        await bench.lifecycle.sleep(SleepCommand(hold=True))
        assert bench.lifecycle.state is ASLEEP
        await bench.lifecycle.wake_up()
        assert await bench.request() == "served"

    run(scenario)


def test_abort_ends_requests_in_flight() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, ended = await bench.in_flight()
        bench.effects.on_abort = ended.set
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.ABORT))
        assert await running == "served"
        assert bench.effects.calls == ["abort", "sleep 1"]

    run(scenario)


def test_keep_freezes_requests_over_the_sleep() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, finish = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        assert bench.lifecycle.state is ASLEEP
        assert bench.lifecycle.idle.in_flight == 1
        assert not running.done()
        await bench.lifecycle.wake_up()
        finish.set()
        assert await running == "served"

    run(scenario)


@pytest.mark.parametrize("mode", [SleepMode.ABORT, SleepMode.KEEP])
def test_command_that_does_not_wait_cuts_a_drain_short(mode: SleepMode) -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=60)
        await bench.awake()
        running, ended = await bench.in_flight()
        bench.effects.on_abort = ended.set
        waiting = asyncio.create_task(bench.lifecycle.sleep(SleepCommand()))
        await until(lambda: bench.lifecycle.state is DRAINING)
        await bench.lifecycle.sleep(SleepCommand(mode=mode))
        await waiting
        assert bench.lifecycle.state is ASLEEP
        assert bench.effects.calls == (["abort"] if mode is SleepMode.ABORT else []) + ["sleep 1"]
        assert running.done() == (mode is SleepMode.ABORT)
        await bench.lifecycle.wake_up()
        again = asyncio.create_task(bench.lifecycle.sleep(SleepCommand()))
        for _ in range(20):
            await asyncio.sleep(0)
        asleep = bench.lifecycle.state is ASLEEP
        assert asleep == running.done(), "a kept request is waited for as ever"
        ended.set()
        await again
        assert await running == "served"

    run(scenario)


def test_second_hold_outlives_the_drain_that_took_too_long() -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=0.05)
        await bench.awake()
        running, ended = await bench.in_flight()
        first, second = (
            asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True))) for _ in range(2)
        )
        with pytest.raises(DrainTimeout):
            await first
        await until(lambda: bench.lifecycle.state is DRAINING)
        ended.set()
        await second
        await running
        assert bench.lifecycle.state is ASLEEP
        assert bench.lifecycle.held

    run(scenario)


def test_wake_up_ends_the_holds_that_were_asked_for_before() -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=0.05)
        await bench.awake()
        running, ended = await bench.in_flight()
        holds = [
            asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True))) for _ in range(2)
        ]
        await until(lambda: bench.lifecycle.held)
        await bench.lifecycle.wake_up()
        ended.set()
        await asyncio.gather(*holds, return_exceptions=True)
        await running
        assert not bench.lifecycle.held
        assert await bench.request() == "served"

    run(scenario)


def test_deeper_sleep_with_frozen_requests_does_not_wait_for_them() -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=0.01)
        await bench.awake()
        running, finish = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        await bench.lifecycle.sleep(SleepCommand(level=2))
        assert bench.effects.calls == ["sleep 1", "sleep 2"]
        assert bench.lifecycle.level == 2
        await bench.lifecycle.wake_up()
        finish.set()
        await running

    run(scenario)


@pytest.mark.parametrize("level", [1, 2])
def test_abort_of_a_sleeper_ends_what_an_earlier_sleep_froze(level: int) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        bench.effects.on_abort = ends.set
        await bench.lifecycle.sleep(SleepCommand(level=2, mode=SleepMode.KEEP))
        await bench.lifecycle.sleep(SleepCommand(level=level))
        assert not ends.is_set(), "mode wait has nothing to wait for"
        await bench.lifecycle.sleep(SleepCommand(level=level, mode=SleepMode.ABORT))
        assert await request == "served"
        assert bench.effects.calls == ["sleep 2", "abort"]
        assert bench.states == [DRAINING, ASLEEP]

    run(scenario)


def test_hold_reaches_requests_that_wait_in_the_drain() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        running, finish = await bench.in_flight()
        sleeping = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True)))
        await until(lambda: bench.lifecycle.state is DRAINING)
        finish.set()
        with pytest.raises(HeldAsleep):
            await bench.request()
        await asyncio.gather(running, sleeping)
        assert bench.lifecycle.state is ASLEEP

    run(scenario)


def test_requests_that_a_sleep_froze_end_when_nobody_wakes_the_model() -> None:
    async def scenario() -> None:
        bench = Bench(frozen_timeout_s=0.02)
        await bench.awake()
        frozen, ends = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        await until_told(bench)
        assert "sleep.frozen_timeout_s" in str(bench.effects.ended_with[0])
        assert bench.lifecycle.state is ASLEEP
        ends.set()
        await frozen

    async def until_told(bench: Bench) -> None:
        while not bench.effects.ended_with:
            await asyncio.sleep(0.001)
        assert [type(error) for error in bench.effects.ended_with] == [FrozenTooLong]

    run(scenario)


def test_refused_wake_gives_frozen_requests_no_more_time() -> None:
    async def scenario() -> None:
        bench = Bench(frozen_timeout_s=100)
        await bench.awake()
        frozen, ends = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        bench.clock.now_s += 99.99
        bench.effects.failure = Unavailable("another process holds the card", 7)
        with pytest.raises(Unavailable):
            await bench.lifecycle.wake_up()
        while not bench.effects.ended_with:
            await asyncio.sleep(0.001)
        ends.set()
        await frozen

    run(scenario)


def test_wake_in_time_lets_frozen_requests_go_on() -> None:
    async def scenario() -> None:
        bench = Bench(frozen_timeout_s=0.05)
        await bench.awake()
        frozen, ends = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        await bench.lifecycle.wake_up()
        await asyncio.sleep(0.1)  # past the limit
        assert bench.effects.ended_with == []
        ends.set()
        assert await frozen == "served"

    run(scenario)
