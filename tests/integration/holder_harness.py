"""A WeightHolder in an actor, whose loads a test holds up, and what replicas ask it with."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from actors.holder import HeldImage, ImageGrant, ImageRequest, WeightHolder
from actors.weights import packer
from actors.weights.fastload import FastLoad
from actors.weights.image import WeightImage
from actors.weights.layout import ImageKey
from actors.weights.source import ModelSource

MIB = 2**20
STORE = 160 * MIB


class GatedHolder(WeightHolder):
    """A holder whose next load waits until the gate opens."""

    def __init__(self, open_at_once: bool = True) -> None:
        super().__init__()
        self._gate = threading.Event()
        self._begun = threading.Event()
        self._loads = 0
        if open_at_once:
            self._gate.set()

    async def wait_until_started(self) -> None: ...

    async def open_gate(self) -> None:
        self._gate.set()

    async def wait_until_loading(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    async def loads(self) -> int:
        """How often it has read a checkpoint."""
        return self._loads

    async def change_a_byte(self) -> None:
        """Of what has been published, the last."""
        (held,) = self._images.values()
        held.segments[-1].payload[-1] ^= 1

    def _publish(self, *args: object):  # type: ignore[no-untyped-def]
        self._loads += 1
        self._begun.set()
        self._gate.wait()
        return super()._publish(*args)  # type: ignore[arg-type]


class ActorHolder:
    """HolderClient over a plain actor handle."""

    def __init__(self, open_at_once: bool = True, **options: Any) -> None:
        self.actor = ray.remote(GatedHolder).options(**options).remote(open_at_once)

    async def wait_while_starting(self) -> None:
        await self.actor.wait_until_started.remote()

    async def ping(self) -> None:
        await self.actor.ping.remote()

    async def acquire(self, request: ImageRequest, key: ImageKey, lessee: str) -> ImageGrant:
        return await self.actor.acquire.remote(request, key, lessee)

    async def release(self, key: ImageKey, lessee: str) -> bool:
        return await self.actor.release.remote(key, lessee)

    async def stats(self) -> list[HeldImage]:
        return await self.actor.stats.remote()

    def kill(self) -> None:
        ray.kill(self.actor)


def image_key(checkpoint: Path) -> ImageKey:
    return packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))


def image_request(checkpoint: Path) -> ImageRequest:
    return ImageRequest("demo", ModelSource(id=str(checkpoint)), "auto")


def fast_load(holder: ActorHolder | None, checkpoint: Path, **options: float) -> FastLoad:
    return FastLoad(holder, image_request(checkpoint), checkpoint, "test", **options)  # type: ignore[arg-type]


def content(image: WeightImage) -> list[bytes]:
    return [bytes(image.segment(i)) for i in range(len(image.layout.segments))]


def run(scenario: Callable[[], object]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()  # type: ignore[misc]

    asyncio.run(bounded())
