"""A WeightHolder with a budget on a real object store: images that leave, and come back from files."""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.checkpoints.making import write_checkpoint
from actors.errors import HostMemoryFull
from actors.holder.config import HostConfig
from actors.holder.holder import WeightHolder
from actors.holder.host_memory import ImageUse, Need
from actors.holder.obtain import load_from_disk
from actors.image.layout import ImageKey
from tests.integration.holder_harness import bytes_in_store, image_key, image_request, run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.usefixtures("local_ray"),
]


@pytest.fixture
def checkpoints(tiny_checkpoint: Path, tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(tiny_checkpoint, tmp_path / name)) for name in "ab"]


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def size_of(checkpoint: Path) -> int:
    return load_from_disk(checkpoint, image_key(checkpoint)).layout.total_bytes


async def holder_of(checkpoints: list[Path], images: float, disk_dir: Path) -> WeightHolder:
    """Of so many images at once."""
    holder = WeightHolder()
    gib = images * size_of(checkpoints[0]) / 2**30
    host = HostConfig(memory_budget_gib=gib, disk_dir=str(disk_dir))
    await holder.keep([image_request(each) for each in checkpoints], host)
    return holder


async def acquire(holder: WeightHolder, checkpoint: Path) -> list[bytes]:
    """What is in the image, by somebody who is gone when it has been read."""
    key = image_key(checkpoint)
    await holder.acquire(image_request(checkpoint), key, "somebody")
    held = holder._images.get(key)
    assert held is not None
    await holder.recheck(key)
    return [bytes(payload) for payload in held.payloads]


async def origins(holder: WeightHolder) -> list[str]:
    return [held.origin for held in await holder.stats()]


def test_image_that_left_comes_back_from_its_file_as_it_was(
    checkpoints: list[Path], disk_dir: Path
) -> None:
    first, second = checkpoints

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        empty = bytes_in_store()
        before = await acquire(holder, first)
        for _ in range(3):
            await acquire(holder, second)
            assert await acquire(holder, first) == before
            assert await origins(holder) == ["file"]
        counts = await holder.counts()
        assert (counts.disk_loads, counts.file_loads, counts.evictions) == (2, 5, 6)
        assert counts.files == 2
        assert counts.corrupted == 0
        (held,) = await holder.stats()
        assert held.on_disk
        assert await holder.release(image_key(first), "somebody")
        while bytes_in_store() > empty:  # Ray frees in the background
            await asyncio.sleep(0.05)

    run(scenario)


