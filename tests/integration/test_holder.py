"""WeightHolder and fast load on a real object store."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.source import ModelSource
from actors.errors import ImageMissing, LayoutMismatch, StoreFull
from actors.holder.held import ImageGrant, ImageRequest
from actors.holder.obtain import FastLoad, load_from_disk
from actors.holder.sources import ImageSource
from actors.image.layout import ImageKey
from actors.image.store import in_shared_memory, reserve
from tests.integration.holder_harness import (
    MIB,
    ActorHolder,
    AskingForAnother,
    bytes_in_store,
    content,
    fast_load,
    image_key,
    image_request,
    run,
)

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """48 MB: large enough that spilling or copying it would show."""
    return write_checkpoint(Path(__file__).parents[2] / "checkpoints" / "demo", "demo")


def test_image_from_the_store_is_the_one_from_disk(checkpoint: Path) -> None:
    async def scenario() -> None:
        holder = ActorHolder()
        sources: list[ImageSource] = []
        image = await fast_load(holder, checkpoint, sources.append).obtain()
        assert (image.origin, sources) == ("image", [ImageSource.IMAGE])
        from_disk = load_from_disk(checkpoint, image_key(checkpoint))
        assert from_disk.origin == "disk"
        assert image.manifest.digests == from_disk.manifest.digests
        assert content(image) == content(from_disk)
        segment = np.frombuffer(image.segment(0), np.uint8)
        address = segment.__array_interface__["data"][0]
        assert in_shared_memory(address)  # a view, not a copy
        assert address % 4096 == 0
        holder.give_back()

    run(scenario)


def test_four_replicas_that_start_at_once_read_the_disk_once(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        holder = ActorHolder(open_at_once=False)
        request = image_request(tiny_checkpoint)
        loads = [FastLoad(holder, request, tiny_checkpoint, f"r{i}") for i in range(4)]
        starting = [asyncio.create_task(load.obtain()) for load in loads]
        await holder.actor.wait_until_loading.remote()
        await holder.actor.open_gate.remote()
        images = await asyncio.gather(*starting)
        assert {image.origin for image in images} == {"image"}
        assert await holder.actor.loads.remote() == 1
        (held,) = await holder.stats()
        assert held.lessees == 4
        assert held.bytes == images[0].layout.total_bytes
        holder.give_back()

    run(scenario)


def test_holder_answers_while_it_loads(checkpoint: Path) -> None:
    async def scenario() -> None:
        holder = ActorHolder(open_at_once=False)
        loading = asyncio.create_task(fast_load(holder, checkpoint).obtain())
        await holder.actor.wait_until_loading.remote()
        await holder.ping()
        assert await holder.stats() == []
        assert not loading.done()
        await holder.actor.open_gate.remote()
        assert (await loading).origin == "image"
        holder.give_back()

    run(scenario)


def test_image_is_never_spilled_under_pressure(checkpoint: Path) -> None:
    """Objects that only references keep are written to disk when others need the room; the holder
    looks at its segments, so it is always the others that go."""

    async def scenario() -> None:
        holder = ActorHolder()
        image = await fast_load(holder, checkpoint).obtain()
        expected = list(image.manifest.digests)
        del image  # now only the holder keeps it
        others = [ray.put(np.full(30 * MIB, i, np.uint8)) for i in range(8)]  # 240 of 160 MiB
        locations = ray.experimental.get_local_object_locations(others)
        assert any(found["did_spill"] for found in locations.values())  # there was pressure
        (held,) = await holder.stats()
        assert not held.spilled
        again = await fast_load(holder, checkpoint).obtain()
        again.verify()
        assert list(again.manifest.digests) == expected
        del others
        holder.give_back()

    run(scenario)


def test_views_outlive_the_holder(checkpoint: Path) -> None:
    async def scenario() -> None:
        holder = ActorHolder()
        image = await fast_load(holder, checkpoint).obtain()
        holder.kill()
        pressure = [ray.put(np.full(30 * MIB, i, np.uint8)) for i in range(8)]
        image.verify()
        del pressure

    run(scenario)


def test_release_by_the_last_lessee_frees_the_store(checkpoint: Path) -> None:
    @ray.remote
    class Replica:
        async def hold(self) -> None: ...

    async def scenario() -> None:
        holder = ActorHolder()
        replica = Replica.options(name="a replica").remote()
        await replica.hold.remote()
        empty = bytes_in_store()
        request, key = image_request(checkpoint), image_key(checkpoint)
        for lessee in ("a replica", "one that died", "me"):
            await holder.acquire(request, key, lessee)
        assert not await holder.release(key, "me")  # "a replica" is alive and still looks
        assert await holder.release(key, "a replica")  # "one that died" is no reason to keep it
        assert await holder.stats() == []
        while bytes_in_store() > empty:  # Ray frees in the background
            await asyncio.sleep(0.05)
        assert not await holder.release(key, "me")
        again = await fast_load(holder, checkpoint).obtain()
        again.verify()
        holder.give_back()
        await holder.acquire(request, key, "a replica")
        await holder.actor.release_all.remote("somebody else")
        (image,) = await holder.stats()
        assert image.lessees > 0
        await holder.actor.release_all.remote("a replica")
        assert await holder.stats() == []

    run(scenario)


NOT_MADE: tuple[tuple[dict[str, Any], ImageSource, type[Exception]], ...] = (
    ({"tp_world": 2}, ImageSource.LAYOUT_MISMATCH, LayoutMismatch),
    ({"packer_version": 0}, ImageSource.LAYOUT_MISMATCH, LayoutMismatch),
    ({"dtype": "float64"}, ImageSource.LAYOUT_MISMATCH, LayoutMismatch),
    ({"revision": "another"}, ImageSource.MISSING_KEY, ImageMissing),
    ({"model": "/elsewhere"}, ImageSource.MISSING_KEY, ImageMissing),
)


def test_image_that_the_holder_does_not_make_is_read_from_disk(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        holder = AskingForAnother()
        for changes, way, error in NOT_MADE:
            caplog.clear()
            holder.changes, sources = changes, []
            image = await fast_load(holder, tiny_checkpoint, sources.append).obtain()
            assert (image.origin, sources) == ("disk", [way])
            assert caplog.text.count("Fallback to load from disk") == 1
            assert f"error:{error.__name__}: " in caplog.text
            assert "this node's checkpoint makes" in caplog.text

        sources = []
        nowhere = ImageRequest("x", ModelSource(id="/nowhere"), "auto")
        load = FastLoad(holder, nowhere, tiny_checkpoint, "me", on_obtained=sources.append)
        assert (await load.obtain()).origin == "disk"
        assert sources == [ImageSource.MISSING_KEY]
        assert (await holder.counts()).disk_loads == 0
        holder.give_back()

    run(scenario)


def test_dead_holder_means_disk_at_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        holder = ActorHolder()
        await holder.ping()
        holder.kill()
        sources: list[ImageSource] = []
        image = await fast_load(holder, checkpoint, sources.append).obtain()
        assert (image.origin, sources) == ("disk", [ImageSource.HOLDER_GONE])
        assert "ActorDiedError" in caplog.text

    run(scenario)


def test_holder_that_dies_while_it_loads_means_disk(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        holder = ActorHolder(open_at_once=False)
        sources: list[ImageSource] = []
        loads = [fast_load(holder, tiny_checkpoint, sources.append) for _ in "12"]
        waiting = [asyncio.create_task(load.obtain()) for load in loads]
        await holder.actor.wait_until_loading.remote()
        assert not any(task.done() for task in waiting)
        holder.kill()
        expected = content(load_from_disk(tiny_checkpoint, image_key(tiny_checkpoint)))
        for image in await asyncio.gather(*waiting):
            assert (image.origin, content(image)) == ("disk", expected)
        assert caplog.text.count("Fallback to load from disk. error:ActorDiedError") == 2
        assert sources == [ImageSource.HOLDER_GONE, ImageSource.HOLDER_GONE]

    run(scenario)


class MortalHolder(ActorHolder):
    """Dies once it has handed out an image, before anybody looked at it."""

    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant:
        grant = await super().acquire(request, key, lessee, worker)
        self.kill()
        return grant


def test_holder_that_dies_before_a_replica_opens_the_image(tiny_checkpoint: Path) -> None:
    """Ray may still have the bytes or not (OwnerDiedError); the replica starts either way, soon."""

    async def scenario() -> None:
        image = await fast_load(MortalHolder(), tiny_checkpoint).obtain()
        expected = load_from_disk(tiny_checkpoint, image_key(tiny_checkpoint))
        assert content(image) == content(expected)

    run(scenario)


def test_load_that_takes_too_long_is_not_waited_for_and_not_lost(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        holder = ActorHolder(open_at_once=False)
        await holder.ping()
        sources: list[ImageSource] = []
        load = fast_load(holder, tiny_checkpoint, sources.append, load_timeout_s=0.2)
        assert (await load.obtain()).origin == "disk"
        assert "error:HolderSilent: no image within 0.2 s" in caplog.text
        await holder.actor.open_gate.remote()
        assert (await fast_load(holder, tiny_checkpoint, sources.append).obtain()).origin == "image"
        assert sources == [ImageSource.TIMEOUT, ImageSource.IMAGE]
        assert await holder.actor.loads.remote() == 1
        holder.give_back()

    run(scenario)


def test_image_with_a_changed_byte_is_dropped_and_loaded_anew(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        holder, sources = ActorHolder(), []
        load = fast_load(holder, tiny_checkpoint, sources.append)
        first = await load.obtain()
        right = content(first)
        await holder.actor.change_a_byte.remote()
        assert content(first) != right  # it is one copy

        second = await load.obtain()
        assert second.origin == "image"
        assert content(second) == right
        assert "Fallback" not in caplog.text
        assert "the holder had it wrong, and dropped it" in caplog.text
        assert sources == [ImageSource.IMAGE, ImageSource.IMAGE]
        assert len(await holder.stats()) == 1

        await holder.actor.change_a_byte.remote()
        key = second.manifest.key
        assert any(await asyncio.gather(*(holder.recheck(key) for _ in range(4))))
        assert (await load.obtain()).origin == "image"
        assert not await holder.recheck(key)  # this one is right
        counts = await holder.counts()
        assert (counts.disk_loads, counts.corrupted) == (3, 2)
        holder.give_back()

    run(scenario)


def test_replica_that_is_wrong_about_an_image_does_not_cost_the_others_theirs(
    tiny_checkpoint: Path,
) -> None:
    """A device that breaks bytes complains of every image."""

    async def scenario() -> None:
        holder = ActorHolder()
        load = fast_load(holder, tiny_checkpoint)
        image = await load.obtain()
        assert not await holder.recheck(image.manifest.key)
        assert len(await holder.stats()) == 1
        assert (await load.obtain()).origin == "image"
        assert (await holder.counts()).disk_loads == 1
        holder.give_back()

    run(scenario)


class SilentHolder:
    """Never answers."""

    async def wait_while_starting(self) -> None: ...

    async def ping(self) -> None:
        await asyncio.Event().wait()


def test_holder_that_does_not_answer_is_not_waited_for(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        sources: list[ImageSource] = []
        load = fast_load(SilentHolder(), checkpoint, sources.append, ping_timeout_s=0.05)  # type: ignore[arg-type]
        assert (await load.obtain()).origin == "disk"
        assert "no answer within 0.05 s" in caplog.text
        assert sources == [ImageSource.TIMEOUT]

    run(scenario)


@pytest.mark.slow  # a Ray of its own
@pytest.mark.parametrize("local_ray", [80 * MIB], indirect=True)
def test_store_without_room_is_refused_with_the_sizes_and_the_replica_loads_from_disk(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        holder = ActorHolder()
        request, key = image_request(checkpoint), image_key(checkpoint)
        filler = ray.put(np.zeros(40 * MIB, np.uint8))
        view = ray.get(filler)  # pinned: it cannot make room
        with pytest.raises(StoreFull, match=r"0\.04 GiB .* has 0\.0\d GiB of 0\.08 GiB free"):
            await holder.acquire(request, key, "me")
        sources: list[ImageSource] = []
        image = await fast_load(holder, checkpoint, sources.append).obtain()
        assert (image.origin, sources) == ("disk", [ImageSource.STORE_FULL])
        assert "StoreFull" in caplog.text
        with pytest.raises(StoreFull, match="on disk"):
            reserve(60 * MIB)  # what would happen without the check
        del view, filler
        holder.give_back()

    run(scenario)


def test_shared_memory_without_room_is_refused() -> None:
    from actors.image.store import StoreRoom

    room = StoreRoom(capacity=100 * MIB, available=100 * MIB, shared_memory_free=10 * MIB)
    room.require(50 * MIB, recycled=40 * MIB)  # pages the store already owns need no new ones
    with pytest.raises(StoreFull, match=r"/dev/shm, which has 0\.01 GiB free.*--shm-size"):
        room.require(50 * MIB, recycled=0)
