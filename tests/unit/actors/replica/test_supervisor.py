"""Workers one after the other: who fails is replaced, until too many have failed in a row."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from actors.errors import CannotStart, EngineDied, ReplicaFailed, WorkerLost
from actors.protocol import MemoryChange, MemoryLeft
from actors.replica import supervisor as module
from actors.replica.supervisor import WorkerSupervisor

LIMIT = module._MAX_ATTEMPTS
PAUSES = [1.0, 2.0, 4.0, 8.0]
LEFT = MemoryLeft(context=3, graphs=2, kept_layers=10, torch_reserve=0, other=1)
SLEPT = MemoryChange(100, 10, 0, released_bytes=90, own_released_bytes=None, left=LEFT)
GONE = MemoryChange(100, 0, 0, 106, None, MemoryLeft(0, 0, 0, 0, 0), deep=True)


class Client:
    """Of a worker; `can_suspend` as the test says."""

    def __init__(self, log: list[str]) -> None:
        self.failed: asyncio.Future[ReplicaFailed] = asyncio.get_running_loop().create_future()
        self.can_suspend = False
        self._log = log

    @property
    def state(self) -> "Client":
        return self

    def retire(self) -> None:
        self._log.append("retire")
        self.failed.set_result(WorkerLost("ended behind a sleep"))


class Worker:
    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self.client: Any = Client(log)
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
        self.has_requests = False
        self.suspends = False
        self.worker = self
        self.closing: Callable[[], Awaitable[None]] | None = None
        self._log = log

    async def wake(self) -> MemoryChange:
        self._log.append(f"wake {self.number}")
        return MemoryChange(0, self.number, 0)

    async def sleep(self, level: int, deep: bool) -> MemoryChange:
        self._log.append(f"sleep {self.number} {level}{' deep' if deep else ''}")
        return replace(SLEPT, deep=deep and self.suspends)

    def image_released(self) -> None:
        self._log.append(f"no image {self.number}")

    def resumed(self, seconds: float) -> None:
        self._log.append(f"resumed {self.number} {seconds:g}")

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
        why_broken: they do not start.
        told: failures that the lifecycle would have learnt.
        now_s: the time; only the test moves it, and a start that takes `start_s`.
        pauses: between attempts.
        ended: what was logged last each time when nothing was left of a worker.
    """

    def __init__(self, ends_worker: bool = False) -> None:
        self.log: list[str] = []
        self.told: list[ReplicaFailed] = []
        self.workers: list[Worker] = []
        self.started = 0
        self.broken: set[int] = set()
        self.why_broken: Exception = OSError("no such card")
        self.without_runtime: set[int] = set()
        self.dead_at_start: set[int] = set()
        self.now_s = 0.0
        self.start_s = 0.0
        self.start_gate: asyncio.Event | None = None
        self.runtime_gate: asyncio.Event | None = None
        self.pauses: list[float] = []
        self.ended: list[str] = []
        self.supervisor = WorkerSupervisor(
            self._start,
            self._runtime,
            self.told.append,
            self._release,
            ends_worker,
            lambda: self.ended.append(self.log[-1]),
            lambda: self.now_s,
            self._pause,
        )

    @property
    def runtime(self) -> Any:
        return self.supervisor.runtime

    async def _release(self) -> None:
        self.log.append("release")

    async def _pause(self, seconds: float) -> None:
        assert self.log[-1].startswith(("ended", "start")), "between two attempts"
        assert self.ended[-1] == self.log[-1], "told before"
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
            raise self.why_broken
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


def run(scenario: Callable[[Bench], Awaitable[None]], ends_worker: bool = False) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
            await scenario(Bench(ends_worker))

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
            assert await supervisor.sleep(2) == SLEPT
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


def test_last_word_of_those_that_could_not_start_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.broken = set(range(2, 100))
        bench.why_broken = CannotStart("weights 15 GiB leave no KV cache")
        why = "answered a request; the last one could not start: weights 15 GiB leave no KV cache$"
        with pytest.raises(ReplicaFailed, match=why):
            await bench.supervisor.restart()

    run(scenario)
    assert caplog.text.count("a worker could not be started: weights 15 GiB") == LIMIT
    assert not any(record.exc_info for record in caplog.records)


def test_gives_up_when_none_can_be_started() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.broken = set(range(2, 100))
        with pytest.raises(ReplicaFailed, match=f"{LIMIT} workers in a row"):
            await bench.supervisor.restart()
        assert bench.started == 1 + LIMIT
        assert bench.supervisor.restarts == 0
        assert bench.pauses == PAUSES
        starts = [f"start {number}" for number in range(2, 2 + LIMIT)]
        assert bench.ended == ["ended 1", *starts], "for good, too"

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


