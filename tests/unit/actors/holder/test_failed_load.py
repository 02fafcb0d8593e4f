"""What a load that failed had reserved is free again once nobody has the failure any more."""

import asyncio
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.checkpoints.source import ModelSource
from actors.errors import Unavailable
from actors.holder import compression
from actors.holder.compression import compressed
from actors.holder.held import ImageRequest
from actors.holder.holder import WeightHolder
from actors.holder.obtain import load_from_disk
from actors.image import packer
from tests.let_go import is_let_go

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


class Reserved:
    """In place of an object in the store."""

    def __init__(self, size: int, refs: "list[weakref.ref[Reserved]]") -> None:
        self.payload = self.view = np.empty(size, np.uint8)
        refs.append(weakref.ref(self))


Refs = list[weakref.ref[Reserved]]


def test_of_a_checkpoint(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs: Refs = []

    def publish(*_: object) -> None:
        segments = [Reserved(1, refs) for _ in range(4)]
        raise RuntimeError(f"packing {len(segments)} failed")

    monkeypatch.setattr(WeightHolder, "_publish", publish)
    request = ImageRequest("m", ModelSource(id=str(tiny_checkpoint)), "auto")
    key = packer.image_key(tiny_checkpoint, packer.checkpoint_dtype(tiny_checkpoint, "auto"))

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="packing 4 failed"):
            await WeightHolder().acquire(request, key, "me")

    asyncio.run(scenario())
    assert is_let_go(refs)


def test_of_a_compressed_copy(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs: Refs = []

    class Busy:
        def segment(self, *_: object) -> Any:
            if len(refs) > 1:
                raise Unavailable("this worker had other work for 60 s")
            return 1, ()

    key = packer.image_key(tiny_checkpoint, packer.checkpoint_dtype(tiny_checkpoint, "auto"))
    image = load_from_disk(tiny_checkpoint, key)
    held: Any = SimpleNamespace(
        grant=SimpleNamespace(manifest=image.manifest, load_s=0.0), segments=image.segments
    )
    monkeypatch.setattr(compression, "reserve", lambda size: Reserved(size, refs))
    monkeypatch.setattr(compression, "_fitting", lambda segment, size: segment)
    monkeypatch.setattr(compression, "COMPRESSED_SHARES", {key.dtype: 0.6})
    monkeypatch.setattr(compression, "store_room", lambda: SimpleNamespace(require=lambda *_: None))
    with pytest.raises(Unavailable):
        compressed(held, Busy(), lambda size: None, 0)
    assert is_let_go(refs)
