"""One chain of retries, however often a model wakes while its neighbours have the memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.errors import DeviceMemoryShort
from actors.worker import growth
from actors.worker.growth import CacheGrowth


class Timers:
    """Stands in for threading.Timer."""

    def __init__(self) -> None:
        self.pending: list[Timers.Timer] = []

    class Timer:
        daemon = False

        def __init__(self, timers: "Timers", call: object) -> None:
            self.timers, self.call = timers, call

        def start(self) -> None:
            self.timers.pending.append(self)

        def cancel(self) -> None:
            if self in self.timers.pending:
                self.timers.pending.remove(self)

    def __call__(self, seconds: float, call: object) -> "Timers.Timer":
        return Timers.Timer(self, call)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(growth.threading, "Timer", timers)
    return timers


def test_wakes_that_find_no_memory_leave_one_retry(timers: Timers) -> None:
    failures: list[object] = []

    def no_room() -> bool:
        raise DeviceMemoryShort("a neighbour has it")

    with ThreadPoolExecutor(1) as control:
        found = CacheGrowth(control, no_room, lambda *failure: failures.append(failure))
        for _ in range(5):
            found.begin()
            control.submit(threading.Event().is_set).result()  # behind what `begin` has submitted
        assert len(timers.pending) == 1
        found.cancel_retry()
    assert timers.pending == []
    assert failures == []
