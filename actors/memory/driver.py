"""The seams between an arena and the memory it stands on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A process that has memory of a device."""

    pid: int
    name: str
    size: int | None  # bytes; None where the driver does not tell


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device itself says about its memory, in bytes."""

    total: int
    free: int
    used: int  # where a release shows: of a card by everybody, of a CPU by this process
    held: int  # by this process, context included: `own`, or else the best that can be told
    own: int | None = None  # the same as seen from outside; None: cannot be told
    torch_reserved: int = 0  # of `held`, by torch's allocator


def describe(memory: DeviceMemory, holders: Sequence[MemoryHolder]) -> str:
    """What is free, and who has the rest."""
    free = f"{gib(memory.free)} of {gib(memory.total)} are free"
    if not holders:
        return f"{free} (no process that holds the rest is visible)"
    held = ", ".join(
        f"{gib(h.size) if h.size is not None else '?'} by pid {h.pid} ({h.name})" for h in holders
    )
    return f"{free}; held are {held}"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


class Mark(Protocol):
    """A point in the order of a link's copies."""

    def gate(self) -> None:
        """Make what the caller's current stream does next wait for this point; returns at once."""

    def signal(self, event: torch.cuda.Event) -> None:
        """Record an event at this point; on the thread that has just made the mark, before it begins more copies."""

    def wait(self) -> None:
        """Return once the copies before this point have arrived.

        Raises:
            DeviceMemoryError: one of them failed.
        """

    def seconds_since(self, earlier: Self) -> float:
        """The device's own time between two points that were both waited for."""


class HostLink(Protocol):
    """The way of one set of host buffers to the device. Copies arrive in the order of the calls."""

    in_place: bool  # the device reads the buffers where they are; no staging in between

    def copy(self, address: int, host: memoryview) -> None:
        """Begin to copy one of the link's buffers, or a part of one, to a mapped address.

        The bytes have arrived when a later mark says so; until then neither side may be unmapped.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    def expand(
        self, address: int, host: memoryview, free: Mark | None, run: Callable[[], None]
    ) -> Mark:
        """Begin to copy to an address, and have what `run` begins on the device there follow the copy.

        Args:
            free: behind what still reads at that address; None: nothing does.

        Returns:
            Behind what `run` has begun.

        Raises:
            DeviceMemoryError: as `copy`.
        """

    def mark(self) -> Mark: ...

    def close(self) -> None:
        """Wait for all copies and let go of the buffers. They must still be there."""


class AllocatorPool(Protocol):
    """Memory that torch's allocator hands out, and that can be unmapped under its hands.

    For scratch only: over an unmap and a map what is in it is lost. Nothing may be allocated from it
    while it is unmapped. One thread makes all calls.
    """

    @property
    def id(self) -> tuple[int, int]:
        """By which torch knows it."""

    @property
    def size(self) -> int:
        """Bytes that torch has got, mapped or not."""

    @property
    def mapped_bytes(self) -> int: ...

    def reserve(self, size: int) -> None:
        """See to it that torch has had a piece of `size` bytes, and some small ones; mapped.

        Raises:
            DeviceMemoryShort: the device has not that much.
        """

    def map(self) -> None:
        """Give all of it memory, whose contents are undefined. All or nothing.

        Raises:
            DeviceMemoryShort: the device has not that much.
            DeviceMemoryError: the driver refused.
        """

    def unmap(self) -> None:
        """Give the memory back. Waits first for whatever the device still does with it."""


class MemoryDriver(Protocol):
    """Reserves address ranges and puts physical memory behind them.

    Addresses never change between `reserve` and `release`, so tensors on a range stay valid objects
    while it is unmapped; touching their elements then is a bug of the caller (CUDA: an illegal
    address; CPU: zeroes). Any thread may call.
    """

    device: torch.device
    granularity: int  # bytes; ranges and their parts are multiples of it
    context_bytes: int  # what this process held of the device before anything was put there
    can_suspend: bool

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses; nothing is mapped yet.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    def map(self, address: int, size: int) -> None:
        """Put zeroed or undefined physical memory behind a part of a reservation.

        Raises:
            DeviceMemoryShort: the device has not that much; the part is left unmapped.
            DeviceMemoryError: the driver refused; the part is left unmapped.
        """

    def unmap(self, address: int, size: int) -> None:
        """Give the physical memory of a part back, exactly as it was mapped.

        Nothing on the device may still use it: see `synchronize`.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    def collect_cleared(self) -> None:
        """Do now what the next `map` would have to do about memory that was unmapped before.

        Raises:
            DeviceMemoryShort: nothing at all is free.
            DeviceMemoryError: the driver refused.
        """

    def synchronize(self) -> None:
        """Return when the device has done all that this process gave it to do.

        Raises:
            DeviceMemoryError: some of that failed; the device is of no use to this process.
        """

    def release(self, address: int, size: int) -> None:
        """End a reservation. Its tensors must be gone."""

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """The range as a flat uint8 tensor, without touching its memory."""

    def open_link(self, buffers: Sequence[memoryview]) -> HostLink:
        """Prepare host buffers to be copied many times; close it before they go."""

    def take_host(self, size: int) -> torch.Tensor:
        """Host memory as a flat uint8 tensor, which the device copies to and from at the link's full rate.

        Raises:
            DeviceMemoryError: refused.
        """

    def give_host(self, memory: torch.Tensor) -> None:
        """Give it back. Nothing on the device may still use it."""

    def make_pool(self) -> AllocatorPool | None:
        """A pool of its own for what captures graphs; None where nothing does."""

    def trim(self) -> None:
        """Make torch give back what its allocator keeps without using it."""

    def memory(self) -> DeviceMemory:
        """As it is now. Cheap enough for every sleep: a millisecond or two."""

    def holders(self) -> tuple[MemoryHolder, ...]:
        """Every process with memory of the device that can be seen, the largest first."""

    def suspend(self) -> bool:
        """Give back all that this process has of the device: what is mapped and what is not, context and kernels.

        Addresses, graphs and streams are there again after `resume`, with their contents. Until then nothing of
        this process may call the device, or it blocks: `memory` does not, and `holders` knows of none.

        Returns:
            False: the driver refused, which is logged; everything is as before.

        Raises:
            DeviceMemoryError: the device is of no use to this process any more.
        """

    def resume(self) -> None:
        """Have again what `suspend` has given back. There must be room: a driver that finds none may be lost.

        Raises:
            DeviceMemoryError: the device is of no use to this process any more.
        """
