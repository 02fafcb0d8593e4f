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
def looking(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Look at once, after every so many seconds, on a thread, and once more at the end."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            look()

    look()
    watcher = threading.Thread(target=watch, name="bench-looks")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        look()


@contextmanager
def host_use(processes: Callable[[], Iterable[psutil.Process]]) -> Iterator[HostUse]:
    """What it is from now on, every two seconds."""
    use, began_s = HostUse(), time.monotonic()

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

    with looking(look, _EVERY_S):
        yield use
