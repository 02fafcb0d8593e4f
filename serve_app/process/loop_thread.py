"""Something asynchronous for callers who are not: held open on an event loop of its own, on a thread of its own."""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from actors.errors import ShuttingDown
from actors.threads import call_unless_closed
from serve_app.process.ending import end_despite  # registered before ours: at exit it comes behind

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

# To leave a context: a worker gives its device 30 s.
_CLOSE_TIMEOUT_S = 60.0

_open: "set[LoopThread[Any]]" = set()


class LoopThread(Generic[T]):
    """Holds an asynchronous context open. Any thread but its own may call.

    One that is still open when the main thread ends is closed then. A forked child has a copy without the thread:
    it can do nothing with it but close it, for which there is nothing to do.
    """

    def __init__(self, context: AbstractAsyncContextManager[T], name: str) -> None:
        """Enter the context.

        Raises:
            Exception: whatever entering it raises.
            KeyboardInterrupt: once what had begun is undone.
        """
        self._ready: Future[T] = Future()
        self._ended: Future[None] = Future()
        self._takes_calls = True
        self._is_closing = False  # as the event loop knows
        self._name = name
        self._process_id = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._hold(context))
        # A daemon: whoever has to wait for its end does so in `close`.
        threading.Thread(target=self._run, name=name, daemon=True).start()
        try:
            _open.add(self)
            self._ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def value(self) -> T:
        """What the context gave.

        Raises:
            ShuttingDown: that was in another process.
        """
        self._require_own_process()
        return self._ready.result()

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """What `work` comes to on the event loop; it is cancelled if the caller is interrupted.

        Raises:
            ShuttingDown: the context was left before that or is being left, or was entered in another process.
            Exception: whatever `work` raises.
        """
        try:
            self._require_own_process()
            if not self._takes_calls:
                raise ShuttingDown("it has been shut down")
        except ShuttingDown:
            work.close()
            raise
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # there is no event loop any more
            work.close()
            raise ShuttingDown("it has been shut down") from None
        try:
            ends: tuple[Future[Any], ...] = (future, self._ended)
            wait(ends, return_when=FIRST_COMPLETED)
            if not future.done():  # the event loop ended before it could begin
                work.close()
                future.cancel()
            return future.result()
        except CancelledError:
            raise ShuttingDown("it was shut down meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Leave the context, and return when the thread has nothing more to do. Idempotent.

        What hangs is waited for 60 s; from then on this process ends without it (`end_despite`). In another process
        than the context was entered in, nothing is done.

        Raises:
            Exception: whatever leaving it raises.
        """
        if not self._is_own_process():
            _open.discard(self)
            return
        self._takes_calls = False
        call_unless_closed(self._loop, self._cancel_once)
        wait([self._ended], _CLOSE_TIMEOUT_S)
        _open.discard(self)
        if self._ended.done():
            self._ended.result()
        else:
            end_despite(f"{self._name} does not end")

    def _is_own_process(self) -> bool:
        return os.getpid() == self._process_id

    def _require_own_process(self) -> None:
        if not self._is_own_process():
            raise ShuttingDown(
                f"it was made in another process, {self._process_id}, whose threads a fork does not copy; "
                "make one in this process, or use it there"
            )

    def _cancel_once(self) -> None:
        """A second time would break off what the first has the context do."""
        if not self._is_closing:
            self._is_closing = True
            self._task.cancel()

    async def _hold(self, context: AbstractAsyncContextManager[T]) -> None:
        async with context as value:
            self._ready.set_result(value)
            await asyncio.Event().wait()  # until cancelled

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.get_loop().run_until_complete(self._task)
        except asyncio.CancelledError:
            pass  # by `close`
        except BaseException as exc:  # noqa: BLE001  # for those who wait
            failure = exc
        if not self._ready.done():
            self._ready.set_exception(failure or ShuttingDown("interrupted"))
            failure = None  # has been told
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)


def _close_all() -> None:
    for each in list(_open):
        try:
            each.close()
        except Exception:
            logger.exception("could not be shut down in good order")


# As in `ending`, and before executors take no more work.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
