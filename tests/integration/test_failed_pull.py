"""An image that another node cannot give to its end: what came of it leaves room for the checkpoint's."""

import time
from pathlib import Path

import numpy as np
import pytest

from actors.holder.holder import WeightHolder
from actors.holder.obtain import load_from_disk
from actors.image.image import WeightImage
from actors.image.layout import ImageKey, Manifest
from actors.image.store import ByteArray, store_room
from tests.integration.holder_harness import image_key, image_request, run

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("local_ray")]


class GoneAtTheEnd:
    """A peer whose last segment never comes."""

    name = "far"

    def __init__(self, image: WeightImage) -> None:
        self._image = image
        self._free_before = store_room().available

    def lend(self, key: ImageKey) -> Manifest:
        return self._image.manifest

    def segment(self, key: ImageKey, index: int, digest: str) -> ByteArray:
        if index == len(self._image.segments) - 1:
            while store_room().available >= self._free_before:  # Ray tells it a moment later
                time.sleep(0.01)
            raise ConnectionError("the node is gone")
        return np.frombuffer(self._image.segments[index], np.uint8)

    def recheck(self, key: ImageKey) -> bool:
        return False


@pytest.mark.usefixtures("no_garbage_collector")
def test_what_came_of_it_is_free_before_the_checkpoint_is_read(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, key = image_request(tiny_checkpoint), image_key(tiny_checkpoint)
    peer, free = GoneAtTheEnd(load_from_disk(tiny_checkpoint, key)), []
    publish = WeightHolder._publish

    def free_first(*args: object):  # type: ignore[no-untyped-def]
        free.append(store_room().available)
        return publish(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightHolder, "_publish", free_first)

    async def scenario() -> None:
        holder, before = WeightHolder(peers=lambda: [peer]), store_room().available
        await holder.acquire(request, key, "me")
        assert [held.origin for held in await holder.stats()] == ["disk"]
        assert free == [before]

    run(scenario)
