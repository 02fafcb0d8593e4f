"""Another node's image, copied segment by segment into objects of our own.

Ray would copy objects to this node by itself, but they die with the process that made them, on every
node. So the other holder's bytes come as results of calls, which belong to the caller: they are gone
from both stores as soon as they have been copied into an object that is ours.
"""

from typing import Any, Protocol

import numpy as np
import ray

from actors.errors import WeightsCorrupted
from actors.image.image import digest
from actors.image.layout import ImageKey, Manifest
from actors.image.store import ByteArray, ReservedSegment, reserve_all, store_room
from actors.threads import on_threads

_IN_FLIGHT = 2  # segments: one arrives while the other is copied and hashed


class Peer(Protocol):
    """Another node's holder. Calls block, for a limited time, and raise what Ray raises."""

    @property
    def name(self) -> str: ...
    def lend(self, key: ImageKey) -> Manifest | None: ...
    def segment(self, key: ImageKey, index: int, digest: str) -> ByteArray: ...
    def recheck(self, key: ImageKey) -> bool: ...


class ActorPeer:
    """A holder that is a plain actor."""

    def __init__(
        self, name: str, actor: Any, answer_timeout_s: float, segment_timeout_s: float
    ) -> None:
        self.name = name
        self._actor = actor
        self._answer_timeout_s = answer_timeout_s
        self._segment_timeout_s = segment_timeout_s

    def lend(self, key: ImageKey) -> Manifest | None:
        lent: Manifest | None = ray.get(
            self._actor.lend.remote(key), timeout=self._answer_timeout_s
        )
        return lent

    def segment(self, key: ImageKey, index: int, digest: str) -> ByteArray:
        payload: ByteArray = ray.get(
            self._actor.segment.remote(key, index, digest), timeout=self._segment_timeout_s
        )
        return payload

    def recheck(self, key: ImageKey) -> bool:
        return bool(ray.get(self._actor.recheck.remote(key), timeout=self._segment_timeout_s))


def pull(lent: Manifest, peer: Peer, recycled_bytes: int) -> list[ReservedSegment]:
    """Copy what `peer` lends into this node's store, checked as it arrives.

    Args:
        lent: what the peer says it has.
        recycled_bytes: see `StoreRoom.require`.

    Returns:
        Its segments, which this process owns.

    Raises:
        StoreFull: there is no room for it, and for the segments on their way.
        WeightsCorrupted: other bytes came than were packed.
        Exception: Ray's, when the peer goes away.
    """
    segments, sizes = lent.layout.segments, lent.stored_sizes
    on_their_way = sum(sorted(sizes)[-_IN_FLIGHT:])
    store_room().require(sum(sizes) + on_their_way, recycled_bytes)
    own = reserve_all(sizes)

    def copy(index: int) -> None:
        np.copyto(own[index].payload, peer.segment(lent.key, index, lent.digests[index]))
        found = digest(own[index].payload.data)
        if found != lent.digests[index]:
            raise WeightsCorrupted(
                f"segment {segments[index].name} arrived with digest {found}, "
                f"expected {lent.digests[index]}"
            )

    on_threads(copy, range(len(segments)), at_once=_IN_FLIGHT)
    return own
