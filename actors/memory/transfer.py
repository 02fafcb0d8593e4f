"""Segments on their way to the device: begun in one order, waited for one by one, timed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.memory.driver import HostLink, Mark


@dataclass(frozen=True, slots=True)
class CompactPart:
    """Compressed bytes of a part of a segment.

    Attributes:
        host: the bytes.
        expand: begins, on the current stream, to decompress them from where they have landed.
    """

    host: memoryview
    expand: Callable[[torch.Tensor], None]


class Landing(Protocol):
    """Where compressed bytes are on the device until they have been decompressed."""

    def send(self, link: HostLink, parts: Sequence[CompactPart]) -> Mark:
        """Begin to copy and decompress the parts of a segment; behind the last of them.

        Raises:
            DeviceMemoryError: a copy could not begin.
        """


@dataclass(frozen=True, slots=True)
class Compact:
    """A segment's bytes, compressed.

    Attributes:
        host: all of them, which are those of the parts.
        size: bytes of the segment.
    """

    host: memoryview
    size: int
    parts: Sequence[CompactPart]
    landing: Landing


Payload = memoryview | Compact


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """One segment's bytes and where they go.

    Attributes:
        payload: what crosses the link.
    """

    segment: int
    address: int
    payload: Payload

    @property
    def link_bytes(self) -> int:
        payload = self.payload
        return payload.nbytes if isinstance(payload, memoryview) else payload.host.nbytes

    @property
    def size(self) -> int:
        """Bytes that there are of the segment on the device then."""
        payload = self.payload
        return payload.nbytes if isinstance(payload, memoryview) else payload.size


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """How long one segment's copy took, by the device's clock."""

    segment: int
    size: int  # bytes that crossed the link
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A finished transfer."""

    segments: tuple[SegmentTime, ...]
    seconds: float  # from the start of the first copy to the end of the last

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(segment.size for segment in self.segments)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second; 0 for a transfer of nothing."""
        return self.size / 1e9 / self.seconds if self.seconds > 0 else 0.0


class Transfer:
    """Copies that were begun; kernels of a segment may start when its bytes are there.

    A wake begins it, resumes the engine at once, and has forward pre-hooks call `gate` with the
    segment that the module lives in. `gate` costs nothing once `wait` has returned, and nothing for
    segments that are not part of the transfer. A captured graph has no hooks: it waits for events, or
    `gate` is called for each of its segments before the first replay. Gates may be called from any thread,
    all else from one.

    Attributes:
        copies: in the order in which they arrive.
    """

    def __init__(
        self,
        link: HostLink,
        copies: Iterable[SegmentCopy],
        arrivals: Sequence[torch.cuda.Event] = (),
    ) -> None:
        """Begin the copies, in the order given. See `DeviceArena.restore`."""
        self.copies: list[SegmentCopy] = []
        self._link = link
        self._arrivals = arrivals
        self._marks = [link.mark()]
        self._pending: dict[int, Mark] = {}
        self.add(copies)

    def add(self, copies: Iterable[SegmentCopy]) -> None:
        """Begin more, behind the others. Before the first gate."""
        for copy in copies:
            mark = self._begin(copy)
            if self._arrivals:
                mark.signal(self._arrivals[copy.segment])
            self.copies.append(copy)  # whose host bytes must stay until they have been read
            self._marks.append(mark)
            self._pending[copy.segment] = mark

    def _begin(self, copy: SegmentCopy) -> Mark:
        payload = copy.payload
        if isinstance(payload, Compact):
            return payload.landing.send(self._link, payload.parts)
        self._link.copy(copy.address, payload)
        return self._link.mark()

    def gate(self, segment: int) -> None:
        """Make what the caller's current stream does next wait for a segment."""
        mark = self._pending.get(segment)
        if mark is not None:
            mark.gate()

    def arrived(self, early: int = 0) -> Iterator[SegmentCopy]:
        """The copies in their order, each when its bytes are there. Blocks in between.

        Args:
            early: of the last bytes, so many at most are not waited for: `gate` has what is launched for them wait.

        Raises:
            DeviceMemoryError: a copy failed.
        """
        left = self.link_bytes
        for copy, mark in zip(self.copies, self._marks[1:], strict=True):
            if left > early:
                mark.wait()
            left -= copy.link_bytes
            yield copy

    @property
    def link_bytes(self) -> int:
        return sum(copy.link_bytes for copy in self.copies)

    def wait(self) -> float:
        """Wait until everything has arrived; seconds from the start of the first copy to the end of the last. Blocks.

        Raises:
            DeviceMemoryError: a copy failed.
        """
        self._marks[-1].wait()
        self._pending = {}
        return self._marks[-1].seconds_since(self._marks[0])

    def finish(self) -> TransferStats:
        """Wait likewise, and ask for the time of each copy. Any number of calls give the same.

        Raises:
            DeviceMemoryError: a copy failed.
        """
        seconds = self.wait()
        times = tuple(
            SegmentTime(copy.segment, copy.link_bytes, end.seconds_since(start))
            for copy, start, end in zip(self.copies, self._marks[:-1], self._marks[1:], strict=True)
        )
        return TransferStats(times, seconds)
