"""Messages between a replica and its worker, over real sockets and cut into pieces."""

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import pytest

from actors import errors
from actors.engine.outputs import EngineOutput, EngineStats, RawLogprob
from actors.protocol import (
    DeviceNow,
    FinishReason,
    Grammar,
    GrammarKind,
    MemoryChange,
    MemoryLeft,
    WakeReport,
)
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker import messages, service
from actors.worker.connection import Connection
from actors.worker.messages import (
    ANSWERS,
    Abandon,
    Answer,
    Begin,
    Call,
    CheckGrammar,
    Failed,
    FinishCompiling,
    GiveBackKv,
    GrowKv,
    KvResized,
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
    Short,
    Sized,
    Sleep,
    Starting,
    State,
    Stop,
    Task,
    ToReplica,
    ToWorker,
    Wake,
    Woke,
    WorkerFacts,
    WorkerState,
)

GRAMMAR = Grammar(GrammarKind.REGEX, r"\d{3}", "guided_regex")
PARAMS = ResolvedSampling(
    max_tokens=7,
    temperature=0.5,
    top_k=3,
    logit_bias={5: -1.5, 2**17: 100.0},
    seed=-(2**63),
    stop=("\n", "Köln", "\x00"),
    stop_token_ids=(1, 2),
    logprobs=0,
    grammar=GRAMMAR,
)
NEW = NewRequest(
    {"seq-1": 2**63 - 1, "seq-2": -(2**63)}, (1, 2, 151_935), PARAMS, frozenset({0, 151_645})
)
LEFT = MemoryLeft(context=1, graphs=2, kept_layers=3, torch_reserve=4, other=-5)
REPORT = WakeReport(2**40, 1.25, 55.5, 3, 2**40, 0.5, intact=True)
STATE = WorkerState(EngineStats(1, 2, 3, 4), 5, 6, "disk", 12, 7, 8, 9, 10, LEFT, REPORT)
BARE_STATE = WorkerState(EngineStats(0, 0, 0, 0), 0, 0, "", 0, 7, 8, 9, None, None, None)
CHANGE = MemoryChange(1, 2, 3, 4, 5, LEFT)
LOGPROBS = (RawLogprob(5, -0.25, ((5, -0.25), (6, -1e300))), RawLogprob(6, float("-inf")))

DOWN: list[Any] = [
    Sequences([NEW, NewRequest({"seq-3": 0}, (1,), ResolvedSampling(), frozenset())], ["seq-0"]),
    Sequences([], []),
    Call(0, Wake()),
    Call(1, Sleep(2)),
    Call(2, Settle()),
    Call(3, FinishCompiling()),
    Call(4, Score((1, 2, 3), 20)),
    Call(5, CheckGrammar(GRAMMAR)),
    Call(6, ReadDevice("node")),
    Call(7, GrowKv(granted=True)),
    Call(8, GiveBackKv(2**33)),
    Call(2**40, Stop()),
    Abandon(7),
    Begin(),
]
UP: list[Any] = [
    Starting(),
    Sized(4711, "GPU-1", 2**36, 2**34),
    Ready(WorkerFacts(4711, 8192, 151_936, 2**34, 2**33), STATE),
    Outputs(
        [
            EngineOutput("seq-1", (1, 2), LOGPROBS, FinishReason.STOP, 2, None, 12.5),
            EngineOutput("seq-2", (3,), None),
        ]
    ),
    Outputs([]),
    Answer(1, msgspec.Raw(msgspec.msgpack.encode(CHANGE))),
    Answer(2),
    Settled(REPORT),
    State(STATE),
    State(BARE_STATE),
    Short(2**30),
    Obtained("disk"),
    Logged(logging.WARNING, "actors.engine.engine", "zwei\nZeilen: ü"),
]
VALUES: dict[type, list[Any]] = {
    Wake: [Woke(CHANGE, 0.5, 1.5, 0.25), Woke(MemoryChange(0, 0, 0), None, None, 0.0)],
    Sleep: [CHANGE],
    Score: [[None, *LOGPROBS], []],
    ReadDevice: [DeviceNow("GPU-1", "card", 2**36, 60, 40)],
    GrowKv: [KvResized(), KvResized(1, 2**30)],
    GiveBackKv: [KvResized(), KvResized(3, 2**31)],
}

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ServingError)
]


def failure_of(kind: type[errors.ServingError]) -> errors.ServingError:
    if issubclass(kind, errors.InvalidRequest):
        return kind("what is wrong", "top_p")
    if issubclass(kind, errors.Unavailable):
        return kind("not now", 7.25)
    return kind("broken")


