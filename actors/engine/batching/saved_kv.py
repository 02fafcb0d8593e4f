"""Keys and values of frozen sequences in host memory, from a sleep to the step that has them again."""

import heapq
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch
from torch import Tensor

from actors.errors import DeviceMemoryError
from actors.rounding import cdiv

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**30  # of host memory for one worker
_SHARE = 16  # of what the host has left: no more than a 16th
_PIECE_BYTES = 2**25  # of host memory, taken at once: a wake waits for one piece at most
_SAVE_S = 0.02  # that a sleep may take longer for all of its copies
_BYTES_PER_S = 25e9  # of the link, as long as nothing was measured: PCIe 4
_MEASURED_BYTES = 2**26  # that a sleep must save for its rate to be taken


class HostSource(Protocol):
    """Who gives host memory that the device copies to and from. `DeviceArena` does."""

    @property
    def device(self) -> torch.device: ...
    def take_host(self, size: int) -> Tensor: ...
    def give_host(self, memory: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class FrozenBlocks:
    """The full blocks of a sequence, from its first on.

    Attributes:
        digests: of all tokens up to the end of each block.
    """

    name: str
    blocks: Sequence[int]
    digests: Sequence[bytes]


class SavedKv:
    """Owns the bytes, each block once however many sequences share it, until all of these are gone or go on.

    To pin host memory takes too long for a sleep. So on a GPU a sleep saves into what is pinned already, and what
    it would have needed is pinned behind it (`reserve`): the first sleep of a worker that freezes long sequences
    saves none of them. `save`, `reserve` and `clear` are called while the device is idle and the loop stands or
    has ended, `find` by the loop, `forget` and `blocks` by anybody.

    Attributes:
        source: set with the cache's memory, before `save`.
    """

    source: HostSource

    def __init__(self, block_bytes: int) -> None:
        """Make one without memory."""
        self._block_bytes = block_bytes
        self._per_piece = max(1, _PIECE_BYTES // block_bytes)
        self._pieces: list[Tensor] = []  # [blocks of a piece, block_bytes], uint8
        self._wanted = 0  # blocks to have room for
        self._bytes_per_s = _BYTES_PER_S
        self._lock = threading.Lock()  # of what follows
        self._free: list[int] = []  # slots; a heap
        self._slot_of: dict[bytes, int] = {}
        self._users: dict[bytes, int] = {}
        self._digests_of: dict[str, list[bytes]] = {}

    @property
    def blocks(self) -> int:
        """That are saved."""
        return len(self._slot_of)

    @property
    def room(self) -> int:
        """Blocks that there is host memory for, those that are saved included."""
        return len(self._pieces) * self._per_piece

    def copying_s(self, blocks: int) -> float:
        """Seconds that so many blocks take on the link, to the host and back."""
        return 2 * blocks * self._block_bytes / self._bytes_per_s

    def save(self, sequences: Sequence[FrozenBlocks], blocks: Tensor) -> None:
        """Copy what there is time and room for, of the first sequences first; done when it returns.

        Args:
            blocks: of the cache [any, block_bytes], uint8.
        """
        most = max(1, int(_SAVE_S * self._bytes_per_s) // self._block_bytes)
        self._wanted = self.blocks + min(most, sum(len(each.blocks) for each in sequences))
        while self.source.device.type == "cpu" and self.reserve():
            pass  # nothing is pinned there
        copies: list[tuple[int, int]] = []  # slot, block
        with self._lock:
            for sequence in sequences:
                self._digests_of[sequence.name] = held = []
                for block, digest in zip(sequence.blocks, sequence.digests, strict=True):
                    if digest not in self._slot_of:
                        if len(copies) == most or not self._free:
                            break
                        self._slot_of[digest] = slot = heapq.heappop(self._free)
                        copies.append((slot, block))
                    self._users[digest] = self._users.get(digest, 0) + 1
                    held.append(digest)
        if not sequences:
            return
        started_s = time.perf_counter()
        for slot, block in copies:
            self._at(slot).copy_(blocks[block], non_blocking=True)
        if blocks.device.type == "cuda":
            torch.cuda.current_stream(blocks.device).synchronize()
        seconds, size = time.perf_counter() - started_s, len(copies) * self._block_bytes
        if size >= _MEASURED_BYTES:
            self._bytes_per_s = size / seconds
        logger.info(
            "saved %d blocks of %d frozen sequences, %d bytes in %.1f ms; there is room for %d, wanted for %d",
            len(copies),
            len(sequences),
            size,
            1e3 * seconds,
            self.room,
            self._wanted,
        )

    def reserve(self) -> bool:
        """Take or give back a piece of host memory towards what the last sleep wanted; whether to go on.

        A sleep that wanted nothing gives all back, but for what holds something.
        """
        have = len(self._pieces)
        piece_bytes = self._per_piece * self._block_bytes
        left = psutil.virtual_memory().available + have * piece_bytes
        may_have = min(_MOST_BYTES, left // _SHARE) // piece_bytes
        target = min(cdiv(self._wanted, self._per_piece), may_have)
        if have < target:
            return self._take(piece_bytes)
        return have > target and self._give()

    def find(self, digest: bytes) -> Tensor | None:
        """The saved bytes [block_bytes] of a block; they stay until the next pause of the loop."""
        with self._lock:
            slot = self._slot_of.get(digest)
        return None if slot is None else self._at(slot)

    def forget(self, name: str) -> None:
        """A sequence ends, or has its blocks on the device again."""
        with self._lock:
            for digest in self._digests_of.pop(name, ()):
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
                    heapq.heappush(self._free, self._slot_of.pop(digest))

    def clear(self) -> None:
        """Keep nothing, and no host memory."""
        self._wanted = 0
        for name in list(self._digests_of):
            self.forget(name)
        while self._pieces and self._give():
            pass

    def _at(self, slot: int) -> Tensor:
        return self._pieces[slot // self._per_piece][slot % self._per_piece]

    def _take(self, size: int) -> bool:
        try:
            memory = self.source.take_host(size)
        except DeviceMemoryError as exc:
            self._wanted = 0
            logger.warning("frozen sequences are computed again: no host memory for them: %s", exc)
            return False
        first = self.room
        self._pieces.append(memory.view(self._per_piece, self._block_bytes))
        with self._lock:
            for slot in range(first, self.room):
                heapq.heappush(self._free, slot)
        return True

    def _give(self) -> bool:
        """Give the last piece back; False if it holds something."""
        first = self.room - self._per_piece
        with self._lock:
            left = [slot for slot in self._free if slot < first]
            if len(self._free) - len(left) < self._per_piece:
                return False
            heapq.heapify(left)
            self._free = left
        self.source.give_host(self._pieces.pop().view(-1))
        return True