def spoil(disk_dir: Path, fault: str) -> None:
    (file,) = disk_dir.iterdir()
    if fault == "torn":
        os.truncate(file, file.stat().st_size // 2)
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("fault", ["changed", "torn"])
def test_file_that_is_not_what_was_written_is_made_again(
    checkpoints: list[Path], disk_dir: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    first, second = checkpoints

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        before = await acquire(holder, first)
        await acquire(holder, second)
        spoil(disk_dir, fault)
        assert await acquire(holder, first) == before
        assert caplog.text.count("is deleted, and made again from the checkpoint") == 1
        counts = await holder.counts()
        assert (counts.disk_loads, counts.file_loads) == (3, 0)
        await acquire(holder, second)
        assert await acquire(holder, first) == before
        assert (await holder.counts()).file_loads == 2

    run(scenario)


def test_two_that_are_asked_for_at_once_never_take_more_than_the_budget(
    checkpoints: list[Path], disk_dir: Path
) -> None:
    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        for _ in range(3):
            await asyncio.gather(*(acquire_alone(holder, each) for each in checkpoints))
            assert len(await holder.stats()) == 1
        assert (await holder.counts()).disk_loads == 2

    async def acquire_alone(holder: WeightHolder, checkpoint: Path) -> None:
        await holder.acquire(image_request(checkpoint), image_key(checkpoint), "somebody")

    run(scenario)


def test_image_beyond_the_budget_is_refused_with_the_sizes(
    checkpoints: list[Path], disk_dir: Path
) -> None:
    first, _ = checkpoints

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 0.5, disk_dir)
        with pytest.raises(HostMemoryFull, match=r"needs 0\.\d\d GiB of a budget of 0\.\d\d GiB"):
            await holder.acquire(image_request(first), image_key(first), "somebody")
        assert await holder.stats() == []

    run(scenario)


def test_quantised_image_takes_what_its_bytes_are_of_the_budget(
    tmp_path: Path, disk_dir: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "quantised", "tiny", quantize="gptq-4-128")
    whole = write_checkpoint(tmp_path / "plain", "tiny", dtype="float16")
    size = size_of(checkpoint)
    assert size < 0.8 * size_of(whole)  # the embedding is as large as in the plain one

    async def scenario() -> None:
        holder = await holder_of([checkpoint], 1.0, disk_dir)
        payloads = await acquire(holder, checkpoint)
        assert sum(map(len, payloads)) == holder._images.size() == size
        holder = await holder_of([checkpoint], 0.999, disk_dir)
        with pytest.raises(HostMemoryFull, match=r"which is less"):
            await acquire(holder, checkpoint)

    run(scenario)


def test_files_of_models_that_are_gone_are_deleted(checkpoints: list[Path], disk_dir: Path) -> None:
    first, second = checkpoints

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        await acquire(holder, first)
        await acquire(holder, second)
        await acquire(holder, first)
        assert (await holder.counts()).files == 2
        await holder.keep([image_request(second)])
        await holder.expire()
        async with asyncio.timeout(30):
            while (await holder.counts()).files != 1:
                await asyncio.sleep(0.05)
        await acquire(holder, second)
        assert await origins(holder) == ["file"]

    run(scenario)


def test_preload_fills_the_budget_and_has_nobody_leave(
    checkpoints: list[Path], disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        await holder.preload([image_request(each) for each in checkpoints])
        async with asyncio.timeout(60):
            while "is loaded when it is asked for" not in caplog.text:
                await asyncio.sleep(0.05)
        assert len(await holder.stats()) == 1
        assert (await holder.counts()).evictions == 0

    run(scenario)


@ray.remote(num_cpus=0)
class Worker:
    """What a holder may ask a worker, answered as it is told to."""

    def __init__(self, need: Need, lets_go: bool) -> None:
        self._need, self._lets_go = need, lets_go
        self._asked: list[str] = []

    async def image_use(self, key: ImageKey) -> ImageUse:
        self._asked.append("use")
        return ImageUse(self._need, 5.0)

    async def let_go(self, key: ImageKey) -> bool:
        self._asked.append("let go")
        return self._lets_go

    async def asked(self) -> list[str]:
        return self._asked


def test_workers_are_asked_and_who_is_dead_looks_at_nothing(
    checkpoints: list[Path], disk_dir: Path
) -> None:
    first, second = checkpoints

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        asleep, awake = Worker.remote(Need.NONE, True), Worker.remote(Need.AWAKE, False)  # type: ignore[attr-defined]

        async def lease(checkpoint: Path, worker: Any) -> None:
            await holder.acquire(image_request(checkpoint), image_key(checkpoint), "r", worker)

        await lease(first, asleep)
        await lease(second, awake)
        assert await asleep.asked.remote() == ["use", "let go"]
        with pytest.raises(HostMemoryFull, match="are awake") as full:
            await lease(first, asleep)
        assert full.value.file is not None
        assert await awake.asked.remote() == ["use"]
        ray.kill(awake)
        async with asyncio.timeout(30):
            with suppress(ray.exceptions.ActorDiedError):
                while True:  # Ray only begins to kill it
                    await awake.asked.remote()
        await lease(first, asleep)
        assert await origins(holder) == ["file"]

    run(scenario)


def test_lessee_that_cannot_be_asked_keeps_its_image_for_as_long_as_it_lives(
    checkpoints: list[Path], disk_dir: Path
) -> None:
    first, second = checkpoints

    async def scenario() -> None:
        holder = await holder_of(checkpoints, 1.5, disk_dir)
        living = Worker.options(name="somebody").remote(Need.NONE, True)  # type: ignore[attr-defined]
        await living.asked.remote()
        await acquire(holder, first)
        with pytest.raises(HostMemoryFull, match="are awake"):
            await acquire(holder, second)
        assert await living.asked.remote() == []

    run(scenario)
