"""DeviceArena on real anonymous memory, and its bookkeeping on a driver that can refuse."""

import ctypes
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.errors import DeviceMemoryError, DeviceMemoryShort
from actors.memory import dlpack
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.memory.dlpack import bytes_at
from actors.memory.driver import DeviceMemory, MemoryHolder, describe

MIB = 2**20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * CpuDriver.granularity


class RefusingDriver(CpuDriver):
    """Refuses the nth map."""

    def __init__(self, nth: int, error: type[Exception] = DeviceMemoryError) -> None:
        super().__init__()
        self.left = nth
        self.error = error
        self.mapped: set[int] = set()

    def map(self, address: int, size: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("out of memory")
        self.mapped.add(address)

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self.mapped.remove(address)

    def memory(self) -> DeviceMemory:
        total, free = 140 * 2**30, 80 * 2**30 - MIB * len(self.mapped)
        return DeviceMemory(total, free, used=total - free, held=0)

    def holders(self) -> tuple[MemoryHolder, ...]:
        return (MemoryHolder(41, "trainer", 60 * 2**30),)


def fill(driver: CpuDriver, arena: DeviceArena, payloads: dict[int, memoryview]) -> None:
    arena.restore(driver.open_link(list(payloads.values())), payloads).finish()


def test_unmap_gives_memory_back_and_map_restores_it_at_the_same_addresses() -> None:
    driver = CpuDriver()
    arena = DeviceArena(driver, [64 * MIB, 32 * MIB])
    tensor = arena.tensor(1, 256, torch.float32, (1000, 1000))
    address = tensor.data_ptr()
    content = np.random.default_rng(0).bytes(64 * MIB)
    before = resident_bytes()
    arena.map()
    payloads = {0: memoryview(content), 1: memoryview(content)[: 32 * MIB]}
    fill(driver, arena, payloads)
    expected = tensor.clone()
    full = resident_bytes()
    assert full - before > 0.95 * 96 * MIB

    assert arena.unmap() == 96 * MIB
    assert full - resident_bytes() > 0.95 * 96 * MIB
    assert arena.mapped_bytes == 0

    arena.map()
    fill(driver, arena, {1: payloads[1]})
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.view(torch.int32), expected.view(torch.int32))


def test_segments_start_at_pages_and_are_unmapped_alone() -> None:
    arena = DeviceArena(CpuDriver(), [100, 5000, 1])
    page = CpuDriver.granularity
    assert [span.offset % page for span in arena.spans] == [0, 0, 0]
    arena.map()
    for i, fill in enumerate((1, 2, 3)):
        arena.bytes_of(i).fill_(fill)
    arena.unmap([1])
    assert arena.unmapped() == [1]
    assert bool((arena.bytes_of(0) == 1).all())
    assert bool((arena.bytes_of(2) == 3).all())
    assert arena.mapped_bytes == 2 * page


def test_map_and_unmap_twice_change_nothing() -> None:
    arena = DeviceArena(CpuDriver(), [1, 1])
    arena.map()
    arena.bytes_of(0).fill_(7)
    arena.map()
    assert int(arena.bytes_of(0)[0]) == 7
    assert arena.unmap() > 0
    assert arena.unmap() == 0


def test_map_that_is_refused_half_way_is_rolled_back() -> None:
    driver = RefusingDriver(nth=3)
    arena = DeviceArena(driver, [1, 1, 1, 1])
    with pytest.raises(DeviceMemoryError, match="out of memory"):
        arena.map()
    assert driver.mapped == set()
    assert arena.mapped_bytes == 0


def test_refused_map_leaves_what_was_mapped_before() -> None:
    driver = RefusingDriver(nth=4)
    arena = DeviceArena(driver, [1, 1, 1, 1])
    arena.map([2])
    with pytest.raises(DeviceMemoryError):
        arena.map()
    assert arena.unmapped() == [0, 1, 3]


