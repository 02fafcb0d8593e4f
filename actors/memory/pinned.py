"""Host bytes that a device can read at the link's full rate: pinned in place, or else staged.

No torch and no CUDA here: both come in as callables and Protocols.
"""

import logging
import mmap
import resource
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.errors import DeviceMemoryError
from actors.memory.driver import Mark, gib
from actors.rounding import round_up

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


def page_ranges(part: HostRange, page: int = mmap.PAGESIZE) -> list[HostRange]:
    """The pages under a part, in the order of addresses: those at its edges, if it has them in part, each apart.

    Neighbouring objects of a Ray store share edge pages (its buffers are aligned to 64 bytes), and
    a page can be registered only once. All others belong to one object.
    """
    if not part.size:
        return []
    first, last = part.address // page * page, round_up(part.end, page)
    cuts = sorted({first, round_up(part.address, page), part.end // page * page, last})
    return [HostRange(start, end - start) for start, end in pairwise(cuts)]


def page_pieces(part: HostRange) -> list[HostRange]:
    """The same bytes, cut at the edges of its `page_ranges`.

    CUDA copies none that are in two registrations, or in one in part. Of an object in a store, these pieces never are,
    whatever of it and of its neighbours is registered.
    """
    found = []
    for pages in page_ranges(part):
        start, end = max(pages.address, part.address), min(pages.end, part.end)
        found.append(HostRange(start, end - start))
    return found


class HostRegistrar(Protocol):
    """Who page-locks host memory for a device."""

    def register(self, pages: HostRange) -> None:
        """Page-lock whole pages and let the device read them.

        Raises:
            DeviceMemoryError: refused, also because some are registered already; nothing has changed.
        """

    def unregister(self, pages: HostRange) -> None: ...


class RegisteredPages:
    """The ranges of pages that a process has registered, and how many use each. Any thread may call.

    While an image takes another's place both are in use, and may have whole segments in common.
    """

    def __init__(self, registrar: HostRegistrar) -> None:
        self._registrar = registrar
        self._users: Counter[HostRange] = Counter()
        self._lock = threading.Lock()

    def take(self, wanted: Iterable[HostRange]) -> list[HostRange]:
        """Register all of these `page_ranges` that are not.

        Raises:
            DeviceMemoryError: refused; nothing has changed.
        """
        taken: list[HostRange] = []
        with self._lock:
            try:
                for pages in wanted:
                    if not self._users[pages]:
                        self._registrar.register(pages)
                    self._users[pages] += 1
                    taken.append(pages)
            except DeviceMemoryError:
                self._give_back(taken)
                raise
        return taken

    def give_back(self, taken: Iterable[HostRange]) -> None:
        """Unregister what nobody else uses. Nothing may be reading, and the memory must still be mapped."""
        with self._lock:
            self._give_back(taken)

    def _give_back(self, taken: Iterable[HostRange]) -> None:
        for pages in taken:
            self._users[pages] -= 1
            if not self._users[pages]:
                del self._users[pages]
                self._registrar.unregister(pages)


class PinnedPages:
    """The pages under some buffers, registered where they are; all of them or none.

    Registering costs 0.05-0.07 s per GB, once; the bytes are not copied, and other processes can pin
    the same shared memory as well.
    """

    def __init__(self, pages: RegisteredPages, buffers: Iterable[memoryview]) -> None:
        """Try to register; a refusal is logged with its remedy, and leaves `in_place` False."""
        self._pages = pages
        wanted = [each for buffer in buffers for each in page_ranges(host_range(buffer))]
        try:
            self._taken = pages.take(wanted)
            self.in_place = True
        except DeviceMemoryError as exc:
            _warn_refused(sum(each.size for each in set(wanted)), exc)
            self._taken = []
            self.in_place = False
        self._edges = sorted({edge for each in self._taken for edge in (each.address, each.end)})

    @property
    def ranges(self) -> tuple[HostRange, ...]:
        return tuple(sorted(set(self._taken), key=lambda each: each.address))

    def pieces(self, part: HostRange) -> Iterator[HostRange]:
        """The same bytes, each piece of one range: the driver copies none of two registrations."""
        edges = self._edges
        inside = edges[bisect_right(edges, part.address) : bisect_left(edges, part.end)]
        for start, end in pairwise((part.address, *inside, part.end)):
            yield HostRange(start, end - start)

    def release(self) -> None:
        """Unregister what no other image uses; see `RegisteredPages.give_back`."""
        self._pages.give_back(self._taken)
        self._taken = []


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
