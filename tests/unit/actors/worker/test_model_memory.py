"""Which layers stay on the device, and what a sleep leaves there, on a driver that says what we want."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from actors.errors import DeviceMemoryError, DeviceMemoryShort, LayoutMismatch, WeightsCorrupted
from actors.holder.obtain import load_from_disk
from actors.image.attach import build_on_meta
from actors.image.image import WeightImage
from actors.image.layout import Checksum, Layout, Segment
from actors.image.packer import checkpoint_dtype, image_key
from actors.memory.cpu import CpuDriver, CpuLink
from actors.memory.driver import DeviceMemory, HostLink
from actors.protocol import MemoryLeft
from actors.worker import model_memory, residue
from actors.worker.model_memory import KeptPlace, ModelMemory, kept_segments

KIB = 1024
KV_BYTES = 64 * KIB
POOL_BYTES = 40 * KIB
CONTEXT_BYTES = 500 * KIB
NEIGHBOURS_BYTES = 7000 * KIB


def layout(layers: int) -> Layout:
    middle = (Segment(f"layer.{i}", 1, f"layers.{i}") for i in range(layers))
    return Layout((Segment("embedding", 1), *middle, Segment("head", 1)), ())


@pytest.mark.parametrize(
    ("count", "place", "kept"),
    [
        (0, "first", []),
        (2, "first", [1, 2]),
        (2, "middle", [3, 4]),
        (2, "last", [5, 6]),
        (3, "middle", [2, 3, 4]),
        (6, "first", [1, 2, 3, 4, 5, 6]),
        (99, "last", [1, 2, 3, 4, 5, 6]),  # embedding and head are no layers
    ],
)
def test_kept_segments(count: int, place: KeptPlace, kept: list[int]) -> None:
    assert sorted(kept_segments(layout(6), count, place)) == kept


def test_the_first_layers_are_kept_unless_told_otherwise() -> None:
    assert kept_segments(layout(6), 2) == kept_segments(layout(6), 2, "first")


@dataclass
class Beside:
    """What a process holds of the device besides what its arenas have mapped."""

    torch_reserved: int = 0
    not_of_torch: int = 0


class CountingPool:
    """AllocatorPool that is as large as we say."""

    id = (0, 1)

    def __init__(self, driver: "CountingDriver") -> None:
        self.size = self.mapped_bytes = 0
        self._driver = driver

    def reserve(self, size: int) -> None:
        self._driver.map(0, size)
        self.size += size
        self.mapped_bytes += size

    def map(self) -> None:
        self._driver.map(0, self.size - self.mapped_bytes)
        self.mapped_bytes = self.size

    def unmap(self) -> None:
        self._driver.mapped -= self.mapped_bytes
        self.mapped_bytes = 0


class CountingDriver(CpuDriver):
    """A card that holds what is mapped, the context, and `beside`."""

    pool: CountingPool

    def __init__(self) -> None:
        super().__init__()
        self.context_bytes = CONTEXT_BYTES
        self.beside = Beside()
        self.cached = 0  # what torch keeps without using it
        self.mapped = 0
        self.own_is_told = True
        self.room = 10**12
        self.is_suspended = False
        self.refuses = False
        self.readings = 0

    def suspend(self) -> bool:
        self.is_suspended = not self.refuses
        return self.is_suspended

    def resume(self) -> None:
        assert self.is_suspended
        self.is_suspended = False

    def synchronize(self) -> None:
        self._check_there()

    def open_link(self, buffers: Sequence[memoryview]) -> CpuLink:
        self._check_there()
        return super().open_link(buffers)

    def _check_there(self) -> None:
        assert not self.is_suspended, "it would block until somebody resumes it"

    def map(self, address: int, size: int) -> None:
        self._check_there()
        if self.mapped + size > self.room:
            raise DeviceMemoryShort("out of memory")
        self.mapped += size

    def unmap(self, address: int, size: int) -> None:
        self._check_there()
        super().unmap(address, size)
        self.mapped -= size

    def collect_cleared(self) -> None:
        self._check_there()

    def make_pool(self) -> CountingPool:  # type: ignore[override]
        self.pool = CountingPool(self)
        return self.pool

    def trim(self) -> None:
        self._check_there()
        self.cached = 0

    def memory(self) -> DeviceMemory:
        self.readings += 1
        if self.is_suspended:
            free = min(self.room, 10**12) - NEIGHBOURS_BYTES
            return DeviceMemory(10**12, free, 10**12 - free, 0, 0 if self.own_is_told else None, 0)
        reserved = self.beside.torch_reserved + self.cached
        own = CONTEXT_BYTES + self.beside.not_of_torch + reserved + self.mapped
        reserved += self.pool.size  # mapped or not
        total, used = 10**12, own + NEIGHBOURS_BYTES
        told = own if self.own_is_told else None
        return DeviceMemory(total, total - used, used, own, told, reserved)


@dataclass
class Bench:
    memory: ModelMemory
    driver: CountingDriver
    image: WeightImage

    def wake(self) -> None:
        self.memory.begin_wake()
        self.settle()

    def settle(self) -> None:
        self.memory.check()
        self.memory.end_wake()


@pytest.fixture
def bench(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Two layers are kept; the engine has its KV cache and graphs, and the model sleeps."""
    driver = CountingDriver()
    monkeypatch.setattr(model_memory, "select_driver", lambda *_: driver)
    dtype = checkpoint_dtype(tiny_checkpoint, "auto")
    image = load_from_disk(tiny_checkpoint, image_key(tiny_checkpoint, dtype))
    memory = ModelMemory(build_on_meta(tiny_checkpoint, dtype), image, 2, "cpu")
    memory.make_kv_arena([KV_BYTES])
    driver.beside = Beside(torch_reserved=30 * KIB, not_of_torch=2 * KIB)
    memory.map()
    driver.cached = 7 * KIB
    with memory.residue.counting_graphs():
        driver.beside = Beside(torch_reserved=130 * KIB, not_of_torch=22 * KIB)
        driver.pool.reserve(POOL_BYTES)
        driver.cached = 500 * KIB  # what capturing took for a while
    memory.unmap(2)
    return Bench(memory, driver, image)


