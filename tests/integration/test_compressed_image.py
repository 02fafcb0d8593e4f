"""An image that the holder has compressed by a worker, on a real object store."""

import asyncio
import mmap
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.source import ModelSource
from actors.errors import ImageMissing, Unavailable
from actors.holder.compression import compressed
from actors.holder.config import HostConfig
from actors.holder.held import Held, ImageRequest, published
from actors.holder.holder import WeightHolder
from actors.holder.obtain import FastLoad, load_from_disk
from actors.image.compressing import compress_segment
from actors.image.image import WeightImage, digest
from actors.image.layout import CompressedSegment, ImageKey
from actors.image.packer import image_key
from actors.image.store import ByteArray, ReservedSegment, reserve_all, writable
from tests.integration.holder_harness import run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.usefixtures("local_ray"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("demo") / "demo", "demo", dtype="bfloat16")


@pytest.fixture
def plain(checkpoint: Path) -> WeightImage:
    return load_from_disk(checkpoint, image_key(checkpoint, torch.bfloat16))


class Worker:
    """What a holder calls of a worker's handle; computes in this process."""

    def __init__(
        self,
        image: WeightImage,
        fails_at: int | None = None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._image = image
        self._fails_at = fails_at
        self._told = told
        self.compressed_segment = self
        self.asked: list[int] = []

    def remote(
        self, key: ImageKey, index: int, ref: "ray.ObjectRef[ByteArray]", offset: int, size: int
    ) -> "ray.ObjectRef[Any]":
        assert key == self._image.manifest.key
        self.asked.append(index)
        self._told()
        image, device = self._image, torch.device("cpu")
        out = writable(ray.get(ref), offset, size)
        segment = image.segment(index)
        found = compress_segment(image.layout, index, segment, device, out, part_bytes=2**20)
        return _answer.remote(found, index == self._fails_at)


@ray.remote(num_cpus=0)
def _answer(found: CompressedSegment | None, fails: bool) -> CompressedSegment | None:
    if fails:
        raise Unavailable("there were requests for 60 s")
    return found


class InProcess:
    """HolderClient of a holder in this process."""

    def __init__(self, holder: WeightHolder) -> None:
        self.acquire = holder.acquire
        self.ping = holder.ping
        self.release = holder.release
        self.recheck = holder.recheck
        self.compress = holder.compress

    async def wait_while_starting(self) -> None:
        pass


def load_of(holder: WeightHolder, checkpoint: Path, worker: Any = None) -> FastLoad:
    request = ImageRequest("demo", ModelSource(id=str(checkpoint)), "auto")
    return FastLoad(InProcess(holder), request, checkpoint, "me", worker)


def test_holder_keeps_two_thirds_and_says_what_they_are(
    checkpoint: Path, plain: WeightImage
) -> None:
    async def scenario() -> None:
        holder = WeightHolder()
        worker = Worker(plain)
        load = load_of(holder, checkpoint, worker)
        before = await load.obtain()
        key = before.manifest.key
        assert await load.compress(key)
        assert set(worker.asked) == set(range(len(plain.segments)))
        asked = len(worker.asked)
        # Who looks at it as it was may go on.
        assert [bytes(part) for part in before.segments] == [bytes(p) for p in plain.segments]
        manifest = (await load.obtain()).manifest  # its digests are right
        assert manifest.stored_bytes < 0.7 * plain.layout.total_bytes
        assert manifest.checksums == plain.manifest.checksums
        (held,) = await holder.stats()
        assert (held.bytes, held.lessees) == (manifest.stored_bytes, 1)
        assert not await holder.recheck(key)
        assert await load.compress(key)  # it is
        assert len(worker.asked) == asked
        # For another node, which was lent it as it was:
        with pytest.raises(ImageMissing, match="as it was lent"):
            await holder.segment(key, 1, before.manifest.digests[1])
        lent = await holder.segment(key, 1, manifest.digests[1])
        assert lent.nbytes == manifest.stored_sizes[1]

    run(scenario)


def test_image_stays_as_it_was_where_a_worker_or_room_is_missing(
    checkpoint: Path, plain: WeightImage, tmp_path: Path
) -> None:
    async def scenario() -> None:
        holder = WeightHolder()
        load = load_of(holder, checkpoint, Worker(plain, fails_at=2))
        manifest = (await load.obtain()).manifest
        assert not await load.compress(manifest.key)
        small = 1.2 * manifest.stored_bytes / 2**30  # not for both at once
        await holder.keep([], HostConfig(memory_budget_gib=small))
        patient = load_of(holder, checkpoint, Worker(plain))
        assert not await patient.compress(manifest.key)
        assert (await load.obtain()).manifest == manifest
        await holder.keep([], HostConfig(memory_budget_gib=2 * small))
        assert await patient.compress(manifest.key)

    run(scenario)


def test_two_workers_of_one_image_do_it_once(checkpoint: Path, plain: WeightImage) -> None:
    async def scenario() -> None:
        holder = WeightHolder()
        workers = [Worker(plain), Worker(plain)]
        loads = [load_of(holder, checkpoint, worker) for worker in workers]
        key = (await loads[0].obtain()).manifest.key
        done = await asyncio.gather(*(load.compress(key) for load in loads))
        assert done == [True, True]
        assert sorted(len(worker.asked) > 0 for worker in workers) == [False, True]

    run(scenario)


def test_images_of_two_models_take_turns(
    checkpoint: Path, plain: WeightImage, tmp_path: Path
) -> None:
    """Each takes room for two; nobody has to come again for it."""
    other = write_checkpoint(tmp_path / "other", "demo", dtype="bfloat16", seed=1)
    images = plain, load_from_disk(other, image_key(other, torch.bfloat16))

    async def scenario() -> None:
        holder = WeightHolder()
        asked: list[int] = []  # by whose segment
        loads = []
        for number, (path, image) in enumerate(zip((checkpoint, other), images, strict=True)):
            worker = Worker(image, told=partial(asked.append, number))
            loads.append(load_of(holder, path, worker))
            await loads[-1].obtain()
        keys = [image.manifest.key for image in images]
        done = [load.compress(key) for load, key in zip(loads, keys, strict=True)]
        assert await asyncio.gather(*done) == [True, True]
        assert set(asked) == {0, 1}
        assert asked == sorted(asked)

    run(scenario)


def test_file_of_the_image_as_it_was_goes(
    checkpoint: Path, plain: WeightImage, tmp_path: Path
) -> None:
    async def scenario() -> None:
        holder = WeightHolder()
        budget = 4 * plain.layout.total_bytes / 2**30
        await holder.keep([], HostConfig(memory_budget_gib=budget, disk_dir=str(tmp_path)))
        load = load_of(holder, checkpoint, Worker(plain))
        image = await load.obtain()
        files = holder._room.files
        assert files is not None
        assert files.write(image.manifest, image.segments)
        assert await load.compress(image.manifest.key)
        assert not files.has(image.manifest.key)
        image = await load.obtain()
        assert files.write(image.manifest, image.segments)
        found = files.find(image.manifest.key)
        assert found is not None
        targets = [memoryview(np.empty(size, np.uint8)) for size in found.stored_sizes]
        assert files.read(found, targets)

    run(scenario)


class OfSize:
    """A Compressor whose segments take a share of what they had."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self.rooms: list[list[int]] = [[] for _ in sizes]

    def segment(self, key: ImageKey, index: int, into: ReservedSegment) -> CompressedSegment | None:
        size, room = self._sizes[index], len(into.payload)
        self.rooms[index].append(room)
        if size <= room:
            into.payload[:size] = index
        return size, ()


def held(image: WeightImage) -> Held:
    segments = reserve_all([len(part) for part in image.segments])
    grant, _ = published(image.manifest, segments, 0.0)
    request = ImageRequest("demo", ModelSource(id="demo"), "auto")
    return Held(grant, segments, "disk", request, 0.0)


def test_objects_are_as_large_as_what_is_in_them(plain: WeightImage) -> None:
    """What was reserved for a segment may be too small, or much too large."""
    sizes = [
        int(share * len(part))
        for share, part in zip(cycle((0.9, 0.3, 0.67)), plain.segments, strict=False)
    ]
    worker = OfSize(sizes)
    made, kept = compressed(held(plain), worker, lambda size: None, 0)
    for index, segment in enumerate(kept):
        (*_, room) = worker.rooms[index]
        assert len(worker.rooms[index]) == (1 if sizes[index] <= worker.rooms[index][0] else 2)
        assert room >= sizes[index]
        assert bytes(segment.payload) == bytes([index]) * sizes[index]
        assert segment.view.nbytes <= sizes[index] / 0.98 + mmap.PAGESIZE + 1
        assert digest(segment.payload.data) == made.manifest.digests[index]


def test_segments_that_cannot_shrink_are_neither_asked_for_nor_given_room(checkpoint: Path) -> None:
    image = load_from_disk(checkpoint, image_key(checkpoint, torch.float32))
    before, worker = held(image), OfSize([0] * len(image.segments))
    asked: list[int] = []
    made, kept = compressed(before, worker, asked.append, 0)
    assert asked == [0]
    assert kept == before.segments
    assert not any(made.manifest.compressed)
    assert not any(worker.rooms)
