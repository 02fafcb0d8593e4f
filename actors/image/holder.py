"""WeightHolder: CPU-only owner of packed images in the object store of its node.

It owns the object references, so the images live as long as it does, and longer for whoever still
looks at them. Checkpoints are looked up, and downloaded, on threads of their own, and images made on
further ones, one at a time. One that takes too long, on a file system that never answers, say, is waited for
no longer. So the holder answers health checks and hands out finished images while it loads another, and
loads while a hub takes its time.

A node has one. An image that another node's holder has is copied from there instead of being read from
disk, once, and what was copied is this holder's own: it stays when the other one goes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.util import list_named_actors

from actors.checkpoints.download import CheckpointMissing, ensure_checkpoint
from actors.checkpoints.errors import DownloadError
from actors.checkpoints.source import ModelSource
from actors.errors import ImageMissing, LayoutMismatch, WeightsCorrupted
from actors.image import packer
from actors.image.image import WeightImage
from actors.image.layout import ImageKey, Manifest
from actors.image.pull import Peer, pull
from actors.image.store import ByteArray, ReservedSegment, reserve, store_room, was_spilled
from actors.protocol import HeldImage, Origin
from actors.threads import start_apart

logger = logging.getLogger(__name__)

_LOOK_UPS = 16  # at a time; few models of a node are being downloaded
# For an image, wherever it comes from: 100 GB at 55 MB/s. A total, because what reads a checkpoint does not say
# how far it has come.
LOAD_TIMEOUT_S = 1800.0


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
    load_s: float  # what loading it took, whenever that was


Published = tuple[
    ImageGrant, list[ReservedSegment]
]  # and the views that keep it from being spilled


@dataclass(slots=True)
class _Held:
    """An image in the store. The segments' views keep it from being spilled."""

    grant: ImageGrant
    segments: list[ReservedSegment]
    origin: Origin
    request: ImageRequest  # the last one that it was for
    unused_since_s: float  # when it last had a lessee, or was loaded
    lessees: set[str] = field(default_factory=set)  # actor names


@dataclass(slots=True)
class HolderCounts:
    """What a holder has done since it started."""

    disk_loads: int = 0
    disk_bytes: int = 0  # of the images that came out of it
    pulls: int = 0  # images copied from other nodes
    pulled_bytes: int = 0
    lent_bytes: int = 0  # segments handed to other nodes
    corrupted: int = 0  # images dropped because their bytes had changed


def nobody() -> Iterable[Peer]:
    """The peers of a holder whose node is the only one."""
    return ()


def ignore_load(origin: Origin, size: int) -> None:
    """Nobody wants to hear of loads."""


