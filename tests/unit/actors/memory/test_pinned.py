"""Which pages are pinned, what happens when that is refused, and staging that overwrites nothing."""

import ctypes
import logging
import mmap
import resource
from collections.abc import Iterable

import numpy as np
import pytest

from actors.errors import DeviceMemoryError
from actors.memory.pinned import (
    ByteArray,
    HostRange,
    PinnedPages,
    RegisteredPages,
    StagingRing,
    host_range,
    page_pieces,
    page_ranges,
)

PAGE = mmap.PAGESIZE


class Registrar:
    """Page-locks nothing; refuses the nth call, and pages that are locked already, as CUDA does."""

    def __init__(self, refuse_nth: int = 0) -> None:
        self.left = refuse_nth
        self.registered: list[HostRange] = []

    def register(self, pages: HostRange) -> None:
        self.left -= 1
        if self.left == 0:
            raise DeviceMemoryError("cuMemHostRegister failed: CUDA_ERROR_NOT_PERMITTED")
        if any(pages.address < held.end and held.address < pages.end for held in self.registered):
            raise DeviceMemoryError("cuMemHostRegister failed: CUDA_ERROR_ALREADY_REGISTERED")
        self.registered.append(pages)

    def unregister(self, pages: HostRange) -> None:
        self.registered.remove(pages)


def in_pages(ranges: Iterable[HostRange], start: int = 0) -> list[tuple[int, int]]:
    """The first page and the end of each."""
    for each in ranges:
        assert (each.address - start) % PAGE == each.size % PAGE == 0
    return [((each.address - start) // PAGE, (each.end - start) // PAGE) for each in ranges]


@pytest.mark.parametrize(
    ("part", "ranges"),
    [
        ((5, 0), []),
        ((0, 1), [(0, 1)]),
        ((5, PAGE - 10), [(0, 1)]),
        ((PAGE - 1, 2), [(0, 1), (1, 2)]),
        ((PAGE, PAGE), [(1, 2)]),
        ((PAGE - 1, PAGE + 1), [(0, 1), (1, 2)]),
        ((100, 5 * PAGE), [(0, 1), (1, 5), (5, 6)]),
        ((2 * PAGE, 3 * PAGE + 1), [(2, 5), (5, 6)]),
    ],
)
def test_page_ranges_have_edge_pages_apart(
    part: tuple[int, int], ranges: list[tuple[int, int]]
) -> None:
    assert in_pages(page_ranges(HostRange(*part))) == ranges


def test_page_pieces_are_the_same_bytes_cut_at_edges() -> None:
    def pieces(*part: int) -> list[tuple[int, int]]:
        return [(each.address, each.size) for each in page_pieces(HostRange(*part))]

    assert pieces(100, 5 * PAGE) == [(100, PAGE - 100), (PAGE, 4 * PAGE), (5 * PAGE, 100)]
    assert pieces(PAGE, 2 * PAGE) == [(PAGE, 2 * PAGE)]
    assert pieces(PAGE + 5, 10) == [(PAGE + 5, 10)]
    assert pieces(5, 0) == []


def test_host_range_of_a_read_only_view_is_where_its_bytes_are() -> None:
    content = np.arange(100, dtype=np.uint8)
    assert host_range(content.data[10:30].toreadonly()) == HostRange(content.ctypes.data + 10, 20)


def test_buffers_are_registered_page_by_page_once_and_unregistered_at_the_end() -> None:
    """Neighbours in a store: the second begins in the page where the first ends."""
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    buffers = [store[64 : 3 * PAGE + 1], store[3 * PAGE + 64 : 9 * PAGE], store[20 * PAGE :]]
    registrar = Registrar()
    pinned = PinnedPages(RegisteredPages(registrar), buffers)
    assert pinned.in_place
    found = in_pages(pinned.ranges, host_range(store).address)
    assert found == [(0, 1), (1, 3), (3, 4), (4, 9), (20, 64)]
    assert len(registrar.registered) == len(found)
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
        pages = RegisteredPages(registrar)
        pinned = PinnedPages(pages, [store[:PAGE], store[10 * PAGE :]])
    assert not pinned.in_place
    assert registrar.registered == []
    [record] = caplog.records
    assert "CUDA_ERROR_NOT_PERMITTED" in record.getMessage()
    assert told in record.getMessage()
    assert ("memlock=-1" in record.getMessage()) == bool(told)
    pinned.release()


def test_an_image_in_the_place_of_another_keeps_what_both_have() -> None:
    """A segment, and the page in which another of the second begins where one of the first ends."""
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    start = host_range(store).address
    both = store[20 * PAGE : 30 * PAGE + 700]
    after = [store[9 * PAGE + 64 : 16 * PAGE + 1], both]
    registrar = Registrar()
    pages = RegisteredPages(registrar)
    first = PinnedPages(pages, [store[640 : 9 * PAGE + 64], both])
    second = PinnedPages(pages, after)
    assert second.in_place
    wanted = [(9, 10), (10, 16), (16, 17), (20, 30), (30, 31)]
    assert in_pages(second.ranges, start) == wanted
    assert len(registrar.registered) == 4 + 3
    first.release()
    first.release()
    assert sorted(in_pages(registrar.registered, start)) == wanted
    assert list(second.pieces(host_range(after[0]))) == [
        HostRange(start + 9 * PAGE + 64, PAGE - 64),
        HostRange(start + 10 * PAGE, 6 * PAGE),
        HostRange(start + 16 * PAGE, 1),
    ]
    assert list(second.pieces(host_range(both[:4096]))) == [host_range(both[:4096])]
    second.release()
    assert registrar.registered == []


def test_a_refusal_leaves_what_another_image_uses(caplog: pytest.LogCaptureFixture) -> None:
    store = memoryview(mmap.mmap(-1, 64 * PAGE))
    registrar = Registrar()
    registrar.register(HostRange(host_range(store).address + 5 * PAGE, PAGE))  # somebody else's
    pages = RegisteredPages(registrar)
    first = PinnedPages(pages, [store[: 2 * PAGE]])
    second = PinnedPages(pages, [store[: 2 * PAGE], store[2 * PAGE :]])
    assert (first.in_place, second.in_place) == (True, False)
    assert len(registrar.registered) == 2
    assert "ALREADY_REGISTERED" in caplog.text
    second.release()
    first.release()
    assert len(registrar.registered) == 1


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
