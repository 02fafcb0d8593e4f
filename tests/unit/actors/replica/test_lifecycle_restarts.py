"""A worker fails, and another one takes its place."""

import asyncio
from contextlib import suppress

import pytest

from actors.errors import (
    DeviceMemoryError,
    EngineDied,
    NoRoom,
    ReplicaFailed,
    Unavailable,
    WakeTimeout,
)
from actors.observer import Observer, WakeCause, WakeResult
from actors.protocol import MemoryChange, ReplicaState, SleepCommand, SleepMode
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    DRAINING,
    FAILED,
    LOST,
    NOTHING,
    RESTARTING,
    WAKING,
    Bench,
    Clock,
    GatedEffects,
    opened,
    run,
    settled,
    until,
)

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


def test_request_that_comes_in_the_wake_of_a_restart_begins_its_own_if_that_is_refused() -> None:
    """That one waits for no room: nobody needed the model when it began."""

    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        causes: list[WakeCause] = []
        asked, answered = asyncio.Event(), asyncio.Event()

        async def wake(cause: WakeCause) -> MemoryChange:
            causes.append(cause)
            asked.set()
            await answered.wait()
            if cause is WakeCause.START:
                raise NoRoom("full", 1.0)
            return NOTHING

        bench.effects.wake = wake  # type: ignore[method-assign]
        bench.lifecycle.restart(LOST)
        early = asyncio.create_task(bench.request())
        await asked.wait()
        assert bench.lifecycle.state is WAKING
        late = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 2)
        answered.set()
        assert await asyncio.gather(early, late) == ["served"] * 2
        assert causes == [WakeCause.START, WakeCause.REQUEST]

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
