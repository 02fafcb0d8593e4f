"""What of a replica can be had without Serve."""

import asyncio
import inspect
import json
import logging
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from actors.card.config import CardConfig
from actors.engine.config import EngineConfig
from actors.engine.sizing import CardMemory, plan_limits
from actors.errors import (
    CannotStart,
    DeviceMemoryShort,
    EngineDied,
    HeldAsleep,
    InvalidRequest,
    NeverFits,
    ReplicaFailed,
    ServingError,
    WorkerLost,
)
from actors.observer import GuardedObserver, Observer, WakeCause
from actors.protocol import (
    ChatPrompt,
    DeviceNow,
    GenerateRequest,
    MemoryChange,
    Prompt,
    Refusal,
    ReplicaState,
    SamplingParams,
    SleepCommand,
    TokenEvent,
)
from actors.worker.connection import Connection
from actors.worker.messages import Failed, Starting, ToWorker
from actors.worker.watchdog import WatchdogConfig
from serve_app.config.errors import validate
from serve_app.config.model import ModelConfig
from serve_app.process.logs import log_to
from serve_app.replica import core, device_reading, worker_actor, worker_process
from serve_app.replica.core import Replica, kept_running
from serve_app.replica.device_reading import DeviceReading
from serve_app.replica.replica import ModelReplica
from serve_app.replica.start_errors import told_in_one_line
from serve_app.replica.worker_process import WorkerProcess, bundles
from tests.unit.actors.engine.test_sizing import SEVEN_B, SEVEN_B_WEIGHTS


class Runtime:
    def prepare(self, request: GenerateRequest) -> Any:
        return threading.current_thread().name


@pytest.mark.parametrize(
    ("prompt", "thread"),
    [
        ("short", "MainThread"),
        ((1,) * 100, "MainThread"),
        ("long " * 10_000, "long-prompts"),
        ((1,) * 100_000, "long-prompts"),
        (ChatPrompt(({"role": "user", "content": "hi"},)), "MainThread"),
        (ChatPrompt(({"role": "user", "content": "hi " * 10_000},)), "long-prompts"),
        (ChatPrompt(({"role": "user", "content": "hi"},), ({"a": "b" * 20_000},)), "long-prompts"),
    ],
)
def test_long_prompts_are_read_beside_the_event_loop(prompt: Prompt, thread: str) -> None:
    assert prepared_by(GenerateRequest("r", prompt)).startswith(thread)


@pytest.mark.parametrize(("chars", "thread"), [(100, "MainThread"), (1024, "long-prompts")])
def test_so_are_long_stop_strings(chars: int, thread: str) -> None:
    stops = tuple(chr(ord("a") + i) * chars for i in range(20))
    request = GenerateRequest("r", "short", SamplingParams(stop=stops), n=128)
    assert prepared_by(request).startswith(thread)


def prepared_by(request: GenerateRequest) -> str:
    """The name of a thread."""
    reading = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
    runtime = Runtime()
    replica: Any = SimpleNamespace(_workers=SimpleNamespace(runtime=runtime), _reading=reading)
    return str(asyncio.run(Replica._prepare(replica, request)))


def test_watch_that_fails_is_told_and_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "_WATCH_AGAIN_S", 0.001)
    runs = []

    async def watch() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise RuntimeError("Set changed size during iteration")

    asyncio.run(kept_running("the idle clock", watch))
    assert len(runs) == 3
    assert caplog.text.count("the idle clock: the watch failed") == 2
    assert "Set changed size" in caplog.text


def test_cancelled_watch_is_over() -> None:
    async def scenario() -> None:
        task = asyncio.create_task(kept_running("for ever", asyncio.Event().wait))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_telemetry_that_fails_fails_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def waited(self, seconds: float) -> None:
            raise ValueError("a counter only grows")

    observer = GuardedObserver(Broken())
    for _ in range(3):
        observer.waited(1.0)
    observer.first_token(1.0)
    assert caplog.text.count("telemetry: waited failed") == 1
    assert "a counter only grows" in caplog.text


