"""The images that a holder has in the object store of its node, and who looks at them."""

import dataclasses
import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.checkpoints.source import ModelSource
from actors.image.layout import ImageKey, Manifest
from actors.image.store import ByteArray, ReservedSegment
from actors.protocol import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """What to load when there is no image yet."""

    model_id: str
    source: ModelSource  # an absolute path, or a hub's model
    dtype: str  # torch's name, or "auto"
    ttl_s: float | None = None  # how long the image stays without a lessee; None: for good

    @property
    def checkpoint(self) -> tuple[ModelSource, str]:
        """What the image is made of."""
        return self.source, self.dtype


@dataclass(frozen=True, slots=True)
class ImageGrant:
    """A published image: what it is and where its segments are."""

    manifest: Manifest
    refs: tuple["ray.ObjectRef[ByteArray]", ...]
    offsets: tuple[int, ...]  # bytes into each object where the segment's payload starts
    load_s: float  # what loading it took, whenever that was


# And the views that keep it from being spilled.
Published = tuple[ImageGrant, list[ReservedSegment]]


def published(manifest: Manifest, segments: list[ReservedSegment], load_s: float) -> Published:
    """The image that has been written to these segments."""
    refs = tuple(segment.ref for segment in segments)
    offsets = tuple(segment.payload_offset for segment in segments)
    return ImageGrant(manifest, refs, offsets, load_s), segments


@dataclass(slots=True)
class Held:
    """An image in the store. The segments' views keep it from being spilled.

    Attributes:
        request: the last one that it was for.
        unused_since_s: when it last had a lessee, or was loaded.
        lessees: names of the replicas' actors, each with the worker that looks at the image, if that can be asked.
        leases: how often it was leased.
        leased_s: when it was leased last, or its checkpoint was looked up.
    """

    grant: ImageGrant
    segments: list[ReservedSegment]
    origin: Origin
    request: ImageRequest
    unused_since_s: float
    lessees: dict[str, Any] = field(default_factory=dict)
    leases: int = 0
    leased_s: float = 0.0

    @property
    def size(self) -> int:
        return self.grant.manifest.stored_bytes

    @property
    def payloads(self) -> list[memoryview]:
        return [segment.payload.data for segment in self.segments]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A worker waits for an image, to look at it for a replica."""

    key: ImageKey
    lessee: str
    worker: Any


class HeldImages:
    """What is in the store, by key. The holder's event loop and its threads change it: any may call.

    Attributes:
        recycled_bytes: freed by us in this store, which keeps the pages, and not used since.
    """

    def __init__(self) -> None:
        self.recycled_bytes = 0
        self._lock = threading.Lock()
        self._images: dict[ImageKey, Held] = {}
        self._asks: set[Ask] = set()

    def get(self, key: ImageKey) -> Held | None:
        return self._images.get(key)

    def snapshot(self) -> list[tuple[ImageKey, Held]]:
        with self._lock:
            return list(self._images.items())

    def size(self) -> int:
        """Bytes of all of them."""
        return sum(held.size for _, held in self.snapshot())

    def put(self, key: ImageKey, held: Held) -> None:
        with self._lock:
            self._images[key] = held
            self.recycled_bytes = max(0, self.recycled_bytes - held.size)

    def replace(self, key: ImageKey, held: Held, copy: Published) -> bool:
        """Have another copy of an image in its place, with the same lessees; False if it has gone.

        Who looks at the one before does so until it leases the image again.
        """
        grant, segments = copy
        with self._lock:
            if self._images.get(key) is not held:
                return False
            # The same dict of lessees: one that takes the earlier grant just now is in both.
            other = self._images[key] = dataclasses.replace(held, grant=grant, segments=segments)
            self.recycled_bytes = max(0, self.recycled_bytes - other.size)
        return True

    def lease(
        self, held: Held, request: ImageRequest, lessee: str, worker: Any, now_s: float
    ) -> None:
        """Note who looks at it from now on, in place of an earlier worker of the same replica.

        That one may have looked at another image, of a checkpoint that was replaced meanwhile. A replica has one
        worker, so the leases of others end: nobody else would end them while it lives. The same worker ends its own.
        """
        with self._lock:
            for other in self._images.values():
                if other.lessees.get(lessee, worker) != worker:
                    del other.lessees[lessee]
            held.lessees[lessee] = worker
            held.request = request
            held.leases += 1
            held.leased_s = now_s

    def lessees_of(self, held: Held) -> tuple[int, dict[str, Any]]:
        """How often it was leased until now, and who has a lease."""
        with self._lock:
            return held.leases, dict(held.lessees)

    def end_leases(self, held: Held, lessees: Collection[str]) -> None:
        with self._lock:
            for name in lessees:
                held.lessees.pop(name, None)

    @contextmanager
    def awaited(self, key: ImageKey, lessee: str, worker: Any) -> Iterator[Ask]:
        """Somebody is about to lease that image: it does not leave before.

        Of a replica only the worker that asked last lives: the asks of those before are withdrawn.
        """
        ask = Ask(key, lessee, worker)
        with self._lock:
            self._asks -= {
                each for each in self._asks if each.lessee == lessee and each.worker != worker
            }
            self._asks.add(ask)
        try:
            yield ask
        finally:
            with self._lock:
                self._asks.discard(ask)

    def withdraw(self, lessee: str, key: ImageKey | None = None) -> None:
        """Have a replica wait no longer for that image, or for any."""
        with self._lock:
            self._asks -= {
                each for each in self._asks if each.lessee == lessee and key in (None, each.key)
            }

    def is_withdrawn(self, ask: Ask) -> bool:
        """Whether it must not become a lease, which nobody would end."""
        return ask not in self._asks

    def is_awaited(self, key: ImageKey) -> bool:
        with self._lock:
            return self._is_awaited(key)

    def _is_awaited(self, key: ImageKey) -> bool:
        return any(ask.key == key for ask in self._asks)

    def drop(self, key: ImageKey, held: Held, why: str) -> None:
        """Let go of it, whoever looks at it; of no effect if it has gone."""
        with self._lock:
            if self._images.get(key) is not held:
                return
            del self._images[key]
            if not held.lessees:  # or its pages are still looked at
                self.recycled_bytes += held.size
        logger.info("image %s released: %s", key, why)

    def evict(self, key: ImageKey, leases: int, why: str) -> bool:
        """Let go of it, at which nobody looks any more; False if it was leased since, or is about to be.

        Args:
            leases: how many there had been when those who looked at it were asked.
        """
        with self._lock:
            held = self._images.get(key)
            if held is None or held.leases != leases or self._is_awaited(key):
                return False
            held.lessees.clear()
        self.drop(key, held, why)
        return True
