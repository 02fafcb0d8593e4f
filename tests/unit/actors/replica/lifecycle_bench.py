"""A sleep/wake state machine on effects that are gates, and what its tests ask it for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from actors.errors import (
    EngineDied,
)
from actors.observer import Observer, SleepCause, WakeCause
from actors.protocol import MemoryChange, ReplicaState
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig

AWAKE, DRAINING, ASLEEP = ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.ASLEEP
WAKING, FAILED = ReplicaState.WAKING, ReplicaState.FAILED
RESTARTING = ReplicaState.RESTARTING
NOTHING = MemoryChange(0, 0, 0)
MONDAY = datetime(2026, 11, 23, tzinfo=UTC)
LOST = EngineDied("the generation loop ended")


class Causes(Observer):
    """Remembers why a replica slept."""

    def __init__(self) -> None:
        self.causes: list[SleepCause] = []

    def slept(self, cause: SleepCause, level: int, seconds: float, change: MemoryChange) -> None:
        self.causes.append(cause)


class GatedEffects:
    """Effects that record their calls, wait at a gate, and fail on demand.

    Attributes:
        gate: of the worker that there is.
        next_gate: that of the next worker.
        failure: what the worker that there is raises; the next one does so only if `all_fail`.
        at_end: called by an effect that is about to end.
        restart_gate: how long the next worker takes to start.
        restart_failure: why none does.
        can_deepen: whether a sleep gets deep.
        wakes_wait_for_room: as on a card that models share.
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
        self.can_deepen = True
        self.wakes_wait_for_room = False
        self.on_abort: Callable[[], None] = lambda: None
        self.ended_with: list[Exception] = []
        self.has_ended = asyncio.Event()
        self.given_up: list[str] = []
        self.told_busy: list[bool] = []
        self.told_waiting: list[bool] = []
        self._acts = False

    async def wake(self, cause: WakeCause) -> MemoryChange:
        return await self._act("wake")

    def give_up_waiting(self, reason: str) -> bool:
        self.given_up.append(reason)
        return self.wakes_wait_for_room

    def requests_wait(self, wait: bool) -> None:
        self.told_waiting.append(wait)

    def has_requests(self, busy: bool) -> None:
        self.told_busy.append(busy)

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        change = await self._act(f"sleep {level}{' deep' if deep else ''}")
        return replace(change, deep=deep and self.can_deepen)

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
    """A lifecycle on fakes; `states` records every state it enters.

    Attributes:
        clock: seconds, of idle times; the time of day, too, counted from `MONDAY`.
    """

    def __init__(
        self, now: Callable[[], float] | None = None, is_pinned: bool = False, **config: object
    ) -> None:
        self.effects = GatedEffects()
        self.clock = Clock()
        self.states: list[ReplicaState] = []
        defaults = {"idle_timeout_s": 10, "idle_check_interval_s": 0.001}
        settings = SleepConfig.model_validate(defaults | config)
        self.lifecycle = Lifecycle(
            self.effects,
            settings,
            now or self.clock,
            "test",
            is_pinned=is_pinned,
            wall=lambda: MONDAY + timedelta(seconds=self.clock.now_s),
        )
        enter = self.lifecycle._enter

        def record(state: ReplicaState, *rest: object) -> None:
            self.states.append(state)
            enter(state, *rest)  # type: ignore[arg-type]

        self.lifecycle._enter = record  # type: ignore[assignment,method-assign]

    async def awake(self) -> None:
        await self.lifecycle.wake_up()
        self.states.clear()
        self.effects.calls.clear()

    async def request(
        self,
        until: asyncio.Event | None = None,
        name: str = "r",
        keep_alive_s: float | None = None,
    ) -> str:
        async with self.lifecycle.serving(name, keep_alive_s):
            assert self.lifecycle.state is not ASLEEP
            if until is not None:
                await until.wait()
        return "served"

    async def generating(self) -> None:
        """A request that ends when the effects end it, and with what they say."""
        async with self.lifecycle.serving("generating"):
            await self.effects.has_ended.wait()
            raise self.effects.ended_with[0]

    async def in_flight(
        self, keep_alive_s: float | None = None
    ) -> tuple[asyncio.Task[str], asyncio.Event]:
        """A request that has begun, and what ends it."""
        ends, before = asyncio.Event(), self.lifecycle.idle.in_flight
        request = asyncio.create_task(self.request(ends, keep_alive_s=keep_alive_s))
        await until(lambda: self.lifecycle.idle.in_flight == before + 1)
        return request, ends


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def settled(bench: Bench) -> None:
    await until(lambda: bench.lifecycle._transition is None)
