"""A replica on a card that others want, too: it makes room, or not, and its own wake waits for room."""

import asyncio

import pytest

from actors.errors import NoRoom, Unavailable
from actors.observer import Observer, SleepCause
from actors.protocol import LastSleep, SleepCommand, SleepMode
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from tests.unit.actors.replica.lifecycle_bench import (
    ASLEEP,
    AWAKE,
    DRAINING,
    WAKING,
    Bench,
    Causes,
    GatedEffects,
    run,
    settled,
    until,
)

NOBODY = "nobody waits for the wake any more"


def test_idle_replica_makes_room() -> None:
    async def scenario() -> None:
        bench, told = Bench(), Causes()
        bench.lifecycle._observer = told
        await bench.awake()
        assert bench.lifecycle.slept_why() is None
        await bench.lifecycle.make_room(None, "2 GiB for another", "another")
        assert bench.states == [DRAINING, ASLEEP]
        assert bench.lifecycle.reason == "2 GiB for another"
        assert told.causes == [SleepCause.ROOM]
        assert bench.lifecycle.slept_why() == LastSleep("room", "another", 0.0)
        bench.clock.now_s += 7
        await bench.lifecycle.wake_up()
        assert bench.lifecycle.slept_why() == LastSleep("room", "another", 7.0), "awake, too"
        await bench.lifecycle.sleep(SleepCommand())
        assert bench.lifecycle.slept_why() == LastSleep("command", "", 0.0)

    run(scenario)


def test_request_that_came_before_the_order_keeps_it_awake() -> None:
    """Whoever ordered it went by the past: Ollama #17408, llama.cpp #21678."""

    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        await bench.lifecycle.make_room(None, "room")
        assert bench.lifecycle.state is AWAKE
        ends.set()
        assert await request == "served"

    run(scenario)


def test_request_that_comes_behind_the_order_waits_its_turn() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        bench.effects.gate.clear()
        order = asyncio.create_task(bench.lifecycle.make_room(None, "room"))
        await until(lambda: bench.lifecycle.state is DRAINING)
        request = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        bench.effects.gate.set()
        assert await request == "served"
        await order
        assert bench.states == [DRAINING, ASLEEP, WAKING, AWAKE]

    run(scenario)


def test_busy_replica_that_is_drained_takes_nothing_new() -> None:
    async def scenario() -> None:
        bench, told = Bench(), Causes()
        bench.lifecycle._observer = told
        await bench.awake()
        request, ends = await bench.in_flight()
        order = asyncio.create_task(bench.lifecycle.make_room(SleepMode.WAIT, "room"))
        await until(lambda: bench.lifecycle.state is DRAINING)
        ends.set()
        assert await request == "served"
        await order
        assert bench.lifecycle.state is ASLEEP
        assert told.causes == [SleepCause.PREEMPTED]

    run(scenario)


def test_drain_that_takes_too_long_leaves_it_awake() -> None:
    async def scenario() -> None:
        bench = Bench(drain_timeout_s=0.01)
        await bench.awake()
        request, ends = await bench.in_flight()
        await bench.lifecycle.make_room(SleepMode.WAIT, "room")
        assert bench.lifecycle.state is AWAKE
        ends.set()
        await request

    run(scenario)


class Stays(Observer):
    def __init__(self) -> None:
        self.count = 0

    def drain_taken_back(self) -> None:
        self.count += 1


async def drains(bench: Bench, taken_back: asyncio.Event) -> asyncio.Task[None]:
    order = asyncio.create_task(
        bench.lifecycle.make_room(SleepMode.WAIT, "room", "another", taken_back=taken_back)
    )
    await until(lambda: bench.lifecycle.state is DRAINING)
    return order


def test_drain_that_nobody_wants_any_more_ends_and_requests_go_on() -> None:
    async def scenario() -> None:
        bench, told, taken_back = Bench(), Stays(), asyncio.Event()
        bench.lifecycle._observer = told
        await bench.awake()
        request, ends = await bench.in_flight()
        order = await drains(bench, taken_back)
        waiting = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        taken_back.set()
        await order
        assert await waiting == "served"
        assert (bench.states, bench.effects.calls) == ([DRAINING, AWAKE], [])
        assert told.count == 1
        ends.set()
        assert await request == "served"
        again = await drains(bench, asyncio.Event())  # it has forgotten the first one
        await again
        assert bench.lifecycle.state is ASLEEP

    run(scenario)


