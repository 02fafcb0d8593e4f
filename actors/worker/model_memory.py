"""ModelMemory: one model's weights and KV cache on one device, mapped and unmapped, and accounted for.

Knows nothing of requests, and of the engine only that it wants a KV arena, and a pool for graphs.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedModel

from actors.engine.sizing import CardMemory
from actors.errors import DeviceMemoryShort, WeightsCorrupted
from actors.image.attach import attach
from actors.image.checksum import Checksums
from actors.image.gates import SegmentGates
from actors.image.image import WeightImage
from actors.image.layout import Layout, Manifest
from actors.memory.arena import RETRY_SHORT_AFTER_S, DeviceArena
from actors.memory.cpu import CpuDriver
from actors.memory.cpu_card import CpuCard
from actors.memory.driver import (
    AllocatorPool,
    HostLink,
    MemoryDriver,
    describe,
    gib,
)
from actors.memory.transfer import Payload, Transfer, TransferStats
from actors.protocol import DeviceNow, MemoryChange, WakeReport
from actors.worker.host_image import HostImage, PreparedImage
from actors.worker.residue import Residue

logger = logging.getLogger(__name__)

KeptPlace = Literal["first", "middle", "last"]

# The end of a wake's bytes, in 5 ms on the link: their checksums are launched before they are there.
_CHECKED_BY_DEVICE = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A wake's copies, and what their bytes must be."""

    transfer: Transfer
    manifest: Manifest


