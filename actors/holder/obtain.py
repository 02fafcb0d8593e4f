"""How a replica gets its image: from the holder's object store, or else from disk.

The fast path may fail in any way without taking the replica with it: the fallback loads the
checkpoint into this process, says so, and tells where the image came from. Nobody waits for a holder that is
not there.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from actors.errors import (
    HolderLost,
    HostMemoryFull,
    ImageMissing,
    LayoutMismatch,
    StoreFull,
    WeightsCorrupted,
)
from actors.holder.files import ImageFiles
from actors.holder.held import ImageGrant, ImageRequest
from actors.holder.holder import LOAD_TIMEOUT_S, unread
from actors.holder.sources import ImageSource
from actors.image import packer
from actors.image.image import WeightImage, private_buffers
from actors.image.layout import ImageKey, Manifest
from actors.threads import start_apart
from actors.waits import at_most

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class HolderSilent(HolderLost):
    """It did not answer in time."""


_SOURCES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], ImageSource], ...] = (
    (ImageMissing, ImageSource.MISSING_KEY),
    (LayoutMismatch, ImageSource.LAYOUT_MISMATCH),
    (HostMemoryFull, ImageSource.OVER_BUDGET),
    (StoreFull, ImageSource.STORE_FULL),
    (WeightsCorrupted, ImageSource.DIGEST_MISMATCH),
    ((HolderSilent, TimeoutError, GetTimeoutError), ImageSource.TIMEOUT),
    ((HolderLost, RayActorError, ObjectLostError), ImageSource.HOLDER_GONE),
)


def classify_failure(failure: Exception) -> ImageSource:
    """How a failure of the fast path is counted as.

    Ray raises what the holder raised in a class made on the fly, which inherits from its class.
    """
    return next(
        (source for kind, source in _SOURCES if isinstance(failure, kind)), ImageSource.ERROR
    )


def ignore_source(source: ImageSource) -> None:
    """For callers who do not count."""


class HolderClient(Protocol):
    """A WeightHolder somewhere else."""

    async def wait_while_starting(self) -> None:
        """Return once the holder is not, or no longer, being started for the first time."""

    async def ping(self) -> None: ...
    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant: ...
    async def release(self, key: ImageKey, lessee: str) -> bool: ...
    async def recheck(self, key: ImageKey) -> bool: ...
    async def compress(self, key: ImageKey, worker: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class FastLoad:
    """Obtains the image of one checkpoint for one replica, any number of times."""

    holder: HolderClient | None
    request: ImageRequest
    checkpoint: Path
    lessee: str
    worker: Any = None  # the actor that the holder may ask to let go of the image
    start_timeout_s: float = 120.0  # for a holder that is being deployed together with us
    ping_timeout_s: float = 5.0
    load_timeout_s: float = LOAD_TIMEOUT_S  # by the holder
    open_timeout_s: float = 300.0  # from another node the bytes come over the network
    recheck_timeout_s: float = 20.0  # hashing 100 GB takes 3 s; Serve gives a health check 30 s
    on_obtained: Callable[[ImageSource], None] = ignore_source  # called once for each `obtain`

    async def obtain(self) -> WeightImage:
        """The image, from the object store where possible.

        Raises:
            ImageMissing: the checkpoint's file system does not answer, or its files change.
            Exception: whatever else loading from disk raises; the fast path's failures are logged.
        """
        key = await self._read(self._key)
        logger.info("load_model key:%s", key)
        image, source, file = await self._fast(key)
        self.on_obtained(source)
        if image is None and file is not None:
            image = await self._read(load_from_file, file, key)
        if image is None:
            image = await self._read(load_from_disk, self.checkpoint, key)
        image.is_kept_asleep = source is not ImageSource.OVER_BUDGET
        return image

    def _key(self) -> ImageKey:
        dtype = packer.checkpoint_dtype(self.checkpoint, self.request.dtype)
        return packer.image_key(self.checkpoint, dtype)

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What reads the checkpoint, beside the event loop and for a limited time."""
        too_long = ImageMissing(unread(self.checkpoint, LOAD_TIMEOUT_S))
        async with at_most(LOAD_TIMEOUT_S, too_long):
            return await asyncio.wrap_future(start_apart(work, *args, **kwargs))

    async def release(self, key: ImageKey) -> None:
        """Tell the holder that this replica no longer looks at the image."""
        if self.holder is None:
            return
        try:
            async with asyncio.timeout(self.ping_timeout_s):
                await self.holder.release(key, self.lessee)
        except Exception as exc:  # noqa: BLE001  # the views are gone; the lease ends with us
            logger.warning("could not release image %s: %s: %s", key, type(exc).__name__, exc)

    async def compress(self, key: ImageKey) -> bool:
        """Have the holder's image compressed by this worker; whether the next `obtain` gets it so."""
        if self.holder is None or self.worker is None:
            return False
        try:
            return await self.holder.compress(key, self.worker)
        except Exception as exc:  # noqa: BLE001  # the image is there as it was
            logger.warning("image %s is not compressed: %s: %s", key, type(exc).__name__, exc)
            return False

    async def _fast(self, key: ImageKey) -> tuple[WeightImage | None, ImageSource, Path | None]:
        """The image, or why there is none, and then a file that has it packed."""
        if self.holder is None:
            return None, ImageSource.NO_HOLDER, None
        try:
            image = await self._from_store(self.holder, key)
        except Exception as exc:  # noqa: BLE001  # whatever it was, loading from disk is left
            source, cause = classify_failure(exc), _cause(exc)
            text = " ".join(str(cause).split())
            kind = type(cause).__name__
            logger.warning("Fallback to load from disk. error:%s: %s (%s)", kind, text, source)
            file = exc.file if isinstance(exc, HostMemoryFull) else None
            return None, source, None if file is None else Path(file)
        return image, ImageSource.IMAGE, None

    async def _is_dropped(
        self, holder: HolderClient, key: ImageKey, found: WeightsCorrupted
    ) -> bool:
        """Whether the holder, made to look at an image that differs here, had it wrong and dropped it."""
        async with _at_most(self.recheck_timeout_s, "image not rechecked within"):
            dropped = await holder.recheck(key)
        logger.warning(
            "image %s differs here (%s): %s",
            key,
            found,
            "the holder had it wrong, and dropped it" if dropped else "the holder's is intact",
        )
        return dropped

    async def _from_store(self, holder: HolderClient, key: ImageKey) -> WeightImage:
        """Or no lease is left."""
        started_s = time.monotonic()
        grant = await self._granted(holder, key)
        try:
            try:
                image = await asyncio.to_thread(_open, grant, self.open_timeout_s)
            except WeightsCorrupted as exc:
                if not await self._is_dropped(holder, key, exc):
                    raise
                grant = await self._granted(holder, key)
                image = await asyncio.to_thread(_open, grant, self.open_timeout_s)
        except Exception:
            await self.release(key)
            raise
        logger.info(
            "Loaded %d tensors from the object store, costed %.3f s (%.2f GiB; loading took %.2f s)",
            len(image.layout.tensors),
            time.monotonic() - started_s,
            image.manifest.stored_bytes / 2**30,
            grant.load_s,
        )
        return image

    async def _granted(self, holder: HolderClient, key: ImageKey) -> ImageGrant:
        async with _at_most(self.start_timeout_s, "still being started after"):
            await holder.wait_while_starting()
        async with _at_most(self.ping_timeout_s, "no answer within"):
            await holder.ping()
        try:
            async with _at_most(self.load_timeout_s, "no image within"):
                return await holder.acquire(self.request, key, self.lessee, self.worker)
        except HolderSilent:
            await self.release(key)  # which may still be loaded
            raise