def kept_bytes(bench: Bench) -> int:
    return sum(bench.memory._weights.spans[i].size for i in bench.memory.kept)


def test_graphs_are_told_from_what_was_there_before_them(bench: Bench) -> None:
    assert bench.memory.residue.left == MemoryLeft(
        context=CONTEXT_BYTES,
        graphs=120 * KIB,
        kept_layers=0,
        torch_reserve=30 * KIB,
        other=2 * KIB,
    )


def test_graphs_captured_later_count_as_well(bench: Bench) -> None:
    bench.wake()
    with bench.memory.residue.counting_graphs():
        bench.driver.pool.reserve(5 * KIB)
        bench.driver.beside.torch_reserved += 10 * KIB
        bench.driver.beside.not_of_torch += 3 * KIB
    left = bench.memory.unmap(1).left
    assert left is not None
    assert (left.graphs, left.torch_reserve, left.other) == (133 * KIB, 30 * KIB, 2 * KIB)


def test_graphs_captured_on_the_way_are_what_more_is_left(bench: Bench) -> None:
    for more, has_new_graphs, graphs, other in (
        (2, False, 120, 4),
        (3, True, 123, 4),
        (0, True, 123, 4),
    ):
        bench.wake()
        bench.driver.beside.not_of_torch += more * KIB
        left = bench.memory.unmap(1, has_new_graphs=has_new_graphs).left
        assert left is not None
        assert (left.graphs, left.other) == (graphs * KIB, other * KIB)


