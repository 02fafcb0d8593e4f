"""A worker's image, compressed with its device in quiet periods: the holder keeps it so, and wakes copy less."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from actors.errors import Unavailable
from actors.image.compressing import compress_segment, try_parts
from actors.image.config import MOST_STORED, Compression
from actors.image.layout import CompressedSegment, ImageKey
from actors.image.store import ByteArray, map_pages
from actors.worker.image_need import ImageNeed
from actors.worker.kept_off import KeptOff
from actors.worker.lull import QUIET_S
from actors.worker.model_memory import ModelMemory

logger = logging.getLogger(__name__)

_LOOK_FIRST_S = 2.0
# The store may be short of room, requests may not have stopped, or the image be another since a level 2 sleep.
_LOOK_AGAIN_S = 60.0
# Of the holder's calls, for those who are served and for a deep sleep, since anything came of them.
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.05
# Compressing pays by so many wakes at the latest.
_WAKES = 1000


class ImageCompression(KeptOff):
    """Decides whether that pays, computes the segments when the holder asks, and takes what came of it.

    Requests feel it a little, as they do a compilation, so each part waits for a moment without any. Who wants the
    device left alone keeps it off.
    """

    def __init__(
        self,
        memory: ModelMemory,
        need: ImageNeed,
        trim: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        """Do nothing yet.

        Args:
            need: of the image.
            trim: gives back what torch keeps of the device afterwards.
            is_busy: whether the engine has anything to do.
        """
        super().__init__()
        self._memory = memory
        self._need = need
        self._trim = trim
        self._is_busy = is_busy
        self._closed = threading.Event()
        self._one = threading.Lock()  # segment after the other
        self._progress_s = 0.0  # when a part was done last, or asked for
        self._stream = None
        if memory.device.type == "cuda":
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    async def run(self, how: Compression, compress: Callable[[ImageKey], Awaitable[bool]]) -> None:
        """Have every image that comes compressed; return if that does not pay. To be cancelled.

        Args:
            compress: has the holder do it, with `segment`; whether it has.
        """
        if how == "off" or (how == "auto" and self._memory.device.type == "cpu"):
            return
        pays = True if how == "on" else None
        while True:
            await self._quiet()
            # Not the image: one that is let go of while this waits would stay in the store.
            key, wait_s = self._key(), _LOOK_AGAIN_S
            if key is not None:
                try:
                    if pays is None:
                        pays = await asyncio.to_thread(self._does_it_pay)
                    if pays is False:
                        return
                    if pays:
                        await self._have_compressed(key, compress)
                    else:  # there was no wake yet
                        wait_s = _LOOK_FIRST_S
                except Exception:
                    logger.exception("image %s stays as it is for now", key)
            await asyncio.sleep(wait_s)

    def segment(self, key: ImageKey, index: int, out: ByteArray) -> CompressedSegment | None:
        """For the holder; see `compress_segment`. Blocks: not for an event loop.

        Raises:
            Unavailable: requests do not stop, or the image is not here any more.
        """
        image = self._memory.image
        if image is None or image.manifest.key != key or image.manifest.compressed:
            raise Unavailable(f"image {key} is not here as it was packed")
        payload, device = image.segment(index), self._memory.device
        self._progress_s = time.monotonic()
        map_pages(out)  # while others are computed
        with self._one:
            return compress_segment(image.layout, index, payload, device, out, self._part)

    def close(self) -> None:
        """Have nobody wait for a quiet moment any more."""
        self._closed.set()

    def _key(self) -> ImageKey | None:
        """Of the image that there is, if it can be compressed.

        Whoever has a copy of its own has it for want of room, for as long as it is awake.
        """
        image = self._memory.image
        if image is None or image.origin != "image" or image.manifest.compressed:
            return None
        return image.manifest.key

    async def _quiet(self) -> None:
        quiet_since_s = time.monotonic()
        while (busy := self._is_busy()) or time.monotonic() < quiet_since_s + QUIET_S:
            if busy:
                quiet_since_s = time.monotonic()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _have_compressed(
        self, key: ImageKey, compress: Callable[[ImageKey], Awaitable[bool]]
    ) -> None:
        try:
            if await compress(key):
                await self._renew()
        finally:
            self._trim()

    async def _renew(self) -> None:
        """Unless the process is suspended, and then at another time: whatever calls the driver waits for its end."""
        with self.kept_off() as is_off:
            if is_off:
                await self._need.renew()

    def _does_it_pay(self) -> bool | None:
        """None: it cannot be told yet."""
        image, transfer = self._memory.image, self._memory.last_transfer
        if image is None or transfer is None or not transfer.gb_per_s:
            return None  # how fast a wake's copies are
        self._progress_s = time.monotonic()
        sample = try_parts(image, self._memory.device, self._part)
        spared, takes_s = sample.size - sample.stored, sample.seconds
        spared_s = spared / transfer.gb_per_s / 1e9
        key, left = image.manifest.key, 100 * (1 - spared / image.layout.total_bytes)
        if sample.stored >= MOST_STORED * sample.size or takes_s > _WAKES * spared_s:
            logger.info(
                "image %s is kept as it is: compressed it would have %.0f %% of its bytes, for %.1f s of work",
                key,
                left,
                takes_s,
            )
            return False
        logger.info(
            "image %s is compressed to %.0f %% of its bytes, which spares each wake %.0f ms and takes %.1f s once",
            key,
            left,
            1e3 * spared_s,
            takes_s,
        )
        return True

    @contextmanager
    def _part(self) -> Iterator[None]:
        self._await_quiet()
        if not self._working.acquire(timeout=max(0.0, self._limit_s - time.monotonic())):
            raise Unavailable("this worker's process is suspended")
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                yield
        finally:
            self._working.release()
        self._progress_s = time.monotonic()

    @property
    def _limit_s(self) -> float:
        return self._progress_s + _PATIENCE_S

    def _await_quiet(self) -> None:
        while time.monotonic() < self._limit_s:
            if not self._is_busy():
                return
            if self._closed.wait(_LOOK_EVERY_S):
                raise Unavailable("the model is shut down")
        raise Unavailable(f"this worker had other work for {_PATIENCE_S:g} s")
