"""The end of a process that something in it keeps from ending."""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from actors.errors import ReplicaFailed

logger = logging.getLogger(__name__)

# Requests are told in milliseconds. Ray Serve needs three health checks, some 6 s, to stop a replica that
# failed, and then waits for whatever it still counts as in flight, up to 600 s.
_AFTER_S = 20.0


def end_process_after(
    hung: Future[ReplicaFailed],
    after_s: float = _AFTER_S,
    exit_process: Callable[[int], object] = os._exit,
) -> None:
    """End this process a while after something in it hung, unless somebody else does before.

    Only its end gives back the device. Nothing is asked of the event loop or of other threads: they may hang,
    too. Python's own way out would wait for the threads.

    Args:
        hung: of the runtime. Never done: nothing happens.
    """

    def end() -> None:
        logger.critical("what hung is still there after %g s; ending the process", after_s)
        exit_process(1)

    def begin(hung: Future[ReplicaFailed]) -> None:
        timer = threading.Timer(after_s, end)
        timer.daemon = True
        timer.start()

    hung.add_done_callback(begin)
