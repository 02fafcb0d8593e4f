"""One stable address range per device, mapped and unmapped in segments."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from actors.errors import DeviceMemoryShort
from actors.memory.driver import HostLink, MemoryDriver, describe, gib
from actors.memory.transfer import Payload, SegmentCopy, Transfer
from actors.rounding import round_up

logger = logging.getLogger(__name__)

RETRY_SHORT_AFTER_S = 5.0  # a neighbour's idle time is of that order; nobody knows better


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an arena, in bytes from its start."""

    offset: int
    size: int


class DeviceArena:
    """Addresses for a row of segments, each of which can have memory or not.

    A segment starts at a multiple of the driver's granularity, so that one can be unmapped while its
    neighbour stays. Addresses never change: tensors made from `tensor` stay valid over any number of
    unmap and map, and so does what captured them. Freshly mapped memory holds anything.
    """

    def __init__(self, driver: MemoryDriver, segment_bytes: Sequence[int]) -> None:
        self._driver = driver
        self._asked = tuple(segment_bytes)
        spans: list[Span] = []
        offset = 0
        for size in segment_bytes:
            rounded = round_up(max(size, 1), driver.granularity)
            spans.append(Span(offset, rounded))
            offset += rounded
        self.spans = tuple(spans)
        self.size = offset
        self.address = driver.reserve(self.size)
        self._mapped: set[int] = set()
        self._mapped_bytes = 0  # of them; other threads read it
        self._is_short = False  # the last `map` found too little memory
        self._bytes = driver.tensor(self.address, self.size)

    @property
    def device(self) -> torch.device:
        return self._driver.device

    @property
    def mapped_bytes(self) -> int:
        """Any thread may ask."""
        return self._mapped_bytes

    def unmapped(self) -> list[int]:
        """The segments that have no memory."""
        return [i for i in range(len(self.spans)) if i not in self._mapped]

    def map(self, segments: Iterable[int] | None = None) -> None:
        """Give segments (all, when None) memory. Those that have it are left as they are.

        Raises:
            DeviceMemoryShort: the device has not that much memory. Who has it is logged, and not told to
                clients.
            DeviceMemoryError: the driver refused.
                Either way, what this call had mapped is unmapped again.
        """
        missing = [i for i in self._chosen(segments) if i not in self._mapped]
        done: list[int] = []
        try:
            for i in missing:
                self._driver.map(self._address_of(i), self.spans[i].size)
                self._mapped.add(i)
                self._mapped_bytes += self.spans[i].size
                done.append(i)
        except DeviceMemoryShort as exc:
            self.unmap(done)  # first, so that the message does not count what is given back
            wanted = sum(self.spans[i].size for i in missing)
            memory = self._driver.memory()
            holders = describe(memory, self._driver.holders())
            # Once, not at each try of a cache that would grow.
            level = logging.DEBUG if self._is_short else logging.WARNING
            self._is_short = True
            logger.log(level, "%s do not fit on %s: %s", gib(wanted), self.device, holders)
            raise DeviceMemoryShort(
                f"{gib(wanted)} do not fit on {self.device}: {gib(memory.free)} of "
                f"{gib(memory.total)} are free",
                RETRY_SHORT_AFTER_S,
            ) from exc
        except BaseException:
            self.unmap(done)
            raise
        self._is_short = False

    def unmap(self, segments: Iterable[int] | None = None) -> int:
        """Give the memory of segments (all, when None) back; returns how many bytes went.

        Waits first for whatever the device still does with them.
        """
        chosen = [i for i in self._chosen(segments) if i in self._mapped]
        if not chosen:
            return 0
        self._driver.synchronize()
        for i in chosen:
            self._driver.unmap(self._address_of(i), self.spans[i].size)
            self._mapped.remove(i)
            self._mapped_bytes -= self.spans[i].size
        return sum(self.spans[i].size for i in chosen)

    def restore(
        self,
        link: HostLink,
        payloads: Mapping[int, Payload],
        behind: Transfer | None = None,
        arrivals: Sequence[torch.cuda.Event] = (),
    ) -> Transfer:
        """Begin to copy payloads to the start of their mapped segments, in the mapping's order.

        Args:
            link: opened by this arena's driver for these payloads.
            payloads: segment -> its bytes.
            behind: a transfer over this link that these copies become part of; None: a new one.
            arrivals: of a new one: an event for each segment of the arena, or none; recorded behind its bytes.

        Raises:
            DeviceMemoryError: a copy could not begin; those before it may still be under way, which
                `unmap` waits for.
        """
        copies = [SegmentCopy(i, self._address_of(i), payload) for i, payload in payloads.items()]
        for copy in copies:
            assert copy.segment in self._mapped, f"segment {copy.segment} is not mapped"
            assert copy.size <= self.spans[copy.segment].size
        transfer = Transfer(link, (), arrivals) if behind is None else behind
        transfer.add(copies)
        return transfer

    def bytes_of(self, segment: int, count: int | None = None) -> torch.Tensor:
        """The first `count` bytes of a segment (all, when None), as a flat uint8 view."""
        span = self.spans[segment]
        return self._bytes[span.offset : span.offset + (span.size if count is None else count)]

    def first_bytes(self, count: int) -> torch.Tensor:
        """The first `count` bytes, whatever segments they are in, as a flat uint8 view.

        All sizes but the last must be multiples of the driver's granularity: there would be gaps.
        """
        assert sum(self._asked[:-1]) == sum(span.size for span in self.spans[:-1]), "gaps"
        return self._bytes[:count]

    def tensor(
        self, segment: int, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """A view of `shape`, contiguous, `offset` bytes into a segment."""
        size = torch.Size(shape).numel() * dtype.itemsize
        assert offset + size <= self.spans[segment].size
        start = self.spans[segment].offset + offset
        return self._bytes[start : start + size].view(dtype).view(torch.Size(shape))

    def take_host(self, size: int) -> torch.Tensor:
        """See MemoryDriver."""
        return self._driver.take_host(size)

    def give_host(self, memory: torch.Tensor) -> None:
        """See MemoryDriver."""
        self._driver.give_host(memory)

    def release(self) -> None:
        """Unmap everything and end the reservation. Tensors made from it must be gone."""
        self.unmap()
        del self._bytes
        self._driver.release(self.address, self.size)

    def _address_of(self, segment: int) -> int:
        return self.address + self.spans[segment].offset

    def _chosen(self, segments: Iterable[int] | None) -> Iterable[int]:
        return range(len(self.spans)) if segments is None else segments
