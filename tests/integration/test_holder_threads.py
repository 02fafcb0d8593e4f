"""What a WeightHolder's threads do at the same time, and what they count of its store."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.checkpoints.source import Hub, ModelSource
from actors.errors import ImageMissing, StoreFull
from actors.holder import holder as module
from actors.holder.held import ImageRequest, Published
from actors.holder.holder import WeightHolder
from actors.holder.room import MakeRoom
from actors.image.layout import ImageKey
from actors.image.store import store_room
from tests.integration.holder_harness import STORE, image_key, image_request, run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.usefixtures("local_ray"),
]
WAIT_S = 20.0


@pytest.fixture
def another(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "another"))


def load(holder: WeightHolder, checkpoint: Path) -> None:
    """From a thread that is not the holder's."""
    asyncio.run(holder.acquire(image_request(checkpoint), image_key(checkpoint), "me"))


def test_preload_that_downloads_keeps_nobody_from_loading(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloading, come = threading.Event(), threading.Event()
    ensure: Callable[[ModelSource], Path] = module.ensure_checkpoint

    def slow_hub(source: ModelSource) -> Path:
        if source.hub is not Hub.PATH:
            downloading.set()
            come.wait()
            return tiny_checkpoint
        return ensure(source)

    monkeypatch.setattr(module, "ensure_checkpoint", slow_hub)
    far = ImageRequest("far", ModelSource(hub=Hub.MODELSCOPE, id="far/away"), "auto")

    async def scenario() -> None:
        holder = WeightHolder()
        await holder.preload([far])
        assert await asyncio.to_thread(downloading.wait, WAIT_S)
        request, key = image_request(tiny_checkpoint), image_key(tiny_checkpoint)
        try:
            async with asyncio.timeout(WAIT_S):
                await holder.acquire(request, key, "me")
        finally:
            come.set()

    run(scenario)


def test_load_that_failed_at_once_is_tried_again(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, key = image_request(tiny_checkpoint), image_key(tiny_checkpoint)
    ensure = module.ensure_checkpoint

    async def scenario() -> None:
        holder = WeightHolder()
        for _ in range(50):
            with monkeypatch.context() as patch:
                patch.setattr(module, "ensure_checkpoint", _no_checkpoint)
                with pytest.raises(module.ImageMissing):
                    await holder.acquire(request, key, "me")
        assert module.ensure_checkpoint is ensure
        await holder.acquire(request, key, "me")

    run(scenario)


def _no_checkpoint(source: ModelSource) -> Path:
    raise module.CheckpointMissing("not yet")


def test_stats_while_another_image_comes(
    tiny_checkpoint: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        holder = WeightHolder()
        await holder.acquire(image_request(tiny_checkpoint), image_key(tiny_checkpoint), "me")

        def not_spilled(refs: object) -> bool:
            thread = threading.Thread(target=load, args=(holder, another))
            thread.start()
            thread.join()
            return False

        with monkeypatch.context() as patch:
            patch.setattr(module, "was_spilled", not_spilled)
            assert len(await holder.stats()) == 1
        assert len(await holder.stats()) == 2

    run(scenario)


def test_release_does_not_hold_up_the_others(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_tell = threading.Event(), threading.Event()
    others_were_served: list[bool] = []

    def slow_answer() -> set[str]:
        asked.set()
        others_were_served.append(may_tell.wait(WAIT_S / 4))
        return set()

    monkeypatch.setattr(module, "alive", slow_answer)
    request, key = image_request(tiny_checkpoint), image_key(tiny_checkpoint)

    async def scenario() -> None:
        holder = WeightHolder()
        await holder.acquire(request, key, "one that died")
        await holder.acquire(request, key, "me")
        releasing = asyncio.create_task(holder.release(key, "me"))
        await asyncio.to_thread(asked.wait, WAIT_S)
        await holder.ping()
        await holder.acquire(request, key, "one that came meanwhile")
        may_tell.set()
        assert not await releasing
        assert others_were_served == [True]
        (held,) = await holder.stats()
        assert held.lessees == 1, "it is younger than the list of those alive"

    run(scenario)


def test_pages_that_an_image_has_taken_again_are_not_counted_as_free(
    tiny_checkpoint: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or /dev/shm could be promised twice, and whoever writes there gets SIGBUS."""
    request, key = image_request(tiny_checkpoint), image_key(tiny_checkpoint)

    async def scenario() -> None:
        holder = WeightHolder()
        await holder.acquire(request, key, "me")
        assert await holder.release(key, "me")
        full = replace(store_room(), available=STORE, shared_memory_free=0)
        monkeypatch.setattr(module, "store_room", lambda: full)
        await holder.acquire(request, key, "me")  # where the first one was
        with pytest.raises(StoreFull, match="/dev/shm"):
            await holder.acquire(image_request(another), image_key(another), "me")

    run(scenario)


def test_checkpoint_that_cannot_be_read_keeps_nobody_from_loading_another(
    tiny_checkpoint: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, reading = threading.Event(), threading.Event()
    publish = WeightHolder._publish
    stuck_threads: list[threading.Thread] = []

    def hang(
        holder: WeightHolder, model_id: str, checkpoint: Path, key: ImageKey, make_room: MakeRoom
    ) -> Published:
        if checkpoint == another:
            stuck_threads.append(threading.current_thread())
            reading.set()
            never.wait()
            # Whoever puts anything into a store that has been shut down starts another Ray.
            raise OSError("it was unmounted by force")
        return publish(holder, model_id, checkpoint, key, make_room)

    monkeypatch.setattr(WeightHolder, "_publish", hang)

    async def scenario() -> None:
        holder = WeightHolder(load_timeout_s=WAIT_S / 4)
        stuck = asyncio.create_task(
            holder.acquire(image_request(another), image_key(another), "me")
        )
        await asyncio.to_thread(reading.wait, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await holder.acquire(image_request(tiny_checkpoint), image_key(tiny_checkpoint), "me")
            with pytest.raises(ImageMissing, match=f"reading {another} has not ended after 5 s"):
                await stuck

    try:
        run(scenario)
    finally:
        never.set()
        for thread in stuck_threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