def test_guard_hands_on_everything_that_there_is_to_tell() -> None:
    told = []

    class Everything(Observer):
        def __getattribute__(self, name: str) -> Any:
            def note(*args: object) -> None:
                told.append((name, *args))

            note.__name__ = name
            return note

    observer = GuardedObserver(Everything())
    methods = [name for name in vars(Observer) if not name.startswith("_")]
    for name in methods:
        method = getattr(observer, name)
        method(*range(len(inspect.signature(method).parameters)))
    assert [each[0] for each in told] == methods
    assert all(each[1:] == tuple(range(len(each) - 1)) for each in told)
    assert ("slept", 0, 1, 2, 3) in told


# --- a worker that fails under a request ---

BEGUN = TokenEvent(0, "", (), 3)
TOKEN = TokenEvent(0, "", (5,), 3)
TEXT = TokenEvent(0, "text", (), 3)
LOST = WorkerLost("the process that computes for this replica has ended")
NO_GRAMMAR = WorkerLost("gone before it had compiled the grammar")
Course = list[TokenEvent | ServingError]
Answer = list[TokenEvent | Refusal]


def refusal(error: ServingError, lost_workers: int) -> Refusal:
    return Refusal(error, "a", lost_workers)


def answered(
    *courses: Course, state: ReplicaState = ReplicaState.RESTARTING, lost_workers: int = 0
) -> Answer:
    """What a request gets whose attempts, one per worker, go like that."""
    left = list(courses)
    steps: list[str] = []
    serving = 0
    untold: list[None] = []  # ends of workers that whoever restarts it has not heard of

    def fail(error: ServingError) -> None:
        untold.append(None)
        asyncio.get_running_loop().call_soon(untold.clear)
        raise error

    @asynccontextmanager
    async def hold_awake(request_id: str, keep_alive_s: float | None) -> AsyncIterator[None]:
        nonlocal serving
        serving += 1
        try:
            yield
        finally:
            serving -= 1

    async def restarted() -> None:
        assert not untold, "it would have the same worker again"
        steps.append("restarted")

    async def check_grammar(prepared: Any) -> None:
        assert serving == 0, "a bad grammar wakes nobody"
        steps.append("checked")
        if left[0][:1] == [NO_GRAMMAR]:
            left.pop(0)
            fail(NO_GRAMMAR)

    async def generate(prepared: Any) -> AsyncIterator[TokenEvent]:
        assert serving == 1
        assert steps[-2:] == ["restarted", "checked"], "of this worker"
        for each in left.pop(0):
            if isinstance(each, Exception):
                fail(each)
            else:
                yield each

    replica: Any = Replica.__new__(Replica)
    replica.lifecycle = SimpleNamespace(serving=hold_awake, restarted=restarted, state=state)
    replica._workers = SimpleNamespace(
        runtime=SimpleNamespace(
            generate=generate,
            check_grammar=check_grammar,
            prepare=lambda request: SimpleNamespace(request=request),
        )
    )
    replica._replica_id, replica._observer = "a", Observer()
    replica._traced = nullcontext

    async def scenario() -> Answer:
        request = GenerateRequest("r", "x", lost_workers=lost_workers)
        return [event async for event in replica.generate(request)]

    got = asyncio.run(scenario())
    assert left == []
    return got


@pytest.mark.parametrize("begun", [[], [BEGUN]])
def test_request_begins_again_if_nothing_of_its_answer_was_sent(begun: Course) -> None:
    assert answered([NO_GRAMMAR], [TOKEN, TEXT]) == [TOKEN, TEXT]
    assert answered([*begun, LOST], [TOKEN, TEXT]) == [*begun, TOKEN, TEXT]


