"""What of a replica can be had without Serve."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.observer import GuardedObserver, Observer
from actors.protocol import ChatPrompt, DeviceNow, GenerateRequest, Prompt, SamplingParams
from serve_app.replica import replica as deployment
from serve_app.replica.device_reading import DeviceReading
from serve_app.replica.replica import ModelReplica, kept_running


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
    reading = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
    replica: Any = SimpleNamespace(_runtime=Runtime(), _reading=reading)
    request = GenerateRequest("r", prompt, SamplingParams())
    assert str(asyncio.run(ModelReplica._prepare(replica, request))).startswith(thread)


def test_watch_that_fails_is_told_and_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deployment, "_WATCH_AGAIN_S", 0.001)
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
        method(*range(method.__code__.co_argcount - 1))
    assert [each[0] for each in told] == methods
    assert all(each[1:] == tuple(range(len(each) - 1)) for each in told)


DEVICE = DeviceNow("GPU-1", "card", 100, 60, 40)


def test_device_is_read_beside_the_event_loop() -> None:
    threads = []

    def read() -> DeviceNow:
        threads.append(threading.current_thread().name)
        return DEVICE

    async def scenario() -> None:
        reading = await asyncio.to_thread(DeviceReading, read)
        assert await reading.now() == DEVICE

    asyncio.run(scenario())
    assert len(threads) == 2
    assert threads[1].startswith("device-reader")


def test_driver_that_hangs_is_asked_once_and_the_last_answer_given() -> None:
    goes_on, asked = threading.Event(), []
    after = replace(DEVICE, free=10)

    def read() -> DeviceNow:
        asked.append(1)
        if len(asked) == 2:
            goes_on.wait()
        return DEVICE if len(asked) == 1 else after

    async def scenario() -> None:
        reading = DeviceReading(read)
        assert await asyncio.gather(*(reading.now() for _ in range(5))) == [DEVICE] * 5
        assert len(asked) == 2
        goes_on.set()
        while await reading.now() != after:  # as soon as the driver has answered
            assert len(asked) == 2

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_driver_that_raises_is_heard_of() -> None:
    answers: list[DeviceNow] = [DEVICE]

    async def scenario() -> None:
        reading = DeviceReading(answers.pop)
        with pytest.raises(IndexError):
            await reading.now()
        answers.append(DEVICE)
        assert await reading.now() == DEVICE

    asyncio.run(scenario())