def test_order_that_was_taken_back_before_it_began() -> None:
    async def scenario() -> None:
        bench, taken_back = Bench(), asyncio.Event()
        await bench.awake()
        request, ends = await bench.in_flight()
        taken_back.set()
        await bench.lifecycle.make_room(SleepMode.WAIT, "room", taken_back=taken_back)
        assert (bench.states, bench.effects.calls) == ([], [])
        ends.set()
        await request

    run(scenario)


def test_sleep_that_has_begun_is_not_taken_back() -> None:
    async def scenario() -> None:
        bench, taken_back = Bench(), asyncio.Event()
        await bench.awake()
        request, ends = await bench.in_flight()
        bench.effects.gate.clear()
        order = await drains(bench, taken_back)
        ends.set()
        await request
        await until(lambda: bench.effects.calls == ["sleep 1"])
        taken_back.set()
        bench.effects.gate.set()
        await order
        assert bench.states == [DRAINING, ASLEEP]

    run(scenario)


@pytest.mark.parametrize("mode", list(SleepMode))
def test_operator_who_wants_it_asleep_has_it_so_all_the_same(mode: SleepMode) -> None:
    async def scenario() -> None:
        bench, taken_back = Bench(), asyncio.Event()
        await bench.awake()
        request, ends = await bench.in_flight()
        bench.effects.on_abort = ends.set
        order = await drains(bench, taken_back)
        asked = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(mode=mode)))
        await asyncio.sleep(0)
        taken_back.set()
        await order
        if mode is SleepMode.WAIT:
            assert bench.lifecycle.state is DRAINING
            assert not asked.done()
            ends.set()
        await asked
        assert bench.lifecycle.state is ASLEEP
        ends.set()
        await request

    run(scenario)


def test_frozen_requests_go_on_by_themselves() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        await bench.lifecycle.make_room(SleepMode.KEEP, "room")
        await until(lambda: bench.lifecycle.state is AWAKE)
        assert bench.effects.calls == ["sleep 1", "wake"]
        assert not request.done()
        ends.set()
        assert await request == "served"

    run(scenario)


