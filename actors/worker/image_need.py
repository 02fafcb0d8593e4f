"""Whether a worker needs its image: brought for a wake, dropped behind a sleep, let go of when the holder asks."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from actors.holder.host_memory import ImageUse, Need
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.memory.driver import HostLink
from actors.worker.host_image import PreparedImage
from actors.worker.model_memory import ModelMemory


class ImageNeed:
    """What a worker's image is needed for, as holders are told. Of the worker's event loop.

    Attributes:
        need: to be set by who wakes and sleeps; `not_needed` ends it.
    """

    def __init__(
        self,
        memory: ModelMemory,
        take: Callable[[WeightImage], Awaitable[None]],
        exchange: Callable[[PreparedImage], Awaitable[HostLink | None]],
        drop: Callable[[], Awaitable[ImageKey | None]],
        reload: Callable[[], Awaitable[WeightImage]],
        release: Callable[[ImageKey], Awaitable[None]],
    ) -> None:
        """Needed, until somebody says otherwise.

        Args:
            memory: whose image it is.
            take: `HostImage.take`, where memory may be moved.
            exchange: `ModelMemory.exchange`, likewise.
            drop: `HostImage.drop`, likewise.
            reload: gets the image again after it was dropped.
            release: told when a level 2 sleep drops it, or has dropped it while it was got again.
        """
        self.need = Need.CHANGING
        self._needed_s = 0.0  # when it was last needed, once it is not
        self._memory = memory
        self._take = take
        self._exchange = exchange
        self._drop = drop
        self._reload = reload
        self._release = release
        self._lock = asyncio.Lock()  # around all that brings the image or drops it

    def not_needed(self) -> None:
        self.need, self._needed_s = Need.NONE, time.monotonic()

    def use(self, key: ImageKey) -> ImageUse | None:
        """What it needs the holder's image of that key for; None if it does not look at it."""
        image = self._memory.image
        if self._is_needed():
            return ImageUse(self.need)
        if image is None or image.origin != "image" or image.manifest.key != key:
            return None
        return ImageUse(Need.NONE, time.monotonic() - self._needed_s)

    async def bring(self) -> bool:
        """For a wake; whether it was not there.

        Raises:
            Unavailable: it cannot be had now.
        """
        async with self._lock:
            if self._memory.image is not None:
                return False
            await self._take(await self._reload())
            return True

    async def renew(self) -> bool:
        """Look at the image as the holder has it now; False if this is no time for it.

        Raises:
            Unavailable: it cannot be had now.
            Exception: it cannot be made ready.
        """
        before = self._memory.image
        if before is None or self.need is Need.CHANGING:
            return False
        key = before.manifest.key
        try:
            image = await self._reload()
            key = image.manifest.key
            if image.origin != "image":
                return False  # the holder did not answer; a copy of its own is worth less than what it looks at
            prepared = await asyncio.to_thread(self._memory.host.prepare, image)
            async with self._lock:
                left = await self._exchange(prepared)
        finally:
            for each in {before.manifest.key, key}:
                await self._end_lease_unless_used(each)
        # Beside the event loop, and beside a wake: to unpin 15 GB takes a while.
        if left is not None:
            await asyncio.to_thread(left.close)
        return left is not prepared.link

    async def drop_asleep(self, level: int) -> None:
        """Behind a sleep, if it is not to be kept."""
        async with self._lock:
            image = self._memory.image
            if image is None or (level == 1 and image.is_kept_asleep):
                return
            key = await self._drop()
            if level == 2 and key is not None:
                await self._release(key)

    async def let_go(self, key: ImageKey) -> bool:
        """For the holder, which wants its room: drop the image, unless that is needed; the next wake gets it again.

        Returns:
            Whether it no longer looks at the image.
        """
        if self._is_needed():
            return False  # at once, whatever a wake is waiting for
        async with self._lock:
            if self.use(key) is None:
                return True
            if self._is_needed():
                return False
            return await self._drop() is not None

    async def _end_lease_unless_used(self, key: ImageKey) -> None:
        """Behind a lease beside which a sleep may have dropped the image, and ended the one before."""
        async with self._lock:
            image = self._memory.image
            if image is None or image.manifest.key != key:
                await self._release(key)

    def _is_needed(self) -> bool:
        return self.need is not Need.NONE
