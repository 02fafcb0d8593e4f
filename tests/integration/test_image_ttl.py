"""Images that nobody uses any more leave the object store, after their time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.checkpoints.source import ModelSource
from actors.holder.held import ImageRequest
from actors.holder.holder import WeightHolder
from actors.image import packer

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("local_ray")]

TTL_S = 100.0


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@ray.remote(num_cpus=0)
class Lessee:
    """An actor that lives until it is killed."""

    def ping(self) -> None: ...


def lessee(name: str) -> Any:
    actor = Lessee.options(name=name).remote()  # type: ignore[attr-defined]
    ray.get(actor.ping.remote())
    return actor


def kill(actor: Any, name: str) -> None:
    ray.kill(actor)
    while name in {known["name"] for known in ray.util.list_named_actors(all_namespaces=True)}:
        pass


@pytest.mark.parametrize("ttl_s", [TTL_S, None])
def test_image_goes_when_it_was_unused_for_its_time(
    tiny_checkpoint: Path, ttl_s: float | None
) -> None:
    clock = Clock()
    source = ModelSource(id=str(tiny_checkpoint))
    request = ImageRequest("tiny", source, "auto", ttl_s)
    key = packer.image_key(tiny_checkpoint, packer.checkpoint_dtype(tiny_checkpoint, "auto"))

    async def scenario() -> None:
        holder = WeightHolder(now=clock)
        actor = lessee("somebody")
        await holder.acquire(request, key, "somebody")

        async def images_after(seconds: float) -> int:
            clock.now_s += seconds
            await holder.expire()
            return len(await holder.stats())

        assert await images_after(10 * TTL_S) == 1, "it is in use"
        kill(actor, "somebody")
        assert await images_after(TTL_S - 1) == 1
        successor = lessee("another")
        await holder.acquire(request, key, "another")
        assert await images_after(TTL_S - 1) == 1, "it is in use again"
        kill(successor, "another")
        assert await images_after(TTL_S - 1) == 1, "time begins anew"
        assert await images_after(1) == (0 if ttl_s is not None else 1)
        await holder.acquire(request, key, "a third")  # loaded anew, or still there
        assert len(await holder.stats()) == 1

    asyncio.run(scenario())


def test_image_of_a_model_that_is_gone_goes_with_its_last_lessee(tiny_checkpoint: Path) -> None:
    request = ImageRequest("tiny", ModelSource(id=str(tiny_checkpoint)), "auto")
    same = ImageRequest("other name", request.source, request.dtype)
    key = packer.image_key(tiny_checkpoint, packer.checkpoint_dtype(tiny_checkpoint, "auto"))

    async def scenario() -> None:
        holder = WeightHolder()
        await holder.keep([request])
        actor = lessee("the last")
        await holder.acquire(request, key, "the last")

        async def images_after(*requests: ImageRequest) -> int:
            await holder.keep(requests)
            await holder.expire()
            return len(await holder.stats())

        assert await images_after() == 1, "it is in use"
        kill(actor, "the last")
        assert await images_after(same) == 1, "another model is made of it"
        assert await images_after() == 0

    asyncio.run(scenario())
