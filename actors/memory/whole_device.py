"""Who waits for everything that a device does, and who must not be waited for.

While one thread captures a CUDA graph, another may launch and copy what it likes. Should it wait for the whole
device, the driver breaks off the capture, which is work of the device, too; and torch does not recover from that
(seen with torch 2.11 and driver 580.159).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_change = threading.Condition()
_waiting = 0  # threads that wait, or may do so at any moment
_is_captured = False  # who captures waits for the device before, and so must be alone as well


@contextmanager
def awaited() -> Iterator[None]:
    """Whoever runs in here may wait for the device; blocks while a graph is captured, for less than 0.1 s."""
    global _waiting
    with _change:
        _change.wait_for(lambda: not _is_captured)
        _waiting += 1
    try:
        yield
    finally:
        with _change:
            _waiting -= 1
            _change.notify_all()


@contextmanager
def left_alone(*, blocking: bool = True) -> Iterator[bool]:
    """Nobody else waits for the device meanwhile; False if somebody does already, and goes on, unless `blocking`.

    Who compiles layers may wait for as long as that takes: tens of seconds.
    """
    global _is_captured
    with _change:
        if blocking:
            _change.wait_for(_may_capture)
        if is_alone := _may_capture():
            _is_captured = True
    try:
        yield is_alone
    finally:
        if is_alone:
            with _change:
                _is_captured = False
                _change.notify_all()


def _may_capture() -> bool:
    return not _waiting and not _is_captured


def synchronize(device: torch.device | None = None) -> None:
    """Wait for the device, all its streams."""
    with awaited():
        torch.cuda.synchronize(device)