class ModelMemory:
    """Owns the arenas, the image and the link between them. Starts unmapped.

    One thread makes all calls that map, unmap or copy; attributes and properties can be read from any.

    Attributes:
        kept: segments that a level 1 sleep leaves mapped; it may be changed while awake.
        host: the image that wakes copy from, and its pinned pages.
        grows_by_grant: parts of the KV cache behind the first are mapped only when somebody said they may be.
        pool: what the engine's graphs compute in, mapped and unmapped with the rest; None on a CPU.
        last_transfer: of the last settled wake.
        last_wake: the same wake's report, with the outcome of the check.
        residue: what this process has of the device beside what is mapped.
        suspended: this process has nothing of its device; `resume` comes before anything else that calls it.
        can_suspend: the driver knows how, and has not refused yet.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        image: WeightImage,
        keep_layers: int,
        device: str,
        cpu_card: CpuCard | None = None,
        may_map: Callable[[int], None] = lambda _: None,
        grows_by_grant: bool = False,
    ) -> None:
        """Reserve addresses and make the module's tensors views of them.

        Args:
            cpu_card: where there is no card, what stands for one.
            may_map: called with the bytes of weights and KV cache before anything is mapped; returns when
                there is room, or raises.
            grows_by_grant: of the KV cache, the first part is all that comes with a wake, and that a start needs.

        Raises:
            ValueError: there is no such device here.
            LayoutMismatch: image and module disagree.
        """
        layout = image.layout
        self.kept = kept_segments(layout, keep_layers)
        self.weights_bytes = layout.total_bytes
        self.last_transfer: TransferStats | None = None
        self.last_wake: WakeReport | None = None
        self._driver = select_driver(device, cpu_card)
        self._may_map = may_map
        self.grows_by_grant = grows_by_grant
        self._weights = DeviceArena(self._driver, [s.size for s in layout.segments])
        self._kv: DeviceArena | None = None
        self.pool = self._driver.make_pool()
        attach(module, layout, self._weights)
        self.gates = SegmentGates(module, layout, self.device)
        self._checksums = Checksums(self.device, len(layout.segments))
        self.host = HostImage(self._driver, image)
        self._arrival: _Arrival | None = None  # of the last wake, until it is checked
        self._checked: Transfer | None = None  # likewise, from then on until it is settled
        self.residue = Residue(
            self._driver,
            lambda: self.mapped_bytes,
            lambda: self.pool.size if self.pool is not None else 0,
        )
        self.suspended = False
        self.can_suspend = self._driver.can_suspend

    @property
    def device(self) -> torch.device:
        return self._driver.device

    @property
    def card_id(self) -> str:
        """By which processes of a node know it; a CPU is one card."""
        if self.device.type == "cpu":
            return "cpu"
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def card(self) -> CardMemory | None:
        """The card as it is now; None on a CPU."""
        if self.device.type == "cpu":
            return None
        memory = self._driver.memory()
        holders = describe(memory, self._driver.holders())
        return CardMemory(memory.total, memory.free, memory.held, self.mapped_bytes, holders)

    @property
    def image(self) -> WeightImage | None:
        """None while a level 2 sleep has dropped it."""
        return self.host.image

    @property
    def mapped_bytes(self) -> int:
        ring = self.host.landing  # once: another thread may take it away
        landing = 0 if ring is None else ring.mapped_bytes
        scratch = sum(part.mapped_bytes for part in self._scratch())
        return self._weights.mapped_bytes + scratch + landing

    @property
    def wake_bytes(self) -> int:
        """What a wake would take now, with what follows it unasked; 0 while awake."""
        whole = self._weights.size + sum(part.size for part in self._scratch())
        ring = self.host.landing
        if ring is not None and self._weights.mapped_bytes < self._weights.size:
            whole += ring.size  # for the wake only
        return whole - self._not_asked_for - self.mapped_bytes + self.residue.comes_back_bytes

    def spare_bytes(self) -> int:
        """What the device has free beside all of this model. While nothing runs on it.

        What torch keeps of earlier work goes back to the device first.
        """
        return self.residue.trimmed().free - self.wake_bytes

    def device_now(self, node: str) -> DeviceNow:
        """The device and what it has free now.

        Args:
            node: tells the CPUs of several machines apart.
        """
        if self.device.type == "cpu":
            device_id, name = f"cpu of node {node}", "CPU memory"
        else:
            card = torch.cuda.get_device_properties(self.device)
            device_id, name = self.card_id, card.name
        memory = self.residue.lately() if self.suspended else self._driver.memory()
        return DeviceNow(device_id, name, memory.total, memory.free, self.wake_bytes)

    @property
    def kv_bytes(self) -> int:
        """At most."""
        return self._kv.size if self._kv is not None else 0

    @property
    def kv_first_bytes(self) -> int:
        return self._kv.spans[0].size if self._kv is not None else 0

    @property
    def kv_mapped_bytes(self) -> int:
        return self._kv.mapped_bytes if self._kv is not None else 0

    def kv_spare_bytes(self, parts_in_use: int) -> int:
        """What is mapped behind so many parts; any thread may ask."""
        if self._kv is None:
            return 0
        used = sum(span.size for span in self._kv.spans[:parts_in_use])
        return max(0, self._kv.mapped_bytes - used)

    def next_part_bytes(self) -> int:
        """What `map_more` would map; 0 if none is missing. Any thread may ask."""
        if self._kv is None:
            return 0
        mapped, end = self._kv.mapped_bytes, 0
        for span in self._kv.spans:
            end += span.size
            if end > mapped:
                return span.size
        return 0

    def make_kv_arena(self, parts: Sequence[int]) -> DeviceArena:
        """The engine's arena, mapped; from now on it is mapped and unmapped with the weights.

        Args:
            parts: sizes in bytes. A wake maps the first; `map_more` the others, one by one.
        """
        assert self._kv is None, "made already"
        self._kv = DeviceArena(self._driver, parts)
        self._may_map(self._weights.size + self._kv.size - self._not_asked_for)
        self._map_kv()
        return self._kv

    def map(self) -> None:
        """Give everything memory, whose contents are undefined; of a KV cache that grows by grant, the first part.

        Raises:
            DeviceMemoryShort: the device has not that much; some of it may be mapped.
            DeviceMemoryError: the driver refused; likewise.
        """
        self._weights.map()
        if self._kv is not None:
            self._map_kv()
        if self.pool is not None:
            self.pool.map()

    def begin_wake(self) -> MemoryChange:
        """Map what a first step needs, and begin to copy what the weights lack. All or nothing.

        Afterwards the first forward waits, segment by segment, for its bytes. The first part of the KV
        cache is mapped, its contents undefined; `map_more` maps the rest. `settle` ends the wake, or
        `abandon_wake`.

        Raises:
            DeviceMemoryShort: the device has not that much memory free.
            DeviceMemoryError: the driver refused.
        """
        host, image = self.host, self.host.image
        assert image is not None, "the image was dropped; `HostImage.take` first"
        before = self.mapped_bytes
        missing = self._weights.unmapped()
        first, others = missing[:1], missing[1:]
        try:
            link = host.link or host.open_link()
            self._weights.map(first)
            if host.landing is not None:
                host.landing.map()
            arrivals = self.gates.arrivals
            transfer = self._weights.restore(link, self._payloads(first), arrivals=arrivals)
            # While the first segment travels, which has the embedding: all that follows takes less time.
            self._weights.map(others)
            self._weights.restore(link, self._payloads(others), transfer)
            if self._kv is not None:
                self._kv.map([0])
            if self.pool is not None:
                self.pool.map()
        except BaseException:  # half a model must never be resumed
            self._unmap(missing)
            raise
        self.residue.begin_wake()
        self._arrival = _Arrival(transfer, image.manifest)
        self.gates.install(transfer.gate)
        return MemoryChange(before, self.mapped_bytes, transfer.link_bytes)

    def abandon_wake(self) -> None:
        """Unmap what `begin_wake` has mapped, if the engine cannot use it: half a model must never be resumed."""
        assert self._arrival is not None, "no wake was begun"
        arrival, self._arrival = self._arrival, None
        self.gates.remove()
        self._unmap(copy.segment for copy in arrival.transfer.copies)
        self.residue.abandon_wake()

    def map_more(self) -> bool:
        """Map the next part of the KV cache, after a wake has settled; False if none is missing.

        Raises:
            DeviceMemoryShort: the device has not that much memory free.
            DeviceMemoryError: the driver refused.
        """
        missing = self._kv.unmapped() if self._kv is not None else []
        if not missing:
            return False
        assert self._kv is not None
        self._kv.map(missing[:1])
        if len(missing) == 1:
            self.residue.read_awake()
        return True

    def unmap_kv(self, parts: Sequence[int]) -> int:
        """Give back parts of the KV cache that no later step touches; how many bytes went.

        Waits first for what the device still does, which may be a step that was launched before.

        Raises:
            DeviceMemoryError: the driver refused, or something on the device had failed.
        """
        assert self._kv is not None, "there is no KV cache"
        return self._kv.unmap(parts)

    def check(self) -> None:
        """After a wake, beside the first forward: check each segment as it arrives; `last_wake` tells.

        First tokens wait for it, so nothing else is done before it ends. `end_wake` comes next.

        Raises:
            DeviceMemoryError: a copy failed.
            WeightsCorrupted: bytes on the device are not those that were packed.
        """
        if self._arrival is None:
            return  # asleep again before it came to that
        arrival, self._arrival = self._arrival, None
        self.last_wake, corrupted = self._compared(arrival.transfer, arrival.manifest)
        self._checked = arrival.transfer
        if corrupted is not None:
            raise WeightsCorrupted(f"segment {corrupted} is not what was packed, after a wake")

    def end_wake(self) -> None:
        """Behind `check`: give back what only a wake needs, and read how long it took, and what the device has now.

        Raises:
            DeviceMemoryError: the driver refused.
        """
        if self.host.landing is not None:
            self.host.landing.unmap()
        self.residue.read_awake()
        checked, self._checked, report = self._checked, None, self.last_wake
        assert checked is not None
        assert report is not None
        self.last_transfer = checked.finish()
        logger.info(
            "restored %d bytes in %.1f ms, %.1f GB/s; checked %d segments, %d bytes, in %.1f ms: %s",
            report.copied_bytes,
            1e3 * report.link_s,
            report.link_gb_per_s,
            report.checked_segments,
            report.checked_bytes,
            1e3 * report.check_s,
            "intact" if report.intact else "not what was packed",
        )

    def unmap(self, level: int, *, has_new_graphs: bool = False) -> MemoryChange:
        """Give memory back: all of it, but for the kept layers at level 1. The device must be idle.

        Args:
            has_new_graphs: some were captured since the last time, and not in `counting_graphs`: they are what more is
                left than then.
        """
        device_before, mapped_before = self._driver.memory(), self.mapped_bytes
        if self._arrival is not None:  # nobody settled that wake, and now nobody can
            self.gates.remove()
            self._arrival = None
        keep = self.kept if level == 1 else frozenset[int]()
        self._unmap(i for i in range(len(self._weights.spans)) if i not in keep)
        after = self.residue.read_asleep(has_new_graphs)
        return MemoryChange(
            mapped_before,
            self.mapped_bytes,
            copied_bytes=0,
            released_bytes=device_before.used - after.used,
            own_released_bytes=_difference(device_before.own, after.own),
            left=self.residue.left,
        )

    def suspend(self) -> bool:
        """While all is unmapped: give back all else that this process has of the device, until `resume`.

        Returns:
            False: the driver refused; only the image's pages are no longer pinned.

        Raises:
            DeviceMemoryError: the device is of no use to this process any more.
        """
        assert not self.mapped_bytes, "kept layers would go to host memory"
        self.host.close_link()  # pinned pages cost more time each way than it takes to pin them again
        gc.collect()  # who throws away an event or a stream later on waits for `resume`
        self.suspended = self._driver.suspend()
        if not self.suspended:
            self.can_suspend = False
            return False
        self.residue.set_aside()
        return True

    def resume(self) -> None:
        """Have again what `suspend` has given back; nothing is mapped yet.

        Raises:
            DeviceMemoryShort: there is not enough room for this and the wake behind it; still suspended.
            DeviceMemoryError: the driver could not; this process is of no use any more.
        """
        if self.residue.comes_back_bytes and (free := self._driver.memory().free) < self.wake_bytes:
            raise DeviceMemoryShort(
                f"{gib(self.wake_bytes)} do not fit on {self.device}: {gib(free)} are free",
                RETRY_SHORT_AFTER_S,
            )
        self._driver.resume()
        self.suspended = False
        self.residue.come_back()

    def trim(self) -> None:
        """While unmapped: give back what somebody else's work has left in torch's hands since."""
        self.residue.read_asleep()

    def collect_cleared(self) -> None:
        """While unmapped: do now what the next wake's first `map` would have to do. See MemoryDriver.

        Raises:
            DeviceMemoryError: the driver refused.
        """
        try:
            self._driver.collect_cleared()
        except DeviceMemoryShort:
            logger.debug("other processes have taken all that was given back")

    def exchange(self, prepared: PreparedImage) -> HostLink | None:
        """Use that image from now on in the place of the one that is there.

        Returns:
            The link of the one before, to be closed; `prepared`'s own if this is no time for it: a wake is not
            settled, or there is no image.
        """
        return prepared.link if self._arrival is not None else self.host.exchange(prepared)

    @property
    def _not_asked_for(self) -> int:
        """Of the KV cache, what is not missing where it is not mapped."""
        if self._kv is None or not self.grows_by_grant:
            return 0
        return self._kv.size - max(self._kv.mapped_bytes, self._kv.spans[0].size)

    def _map_kv(self) -> None:
        assert self._kv is not None
        self._kv.map([0] if self.grows_by_grant else None)

    def _payloads(self, segments: Iterable[int]) -> dict[int, Payload]:
        return {i: self.host.payload(i, self._weights.bytes_of(i)) for i in segments}

    def _scratch(self) -> Iterator[DeviceArena | AllocatorPool]:
        """What may hold anything after a wake."""
        if self._kv is not None:
            yield self._kv
        if self.pool is not None:
            yield self.pool

    def _unmap(self, weights: Iterable[int]) -> None:
        if self.host.landing is not None:
            self.host.landing.unmap()
        self._weights.unmap(weights)
        for part in self._scratch():
            part.unmap()

    def _compared(self, transfer: Transfer, manifest: Manifest) -> tuple[WakeReport, str | None]:
        """Compare the bytes where they landed, each segment right behind its copy; which differs first."""
        # Not all are begun at once to wait on the device: a second stream that waits there for the copies takes
        # 5 % of the link from them (H200), in some processes. The last ones are: first tokens wait for these.
        for copy in transfer.arrived(early=_CHECKED_BY_DEVICE):
            data = self._weights.bytes_of(copy.segment, copy.size)
            self._checksums.begin(data, partial(transfer.gate, copy.segment))
        seconds = transfer.wait()
        arrived_s = time.perf_counter()
        found = self._checksums.read()
        checked_s = time.perf_counter()
        self.gates.remove()
        corrupted = next(
            (
                manifest.layout.segments[copied.segment].name
                for copied, landed in zip(transfer.copies, found, strict=True)
                if landed != manifest.checksums[copied.segment]
            ),
            None,
        )
        size = transfer.link_bytes
        report = WakeReport(
            copied_bytes=size,
            link_s=seconds,
            link_gb_per_s=size / 1e9 / seconds if seconds > 0 else 0.0,
            checked_segments=len(found),
            checked_bytes=sum(copy.size for copy in transfer.copies),
            check_s=checked_s - arrived_s,
            intact=corrupted is None,
        )
        return report, corrupted


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after


def kept_segments(layout: Layout, keep_layers: int, place: KeptPlace = "first") -> frozenset[int]:
    """The segments of the decoder layers that stay on the device over a level 1 sleep.

    The first ones: a wake copies in forward order and the first prefill runs right behind the copies,
    so with the first layers there it computes them while the others still arrive, and what is left
    to compute behind the last byte is the last layer's share and the head. Layers kept further back
    are computed only when everything in front of them has arrived, near the end or behind it.
    `sleepserve bench wake` measures all three.
    """
    layers = [i for i, segment in enumerate(layout.segments) if segment.layer is not None]
    count = min(keep_layers, len(layers))
    spare = len(layers) - count
    start = {"first": 0, "middle": spare // 2, "last": spare}[place]
    return frozenset(layers[start : start + count])


def select_driver(device: str, cpu_card: CpuCard | None = None) -> MemoryDriver:
    """The memory driver of `engine.device`.

    Raises:
        ValueError: there is no such device here.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not has_cuda):
        return CpuDriver(cpu_card)
    if not has_cuda:
        raise ValueError("engine.device is cuda, but torch finds no CUDA device here")
    from actors.memory.cuda import CudaDriver  # cuda-bindings are there where a GPU is

    return CudaDriver()
