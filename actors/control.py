"""Work that threads give to each other: to a runtime's control thread, or to its event loop, if still there."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

logger = logging.getLogger(__name__)


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
