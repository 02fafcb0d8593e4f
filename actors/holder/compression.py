"""A held image's compressed copy, made with a worker that looks at it: the worker has a device, the holder the store."""

import logging
import time
from dataclasses import replace
from itertools import compress
from typing import Any, Protocol

import numpy as np
import ray

from actors.holder.held import Held, Published, published
from actors.holder.room import MakeRoom
from actors.image.config import COMPRESSED_SHARES, MOST_STORED
from actors.image.image import digest
from actors.image.layout import Compressed, CompressedSegment, ImageKey
from actors.image.store import ReservedSegment, reserve, store_room
from actors.threads import on_threads

logger = logging.getLogger(__name__)

_Kept = tuple[ReservedSegment, str, tuple[Compressed, ...]]  # a segment, its digest and its parts

# Of what a segment may take, that is reserved for the first ones: matrices of any size take little less.
_USUAL = 0.945
_SPARE = 1.002  # a segment differs from the one before by less
_TIGHT = 0.98  # what takes less than this of its object gets a smaller one

_SEGMENT_TIMEOUT_S = 600.0  # of 1 GB, on a CPU that serves; a card takes a tenth of a second


class Compressor(Protocol):
    """A worker that looks at the image. Calls block, for a limited time, and raise what Ray raises."""

    def segment(self, key: ImageKey, index: int, into: ReservedSegment) -> CompressedSegment | None:
        """Write the compressed bytes, if there is room. None: it is to be kept as it is.

        Raises:
            Unavailable: not now.
        """


class ActorCompressor:
    """A worker that is an actor."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def segment(self, key: ImageKey, index: int, into: ReservedSegment) -> CompressedSegment | None:
        room = into.ref, into.payload_offset, len(into.payload)
        answer = self._worker.compressed_segment.remote(key, index, *room)
        found: CompressedSegment | None = ray.get(answer, timeout=_SEGMENT_TIMEOUT_S)
        return found


def compressed(
    held: Held, compressor: Compressor, make_room: MakeRoom, recycled_bytes: int
) -> Published:
    """The same image, compressed where that pays, beside the one that is held. Blocks.

    Args:
        make_room: as of `HostRoom.for_a_load`.
        recycled_bytes: see `StoreRoom.require`.

    Raises:
        StoreFull, HostMemoryFull: there is no room for both at once.
        Exception: the worker's, or Ray's if there is none any more.
    """
    started_s = time.monotonic()
    before = held.grant.manifest
    expected = [0.0] * len(held.segments)
    for slot in before.layout.stored():
        expected[slot.segment] += COMPRESSED_SHARES.get(slot.dtype, 1.0) * slot.size
    pays = [
        size < MOST_STORED * segment.size
        for size, segment in zip(expected, before.layout.segments, strict=True)
    ]
    whole = int(sum(compress(expected, pays)))
    make_room(whole)
    store_room().require(whole, recycled_bytes)
    shares = [_USUAL]  # of what is expected; the last one is of the segment that was done last

    # A worker computes one after the other. Meanwhile the kernel clears the pages of the next ones.
    def compress_one(index: int, own: ReservedSegment) -> _Kept:
        room = int(shares[-1] * expected[index])
        while pays[index]:
            segment = reserve(room)
            found = compressor.segment(before.key, index, segment)
            if found is None:
                break
            size, parts = found
            if size <= room:
                shares.append(_SPARE * size / expected[index])
                segment = _fitting(segment, size)
                return segment, digest(segment.payload.data), parts
            room = size
        return own, before.digests[index], ()

    numbers = range(len(held.segments))
    kept = on_threads(compress_one, numbers, held.segments, sizes=expected)
    segments = [segment for segment, _, _ in kept]
    manifest = replace(
        before,
        digests=tuple(found for _, found, _ in kept),
        compressed=tuple(parts for _, _, parts in kept),
    )
    took_s = time.monotonic() - started_s
    logger.info(
        "image %s: compressed from %.2f to %.2f GiB, costed %.2f s",
        before.key,
        before.stored_bytes / 2**30,
        manifest.stored_bytes / 2**30,
        took_s,
    )
    return published(manifest, segments, held.grant.load_s)


def _fitting(segment: ReservedSegment, size: int) -> ReservedSegment:
    """What is in it, in an object that is not much larger."""
    segment = segment.cut(size)
    if size >= _TIGHT * segment.view.nbytes:
        return segment
    smaller = reserve(size)
    np.copyto(smaller.payload, segment.payload)
    return smaller