# --- none, behind a sleep ---


@pytest.mark.parametrize("ends_worker", [False, True], ids=["deep, by no driver", "as configured"])
def test_sleep_ends_the_worker_and_the_wake_starts_another(ends_worker: bool) -> None:
    async def scenario(bench: Bench) -> None:
        supervisor = bench.supervisor
        await supervisor.start()
        bench.start_s = 6.0
        deep = not ends_worker
        for number in (1, 2):
            bench.log.clear()
            assert await supervisor.sleep(1, deep) == GONE
            how = f"sleep {number} 1{' deep' if deep else ''}"
            assert bench.log == [how, "retire", f"end {number}", f"ended {number}"]
            assert bench.runtime.number == number, "somebody may still ask how it was"

            bench.log.clear()
            assert await supervisor.sleep(1, deep) == MemoryChange(0, 0, 0, deep=True)
            assert bench.log == []
            assert await supervisor.wake() == MemoryChange(0, number + 1, 0)
            following = [f"start {number + 1}", f"resumed {number + 1} 6", f"wake {number + 1}"]
            assert bench.log == following
        await turns()
        assert bench.told == [], "no failure"
        assert supervisor.restarts == 0
        failure = EngineDied("later on")
        bench.workers[2].fail(failure)
        await turns()
        assert bench.told == [failure]

    run(scenario, ends_worker)


def test_worker_stays_where_the_driver_can_or_may_at_another_time() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.workers[0].client.can_suspend = True
        bench.runtime.suspends = True
        assert (await bench.supervisor.sleep(1, True)).deep
        bench.runtime.suspends = False  # as while layers are compiled
        assert await bench.supervisor.sleep(1, True) == SLEPT
        bench.workers[0].client.can_suspend = False
        assert await bench.supervisor.sleep(1) == SLEPT, "nobody asked for a deep one"
        assert "retire" not in bench.log

    run(scenario)


@pytest.mark.parametrize("ends_worker", [False, True])
def test_worker_with_frozen_requests_stays_until_they_are_gone(ends_worker: bool) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        bench.runtime.has_requests = True
        assert await bench.supervisor.sleep(1, True) == SLEPT
        assert bench.log[-1].startswith("sleep 1 1")
        bench.runtime.has_requests = False
        assert await bench.supervisor.sleep(1, True) == GONE

    run(scenario, ends_worker)


def test_image_goes_where_no_worker_can_let_it_go() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        await bench.supervisor.sleep(1, True)
        bench.log.clear()
        assert (await bench.supervisor.sleep(2)).deep
        assert bench.log == ["release", "no image 1"]

    run(scenario)


def test_worker_that_cannot_start_for_a_wake_is_a_failure_that_a_restart_mends() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        await bench.supervisor.sleep(1, True)
        bench.broken = {2, 3}
        with pytest.raises(OSError, match="no such card"):
            await bench.supervisor.wake()
        await bench.supervisor.restart()
        assert bench.runtime.number == 4
        assert bench.supervisor.restarts == 1
        assert bench.pauses == [1.0]

    run(scenario)


def test_time_without_a_worker_ends_no_row() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        for _ in range(LIMIT):
            await bench.supervisor.restart()
        await bench.supervisor.sleep(1, True)
        bench.now_s += 10 * module._ROW_S
        await bench.supervisor.wake()
        with pytest.raises(ReplicaFailed, match=f"{LIMIT} workers in a row"):
            await bench.supervisor.restart()

    run(scenario)


def test_close_without_a_worker_and_while_one_starts_for_a_wake() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        await bench.supervisor.sleep(1, True)
        bench.log.clear()
        await bench.supervisor.close()
        assert bench.log == []
        bench.start_gate = asyncio.Event()
        waking = asyncio.create_task(bench.supervisor.wake())
        await turns()
        await bench.supervisor.close()
        await asyncio.wait([waking])
        assert waking.cancelled()
        assert bench.log == ["start 2", "killed 2"]

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


def test_no_worker_follows_one_that_was_closed_in_the_middle_of_a_sleep() -> None:
    """The sleep fails with it, and the lifecycle wants the next one."""

    async def scenario(bench: Bench) -> None:
        await bench.supervisor.start()
        restarts: list[asyncio.Future[None]] = []

        async def end_the_sleep() -> None:
            restarts.append(asyncio.ensure_future(bench.supervisor.restart()))
            await asyncio.wait(restarts)

        bench.runtime.closing = end_the_sleep
        await bench.supervisor.close()
        (restart,) = restarts
        assert isinstance(restart.exception(), ReplicaFailed)
        assert bench.started == 1
        assert bench.log == ["start 1", "close 1", "end 1", "ended 1"]

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
