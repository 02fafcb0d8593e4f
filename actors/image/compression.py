"""A held image's compressed copy, made with a worker that looks at it: the worker has a device, the holder the store."""

import logging
import time
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import ray

from actors.image.config import COMPRESSED_SHARES
from actors.image.held import Held, ImageGrant, Published
from actors.image.image import digest
from actors.image.layout import Compressed, ImageKey
from actors.image.room import MakeRoom
from actors.image.store import ByteArray, ReservedSegment, reserve, store_room
from actors.threads import on_threads

logger = logging.getLogger(__name__)

# As a worker gives it: an object of its own in the store, and the segment's parts.
CompressedSegment = tuple["ray.ObjectRef[ByteArray]", tuple[Compressed, ...]]
_Kept = tuple[ReservedSegment, str, tuple[Compressed, ...]]  # a segment, its digest and its parts

_IN_FLIGHT = 4  # segments: one is compressed, while others travel, are copied and hashed

_SEGMENT_TIMEOUT_S = 600.0  # of 1 GB, on a CPU that serves; a card takes a tenth of a second


class Compressor(Protocol):
    """A worker that looks at the image. Calls block, for a limited time, and raise what Ray raises."""

    def segment(self, key: ImageKey, index: int) -> tuple[ByteArray, tuple[Compressed, ...]] | None:
        """The compressed bytes, and what its parts are. None: it is to be kept as it is.

        Raises:
            Unavailable: not now.
        """


class ActorCompressor:
    """A worker that is an actor."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def segment(self, key: ImageKey, index: int) -> tuple[ByteArray, tuple[Compressed, ...]] | None:
        answer = self._worker.compressed_segment.remote(key, index)
        found: CompressedSegment | None = ray.get(answer, timeout=_SEGMENT_TIMEOUT_S)
        if found is None:
            return None
        return ray.get(found[0], timeout=_SEGMENT_TIMEOUT_S), found[1]


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
    expected = int(
        sum(COMPRESSED_SHARES.get(slot.dtype, 1.0) * slot.size for slot in before.layout.stored())
    )
    make_room(expected)
    on_their_way = sum(sorted(before.stored_sizes)[-_IN_FLIGHT:])
    store_room().require(expected + on_their_way, recycled_bytes)

    def compress(index: int, own: ReservedSegment) -> _Kept:
        found = compressor.segment(before.key, index)
        if found is None:
            return own, before.digests[index], ()
        segment = reserve(found[0].nbytes)  # what a worker returns would begin anywhere in a page
        np.copyto(segment.payload, found[0])
        return segment, digest(segment.payload.data), found[1]

    indices = range(len(held.segments))
    kept = on_threads(compress, indices, held.segments, at_once=_IN_FLIGHT)
    segments = [segment for segment, _, _ in kept]
    manifest = replace(
        before,
        payload_offsets=tuple(segment.payload_offset for segment in segments),
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
    grant = ImageGrant(manifest, tuple(segment.ref for segment in segments), held.grant.load_s)
    return grant, segments
