"""A wake from a compressed image: fewer bytes cross the link, the same ones are there."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.checkpoints.making import write_checkpoint
from actors.errors import LayoutMismatch, WeightsCorrupted
from actors.holder.obtain import load_from_disk
from actors.image.attach import build_on_meta
from actors.image.compressing import compressed_copy
from actors.image.image import WeightImage, private_buffers
from actors.image.layout import FLOAT_TYPES, FloatType
from actors.image.packer import checkpoint_dtype, image_key
from actors.worker.model_memory import ModelMemory

PART_BYTES = 2**19  # several to a segment
SHARE = {"bfloat16": 0.7, "float16": 0.87, "float8_e4m3fn": 0.85}

MakeMemory = Callable[[WeightImage], ModelMemory]


of_each_type = pytest.mark.parametrize("dtype", FLOAT_TYPES, indirect=True)


@pytest.fixture(scope="module")
def dtype(request: pytest.FixtureRequest) -> FloatType:
    """Bfloat16, but in tests of each type."""
    name: FloatType = getattr(request, "param", "bfloat16")
    return name


@pytest.fixture(scope="module")
def checkpoint(dtype: FloatType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("demo") / "demo"
    if dtype == "float8_e4m3fn":
        return write_checkpoint(place, "demo", quantize="fp8-block")
    return write_checkpoint(place, "demo", dtype=dtype)


@pytest.fixture(scope="module")
def image(checkpoint: Path) -> WeightImage:
    return load_from_disk(checkpoint, image_key(checkpoint, checkpoint_dtype(checkpoint, "auto")))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def compressed(image: WeightImage, device: str) -> WeightImage:
    return compressed_copy(image, torch.device(device), PART_BYTES)


@pytest.fixture
def memory_of(checkpoint: Path, device: str) -> Iterator[MakeMemory]:
    made: list[ModelMemory] = []

    def make(image: WeightImage) -> ModelMemory:
        dtype = checkpoint_dtype(checkpoint, "auto")
        memory = ModelMemory(build_on_meta(checkpoint, dtype), image, 2, device)
        made.append(memory)
        memory.make_kv_arena([2**16])
        memory.map()
        memory.unmap(2)
        return memory

    yield make
    for memory in made:
        memory.unmap(2)
        memory.host.close_link()


def settle(memory: ModelMemory) -> None:
    memory.check()
    memory.end_wake()


def held(memory: ModelMemory, image: WeightImage) -> list[bytes]:
    sizes = [segment.size for segment in image.layout.segments]
    return [bytes(memory._weights.bytes_of(i, n).cpu().numpy()) for i, n in enumerate(sizes)]


def assert_wakes(memory: ModelMemory, image: WeightImage, copied_bytes: int) -> None:
    """With so many bytes over the link, to the weights of an image."""
    woke = memory.begin_wake()
    settle(memory)
    assert woke.copied_bytes == copied_bytes
    assert held(memory, image) == [bytes(segment) for segment in image.segments]


@of_each_type
def test_bytes_are_the_same_and_fewer_crossed_the_link(
    memory_of: MakeMemory, image: WeightImage, compressed: WeightImage, dtype: FloatType
) -> None:
    memory = memory_of(compressed)
    asleep = memory.wake_bytes
    assert max(len(parts) for parts in compressed.manifest.compressed) > 2
    for _ in range(2):
        woke = memory.begin_wake()
        assert memory.mapped_bytes == asleep  # where compressed bytes land as well
        settle(memory)
        assert woke.copied_bytes == compressed.manifest.stored_bytes
        assert woke.copied_bytes < SHARE[dtype] * image.layout.total_bytes
        assert held(memory, image) == [bytes(segment) for segment in image.segments]
        report = memory.last_wake
        assert report is not None
        assert report.intact
        assert report.checked_bytes == image.layout.total_bytes
        assert memory.wake_bytes == 0
        assert memory.mapped_bytes < asleep
        memory.unmap(2)
        assert memory.mapped_bytes == 0
        assert memory.wake_bytes == asleep


def test_kept_layers_are_not_moved(memory_of: MakeMemory, compressed: WeightImage) -> None:
    memory = memory_of(compressed)
    memory.begin_wake()
    settle(memory)
    memory.unmap(1)
    woke = memory.begin_wake()
    settle(memory)
    kept = sum(compressed.manifest.stored_sizes[i] for i in memory.kept)
    assert woke.copied_bytes == compressed.manifest.stored_bytes - kept


@of_each_type
@pytest.mark.parametrize("where", [0.3, 0.9])
def test_a_changed_byte_fails_the_wake(
    memory_of: MakeMemory, compressed: WeightImage, where: float
) -> None:
    payloads = private_buffers(compressed.manifest.stored_sizes)
    for payload, segment in zip(payloads, compressed.segments, strict=True):
        payload[:] = segment
    about = compressed.manifest.parts(1)[0]
    at = about.mantissas_at + int(where * (about.tails_at - about.mantissas_at))
    payloads[1][at] ^= 1
    spoilt = WeightImage(compressed.manifest, payloads, "disk")
    with pytest.raises(WeightsCorrupted):
        spoilt.verify()
    memory = memory_of(spoilt)
    memory.begin_wake()
    with pytest.raises(WeightsCorrupted):
        settle(memory)


def test_a_plain_image_may_take_its_place(
    memory_of: MakeMemory, image: WeightImage, compressed: WeightImage
) -> None:
    memory = memory_of(compressed)
    memory.host.drop()
    memory.host.take(image)
    assert_wakes(memory, image, image.layout.total_bytes)


def test_a_compressed_image_takes_the_place_of_the_plain_one(
    memory_of: MakeMemory, image: WeightImage, compressed: WeightImage
) -> None:
    memory = memory_of(image)
    memory.host.open_link()
    asleep = memory.wake_bytes
    prepared = memory.host.prepare(compressed)
    memory.begin_wake()
    assert memory.exchange(prepared) is prepared.link  # not while anything travels
    assert memory.image is image
    settle(memory)
    before = memory.exchange(prepared)  # awake as well
    assert before is not None
    assert before is not prepared.link
    before.close()
    assert memory.image is compressed
    assert memory.wake_bytes == 0
    memory.unmap(2)
    assert memory.wake_bytes > asleep  # where compressed bytes land
    assert_wakes(memory, image, compressed.manifest.stored_bytes)


def test_no_image_is_exchanged_where_there_is_none_or_another(
    memory_of: MakeMemory, image: WeightImage, compressed: WeightImage
) -> None:
    memory = memory_of(image)
    prepared = memory.host.prepare(compressed)
    memory.host.drop()
    assert memory.exchange(prepared) is prepared.link
    prepared.link.close()
    assert memory.image is None
    checksums = image.manifest.checksums[::-1]
    other = WeightImage(replace(image.manifest, checksums=checksums), image.segments, "disk")
    with pytest.raises(LayoutMismatch):
        memory.host.prepare(other)


def test_a_pinned_image_is_compressed_and_both_are_pinned_at_once(
    image: WeightImage, compressed: WeightImage, device: str, memory_of: MakeMemory
) -> None:
    """Segments that stay as they are belong to both."""
    memory = memory_of(image)
    memory.host.open_link()
    again = compressed_copy(image, torch.device(device), PART_BYTES)
    assert again.manifest == compressed.manifest
    prepared = memory.host.prepare(again)
    assert prepared.link.in_place
    before = memory.exchange(prepared)
    assert before is not None
    before.close()
    memory.begin_wake()
    settle(memory)
    assert held(memory, image) == [bytes(segment) for segment in image.segments]
