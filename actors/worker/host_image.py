"""The image that wakes copy from: its pinned pages, and what decompresses it on the device."""

from dataclasses import dataclass

from torch import Tensor

from actors.errors import LayoutMismatch
from actors.image.compressing import Decompress, decompressor
from actors.image.image import WeightImage
from actors.image.layout import Compressed, ImageKey
from actors.memory.driver import HostLink, MemoryDriver
from actors.memory.landing import LandingRing
from actors.memory.transfer import Compact, CompactPart, Payload


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image whose pages are pinned."""

    image: WeightImage
    link: HostLink


class HostImage:
    """Of one model. The thread that maps and copies makes all calls but `prepare`.

    Attributes:
        image: None while a level 2 sleep has dropped it.
        link: to its pinned pages; from `open_link` or the first wake on.
        landing: where compressed bytes land; None where there are none.
    """

    def __init__(self, driver: MemoryDriver, image: WeightImage) -> None:
        self._driver = driver
        self._wanted = image.manifest.checksums
        self._decompress: Decompress | None = None  # once there was anything compressed
        self.image: WeightImage | None = None
        self.landing: LandingRing | None = None
        self._make_ready_for(image)
        self._set(image)
        self.link: HostLink | None = None

    def take(self, image: WeightImage) -> None:
        """Use an image in the place of the one that was dropped.

        Raises:
            LayoutMismatch: it holds other weights.
        """
        self._require_same(image)
        self._make_ready_for(image)
        self._set(image)

    def drop(self) -> ImageKey | None:
        """Let go of the image; returns its key, or None if there was none."""
        self.close_link()
        image, self.image = self.image, None
        return None if image is None else image.manifest.key

    def prepare(self, image: WeightImage) -> PreparedImage:
        """Pin another copy of the same weights, for `exchange`. Any thread may call, whatever is under way.

        Raises:
            LayoutMismatch: it holds other weights.
            DeviceMemoryError: the driver refused.
        """
        self._require_same(image)
        self._make_ready_for(image)
        return PreparedImage(image, self._driver.open_link(image.segments))

    def exchange(self, prepared: PreparedImage) -> HostLink | None:
        """Use that image from now on in the place of the one that is there; while nothing is copied.

        Returns:
            The link of the one before, to be closed; `prepared`'s own if there is no image.
        """
        if self.image is None:
            return prepared.link
        before, self.link = self.link, prepared.link
        self._set(prepared.image)
        return before

    def open_link(self) -> HostLink:
        """Pin the image's pages, so that the next wake need not: some 0.8 s for 15 GB on an H200's host.

        Raises:
            DeviceMemoryError: the driver refused.
        """
        assert self.image is not None, "the image was dropped; `take` first"
        assert self.link is None, "open already"
        self.link = self._driver.open_link(self.image.segments)
        return self.link

    def close_link(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def payload(self, segment: int, out: Tensor) -> Payload:
        """What a copy of that segment takes from the host, and does with it there: `out` is its place, as bytes."""
        assert self.image is not None, "the image was dropped; `take` first"
        host, manifest = self.image.segment(segment), self.image.manifest
        parts = manifest.parts(segment)
        if not parts:
            return host
        assert self.landing is not None
        size = manifest.layout.segments[segment].size
        return Compact(host, size, [self._part(host, out, part) for part in parts], self.landing)

    def _part(self, host: memoryview, out: Tensor, about: Compressed) -> CompactPart:
        decompress = self._decompress
        assert decompress is not None
        place = out[about.at : about.at + about.size]
        stored = host[about.stored_at : about.stored_at + about.stored_size]
        return CompactPart(stored, lambda landed: decompress(landed, about, place))

    def _require_same(self, image: WeightImage) -> None:
        if image.manifest.checksums != self._wanted:
            raise LayoutMismatch("the checkpoint changed while the model slept at level 2")

    def _make_ready_for(self, image: WeightImage) -> None:
        dtypes = {part.dtype for part in image.manifest.all_parts}
        if self._decompress is None and dtypes:
            self._decompress = decompressor(self._driver.device, dtypes)

    def _set(self, image: WeightImage) -> None:
        if self.landing is not None:
            self.landing.release()
        sizes = [part.stored_size for part in image.manifest.all_parts]
        self.landing = LandingRing(self._driver, max(sizes)) if sizes else None
        self.image = image
