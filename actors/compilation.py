"""A model's layers, compiled behind the back of whoever is served."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

from actors.engine.engine import Engine
from actors.lull import Lull

logger = logging.getLogger(__name__)


class BackgroundCompilation:
    """Compiles on a thread of its own; the model serves, sleeps and wakes meanwhile.

    Requests would feel it: who traces keeps the interpreter's lock from the engine's thread, and to
    capture the graphs again takes the device for seconds. So both wait for a time without a request.

    Attributes:
        traced: done once the layers have been traced, or that failed.
    """

    def __init__(self, engine: Engine, use: Callable[[], None]) -> None:
        """Begin, if there is anything to compile.

        Args:
            use: told once what was compiled should be put to use. Not if the runtime closes before.
        """
        self._engine = engine
        self._use = use
        self._lull = Lull()
        # Compiling is told by process-wide settings, and by the module's own, what a plain forward changes.
        self._tracing = threading.Lock()
        self.traced: Future[None] = Future()
        self.traced.set_running_or_notify_cancel()  # who gives up waiting does not cancel it
        self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
        self._thread.start()

    def serving(self) -> AbstractContextManager[None]:
        """For as long as a request is in flight."""
        return self._lull.interrupted()

    @contextmanager
    def kept_off(self) -> Iterator[bool]:
        """Nothing is traced meanwhile; False if something is right now, see `traced`."""
        is_off = self._tracing.acquire(blocking=False)
        try:
            yield is_off
        finally:
            if is_off:
                self._tracing.release()

    def join(self) -> None:
        """Block until nothing is compiled any more, and `use` has been told of what was."""
        self._thread.join()

    def close(self) -> None:
        """Begin nothing any more."""
        self._lull.close()

    def _compile(self) -> None:
        if not (self._engine.compiles and self._lull.wait()):
            return
        try:
            with self._tracing:
                self._engine.compile()
        except Exception:
            logger.exception("compiling failed; the model is served without, only slower")
            return
        finally:
            self.traced.set_result(None)
        if self._lull.wait():
            self._use()
