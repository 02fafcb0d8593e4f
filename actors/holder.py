"""WeightHolder: CPU-only owner of packed images in the object store of its node.

It owns the object references, so the images live as long as it does, and longer for whoever still
looks at them. Loading runs on a thread of its own: the holder answers health checks and hands out
finished images while it loads another.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util import list_named_actors

from actors.errors import LayoutMismatch
from actors.weights import packer
from actors.weights.download import ensure_checkpoint
from actors.weights.layout import ImageKey, Manifest
from actors.weights.plasma import ByteArray, ReservedSegment, reserve, store_room, was_spilled
from actors.weights.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """What to load when there is no image yet."""

    model_id: str
    source: ModelSource  # an absolute path, or a hub's model
    dtype: str  # torch's name, or "auto"
    ttl_s: float | None = None  # how long the image stays without a lessee; None: for good


@dataclass(frozen=True, slots=True)
class ImageGrant:
    """A published image: what it is and where its segments are."""

    manifest: Manifest
    refs: tuple["ray.ObjectRef[ByteArray]", ...]
    load_s: float  # what loading it took, whenever that was


Published = tuple[
    ImageGrant, list[ReservedSegment]
]  # and the views that keep it from being spilled


@dataclass(slots=True)
class _Held:
    """An image in the store. The segments' views keep it from being spilled."""

    grant: ImageGrant
    segments: list[ReservedSegment]
    ttl_s: float | None
    unused_since_s: float  # when it last had a lessee, or was loaded
    lessees: set[str] = field(default_factory=set)  # actor names


@dataclass(frozen=True, slots=True)
class HeldImage:
    """What `stats` says of one image."""

    key: str
    bytes: int
    segments: int
    load_s: float
    lessees: int
    spilled: bool


class WeightHolder:
    """Loads checkpoints once and hands their images to every replica that asks."""

    def __init__(
        self, preload: Sequence[ImageRequest] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        """Load nothing yet, but for what `preload` names, in the background."""
        self._now = now
        self._images: dict[ImageKey, _Held] = {}
        self._loading: dict[ImageKey, Future[_Held]] = {}
        self._recycled_bytes = 0  # freed by us in this store, whose pages it keeps
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="image-loader")
        for request in preload:
            self._loader.submit(self._preload, request)

    async def ping(self) -> None:
        """Answers at once, also while an image loads: the caller learns that somebody is here."""

    async def acquire(self, request: ImageRequest, key: ImageKey, lessee: str) -> ImageGrant:
        """The image of `key`, loaded now if need be; callers of one key share one load.

        Args:
            key: computed by the caller from its own copy of the checkpoint.
            lessee: name of the asking actor, kept until it releases the image or dies.

        Raises:
            LayoutMismatch: this node's checkpoint is not the caller's.
            StoreFull: there is no room for it.
        """
        held = self._images.get(key)
        if held is None:
            held = await asyncio.shield(asyncio.wrap_future(self._load_once(request, key)))
        held.lessees.add(lessee)
        held.ttl_s = request.ttl_s
        return held.grant

    async def release(self, key: ImageKey, lessee: str) -> bool:
        """End a lease. True when that was the last one and the image is gone from the store."""
        held = self._images.get(key)
        if held is None:
            return False
        held.lessees.discard(lessee)
        held.lessees &= _alive()
        if held.lessees:
            return False
        self._drop(key, held, "nobody holds a lease")
        return True

    async def expire(self) -> None:
        """Let go of the images that have had no lessee for their `ttl_s`. To be called now and then."""
        before = {key: frozenset(held.lessees) for key, held in self._images.items()}
        alive = await asyncio.to_thread(_alive)
        now_s = self._now()
        for key, held in list(self._images.items()):
            # Not of those that came meanwhile, who may be younger than that list.
            held.lessees -= before.get(key, frozenset()) - alive
            if held.lessees:
                held.unused_since_s = now_s
            elif held.ttl_s is not None and now_s - held.unused_since_s >= held.ttl_s:
                self._drop(key, held, f"unused for {held.ttl_s:g} s")

    async def stats(self) -> list[HeldImage]:
        return [
            HeldImage(
                key=str(key),
                bytes=held.grant.manifest.layout.total_bytes,
                segments=len(held.segments),
                load_s=held.grant.load_s,
                lessees=len(held.lessees),
                spilled=was_spilled([segment.ref for segment in held.segments]),
            )
            for key, held in self._images.items()
        ]

    def _drop(self, key: ImageKey, held: _Held, why: str) -> None:
        del self._images[key]
        self._recycled_bytes += held.grant.manifest.layout.total_bytes
        logger.info("image %s released: %s", key, why)

    def _load_once(self, request: ImageRequest, key: ImageKey) -> "Future[_Held]":
        future = self._loading.get(key)
        if future is None:
            future = self._loading[key] = self._loader.submit(self._load, request, key)
        return future

    def _preload(self, request: ImageRequest) -> None:
        """On the loader thread. A failure is logged; the replica that needs the image gets its own."""
        try:
            self._load(request, None)
        except Exception:
            logger.exception("could not preload %s", request.model_id)

    def _load(self, request: ImageRequest, key: ImageKey | None) -> _Held:
        """On the loader thread, of which there is one: the dictionaries have one writer at a time."""
        try:
            checkpoint = ensure_checkpoint(request.source)
            dtype = packer.checkpoint_dtype(checkpoint, request.dtype)
            found = packer.image_key(checkpoint, dtype)
            if key is not None and key != found:
                raise LayoutMismatch(f"asked for image {key}, this node's checkpoint makes {found}")
            held = self._images.get(found)  # a preload may have been first
            if held is None:
                grant, segments = self._publish(request.model_id, checkpoint, found)
                held = _Held(grant, segments, request.ttl_s, self._now())
                self._images[found] = held
            return held
        finally:
            if key is not None:
                self._loading.pop(key, None)

    def _publish(self, model_id: str, checkpoint: Path, key: ImageKey) -> Published:
        started_s = time.monotonic()
        logger.info("load_model key:%s: loading %s from %s", key, model_id, checkpoint)
        dtype = packer.checkpoint_dtype(checkpoint, key.dtype)
        model = packer.load_reference(checkpoint, dtype)
        layout = packer.plan(model)
        room = store_room()
        room.require(layout.total_bytes, self._recycled_bytes)
        segments = [reserve(segment.size) for segment in layout.segments]
        digests, checksums = packer.pack(model, layout, [s.payload.data for s in segments])
        load_s = time.monotonic() - started_s
        manifest = Manifest(
            key, layout, tuple(s.payload_offset for s in segments), digests, checksums
        )
        logger.info(
            "load_model key:%s: published %d tensors, %.2f GiB in %d segments, costed %.2f s",
            key,
            len(layout.tensors),
            layout.total_bytes / 2**30,
            len(segments),
            load_s,
        )
        grant = ImageGrant(manifest, tuple(s.ref for s in segments), load_s)
        return grant, segments


def _alive() -> set[str]:
    """Names of the actors there are: replicas that died never said goodbye."""
    return {actor["name"] for actor in list_named_actors(all_namespaces=True)}
