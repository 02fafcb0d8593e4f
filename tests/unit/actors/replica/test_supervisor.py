"""Workers one after the other: who fails is replaced, until too many have failed in a row."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.errors import EngineDied, ReplicaFailed, WorkerLost
from actors.protocol import MemoryChange
from actors.replica import supervisor as module
from actors.replica.supervisor import WorkerSupervisor

LIMIT = module._MAX_ATTEMPTS
PAUSES = [1.0, 2.0, 4.0, 8.0]


class Client:
    def __init__(self) -> None:
        self.failed: asyncio.Future[ReplicaFailed] = asyncio.get_running_loop().create_future()


class Worker:
    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self.client: Any = Client()
        self._log = log

    async def end(self) -> None:
        self._log.append(f"end {self.number}")
        await asyncio.sleep(0)
        self._log.append(f"ended {self.number}")

    def fail(self, failure: ReplicaFailed) -> None:
        if not self.client.failed.done():
            self.client.failed.set_result(failure)


class Runtime:
    """Of one worker; `has_answered` as the test says."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self.has_answered = False
        self.closing: Callable[[], Awaitable[None]] | None = None
        self._log = log

    async def wake(self) -> MemoryChange:
        self._log.append(f"wake {self.number}")
        return MemoryChange(0, self.number, 0)

    async def sleep(self, level: int, deep: bool) -> MemoryChange:
        self._log.append(f"sleep {self.number} {level}")
        return MemoryChange(self.number, 0, 0)

    def abort_in_flight(self) -> None:
        self._log.append(f"abort {self.number}")

    def fail_in_flight(self, error: Exception) -> None:
        self._log.append(f"fail {self.number} {error}")

    async def close(self) -> None:
        self._log.append(f"close {self.number}")
        if self.closing is not None:
            await self.closing()