def test_sleep_tells_what_went_and_what_the_rest_is_made_of(bench: Bench) -> None:
    bench.wake()
    assert bench.memory.residue.left is None
    bench.driver.cached = 400 * KIB  # activations
    bench.driver.beside.torch_reserved += 5 * KIB
    bench.driver.beside.not_of_torch += KIB
    before = bench.memory.mapped_bytes
    slept = bench.memory.unmap(1)
    assert slept.released_bytes == slept.own_released_bytes
    assert slept.released_bytes == before - kept_bytes(bench) + 400 * KIB
    assert slept.left == MemoryLeft(
        context=CONTEXT_BYTES,
        graphs=120 * KIB,
        kept_layers=kept_bytes(bench),
        torch_reserve=35 * KIB,
        other=3 * KIB,
    )
    assert slept.left.total == bench.driver.memory().held
    assert bench.memory.residue.left == slept.left


def test_residue_of_a_card_is_that_of_the_last_sleep(bench: Bench) -> None:
    bench.wake()
    assert bench.memory.residue.bytes == 0  # of a CPU
    bench.driver.device = torch.device("cuda")
    left = bench.memory.unmap(1).left
    assert left is not None
    assert bench.memory.residue.bytes == left.total - left.kept_layers > 0
    bench.driver.device = torch.device("cpu")
    bench.wake()
    assert bench.memory.residue.bytes == left.total - left.kept_layers


def test_without_a_figure_of_our_own_the_device_s_is_told_alone(bench: Bench) -> None:
    bench.wake()
    bench.driver.own_is_told = False
    slept = bench.memory.unmap(1)
    assert slept.own_released_bytes is None
    assert slept.released_bytes == slept.mapped_before_bytes - kept_bytes(bench)
    assert bench.memory.residue.last_reading.own is None


def test_the_graphs_pool_comes_and_goes_with_the_weights(bench: Bench) -> None:
    pool = bench.driver.pool
    assert pool.mapped_bytes == 0
    free, wanted = bench.driver.memory().free, bench.memory.wake_bytes
    bench.wake()
    assert pool.mapped_bytes == POOL_BYTES
    assert bench.memory.wake_bytes == 0
    assert bench.driver.memory().free == free - wanted
    assert bench.memory.mapped_bytes == bench.driver.mapped
    bench.memory.unmap(1)
    assert pool.mapped_bytes == 0


def test_a_wake_maps_the_first_segment_begins_its_copy_and_maps_the_others_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.memory.unmap(2)
    happened: list[int | str] = []
    spans = bench.memory._weights.spans
    mapped, copied = bench.driver.map, CpuLink.copy

    def map_and_tell(address: int, size: int) -> None:
        happened.append(size)
        mapped(address, size)

    def copy_and_tell(link: CpuLink, address: int, host: memoryview) -> None:
        happened.append("copy")
        copied(link, address, host)

    monkeypatch.setattr(bench.driver, "map", map_and_tell)
    monkeypatch.setattr(CpuLink, "copy", copy_and_tell)
    woke = bench.memory.begin_wake()
    first, *others = (span.size for span in spans)
    assert happened[: 2 * len(spans)] == [first, "copy", *others, *["copy"] * len(others)]
    assert woke.copied_bytes == sum(segment.nbytes for segment in bench.image.segments)
    bench.settle()


def test_a_wake_whose_other_segments_do_not_fit_leaves_nothing_mapped(bench: Bench) -> None:
    bench.memory.unmap(2)
    bench.driver.room = bench.memory._weights.spans[0].size
    with pytest.raises(DeviceMemoryShort):
        bench.memory.begin_wake()
    assert bench.driver.mapped == bench.memory.mapped_bytes == 0
    bench.driver.room = 10**12
    bench.wake()


def test_deeper_sleep_releases_the_kept_layers(bench: Bench) -> None:
    bench.wake()
    bench.memory.unmap(1)
    kept = kept_bytes(bench)
    assert bench.memory.mapped_bytes == kept > 0
    assert bench.memory.unmap(2).released_bytes == kept
    assert bench.memory.mapped_bytes == 0


