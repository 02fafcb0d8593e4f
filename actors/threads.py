"""Work for other threads: for several at once, a runtime's control thread, or its event loop, if still there."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# One has not all of a host's rate: of copies, of hashing, of pages that the kernel clears first.
MEMORY_THREADS = min(8, os.cpu_count() or 1)


class ControlThread(Executor):
    """One thread. All of its work is watched, and nobody waits for it any longer once it has hung."""

    def __init__(self, watch: AbstractContextManager[None]) -> None:
        """Make an idle one.

        Args:
            watch: entered for as long as any work takes.
        """
        self._watch = watch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runtime-control")
        self._lock = threading.Lock()
        self._awaited: set[Future[Any]] = set()
        self._given_up: Exception | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have the thread do `work`; once given up, who waits for it learns so at once.

        Raises:
            RuntimeError: it has been shut down.
        """
        told: Future[T] = Future()
        untold = [told]

        def run() -> None:
            told = untold.pop()  # see start_apart
            # Given up, it is done all the same, should the thread come back: it may let go of something.
            with self._lock:
                if told in self._awaited and not told.set_running_or_notify_cancel():
                    self._awaited.discard(told)
            try:
                if told.cancelled():
                    return
                with self._watch:
                    result = work(*args, **kwargs)
            except BaseException as exc:  # noqa: BLE001  # for whoever waits, as with any executor
                if self._forget(told):
                    told.set_exception(exc)
            else:
                if self._forget(told):
                    told.set_result(result)
            finally:
                del told

        with self._lock:
            self._thread.submit(run)
            if self._given_up is None:
                self._awaited.add(told)
                return told
        told.set_exception(self._given_up)
        return told

    def give_up(self, reason: Exception) -> None:
        """It hangs: everything that is waited for, now or later, raises `reason`. Any thread may call."""
        with self._lock:
            self._given_up = reason
            awaited, self._awaited = self._awaited, set()
        for told in awaited:
            if told.running() or told.set_running_or_notify_cancel():
                told.set_exception(reason)

    @property
    def has_hung(self) -> bool:
        """Whether it was given up."""
        return self._given_up is not None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._thread.shutdown(wait, cancel_futures=cancel_futures)

    def _forget(self, told: Future[Any]) -> bool:
        """Whether it was awaited until now: then its outcome is to be told."""
        with self._lock:
            was_awaited = told in self._awaited
            self._awaited.discard(told)
        return was_awaited


def start_apart(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Begin `work` on a thread of its own: it may never end, and then keeps no executor and no process waiting.

    A failure has the frames that it came through, and all that they hold. The thread's keeps no hold of what has the
    failure, or nobody but the garbage collector could let go of them.
    """
    told: Future[T] = Future()
    told.set_running_or_notify_cancel()

    def run(told: Future[T]) -> None:
        try:
            result = work(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001  # for whoever waits, as with any executor
            told.set_exception(exc)
        else:
            told.set_result(result)
        finally:
            del told

    threading.Thread(target=run, args=(told,), name=f"apart-{work.__name__}", daemon=True).start()
    return told


def on_threads(
    work: Callable[..., T],
    *of: Iterable[Any],
    sizes: Sequence[float] | None = None,
    at_once: int = MEMORY_THREADS,
) -> list[T]:
    """As `map`, on several threads. After a failure, which this raises, no more is begun.

    For what waits for memory, a disk or another process: it has to do without the interpreter.

    What it had so far goes with the failure, without the garbage collector: what the failure's frames hold has not
    got it.

    Args:
        sizes: one for each; the largest is begun first, so that no thread still has it when all others are done.
    """
    each = list(zip(*of, strict=True))
    order: Sequence[int] = range(len(each))
    if sizes is not None:
        order = sorted(order, key=lambda index: sizes[index], reverse=True)
    failures: list[BaseException] = []

    def unless_failed(index: int) -> list[T]:
        if failures:
            return []
        try:
            return [work(*each[index])]
        except BaseException as exc:  # noqa: BLE001  # raised below, once no thread is at work any more
            failures.append(exc)
            return []

    name = getattr(work, "__name__", "work")
    with ThreadPoolExecutor(at_once, thread_name_prefix=name) as pool:
        try:
            begun = {index: pool.submit(unless_failed, index) for index in order}
            wait(begun.values())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if failures:
        failure = failures[0]
        failures.clear()
        try:
            raise failure
        finally:
            del failure, begun
    return [result for index in range(len(each)) for result in begun[index].result()]


def submit_unless_closed(control: Executor, work: Callable[[], object], meanwhile: str) -> bool:
    """Submit `work`; False if the runtime has been closed.

    Args:
        meanwhile: what went on until now, for the log: "closed while ...".
    """
    try:
        control.submit(work)
    except RuntimeError:
        logger.info("closed while %s", meanwhile)
        return False
    return True


def call_unless_closed(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have an event loop make a call, from any thread; a closed one does not."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        logger.info("the event loop was closed before it was told everything")
