"""The replica's side of a connection: calls, sequences, and the end of a worker."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actors.engine.outputs import EngineOutput, EngineStats
from actors.errors import DeviceMemoryShort, EngineDied, ReplicaFailed, WorkerLost
from actors.observer import Observer
from actors.protocol import DeviceNow, MemoryChange, MemoryLeft, WakeReport
from actors.replica import worker_client
from actors.replica.worker_client import WorkerClient
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.connection import Connection
from actors.worker.messages import (
    Abandon,
    Answer,
    Call,
    Failed,
    FinishCompiling,
    Logged,
    NewRequest,
    Obtained,
    Outputs,
    ReadDevice,
    Ready,
    Score,
    Sequences,
    Settle,
    Settled,
    Sleep,
    Starting,
    State,
    Stop,
    ToReplica,
    ToWorker,
    Wake,
    Woke,
    WorkerFacts,
    WorkerState,
)
from actors.worker.watchdog import WatchdogConfig

NOTHING_LEFT = MemoryLeft(0, 0, 0, 0, 0)
FACTS = WorkerFacts(4711, 8192, 151_936, 2**34, 2**33)
STATE = WorkerState(EngineStats(1, 2, 3, 4), 5, 6, "disk", 12, 7, 8, 9, 10, None, None)
REPORT = WakeReport(5, 1.25, 55.5, 3, 5, 0.5, intact=True)
CHANGE = MemoryChange(1, 2, 3)
DIED = EngineDied("the generation loop ended")


class Told(Observer):
    def __init__(self) -> None:
        self.reports: list[WakeReport] = []
        self.sources: list[str] = []

    def restored(self, report: WakeReport) -> None:
        self.reports.append(report)

    def obtained(self, source: str) -> None:
        self.sources.append(source)


class Peer:
    """A client, and instead of a worker what the test says."""

    def __init__(self, silence_timeout_s: float = 60.0, begin_timeout_s: float = 60.0) -> None:
        self.told = Told()
        limits = WatchdogConfig(
            silence_timeout_s=silence_timeout_s, other_timeout_s=begin_timeout_s
        )
        self.client = WorkerClient(self.told, limits)
        self.received: list[ToWorker] = []
        self.is_lost = False
        self.worker: Connection[ToWorker] = Connection(ToWorker, self.received.append, self._lose)

    def _lose(self) -> None:
        self.is_lost = True

    def answer(self, number: int, value: object) -> None:
        self.worker.send(Answer(number, msgspec.Raw(msgspec.msgpack.encode(value))))

    def send_at_once(self, *messages: ToReplica) -> None:
        """So that the client has all of them in one read."""
        frames: list[bytes] = []
        write = self.worker._write
        self.worker._write = frames.append  # type: ignore[assignment,method-assign]
        for message in messages:
            self.worker.send(message)
        self.worker._write = write  # type: ignore[method-assign]
        write(b"".join(frames))

    async def called(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Begin a call, and return when it has arrived."""
        before = len(self.received)
        call = asyncio.ensure_future(work)
        await until(lambda: len(self.received) > before)
        assert isinstance(self.received[-1], Call)
        return call


@asynccontextmanager
async def connected(peer: Peer | None = None) -> AsyncIterator[Peer]:
    peer, loop = peer or Peer(), asyncio.get_running_loop()
    upper, lower = socket.socketpair()
    await loop.create_connection(lambda: peer.client.protocol, sock=upper)
    await loop.create_connection(lambda: peer.worker, sock=lower)
    try:
        yield peer
    finally:
        peer.worker.close()
        await until(lambda: peer.client.failed.done())
        await until(lambda: peer.is_lost)


