"""Work behind everybody's back that others can have left alone for a while."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class KeptOff:
    """Any thread may call.

    `_working` is for who does the work: held while a part of it is done, and by who keeps it off.
    """

    def __init__(self) -> None:
        self._working = threading.Lock()

    @contextmanager
    def kept_off(self) -> Iterator[bool]:
        """Nothing is done meanwhile; False if something is right now, and goes on."""
        is_off = self.keep_off()
        try:
            yield is_off
        finally:
            if is_off:
                self.let_go_on()

    def keep_off(self) -> bool:
        """Have nothing done until `let_go_on`; False if something is right now, and goes on."""
        return self._working.acquire(blocking=False)

    def let_go_on(self) -> None:
        self._working.release()