@dataclass
class End:
    """One end of a connection, and what came there."""

    kind: Any
    received: list[Any] = field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self.connection: Connection[Any] = Connection(self.kind, self.received.append, self._lose)

    def _lose(self) -> None:
        self.lost += 1


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[End, End]]:
    """A replica's end and a worker's, connected."""
    ends = End(ToReplica), End(ToWorker)
    loop = asyncio.get_running_loop()
    for end, sock in zip(ends, socket.socketpair(), strict=True):
        await loop.create_connection(lambda end=end: end.connection, sock=sock)  # type: ignore[misc]
    try:
        yield ends
    finally:
        for end in ends:
            end.connection.close()
        await until(lambda: all(end.lost for end in ends))


def frame(message: object) -> bytes:
    payload = msgspec.msgpack.encode(message, enc_hook=messages.encode_error)
    return len(payload).to_bytes(4, "big") + payload


def fed(kind: Any, *pieces: bytes) -> list[Any]:
    """What comes of bytes that are read in these pieces."""

    async def scenario() -> list[Any]:
        end = End(kind)
        for piece in pieces:
            end.connection.data_received(piece)
        return end.received

    return asyncio.run(scenario())


def test_samples_are_of_every_kind() -> None:
    assert {type(each) for each in DOWN} == set(get_args(ToWorker))
    assert {type(each.task) for each in DOWN if isinstance(each, Call)} == set(get_args(Task))
    assert {type(each) for each in UP} | {Failed} == set(get_args(ToReplica))
    assert set(VALUES) == set(ANSWERS)


def test_every_message_arrives_as_it_was_sent_and_in_order() -> None:
    async def scenario() -> None:
        async with pair() as (replica, worker):
            for message in DOWN:
                replica.connection.send(message)
            for message in UP:
                worker.connection.send(message)
            await until(lambda: len(worker.received) == len(DOWN))
            await until(lambda: len(replica.received) == len(UP))
            assert worker.received == DOWN
            assert replica.received == UP
            (new, _), params = worker.received[0].new, worker.received[0].new[0].params
            assert type(params) is ResolvedSampling  # equal to none of another class, all the same
            assert type(params.stop) is type(new.prompt_ids) is tuple
            assert type(new.stop_ids) is frozenset

    run(scenario)


@pytest.mark.parametrize("task", VALUES)
def test_answers_are_read_as_what_was_answered(task: type) -> None:
    for value in VALUES[task]:
        answer = Answer(1, msgspec.Raw(msgspec.msgpack.encode(value)))
        (received,) = fed(ToReplica, frame(answer))
        assert msgspec.msgpack.decode(received.value, type=ANSWERS[task]) == value


def test_answer_without_a_value_is_none() -> None:
    (received,) = fed(ToReplica, frame(Answer(1)))
    assert msgspec.msgpack.decode(received.value, type=None) is None
    assert received.error is None


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_arrive_with_their_arguments(kind: type[errors.ServingError]) -> None:
    error = failure_of(kind)
    sent = [
        Failed(error),
        Answer(1, error=error),
        Outputs([EngineOutput("s", (), None, error=error)]),
    ]
    failed, answer, outputs = fed(ToReplica, *(frame(each) for each in sent))
    for received in (failed.error, answer.error, outputs.outputs[0].error):
        assert type(received) is kind
        assert received.args == error.args
        assert str(received) == str(error)
        assert vars(received) == vars(error)


def test_error_of_a_class_that_the_other_side_lacks_is_a_failed_replica() -> None:
    class OfAnotherVersion(errors.ReplicaFailed):
        pass

    (received,) = fed(ToReplica, frame(Failed(OfAnotherVersion("it broke"))))
    assert type(received.error) is errors.ReplicaFailed
    assert received.error.args == ("it broke",)


def test_error_that_is_not_ours_is_not_sent() -> None:
    async def scenario() -> None:
        async with pair() as (replica, worker):
            with pytest.raises(NotImplementedError, match="secret"):
                worker.connection.send(Failed(RuntimeError("secret")))
            worker.connection.send(Obtained("disk"))
            await until(lambda: bool(replica.received))
            assert replica.received == [Obtained("disk")]  # of the other one no byte was sent

    run(scenario)


def test_frames_may_be_cut_at_every_byte() -> None:
    data = b"".join(frame(message) for message in UP)
    for cut in range(len(data) + 1):
        assert fed(ToReplica, data[:cut], data[cut:]) == UP


def test_frames_may_come_byte_by_byte() -> None:
    data = b"".join(frame(message) for message in UP)
    assert fed(ToReplica, *(bytes([byte]) for byte in data)) == UP


def test_message_is_told_as_soon_as_its_last_byte_is_there() -> None:
    first, second = frame(UP[0]), frame(UP[1])
    assert fed(ToReplica, first[:-1]) == []
    assert fed(ToReplica, first[:-1], first[-1:] + second[:-1]) == [UP[0]]


def test_several_frames_in_one_read() -> None:
    data = b"".join(frame(message) for message in UP)
    assert fed(ToReplica, data) == UP
    assert fed(ToReplica, data + data[:9], data[9:] + data) == UP * 3