def test_wake_that_does_not_fit_changes_nothing_and_can_be_tried_again(bench: Bench) -> None:
    bench.wake()
    bench.memory.unmap(1)
    kept, left = bench.memory.mapped_bytes, bench.memory.residue.left
    whole = bench.memory.weights_bytes + KV_BYTES
    for room in (kept + 5000, whole + POOL_BYTES // 2):  # not even the weights; all but the pool
        bench.driver.room = room
        with pytest.raises(DeviceMemoryShort):
            bench.memory.begin_wake()
        assert bench.memory.mapped_bytes == bench.driver.mapped == kept
    assert bench.memory.residue.left == left
    bench.driver.room = 10**12
    woke = bench.memory.begin_wake()
    bench.settle()
    assert woke.copied_bytes == bench.memory.weights_bytes - kept_payload(bench)
    assert bench.memory.last_wake is not None
    assert bench.memory.last_wake.intact


def test_wake_that_the_engine_cannot_use_is_undone(bench: Bench) -> None:
    bench.wake()
    bench.memory.unmap(1)
    kept, left = bench.memory.mapped_bytes, bench.memory.residue.left
    bench.memory.begin_wake()
    bench.memory.abandon_wake()
    assert bench.memory.mapped_bytes == bench.driver.mapped == kept
    assert bench.memory.residue.left == left
    bench.memory.check()  # of a wake that is no more
    bench.wake()
    assert bench.memory.last_wake is not None
    assert bench.memory.last_wake.intact


def kept_payload(bench: Bench) -> int:
    return sum(bench.image.layout.segments[i].size for i in bench.memory.kept)


def test_kept_layers_can_be_chosen_anew_while_awake(bench: Bench) -> None:
    for place in ("last", "middle", "first"):
        bench.wake()
        bench.memory.kept = kept_segments(bench.image.layout, 1, place)
        bench.memory.unmap(1)
        woke = bench.memory.begin_wake()
        bench.settle()
        assert woke.copied_bytes == bench.memory.weights_bytes - kept_payload(bench)
        bench.memory.unmap(1)
        bench.memory.unmap(2)


def test_sleep_before_the_wake_was_settled_leaves_nothing_behind(bench: Bench) -> None:
    bench.memory.begin_wake()
    bench.memory.unmap(2)
    bench.memory.check()  # of a wake that is no more
    assert bench.memory.last_wake is None
    bench.wake()
    assert bench.memory.last_wake is not None


def test_byte_that_differs_from_the_manifest_is_reported_with_what_was_checked(
    bench: Bench,
) -> None:
    manifest = bench.image.manifest
    wrong = (*manifest.checksums[:2], manifest.checksums[0], *manifest.checksums[3:])
    bench.image.manifest = replace(manifest, checksums=wrong)
    bench.memory.begin_wake()
    with pytest.raises(WeightsCorrupted, match=r"segment layer\.1 is not what was packed"):
        bench.memory.check()
    report = bench.memory.last_wake
    assert report is not None
    assert not report.intact
    assert report.checked_segments == len(manifest.layout.segments)
    assert report.checked_bytes == report.copied_bytes == bench.memory.weights_bytes


def test_collecting_what_others_have_taken_is_no_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([DeviceMemoryShort("nothing is free"), DeviceMemoryError("cuMemCreate failed")])

    def refuse() -> None:
        raise next(refusals)

    monkeypatch.setattr(bench.driver, "collect_cleared", refuse)
    bench.memory.collect_cleared()
    with pytest.raises(DeviceMemoryError, match="cuMemCreate"):
        bench.memory.collect_cleared()


def test_link_is_opened_once_for_an_image(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_link = bench.driver.open_link

    def counted(buffers: Sequence[memoryview]) -> HostLink:
        opened.append(sum(view.nbytes for view in buffers))
        return open_link(buffers)

    monkeypatch.setattr(bench.driver, "open_link", counted)
    bench.memory.host.open_link()
    assert opened == [bench.memory.weights_bytes]
    for _ in range(2):
        bench.wake()
        bench.memory.unmap(1)
    assert len(opened) == 1
    bench.memory.host.drop()
    bench.memory.host.take(bench.image)
    bench.wake()
    assert len(opened) == 2


def test_image_of_other_weights_is_refused(bench: Bench) -> None:
    assert bench.memory.host.drop() == bench.image.manifest.key
    assert bench.memory.image is None
    other = replace(bench.image.manifest, checksums=(Checksum(1, 2),))
    with pytest.raises(LayoutMismatch, match="changed"):
        bench.memory.host.take(WeightImage(other, bench.image.segments, "disk"))
    assert bench.memory.host.drop() is None
    bench.memory.host.take(bench.image)
    bench.wake()


# --- suspended ---


def test_device_is_read_now_and_then_while_suspended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading is a process; pages and policies look every second."""
    bench.memory.unmap(2)
    assert bench.memory.suspend()
    before = bench.driver.readings
    device = bench.memory.device_now("node")
    assert (device.total, bench.driver.readings) == (10**12, before)
    monkeypatch.setattr(residue, "_SUSPENDED_FRESH_S", 0.0)
    bench.driver.room = NEIGHBOURS_BYTES + 5
    assert bench.memory.device_now("node").free == 5
    assert bench.driver.readings == before + 1
    bench.driver.room = 10**12
    bench.memory.resume()
    awake = bench.driver.readings
    bench.memory.device_now("node")
    assert bench.driver.readings == awake + 1


def test_deep_sleep_leaves_nothing_and_wakes_as_it_was(bench: Bench) -> None:
    bench.wake()
    bench.memory.unmap(2)
    asleep, before = bench.memory.residue.last_reading, bench.memory.residue.bytes
    to_wake = bench.memory.wake_bytes
    assert bench.memory.suspend()
    assert bench.memory.suspended
    assert bench.memory.residue.bytes == 0
    assert bench.memory.residue.left == MemoryLeft(0, 0, 0, 0, 0)
    assert bench.memory.residue.last_reading.held == 0 < asleep.held
    assert bench.memory.wake_bytes == to_wake + before
    bench.memory.device_now("node")  # asks nobody who would block
    bench.memory.resume()
    assert not bench.memory.suspended
    assert (bench.memory.residue.bytes, bench.memory.wake_bytes) == (before, to_wake)
    bench.wake()
    assert bench.memory.unmap(1).left is not None


def test_pages_are_pinned_again_by_the_wake_behind_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    close = CpuLink.close

    def closed(link: CpuLink) -> None:
        assert not bench.driver.is_suspended
        told.append("closed")
        close(link)

    monkeypatch.setattr(CpuLink, "close", closed)
    bench.wake()
    bench.memory.unmap(2)
    bench.memory.suspend()
    assert told == ["closed"]
    bench.memory.resume()
    bench.wake()
    assert bench.memory.host.link is not None


def test_driver_that_refuses_leaves_an_ordinary_sleep(bench: Bench) -> None:
    bench.wake()
    bench.memory.unmap(2)
    before = bench.memory.residue.left
    bench.driver.refuses = True
    assert bench.memory.can_suspend
    assert not bench.memory.suspend()
    assert not bench.memory.can_suspend  # whoever wants it deep has the process end
    assert not bench.memory.suspended
    assert bench.memory.residue.left == before
    bench.wake()


def test_nothing_comes_back_where_the_wake_behind_it_has_no_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver whose restore finds no room may never restore that process."""
    bench.wake()
    bench.memory.unmap(2)
    bench.memory.residue.bytes = 3 * KIB  # a CPU has none
    bench.memory.suspend()
    bench.driver.room = NEIGHBOURS_BYTES + bench.memory.wake_bytes - 1
    with pytest.raises(DeviceMemoryShort, match="do not fit"):
        bench.memory.resume()
    assert bench.driver.is_suspended
    assert bench.memory.suspended
    bench.driver.room += 1
    bench.memory.resume()
    bench.driver.room = 10**12
    bench.wake()
