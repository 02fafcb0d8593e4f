"""Work that other threads give to a runtime's control thread, which may be gone by then."""

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