@pytest.mark.parametrize("event", [TOKEN, TEXT])
def test_request_whose_answer_has_begun_fails_with_its_worker(event: TokenEvent) -> None:
    assert answered([event, LOST]) == [event, refusal(LOST, 1)]


def test_request_that_fails_with_two_workers_is_not_tried_again() -> None:
    again = EngineDied("again")
    assert answered([LOST], [BEGUN, again]) == [BEGUN, refusal(again, 2)]


def test_request_that_has_cost_another_replica_its_worker_costs_one_more_and_no_third() -> None:
    assert answered([BEGUN, LOST], lost_workers=1) == [BEGUN, refusal(LOST, 2)]


def test_request_fails_with_the_replica() -> None:
    assert answered([LOST], state=ReplicaState.FAILED) == [refusal(LOST, 0)]


@pytest.mark.parametrize("error", [DeviceMemoryShort("no room", 1.0), InvalidRequest("no")])
def test_request_that_is_refused_is_not_tried_again(error: ServingError) -> None:
    assert answered([error]) == [refusal(error, 0)]
    assert answered([LOST], [error]) == [refusal(error, 1)]


# --- its begin ---

NIGHT = {"schedule": {"asleep": [{"cron": "* * * * *", "duration": "1h"}]}}


@pytest.mark.parametrize(
    ("sleep", "pin", "state"),
    [
        ({}, False, ReplicaState.AWAKE),
        ({"start_asleep": True}, False, ReplicaState.ASLEEP),
        (NIGHT, False, ReplicaState.ASLEEP),
        (NIGHT, True, ReplicaState.AWAKE),
    ],
)
def test_replica_begins_awake_unless_it_is_to_sleep_and_may(
    sleep: dict[str, Any], pin: bool, state: ReplicaState
) -> None:
    config = validate(
        ModelConfig,
        {"model_id": "m", "source": {"id": "/x"}, "sleep": sleep, "sharing": {"pin": pin}},
    )

    async def scenario() -> None:
        replica = beginning(config, [])
        await replica.begin()
        assert replica.lifecycle.state is state

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("held", "sleeps", "level"),
    [
        (SleepCommand(level=1, hold=True), [], 0),
        (SleepCommand(level=2, hold=True), [(2, False)], 2),
        (SleepCommand(level=1, hold=True, deep=True), [(1, True)], 1),
        (SleepCommand(level=2, hold=True, deep=True), [(2, True)], 2),
    ],
)
def test_replica_that_starts_while_a_hold_stands_sleeps_as_deep_as_that(
    held: SleepCommand, sleeps: list[tuple[int, bool]], level: int
) -> None:
    config = validate(ModelConfig, {"model_id": "m", "source": {"id": "/x"}})
    slept: list[tuple[int, bool]] = []

    async def scenario() -> None:
        replica = beginning(config, slept, held)
        await replica.begin()
        lifecycle = replica.lifecycle
        assert slept == sleeps
        assert (lifecycle.state, lifecycle.level, lifecycle.deep) == (
            ReplicaState.ASLEEP,
            level,
            held.deep,
        )
        with pytest.raises(HeldAsleep):
            async with lifecycle.serving("r"):
                pass
        await lifecycle.wake_up()
        assert lifecycle.state is ReplicaState.AWAKE

    asyncio.run(scenario())


def beginning(
    config: ModelConfig, slept: list[tuple[int, bool]], held: SleepCommand | None = None
) -> Replica:
    """A replica that has a worker, and notes its sleeps."""

    async def read_device(node: str) -> DeviceNow:
        return DEVICE

    async def wake(cause: WakeCause) -> MemoryChange:
        return MemoryChange(0, 0, 0)

    async def sleep(level: int, deep: bool = False) -> MemoryChange:
        slept.append((level, deep))
        return MemoryChange(0, 0, 0, deep=deep)

    workers: Any = SimpleNamespace(
        runtime=SimpleNamespace(worker=SimpleNamespace(read_device=read_device)),
        wake=wake,
        sleep=sleep,
        requests_wait=lambda wait: None,
        has_requests=lambda busy: None,
    )
    instruments: Any = SimpleNamespace()
    replica = Replica(config, "a", "node", workers, instruments, Observer(), held=held)
    replica.count_savings = lambda: None  # type: ignore[method-assign]
    return replica


