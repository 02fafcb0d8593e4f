"""The sleep/wake state machine, with effects that are gates."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from actors.errors import (
    DeviceMemoryError,
    DrainTimeout,
    EngineDied,
    FrozenTooLong,
    HeldAsleep,
    ReplicaFailed,
    Unavailable,
    WakeTimeout,
)
from actors.protocol import MemoryChange, MemoryLeft, ReplicaState, SleepCommand, SleepMode
from actors.replica.idle import IdleClock
from actors.replica.lifecycle import Lifecycle, SleepConfig

AWAKE, DRAINING, ASLEEP = ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.ASLEEP
WAKING, FAILED = ReplicaState.WAKING, ReplicaState.FAILED
NOTHING = MemoryChange(0, 0, 0)


class GatedEffects:
    """Effects that record their calls, wait at a gate, and fail on demand."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.change = NOTHING
        self.on_abort: Callable[[], None] = lambda: None
        self.ended_with: list[Exception] = []

    async def wake(self) -> MemoryChange:
        return await self._act("wake")

    async def sleep(self, level: int) -> MemoryChange:
        return await self._act(f"sleep {level}")

    def abort_in_flight(self) -> None:
        self.calls.append("abort")
        self.on_abort()

    def fail_in_flight(self, error: Exception) -> None:
        self.ended_with.append(error)

    async def _act(self, call: str) -> MemoryChange:
        self.calls.append(call)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.change


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A lifecycle on fakes; `states` records every state it enters."""

    def __init__(self, **config: object) -> None:
        self.effects = GatedEffects()
        self.clock = Clock()
        self.states: list[ReplicaState] = []
        defaults = {"idle_timeout_s": 10, "idle_check_interval_s": 0.001}
        settings = SleepConfig.model_validate(defaults | config)
        self.lifecycle = Lifecycle(self.effects, settings, self.clock, "test")
        enter = self.lifecycle._enter

        def record(state: ReplicaState, *rest: object) -> None:
            self.states.append(state)
            enter(state, *rest)  # type: ignore[arg-type]

        self.lifecycle._enter = record  # type: ignore[assignment,method-assign]

    async def awake(self) -> None:
        await self.lifecycle.wake_up()
        self.states.clear()
        self.effects.calls.clear()

    async def request(self, until: asyncio.Event | None = None, name: str = "r") -> str:
        async with self.lifecycle.serving(name):
            assert self.lifecycle.state is not ASLEEP
            if until is not None:
                await until.wait()
        return "served"

    async def in_flight(self) -> tuple[asyncio.Task[str], asyncio.Event]:
        """A request that has begun, and what ends it."""
        ends = asyncio.Event()
        request = asyncio.create_task(self.request(ends))
        await until(lambda: self.lifecycle.idle.in_flight == 1)
        return request, ends


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


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
            await bench.lifecycle.sleep(SleepCommand(hold=True))
        assert bench.lifecycle.state is AWAKE
        assert not bench.lifecycle.held
        assert await bench.request() == "served"
        finish.set()
        assert await running == "served"

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


def test_failed_wake_fails_its_waiters_and_settles() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.failure = DeviceMemoryError("cuMemCreate of 5 bytes: out of memory")
        outcomes = await asyncio.gather(
            *(bench.request() for _ in range(3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [DeviceMemoryError] * 3
        assert bench.lifecycle.state is FAILED
        with pytest.raises(ReplicaFailed, match="out of memory"):
            await bench.request()
        with pytest.raises(ReplicaFailed):
            await bench.lifecycle.sleep(SleepCommand())

    run(scenario)


def test_unexpected_error_in_a_wake_becomes_replica_failed() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.failure = TimeoutError("of the effect itself, not of the waiter")
        with pytest.raises(ReplicaFailed):
            await bench.request()
        assert bench.lifecycle.state is FAILED

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


@pytest.mark.parametrize("state", [ASLEEP, WAKING, AWAKE, DRAINING])
def test_replica_can_fail_in_any_state_and_nobody_waits_any_more(state: ReplicaState) -> None:
    """Also behind an effect that never returns."""

    async def scenario() -> None:
        bench = Bench()
        waiting = []
        if state in (AWAKE, DRAINING):
            await bench.awake()
        bench.effects.gate.clear()
        if state is DRAINING:
            waiting.append(asyncio.create_task(bench.lifecycle.sleep(SleepCommand())))
            await until(lambda: bench.effects.calls == ["sleep 1"])
        if state in (WAKING, DRAINING):
            waiting += [asyncio.create_task(bench.request()) for _ in range(2)]
            await until(lambda: bench.lifecycle.waiting_for_wake == 2)
        assert bench.lifecycle.state is state
        failure = EngineDied("the generation loop ended")
        bench.lifecycle.fail(failure)
        assert bench.lifecycle.state is FAILED  # at once, before anybody else has run
        bench.lifecycle.fail(ReplicaFailed("another one, later"))
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ReplicaFailed] * len(waiting)
        assert bench.effects.ended_with == [failure]
        bench.effects.gate.set()
        for order in (
            bench.request(),
            bench.lifecycle.wake_up(),
            bench.lifecycle.sleep(SleepCommand()),
        ):
            with pytest.raises(ReplicaFailed, match="the generation loop ended"):
                await order
        assert bench.states.count(FAILED) == 1
        assert bench.lifecycle.state is FAILED

    run(scenario)


def test_failure_in_the_moment_before_a_transition_runs_leaves_its_effect_undone() -> None:
    async def scenario() -> None:
        bench = Bench()
        waking = asyncio.create_task(bench.lifecycle.wake_up())
        await until(lambda: bench.lifecycle.state is WAKING)
        bench.lifecycle.fail(ReplicaFailed("just now"))
        with pytest.raises(ReplicaFailed, match="just now"):
            await waking
        assert bench.states == [WAKING, FAILED]

    run(scenario)


def test_failed_effect_ends_the_requests_that_a_sleep_froze() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        frozen, ends = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        bench.effects.failure = DeviceMemoryError("cuMemMap: invalid value")
        with pytest.raises(DeviceMemoryError):
            await bench.lifecycle.wake_up()
        assert bench.effects.ended_with == [bench.effects.failure]
        ends.set()
        await frozen

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


def test_failed_sleep_fails_the_replica() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.failure = DeviceMemoryError("cuMemUnmap: invalid value")
        with pytest.raises(DeviceMemoryError):
            await bench.lifecycle.sleep(SleepCommand())
        assert bench.lifecycle.state is FAILED

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


def test_sleep_that_is_refused_halfway_is_no_state_to_stay_in() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.failure = Unavailable("no memory", 1)
        with pytest.raises(ReplicaFailed, match="could not sleep: no memory"):
            await bench.lifecycle.sleep(SleepCommand())
        assert bench.lifecycle.state is FAILED

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
