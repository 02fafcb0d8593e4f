"""A compressed image from the holder to a model that answers, on a real object store."""

from pathlib import Path

import pytest
import torch

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.source import ModelSource
from actors.image.held import ImageRequest
from actors.image.holder import WeightHolder
from actors.image.obtain import load_from_disk
from actors.image.packer import image_key
from tests.integration.holder_harness import STORE, run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.parametrize("ray_store", [STORE], indirect=True),
    pytest.mark.usefixtures("ray_store"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("demo") / "demo", "demo", dtype="bfloat16")


def test_holder_publishes_two_thirds_and_says_what_they_are(checkpoint: Path) -> None:
    key = image_key(checkpoint, torch.bfloat16)
    plain = load_from_disk(checkpoint, key)

    async def scenario() -> None:
        holder = WeightHolder()
        request = ImageRequest("demo", ModelSource(id=str(checkpoint)), "auto", compresses=True)
        grant = await holder.acquire(request, key, "me")
        manifest = grant.manifest
        assert manifest.stored_bytes < 0.7 * plain.layout.total_bytes
        assert manifest.checksums == plain.manifest.checksums
        (held,) = await holder.stats()
        assert held.bytes == manifest.stored_bytes
        assert not await holder.recheck(key)

    run(scenario)