# --- where a worker is placed ---


@pytest.mark.parametrize(
    ("num_cpus", "num_gpus", "replica", "worker"),
    [
        (4, 1, {"CPU": 4}, {"GPU": 1}),
        (1, 0.5, {"CPU": 1}, {"GPU": 0.5}),
        (0, 1, {"CPU": 0.001}, {"GPU": 1}),
        (2, 0, {"CPU": 0.001}, {"CPU": 1.999}),  # all of a node with two
        (0, 0, {"CPU": 0.001}, {"CPU": 0.001}),
    ],
)
def test_cores_are_the_replica_s_beside_a_card_and_else_the_worker_s(
    num_cpus: float, num_gpus: float, replica: dict[str, float], worker: dict[str, float]
) -> None:
    assert bundles(num_cpus, num_gpus) == [replica, worker]
    assert all(amount > 0 for bundle in bundles(num_cpus, num_gpus) for amount in bundle.values())


# --- its log ---


@pytest.fixture
def loggers() -> Iterator[None]:
    """As they were, afterwards."""
    names = ("serve_app", "actors", "ContinuousBatchingLogger")
    before = [
        (logger, logger.handlers, logger.level, logger.propagate)
        for logger in map(logging.getLogger, names)
    ]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("loggers")
def test_lines_of_both_packages_are_sent_with_their_tracebacks() -> None:
    sent: list[tuple[int, str, str]] = []
    log_to(lambda *line: sent.append(line))
    log_to(lambda *line: sent.append(line))  # instead of the first, not beside it
    logging.getLogger("actors.worker.residency").info("%d %% of %s", 90, "it")
    logging.getLogger("serve_app.weights").warning("zwei\nZeilen")
    logging.getLogger("actors.engine").debug("every token")
    logging.getLogger("ray.serve").error("not ours")
    logging.getLogger("ContinuousBatchingLogger").info("a dozen of them")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("actors").exception("it failed")
    assert sent[:2] == [
        (logging.INFO, "actors.worker.residency", "90 % of it"),
        (logging.WARNING, "serve_app.weights", "zwei\nZeilen"),
    ]
    (level, name, text), *rest = sent[2:]
    assert (level, name, rest) == (logging.ERROR, "actors", [])
    assert text.startswith("it failed\nTraceback")
    assert text.endswith("ValueError: why")


@pytest.mark.usefixtures("loggers")
def test_lines_are_sent_from_the_thread_that_writes_them_and_to_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = []
    log_to(lambda *_: threads.append(threading.current_thread().name))
    thread = threading.Thread(target=logging.getLogger("actors").info, args=("x",), name="engine")
    thread.start()
    thread.join()
    assert threads == ["engine"]
    assert caplog.records == []


# --- readings of the device ---

DEVICE = DeviceNow("GPU-1", "card", 100, 60, 40)
LATER = replace(DEVICE, free=10)


