"""Python's garbage collector, which runs at any moment, on whatever thread makes an object."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()  # of the two below
_inside = 0
_was_enabled = False  # when the first of them came


@contextmanager
def without_collections() -> Iterator[None]:
    """Have nothing collected in the body, on any thread; several threads may be in one."""
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