def run(scenario: Callable[[Peer], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5), connected() as peer:
            await scenario(peer)

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def new(name: str) -> NewRequest:
    return NewRequest({name: 0}, (1, 2), ResolvedSampling(), frozenset({2}))


def waiters(client: WorkerClient) -> list[asyncio.Future[Any]]:
    """Everything that can be waited for."""
    return [
        asyncio.ensure_future(work)
        for work in (
            client.wake(),
            client.sleep(1),
            client.settle(),
            client.finish_compiling(),
            client.score((1, 2), 3),
            client.read_device("node"),
        )
    ]


# --- calls ---


def test_calls_are_answered_in_whatever_order() -> None:
    device = DeviceNow("GPU-1", "card", 100, 60, 40)
    tasks = [Wake(), Sleep(1), Settle(), FinishCompiling(), Score((1, 2), 3), ReadDevice("node")]
    answers = [Woke(CHANGE, None, None, 0.5), CHANGE, None, None, [None], device]

    async def scenario(peer: Peer) -> None:
        calls = waiters(peer.client)
        await until(lambda: len(peer.received) == len(tasks))
        assert [each.task for each in peer.received if isinstance(each, Call)] == tasks
        numbers = [each.number for each in peer.received if isinstance(each, Call)]
        assert len(set(numbers)) == len(tasks)
        for number, value in reversed(list(zip(numbers, answers, strict=True))):
            peer.answer(number, value)
        assert await asyncio.gather(*calls) == answers

    run(scenario)


def test_refused_call_raises_what_was_answered_and_the_worker_lives() -> None:
    async def scenario(peer: Peer) -> None:
        call = await peer.called(peer.client.wake())
        peer.worker.send(Answer(0, error=DeviceMemoryShort("5 bytes are missing", 7.5)))
        with pytest.raises(DeviceMemoryShort, match="5 bytes are missing") as caught:
            await call
        assert caught.value.retry_after_s == 7.5
        peer.client.check_alive()
        call = await peer.called(peer.client.sleep(2))
        peer.answer(1, CHANGE)
        assert await call == CHANGE

    run(scenario)


def test_answer_that_is_a_failure_is_not_yet_the_worker_s() -> None:
    """Whether it has failed, it says itself."""

    async def scenario(peer: Peer) -> None:
        call = await peer.called(peer.client.wake())
        peer.worker.send(Answer(0, error=DIED))
        with pytest.raises(EngineDied):
            await call
        assert not peer.client.failed.done()

    run(scenario)


def test_cancelled_call_is_abandoned_and_its_late_answer_is_nobody_s() -> None:
    async def scenario(peer: Peer) -> None:
        call = await peer.called(peer.client.wake())
        other = await peer.called(peer.client.settle())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: len(peer.received) == 3)
        assert peer.received[2] == Abandon(0)
        peer.answer(0, Woke(CHANGE, None, None, 0.5))
        peer.answer(1, None)
        assert await other is None
        assert peer.client._calls == {}
        peer.client.check_alive()

    run(scenario)


def test_call_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async def scenario(peer: Peer) -> None:
        with pytest.raises(OverflowError):
            await peer.client.score([2**64], 1)
        assert peer.client._calls == {}
        peer.client.check_alive()

    run(scenario)


def test_call_that_is_cancelled_as_its_answer_comes_is_cancelled() -> None:
    async def scenario(peer: Peer) -> None:
        call = await peer.called(peer.client.wake())
        peer.answer(0, Woke(CHANGE, None, None, 0.5))
        await until(lambda: peer.client._calls[0].done())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        peer.client.check_alive()

    run(scenario)


# --- the end of a worker ---


