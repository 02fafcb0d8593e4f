"""Segments in the Ray object store of this node: reserve, fill in place, look at without a copy."""

import ctypes
import mmap
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray._private.state import available_resources_per_node

from actors.errors import StoreFull
from actors.threads import on_threads

SHARED_MEMORY = Path("/dev/shm")

_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """What this node's object store can still take, in bytes."""

    capacity: int
    available: int
    shared_memory_free: int  # of the tmpfs under the store

    def require(self, size: int, recycled: int) -> None:
        """Refuse `size` bytes that would spill, fall back to disk, or fault with SIGBUS.

        Args:
            recycled: bytes that the caller has freed in this store; their pages are still the
                store's, so /dev/shm need not find them again.

        Raises:
            StoreFull: with the sizes and what to change.
        """
        if size > self.available:
            raise StoreFull(
                f"the image needs {gib(size)} of the object store, which has "
                f"{gib(self.available)} of {gib(self.capacity)} free: start Ray with a larger "
                "--object-store-memory"
            )
        if size > self.shared_memory_free + recycled:
            raise StoreFull(
                f"the image needs {gib(size)} of {SHARED_MEMORY}, which has "
                f"{gib(self.shared_memory_free)} free: enlarge it (containers: --shm-size)"
            )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def store_room() -> StoreRoom:
    """Ask Ray and the kernel; the answer is a moment old."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return StoreRoom(
        capacity=int(node["Resources"].get("object_store_memory", 0)),
        available=int(available_resources_per_node()[node_id].get("object_store_memory", 0)),
        shared_memory_free=shutil.disk_usage(SHARED_MEMORY).free,
    )


@dataclass(frozen=True, slots=True)
class ReservedSegment:
    """An object that this process owns, whose payload may be written until it is published."""

    ref: "ray.ObjectRef[ByteArray]"
    payload_offset: int  # bytes into the object; makes the payload page-aligned on this node
    payload: ByteArray  # writable; keeps the object in memory
    view: ByteArray  # Ray's own read-only view of the whole object

    def cut(self, size: int) -> "ReservedSegment":
        """The same object, of which that many bytes are the payload."""
        return replace(self, payload=self.payload[:size])


def reserve(size: int) -> ReservedSegment:
    """Make an object of at least `size` bytes and give its bytes to write, page-aligned.

    Ray hands out read-only views, but a client maps the whole store writable, so filling the object
    where it lies needs no second copy in private memory. That is sound as long as nobody else has
    the reference yet: publish it after the last write.

    Raises:
        StoreFull: Ray put the object on disk instead of into shared memory.
    """
    ref = ray.put(np.empty(size + mmap.PAGESIZE, dtype=np.uint8))
    view: ByteArray = ray.get(ref)
    address = view.ctypes.data
    if not in_shared_memory(address):
        raise StoreFull("the object store is full: Ray would keep the image in a file on disk")
    offset = -address % mmap.PAGESIZE
    return ReservedSegment(ref, offset, writable(view, offset, size), view)


def writable(view: ByteArray, offset: int, size: int) -> ByteArray:
    """Bytes of a read-only view, for whoever knows that nobody else reads them yet; they keep the view."""
    return np.asarray(_Part(view, offset, size))


def map_pages(part: ByteArray) -> None:
    """Have the kernel map pages that another process has made into this one.

    One by one, as they are first touched, that takes three times as long as writing them. Only Linux 5.14 and newer
    do it at once.
    """
    begin = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = part.ctypes.data + part.nbytes - begin
    _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


class _Part:
    """What numpy asks for an array's memory, and the array keeps."""

    def __init__(self, view: ByteArray, offset: int, size: int) -> None:
        self._view = view
        address = view.ctypes.data + offset
        self.__array_interface__ = view.__array_interface__ | {
            "data": (address, False),  # not read-only
            "shape": (size,),
        }


def reserve_all(sizes: Sequence[int]) -> list[ReservedSegment]:
    """`reserve` for each, several at a time: the kernel clears pages on the thread that takes them.

    Raises:
        StoreFull: as `reserve`.
    """
    return on_threads(reserve, sizes, sizes=sizes)


def in_shared_memory(address: int) -> bool:
    """Does this address of our process lie in the store's shared memory, not in a spill file?"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address < end:
            return path.startswith(f"{SHARED_MEMORY}/plasma")
    return False


def was_spilled(refs: "list[ray.ObjectRef[Any]]") -> bool:
    """Has any of these been written to disk? Only their owner can tell."""
    locations = ray.experimental.get_local_object_locations(refs)
    return any(bool(found.get("did_spill")) for found in locations.values())
