"""A model's layers, compiled behind the back of whoever is served."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from actors.engine.engine import TransformersEngine
from actors.errors import DeviceMemoryShort
from actors.image.packer import BUILDING
from actors.worker.kept_off import KeptOff
from actors.worker.lull import Lull

logger = logging.getLogger(__name__)

_RETRY_SHORT_AFTER_S = 60.0  # somebody else has the memory for one layer


class BackgroundCompilation(KeptOff):
    """Compiles on a thread of its own; the model serves, sleeps and wakes meanwhile.

    Requests would feel it: who traces keeps the interpreter's lock from the engine's thread, and to
    capture the graphs again takes the device for seconds. So both wait for a time without any.
    Who keeps it off does so because compiling is told by process-wide settings, and by the module's own, what a
    plain forward changes.

    Attributes:
        traced: done once the attempt that runs now, or comes next, has been made.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        tried: Callable[[], None],
        use: Callable[[], None],
        watch: AbstractContextManager[None],
        is_busy: Callable[[], bool],
    ) -> None:
        """Begin, if there is anything to compile.

        Args:
            tried: told after each attempt, whatever came of it.
            use: told once what was compiled should be put to use. Not if the runtime closes before.
            watch: entered for as long as an attempt takes, on the thread.
            is_busy: whether the engine has anything to do.
        """
        super().__init__()
        self._engine = engine
        self._tried = tried
        self._use = use
        self._watch = watch
        self._lull = Lull(is_busy)
        self.traced = _uncancellable()
        self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
        self._thread.start()

    @property
    def is_tracing(self) -> bool:
        """Or it is kept off."""
        return self._working.locked()

    def use_again(self) -> None:
        """Tell `use` once more, at the next time without requests: it found the model asleep."""
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._wait_and_use, name="compiled", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Block until nothing is compiled any more, and `use` has been told of what was."""
        self._thread.join()

    def close(self) -> None:
        """Begin nothing any more."""
        self._lull.close()

    def _compile(self) -> None:
        while self._engine.compiles and self._lull.wait():
            try:
                # torch's compiler puts back torch's default dtype as it found it, and whoever builds a model changes it.
                with self._working, BUILDING, self._watch:
                    self._engine.compile()
            except DeviceMemoryShort as exc:
                logger.info("compiling is tried again in %g s: %s", _RETRY_SHORT_AFTER_S, exc)
            except Exception:
                logger.exception("compiling failed; the model is served without, only slower")
                return
            else:
                break
            finally:
                made, self.traced = self.traced, _uncancellable()
                made.set_result(None)
                self._tried()
            if not self._lull.rest(_RETRY_SHORT_AFTER_S):
                return
        else:
            return
        self._wait_and_use()

    def _wait_and_use(self) -> None:
        if self._lull.wait():
            self._use()


def _uncancellable() -> Future[None]:
    """A future that goes on when whoever waits for it gives up."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
