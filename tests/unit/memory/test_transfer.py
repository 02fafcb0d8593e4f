"""Transfer on the CPU driver, and on a link whose copies arrive late."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from actors.errors import DeviceMemoryError, DeviceMemoryShort
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.memory.transfer import SegmentCopy, Transfer

SIZES = [5000, 100, 12345]


def random_bytes(sizes: list[int]) -> list[memoryview]:
    rng = np.random.default_rng(0)
    return [memoryview(rng.bytes(size)) for size in sizes]


class LateMark:
    def __init__(self, link: "LateLink", number: int) -> None:
        self.link = link
        self.number = number

    def gate(self) -> None:
        self.link.calls.append(f"gate {self.number}")

    def wait(self) -> None:
        self.link.calls.append(f"wait {self.number}")
        if self.link.broken:
            raise DeviceMemoryError("the copy failed")

    def seconds_since(self, earlier: "LateMark") -> float:
        return 0.5 * (self.number - earlier.number)


class LateLink:
    """Numbers its marks and writes down what it is asked."""

    in_place = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = False
        self._numbers = count()

    def copy(self, address: int, host: memoryview) -> None:
        self.calls.append(f"copy {host.nbytes} to {address}")

    def mark(self) -> LateMark:
        return LateMark(self, next(self._numbers))

    def close(self) -> None: ...


def late_transfer(link: LateLink) -> Transfer:
    payloads = random_bytes(SIZES)
    transfer = Transfer(link)
    transfer.begin(SegmentCopy(7, 64, payloads[0]))
    transfer.begin(SegmentCopy(3, 32, payloads[1]))
    return transfer


def test_restore_copies_the_given_segments_and_leaves_the_others() -> None:
    driver = CpuDriver()
    arena = DeviceArena(driver, SIZES)
    payloads = random_bytes(SIZES)
    arena.map()
    arena.bytes_of(1).fill_(9)
    link = driver.open_link(payloads)
    stats = arena.restore(link, {2: payloads[2], 0: payloads[0]}).finish()
    link.close()

    for i in (0, 2):
        assert arena.bytes_of(i, SIZES[i]).numpy().tobytes() == payloads[i]
    assert bool((arena.bytes_of(1) == 9).all())
    assert [(s.segment, s.size) for s in stats.segments] == [(2, 12345), (0, 5000)]
    assert stats.size == 17345
    assert stats.seconds >= sum(s.seconds for s in stats.segments) > 0
    assert stats.gb_per_s == pytest.approx(17345 / 1e9 / stats.seconds)


class LoggingDriver(CpuDriver):
    def __init__(self, calls: list[str], refuses: int | None = None) -> None:
        super().__init__()
        self.calls = calls
        self.refuses = refuses

    def map(self, address: int, size: int) -> None:
        if len(self.calls) == self.refuses:
            raise DeviceMemoryShort("out of memory")
        super().map(address, size)
        self.calls.append(f"map {size}")

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self.calls.append(f"unmap {size}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_restore_copies_each_segment_as_soon_as_it_has_memory() -> None:
    link = LateLink()
    arena = DeviceArena(LoggingDriver(link.calls), SIZES)
    arena.map([1])
    link.calls.clear()
    arena.restore(link, dict(enumerate(random_bytes(SIZES))))
    page = CpuDriver.granularity
    assert [call.partition(" to ")[0] for call in link.calls] == [
        f"map {2 * page}",
        "copy 5000",
        "copy 100",
        f"map {4 * page}",
        "copy 12345",
    ]


def test_restore_that_runs_out_of_memory_waits_for_its_copies_and_unmaps_what_it_mapped() -> None:
    link = LateLink()
    arena = DeviceArena(LoggingDriver(link.calls, refuses=4), SIZES)
    arena.map([1])
    with pytest.raises(DeviceMemoryShort, match="do not fit on cpu"):
        arena.restore(link, dict(enumerate(random_bytes(SIZES))))
    assert arena.unmapped() == [0, 2]
    assert link.calls[-2:] == ["synchronize", f"unmap {2 * CpuDriver.granularity}"]


def test_copies_begin_in_order_and_each_gate_waits_for_its_own_segment() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    transfer.gate(3)
    transfer.gate(7)
    transfer.gate_all()
    assert link.calls == ["copy 5000 to 64", "copy 100 to 32", "gate 2", "gate 1", "gate 2"]


def test_segment_that_is_not_part_of_the_transfer_has_no_gate() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    link.calls.clear()
    transfer.gate(0)
    assert link.calls == []


def test_gates_cost_nothing_after_the_finish_and_finish_repeats_itself() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    stats = transfer.finish()
    assert stats.seconds == 1.0
    assert [s.seconds for s in stats.segments] == [0.5, 0.5]
    link.calls.clear()
    gates: list[Callable[[], None]] = [transfer.gate_all, lambda: transfer.gate(7)]
    for gate in gates:
        gate()
    assert link.calls == []
    assert transfer.finish() == stats


def test_copy_that_failed_is_told_by_finish() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    link.broken = True
    with pytest.raises(DeviceMemoryError, match="the copy failed"):
        transfer.finish()


def test_transfer_of_nothing_has_no_rate() -> None:
    stats = Transfer(CpuDriver().open_link([])).finish()
    assert stats.size == 0
    assert stats.segments == ()
    assert Transfer(LateLink()).finish().gb_per_s == 0.0
