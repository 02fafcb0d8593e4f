"""Memory for torch's own allocator that comes and goes behind addresses that stay.

https://docs.pytorch.org/docs/stable/notes/cuda.html#using-custom-memory-allocators-for-cuda
"""

import ctypes
import logging
from typing import Any

import torch

from actors.errors import DeviceMemoryError, DeviceMemoryShort
from actors.garbage import without_collections
from actors.memory.arena import RETRY_SHORT_AFTER_S, DeviceArena
from actors.memory.driver import MemoryDriver

logger = logging.getLogger(__name__)

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
# torch keeps requests of up to 1 MiB apart, in segments of 2 MiB (CUDACachingAllocator).
_SMALL = 2**20
_SMALLS = 8


class CudaPool:
    """See AllocatorPool. Give torch the `id` for what allocates, as `torch.cuda.graph` takes it.

    torch calls for memory with its allocator's lock held and without the GIL, which the call then waits
    for; a thread that frees a tensor has the GIL and waits for the lock. So memory is asked for ahead,
    with the GIL held all along: see `reserve`.
    """

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._arenas: list[DeviceArena] = []
        self._largest = 0
        self._allocate = _ALLOCATE(
            self._new_arena
        )  # keep a reference: torch stores only the pointer
        # The arenas are ours to release. Any C function serves that ignores its arguments; one in Python
        # would be gone before the last call of a process that ends.
        nothing = ctypes.CDLL(None).getppid
        allocator = torch._C._cuda_customAllocator(_address(self._allocate), _address(nothing))
        self._pool = torch.cuda.MemPool(allocator)

    @property
    def id(self) -> tuple[int, int]:
        return self._pool.id

    @property
    def size(self) -> int:
        return sum(arena.size for arena in self._arenas)

    @property
    def mapped_bytes(self) -> int:
        return sum(arena.mapped_bytes for arena in self._arenas)

    def reserve(self, size: int) -> None:
        """See AllocatorPool; for the current stream."""
        if size <= self._largest:
            return
        smalls = 0 if self._largest else _SMALLS
        try:
            # A pool or a graph among the garbage would change torch's allocator while that allocates.
            with without_collections(), torch.cuda.use_mem_pool(self._pool, self._driver.device):
                # A storage's constructor keeps the GIL (torch/csrc/Storage.cpp); torch.empty does not.
                pieces = [
                    torch.UntypedStorage(piece, device=self._driver.device)  # type: ignore[no-untyped-call]
                    for piece in (size, *[_SMALL] * smalls)
                ]
        except torch.OutOfMemoryError as exc:
            raise DeviceMemoryShort(
                f"no room for {size} bytes of graphs on {self._driver.device}", RETRY_SHORT_AFTER_S
            ) from exc
        del pieces  # they stay in the pool
        self._largest = size

    def map(self) -> None:
        done: list[DeviceArena] = []
        try:
            for arena in self._arenas:
                if not arena.mapped_bytes:
                    done.append(arena)
                    arena.map()
        except BaseException:
            for arena in done:
                arena.unmap()
            raise

    def unmap(self) -> None:
        for arena in self._arenas:
            arena.unmap()

    def _new_arena(self, size: int, device: int, stream: int | None) -> int | None:
        """Called by torch; None stands for a lack of memory."""
        arena: DeviceArena | None = None
        try:
            arena = DeviceArena(self._driver, [size])
            arena.map()
        except (DeviceMemoryShort, DeviceMemoryError) as exc:
            logger.info("torch gets no memory for graphs: %s", exc)
            if arena is not None:
                arena.release()
            return None
        self._arenas.append(arena)
        return arena.address


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
