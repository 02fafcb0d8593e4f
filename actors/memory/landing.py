"""Where compressed bytes land on the device until they have been decompressed: a few slots, one after the other."""

from collections.abc import Sequence
from functools import partial

from actors.memory.arena import DeviceArena
from actors.memory.driver import HostLink, Mark, MemoryDriver
from actors.memory.transfer import CompactPart

# One lands while the other is decompressed, which takes a tenth of the time.
SLOTS = 2


class LandingRing:
    """Device memory that is mapped as long as a wake needs it. One thread makes all calls."""

    def __init__(self, driver: MemoryDriver, slot_bytes: int) -> None:
        """Not mapped yet."""
        self._slots = DeviceArena(driver, [slot_bytes] * SLOTS)
        self._free: list[Mark | None] = [None] * SLOTS
        self._next = 0

    @property
    def size(self) -> int:
        return self._slots.size

    @property
    def mapped_bytes(self) -> int:
        return self._slots.mapped_bytes

    def map(self) -> None:
        """Raises as `DeviceArena.map`."""
        self._slots.map()

    def unmap(self) -> None:
        """Wait for what is under way, and give the memory back."""
        self._slots.unmap()
        self._free = [None] * SLOTS

    def send(self, link: HostLink, parts: Sequence[CompactPart]) -> Mark:
        """See Landing."""
        for part in parts:
            slot, self._next = self._next, (self._next + 1) % SLOTS
            landed = self._slots.bytes_of(slot, part.host.nbytes)
            free, run = self._free[slot], partial(part.expand, landed)
            self._free[slot] = mark = link.expand(landed.data_ptr(), part.host, free, run)
        return mark

    def release(self) -> None:
        self._slots.release()
