"""When the device is asked to take back what it has cleared."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.worker import cleared
from actors.worker.cleared import ClearedCollection


@pytest.fixture
def control() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="control") as made:
        yield made


def test_it_collects_on_the_control_thread(
    control: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleared, "_CLEARED_S", 0.001)
    names: list[str] = []
    done = threading.Event()

    def collect() -> None:
        names.append(threading.current_thread().name)
        done.set()

    ClearedCollection(control, collect).begin()
    assert done.wait(10)
    assert names == ["control_0"]


def test_what_was_cancelled_or_begun_anew_does_not_collect(control: ThreadPoolExecutor) -> None:
    collection = ClearedCollection(control, lambda: pytest.fail("cancelled"))
    collection.cancel()  # nothing was begun
    collection.begin()
    first = collection._timer
    collection.begin()
    second = collection._timer
    collection.cancel()
    assert first is not None
    assert second is not None
    assert first is not second
    for timer in (first, second):
        timer.join(10)
        assert not timer.is_alive()


def test_a_control_that_is_gone_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cleared, "_CLEARED_S", 0.001)
    control = ThreadPoolExecutor(1)
    control.shutdown()
    collection = ClearedCollection(control, lambda: pytest.fail("closed"))
    with caplog.at_level("INFO", "actors.threads"):
        collection.begin()
        timer = collection._timer
        assert timer is not None
        timer.join(10)
    assert [record.message for record in caplog.records] == [
        "closed while the device cleared memory"
    ]
