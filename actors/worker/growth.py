"""The rest of a KV cache, mapped on the control thread after a wake, one part behind the other."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from actors.errors import DeviceMemoryShort
from actors.memory.arena import RETRY_SHORT_AFTER_S
from actors.threads import submit_unless_closed

logger = logging.getLogger(__name__)


class CacheGrowth:
    """Maps part after part until none is missing; whatever else was submitted meanwhile goes in between.

    Attributes:
        running: parts are still to come. Those that found no memory are asked for again in a while,
            and do not count.
    """

    def __init__(
        self,
        control: Executor,
        map_part: Callable[[], bool],
        fail: Callable[[Exception, str], None],
    ) -> None:
        """Make an idle one.

        Args:
            control: of one thread.
            map_part: maps one part; False if none is missing, or nobody wants it now. May raise.
            fail: told what it raised, unless that was DeviceMemoryShort.
        """
        self.running = False
        self._control = control
        self._map_part = map_part
        self._fail = fail
        self._is_short = False  # and that has been told
        self._retry: threading.Timer | None = None

    def begin(self) -> None:
        """Ask for what is missing; a wake does."""
        self.cancel_retry()
        self.running = True
        self._submit()

    def cancel_retry(self) -> None:
        """Ask no more by itself. Any thread may call."""
        retry, self._retry = self._retry, None
        if retry is not None:
            retry.cancel()

    def _submit(self) -> None:
        if not submit_unless_closed(self._control, self._next, "the KV cache grew"):
            self.running = False

    def _next(self) -> None:
        try:
            self.running = self._map_part()
        except DeviceMemoryShort as exc:
            self.running = False
            if not self._is_short:
                logger.warning("the KV cache is smaller than planned for now: %s", exc)
            self._is_short = True
            self.cancel_retry()
            self._retry = threading.Timer(RETRY_SHORT_AFTER_S, self._submit)
            self._retry.daemon = True
            self._retry.start()
        except Exception as exc:  # noqa: BLE001  # nobody waits for this
            self.running = False
            self._fail(exc, "mapping the KV cache")
        else:
            self._is_short = False
            if self.running:
                self._submit()
