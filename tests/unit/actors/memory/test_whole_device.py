"""Captures and waits of other threads exclude each other; without a device."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from actors.memory import whole_device

SOON_S = 10.0

Work = Callable[[Event, Event], None]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def waits(began: Event, ends: Event) -> None:
    with whole_device.awaited():
        began.set()
        assert ends.wait(SOON_S)


def captures(began: Event, ends: Event) -> None:
    with whole_device.left_alone() as is_alone:
        assert is_alone
        began.set()
        assert ends.wait(SOON_S)


def test_several_may_wait_at_once(pool: ThreadPoolExecutor) -> None:
    began, ends = [Event(), Event()], Event()
    waiting = [pool.submit(waits, each, ends) for each in began]
    assert all(each.wait(SOON_S) for each in began)
    ends.set()
    for each in waiting:
        each.result()


@pytest.mark.parametrize("first", [waits, captures])
def test_who_cannot_wait_for_a_capture_is_told_that_somebody_else_is_there(
    pool: ThreadPoolExecutor, first: Work
) -> None:
    began, ends = Event(), Event()
    running = pool.submit(first, began, ends)
    assert began.wait(SOON_S)
    with whole_device.left_alone(blocking=False) as is_alone:
        assert not is_alone
        assert not running.done()
    ends.set()
    running.result()
    with whole_device.left_alone(blocking=False) as is_alone:
        assert is_alone


@pytest.mark.parametrize(
    ("first", "second"), [(waits, captures), (captures, waits), (captures, captures)]
)
def test_the_second_comes_when_the_first_has_ended(
    pool: ThreadPoolExecutor, first: Work, second: Work
) -> None:
    began, ends = [Event(), Event()], [Event(), Event()]
    running = pool.submit(first, began[0], ends[0])
    assert began[0].wait(SOON_S)
    behind = pool.submit(second, began[1], ends[1])
    assert not began[1].wait(0.05)
    ends[0].set()
    running.result()
    assert began[1].wait(SOON_S)
    ends[1].set()
    behind.result()


def test_error_lets_others_go_on() -> None:
    for work in (whole_device.awaited, whole_device.left_alone):
        with pytest.raises(ZeroDivisionError), work():
            raise ZeroDivisionError
    with whole_device.left_alone(blocking=False) as is_alone:
        assert is_alone