def test_map_without_enough_memory_rolls_back_and_logs_who_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other people's processes are nothing for the clients who get the message."""
    driver = RefusingDriver(nth=3, error=DeviceMemoryShort)
    arena = DeviceArena(driver, [MIB] * 1024)
    with pytest.raises(DeviceMemoryShort) as caught:
        arena.map()
    assert driver.mapped == set()
    assert str(caught.value) == "1.00 GiB do not fit on cpu: 80.00 GiB of 140.00 GiB are free"
    assert "held are 60.00 GiB by pid 41 (trainer)" in caplog.text
    assert caught.value.retry_after_s > 0
    driver.left = 1
    with pytest.raises(DeviceMemoryShort):  # as a KV cache asks that would grow, every few seconds
        arena.map()
    assert caplog.text.count("trainer") == 1


def test_mapped_bytes_can_be_read_while_another_thread_maps() -> None:
    arena = DeviceArena(CpuDriver(), [1] * 64)
    ended = threading.Event()

    def map_and_unmap() -> None:
        try:
            for _ in range(500):
                arena.map()
                arena.unmap(range(0, 64, 3))
            arena.unmap()
        finally:
            ended.set()

    thread = threading.Thread(target=map_and_unmap)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not ended.is_set():
            assert 0 <= arena.mapped_bytes <= arena.size
    finally:
        thread.join()
        sys.setswitchinterval(interval_s)
    assert arena.mapped_bytes == 0


def test_bytes_over_gaps_are_no_view_to_give() -> None:
    arena = DeviceArena(CpuDriver(), [MIB, 5, MIB])
    with pytest.raises(AssertionError, match="gaps"):
        arena.first_bytes(MIB)
    assert DeviceArena(CpuDriver(), [MIB, MIB, 5]).first_bytes(2 * MIB).numel() == 2 * MIB


def test_cpu_driver_tells_the_machine_s_memory_and_its_own() -> None:
    driver = CpuDriver()
    memory = driver.memory()
    assert 0 < memory.free < memory.total
    assert memory.own is not None
    assert 0 < memory.own < memory.total
    assert memory.held == memory.used == memory.own
    assert driver.context_bytes == pytest.approx(memory.own, rel=0.05)


def test_description_without_a_visible_holder_says_so() -> None:
    memory = DeviceMemory(total=4 * 2**30, free=2**30, used=3 * 2**30, held=0)
    assert describe(memory, ()) == (
        "1.00 GiB of 4.00 GiB are free (no process that holds the rest is visible)"
    )


def test_tensor_from_an_address_shares_its_bytes() -> None:
    content = np.arange(64, dtype=np.uint8)
    tensor = bytes_at(content.ctypes.data, 64, torch.device("cpu"))
    view = tensor[16:32].view(torch.int32)
    del tensor
    view.zero_()
    assert content[15:33].tolist() == [15] + [0] * 16 + [32]


def test_ranges_described_before_take_no_more_memory() -> None:
    content = np.arange(64, dtype=np.uint8)
    ranges = [(content.ctypes.data + at, size) for at in (0, 8, 16) for size in (8, 16)]
    views = [bytes_at(*each, torch.device("cpu")) for each in ranges]
    count = len(dlpack._described)
    views += [bytes_at(*each, torch.device("cpu")) for each in ranges]
    assert len(dlpack._described) == count
    del views[:6]
    assert [len(view) for view in views] == [size for _, size in ranges]
    assert views[3].tolist() == list(range(8, 24))


def test_release_ends_the_reservation() -> None:
    driver = CpuDriver()
    arena = DeviceArena(driver, [MIB])
    address = arena.address
    arena.map()
    arena.release()
    with pytest.raises(DeviceMemoryError, match="not reserved"):
        driver.unmap(address, MIB)


def test_copy_lands_byte_for_byte() -> None:
    driver = CpuDriver()
    address = driver.reserve(8192)
    content = memoryview(bytes(range(256)))
    driver.open_link([content]).copy(address + 4096, content)
    assert ctypes.string_at(address + 4096, 256) == bytes(range(256))
    assert ctypes.string_at(address, 4096) == bytes(4096)
