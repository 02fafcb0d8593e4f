"""Transfer on the CPU driver, and on a link whose copies arrive late."""

from itertools import count
from typing import Any

import numpy as np
import pytest

from actors.errors import DeviceMemoryError
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

    def signal(self, event: str) -> None:
        self.link.calls.append(f"{event} at {self.number}")

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
    return Transfer(link, [SegmentCopy(7, 64, payloads[0]), SegmentCopy(3, 32, payloads[1])])


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


def test_restore_to_an_unmapped_segment_copies_nothing() -> None:
    arena = DeviceArena(CpuDriver(), SIZES)
    arena.map([0])
    link = LateLink()
    payloads = random_bytes(SIZES)
    with pytest.raises(AssertionError, match="segment 1 is not mapped"):
        arena.restore(link, {0: payloads[0], 1: payloads[1]})
    assert link.calls == []


def test_copies_begin_in_order_and_each_gate_waits_for_its_own_segment() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    transfer.gate(3)
    transfer.gate(7)
    assert link.calls == ["copy 5000 to 64", "copy 100 to 32", "gate 2", "gate 1"]


def test_arrivals_are_recorded_right_behind_their_segments() -> None:
    link, payloads = LateLink(), random_bytes([8, 8, 8])
    arena = DeviceArena(CpuDriver(), [8, 8, 8])
    arena.map()
    page = CpuDriver.granularity
    arrivals: Any = ["first", "second", "third"]
    transfer = arena.restore(link, {2: payloads[2]}, arrivals=arrivals)
    arena.restore(link, {0: payloads[0]}, transfer)
    assert link.calls == [
        f"copy 8 to {arena.address + 2 * page}",
        "third at 1",
        f"copy 8 to {arena.address}",
        "first at 2",
    ]


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
    transfer.gate(7)
    assert link.calls == []
    assert transfer.finish() == stats


def test_copies_are_told_one_by_one_as_they_arrive() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    link.calls.clear()
    for copy in transfer.arrived():
        link.calls.append(f"segment {copy.segment}")
    assert link.calls == ["wait 1", "segment 7", "wait 2", "segment 3"]


def test_last_copies_are_told_before_they_arrive_if_wanted_so() -> None:
    sizes = {7: 100, 3: 5000, 5: 60, 4: 40}
    for early, waited in ((99, 3), (100, 2), (5099, 2), (5100, 1), (5200, 0)):
        link, arena = LateLink(), DeviceArena(CpuDriver(), [8192] * 8)
        arena.map()
        payloads = {i: random_bytes([size])[0] for i, size in sizes.items()}
        transfer = arena.restore(link, payloads)
        link.calls.clear()
        assert [copy.segment for copy in transfer.arrived(early)] == [7, 3, 5, 4]
        assert link.calls == [f"wait {i + 1}" for i in range(waited)]
        transfer.gate(4)
        assert link.calls[-1] == "gate 4"


def test_copy_that_failed_is_told_by_who_waits_for_it() -> None:
    link = LateLink()
    transfer = late_transfer(link)
    link.broken = True
    with pytest.raises(DeviceMemoryError, match="the copy failed"):
        transfer.finish()
    with pytest.raises(DeviceMemoryError, match="the copy failed"):
        next(transfer.arrived())


def test_transfer_of_nothing_has_no_rate() -> None:
    stats = Transfer(CpuDriver().open_link([]), []).finish()
    assert stats.size == 0
    assert stats.segments == ()
    assert Transfer(LateLink(), []).finish().gb_per_s == 0.0
