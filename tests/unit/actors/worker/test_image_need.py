"""When a worker has its image, and when its replica has a lease."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import DeviceMemoryError, LayoutMismatch, Unavailable
from actors.holder.host_memory import Need
from actors.worker.image_need import ImageNeed


class Bench:
    """A worker that looks at an image, among fakes; `gate` is before what it gets again."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.image: Any = self._image()
        self.host = self
        self.leases = {"key"}
        self.origin = "image"  # of what it gets again
        self.key = "key"  # likewise
        self.error: Exception | None = None  # of what makes that ready, or gets it
        memory: Any = self
        self.need = ImageNeed(
            memory, self._take, self._exchange, self._drop, self._reload, self._release
        )

    def prepare(self, image: Any) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(image=image, link=SimpleNamespace(close=lambda: None))

    async def _take(self, image: Any) -> None:
        self.image = image

    async def _exchange(self, prepared: Any) -> Any:
        if self.image is None:
            return prepared.link
        self.image = prepared.image
        return None

    async def _drop(self) -> Any:
        image, self.image = self.image, None
        return image.manifest.key

    async def _reload(self) -> Any:
        await self.gate.wait()
        if self.origin == "image":
            self.leases.add(self.key)
        if isinstance(self.error, Unavailable):
            raise self.error
        return self._image(self.origin, self.key)

    async def _release(self, key: Any) -> None:
        self.leases.remove(key)

    @staticmethod
    def _image(origin: str = "image", key: str = "key") -> Any:
        manifest = SimpleNamespace(key=key)
        return SimpleNamespace(origin=origin, is_kept_asleep=True, manifest=manifest)


@pytest.mark.parametrize("level", [1, 2])
def test_image_that_is_renewed_beside_a_sleep_leaves_no_lease_without_it(level: int) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.need.need = Need.AWAKE
        renewing = asyncio.create_task(bench.need.renew())
        await asyncio.sleep(0)
        bench.need.need = Need.CHANGING
        await bench.need.drop_asleep(level)
        bench.need.not_needed()
        bench.gate.set()
        assert await renewing == (level == 1)
        assert bench.leases == ({"key"} if bench.image else set())
        assert (bench.image is None) == (level == 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [DeviceMemoryError("refused"), Unavailable("not now")])
@pytest.mark.parametrize("level", [None, 2])
def test_image_that_cannot_be_renewed_is_told_and_leaves_no_lease_behind_a_sleep(
    error: Exception, level: int | None
) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.need.need = Need.AWAKE
        bench.error = error
        renewing = asyncio.create_task(bench.need.renew())
        await asyncio.sleep(0)
        if level is not None:
            bench.need.need = Need.CHANGING
            await bench.need.drop_asleep(level)
            bench.need.not_needed()
        bench.gate.set()
        with pytest.raises(type(error)):
            await renewing
        assert bench.leases == ({"key"} if bench.image else set())

    asyncio.run(scenario())


def test_image_of_another_checkpoint_is_not_leased_beside_the_one_that_is_used() -> None:
    """It was replaced in place meanwhile."""

    async def scenario() -> None:
        bench = Bench()
        bench.need.need = Need.AWAKE
        bench.key, bench.error = "another", LayoutMismatch("it holds other weights")
        bench.gate.set()
        with pytest.raises(LayoutMismatch):
            await bench.need.renew()
        assert bench.leases == {"key"}

    asyncio.run(scenario())


def test_image_of_a_checkpoint_that_was_replaced_by_the_same_takes_over_the_lease() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.need.need = Need.AWAKE
        bench.key = "another"
        bench.gate.set()
        assert await bench.need.renew()
        assert bench.leases == {"another"}

    asyncio.run(scenario())


def test_copy_of_its_own_does_not_take_the_place_of_the_image_that_it_looks_at() -> None:
    """As where the holder does not answer: the checkpoint is read instead."""

    async def scenario() -> None:
        bench = Bench()
        bench.need.need = Need.AWAKE
        bench.origin = "disk"
        bench.gate.set()
        before = bench.image
        assert not await bench.need.renew()
        assert bench.image is before

    asyncio.run(scenario())