@pytest.mark.parametrize("clients_retry_after_s", [0.001, 240.0])
def test_frozen_requests_ask_again_where_there_was_no_room(
    clients_retry_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.replica.lifecycle._FROZEN_RETRY_S", 0.01)

    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        refuse_wakes(bench, 2, clients_retry_after_s)
        await bench.lifecycle.make_room(SleepMode.KEEP, "room")
        await until(lambda: bench.lifecycle.state is AWAKE)
        assert bench.effects.calls == ["sleep 1", "wake", "wake", "wake"]
        ends.set()
        assert await request == "served"

    run(scenario)


def refuse_wakes(bench: Bench, count: int, retry_after_s: float = 0.01) -> None:
    """The next so many."""
    refusals = iter([NoRoom("full", retry_after_s)] * count)

    def next_failure() -> None:
        is_wake = bench.effects.calls[-1] == "wake"
        bench.effects.failure = next(refusals, None) if is_wake else None

    bench.effects.at_end = next_failure


@pytest.mark.parametrize("comes", ["while it freezes", "between two tries"])
def test_frozen_requests_ask_again_where_the_wake_of_another_request_was_refused(
    comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.replica.lifecycle._FROZEN_RETRY_S", 0.01)

    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        order = asyncio.create_task(bench.lifecycle.make_room(SleepMode.KEEP, "room"))
        refusals = 1
        if comes == "between two tries":
            refusals = 2
            refuse_wakes(bench, refusals)
            await order
            await until(lambda: bench.effects.calls == ["sleep 1", "wake"])
            await until(lambda: bench.lifecycle.state is ASLEEP)
            bench.effects.gate.clear()
        else:
            bench.effects.gate.clear()
            refuse_wakes(bench, refusals)
            await until(lambda: bench.effects.calls == ["sleep 1"])
        other = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        if comes == "between two tries":
            await asyncio.sleep(0.02)  # the next try finds a wake under way
        bench.effects.gate.set()
        with pytest.raises(NoRoom):
            await other
        await order
        await until(lambda: bench.lifecycle.state is AWAKE)
        assert bench.effects.calls == ["sleep 1", *["wake"] * (refusals + 1)]
        ends.set()
        assert await request == "served"

    run(scenario)


def test_frozen_requests_ask_again_behind_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.replica.lifecycle._FROZEN_RETRY_S", 0.01)

    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        refuse_wakes(bench, 2)
        await bench.lifecycle.make_room(SleepMode.KEEP, "room")
        await until(lambda: bench.effects.calls == ["sleep 1", "wake"])
        await bench.lifecycle.sleep(SleepCommand(hold=True))
        await asyncio.sleep(0.05)
        assert bench.effects.calls == ["sleep 1", "wake"], "held"
        with pytest.raises(NoRoom):
            await bench.lifecycle.wake_up()
        await until(lambda: bench.lifecycle.state is AWAKE)
        assert bench.effects.calls == ["sleep 1", "wake", "wake", "wake"]
        ends.set()
        assert await request == "served"

    run(scenario)


def test_what_an_operator_freezes_later_does_not_go_on_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.replica.lifecycle._FROZEN_RETRY_S", 0.02)

    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        refuse_wakes(bench, 1)
        await bench.lifecycle.make_room(SleepMode.KEEP, "room")
        await until(lambda: bench.effects.calls == ["sleep 1", "wake"])
        await settled(bench)
        await bench.lifecycle.wake_up()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        calls = list(bench.effects.calls)
        await asyncio.sleep(0.06)
        assert bench.lifecycle.state is ASLEEP
        assert bench.effects.calls == calls
        ends.set()
        await request

    run(scenario)


def test_wake_for_frozen_requests_whose_clients_have_left_is_given_up() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        requests = [await bench.in_flight() for _ in range(2)]

        def wait_for_room() -> None:
            bench.effects.gate.clear()

        bench.effects.at_end = wait_for_room  # the wake
        await bench.lifecycle.make_room(SleepMode.KEEP, "room")
        await until(lambda: bench.lifecycle.state is WAKING)
        for (request, _), given_up in zip(requests, ([], [NOBODY]), strict=True):
            assert bench.effects.given_up == []
            request.cancel()
            await asyncio.wait([request])
            assert bench.effects.given_up == given_up
        bench.effects.gate.set()
        await settled(bench)

    run(scenario)


def test_frozen_requests_do_not_end_a_hold() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        bench.effects.gate.clear()
        order = asyncio.create_task(bench.lifecycle.make_room(SleepMode.KEEP, "room"))
        await until(lambda: bench.lifecycle.state is DRAINING)
        hold = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True)))
        await asyncio.sleep(0)
        bench.effects.gate.set()
        await order
        await hold
        await settled(bench)
        assert bench.lifecycle.state is ASLEEP
        ends.set()
        await request

    run(scenario)


def test_sleeper_and_waker_make_no_room() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.lifecycle.make_room(None, "room")
        assert bench.lifecycle.state is ASLEEP
        bench.effects.gate.clear()
        wake = asyncio.create_task(bench.lifecycle.wake_up())
        await until(lambda: bench.lifecycle.state is WAKING)
        await bench.lifecycle.make_room(
            SleepMode.WAIT, "room"
        )  # at once: that wake may wait for who asks
        bench.effects.gate.set()
        await wake
        assert bench.lifecycle.state is AWAKE

    run(scenario)


# --- its own wake ---


def test_wake_that_nobody_waits_for_any_more_is_given_up() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        clients = [asyncio.create_task(bench.request()) for _ in range(2)]
        await until(lambda: bench.lifecycle.waiting_for_wake == 2)
        clients[0].cancel()
        await asyncio.wait([clients[0]])
        assert bench.effects.given_up == []
        clients[1].cancel()
        await asyncio.wait([clients[1]])
        assert bench.effects.given_up == [NOBODY]
        bench.effects.gate.set()
        await settled(bench)

    run(scenario)