def test_sender_on_another_thread() -> None:
    async def scenario() -> None:
        async with pair() as (replica, worker):

            def send(of: int) -> None:
                for i in range(500):
                    worker.connection.send(Logged(of, "thread", str(i)))

            threads = [threading.Thread(target=send, args=(of,)) for of in range(3)]
            for thread in threads:
                thread.start()
            for i in range(500):
                worker.connection.send(Logged(3, "loop", str(i)))
                await asyncio.sleep(0)
            await until(lambda: len(replica.received) == 2000)
            for thread in threads:
                thread.join()
            for of in range(4):  # each sender's in its order
                assert [each.text for each in replica.received if each.level == of] == [
                    str(i) for i in range(500)
                ]

    run(scenario)


def test_thread_that_sends_writes_on_the_event_loop() -> None:
    """A transport is no thing for threads."""

    async def scenario() -> None:
        async with pair() as (replica, worker):
            threads = []
            write = worker.connection._write

            def note(data: bytes) -> None:
                threads.append(threading.get_ident())
                write(data)

            worker.connection._write = note  # type: ignore[assignment,method-assign]
            await asyncio.to_thread(worker.connection.send, Obtained("disk"))
            await until(lambda: bool(replica.received))
            assert threads == [threading.get_ident()]

    run(scenario)


def test_thread_that_outlives_the_event_loop_may_send() -> None:
    ends: list[End] = []

    async def scenario() -> None:
        async with pair() as both:
            ends.extend(both)

    run(scenario)
    thread = threading.Thread(target=ends[1].connection.send, args=(Obtained("disk"),))
    thread.start()
    thread.join()


@pytest.mark.parametrize("how", ["closes", "dies in the middle of a frame"])
def test_peer_that_leaves(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pair() as (replica, worker):
            worker.connection.send(Obtained("disk"))
            if how != "closes":
                assert worker.connection._transport is not None
                worker.connection._transport.write(frame(State(STATE))[:-1])
            worker.connection.close()
            await until(lambda: replica.lost == 1)
            assert replica.received == [Obtained("disk")], "what it sent before is there"
            for _ in range(10):  # to nobody; asyncio warns of the fifth, if it comes so far
                replica.connection.send(Abandon(1))
            replica.connection.close()
            await until(lambda: worker.lost == 1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert (replica.lost, worker.lost) == (1, 1)
            assert caplog.records == []

    run(scenario)


def test_end_that_closes_sends_what_is_left_and_is_told_too() -> None:
    async def scenario() -> None:
        async with pair() as (replica, worker):
            text = "x" * 5_000_000  # more than a socket takes at once
            worker.connection.send(Logged(20, "actors", text))
            worker.connection.close()
            await until(lambda: replica.lost == worker.lost == 1)
            assert replica.received == [Logged(20, "actors", text)]

    run(scenario)


def test_signs_of_life_are_given_for_as_long_as_a_start_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_STARTING_INTERVAL_S", 0.001)

    async def scenario() -> None:
        async with pair() as (replica, worker):
            async with service.signs_of_life(worker.connection):
                await until(lambda: replica.received == [Starting()] * 3)
            worker.connection.send(Obtained("disk"))
            await until(lambda: replica.received[-1] == Obtained("disk"))
            told = len(replica.received)
            await asyncio.sleep(0.02)
            assert len(replica.received) == told

    run(scenario)


def test_sending_before_and_after_is_no_error() -> None:
    async def scenario() -> None:
        end = End(ToWorker)
        end.connection.send(Obtained("disk"))
        end.connection.close()
        assert end.lost == 0

    run(scenario)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x92\xa7Unknown\x01", frame(Obtained("disk"))[4:]])
def test_what_cannot_be_read_ends_the_connection(payload: bytes) -> None:
    """The last is sound and goes the other way."""

    async def scenario() -> None:
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with pair() as (replica, worker):
            assert replica.connection._transport is not None
            replica.connection._transport.write(len(payload).to_bytes(4, "big") + payload)
            await until(lambda: replica.lost == worker.lost == 1)
            assert worker.received == []
            assert [type(each["exception"]) for each in told] in (
                [msgspec.DecodeError],
                [msgspec.ValidationError],
            )

    run(scenario)


def test_messages_of_20_mb_pass_each_other() -> None:
    """Neither side waits for the other to read."""

    async def scenario() -> None:
        async with pair() as (replica, worker):
            down = Call(1, Score(tuple(range(2**17, 2**17 + 4_000_000)), 1))
            up = Logged(20, "actors", "x" * 20_000_000)
            assert len(frame(down)) > 20_000_000
            replica.connection.send(down)
            worker.connection.send(up)
            replica.connection.send(Abandon(1))
            worker.connection.send(Obtained("disk"))
            await until(lambda: len(replica.received) == len(worker.received) == 2)
            assert worker.received == [down, Abandon(1)]
            assert replica.received == [up, Obtained("disk")]

    run(scenario)
