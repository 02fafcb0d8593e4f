"""WeightHolder: CPU-only owner of packed images in the object store of its node.

It owns the object references, so the images live as long as it does, and longer for whoever still
looks at them. Checkpoints are looked up, and downloaded, on threads of their own, and images made on
further ones, one at a time. One that takes too long, on a file system that never answers, say, is waited for
no longer. So the holder answers health checks and hands out finished images while it loads another, and
loads while a hub takes its time.

A node has one. An image that another node's holder has is copied from there instead of being read from
disk, once, and what was copied is this holder's own: it stays when the other one goes.

With a budget, images leave for others (`room`), and may come back from a file (`files`).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

from actors.checkpoints.download import CheckpointMissing, ensure_checkpoint, find_checkpoint
from actors.checkpoints.errors import DownloadError
from actors.checkpoints.source import ModelSource
from actors.errors import (
    HostMemoryFull,
    ImageMissing,
    LayoutMismatch,
    ReplicaFailed,
    WeightsCorrupted,
)
from actors.holder.compression import ActorCompressor, compressed
from actors.holder.config import HostConfig
from actors.holder.copies import from_file, from_peers
from actors.holder.held import (
    Held,
    HeldImages,
    ImageGrant,
    ImageRequest,
    Published,
    published,
)
from actors.holder.lookers import RayLookers, alive
from actors.holder.pull import Peer
from actors.holder.room import HostRoom, MakeRoom
from actors.image import packer
from actors.image.image import WeightImage
from actors.image.layout import ImageKey, Manifest
from actors.image.store import ByteArray, reserve_all, store_room, was_spilled
from actors.protocol import HeldImage, Origin
from actors.threads import start_apart

logger = logging.getLogger(__name__)

_LOOK_UPS = 16  # at a time; few models of a node are being downloaded
# For an image, wherever it comes from: 100 GB at 55 MB/s. A total, because what reads a checkpoint does not say
# how far it has come.
LOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a holder is to keep, and in how much room."""

    requests: tuple[ImageRequest, ...] = ()
    host: HostConfig = field(default_factory=HostConfig)


@dataclass(slots=True)
class HolderCounts:
    """What a holder has done since it started."""

    disk_loads: int = 0
    pulls: int = 0  # images copied from other nodes
    pulled_bytes: int = 0
    lent_bytes: int = 0  # segments handed to other nodes
    corrupted: int = 0  # images dropped because their bytes had changed
    file_loads: int = 0  # images read from packed files
    evictions: int = 0  # images that left for others
    files: int = 0  # packed files that there are now


def nobody() -> Iterable[Peer]:
    """The peers of a holder whose node is the only one."""
    return ()


def ignore_load(origin: Origin, size: int) -> None:
    """Nobody wants to hear of loads."""


def ignore_eviction(has_file: bool) -> None:
    """Nor of images that leave."""