@pytest.mark.parametrize("by_operator", [False, True])
def test_who_comes_when_a_wake_was_given_up_begins_another(by_operator: bool) -> None:
    """It goes on for a while where the device is being read."""

    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        bench.effects.failure = Unavailable(NOBODY)
        client = asyncio.create_task(bench.request())
        await until(lambda: bench.effects.calls == ["wake"])
        client.cancel()
        await asyncio.wait([client])
        lifecycle = bench.lifecycle
        comes = asyncio.create_task(lifecycle.wake_up() if by_operator else bench.request())
        await asyncio.sleep(0)

        def no_failure() -> None:
            if len(bench.effects.calls) > 1:
                bench.effects.failure = None

        bench.effects.at_end = no_failure
        bench.effects.gate.set()
        await comes
        assert bench.effects.calls == ["wake", "wake"]
        assert lifecycle.state is AWAKE

    run(scenario)


def test_wake_that_an_operator_waits_for_is_not() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        client = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.waiting_for_wake == 1)
        wake = asyncio.create_task(bench.lifecycle.wake_up())
        await asyncio.sleep(0)
        client.cancel()
        await asyncio.wait([client])
        assert bench.effects.given_up == []
        bench.effects.gate.set()
        await wake

    run(scenario)


def test_hold_ends_a_wait_for_room() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.effects.gate.clear()
        bench.effects.failure = Unavailable("withdrawn")
        client = asyncio.create_task(bench.request())
        await until(lambda: bench.lifecycle.state is WAKING)
        hold = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True)))
        await asyncio.sleep(0)
        assert bench.effects.given_up == ["an operator put the model to sleep"]
        bench.effects.gate.set()
        await hold
        assert bench.lifecycle.state is ASLEEP
        with pytest.raises(Unavailable):
            await client

    run(scenario)


@pytest.mark.parametrize("waits_for_room", [True, False])
def test_hold_in_the_same_turn_as_the_request_that_wakes(waits_for_room: bool) -> None:
    """The wake has not begun to run. Where it would wait for room, nobody is asked for any."""

    async def scenario() -> None:
        bench = Bench()
        bench.effects.wakes_wait_for_room = waits_for_room
        await bench.awake()
        await bench.lifecycle.sleep(SleepCommand())
        bench.effects.calls.clear()
        request = asyncio.create_task(bench.request())
        hold = asyncio.create_task(bench.lifecycle.sleep(SleepCommand(hold=True)))
        await hold
        assert bench.lifecycle.state is ASLEEP
        assert bench.effects.calls == ([] if waits_for_room else ["wake", "sleep 1"])
        if waits_for_room:
            with pytest.raises(Unavailable):
                await request
        else:
            await request
        await bench.lifecycle.wake_up()
        assert bench.effects.calls[-1] == "wake", "the next one is wanted"

    run(scenario)


def test_first_and_last_request_are_told() -> None:
    async def scenario() -> None:
        effects = GatedEffects()
        lifecycle = Lifecycle(effects, SleepConfig(), lambda: 0.0, "test")
        async with lifecycle.serving("one"):
            async with lifecycle.serving("two"):
                pass
            assert effects.told_busy == [True]
        assert effects.told_busy == [True, False]

    run(scenario)


def test_sleeper_that_is_asked_to_sleeps_deep() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        await bench.lifecycle.make_room(None, "room", deep=True)
        assert bench.effects.calls == [], "it has woken since"
        await bench.lifecycle.sleep(SleepCommand())
        await bench.lifecycle.make_room(None, "room", deep=True)
        await bench.lifecycle.make_room(None, "room", deep=True)
        assert bench.effects.calls == ["sleep 1", "sleep 1 deep"]

    run(scenario)


def test_sleeper_that_is_wanted_again_stays_whole() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.awake()
        request, ends = await bench.in_flight()
        await bench.lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        await bench.lifecycle.make_room(None, "room", deep=True)
        assert bench.effects.calls == ["sleep 1"]
        ends.set()
        await request

    run(scenario)
