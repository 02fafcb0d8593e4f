"""A packed image as one process sees it: read-only bytes per segment, and what they must hash to."""

import mmap
from collections.abc import Sequence

import xxhash

from actors.errors import LayoutMismatch, WeightsCorrupted
from actors.image.layout import Layout, Manifest
from actors.threads import on_threads


def digest(payload: memoryview) -> str:
    """xxh3_128 of the bytes: 36 GB/s on one core, so that verifying is cheaper than copying."""
    return xxhash.xxh3_128_hexdigest(payload)


def private_buffers(sizes: Sequence[int]) -> list[memoryview]:
    """Memory of this process for each payload, in bytes.

    At pages that nothing else shares: they can be pinned, and CUDA refuses copies of memory that is so in part.
    """
    return [memoryview(mmap.mmap(-1, max(size, 1)))[:size] for size in sizes]


class WeightImage:
    """Host bytes of a model, segment by segment. Never written after it was made.

    The buffers are usually views of Ray's object store, in which case all replicas of a node share
    one copy and holding the image keeps it there, whatever becomes of the holder that made it.

    Attributes:
        origin: "image": from the object store; "disk": loaded by this process.
        is_kept_asleep: whether a sleep at level 1 leaves it; not where the host's budget has no room for it.
    """

    def __init__(self, manifest: Manifest, buffers: Sequence[memoryview], origin: str) -> None:
        sizes = manifest.stored_sizes
        found = tuple(buffer.nbytes for buffer in buffers)
        if sizes != found:
            raise LayoutMismatch(f"image segments have {found} bytes, the manifest says {sizes}")
        self.manifest = manifest
        self.origin = origin
        self.is_kept_asleep = True
        self._buffers = [buffer.toreadonly() for buffer in buffers]

    @property
    def layout(self) -> Layout:
        return self.manifest.layout

    @property
    def segments(self) -> list[memoryview]:
        return list(self._buffers)

    def segment(self, index: int) -> memoryview:
        return self._buffers[index]

    def verify(self) -> None:
        """Compare every segment with its digest.

        Raises:
            WeightsCorrupted: naming the first segment that differs.
        """
        found = on_threads(digest, self._buffers)
        for segment, want, have in zip(
            self.layout.segments, self.manifest.digests, found, strict=True
        ):
            if want != have:
                raise WeightsCorrupted(
                    f"segment {segment.name} of image {self.manifest.key} has digest {have}, "
                    f"expected {want}"
                )