@pytest.mark.parametrize("how", ["says so", "is gone", "sends nonsense"])
def test_failure_ends_all_calls_and_refuses_later_ones(how: str) -> None:
    kind = EngineDied if how == "says so" else WorkerLost

    async def scenario(peer: Peer) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        calls = waiters(peer.client)
        await until(lambda: len(peer.received) == len(calls))
        if how == "says so":
            peer.worker.send(Failed(DIED))
        elif how == "is gone":
            peer.worker.close()
        else:
            peer.worker._write(b"\x00\x00\x00\x01\xc1")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in outcomes] == [kind] * len(calls)
        assert type(await peer.client.failed) is kind
        with pytest.raises(kind):
            peer.client.check_alive()
        with pytest.raises(kind):
            peer.client.submit(new("a"))
        late = await asyncio.gather(*waiters(peer.client), return_exceptions=True)
        assert [type(each) for each in late] == [kind] * len(late)
        peer.client.cancel("a")
        await peer.client.stop()
        await turns()
        assert len(peer.received) == len(calls), "nothing is asked of it any more"

    run(scenario)


@pytest.mark.parametrize("answer_first", [False, True])
def test_failure_in_the_same_read_as_an_answer_counts(answer_first: bool) -> None:
    """What was computed may not be what was packed."""

    async def scenario(peer: Peer) -> None:
        calls = [await peer.called(peer.client.settle()), await peer.called(peer.client.settle())]
        messages = [Answer(0), Failed(DIED)]
        peer.send_at_once(*(messages if answer_first else reversed(messages)))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in outcomes] == [EngineDied] * 2

    run(scenario)


def test_first_failure_counts() -> None:
    async def scenario(peer: Peer) -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        peer.send_at_once(Failed(DIED), Failed(ReplicaFailed("and then")))
        peer.worker.close()
        await until(lambda: peer.is_lost)
        await turns()
        failure = await peer.client.failed
        assert type(failure) is EngineDied
        assert told == [], "nor is the second one an error"

    run(scenario)


@pytest.mark.parametrize("goes_on", [False, True])
def test_worker_that_fails_before_it_is_ready(goes_on: bool) -> None:
    async def scenario(peer: Peer) -> None:
        ready = asyncio.ensure_future(peer.client.ready())
        await turns()
        assert not ready.done()
        if goes_on:
            peer.send_at_once(Failed(DIED), Ready(FACTS, STATE))
        else:
            peer.worker.close()
        with pytest.raises(EngineDied if goes_on else WorkerLost):
            await ready

    run(scenario)


# --- the end in good order ---


def test_stop_waits_for_the_engine_and_closes_the_connection_once() -> None:
    async def scenario(peer: Peer) -> None:
        stopping = await peer.called(peer.client.stop())
        assert peer.received == [Call(0, Stop())]
        await peer.client.stop()
        await turns()
        assert not stopping.done()
        assert not peer.is_lost
        peer.answer(0, None)
        await stopping
        await until(lambda: peer.is_lost)
        assert len(peer.received) == 1

    run(scenario)


def test_worker_that_is_gone_in_the_middle_of_stop_is_not_waited_for() -> None:
    async def scenario(peer: Peer) -> None:
        settling = await peer.called(peer.client.settle())
        stopping = await peer.called(peer.client.stop())
        peer.worker.close()
        await stopping
        with pytest.raises(WorkerLost):
            await settling

    run(scenario)


def test_nothing_hangs_that_a_stopped_worker_did_not_answer() -> None:
    async def scenario(peer: Peer) -> None:
        calls = waiters(peer.client)
        await until(lambda: len(peer.received) == len(calls))
        stopping = await peer.called(peer.client.stop())
        peer.answer(len(calls), None)
        await stopping
        outcomes = await asyncio.gather(*calls, *waiters(peer.client), return_exceptions=True)
        assert all(isinstance(each, WorkerLost) for each in outcomes)

    run(scenario)


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
def test_worker_that_says_nothing_for_too_long_has_failed(is_ready: bool) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(5), connected(Peer(silence_timeout_s=0.2)) as peer:
            peer.worker.send(Starting())
            calls = [asyncio.ensure_future(peer.client.ready())]
            if is_ready:
                peer.worker.send(Ready(FACTS, STATE))
                await calls.pop()
                calls = waiters(peer.client)
            loop, began_s = asyncio.get_running_loop(), time.monotonic()
            spoken = asyncio.Event()

            def speak() -> None:
                peer.worker.send(State(STATE) if is_ready else Starting())
                spoken.set()

            loop.call_later(0.15, speak)  # puts the end off
            failure = await peer.client.failed
            assert spoken.is_set()
            assert time.monotonic() - began_s >= 0.34
            assert isinstance(failure, WorkerLost)
            assert "nothing for 0.2 s" in str(failure)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(outcome is failure for outcome in outcomes)

    asyncio.run(scenario())