class Bench:
    """A supervisor whose workers are numbered from 1.

    Attributes:
        broken: numbers of the workers that do not start, or that there is no runtime for.
        told: failures that the lifecycle would have learnt.
        now_s: the time; only the test moves it, and a start that takes `start_s`.
        pauses: between attempts.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.told: list[ReplicaFailed] = []
        self.workers: list[Worker] = []
        self.started = 0
        self.broken: set[int] = set()
        self.without_runtime: set[int] = set()
        self.dead_at_start: set[int] = set()
        self.now_s = 0.0
        self.start_s = 0.0
        self.start_gate: asyncio.Event | None = None
        self.runtime_gate: asyncio.Event | None = None
        self.pauses: list[float] = []
        self.supervisor = WorkerSupervisor(
            self._start, self._runtime, self.told.append, lambda: self.now_s, self._pause
        )

    @property
    def runtime(self) -> Any:
        return self.supervisor.runtime

    async def _pause(self, seconds: float) -> None:
        assert self.log[-1].startswith(("ended", "start")), "between two attempts"
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def _start(self) -> Any:
        self.started += 1
        self.now_s += self.start_s
        self.log.append(f"start {self.started}")
        try:
            await asyncio.sleep(0)
            if self.start_gate is not None:
                await self.start_gate.wait()
        except asyncio.CancelledError:
            self.log.append(f"killed {self.started}")
            raise
        if self.started in self.broken:
            raise OSError("no such card")
        self.workers.append(Worker(self.started, self.log))
        return self.workers[-1]

    async def _runtime(self, client: Any) -> Any:
        await asyncio.sleep(0)
        number = self.workers[-1].number
        assert client is self.workers[-1].client
        if self.runtime_gate is not None:
            await self.runtime_gate.wait()
        if number in self.dead_at_start:
            self.workers[-1].fail(WorkerLost("at once"))
        if number in self.without_runtime:
            raise ValueError("no tokenizer")
        return Runtime(number, self.log)


def run(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
            await scenario(Bench())

    asyncio.run(bounded())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_effects_are_those_of_the_worker_that_there_is() -> None:
    async def scenario(bench: Bench) -> None:
        supervisor = bench.supervisor
        await supervisor.start()
        for number in (1, 2):
            bench.log.clear()
            assert await supervisor.wake() == MemoryChange(0, number, 0)
            assert await supervisor.sleep(2) == MemoryChange(number, 0, 0)
            supervisor.abort_in_flight()
            supervisor.fail_in_flight(ReplicaFailed("why"))
            assert bench.log == [
                f"wake {number}",
                f"sleep {number} 2",
                f"abort {number}",
                f"fail {number} why",
            ]
            await supervisor.restart()

    run(scenario)


def test_restart_replaces_the_worker_when_nothing_is_left_of_it() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        assert bench.supervisor.restarts == 0
        first = bench.runtime
        await bench.supervisor.restart()
        assert bench.log == ["start 1", "end 1", "ended 1", "start 2"]
        assert bench.runtime is not first
        assert bench.runtime.number == 2
        assert bench.supervisor.restarts == 1

    run(scenario)


def test_failure_of_the_worker_is_told_once() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        for worker in range(3):
            failure = EngineDied(f"failure of {worker + 1}")
            bench.workers[worker].fail(failure)
            await turns()
            assert len(bench.told) == worker + 1
            assert bench.told[worker] is failure
            await bench.supervisor.restart()
        await turns()
        assert len(bench.told) == 3

    run(scenario)


def test_worker_that_has_answered_begins_no_row() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        for _ in range(3 * LIMIT):
            bench.runtime.has_answered = True
            await bench.supervisor.restart()
        assert bench.pauses == []

    run(scenario)


def test_late_failure_of_an_old_worker_is_nobody_s_business() -> None:
    """As when its process is ended: the connection is lost."""

    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        restarting = asyncio.create_task(bench.supervisor.restart())
        while bench.log[-1] != "end 1":  # in the middle of its end
            await asyncio.sleep(0)
        bench.workers[0].fail(WorkerLost("its process has ended"))
        await restarting
        await bench.supervisor.restart()
        bench.workers[1].fail(WorkerLost("long after"))
        await turns()
        assert bench.told == []
        last = EngineDied("the one that there is")
        bench.workers[2].fail(last)
        await turns()
        assert bench.told == [last]

    run(scenario)


def test_worker_that_is_dead_as_soon_as_it_has_started_is_told_of() -> None:
    async def scenario(bench: Bench) -> None:
        bench.dead_at_start = {2}
        await bench.supervisor.start()
        await bench.supervisor.restart()
        assert bench.told == []  # the lifecycle has to have left the restart before
        await turns()
        assert [str(each) for each in bench.told] == ["at once"]

    run(scenario)


def test_first_worker_that_cannot_start_says_why() -> None:
    async def scenario(bench: Bench) -> None:
        bench.broken = {1}
        with pytest.raises(OSError, match="no such card"):
            await bench.supervisor.start()

    run(scenario)


def test_worker_that_cannot_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Bench) -> None:
        bench.broken, bench.without_runtime = {2}, {3}
        await bench.supervisor.start()
        await bench.supervisor.restart()
        assert bench.log[1:] == [
            *("end 1", "ended 1"),
            "start 2",
            "start 3",
            *("end 3", "ended 3"),  # a process that nobody could use
            "start 4",
        ]
        assert bench.runtime.number == 4
        assert bench.supervisor.restarts == 1

    run(scenario)
    assert caplog.text.count("a worker could not be started") == 2
    assert "no such card" in caplog.text


@pytest.mark.parametrize("served_s", [0.0, 120.0], ids=["not served", "served until a step hung"])
def test_gives_up_when_so_many_in_a_row_have_not_served_for_long(served_s: float) -> None:
    """As by a request that is sent again and again: every worker wakes, and some served others before."""

    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.now_s += 1e6  # whatever the first one did before
        for _ in range(LIMIT):
            await bench.supervisor.restart()
            await bench.supervisor.wake()
            bench.now_s += served_s
        workers = 1 + LIMIT
        assert bench.started == workers
        with pytest.raises(ReplicaFailed, match=f"{LIMIT} workers in a row"):
            await bench.supervisor.restart()
        assert bench.started == workers
        assert bench.log[-1] == f"ended {workers}", "the last one keeps no card"
        assert bench.pauses == PAUSES, "none before the first attempt, none before giving up"

    run(scenario)


def test_gives_up_when_none_can_be_started() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.broken = set(range(2, 100))
        with pytest.raises(ReplicaFailed, match=f"{LIMIT} workers in a row"):
            await bench.supervisor.restart()
        assert bench.started == 1 + LIMIT
        assert bench.supervisor.restarts == 0
        assert bench.pauses == PAUSES

    run(scenario)


def test_counts_anew_after_a_worker_that_has_served_for_long() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        for _ in range(3):
            for _ in range(LIMIT):
                await bench.supervisor.restart()
            bench.now_s += module._ROW_S
        assert bench.supervisor.restarts == 3 * LIMIT
        assert bench.pauses == PAUSES * 3, "they begin anew as well"

    run(scenario)


@pytest.mark.parametrize("gives_up", [True, False])
def test_workers_that_live_long_enough_are_no_row_though_none_ever_wakes(gives_up: bool) -> None:
    """As of a model that is held asleep."""
    apart_s = module._ROW_S / LIMIT - (1 if gives_up else 0)

    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        for _ in range(LIMIT):
            bench.now_s += apart_s
            await bench.supervisor.restart()
        assert max(bench.pauses) == PAUSES[-1]
        bench.now_s += apart_s
        if gives_up:
            with pytest.raises(ReplicaFailed, match=f"{LIMIT} workers in a row"):
                await bench.supervisor.restart()
            return
        for _ in range(10 * LIMIT):
            await bench.supervisor.restart()
            bench.now_s += apart_s
        assert max(bench.pauses) == PAUSES[-1]

    run(scenario)


def test_long_after_the_last_failure_there_is_no_pause() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        for _ in range(LIMIT - 1):
            await bench.supervisor.restart()
        bench.pauses.clear()
        bench.now_s += module._ROW_S
        await bench.supervisor.restart()
        assert bench.pauses == []

    run(scenario)


def test_starts_that_take_long_and_fail_are_a_row_all_the_same() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.broken = {2, 4, 6}
        bench.start_s = module._ROW_S
        await bench.supervisor.restart()
        await bench.supervisor.restart()
        with pytest.raises(ReplicaFailed, match=f"{LIMIT} workers in a row"):
            await bench.supervisor.restart()
        assert bench.started == 1 + LIMIT

    run(scenario)


def test_failed_starts_and_failed_workers_count_together() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.broken = {2, 3}
        await bench.supervisor.restart()
        assert bench.runtime.number == 4
        bench.broken = set(range(5, 100))
        with pytest.raises(ReplicaFailed):
            await bench.supervisor.restart()  # 2 to 4, and 5 and 6 as well
        assert bench.started == 6 == 1 + LIMIT

    run(scenario)


# --- the end ---


def test_close_stops_the_worker_in_good_order_and_ends_it_once() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.close()  # nothing to close
        await bench.supervisor.start()
        await bench.supervisor.close()
        await bench.supervisor.close()
        assert bench.log == ["start 1", "close 1", "end 1", "ended 1"]

    run(scenario)


@pytest.mark.parametrize("raises", [False, True])
def test_worker_that_fails_while_it_is_closed_is_ended_and_not_replaced(raises: bool) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()

        async def lose() -> None:
            bench.workers[0].fail(WorkerLost("in the middle of its end"))
            await turns()
            if raises:
                raise EngineDied("it cannot stop")

        bench.runtime.closing = lose
        closing = asyncio.ensure_future(bench.supervisor.close())
        await asyncio.wait([closing])
        assert (closing.exception() is not None) == raises
        assert bench.log == ["start 1", "close 1", "end 1", "ended 1"]
        assert bench.told == []

    run(scenario)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("begun", [False, True], ids=["no process yet", "ready, no runtime yet"])
def test_close_ends_a_worker_that_only_begins_at_once_and_no_other_follows(
    again: bool, begun: bool
) -> None:
    async def scenario(bench: Bench) -> None:
        if again:
            await bench.supervisor.start()
        never = asyncio.Event()
        bench.start_gate, bench.runtime_gate = (None, never) if begun else (never, None)
        bench.log.clear()
        start = bench.supervisor.restart() if again else bench.supervisor.start()
        starting = asyncio.create_task(start)
        await turns()
        await bench.supervisor.close()
        number = bench.started
        expected = [f"end {number}", f"ended {number}"] if begun else [f"killed {number}"]
        assert bench.log[-len(expected) :] == expected
        await asyncio.wait([starting])
        assert starting.cancelled()
        assert bench.started == 1 + again

    run(scenario)


def test_close_between_two_attempts_has_no_other_follow() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.broken = set(range(2, 100))
        pausing = asyncio.Event()

        async def pause(seconds: float) -> None:
            pausing.set()
            await asyncio.Event().wait()

        bench.supervisor._pause = pause
        restarting = asyncio.create_task(bench.supervisor.restart())
        await pausing.wait()
        await bench.supervisor.close()
        await asyncio.wait([restarting])
        assert bench.started == 2

    run(scenario)