class Driver:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: asyncio.Future[DeviceNow] = asyncio.get_running_loop().create_future()

    async def read(self) -> DeviceNow:
        self.asked += 1
        return await self.answer

    def forget(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()


def read(scenario: Callable[[Driver, DeviceReading], Awaitable[None]]) -> None:
    async def bounded() -> None:
        driver = Driver()
        async with asyncio.timeout(20):
            await scenario(driver, DeviceReading(driver.read, DEVICE))

    asyncio.run(bounded())


def test_device_is_asked_each_time_and_not_before() -> None:
    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        assert driver.asked == 0
        for asked, answer in enumerate((LATER, DEVICE, LATER), 1):
            driver.forget()
            driver.answer.set_result(answer)
            assert await reading.now() == answer
            assert driver.asked == asked

    read(scenario)


def test_who_asks_at_the_same_time_shares_the_answer() -> None:
    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        asking = [asyncio.create_task(reading.now()) for _ in range(5)]
        await asyncio.sleep(0)
        driver.answer.set_result(LATER)
        assert await asyncio.gather(*asking) == [LATER] * 5
        assert driver.asked == 1

    read(scenario)


def test_driver_that_hangs_is_asked_once_and_the_last_answer_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_reading, "_PATIENCE_S", 0.01)

    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        for _ in range(3):
            assert await asyncio.gather(*(reading.now() for _ in range(5))) == [DEVICE] * 5
        assert driver.asked == 1
        driver.answer.set_result(LATER)
        assert await reading.now() == LATER  # of the question that was asked then
        assert driver.asked == 1
        driver.forget()
        assert await reading.now() == LATER  # the last, while it hangs once more
        assert driver.asked == 2

    read(scenario)


@pytest.mark.parametrize("failure", [None, LOST, OSError("driver gone")])
def test_answer_that_came_when_nobody_waited_any_more_is_not_the_newest(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_reading, "_PATIENCE_S", 0.01)

    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        assert await reading.now() == DEVICE
        if failure is None:
            driver.answer.set_result(LATER)
        else:
            driver.answer.set_exception(failure)
        await asyncio.sleep(0.01)
        driver.forget()  # an hour passes
        assert await reading.now() == (LATER if failure is None else DEVICE)
        assert driver.asked == 2
        newest = replace(DEVICE, free=1)
        driver.answer.set_result(newest)
        assert await reading.now() == newest

    read(scenario)


def test_caller_that_leaves_takes_the_question_from_nobody() -> None:
    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        leaver, stayer = (asyncio.create_task(reading.now()) for _ in range(2))
        await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.wait([leaver])
        driver.answer.set_result(LATER)
        assert await stayer == LATER
        assert driver.asked == 1

    read(scenario)


@pytest.mark.parametrize("failure", [LOST, EngineDied("hung")])
def test_without_a_worker_there_is_the_last_answer_and_the_next_one_is_asked(
    failure: Exception,
) -> None:
    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        driver.answer.set_exception(failure)
        assert await asyncio.gather(*(reading.now() for _ in range(3))) == [DEVICE] * 3
        assert await reading.now() == DEVICE
        assert driver.asked == 2
        driver.forget()
        driver.answer.set_result(LATER)
        assert await reading.now() == LATER

    read(scenario)


def test_sleeper_without_a_process_tells_what_its_sleep_has_left_free() -> None:
    """The last answer is of when it was awake: with that, the autoscaler would think that it cannot wake."""

    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        worker = SimpleNamespace(
            has_retired=False, state=SimpleNamespace(device_free=DEVICE.free + 5)
        )
        replica: Any = Replica.__new__(Replica)
        replica._device = reading
        replica._workers = SimpleNamespace(runtime=SimpleNamespace(worker=worker))
        driver.answer.set_exception(LOST)
        assert await replica.device_now() == DEVICE
        worker.has_retired = True
        assert await replica.device_now() == replace(DEVICE, free=DEVICE.free + 5)

    read(scenario)


def test_driver_that_raises_is_heard_of() -> None:
    async def scenario(driver: Driver, reading: DeviceReading) -> None:
        driver.answer.set_exception(OSError("driver/library version mismatch"))
        with pytest.raises(OSError, match="mismatch"):
            await reading.now()
        driver.forget()
        driver.answer.set_result(LATER)
        assert await reading.now() == LATER

    read(scenario)


# --- a worker's process ---


class Actor:
    """Of a process that Ray cannot end, because it is stopped or hangs; `start` goes as the test says."""

    def __init__(
        self, process_id: int, start: Callable[[str], Awaitable[None]], answers: bool = True
    ) -> None:
        async def ping() -> int:
            if not answers:
                await asyncio.Event().wait()
            return process_id

        self.process_id = process_id
        self.ping = SimpleNamespace(remote=ping)
        self.start = SimpleNamespace(remote=start)


