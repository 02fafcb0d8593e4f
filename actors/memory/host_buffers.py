"""Host memory that the device writes into: two buffers, so that one is read while the other is written."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from actors.errors import DeviceMemoryError
from actors.threads import start_apart

logger = logging.getLogger(__name__)

_COUNT = 2


@dataclass(frozen=True, slots=True)
class _Buffer:
    memory: torch.Tensor
    pinned: bool


class HostBuffers:
    """Between `keep` and `let_go` they are used again: the kernel clears new pages slower than a card fills them."""

    def __init__(
        self, take: Callable[[int], torch.Tensor], give: Callable[[torch.Tensor], None]
    ) -> None:
        """Take nothing yet.

        Args:
            take, give: as of MemoryDriver's `take_host` and `give_host`. Both may block.
        """
        self._take = take
        self._give = give
        self._turns = threading.BoundedSemaphore(_COUNT)
        self._lock = threading.Lock()
        self._idle: list[_Buffer] = []
        self._keeps = False

    def keep(self) -> None:
        with self._lock:
            self._keeps = True

    def let_go(self) -> None:
        """Give back what nobody uses now, and the others when nobody does any more. Does not wait."""
        with self._lock:
            self._keeps = False
            idle, self._idle = self._idle, []
        for buffer in idle:
            self._give_back(buffer)

    @contextmanager
    def one(self, size: int) -> Iterator[torch.Tensor]:
        """Wait for a turn. So many bytes, uint8; pinned, if that is allowed."""
        with self._turns:
            buffer = self._idle_one(size) or self._new(size)
            try:
                yield buffer.memory[:size]
            finally:
                with self._lock:
                    kept = self._keeps
                    if kept:
                        self._idle.append(buffer)
                if not kept:
                    self._give_back(buffer)

    def _idle_one(self, size: int) -> _Buffer | None:
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
        if buffer is None or len(buffer.memory) >= size:
            return buffer
        self._give_back(buffer)
        return None

    def _new(self, size: int) -> _Buffer:
        try:
            return _Buffer(self._take(size), pinned=True)
        except DeviceMemoryError as exc:
            logger.info(
                "an image is compressed through pageable memory, which takes longer: %s", exc
            )
            return _Buffer(torch.empty(size, dtype=torch.uint8), pinned=False)

    def _give_back(self, buffer: _Buffer) -> None:
        if buffer.pinned:  # on a thread that may wait for a deep sleep to end
            start_apart(self._give_now, buffer.memory)

    def _give_now(self, memory: torch.Tensor) -> None:
        try:
            self._give(memory)
        except DeviceMemoryError:
            logger.exception("%d bytes of host memory stay pinned", len(memory))
