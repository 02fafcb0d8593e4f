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
from actors.observer import Observer, WakeCause, WakeResult
from actors.protocol import MemoryChange, MemoryLeft, ReplicaState, SleepCommand, SleepMode
from actors.replica.idle import IdleClock
from actors.replica.lifecycle import Lifecycle, SleepConfig

AWAKE, DRAINING, ASLEEP = ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.ASLEEP
WAKING, FAILED = ReplicaState.WAKING, ReplicaState.FAILED
RESTARTING = ReplicaState.RESTARTING
NOTHING = MemoryChange(0, 0, 0)


class GatedEffects:
    """Effects that record their calls, wait at a gate, and fail on demand.

    Attributes:
        gate: of the worker that there is.
        next_gate: that of the next worker.
        failure: what the worker that there is raises; the next one does so only if `all_fail`.
        at_end: called by an effect that is about to end.
        restart_gate: how long the next worker takes to start.
        restart_failure: why none does.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = opened()
        self.next_gate = opened()
        self.failure: Exception | None = None
        self.all_fail = False
        self.at_end: Callable[[], object] = lambda: None
        self.restart_gate = opened()
        self.restart_failure: Exception | None = None
        self.change = NOTHING
        self.on_abort: Callable[[], None] = lambda: None
        self.ended_with: list[Exception] = []
        self.has_ended = asyncio.Event()
        self._acts = False

    async def wake(self) -> MemoryChange:
        return await self._act("wake")

    async def sleep(self, level: int) -> MemoryChange:
        return await self._act(f"sleep {level}")

    def abort_in_flight(self) -> None:
        self.calls.append("abort")
        self.on_abort()

    def fail_in_flight(self, error: Exception) -> None:
        self.ended_with.append(error)
        self.has_ended.set()

    async def restart(self) -> None:
        await self._enter("restart", self.restart_gate)
        if self.restart_failure is not None:
            raise self.restart_failure
        self.gate = self.next_gate
        if not self.all_fail:
            self.failure = None

    async def _act(self, call: str) -> MemoryChange:
        await self._enter(call, self.gate)
        self.at_end()
        if self.failure is not None:
            raise self.failure
        return self.change

    async def _enter(self, call: str, gate: asyncio.Event) -> None:
        assert not self._acts, "never two of them at once"
        self.calls.append(call)
        self._acts = True
        try:
            await asyncio.sleep(0)  # no effect is over in the turn of the loop in which it begins
            await gate.wait()
        finally:
            self._acts = False


def opened() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


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

    async def generating(self) -> None:
        """A request that ends when the effects end it, and with what they say."""
        async with self.lifecycle.serving("generating"):
            await self.effects.has_ended.wait()
            raise self.effects.ended_with[0]

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


# --- a worker fails, and another one takes its place ---

LOST = EngineDied("the generation loop ended")

# How a replica got where its worker fails, what it has done until then, and what it does because of it.
# "unmapping" is a drain that is over, so that the sleep itself is cut.
COURSES = {
    "asleep": ([], [], [RESTARTING, ASLEEP], ["restart"]),
    "waking": ([WAKING], ["wake"], [RESTARTING, ASLEEP, WAKING, AWAKE], ["restart", "wake"]),
    "awake": ([], [], [RESTARTING, ASLEEP, WAKING, AWAKE], ["restart", "wake"]),
    "draining": ([DRAINING], [], [RESTARTING, ASLEEP], ["restart"]),
    "unmapping": ([DRAINING], ["sleep 1"], [RESTARTING, ASLEEP], ["restart"]),
}


async def brought(bench: Bench, place: str) -> list[asyncio.Task[None]]:
    """Bring a replica there, its effect, if any, in the middle; who has asked for that and waits."""
    if place == "asleep":
        return []
    if place == "waking":
        bench.effects.gate.clear()
        waiting = [asyncio.create_task(bench.lifecycle.wake_up()) for _ in range(2)]
        await until(lambda: bench.effects.calls == ["wake"])
        return waiting
    await bench.awake()
    if place == "awake":
        return []
    if place == "draining":
        request = asyncio.create_task(bench.generating())
        request.add_done_callback(lambda done: done.exception())
        await until(lambda: bench.lifecycle.idle.in_flight == 1)
    else:
        bench.effects.gate.clear()
    sleeping = asyncio.create_task(bench.lifecycle.sleep(SleepCommand()))
    await until(lambda: bench.lifecycle.state is DRAINING)
    for _ in range(20):
        await asyncio.sleep(0)
    return [sleeping]


async def settled(bench: Bench) -> None:
    await until(lambda: bench.lifecycle._transition is None)


@pytest.mark.parametrize("place", COURSES)
def test_worker_can_fail_in_any_state_and_the_next_takes_its_place(place: str) -> None:
    """Also behind an effect that never returns."""
    states, calls, states_after, calls_after = COURSES[place]

    async def scenario() -> None:
        bench = Bench()
        waiting = await brought(bench, place)
        assert (bench.states, bench.effects.calls) == (states, calls)
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        assert bench.lifecycle.state is RESTARTING  # at once, before anybody else has run
        assert bench.lifecycle.reason == "EngineDied: the generation loop ended"
        assert bench.effects.ended_with == [LOST]
        await until(lambda: bench.effects.calls == [*calls, "restart"])
        assert not any(each.done() for each in waiting)
        bench.effects.restart_gate.set()
        await asyncio.gather(*waiting)
        await settled(bench)
        assert bench.states == states + states_after
        assert bench.effects.calls == calls + calls_after
        assert bench.effects.ended_with == [LOST]
        assert bench.lifecycle.level == (1 if states_after[-1] is ASLEEP else 0)
        assert await bench.request() == "served"

    run(scenario)


@pytest.mark.parametrize("place", COURSES)
def test_everybody_is_released_if_no_worker_lives(place: str) -> None:
    states, _, _, _ = COURSES[place]

    async def scenario() -> None:
        bench = Bench()
        waiting = await brought(bench, place)
        bench.effects.restart_gate.clear()
        bench.effects.restart_failure = gone = ReplicaFailed("5 workers in a row have failed")
        bench.lifecycle.restart(LOST)
        late = [asyncio.create_task(bench.request()) for _ in range(2)]
        late.append(asyncio.create_task(bench.lifecycle.wake_up()))  # type: ignore[arg-type]
        late.append(asyncio.create_task(bench.lifecycle.sleep(SleepCommand())))  # type: ignore[arg-type]
        await until(lambda: bench.lifecycle.waiting_for_wake == 2)
        bench.effects.restart_gate.set()
        outcomes = await asyncio.gather(*waiting, *late, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ReplicaFailed] * len(outcomes)
        assert {str(outcome).partition("has failed: ")[2] for outcome in outcomes} == {
            f"ReplicaFailed: {gone}"
        }
        assert bench.states == [*states, RESTARTING, FAILED]
        assert bench.effects.ended_with == [LOST, gone]
        assert bench.lifecycle.waiting_for_wake == 0
        calls = list(bench.effects.calls)
        bench.lifecycle.restart(EngineDied("once more, later"))
        for order in (
            bench.request(),
            bench.lifecycle.wake_up(),
            bench.lifecycle.sleep(SleepCommand()),
        ):
            with pytest.raises(ReplicaFailed, match="5 workers in a row have failed"):
                await order
        assert bench.lifecycle.state is FAILED
        assert bench.effects.calls == calls, "nothing is done any more"

    run(scenario)


@pytest.mark.parametrize("place", COURSES)
def test_requests_during_a_restart_are_served_by_the_next_worker(place: str) -> None:
    states, calls, _, _ = COURSES[place]

    async def scenario() -> None:
        bench = Bench()
        waiting = await brought(bench, place)
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        requests = [asyncio.create_task(bench.request()) for _ in range(16)]
        waking = asyncio.create_task(bench.lifecycle.wake_up())
        await until(lambda: bench.lifecycle.waiting_for_wake == 16)
        bench.effects.restart_gate.set()
        assert await asyncio.gather(*requests) == ["served"] * 16
        await asyncio.gather(waking, *waiting)
        assert bench.lifecycle.state is AWAKE
        assert bench.states == [*states, RESTARTING, ASLEEP, WAKING, AWAKE]
        assert bench.effects.calls == [*calls, "restart", "wake"]

    run(scenario)


@pytest.mark.parametrize("mode", SleepMode)
def test_requests_in_flight_get_the_failure_also_those_that_a_drain_waits_for(
    mode: SleepMode,
) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        requests = [asyncio.create_task(bench.generating()) for _ in range(3)]
        await until(lambda: bench.lifecycle.idle.in_flight == 3)
        bench.effects.gate.clear()
        sleeping = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(mode=mode)))
        await until(lambda: bench.lifecycle.state is DRAINING)
        bench.lifecycle.restart(LOST)
        assert await asyncio.gather(*requests, return_exceptions=True) == [LOST] * 3
        await sleeping
        assert bench.states == [DRAINING, RESTARTING, ASLEEP]
        assert bench.lifecycle.idle.in_flight == 0

    run(scenario)


def test_awake_requests_in_flight_get_the_failure_and_nothing_of_them_is_left() -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=1000)
        await bench.awake()
        requests = [asyncio.create_task(bench.generating()) for _ in range(3)]
        await until(lambda: bench.lifecycle.idle.in_flight == 3)
        bench.lifecycle.restart(LOST)
        assert await asyncio.gather(*requests, return_exceptions=True) == [LOST] * 3
        await until(lambda: bench.lifecycle.state is AWAKE)
        await bench.lifecycle.sleep(SleepCommand())  # no drain waits for them
        assert bench.effects.calls == ["restart", "wake", "sleep 1"]

    run(scenario)


def test_failed_wake_restarts_and_its_waiters_are_served() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.failure = failure = DeviceMemoryError("cuMemCreate of 5 bytes: out of memory")
        reasons = []
        enter = bench.lifecycle._enter

        def note(state: ReplicaState, reason: str, *rest: object) -> None:
            enter(state, reason, *rest)  # type: ignore[arg-type]
            reasons.append(reason)

        bench.lifecycle._enter = note  # type: ignore[assignment,method-assign]
        assert await asyncio.gather(*(bench.request() for _ in range(3))) == ["served"] * 3
        assert bench.states == [WAKING, RESTARTING, ASLEEP, WAKING, AWAKE]
        assert bench.effects.calls == ["wake", "restart", "wake"]
        assert bench.effects.ended_with == [failure]
        assert reasons[1] == "DeviceMemoryError: cuMemCreate of 5 bytes: out of memory"
        assert bench.lifecycle.wakes == 1

    run(scenario)


def test_wakes_fail_with_every_worker_until_there_is_none() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.failure = DeviceMemoryError("cuMemCreate of 5 bytes: out of memory")
        bench.effects.all_fail = True

        def give_up() -> None:
            if bench.effects.calls.count("wake") == 3:
                bench.effects.restart_failure = ReplicaFailed("too many have failed")

        bench.effects.at_end = give_up
        outcomes = await asyncio.gather(
            *(bench.request() for _ in range(3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ReplicaFailed] * 3
        assert bench.effects.calls == ["wake", "restart"] * 3
        again = [RESTARTING, ASLEEP, WAKING]
        assert bench.states == [WAKING, *again, *again, RESTARTING, FAILED]
        with pytest.raises(ReplicaFailed, match="too many have failed"):
            await bench.lifecycle.sleep(SleepCommand())

    run(scenario)


@pytest.mark.parametrize("verb", ["wake", "sleep", "restart"])
def test_unexpected_error_in_an_effect_becomes_replica_failed(verb: str) -> None:
    """Of which a client learns the kind and no more."""

    async def scenario() -> None:
        bench = Bench()
        unexpected = TimeoutError("of the effect itself, not of the waiter")
        if verb != "wake":
            await bench.awake()
        if verb == "restart":
            bench.effects.restart_failure = unexpected
            bench.lifecycle.restart(LOST)
            with pytest.raises(ReplicaFailed, match=r"^test failed: TimeoutError$"):
                await asyncio.shield(bench.lifecycle._transition or asyncio.Future())
            assert bench.states == [RESTARTING, FAILED]
        else:
            bench.effects.failure = unexpected
            if verb == "sleep":
                await bench.lifecycle.sleep(SleepCommand())
            assert await bench.request() == "served"
            assert bench.states[:3] == [WAKING if verb == "wake" else DRAINING, RESTARTING, ASLEEP]
        assert type(bench.effects.ended_with[-1]) is ReplicaFailed
        assert str(bench.effects.ended_with[-1]) == "test failed: TimeoutError"

    run(scenario)


def test_wakes_of_both_workers_are_counted() -> None:
    async def scenario() -> None:
        told: list[tuple[WakeCause, WakeResult]] = []

        class Counter(Observer):
            def woke(self, cause: WakeCause, result: WakeResult, seconds: float) -> None:
                told.append((cause, result))

        effects = GatedEffects()
        effects.failure = LOST
        lifecycle = Lifecycle(effects, SleepConfig(), Clock(), "test", observer=Counter())
        await lifecycle.wake_up()
        assert told == [
            (WakeCause.COMMAND, WakeResult.FAILED),
            (WakeCause.START, WakeResult.OK),
        ]

    run(scenario)


def test_failure_in_the_moment_before_a_transition_runs_leaves_its_effect_undone() -> None:
    async def scenario() -> None:
        bench = Bench()
        waking = asyncio.create_task(bench.lifecycle.wake_up())
        await until(lambda: bench.lifecycle.state is WAKING)
        bench.lifecycle.restart(ReplicaFailed("just now"))
        await waking
        assert bench.states == [WAKING, RESTARTING, ASLEEP, WAKING, AWAKE]
        assert bench.effects.calls == ["restart", "wake"], "one wake, by the next worker"

    run(scenario)


def test_failure_that_an_effect_and_the_worker_tell_at_once_is_one() -> None:
    """The restart is entered after the effect has raised, and before its transition knows."""

    async def scenario() -> None:
        bench = Bench()
        loop = asyncio.get_running_loop()
        bench.effects.failure = LOST

        def tell_too() -> None:
            bench.effects.at_end = lambda: None
            loop.call_soon(bench.lifecycle.restart, LOST)

        bench.effects.at_end = tell_too
        assert await bench.request() == "served"
        assert bench.states == [WAKING, RESTARTING, ASLEEP, WAKING, AWAKE]
        assert bench.effects.ended_with == [LOST]

    run(scenario)


def test_wake_up_waits_for_the_next_worker_if_the_first_fails_right_behind_the_wake() -> None:
    async def scenario() -> None:
        bench = Bench()
        loop = asyncio.get_running_loop()

        def fail_next() -> None:
            bench.effects.at_end = lambda: None
            loop.call_soon(bench.lifecycle.restart, LOST)

        bench.effects.at_end = fail_next
        await bench.lifecycle.wake_up()
        assert bench.lifecycle.state is AWAKE
        assert bench.states == [WAKING, AWAKE, RESTARTING, ASLEEP, WAKING, AWAKE]

    run(scenario)


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


def test_failed_effect_ends_the_requests_that_a_sleep_froze() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        frozen = asyncio.create_task(bench.generating())
        await until(lambda: bench.lifecycle.idle.in_flight == 1)
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        bench.effects.failure = failure = DeviceMemoryError("cuMemMap: invalid value")
        await bench.lifecycle.wake_up()
        assert bench.lifecycle.state is AWAKE
        assert bench.effects.ended_with == [failure]
        with pytest.raises(DeviceMemoryError):
            await frozen

    run(scenario)


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


def test_second_failure_during_a_restart_changes_nothing() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        await until(lambda: bench.effects.calls == ["restart"])
        bench.lifecycle.restart(EngineDied("another one"))
        bench.effects.restart_gate.set()
        await until(lambda: bench.lifecycle.state is AWAKE)
        await settled(bench)
        assert bench.effects.calls == ["restart", "wake"]
        assert bench.effects.ended_with == [LOST]
        assert bench.states == [RESTARTING, ASLEEP, WAKING, AWAKE]

    run(scenario)


def test_restart_can_be_waited_for_and_where_there_is_none_nobody_waits() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.lifecycle.restarted()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        waiting = asyncio.create_task(bench.lifecycle.restarted())
        await until(lambda: bench.effects.calls == ["restart"])
        assert not waiting.done()
        bench.effects.restart_gate.set()
        await waiting
        assert bench.lifecycle.state is not RESTARTING

    run(scenario)


def test_worker_that_fails_in_its_first_wake_is_replaced_as_well() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.next_gate.clear()
        bench.lifecycle.restart(LOST)
        waiting = asyncio.create_task(bench.request())
        await until(lambda: bench.effects.calls == ["restart", "wake"])
        bench.effects.next_gate = opened()
        second = EngineDied("the second")
        bench.lifecycle.restart(second)
        assert await waiting == "served"
        again = [RESTARTING, ASLEEP, WAKING]
        assert bench.states == [*again, *again, AWAKE]
        assert bench.effects.ended_with == [LOST, second]

    run(scenario)


def test_next_worker_that_cannot_wake_now_stays_asleep() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.failure = Unavailable("another process holds the card", 7)
        bench.effects.all_fail = True
        bench.lifecycle.restart(LOST)
        with pytest.raises(Unavailable, match="another process"):
            await bench.request()
        await settled(bench)
        assert bench.lifecycle.state is ASLEEP
        assert FAILED not in bench.states
        bench.effects.failure = None
        assert await bench.request() == "served"
        assert bench.effects.calls.count("restart") == 1

    run(scenario)


def test_client_that_leaves_during_a_restart_cancels_only_its_wait() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        leaver, stayer = (asyncio.create_task(bench.request()) for _ in range(2))
        await until(lambda: bench.lifecycle.waiting_for_wake == 2)
        leaver.cancel()
        with suppress(asyncio.CancelledError):
            await leaver
        bench.effects.restart_gate.set()
        assert await stayer == "served"
        assert bench.effects.calls == ["restart", "wake"]

    run(scenario)


def test_restart_slower_than_a_request_s_patience() -> None:
    async def scenario() -> None:
        bench = Bench(wake_timeout_s=0.01)
        await bench.awake()
        bench.effects.restart_gate.clear()
        bench.lifecycle.restart(LOST)
        with pytest.raises(WakeTimeout, match=r"0\.01 s"):
            await bench.request()
        assert bench.lifecycle.state is RESTARTING
        bench.effects.restart_gate.set()
        await until(lambda: bench.lifecycle.state is AWAKE)
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
