"""cuBLAS's workspaces: 32 MiB for every thread and stream that ever multiplied matrices, kept by torch.

torch can give back all of them or none. A thread that has looked its workspace up and not yet launched
its kernel must not lose it, so they go only when nobody in this process computes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_users = 0


def begin_use() -> None:
    """From now on this process may multiply matrices; until a matching `end_use`."""
    global _users
    with _lock:
        _users += 1


def end_use() -> None:
    """What was launched has been done."""
    global _users
    with _lock:
        _users -= 1
        assert _users >= 0, "used by nobody"


@contextmanager
def in_use() -> Iterator[None]:
    begin_use()
    try:
        yield
    finally:
        end_use()


def give_back_unused() -> bool:
    """Let torch's allocator have them, if nobody uses them; whether that was so."""
    with _lock:
        if _users == 0:
            torch._C._cuda_clearCublasWorkspaces()
        return _users == 0
