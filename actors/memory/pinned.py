"""Host bytes that a device can read at the link's full rate: pinned in place, or else staged.

No torch and no CUDA here: both come in as callables and Protocols.
"""

import logging
import mmap
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.errors import DeviceMemoryError
from actors.memory.driver import Mark, gib

logger = logging.getLogger(__name__)

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostRange:
    """Bytes of this process."""

    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size


def host_range(buffer: memoryview) -> HostRange:
    """Where a buffer lies."""
    return HostRange(np.frombuffer(buffer, dtype=np.uint8).ctypes.data, buffer.nbytes)


def page_ranges(parts: Iterable[HostRange], page: int = mmap.PAGESIZE) -> list[HostRange]:
    """The pages under these parts, as few ranges as possible, in the order of addresses.

    Neighbouring objects of a Ray store share edge pages (its buffers are aligned to 64 bytes), and
    a page can be registered only once: ranges that touch or overlap become one.
    """
    merged: list[HostRange] = []
    for part in sorted((p for p in parts if p.size), key=lambda p: p.address):
        start, end = part.address // page * page, -(-part.end // page) * page
        if merged and start <= merged[-1].end:
            last = merged.pop()
            start, end = last.address, max(end, last.end)
        merged.append(HostRange(start, end - start))
    return merged


class HostRegistrar(Protocol):
    """Who page-locks host memory for a device."""

    def register(self, pages: HostRange) -> bool:
        """Page-lock whole pages and let the device read them.

        Returns:
            False, and nothing has changed, if this process has registered some of them already.

        Raises:
            DeviceMemoryError: refused; nothing has changed.
        """

    def unregister(self, pages: HostRange) -> None: ...


class PinnedPages:
    """The pages under some buffers, registered where they are; all of them or none.

    Registering costs 0.05-0.07 s per GB, once; the bytes are not copied, and other processes can pin
    the same shared memory as well. An image that takes another's place may share edge pages with it: those
    stay unpinned, as they would be unregistered with the other.
    """

    def __init__(self, registrar: HostRegistrar, buffers: Iterable[memoryview]) -> None:
        """Try to register; a refusal is logged with its remedy, and leaves `in_place` False."""
        self._registrar = registrar
        self._registered: list[HostRange] = []
        wanted = page_ranges(host_range(buffer) for buffer in buffers)
        try:
            for pages in wanted:
                self._register(pages)
            self.in_place = True
        except DeviceMemoryError as exc:
            self.release()
            _warn_refused(sum(pages.size for pages in wanted), exc)
            self.in_place = False

    @property
    def ranges(self) -> tuple[HostRange, ...]:
        return tuple(self._registered)

    def pieces(self, part: HostRange) -> Iterator[HostRange]:
        """The same bytes, each piece either registered or not: the driver copies none that is both."""
        edges = {edge for pages in self._registered for edge in (pages.address, pages.end)}
        inside = sorted(edge for edge in edges if part.address < edge < part.end)
        for start, end in pairwise((part.address, *inside, part.end)):
            yield HostRange(start, end - start)

    def release(self) -> None:
        """Unregister. Nothing may be reading, and the memory must still be mapped."""
        while self._registered:
            self._registrar.unregister(self._registered.pop())

    def _register(self, pages: HostRange) -> None:
        if self._registrar.register(pages):
            self._registered.append(pages)
            return
        inner = HostRange(pages.address + mmap.PAGESIZE, pages.size - 2 * mmap.PAGESIZE)
        if inner.size <= 0:
            return
        if not self._registrar.register(inner):
            raise DeviceMemoryError(f"{gib(inner.size)} of host memory are registered already")
        self._registered.append(inner)


def _warn_refused(size: int, reason: DeviceMemoryError) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    remedy = (
        f"; this process may lock {gib(limit)} (ulimit -l): raise that to unlimited (Docker: "
        "--ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)"
    )
    logger.warning(
        "%s of weights in host memory cannot be pinned in place, so wakes copy through staging "
        "buffers, which is slower: %s%s",
        gib(size),
        reason,
        "" if limit == resource.RLIM_INFINITY else remedy,
    )


class StagingRing:
    """Copies pageable bytes through a few pinned buffers, filled by as many threads.

    While the device reads some slots, others are filled: one thread copies at the pace of one core,
    which is a fraction of the link's.
    """

    def __init__(
        self,
        slots: Sequence[ByteArray],
        send: Callable[[int, HostRange], None],
        mark: Callable[[], Mark],
    ) -> None:
        """Make a ring.

        Args:
            slots: pinned, of one size.
            send: begins a copy of pinned bytes to a device address.
            mark: a point behind all copies begun so far.
        """
        self._slots = slots
        self._send = send
        self._mark = mark
        self._sent: list[Mark | None] = [None] * len(slots)  # behind the last copy out of a slot
        self._pool = ThreadPoolExecutor(len(slots), thread_name_prefix="staging")

    def copy(self, address: int, host: memoryview) -> None:
        """Begin a copy; returns when all of `host` has been read, but not yet arrived."""
        source = np.frombuffer(host, dtype=np.uint8)
        step, slots = self._slots[0].nbytes, len(self._slots)
        pieces = [source[at : at + step] for at in range(0, source.nbytes, step)]
        fills: deque[Future[None]] = deque()
        try:
            for i in range(len(pieces) + slots):
                if i >= slots:
                    fills.popleft().result()
                    self._begin(i - slots, address + (i - slots) * step, pieces[i - slots])
                if i < len(pieces):  # its slot was sent one round ago
                    fills.append(self._pool.submit(self._fill, i % slots, pieces[i]))
        finally:
            for fill in fills:
                fill.cancel()

    def close(self) -> None:
        """End the threads. The copies must have arrived."""
        self._pool.shutdown()

    def _fill(self, slot: int, piece: ByteArray) -> None:
        sent = self._sent[slot]
        if sent is not None:
            sent.wait()
        np.copyto(self._slots[slot][: piece.nbytes], piece)  # without the GIL

    def _begin(self, number: int, address: int, piece: ByteArray) -> None:
        slot = number % len(self._slots)
        self._send(address, HostRange(self._slots[slot].ctypes.data, piece.nbytes))
        self._sent[slot] = self._mark()
