"""Images and files that nobody needs any more: they go, and nothing else does."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.checkpoints.source import ModelSource
from actors.errors import ReplicaFailed
from actors.holder import holder as module
from actors.holder.config import HostConfig
from actors.holder.held import Held, ImageGrant, ImageRequest, Published
from actors.holder.holder import WeightHolder
from actors.holder.obtain import load_from_disk
from actors.image import packer
from actors.image.layout import ImageKey


class Bench:
    """A holder in whose store are arrays, and actors that live because the test says so."""

    def __init__(self, checkpoint: Path, disk_dir: Path) -> None:
        self.living: set[str] = set()
        self.holder = WeightHolder()
        self.request = ImageRequest("m", ModelSource(id=str(checkpoint)), "auto")
        self._checkpoint = checkpoint
        self._host = HostConfig(memory_budget_gib=1, disk_dir=str(disk_dir))

    async def serves(self, *requests: ImageRequest) -> None:
        await self.holder.keep(requests, self._host)

    async def acquire(self, lessee: str, worker: Any = None) -> ImageKey:
        self.living.add(lessee)
        key = self.key
        await self.holder.acquire(self.request, key, lessee, worker or object())
        return key

    @property
    def leases(self) -> dict[ImageKey, dict[str, Any]]:
        """Of each image, who looks at it for whom."""
        return {key: dict(held.lessees) for key, held in self.holder._images.snapshot()}

    @property
    def key(self) -> ImageKey:
        return packer.image_key(self._checkpoint, packer.checkpoint_dtype(self._checkpoint, "auto"))

    def write(self, key: ImageKey) -> None:
        """As somebody does who evicts it."""
        held, files = self.holder._images.get(key), self.holder._room.files
        assert held is not None
        assert files is not None
        assert files.write(held.grant.manifest, held.payloads)

    async def kept(self) -> tuple[list[ImageKey], list[Path]]:
        """Images and files, when it has been looked for those that nobody needs."""
        await self.holder.expire()
        tidying, files = self.holder._tidying, self.holder._room.files
        assert tidying is not None
        assert files is not None
        await asyncio.wrap_future(tidying)
        return [key for key, _ in self.holder._images.snapshot()], sorted(files._all())

    def path(self, key: ImageKey) -> Path:
        assert self.holder._room.files is not None
        return self.holder._room.files.path(key)


class Turns:
    """In the place of the lock around loads: the first who comes has its turn once that is open."""

    def __init__(self) -> None:
        self.waits, self.open = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if not self.waits.is_set():
            self.waits.set()
            self.open.wait()

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def bench(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    def publish(
        _: WeightHolder,
        model_id: str,
        checkpoint: Path,
        key: ImageKey,
        make_room: Callable[..., Any],
    ) -> Published:
        loaded = load_from_disk(checkpoint, key)
        segments: Any = [
            SimpleNamespace(payload=np.frombuffer(segment, np.uint8), ref=None)
            for segment in loaded.segments
        ]
        return ImageGrant(loaded.manifest, (), (), 1.0), segments

    (tmp_path / "images").mkdir()
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "m"))
    made = Bench(checkpoint, tmp_path / "images")
    monkeypatch.setattr(WeightHolder, "_publish", publish)
    monkeypatch.setattr(module, "alive", lambda: set(made.living))
    return made


def replace_in_place(bench: Bench) -> None:
    os.utime(next(bench._checkpoint.glob("*.safetensors")))


def test_image_of_a_checkpoint_that_was_replaced_goes_with_its_last_lessee(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        first = await bench.acquire("old")
        bench.living.clear()
        assert (await bench.kept())[0] == [first], "it may be wanted again"
        bench.living.add("old")
        await bench.acquire("old")
        replace_in_place(bench)
        second = await bench.acquire("new")
        assert (await bench.kept())[0] == [first, second], "it is in use"
        bench.living.remove("old")
        assert (await bench.kept())[0] == [second]

    asyncio.run(scenario())


def test_lease_of_the_worker_before_ends_with_the_next_one_s_on_another_image(
    bench: Bench,
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        first = await bench.acquire("replica")
        await bench.acquire("neighbour")
        replace_in_place(bench)
        second = await bench.acquire("replica")  # by its next worker
        assert (await bench.kept())[0] == [first, second], "a neighbour looks at the first"
        await bench.acquire("neighbour")
        assert (await bench.kept())[0] == [second]
        held = bench.holder._images.get(second)
        assert held is not None
        assert set(held.lessees) == {"replica", "neighbour"}

    asyncio.run(scenario())


def test_lease_stays_on_an_image_whose_worker_tries_the_next_one_and_cannot_use_it(
    bench: Bench,
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        first = await bench.acquire("replica", "its worker")
        replace_in_place(bench)
        second = await bench.acquire("replica", "its worker")
        assert await bench.holder.release(second, "replica")
        assert bench.leases == {first: {"replica": "its worker"}}

    asyncio.run(scenario())


def test_file_of_a_checkpoint_that_was_replaced_goes_once_the_next_image_is_there(
    bench: Bench,
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        first = await bench.acquire("old")
        bench.write(first)
        assert (await bench.kept())[1] == [bench.path(first)]
        replace_in_place(bench)
        second = await bench.acquire("new")
        bench.write(second)
        assert (await bench.kept())[1] == [bench.path(second)]
        bench.write(first)  # by now its image leaves, too
        assert (await bench.kept())[1] == [bench.path(second)]

    asyncio.run(scenario())


def test_file_of_a_model_that_is_gone_goes_whenever_it_was_written(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        key = await bench.acquire("it still drains")
        await bench.serves()
        assert await bench.kept() == ([key], [])
        bench.write(key)
        assert await bench.kept() == ([key], [])

    asyncio.run(scenario())


@pytest.fixture
def turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    turns = Turns()
    monkeypatch.setattr(bench.holder, "_one_loads", turns)
    yield turns
    turns.open.set()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_ask_of_a_worker_that_has_ended_does_not_take_the_lease_of_the_next_one(
    bench: Bench, turns: Turns, is_replaced: bool
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        asking = asyncio.create_task(bench.acquire("replica", "first"))
        await asyncio.to_thread(turns.waits.wait)
        if is_replaced:
            replace_in_place(bench)
        await asyncio.to_thread(bench.holder._preload, bench.request)
        key = await bench.acquire("replica", "second")
        turns.open.set()
        await asyncio.wait([asking])
        assert bench.leases[key] == {"replica": "second"}
        assert isinstance(asking.exception(), ReplicaFailed)
        assert (await bench.kept())[0] == [key], "what it asked for is not the latest"
        bench.living.clear()
        assert (await bench.kept())[0] == [key], "it may be wanted again"

    asyncio.run(scenario())


@pytest.mark.parametrize("releases", ["the image", "all"])
def test_ask_whose_lease_was_ended_before_it_began_does_not_become_one(
    bench: Bench, turns: Turns, releases: str
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        asking = asyncio.create_task(bench.acquire("replica"))
        await asyncio.to_thread(turns.waits.wait)
        key = bench.key
        if releases == "all":
            await bench.holder.release_all("replica")
        else:
            assert not await bench.holder.release(key, "replica")
        turns.open.set()
        await asyncio.wait([asking])
        assert bench.leases == {key: {}}
        assert isinstance(asking.exception(), ReplicaFailed)

    asyncio.run(scenario())


def test_end_of_every_lease_of_a_replica_leaves_those_that_it_takes_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_tell = threading.Event(), threading.Event()

    def alive() -> set[str]:
        asked.set()
        may_tell.wait()
        return {"another"}

    async def scenario() -> None:
        await bench.serves(bench.request)
        await bench.acquire("another")
        await bench.acquire("replica", "first")
        replace_in_place(bench)
        second = await bench.acquire("new")
        monkeypatch.setattr(module, "alive", alive)
        releasing = asyncio.create_task(bench.holder.release_all("replica"))
        await asyncio.to_thread(asked.wait)
        await bench.acquire("replica", "second")
        may_tell.set()
        await releasing
        assert bench.leases[second]["replica"] == "second"

    asyncio.run(scenario())


def test_image_that_goes_before_whoever_has_it_loaded_can_lease_it_is_loaded_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        images, loop = bench.holder._images, asyncio.get_running_loop()

        def put(key: ImageKey, held: Held) -> None:
            patch.undo()
            images.put(key, held)
            released = bench.holder.release(key, "another")
            assert asyncio.run_coroutine_threadsafe(released, loop).result()

        with monkeypatch.context() as patch:
            patch.setattr(images, "put", put)
            key = await bench.acquire("replica", "its worker")
        assert bench.leases == {key: {"replica": "its worker"}}

    asyncio.run(scenario())


def silent() -> set[str]:
    """Ray, that does not say who lives."""
    raise RuntimeError("no answer")


def test_last_lease_ends_an_image_whether_or_not_ray_says_who_lives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        key = await bench.acquire("only")
        monkeypatch.setattr(module, "alive", silent)
        assert await bench.holder.release(key, "only")
        assert bench.holder._images.snapshot() == []

    asyncio.run(scenario())


@pytest.mark.parametrize("left", ["dead", "living", "new"])
def test_image_that_was_given_back_goes_once_ray_says_that_the_others_are_dead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    """One that others use, or that was asked for since, is kept for them, and afterwards as any other."""

    async def scenario() -> None:
        await bench.serves(bench.request)
        key = await bench.acquire("other")
        await bench.acquire("last")
        if left != "living":
            bench.living.remove("other")
        with monkeypatch.context() as patched:
            patched.setattr(module, "alive", silent)
            assert not await bench.holder.release(key, "last")
            assert "no answer" in caplog.text
            if left == "new":
                await bench.acquire("new")
            with pytest.raises(RuntimeError, match="no answer"):
                await bench.holder.expire()
        assert (await bench.kept())[0] == ([] if left == "dead" else [key])
        bench.living.clear()
        assert (await bench.kept())[0] == ([] if left == "dead" else [key])

    asyncio.run(scenario())


def test_every_lease_of_a_replica_ends_whether_or_not_ray_says_who_lives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        await bench.acquire("other")
        await bench.acquire("ended")
        replace_in_place(bench)
        await bench.acquire("another")
        await bench.acquire("ended")
        with monkeypatch.context() as patched:
            patched.setattr(module, "alive", silent)
            await bench.holder.release_all("ended")
        there = [held for _, held in bench.holder._images.snapshot()]
        assert [set(held.lessees) for held in there] == [{"other"}, {"another"}]

    asyncio.run(scenario())


def test_last_lease_ends_an_image_that_is_compressed_just_then(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await bench.serves(bench.request)
        key = await bench.acquire("dead")
        await bench.acquire("last")
        images = bench.holder._images
        held = images.get(key)
        assert held is not None

        def alive() -> set[str]:
            assert images.replace(key, held, (held.grant, held.segments))
            return {"last"}

        monkeypatch.setattr(module, "alive", alive)
        assert await bench.holder.release(key, "last")
        assert images.snapshot() == []

    asyncio.run(scenario())