class WeightHolder:
    """Loads checkpoints once and hands their images to every replica of its node that asks."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        peers: Callable[[], Iterable[Peer]] = nobody,
        on_load: Callable[[Origin, int], None] = ignore_load,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """Load nothing yet.

        Args:
            now: seconds by some clock.
            peers: the other nodes' holders as of now. Called before anything is read from disk, on
                the thread that loads.
            on_load: told where an image came from, and its bytes. On the same thread.
            load_timeout_s: for one image.
        """
        self._lock = threading.Lock()  # for the images and what they leave: two threads change both
        self._now = now
        self._peers = peers
        self._on_load = on_load
        self._counts = HolderCounts()
        self._images: dict[ImageKey, _Held] = {}
        self._loading: dict[ImageKey, Future[_Held]] = {}
        self._recycled_bytes = (
            0  # freed by us in this store, which keeps the pages, and not used since
        )
        self._look_ups = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="image-look-up")
        self._one_loads = threading.Lock()  # the store is filled by one at a time
        self._load_timeout_s = load_timeout_s
        self._wanted: tuple[ImageRequest, ...] = ()
        self._unwanted: set[tuple[ModelSource, str]] = set()  # that were wanted

    async def ping(self) -> None:
        """Answers at once, also while an image loads: the caller learns that somebody is here."""

    async def acquire(self, request: ImageRequest, key: ImageKey, lessee: str) -> ImageGrant:
        """The image of `key`, loaded now if need be; callers of one key share one load.

        Args:
            key: computed by the caller from its own copy of the checkpoint.
            lessee: name of the asking actor, kept until it releases the image or dies.

        Raises:
            ImageMissing: there is none, and this node's checkpoint is another, not complete or not to be read
                in time.
            LayoutMismatch: this node packs the same checkpoint in another way.
            StoreFull: there is no room for it.
        """
        held = self._images.get(key)
        if held is None:
            held = await asyncio.shield(asyncio.wrap_future(self._load_once(request, key)))
        held.lessees.add(lessee)
        held.request = request
        return held.grant

    async def wanted(self) -> tuple[ImageRequest, ...]:
        """What `keep` was last told."""
        return self._wanted

    async def keep(self, requests: Sequence[ImageRequest]) -> None:
        """Know which models there are. Images of those that are no longer among them go with their last lessee."""
        before = {request.checkpoint for request in self._wanted}
        self._wanted = tuple(requests)
        self._unwanted |= before
        self._unwanted -= {request.checkpoint for request in requests}

    async def preload(self, requests: Sequence[ImageRequest]) -> None:
        """Load what is not here, in the background."""
        for request in requests:
            self._look_ups.submit(self._preload, request)

    async def release(self, key: ImageKey, lessee: str) -> bool:
        """End a lease. True when that was the last one and the image is gone from the store."""
        held = self._images.get(key)
        if held is None:
            return False
        held.lessees.discard(lessee)
        before = frozenset(held.lessees)
        alive = await asyncio.to_thread(_alive)
        held.lessees -= before - alive  # those that came meanwhile may be younger than that list
        if held.lessees or self._images.get(key) is not held:
            return False
        self._drop(key, held, "nobody holds a lease")
        return True

    async def expire(self) -> None:
        """Let go of the images that have had no lessee for their time. To be called now and then."""
        before = {key: frozenset(held.lessees) for key, held in self._snapshot()}
        alive = await asyncio.to_thread(_alive)
        now_s = self._now()
        for key, held in self._snapshot():
            # Not of those that came meanwhile, who may be younger than that list.
            held.lessees -= before.get(key, frozenset()) - alive
            ttl_s = held.request.ttl_s
            if held.lessees:
                held.unused_since_s = now_s
            elif held.request.checkpoint in self._unwanted:
                self._drop(key, held, "its model is no longer served")
            elif ttl_s is not None and now_s - held.unused_since_s >= ttl_s:
                self._drop(key, held, f"unused for {ttl_s:g} s")

    async def recheck(self, key: ImageKey) -> bool:
        """For who found wrong bytes: compare the image with its digests; drop it if they differ.

        A reader's own memory or device may be to blame, so nobody's word is taken for it. Whoever
        still looks at a dropped image finds that out by itself; the next `acquire` loads anew.

        Returns:
            True when the image was dropped.
        """
        held = self._images.get(key)
        if held is None:
            return False
        manifest = held.grant.manifest
        payloads = [segment.payload.data for segment in held.segments]
        try:
            await asyncio.to_thread(WeightImage(manifest, payloads, "image").verify)
        except WeightsCorrupted as exc:
            if self._images.get(key) is held:  # nobody else was first
                self._counts.corrupted += 1
                self._drop(key, held, str(exc))
            return True
        logger.warning("image %s is intact here; whoever read something else has to look", key)
        return False

    async def lend(self, key: ImageKey) -> Manifest | None:
        """For another node's holder: what `segment` has; None if there is nothing.

        Never waits for a load: two holders would wait for each other.
        """
        held = self._images.get(key)
        return None if held is None else held.grant.manifest

    async def segment(self, key: ImageKey, index: int) -> ByteArray:
        """For another node's holder: the bytes of one segment.

        Raises:
            ImageMissing: the image has gone meanwhile.
        """
        held = self._images.get(key)
        if held is None:
            raise ImageMissing(f"image {key} is no longer here")
        manifest, source = held.grant.manifest, held.segments[index]
        size = manifest.layout.segments[index].size
        self._counts.lent_bytes += size
        # Of the view, which keeps the bytes there until they have been sent.
        return source.view[source.payload_offset : source.payload_offset + size]

    async def counts(self) -> HolderCounts:
        return self._counts

    async def stats(self) -> list[HeldImage]:
        return [
            HeldImage(
                key=str(key),
                bytes=held.grant.manifest.layout.total_bytes,
                segments=len(held.segments),
                load_s=held.grant.load_s,
                lessees=len(held.lessees),
                spilled=was_spilled([segment.ref for segment in held.segments]),
                origin=held.origin,
            )
            for key, held in self._snapshot()
        ]

    def _snapshot(self) -> list[tuple[ImageKey, _Held]]:
        with self._lock:
            return list(self._images.items())

    def _drop(self, key: ImageKey, held: _Held, why: str) -> None:
        with self._lock:
            del self._images[key]
            if not held.lessees:  # or its pages are still looked at
                self._recycled_bytes += held.grant.manifest.layout.total_bytes
        logger.info("image %s released: %s", key, why)

    def _load_once(self, request: ImageRequest, key: ImageKey) -> "Future[_Held]":
        future = self._loading.get(key)
        if future is None or future.done():
            future = self._loading[key] = self._look_ups.submit(self._load, request, key)
            # Not by the load itself, which may be over before it stands there.
            future.add_done_callback(lambda _: self._loading.pop(key, None))
        return future

    def _preload(self, request: ImageRequest) -> None:
        """On a look-up thread. A failure is logged; the replica that needs the image gets its own."""
        try:
            self._load(request, None)
        except Exception:
            logger.exception("could not preload %s", request.model_id)

    def _load(self, request: ImageRequest, key: ImageKey | None) -> _Held:
        """On a look-up thread."""
        checkpoint, found = _look_up(request)
        if key is not None and key != found:
            raise _mismatch(key, found)
        with self._one_loads:
            held = self._images.get(found)  # a preload may have been first
            if held is None:
                held = self._obtain_in_time(request, checkpoint, found)
                size = held.grant.manifest.layout.total_bytes
                with self._lock:
                    self._images[found] = held
                    self._recycled_bytes = max(0, self._recycled_bytes - size)
            held.request = request
        return held

    def _obtain_in_time(self, request: ImageRequest, checkpoint: Path, key: ImageKey) -> _Held:
        loading = start_apart(self._obtain, request, checkpoint, key)
        wait([loading], self._load_timeout_s)
        if not loading.done():  # should it ever come back, nobody has its image
            raise ImageMissing(unread(checkpoint, self._load_timeout_s))
        return loading.result()

    def _obtain(self, request: ImageRequest, checkpoint: Path, key: ImageKey) -> _Held:
        origin: Origin = "node"
        published = self._from_peers(key)
        if published is None:
            origin, published = "disk", self._publish(request.model_id, checkpoint, key)
        grant, segments = published
        size = grant.manifest.layout.total_bytes
        if origin == "disk":
            self._counts.disk_loads += 1
            self._counts.disk_bytes += size
        else:
            self._counts.pulls += 1
            self._counts.pulled_bytes += size
        self._on_load(origin, size)
        return _Held(grant, segments, origin, request, self._now())

    def _from_peers(self, key: ImageKey) -> Published | None:
        """Our own copy of another holder's image; None if nobody has it, or nobody's could be had."""
        for peer in self._peers():
            started_s = time.monotonic()
            try:
                lent = peer.lend(key)
                if lent is None:
                    continue
                manifest, segments = pull(lent, peer, self._recycled_bytes)
            except WeightsCorrupted as exc:
                logger.warning("image %s of %s: %s", key, peer.name, exc)
                _have_rechecked(peer, key)
            except Exception as exc:  # noqa: BLE001  # whatever it was, there is the disk
                logger.warning(
                    "no image %s from %s: %s: %s", key, peer.name, type(exc).__name__, exc
                )
            else:
                load_s = time.monotonic() - started_s
                logger.info(
                    "load_model key:%s: copied %.2f GiB from %s, costed %.2f s",
                    key,
                    manifest.layout.total_bytes / 2**30,
                    peer.name,
                    load_s,
                )
                return ImageGrant(manifest, tuple(s.ref for s in segments), load_s), segments
        return None

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


def unread(checkpoint: Path, limit_s: float) -> str:
    """What hung, and for how long."""
    return (
        f"reading {checkpoint} has not ended after {limit_s:g} s; its file system does not answer"
    )


def _look_up(request: ImageRequest) -> tuple[Path, ImageKey]:
    """This node's checkpoint, and the key of the image that it makes."""
    try:
        checkpoint = ensure_checkpoint(request.source)
    except (CheckpointMissing, DownloadError) as exc:
        raise ImageMissing(f"no checkpoint of {request.model_id} on this node: {exc}") from exc
    dtype = packer.checkpoint_dtype(checkpoint, request.dtype)
    return checkpoint, packer.image_key(checkpoint, dtype)


def _mismatch(asked: ImageKey, found: ImageKey) -> LayoutMismatch | ImageMissing:
    text = f"asked for image {asked}, this node's checkpoint makes {found}"
    if (asked.model, asked.revision) != (found.model, found.revision):
        return ImageMissing(text)
    return LayoutMismatch(text)


def _have_rechecked(peer: Peer, key: ImageKey) -> None:
    try:
        peer.recheck(key)
    except Exception as exc:  # noqa: BLE001  # it concerns the others; we have the disk
        logger.warning("%s did not check image %s: %s", peer.name, key, exc)


def _alive() -> set[str]:
    """Names of the actors there are: replicas that died never said goodbye."""
    return {actor["name"] for actor in list_named_actors(all_namespaces=True)}
