"""A worker that is asked to let go of its image: it has the last word, and the next wake brings it back."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from actors.errors import DeviceMemoryShort
from actors.holder.host_memory import ImageUse, Need
from actors.image.image import WeightImage
from actors.replica.sleep_config import SleepConfig
from tests.integration.runtime_harness import PROMPTS, Harness, harness, load

Scenario = Callable[[Harness], Awaitable[None]]


@pytest.fixture(scope="module")
def image(tiny_checkpoint: Path) -> WeightImage:
    """As if it came from a holder."""
    loaded = load(tiny_checkpoint)
    return WeightImage(loaded.manifest, loaded.segments, "image")


def run(
    checkpoint: Path, image: WeightImage, scenario: Scenario, sleep: SleepConfig | None = None
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60), harness(checkpoint, image, sleep=sleep) as h:
            await scenario(h)

    asyncio.run(bounded())


@pytest.mark.parametrize("keep_layers", [0, 2])
def test_sleeper_lets_go_and_wakes_right(
    tiny_checkpoint: Path, image: WeightImage, keep_layers: int
) -> None:
    key = image.manifest.key

    async def scenario(h: Harness) -> None:
        before = [await h.tokens(p) for p in PROMPTS[:2]]
        for _ in range(3):
            await h.runtime.sleep(1)
            h.worker.memory.image.origin = "image"  # type: ignore[union-attr]  # of the one loaded anew
            assert await h.worker.image.let_go(key)
            assert h.worker.memory.image is None
            assert h.worker.image.use(key) is None
            assert await h.worker.image.let_go(key), "there is nothing that it looks at"
            await h.runtime.wake()
            assert [await h.tokens(p) for p in PROMPTS[:2]] == before
        assert h.asked == ["reload"] * 3, "the lease is the holder's to end"

    run(tiny_checkpoint, image, scenario, SleepConfig(keep_layers=keep_layers))


def test_awake_one_does_not_let_go(tiny_checkpoint: Path, image: WeightImage) -> None:
    key = image.manifest.key

    async def scenario(h: Harness) -> None:
        before = await h.tokens(PROMPTS[0])
        assert h.worker.image.use(key) == ImageUse(Need.AWAKE)
        assert not await h.worker.image.let_go(key)
        assert await h.tokens(PROMPTS[0]) == before
        await h.runtime.sleep(1)
        use = h.worker.image.use(key)
        assert use is not None
        assert use.need is Need.NONE
        assert 0 <= use.idle_s < 30

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("wakes_first", [True, False])
def test_wake_and_order_at_once_end_with_an_awake_model(
    tiny_checkpoint: Path, image: WeightImage, wakes_first: bool
) -> None:
    key = image.manifest.key

    async def scenario(h: Harness) -> None:
        before = await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        both: list[Awaitable[object]] = [h.worker.image.let_go(key), h.worker.wake()]
        if wakes_first:
            both.reverse()
        tasks = [asyncio.ensure_future(each) for each in both]
        answers = await asyncio.gather(*tasks)
        let_go = answers[1] if wakes_first else answers[0]
        assert let_go is not wakes_first
        assert h.asked == ([] if wakes_first else ["reload"])
        await h.runtime.settled()
        assert await h.tokens(PROMPTS[0]) == before

    run(tiny_checkpoint, image, scenario)


def test_one_that_falls_asleep_or_wakes_is_changing(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    key = image.manifest.key

    async def scenario(h: Harness) -> None:
        for change in (h.worker.sleep(1), h.worker.wake()):
            task: asyncio.Task[object] = asyncio.ensure_future(change)  # type: ignore[arg-type]
            await asyncio.sleep(0)  # it has begun
            assert h.worker.image.use(key) == ImageUse(Need.CHANGING)
            assert not await h.worker.image.let_go(key)
            await task

    run(tiny_checkpoint, image, scenario)


def test_image_beyond_the_budget_goes_with_the_sleep(tiny_checkpoint: Path) -> None:
    private = load(tiny_checkpoint)
    private.is_kept_asleep = False

    async def scenario(h: Harness) -> None:
        before = await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        assert h.worker.memory.image is None
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == before
        assert h.asked == ["reload"]

    run(tiny_checkpoint, private, scenario)


def test_image_beyond_the_budget_goes_with_a_wake_that_is_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = load(tiny_checkpoint)
    private.is_kept_asleep = False

    def refuse() -> None:
        raise DeviceMemoryShort("a neighbour has it", 1.0)

    async def scenario(h: Harness) -> None:
        before = await h.tokens(PROMPTS[0])
        reload = h.worker.image._reload

        async def reload_private() -> WeightImage:
            again = await reload()
            again.is_kept_asleep = False
            return again

        monkeypatch.setattr(h.worker.image, "_reload", reload_private)
        await h.runtime.sleep(1)
        with monkeypatch.context() as short:
            short.setattr(h.worker.memory, "begin_wake", refuse)
            with pytest.raises(DeviceMemoryShort):
                await h.runtime.wake()
        assert h.asked == ["reload"]
        assert h.worker.memory.image is None
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == before

    run(tiny_checkpoint, private, scenario)


def test_private_copy_is_none_of_the_holder_s(tiny_checkpoint: Path) -> None:
    private = load(tiny_checkpoint)

    async def scenario(h: Harness) -> None:
        await h.runtime.sleep(1)
        assert await h.worker.image.let_go(private.manifest.key)
        assert h.worker.memory.image is private

    run(tiny_checkpoint, private, scenario)
