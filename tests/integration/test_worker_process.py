"""A worker's process that Ray has, and that never answers."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from actors.errors import WorkerLost
from actors.observer import Observer
from actors.worker.watchdog import WatchdogConfig
from serve_app.replica import worker_process
from serve_app.replica.worker_process import WorkerProcess

pytestmark = pytest.mark.alone


class StoppedAtOnce:
    """Before its process can answer anything."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    async def ping(self) -> int:
        return os.getpid()


@pytest.fixture
def place_for_one(monkeypatch: pytest.MonkeyPatch, local_ray: None) -> list[Any]:
    """The actors that were made; each takes all of its place."""
    made: list[Any] = []

    def place(*_: object) -> Any:
        made.append(ray.remote(StoppedAtOnce).options(num_cpus=4).remote())
        return made[-1]

    monkeypatch.setattr(worker_process, "_place", place)
    return made


def test_worker_that_is_stopped_before_its_first_word_is_ended_in_time_and_leaves_its_place(
    place_for_one: list[Any],
) -> None:
    config = SimpleNamespace(watchdog=WatchdogConfig(silence_timeout_s=1))
    settings: Any = SimpleNamespace(config=config)

    async def scenario() -> None:
        for number in (1, 2):  # the second one is placed where the first one was
            async with asyncio.timeout(30):
                with pytest.raises(WorkerLost, match="has not answered within 1 s"):
                    await WorkerProcess.start(settings, {}, Observer())
            assert len(place_for_one) == number
            process_id = worker_process._process_of(place_for_one[-1])
            assert process_id
            assert not psutil.pid_exists(process_id)

    asyncio.run(scenario())
