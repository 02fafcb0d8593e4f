"""What never ends is noticed, and what ends is not."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from actors.worker import watchdog as module
from actors.worker.watchdog import Watchdog, WatchdogConfig


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.005)


class Barks:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.first = threading.Event()

    def __call__(self, text: str) -> None:
        self.heard.append(text)
        self.first.set()


@pytest.fixture
def barks() -> Barks:
    return Barks()


@pytest.fixture
def watchdog(barks: Barks) -> Iterator[Watchdog]:
    limits = WatchdogConfig(step_timeout_s=0.02, copy_timeout_s=1000, memory_timeout_s=1000)
    watchdog = Watchdog(limits, barks)
    yield watchdog
    watchdog.close()


def test_what_is_overdue_is_told_once_with_its_name_and_limit(
    watchdog: Watchdog, barks: Barks
) -> None:
    with watchdog.copy, watchdog.map, watchdog.step:
        assert barks.first.wait(5)
        with pytest.raises(TimeoutError):
            until_told_again(barks)
    assert len(barks.heard) == 1
    assert barks.heard[0].startswith("a step of the engine has not ended after 0.")
    assert barks.heard[0].endswith("s (its limit is 0.02 s)")


def until_told_again(barks: Barks) -> None:
    barks.first.clear()
    if not barks.first.wait(0.1):
        raise TimeoutError


def test_work_that_ends_is_never_overdue_however_often_it_is_done(
    watchdog: Watchdog, barks: Barks
) -> None:
    for _ in range(20):
        with watchdog.step:
            assert watchdog.step.overdue_s(time.monotonic()) is None
        assert not barks.first.wait(0.005)
    assert watchdog.step.overdue_s(time.monotonic()) is None


def test_time_in_which_the_process_stood_still_is_not_the_work_s(
    watchdog: Watchdog, barks: Barks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was paused."""
    paused_s, monotonic = 0.0, time.monotonic
    clock = SimpleNamespace(monotonic=lambda: monotonic() + paused_s)
    monkeypatch.setattr(module, "time", clock)
    with watchdog.copy:
        paused_s = 2000.0
        assert not barks.first.wait(0.1)
        with watchdog.step:
            assert barks.first.wait(10), "it looks on"
    assert "a step of the engine" in barks.heard[0]


def test_work_that_fails_is_over(watchdog: Watchdog, barks: Barks) -> None:
    with pytest.raises(RuntimeError), watchdog.step:
        raise RuntimeError
    assert not barks.first.wait(0.1)


def test_closed_watchdog_looks_no_more(watchdog: Watchdog, barks: Barks) -> None:
    watchdog.close()
    with watchdog.step:
        assert not barks.first.wait(0.1)


def test_part_has_a_limit_of_its_own_and_what_it_is_part_of_begins_anew(
    watchdog: Watchdog, barks: Barks
) -> None:
    watchdog.control.limit_s = 0.2
    with watchdog.control:
        for _ in range(6):  # together longer than the whole may take beside its parts
            with watchdog.copy:
                assert not barks.first.wait(0.05)
        assert barks.first.wait(5), "between its parts it is watched"
    assert barks.heard[0].startswith("work on the control thread has not ended after")


def test_part_alone_leaves_what_it_is_part_of_unentered(watchdog: Watchdog) -> None:
    with watchdog.copy:
        pass
    assert watchdog.control._since_s is None
