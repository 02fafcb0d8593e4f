"""Host memory as the device: anonymous mappings that really go back to the operating system."""

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from actors.errors import DeviceMemoryError
from actors.memory.cpu_card import CpuCard
from actors.memory.driver import DeviceMemory, Mark, MemoryHolder


class CpuMark:
    """A Mark behind copies that had arrived when it was made."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def gate(self) -> None:
        """Nothing to wait for."""

    def signal(self, event: torch.cuda.Event) -> None:
        raise AssertionError("there are no events here")

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds_since(self, earlier: Self) -> float:
        return self._at_s - earlier._at_s


class CpuLink:
    """HostLink whose copies have arrived when they return."""

    in_place = True

    def __init__(self, copy: Callable[[int, memoryview], None]) -> None:
        self._copy = copy

    def copy(self, address: int, host: memoryview) -> None:
        self._copy(address, host)

    def expand(
        self, address: int, host: memoryview, free: Mark | None, run: Callable[[], None]
    ) -> CpuMark:
        self._copy(address, host)
        run()
        return CpuMark()

    def mark(self) -> CpuMark:
        return CpuMark()

    def close(self) -> None:
        """Nothing is held."""


class CpuDriver:
    """MemoryDriver on anonymous private mappings.

    Linux gives such a mapping pages when they are first written, and takes them back with
    MADV_DONTNEED (madvise(2)); so `map` has nothing to do and the resident set of the process falls
    by what `unmap` drops.
    """

    device = torch.device("cpu")
    granularity = mmap.PAGESIZE
    can_suspend = True

    def __init__(self, card: CpuCard | None = None) -> None:
        """One that nothing is mapped by.

        Args:
            card: what is mapped counts there; None: the machine's memory is the limit.
        """
        self._card = card
        self._ranges: dict[int, mmap.mmap] = {}  # address -> the mapping that owns it
        self.context_bytes = _resident_bytes()

    def reserve(self, size: int) -> int:
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as exc:
            raise DeviceMemoryError(f"mmap of {size} bytes failed: {exc}") from exc
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._ranges[address] = mapping
        return address

    def map(self, address: int, size: int) -> None:
        """Only counted: pages come with the first write."""
        if self._card is not None:
            self._card.take(size)

    def unmap(self, address: int, size: int) -> None:
        base, mapping = self._owner(address)
        try:
            mapping.madvise(mmap.MADV_DONTNEED, address - base, size)
        except OSError as exc:
            raise DeviceMemoryError(f"madvise of {size} bytes failed: {exc}") from exc
        if self._card is not None:
            self._card.give(size)

    def collect_cleared(self) -> None:
        """Nothing to do: Linux clears a page when it is first written."""

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def release(self, address: int, size: int) -> None:
        del self._ranges[address]  # unmapped when the last tensor on it is gone

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer(self._owner(address)[1], dtype=torch.uint8, count=size)

    def open_link(self, buffers: Sequence[memoryview]) -> CpuLink:
        return CpuLink(self._copy)

    def take_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def give_host(self, memory: torch.Tensor) -> None:
        """Nothing to do: it goes with the last tensor on it."""

    def make_pool(self) -> None:
        """There are no graphs here."""

    def trim(self) -> None:
        """Nothing to do: torch keeps no host memory back."""

    def memory(self) -> DeviceMemory:
        """The machine's memory (proc(5)), or the card's, and the resident set of this process."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        own = _resident_bytes()
        total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
        if self._card is not None:
            total, free = self._card.total, self._card.free()
        return DeviceMemory(
            total=total,
            free=free,
            used=own,
            held=own,
            own=own,
        )

    def holders(self) -> tuple[MemoryHolder, ...]:
        """Nobody is named: host memory is everybody's."""
        return ()

    def suspend(self) -> bool:
        """Nothing to give back: a process needs no context here."""
        return True

    def resume(self) -> None:
        """Nothing to have again."""

    def _copy(self, address: int, host: memoryview) -> None:
        base, mapping = self._owner(address)
        target = np.frombuffer(mapping, dtype=np.uint8, count=host.nbytes, offset=address - base)
        np.copyto(target, np.frombuffer(host, dtype=np.uint8))  # one memcpy, without the GIL

    def _owner(self, address: int) -> tuple[int, mmap.mmap]:
        for base, mapping in self._ranges.items():
            if base <= address < base + len(mapping):
                return base, mapping
        raise DeviceMemoryError(f"address {address:#x} was not reserved here")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
