"""A checkpoint whose files are replaced while they are read makes no image: it could be of both."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.checkpoints.source import ModelSource
from actors.errors import ImageMissing
from actors.holder import holder as module
from actors.holder.held import ImageRequest
from actors.holder.holder import WeightHolder
from actors.holder.obtain import FastLoad
from actors.image import packer


class InMemory:
    """A segment in place of one in the store."""

    def __init__(self, size: int) -> None:
        self.payload = np.empty(size, np.uint8)


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its weights are another's once they have been packed."""
    copied = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copied"))
    pack = packer.pack

    def replaced(model: Any, layout: Any, targets: Sequence[memoryview]) -> Any:
        found = pack(model, layout, targets)
        weights = copied / "model.safetensors"
        stat = weights.stat()
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        return found

    monkeypatch.setattr(packer, "pack", replaced)
    return copied


def test_in_the_memory_of_a_replica(checkpoint: Path) -> None:
    request = ImageRequest("m", ModelSource(id=str(checkpoint)), "auto")
    with pytest.raises(ImageMissing, match=r"files of .*/copied changed while they were read"):
        asyncio.run(FastLoad(None, request, checkpoint, "me").obtain())


def test_in_the_holder_s(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reserve_all", lambda sizes: [InMemory(size) for size in sizes])
    room = SimpleNamespace(available=2**30, require=lambda *_: None)
    monkeypatch.setattr(module, "store_room", lambda: room)
    request = ImageRequest("m", ModelSource(id=str(checkpoint)), "auto")
    key = packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))
    holder = WeightHolder()
    with pytest.raises(ImageMissing, match="changed while they were read"):
        asyncio.run(holder.acquire(request, key, "me"))
    assert not holder._images.snapshot()
