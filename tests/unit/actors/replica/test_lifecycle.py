"""The sleep/wake state machine: requests, sleeps and wakes of a worker that works."""

import asyncio
import logging
from contextlib import suppress

import pytest

from actors.errors import (
    HeldAsleep,
    Unavailable,
    WakeTimeout,
)
from actors.protocol import MemoryChange, MemoryLeft, ReplicaState, SleepCommand
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    DRAINING,
    WAKING,
    Bench,
    Clock,
    GatedEffects,
    run,
    until,
)


def test_sixteen_requests_to_a_sleeper_wake_it_once() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        requests = [asyncio.create_task(bench.request()) for _ in range(16)]
        await until(lambda: bench.lifecycle.waiting_for_wake == 16)
        assert bench.lifecycle.state is WAKING
        bench.effects.gate.set()
        assert await asyncio.gather(*requests) == ["served"] * 16
        assert bench.effects.calls == ["wake"]
        assert bench.lifecycle.wakes == 1
        assert bench.lifecycle.waiting_for_wake == 0

    run(scenario)


def test_client_that_leaves_cancels_only_its_wait() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        leaver, stayer = (asyncio.create_task(bench.request()) for _ in range(2))
        await until(lambda: bench.lifecycle.waiting_for_wake == 2)
        leaver.cancel()
        with suppress(asyncio.CancelledError):
            await leaver
        assert bench.lifecycle.waiting_for_wake == 1
        bench.effects.gate.set()
        assert await stayer == "served"
        assert bench.effects.calls == ["wake"]

    run(scenario)


def test_wake_goes_on_when_every_client_has_left() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        only = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.state is WAKING)
        only.cancel()
        bench.effects.gate.set()
        await until(lambda: bench.lifecycle.state is AWAKE)

    run(scenario)


def test_sleep_and_wake_up_are_idempotent() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.lifecycle.wake_up()
        assert bench.effects.calls == []
        await asyncio.gather(*(bench.lifecycle.sleep(SleepCommand()) for _ in range(3)))
        await bench.lifecycle.sleep(SleepCommand())
        assert bench.effects.calls == ["sleep 1"]
        assert bench.lifecycle.sleeps == 1

    run(scenario)


def test_held_asleep_refuses_requests_until_wake_up() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand(hold=True))
        with pytest.raises(HeldAsleep) as caught:
            await bench.request()
        assert caught.value.retry_after_s > 0
        assert bench.lifecycle.state is ASLEEP
        await bench.lifecycle.wake_up()
        assert await bench.request() == "served"

    run(scenario)


def test_sleep_asked_for_during_a_wake_follows_it() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        waking = asyncio.create_task(bench.lifecycle.wake_up())
        await until(lambda: bench.lifecycle.state is WAKING)
        sleeping = asyncio.create_task(bench.lifecycle.sleep(SleepCommand()))
        bench.effects.gate.set()
        await asyncio.gather(waking, sleeping)
        assert bench.effects.calls == ["wake", "sleep 1"]
        assert bench.states == [WAKING, AWAKE, DRAINING, ASLEEP]

    run(scenario)


def test_wake_that_is_not_possible_now_leaves_it_asleep() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.failure = Unavailable("another process holds the card", 7)
        with pytest.raises(Unavailable, match="another process"):
            await bench.request()
        assert bench.lifecycle.state is ASLEEP
        bench.effects.failure = None
        assert await bench.request() == "served"

    run(scenario)


def test_sleep_logs_what_the_device_got_back_and_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        assert bench.lifecycle.last_sleep is None
        left = MemoryLeft(context=600, graphs=200, kept_layers=50, torch_reserve=30, other=4)
        bench.effects.change = MemoryChange(1000, 50, 0, 950, 940, left)
        with caplog.at_level(logging.INFO, "actors.replica.lifecycle"):
            await bench.lifecycle.sleep(SleepCommand())
        assert bench.lifecycle.last_sleep == bench.effects.change
        assert caplog.messages[-1].endswith(
            "mapped 1000 -> 50 bytes, copied 0; the device got 950 (own 940) back, left are "
            "884 bytes (context 600, graphs 200, kept layers 50, torch's reserve 30, other 4)"
        )
        assert sum("draining -> asleep" in message for message in caplog.messages) == 1

    run(scenario)


def test_wake_slower_than_a_request_s_patience() -> None:
    async def scenario() -> None:
        bench = Bench(wake_timeout_s=0.01)
        bench.effects.gate.clear()
        with pytest.raises(WakeTimeout, match=r"0\.01 s"):
            await bench.request()
        assert bench.lifecycle.state is WAKING  # the wake itself goes on
        bench.effects.gate.set()
        await until(lambda: bench.lifecycle.state is AWAKE)
        assert await bench.request() == "served"

    run(scenario)


def test_image_of_a_refused_wake_can_be_dropped_again() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand(level=2))
        bench.effects.failure = Unavailable("another process holds the card", 7)
        with pytest.raises(Unavailable):
            await bench.lifecycle.wake_up()
        bench.effects.failure = None
        await bench.lifecycle.sleep(SleepCommand(level=2))
        assert bench.effects.calls == ["sleep 2", "wake", "sleep 2"]

    run(scenario)


def test_every_change_is_told_after_it_was_made() -> None:
    async def scenario() -> None:
        told: list[ReplicaState] = []

        def tell() -> None:
            told.append(lifecycle.state)

        lifecycle = Lifecycle(GatedEffects(), SleepConfig(), Clock(), "test", tell)
        await lifecycle.wake_up()
        await lifecycle.sleep(SleepCommand())
        assert told == [WAKING, AWAKE, DRAINING, ASLEEP]

    asyncio.run(scenario())


def test_whoever_is_told_of_changes_cannot_fail_one(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        def fail() -> None:
            raise RuntimeError("Set changed size during iteration")

        lifecycle = Lifecycle(GatedEffects(), SleepConfig(), Clock(), "test", fail)
        await lifecycle.wake_up()
        assert lifecycle.state is AWAKE

    asyncio.run(scenario())
    assert "not everybody was told that it is awake" in caplog.text


def test_wake_up_in_the_moment_a_sleep_has_settled_wakes() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        loop = asyncio.get_running_loop()
        wakings: list[asyncio.Task[None]] = []

        def ask() -> None:
            bench.effects.at_end = lambda: None
            wakings.append(loop.create_task(bench.lifecycle.wake_up()))

        bench.effects.at_end = ask
        await bench.lifecycle.sleep(SleepCommand())
        await wakings[0]
        assert bench.lifecycle.state is AWAKE
        assert bench.states == [DRAINING, ASLEEP, WAKING, AWAKE]

    run(scenario)
