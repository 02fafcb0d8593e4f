import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from actors.errors import InvalidRequest, ShuttingDown
from serve_app.process import ending, loop_thread
from serve_app.process.loop_thread import LoopThread


class Held:
    """A context that records what becomes of it."""

    def __init__(self, on_enter: Exception | None = None, on_leave: Exception | None = None):
        self.steps: list[str] = []
        self._on_enter, self._on_leave = on_enter, on_leave

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[str]:
        if self._on_enter is not None:
            raise self._on_enter
        self.steps.append("entered")
        try:
            yield "value"
        finally:
            await asyncio.sleep(0)
            self.steps.append("left")
            if self._on_leave is not None:
                raise self._on_leave


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def refused() -> None:
    raise InvalidRequest("no", "prompt")


def test_context_is_held_on_a_thread_of_its_own_until_closed() -> None:
    held = Held()
    thread = LoopThread(held(), "held")
    assert thread.value == "value"
    assert held.steps == ["entered"]
    assert thread.call(doubled(2)) == 4
    with pytest.raises(InvalidRequest):
        thread.call(refused())
    thread.close()
    thread.close()
    assert held.steps == ["entered", "left"]
    assert "held" not in [each.name for each in threading.enumerate()]
    assert not loop_thread._open


def test_what_entering_raises_is_raised_and_nothing_is_left() -> None:
    with pytest.raises(OSError, match="no disk"):
        LoopThread(Held(on_enter=OSError("no disk"))(), "held")
    assert not loop_thread._open


def test_what_leaving_raises_is_raised() -> None:
    thread = LoopThread(Held(on_leave=OSError("still in use"))(), "held")
    with pytest.raises(OSError, match="still in use"):
        thread.close()
    assert not loop_thread._open


def test_calls_to_one_that_was_closed_are_refused() -> None:
    thread = LoopThread(Held()(), "held")
    thread.close()
    with pytest.raises(ShuttingDown):
        thread.call(doubled(2))


def test_calls_while_it_is_left_are_refused() -> None:
    leaving, may_leave = threading.Event(), threading.Event()

    @asynccontextmanager
    async def slow_to_leave() -> AsyncIterator[None]:
        try:
            yield
        finally:
            leaving.set()
            await asyncio.to_thread(may_leave.wait, 10)

    thread = LoopThread(slow_to_leave(), "slow")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(thread.close)
        assert leaving.wait(10)
        with pytest.raises(ShuttingDown):
            thread.call(doubled(2))
        assert not closing.done()
        may_leave.set()
        closing.result(10)


def test_call_under_way_ends_when_it_is_closed() -> None:
    thread = LoopThread(Held()(), "held")
    begun = threading.Event()

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(thread.call, for_ever())
        assert begun.wait(20)
        thread.close()
        assert isinstance(call.exception(20), ShuttingDown)


def test_interrupted_caller_has_its_call_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupted(*_: object, **__: object) -> None:
        assert begun.wait(20)
        raise KeyboardInterrupt

    thread = LoopThread(Held()(), "held")
    with monkeypatch.context() as patch:
        patch.setattr(loop_thread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.call(for_ever())
    assert cancelled.wait(20)
    assert thread.call(doubled(2)) == 4
    thread.close()


def exit_code_of_fork(work: Callable[[], object]) -> int:
    """0 if `work` came to an end in a forked child; -9 if it hung there."""
    if (child := os.fork()) == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  # nothing of it may run the tests of this process
            os._exit(1)
        os._exit(0)
    ends_s = time.monotonic() + 20
    while time.monotonic() < ends_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_ends_without_waiting_for_a_thread_that_it_has_not() -> None:
    held = Held()
    thread = LoopThread(held(), "held")

    def at_exit() -> None:
        loop_thread._close_all()
        assert not loop_thread._open
        assert not ending._hung

    assert exit_code_of_fork(at_exit) == 0
    assert exit_code_of_fork(thread.close) == 0
    assert held.steps == ["entered"]
    assert thread.call(doubled(2)) == 4  # nothing of that reached this process
    thread.close()
    assert held.steps == ["entered", "left"]


@pytest.mark.filterwarnings("error")  # of a coroutine that nobody awaited
def test_forked_child_is_told_that_it_cannot_call() -> None:
    thread = LoopThread(Held()(), "held")

    def refused() -> None:
        with pytest.raises(ShuttingDown, match=f"made in another process, {os.getppid()},"):
            thread.call(doubled(2))
        with pytest.raises(ShuttingDown, match="made in another process"):
            thread.value  # noqa: B018

    assert exit_code_of_fork(refused) == 0
    thread.close()


def test_all_that_is_open_is_closed_at_the_end_even_if_one_cannot_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = Held(), Held(on_leave=OSError("still in use"))
    LoopThread(bad(), "bad")
    LoopThread(good(), "good")
    loop_thread._close_all()
    assert good.steps[-1] == bad.steps[-1] == "left"
    assert "still in use" in caplog.text
    assert not loop_thread._open