def _cause(failure: Exception) -> Exception:
    """What the holder raised; Ray's own error is a traceback as a text."""
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    return cause if isinstance(cause, Exception) else failure


def load_from_file(file: Path, key: ImageKey) -> WeightImage | None:
    """Read the holder's file of an image into private memory; None if it is of no use."""
    started_s = time.monotonic()
    files = ImageFiles(file.parent)
    found = files.find(key)
    if found is None:
        return None
    buffers = private_buffers(found.stored_sizes)
    if not files.read(found, buffers):
        return None
    logger.info(
        "Loaded %d tensors from %s, costed %.3f s",
        len(found.layout.tensors),
        file,
        time.monotonic() - started_s,
    )
    return WeightImage(found, buffers, origin="disk")


def load_from_disk(checkpoint: Path, key: ImageKey) -> WeightImage:
    """Pack the checkpoint into private memory of this process, page-aligned.

    Raises:
        ImageMissing: its files changed meanwhile.
    """
    started_s = time.monotonic()
    model = packer.load_reference(checkpoint, packer.checkpoint_dtype(checkpoint, key.dtype))
    layout = packer.plan(model)
    buffers = private_buffers([segment.size for segment in layout.segments])
    digests, checksums = packer.pack(model, layout, buffers)
    packer.require_unchanged(checkpoint, key)
    manifest = Manifest(key, layout, digests, checksums)
    logger.info(
        "Loaded %d tensors from disk, costed %.3f s",
        len(layout.tensors),
        time.monotonic() - started_s,
    )
    return WeightImage(manifest, buffers, origin="disk")


def _at_most(seconds: float, what: str) -> AbstractAsyncContextManager[None]:
    """Raises HolderSilent, which says what was waited for; a TimeoutError says nothing."""
    return at_most(seconds, HolderSilent(f"{what} {seconds:g} s"))


def _open(grant: ImageGrant, timeout_s: float) -> WeightImage:
    """Zero-copy views of the published segments, verified once.

    Raises:
        WeightsCorrupted: they are not what was packed.
        Exception: Ray's, when they cannot be had; with the holder they are gone.
    """
    objects = ray.get(list(grant.refs), timeout=timeout_s)
    sizes = grant.manifest.stored_sizes
    buffers = [
        whole.data[offset : offset + size]
        for whole, offset, size in zip(objects, grant.offsets, sizes, strict=True)
    ]
    image = WeightImage(grant.manifest, buffers, origin="image")
    image.verify()
    return image