def test_silence_in_which_the_replica_stood_still_as_well_is_the_worker_s_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`docker pause` stops both, and it is chance which of them goes on first."""
    paused_s = 0.0
    monotonic = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: monotonic() + paused_s)
    monkeypatch.setattr(worker_client, "time", clock)

    async def scenario() -> None:
        nonlocal paused_s
        async with asyncio.timeout(5), connected(Peer(silence_timeout_s=0.2)) as peer:
            peer.worker.send(Ready(FACTS, STATE))
            await peer.client.ready()
            heard_s = peer.client._heard_s
            paused_s = 100.0
            await until(lambda: peer.client._heard_s > heard_s)
            assert not peer.client.failed.done()
            failure = await peer.client.failed
            assert "nothing for 0.2 s" in str(failure), "it does not speak afterwards either"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_connected", [True, False])
def test_worker_that_never_says_a_word_has_failed(is_connected: bool) -> None:
    async def scenario() -> None:
        peer = Peer(silence_timeout_s=60.0, begin_timeout_s=0.05)
        async with asyncio.timeout(5):
            if not is_connected:
                with pytest.raises(WorkerLost, match=r"not begun within 0.05 s .watchdog.other_"):
                    await peer.client.ready()
                return
            async with connected(peer):
                with pytest.raises(WorkerLost, match="not begun within"):
                    await peer.client.ready()

    asyncio.run(scenario())


def test_worker_that_has_begun_has_all_the_time_it_wants_while_it_speaks() -> None:
    """Its first word in time is enough."""

    async def scenario() -> None:
        async with asyncio.timeout(5), connected(Peer(begin_timeout_s=0.05)) as peer:
            peer.worker.send(Starting())
            ready = asyncio.ensure_future(peer.client.ready())
            await asyncio.sleep(0.1)  # past the limit
            peer.worker.send(Ready(FACTS, STATE))
            await ready

    asyncio.run(scenario())


def test_client_that_is_closed_listens_no_more() -> None:
    async def scenario() -> None:
        peer = Peer(begin_timeout_s=0.01)
        peer.client.close()
        await asyncio.sleep(0.05)
        assert not peer.client.failed.done()

    asyncio.run(scenario())


# --- sequences ---


def test_submissions_and_cancels_of_one_turn_go_in_one_message_in_order() -> None:
    async def scenario(peer: Peer) -> None:
        client = peer.client
        client.submit(new("a"))
        client.submit(new("b"))
        client.cancel("y")
        client.submit(new("c"))
        client.cancel("b")  # that is new itself: cancels come last
        client.cancel("x")
        await until(lambda: bool(peer.received))
        await turns()
        assert peer.received == [Sequences([new("a"), new("b"), new("c")], ["y", "b", "x"])]

    run(scenario)


def test_each_turn_has_a_message_of_its_own_and_an_idle_one_none() -> None:
    async def scenario(peer: Peer) -> None:
        client = peer.client
        client.cancel("a")
        await asyncio.sleep(0)
        client.submit(new("b"))
        await asyncio.sleep(0)
        await turns()
        client.cancel("b")
        await until(lambda: len(peer.received) == 3)
        await turns()
        assert peer.received == [
            Sequences([], ["a"]),
            Sequences([new("b")], []),
            Sequences([], ["b"]),
        ]

    run(scenario)


# --- what comes ---


def test_ready_brings_facts_and_state_and_states_follow() -> None:
    async def scenario(peer: Peer) -> None:
        peer.worker.send(Ready(FACTS, STATE))
        assert await peer.client.ready() is peer.client
        assert peer.client.facts == FACTS
        assert peer.client.state == STATE
        later = msgspec.structs.replace(STATE, mapped_bytes=99)
        call = await peer.called(peer.client.settle())
        peer.send_at_once(State(later), Answer(0))
        await call
        assert peer.client.state == later, "whoever has the answer finds the state of it"

    run(scenario)


def test_worker_that_failed_has_nothing_mapped_and_computes_nothing() -> None:
    async def scenario(peer: Peer) -> None:
        peer.worker.send(Ready(FACTS, STATE))
        await peer.client.ready()
        assert peer.client.state.mapped_bytes == 5
        peer.send_at_once(Failed(DIED), State(STATE))
        await peer.client.failed
        state = peer.client.state
        assert (state.mapped_bytes, state.wake_bytes, state.image_origin) == (0, 11, "disk")
        assert state.engine == EngineStats(0, 0, 0, 4)

    run(scenario)


def test_outputs_are_told_step_by_step() -> None:
    async def scenario(peer: Peer) -> None:
        told: list[Sequence[EngineOutput]] = []
        steps = [[EngineOutput("a", (1,), None), EngineOutput("b", (2,), None)], []]
        steps.append([EngineOutput("a", (3,), None)])
        peer.worker.send(Outputs(steps[0]))  # before anybody wants to be told
        peer.worker.send(Obtained("disk"))
        await until(lambda: peer.told.sources == ["disk"])
        peer.client.outputs = told.append
        peer.send_at_once(*(Outputs(step) for step in steps))
        await until(lambda: len(told) == 3)
        assert told == steps

    run(scenario)


@pytest.mark.parametrize("intact", [True, False])
def test_wake_has_settled_only_if_its_bytes_are_intact(intact: bool) -> None:
    report = replace(REPORT, intact=intact)

    async def scenario(peer: Peer) -> None:
        settled = []
        peer.client.settled = lambda: settled.append(1)
        peer.worker.send(Settled(report))
        await until(lambda: bool(peer.told.reports))
        assert peer.told.reports == [report]
        assert settled == [1] * intact

    run(scenario)


def test_worker_s_lines_are_logged_under_their_names(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(peer: Peer) -> None:
        peer.worker.send(Logged(logging.WARNING, "actors.worker.residency", "90 % of it"))
        peer.worker.send(Obtained("image"))
        await until(lambda: peer.told.sources == ["image"])

    run(scenario)
    assert ("actors.worker.residency", logging.WARNING, "90 % of it") in caplog.record_tuples


def test_worker_that_was_ended_behind_a_sleep_has_nothing_and_comes_back_whole() -> None:
    async def scenario(peer: Peer) -> None:
        asleep = msgspec.structs.replace(
            STATE, mapped_bytes=0, wake_bytes=100, residue=7, can_suspend=True
        )
        peer.worker.send(Ready(FACTS, asleep))
        client = await peer.client.ready()
        assert not client.has_retired
        peer.worker.send(State(STATE))  # too late
        client.retire()
        assert client.has_retired
        assert client.facts == msgspec.structs.replace(FACTS, process_id=0)
        assert client.state.wake_bytes == 107
        assert (client.state.residue, client.state.device_held) == (0, 0)
        assert client.state.left == NOTHING_LEFT
        assert client.state.suspended
        assert client.state.image_bytes == asleep.image_bytes
        client.image_released()
        assert (client.state.image_origin, client.state.image_bytes) == ("", 0)
        told = client.state
        await until(lambda: peer.is_lost)  # a worker ends when its replica has left
        assert client.state is told
        with pytest.raises(WorkerLost, match="ended behind a sleep"):
            await client.read_device("node")

    run(scenario)
