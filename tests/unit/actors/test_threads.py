"""A thread whose waiters do not hang with it."""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import nullcontext

import pytest

from actors.threads import ControlThread, on_threads, start_apart
from tests.let_go import is_let_go

HUNG = RuntimeError("hung")


@pytest.fixture
def control() -> Iterator[ControlThread]:
    control = ControlThread(nullcontext())
    yield control
    control.shutdown()


def test_work_is_done_in_turn_and_told(control: ControlThread) -> None:
    assert [each.result(5) for each in [control.submit(pow, 2, i) for i in range(5)]] == [
        1,
        2,
        4,
        8,
        16,
    ]
    with pytest.raises(ZeroDivisionError):
        control.submit(lambda: 1 // 0).result(5)


def test_nobody_waits_for_a_thread_that_was_given_up(control: ControlThread) -> None:
    begun, released, done = threading.Event(), threading.Event(), []

    def hang() -> None:
        begun.set()
        assert released.wait(20)

    hanging, behind = control.submit(hang), control.submit(done.append, "behind")
    cancelled = control.submit(done.append, "cancelled")
    assert begun.wait(5)
    assert cancelled.cancel()
    control.give_up(HUNG)
    for each in (hanging, behind, control.submit(done.append, "later")):
        with pytest.raises(RuntimeError, match="hung"):
            each.result(0)
    released.set()
    control.shutdown(wait=True)
    assert done == ["behind", "later"], "all the same, once it has come back"


def test_work_that_was_cancelled_in_time_is_not_done(control: ControlThread) -> None:
    released, done = threading.Event(), []
    control.submit(released.wait, 20)
    late = control.submit(done.append, "late")
    assert late.cancel()
    released.set()
    control.shutdown(wait=True)
    assert done == []


def test_all_work_is_watched_also_when_it_fails() -> None:
    entered: list[str] = []

    class Watch:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *args: object) -> None:
            entered.append("out")

    control = ControlThread(Watch())
    with pytest.raises(ZeroDivisionError):
        control.submit(lambda: entered.append("work") or 1 // 0).result(5)
    control.shutdown()
    assert entered == ["in", "work", "out"]


def test_closed_one_takes_no_work(control: ControlThread) -> None:
    control.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        control.submit(print)


def test_several_threads_give_results_in_order_of_what_they_are_of() -> None:
    second_done = threading.Event()

    def work(number: int, text: str) -> str:
        if number == 0:
            assert second_done.wait(10)
        elif number == 1:
            second_done.set()
        return f"{number}{text}"

    assert on_threads(work, range(3), "abc", at_once=2) == ["0a", "1b", "2c"]


@pytest.mark.parametrize("first", [0, 99])
def test_after_a_failure_no_more_is_begun(first: int) -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        on_threads(work, range(100), sizes=[number == first for number in range(100)], at_once=1)
    assert begun == [first]


def test_the_largest_is_begun_first_and_results_keep_their_order() -> None:
    begun: list[str] = []

    def upper(name: str) -> str:
        begun.append(name)
        return name.upper()

    assert on_threads(upper, "abcd", sizes=[1, 3, 2, 3], at_once=1) == ["A", "B", "C", "D"]
    assert begun == ["b", "d", "c", "a"]


class Reserved:
    """What nobody else needs once a load has failed."""


Refs = list[weakref.ref[Reserved]]


def load(refs: Refs) -> list[Reserved]:
    reserved = [Reserved() for _ in range(4)]
    refs += map(weakref.ref, reserved)
    raise RuntimeError("packing failed")


def outcome(future: Future[list[Reserved]]) -> list[Reserved]:
    wait([future], 5)
    try:
        return future.result()
    finally:
        del future


@pytest.mark.usefixtures("no_garbage_collector")
def test_failure_on_several_threads_keeps_nothing() -> None:
    """Neither what its frames held nor what others had made before."""
    refs: Refs = []

    def reserve(number: int) -> Reserved:
        if number == 3:
            raise RuntimeError("full")
        made = Reserved()
        refs.append(weakref.ref(made))
        return made

    def pull() -> None:
        own = [Reserved() for _ in range(4)]
        refs.extend(map(weakref.ref, own))
        on_threads(lambda number: reserve(number) and own[number], range(4), at_once=1)

    with pytest.raises(RuntimeError, match="full") as failed:
        pull()
    assert len(refs) == 7
    del failed
    assert is_let_go(refs)


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("submit", [ControlThread.submit, lambda _, *work: start_apart(*work)])
def test_failure_on_a_thread_keeps_nothing(
    control: ControlThread, submit: Callable[..., Future[list[Reserved]]]
) -> None:
    refs: Refs = []
    with pytest.raises(RuntimeError, match="packing failed") as failed:
        outcome(submit(control, load, refs))
    del failed
    assert is_let_go(refs)
