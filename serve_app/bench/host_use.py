"""What a server's processes have of the host while something is measured: does anything grow?"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

_EVERY_S = 2.0


@dataclass(slots=True)
class HostUse:
    """One of each for each look.

    Attributes:
        at_s: since the block began.
        anonymous_bytes: memory of all processes that no file holds, and so no packed image.
        handles: open files and sockets.
    """

    at_s: list[float] = field(default_factory=list)
    anonymous_bytes: list[int] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)


@contextmanager
def host_use(processes: Callable[[], Iterable[psutil.Process]]) -> Iterator[HostUse]:
    """Look every two seconds, on a thread, and once more at the end."""
    use, over, began_s = HostUse(), threading.Event(), time.monotonic()

    def look() -> None:
        at_s, anonymous, handles = time.monotonic() - began_s, 0, 0
        for process in processes():
            try:
                memory = process.memory_info()
                anonymous += memory.rss - memory.shared
                handles += process.num_fds()
            except psutil.NoSuchProcess:
                continue  # Ray ends idle workers when it likes
        use.at_s.append(at_s)
        use.anonymous_bytes.append(anonymous)
        use.handles.append(handles)

    def watch() -> None:
        while not over.wait(_EVERY_S):
            look()

    look()
    watcher = threading.Thread(target=watch, name="host-use")
    watcher.start()
    try:
        yield use
    finally:
        over.set()
        watcher.join()
        look()
