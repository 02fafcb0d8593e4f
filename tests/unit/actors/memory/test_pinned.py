"""Which pages are pinned, what happens when that is refused, and staging that overwrites nothing."""

import ctypes
import logging
import mmap
import resource

import numpy as np
import pytest

from actors.errors import DeviceMemoryError
from actors.memory.pinned import (
    ByteArray,
    HostRange,
    PinnedPages,
    StagingRing,
    host_range,
    page_ranges,
)

PAGE = mmap.PAGESIZE


class Registrar:
    """Page-locks nothing; refuses the nth call, and pages that are locked already, as CUDA does."""

    def __init__(self, refuse_nth: int = 0) -> None:
        self.left = refuse_nth
        self.registered: list[HostRange] = []

    def register(self, pages: HostRange) -> bool:
        self.left -= 1
        if self.left == 0:
            raise DeviceMemoryError("cuMemHostRegister failed: CUDA_ERROR_NOT_PERMITTED")
        if any(pages.address < held.end and held.address < pages.end for held in self.registered):
            return False
        self.registered.append(pages)
        return True

    def unregister(self, pages: HostRange) -> None:
        self.registered.remove(pages)


@pytest.mark.parametrize(
    ("parts", "ranges"),
    [
        ([], []),
        ([(5, 0)], []),
        ([(0, 1)], [(0, 1)]),
        ([(PAGE - 1, 2)], [(0, 2)]),
        ([(PAGE, PAGE)], [(1, 1)]),
        # Neighbours in a store: the second begins in the page where the first ends.
        ([(100, 2 * PAGE), (2 * PAGE + 640, PAGE)], [(0, 4)]),
        # They touch at a page border.
        ([(0, PAGE), (PAGE, PAGE)], [(0, 2)]),
        # A page between them.
        ([(0, PAGE), (2 * PAGE, 1)], [(0, 1), (2, 1)]),
        # In any order; one inside another.
        ([(9 * PAGE, 10), (0, 5 * PAGE), (PAGE, PAGE)], [(0, 5), (9, 1)]),
    ],
)
def test_page_ranges_cover_the_parts_with_as_few_as_possible(
    parts: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> None:
    found = page_ranges([HostRange(address, size) for address, size in parts])
    assert [(r.address // PAGE, r.size // PAGE) for r in found] == ranges
    assert all(r.address % PAGE == r.size % PAGE == 0 for r in found)


def test_host_range_of_a_read_only_view_is_where_its_bytes_are() -> None:
    content = np.arange(100, dtype=np.uint8)
    assert host_range(content.data[10:30].toreadonly()) == HostRange(content.ctypes.data + 10, 20)


def test_buffers_are_registered_together_and_unregistered_at_the_end() -> None:
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    buffers = [store[64 : 3 * PAGE], store[3 * PAGE + 64 : 9 * PAGE], store[20 * PAGE : 21 * PAGE]]
    registrar = Registrar()
    pinned = PinnedPages(registrar, buffers)
    assert pinned.in_place
    start = host_range(store).address
    assert pinned.ranges == (
        HostRange(start, 9 * PAGE),
        HostRange(start + 20 * PAGE, PAGE),
    )
    pinned.release()
    assert registrar.registered == []


@pytest.mark.parametrize(
    ("limit", "told"), [(64 * 2**20, "0.06 GiB (ulimit -l)"), (resource.RLIM_INFINITY, "")]
)
def test_refusal_half_way_unregisters_and_says_the_limit_and_the_remedy(
    limit: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    registrar = Registrar(refuse_nth=2)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedPages(registrar, [store[:PAGE], store[10 * PAGE :]])
    assert not pinned.in_place
    assert registrar.registered == []
    [record] = caplog.records
    assert "CUDA_ERROR_NOT_PERMITTED" in record.getMessage()
    assert told in record.getMessage()
    assert ("memlock=-1" in record.getMessage()) == bool(told)
    pinned.release()


def test_pages_shared_with_an_image_that_goes_stay_unpinned_and_are_pieces_of_their_own() -> None:
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    start = host_range(store).address
    before = [store[640 : 9 * PAGE + 64], store[20 * PAGE : 20 * PAGE + 700]]
    after = [store[9 * PAGE + 64 : 16 * PAGE + 1], store[20 * PAGE + 704 : 20 * PAGE + 900]]
    registrar = Registrar()
    first = PinnedPages(registrar, before)
    second = PinnedPages(registrar, after)
    inner = HostRange(start + 10 * PAGE, 6 * PAGE)
    assert second.in_place
    assert second.ranges == (inner,)
    first.release()
    assert registrar.registered == [inner]
    assert list(second.pieces(host_range(after[0]))) == [
        HostRange(start + 9 * PAGE + 64, PAGE - 64),
        inner,
        HostRange(inner.end, 1),
    ]
    assert list(second.pieces(host_range(after[1]))) == [host_range(after[1])]


def test_more_than_edges_that_are_registered_already_is_a_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    registrar = Registrar()
    registrar.register(HostRange(host_range(store).address + 5 * PAGE, PAGE))
    pinned = PinnedPages(registrar, [store])
    assert not pinned.in_place
    assert len(registrar.registered) == 1
    assert "registered already" in caplog.text


class LateDevice:
    """Reads a slot only when somebody waits for a mark behind that copy, as late as it may."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, dtype=np.uint8)
        self.pending: list[tuple[int, HostRange]] = []
        self.done = 0

    def send(self, address: int, source: HostRange) -> None:
        self.pending.append((address, source))

    def mark(self) -> "LateMark":
        return LateMark(self, len(self.pending))


class LateMark:
    def __init__(self, device: LateDevice, number: int) -> None:
        self._device = device
        self._number = number

    def gate(self) -> None: ...

    def wait(self) -> None:
        device = self._device
        for address, source in device.pending[device.done : self._number]:
            content = np.frombuffer(ctypes.string_at(source.address, source.size), dtype=np.uint8)
            device.memory[address : address + source.size] = content
        device.done = max(device.done, self._number)

    def seconds_since(self, earlier: "LateMark") -> float:
        return 0.0


def slots(count: int, size: int) -> list[ByteArray]:
    return [np.zeros(size, dtype=np.uint8) for _ in range(count)]


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 3999, 4000, 4001, 25_000])
def test_staging_brings_every_byte_though_the_device_reads_late(size: int) -> None:
    content = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    device = LateDevice(3 * size)
    # one slot: marks are waited for on one thread, as this device needs it
    ring = StagingRing(slots(1, 1000), device.send, device.mark)
    ring.copy(0, content.data)
    ring.copy(2 * size, content.data)
    device.mark().wait()
    ring.close()
    assert np.array_equal(device.memory[:size], content)
    assert np.array_equal(device.memory[2 * size :], content)
    assert not device.memory[size : 2 * size].any()


def test_staging_with_several_slots_sends_in_order() -> None:
    content = np.random.default_rng(0).integers(0, 255, 10_500, dtype=np.uint8)
    arrived = np.zeros(10_500, dtype=np.uint8)
    order: list[int] = []

    def send_now(address: int, source: HostRange) -> None:
        order.append(address)
        found = np.frombuffer(ctypes.string_at(source.address, source.size), dtype=np.uint8)
        arrived[address : address + source.size] = found

    ring = StagingRing(slots(4, 1000), send_now, LateDevice(0).mark)
    ring.copy(0, content.data)
    ring.close()
    assert order == list(range(0, 10_500, 1000))
    assert np.array_equal(arrived, content)


def test_staging_stops_when_a_copy_is_refused() -> None:
    def refuse(address: int, source: HostRange) -> None:
        raise DeviceMemoryError("refused")

    ring = StagingRing(slots(2, 10), refuse, LateDevice(0).mark)
    with pytest.raises(DeviceMemoryError, match="refused"):
        ring.copy(0, memoryview(bytes(100)))
    ring.close()