@pytest.mark.parametrize(
    "how", ["never answers", "never connects", "connects and is silent", "says that it hangs"]
)
def test_worker_that_hangs_in_its_start_is_noticed_and_ended(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = EngineDied("opening the device has not ended")

    async def start(socket: str) -> None:
        if how != "never connects":
            connection: Connection[ToWorker] = Connection(ToWorker, lambda _: None, lambda: None)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: connection, socket)
            connection.send(Failed(failure) if how == "says that it hangs" else Starting())
        await asyncio.Event().wait()

    limits = WatchdogConfig(
        other_timeout_s=0.1 if how == "never connects" else 60,
        silence_timeout_s=0.1 if how in ("never answers", "connects and is silent") else 60,
    )
    settings: Any = SimpleNamespace(config=SimpleNamespace(watchdog=limits))
    expected = {
        "never answers": "not answered within 0.1 s",
        "never connects": "not begun within 0.1 s",
        "connects and is silent": "said nothing for 0.1 s",
        "says that it hangs": str(failure),
    }
    monkeypatch.setattr(worker_process, "_KILL_AFTER_S", 0.01)
    monkeypatch.setattr(worker_process, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(worker_process, "_process_of", lambda actor: actor.process_id)
    monkeypatch.setattr(worker_process.ray, "kill", lambda actor: None)
    with subprocess.Popen(["sleep", "60"]) as process:
        actor = Actor(process.pid, start, answers=how != "never answers")
        monkeypatch.setattr(worker_process, "_place", lambda *_: actor)

        async def scenario() -> None:
            async with asyncio.timeout(5):
                with pytest.raises(ReplicaFailed, match=expected[how]):
                    await WorkerProcess.start(settings, {}, Observer())

        asyncio.run(scenario())
        assert process.wait(5) == -signal.SIGKILL


def test_worker_without_a_place_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []

    async def start(socket: str) -> None:
        pytest.fail("it has no process")

    actor = Actor(0, start, answers=False)
    monkeypatch.setattr(worker_process, "_place", lambda *_: actor)
    monkeypatch.setattr(worker_process, "_process_of", lambda actor: actor.process_id)
    monkeypatch.setattr(worker_process, "_PLACE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(worker_process, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(worker_process.ray, "kill", killed.append)
    settings: Any = SimpleNamespace(config=SimpleNamespace(watchdog=WatchdogConfig()))
    with pytest.raises(WorkerLost, match=r"no process .* within 0.05 s"):
        asyncio.run(WorkerProcess.start(settings, {}, Observer()))
    assert killed == [actor]


def test_worker_that_cannot_start_says_why_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(socket: str) -> None:
        raise ValueError("no such architecture")

    settings: Any = SimpleNamespace(config=SimpleNamespace(watchdog=WatchdogConfig()))
    with subprocess.Popen(["sleep", "60"]) as process:
        actor = Actor(process.pid, start)
        monkeypatch.setattr(worker_process, "_place", lambda *_: actor)
        monkeypatch.setattr(worker_process.ray, "kill", lambda actor: process.kill())
        with pytest.raises(ValueError, match="no such architecture"):
            asyncio.run(WorkerProcess.start(settings, {}, Observer()))
        assert process.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("cause", "has_trace"),
    [(NeverFits("64 GiB never fit"), False), (CannotStart("no KV cache"), False), (LOST, True)],
)
def test_what_needs_no_traceback_comes_without_the_workers(
    cause: ServingError, has_trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(socket: str) -> None:
        raise RayTaskError("start", "Traceback (most recent call last): ...", cause)

    settings: Any = SimpleNamespace(config=SimpleNamespace(watchdog=WatchdogConfig()))
    with subprocess.Popen(["sleep", "60"]) as process:
        actor = Actor(process.pid, start)
        monkeypatch.setattr(worker_process, "_place", lambda *_: actor)
        monkeypatch.setattr(worker_process.ray, "kill", lambda actor: process.kill())
        with pytest.raises(ServingError) as caught:
            asyncio.run(WorkerProcess.start(settings, {}, Observer()))
    assert caught.value is cause
    assert ("Traceback (most recent call last): ..." in "".join(format_exception(cause))) == (
        has_trace
    )


GIB = 2**30


def test_model_that_does_not_fit_a_full_card_is_told_in_one_line_with_the_sizes() -> None:
    full = CardMemory(80 * GIB, 2 * GIB, GIB // 2, 0, "process 7 holds 77.50 GiB")
    with pytest.raises(CannotStart) as caught, told_in_one_line():
        plan_limits(EngineConfig(), SEVEN_B, full, SEVEN_B_WEIGHTS)
    told = str(caught.value)
    assert told.startswith(
        "engine.gpu_memory_utilization 0.9 of the 2.50 GiB that other processes leave on the card"
    )
    assert "weights 14.18 GiB" in told
    assert "free memory of the card: process 7 holds 77.50 GiB" in told
    assert told.count("\n") == 0
    assert caught.value.__suppress_context__


def test_values_that_a_library_does_not_take_keep_their_traceback() -> None:
    with pytest.raises(json.JSONDecodeError), told_in_one_line():
        json.loads("{")


@pytest.mark.parametrize("error", [NeverFits("m takes 64 GiB, which never fit"), LOST])
def test_replica_that_cannot_start_says_so_in_one_line(
    error: ServingError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(self: ModelReplica, config: ModelConfig, card: CardConfig) -> None:
        raise error

    monkeypatch.setattr(ModelReplica, "_start", start)
    config = validate(ModelConfig, {"model_id": "m", "source": {"id": "m"}})
    begins: Any = ModelReplica.__init__
    if error is LOST:  # of what went wrong inside the traceback may tell more
        with pytest.raises(WorkerLost):
            asyncio.run(begins(ModelReplica.__new__(ModelReplica), config, CardConfig()))
        assert not caplog.records
        return
    with pytest.raises(CannotStart, match=f"^{error}$") as caught:
        asyncio.run(begins(ModelReplica.__new__(ModelReplica), config, CardConfig()))
    assert caught.value.__suppress_context__
    assert [(r.levelname, r.getMessage(), r.exc_info) for r in caplog.records] == [
        ("ERROR", f"m cannot start: {error}", None)
    ]


def test_worker_that_has_not_answered_yet_is_killed_as_soon_as_its_start_is_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by the supervisor that is closed: one that has no place, or is stopped."""
    killed: list[object] = []

    async def scenario() -> None:
        asked = asyncio.Event()

        async def ping() -> int:
            asked.set()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        actor = SimpleNamespace(ping=SimpleNamespace(remote=ping))
        monkeypatch.setattr(worker_process, "_place", lambda *_: actor)
        monkeypatch.setattr(worker_process.ray, "kill", killed.append)
        settings: Any = SimpleNamespace(config=SimpleNamespace(watchdog=WatchdogConfig()))
        starting = asyncio.create_task(WorkerProcess.start(settings, {}, Observer()))
        await asked.wait()
        starting.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait([starting])
        assert starting.cancelled()
        assert killed == [actor]

    asyncio.run(scenario())


def test_part_of_a_start_that_hangs_on_a_thread_is_waited_for_no_longer() -> None:
    """Its event loop goes on giving signs of life."""

    async def scenario(work: Awaitable[object]) -> None:
        async with worker_actor._within(0.01, "looking at model and device"):
            await work

    with pytest.raises(EngineDied, match=r"looking at .* not ended after 0.01 s .watchdog.other_"):
        asyncio.run(scenario(asyncio.Event().wait()))

    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(scenario(fail()))
