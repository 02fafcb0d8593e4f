"""Host buffers on their way to one CUDA device: a stream of its own, events, pinned pages."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch

from actors.errors import DeviceMemoryError
from actors.memory.driver import Mark, gib
from actors.memory.pinned import (
    HostRange,
    PinnedPages,
    RegisteredPages,
    StagingRing,
    host_range,
)

_STAGING_SLOTS = 4
_STAGING_SLOT_BYTES = 32 * 2**20


class CopyDriver(Protocol):
    """What a link needs of its driver."""

    device: torch.device
    pages: RegisteredPages

    def create_stream(self) -> torch.cuda.ExternalStream: ...
    def destroy_stream(self, stream: torch.cuda.ExternalStream) -> None: ...
    def begin_copy(
        self, address: int, source: HostRange, stream: torch.cuda.ExternalStream
    ) -> None: ...


class CudaMark:
    """A Mark that is an event on the link's stream."""

    def __init__(self, stream: torch.cuda.ExternalStream) -> None:
        self._device = stream.device
        self._stream = stream
        # blocking: who waits sleeps, instead of spinning on a core that the engine needs
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def gate(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def signal(self, event: torch.cuda.Event) -> None:
        event.record(self._stream)

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as exc:  # torch's for any CUDA error
            raise DeviceMemoryError(f"a copy to {self._device} failed: {exc}") from exc

    def seconds_since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaLink:
    """HostLink of a CudaDriver. One thread at a time."""

    def __init__(self, driver: CopyDriver, buffers: Sequence[memoryview]) -> None:
        """Pin the buffers or, where that is refused, allocate staging."""
        self._driver = driver
        self._stream = driver.create_stream()
        self._expansions: torch.cuda.ExternalStream | None = None
        self._pages = PinnedPages(driver.pages, buffers)
        self.in_place = self._pages.in_place
        try:
            self._ring = None if self.in_place else self._make_ring()
        except DeviceMemoryError:
            driver.destroy_stream(self._stream)
            raise

    @property
    def pinned(self) -> tuple[HostRange, ...]:
        """The page ranges that are registered."""
        return self._pages.ranges

    def copy(self, address: int, host: memoryview) -> None:
        if self._ring is None:
            source = host_range(host)
            for piece in self._pages.pieces(source):
                self._send(address + piece.address - source.address, piece)
        else:
            self._ring.copy(address, host)

    def expand(
        self, address: int, host: memoryview, free: Mark | None, run: Callable[[], None]
    ) -> CudaMark:
        if self._expansions is None:
            self._expansions = self._driver.create_stream()
        if free is not None:
            with torch.cuda.stream(self._stream):
                free.gate()
        self.copy(address, host)
        copied = self.mark()
        with torch.cuda.stream(self._expansions):
            copied.gate()
            run()
            return CudaMark(self._expansions)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def close(self) -> None:
        self.mark().wait()
        if self._expansions is not None:
            CudaMark(self._expansions).wait()
            self._driver.destroy_stream(self._expansions)
        if self._ring is not None:
            self._ring.close()
        self._pages.release()
        self._driver.destroy_stream(self._stream)

    def _send(self, address: int, source: HostRange) -> None:
        self._driver.begin_copy(address, source, self._stream)

    def _make_ring(self) -> StagingRing:
        try:
            slots = [
                torch.empty(_STAGING_SLOT_BYTES, dtype=torch.uint8, pin_memory=True).numpy()
                for _ in range(_STAGING_SLOTS)
            ]
        except RuntimeError as exc:  # torch's for any CUDA error
            raise DeviceMemoryError(
                f"no {_STAGING_SLOTS} x {gib(_STAGING_SLOT_BYTES)} of pinned staging memory: {exc}"
            ) from exc
        return StagingRing(slots, self._send, self.mark)