class WeightHolder:
    """Loads checkpoints once and hands their images to every replica of its node that asks."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        peers: Callable[[], Iterable[Peer]] = nobody,
        on_load: Callable[[Origin, int], None] = ignore_load,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        on_evicted: Callable[[bool], None] = ignore_eviction,
    ) -> None:
        """Load nothing yet.

        Args:
            now: seconds by some clock.
            peers: the other nodes' holders as of now. Called before anything is read from disk, on
                the thread that loads.
            on_load: told where an image came from, and its bytes. On the same thread.
            load_timeout_s: for one image.
            on_evicted: told of each image that leaves for others, and whether a file has it. On the same thread.
        """
        self._now = now
        self._peers = peers
        self._on_load = on_load
        self._counts = HolderCounts()
        self._images = HeldImages()
        self._room = HostRoom(
            self._images, RayLookers(), lambda: store_room().available, now, on_evicted
        )
        self._loading: dict[ImageKey, Future[None]] = {}
        self._look_ups = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="image-look-up")
        self._one_loads = threading.Lock()  # the store is filled by one at a time
        self._load_timeout_s = load_timeout_s
        self._wanted = Wanted()
        self._given_back: set[ImageKey] = set()  # when nobody could tell whether others need them
        self._one_compresses = asyncio.Lock()  # each takes room for two
        # `_files_depend_on` when the files on disk were looked at.
        self._tidied: tuple[object, ...] = ()
        self._tidying: Future[None] | None = None
        self._unwanted: set[tuple[ModelSource, str]] = set()  # that were wanted

    async def ping(self) -> None:
        """Answers at once, also while an image loads: the caller learns that somebody is here."""

    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant:
        """The image of `key`, loaded now if need be; callers of one key share one load.

        Args:
            key: computed by the caller from its own copy of the checkpoint.
            lessee: name of the asking actor, kept until it releases the image or dies, or another worker of it asks.
            worker: the actor that looks at the image for it, which can be asked to let go. None: while the lessee
                lives, the image stays.

        Raises:
            ImageMissing: there is none, and this node's checkpoint is another, not complete or not to be read
                in time.
            LayoutMismatch: this node packs the same checkpoint in another way.
            StoreFull: there is no room for it.
            ReplicaFailed: another worker of the lessee has asked meanwhile, or the lessee has released the image.
        """
        with self._images.awaited(key, lessee, worker) as ask:
            # Once more if it was dropped between its load and this.
            while (held := self._images.get(key)) is None:
                await asyncio.shield(asyncio.wrap_future(self._load_once(request, key)))
                if self._images.is_withdrawn(ask):
                    raise ReplicaFailed(f"{lessee} no longer asks for image {key}")
            self._images.lease(held, request, lessee, worker, self._now())
            self._given_back.discard(key)
        return held.grant

    async def wanted(self) -> Wanted:
        """What `keep` was last told."""
        return self._wanted

    async def keep(self, requests: Sequence[ImageRequest], host: HostConfig | None = None) -> None:
        """Know which models there are, and what room their images have.

        Images of models that are no longer among them go with their last lessee, and their files at once. So do
        those of checkpoints that were replaced in place, once the next image is there.

        Args:
            host: as before when None.
        """
        wanted = Wanted(tuple(requests), self._wanted.host if host is None else host)
        if wanted == self._wanted:
            return
        before = {request.checkpoint for request in self._wanted.requests}
        self._unwanted |= before
        self._unwanted -= {request.checkpoint for request in requests}
        self._wanted = wanted
        self._room.configure(wanted.host)

    async def preload(self, requests: Sequence[ImageRequest]) -> None:
        """Load what is not here, in the background, as far as there is room that nobody has to leave for it."""
        for request in requests:
            self._look_ups.submit(self._preload, request)

    async def release(self, key: ImageKey, lessee: str) -> bool:
        """End a lease, or what would become one. True when that was the last one and the image is gone from the store.

        Where Ray does not say who of the others lives, `expire` finds out.
        """
        self._images.withdraw(lessee, key)
        held = self._images.get(key)
        if held is None:
            return False
        self._images.end_leases(held, {lessee})
        return await self._drop_unless_leased(key, held)

    async def release_all(self, lessee: str) -> None:
        """End every lease of a replica whose worker has ended: only that knew which image it had."""
        self._images.withdraw(lessee)
        ended = [each for each in self._images.snapshot() if lessee in each[1].lessees]
        for _, held in ended:  # before its next worker can have leased one of them
            self._images.end_leases(held, {lessee})
        for key, held in ended:
            await self._drop_unless_leased(key, held)

    async def _drop_unless_leased(self, key: ImageKey, held: Held) -> bool:
        if before := frozenset(held.lessees):
            try:
                living = await asyncio.to_thread(alive)
            except Exception:
                logger.warning("image %s may be of no use any more", key, exc_info=True)
                self._given_back.add(key)
                return False
            # Those that came meanwhile may be younger than that list.
            self._images.end_leases(held, before - living)
        there = self._images.get(key)  # compressed meanwhile, maybe: the lessees are the same
        if held.lessees or there is None or there.lessees is not held.lessees:
            return False
        self._images.drop(key, there, "nobody holds a lease")
        return True

    async def expire(self) -> None:
        """Let go of the images that have had no lessee for their time, and of files. To be called now and then."""
        known = self._files_depend_on
        if known != self._tidied and (self._tidying is None or self._tidying.done()):
            self._tidying = self._look_ups.submit(self._tidy_files, self._wanted, known)
        before = {key: frozenset(held.lessees) for key, held in self._images.snapshot()}
        living = await asyncio.to_thread(alive)
        given_back, self._given_back = self._given_back, set()
        now_s, there = self._now(), self._images.snapshot()
        there.sort(key=lambda each: each[1].leased_s)
        latest = {held.request.checkpoint: key for key, held in there}
        for key, held in there:
            # Not of those that came meanwhile, who may be younger than that list.
            self._images.end_leases(held, before.get(key, frozenset()) - living)
            ttl_s = held.request.ttl_s
            if held.lessees:
                held.unused_since_s = now_s
            elif key in given_back:
                self._images.drop(key, held, "nobody holds a lease")
            elif held.request.checkpoint in self._unwanted:
                self._images.drop(key, held, "its model is no longer served")
            elif latest[held.request.checkpoint] != key:
                self._images.drop(key, held, "its checkpoint was replaced")
            elif ttl_s is not None and now_s - held.unused_since_s >= ttl_s:
                self._images.drop(key, held, f"unused for {ttl_s:g} s")

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
        try:
            await asyncio.to_thread(WeightImage(manifest, held.payloads, "image").verify)
        except WeightsCorrupted as exc:
            if self._images.get(key) is held:  # nobody else was first
                self._counts.corrupted += 1
                self._images.drop(key, held, str(exc))
            return True
        logger.warning("image %s is intact here; whoever read something else has to look", key)
        return False

    async def compress(self, key: ImageKey, worker: Any) -> bool:
        """Have an image compressed by a worker that looks at it, behind those who came before.

        Args:
            worker: see ActorCompressor.

        Returns:
            Whether the next `acquire` gets it so.
        """
        async with self._one_compresses:
            held = self._images.get(key)
            if held is None:
                return False
            if held.grant.manifest.compressed:
                return True
            try:
                compact = await asyncio.to_thread(self._compress, held, worker)
            except Exception as exc:  # noqa: BLE001  # whatever it was, the image is there as it was
                logger.info("image %s is not compressed now: %s: %s", key, type(exc).__name__, exc)
                return False
            is_new = self._images.replace(key, held, compact)
        if not is_new:
            return False
        if (files := self._room.files) is not None:
            await asyncio.to_thread(files.forget, key)  # it has the other bytes
        return True

    def _compress(self, held: Held, worker: Any) -> Published:
        key = held.grant.manifest.key
        with self._room.for_a_load(key, evicts=False) as make_room:
            return compressed(held, ActorCompressor(worker), make_room, self._images.recycled_bytes)

    async def lend(self, key: ImageKey) -> Manifest | None:
        """For another node's holder: what `segment` has; None if there is nothing.

        Never waits for a load: two holders would wait for each other.
        """
        held = self._images.get(key)
        return None if held is None else held.grant.manifest

    async def segment(self, key: ImageKey, index: int, digest: str) -> ByteArray:
        """For another node's holder: the bytes of one segment.

        Args:
            digest: as `lend` has told it.

        Raises:
            ImageMissing: the image has gone meanwhile, or was compressed.
        """
        held = self._images.get(key)
        if held is None or held.grant.manifest.digests[index] != digest:
            raise ImageMissing(f"image {key} is no longer here as it was lent")
        manifest, source = held.grant.manifest, held.segments[index]
        size = manifest.stored_sizes[index]
        self._counts.lent_bytes += size
        # Of the view, which keeps the bytes there until they have been sent.
        return source.view[source.payload_offset : source.payload_offset + size]

    async def counts(self) -> HolderCounts:
        sizes = [] if self._room.files is None else await asyncio.to_thread(self._room.files.sizes)
        return replace(self._counts, evictions=self._room.evictions, files=len(sizes))

    async def stats(self) -> list[HeldImage]:
        files, images = self._room.files, self._images.snapshot()
        on_disk = [False] * len(images)
        if files is not None:  # whose disk may take its time
            on_disk = await asyncio.to_thread(lambda: [files.has(key) for key, _ in images])
        return [
            HeldImage(
                key=str(key),
                bytes=held.size,
                segments=len(held.segments),
                load_s=held.grant.load_s,
                lessees=len(held.lessees),
                spilled=was_spilled([segment.ref for segment in held.segments]),
                origin=held.origin,
                on_disk=has_file,
                device_bytes=held.grant.manifest.layout.total_bytes,
            )
            for (key, held), has_file in zip(images, on_disk, strict=True)
        ]

    def _load_once(self, request: ImageRequest, key: ImageKey) -> "Future[None]":
        future = self._loading.get(key)
        if future is None or future.done():
            future = self._loading[key] = self._look_ups.submit(self._load, request, key, True)
            # Not by the load itself, which may be over before it stands there.
            future.add_done_callback(lambda _: self._loading.pop(key, None))
        return future

    def _preload(self, request: ImageRequest) -> None:
        """On a look-up thread. A failure is logged; the replica that needs the image gets its own."""
        try:
            self._load(request, None, False)
        except HostMemoryFull as exc:
            logger.info("%s is loaded when it is asked for: %s", request.model_id, exc)
        except ValueError as exc:  # what is wrong with the checkpoint
            logger.error("could not preload %s: %s", request.model_id, exc)
        except Exception:
            logger.exception("could not preload %s", request.model_id)

    def _load(self, request: ImageRequest, key: ImageKey | None, evicts: bool) -> None:
        """On a look-up thread."""
        checkpoint, found = _look_up(request)
        looked_up_s = self._now()
        if key is not None and key != found:
            raise _mismatch(key, found)
        with self._one_loads:
            held = self._images.get(found)  # a preload may have been first
            if held is None:
                held = self._obtain_in_time(request, checkpoint, found, evicts)
                # Not when the load has ended: meanwhile another may have come, of what replaced the checkpoint.
                held.leased_s = looked_up_s
                self._images.put(found, held)
            held.request = request

    def _obtain_in_time(
        self, request: ImageRequest, checkpoint: Path, key: ImageKey, evicts: bool
    ) -> Held:
        loading = start_apart(self._obtain, request, checkpoint, key, evicts)
        try:
            wait([loading], self._load_timeout_s)
            if not loading.done():  # should it ever come back, nobody has its image
                raise ImageMissing(unread(checkpoint, self._load_timeout_s))
            return loading.result()
        finally:
            del loading  # has the failure, which has this frame and what was reserved

    def _obtain(self, request: ImageRequest, checkpoint: Path, key: ImageKey, evicts: bool) -> Held:
        with self._room.for_a_load(key, evicts) as make_room:
            origin: Origin = "file"
            found = from_file(self._room, self._images, key, make_room)
            if found is None:
                origin = "node"
                found = from_peers(self._peers(), self._room, self._images, key, make_room)
            if found is None:
                origin = "disk"
                found = self._publish(request.model_id, checkpoint, key, make_room)
        grant, segments = found
        held = Held(grant, segments, origin, request, unused_since_s=self._now())
        self._count(origin, held.size)
        self._on_load(origin, held.size)
        return held

    def _count(self, origin: Origin, size: int) -> None:
        counts = self._counts
        match origin:
            case "disk":
                counts.disk_loads += 1
            case "file":
                counts.file_loads += 1
            case "node":
                counts.pulls += 1
                counts.pulled_bytes += size
            case _:
                assert_never(origin)

    @property
    def _files_depend_on(self) -> tuple[object, ...]:
        """Once it is another, there may be files that nobody wants: other models, other checkpoints, other files."""
        files, counts = self._room.files, self._counts
        written = 0 if files is None else files.written
        return self._wanted, counts.disk_loads + counts.pulls, written

    def _tidy_files(self, wanted: Wanted, known: tuple[object, ...]) -> None:
        """On a look-up thread: files of models that nobody wants any more go. Of no effect until all are known."""
        files = self._room.files
        try:
            if files is not None:
                keys = [_key_of(find_checkpoint(each.source), each) for each in wanted.requests]
                files.keep_only(keys)
        except CheckpointMissing:
            return  # it is being downloaded, say: whether a file is of it cannot be told
        except Exception:
            logger.exception("files that nobody needs cannot be looked for")
        self._tidied = known

    def _publish(
        self, model_id: str, checkpoint: Path, key: ImageKey, make_room: MakeRoom
    ) -> Published:
        started_s = time.monotonic()
        logger.info("load_model key:%s: loading %s from %s", key, model_id, checkpoint)
        dtype = packer.checkpoint_dtype(checkpoint, key.dtype)
        model = packer.load_reference(checkpoint, dtype)
        layout = packer.plan(model)
        make_room(layout.total_bytes)
        store_room().require(layout.total_bytes, self._images.recycled_bytes)
        segments = reserve_all([segment.size for segment in layout.segments])
        digests, checksums = packer.pack(model, layout, [s.payload.data for s in segments])
        packer.require_unchanged(checkpoint, key)
        load_s = time.monotonic() - started_s
        logger.info(
            "load_model key:%s: published %d tensors, %.2f GiB in %d segments, costed %.2f s",
            key,
            len(layout.tensors),
            layout.total_bytes / 2**30,
            len(segments),
            load_s,
        )
        return published(Manifest(key, layout, digests, checksums), segments, load_s)


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
    return checkpoint, _key_of(checkpoint, request)


def _key_of(checkpoint: Path, request: ImageRequest) -> ImageKey:
    return packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, request.dtype))


def _mismatch(asked: ImageKey, found: ImageKey) -> LayoutMismatch | ImageMissing:
    text = f"asked for image {asked}, this node's checkpoint makes {found}"
    if (asked.model, asked.revision) != (found.model, found.revision):
        return ImageMissing(text)
    return LayoutMismatch(text)
