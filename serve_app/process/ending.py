"""An end for a process that a thread which hangs would keep from ending: one in a driver, say."""

import atexit
import concurrent.futures.thread  # noqa: F401  # its end at exit is registered before ours, so ours comes first
import logging
import os
import sys
import threading
from concurrent.futures import wait

from actors.threads import start_apart

logger = logging.getLogger(__name__)

_FAILED = 1
_AT_EXIT_S = 10.0  # for what others have registered with `atexit`: it may wait for the same device

_hung: list[str] = []


def end_despite(what: str) -> None:
    """Have this process wait for no thread when its main thread has ended, and exit with 1.

    Python waits for the threads of executors, of which the control thread of a model is one, and the event loop's.

    Args:
        what: hangs, for the log.
    """
    _hung.append(what)


def _end() -> None:
    if not _hung:
        return
    logger.error("this process ends without waiting: %s", "; ".join(_hung))
    # Python would come to these only behind the threads.
    wait([start_apart(atexit._run_exitfuncs)], _AT_EXIT_S)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(_FAILED)


# Before Python waits for all threads that are no daemons, of which the engine of a model is one: `atexit` is too
# late. Private, and in 3.11 to 3.14 as concurrent.futures.thread uses it.
threading._register_atexit(_end)  # type: ignore[attr-defined]
