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

logger = logging.getLogger(__name__)

CompressedSegment = tuple[ByteArray, tuple[Compressed, ...]]

_SEGMENT_TIMEOUT_S = 600.0  # of 1 GB, on a CPU that serves; a card takes a tenth of a second


class Compressor(Protocol):
    """A worker that looks at the image. Calls block, for a limited time, and raise what Ray raises."""

    def segment(self, key: ImageKey, index: int) -> CompressedSegment | None:
        """None: it is to be kept as it is.

        Raises:
            Unavailable: not now.
        """


class ActorCompressor:
    """A worker that is an actor."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def segment(self, key: ImageKey, index: int) -> CompressedSegment | None:
        ref = self._worker.compressed_segment.remote(key, index)
        found: CompressedSegment | None = ray.get(ref, timeout=_SEGMENT_TIMEOUT_S)
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
    expected = int(
        sum(COMPRESSED_SHARES.get(slot.dtype, 1.0) * slot.size for slot in before.layout.stored())
    )
    make_room(expected)
    # One segment more, on its way here.
    store_room().require(expected + max(before.stored_sizes), recycled_bytes)
    segments: list[ReservedSegment] = []
    parts: list[tuple[Compressed, ...]] = []
    for index, own in enumerate(held.segments):
        found = compressor.segment(before.key, index)
        segments.append(own if found is None else _kept(found[0]))
        parts.append(() if found is None else found[1])
    manifest = replace(
        before,
        payload_offsets=tuple(segment.payload_offset for segment in segments),
        compressed=tuple(parts),
    )
    digests = tuple(
        digest(segment.payload.data) if parts[i] else before.digests[i]
        for i, segment in enumerate(segments)
    )
    manifest = replace(manifest, digests=digests)
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


def _kept(data: ByteArray) -> ReservedSegment:
    """In an object of our own: what a worker returns would begin anywhere in a page."""
    segment = reserve(data.nbytes)
    np.copyto(segment.payload, data)
    return segment
