"""Log-probabilities of long prompts, beside everything else that a replica does."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from actors.engine.model.plain import PromptLogprobs, longest_prompt
from actors.errors import (
    DeviceMemoryError,
    DeviceMemoryShort,
    EngineDied,
    ReplicaFailed,
    Unavailable,
)
from actors.image.image import WeightImage
from actors.protocol import TokenEvent
from actors.worker.watchdog import WatchdogConfig
from tests.integration.runtime_harness import PROMPTS, Harness, run

LONG = tuple(range(5, 1005))
PIECES = 16  # of 64 tokens


class Pieces:
    """Calls of `advance`, each with a hook in front of it on the control thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.at_once = 0
        self.most_bytes = 0
        self.holders: set[PromptLogprobs] = set()
        self.before: Callable[[], None] = lambda: None
        advance = PromptLogprobs.advance

        def counted(prompt: PromptLogprobs, model: PreTrainedModel) -> None:
            self.begun += 1
            self.before()
            advance(prompt, model)
            self.holders.add(prompt)
            assert prompt._cache is not None
            kept = [t for each in prompt._cache.layers for t in (each.keys, each.values)]
            self.most_bytes = max(self.most_bytes, sum(t.nbytes for t in kept if t is not None))
            self.at_once = max(self.at_once, sum(p._cache is not None for p in self.holders))

        monkeypatch.setattr(PromptLogprobs, "advance", counted)

    async def until(self, count: int) -> None:
        while self.begun < count:
            await asyncio.sleep(0.001)

    @property
    def on_device(self) -> int:
        return sum(prompt._cache is not None for prompt in self.holders)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    return Pieces(monkeypatch)


async def echo(h: Harness, **sampling: object) -> list[TokenEvent]:
    """But for what of the prompt the KV cache had: that depends on who asked before."""
    events = await h.events(LONG, **{"echo": True, "logprobs": 1, "max_tokens": 1} | sampling)
    return [replace(event, cached_tokens=0) for event in events]


async def until_dropped(h: Harness, pieces: Pieces) -> None:
    await h.runtime.settled()  # what the control thread had to do is done
    assert pieces.on_device == 0
    await h.until_free()


def test_neighbour_goes_on_between_two_pieces(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces
) -> None:
    async def scenario(h: Harness) -> None:
        alone = await h.tokens(PROMPTS[0], max_tokens=600, ignore_eos=True)
        told: list[int] = []  # tokens when each piece began
        got: list[int] = []

        def slow() -> None:
            told.append(len(got))
            time.sleep(0.03)  # many steps long, and 16 of it shorter than the answer

        pieces.before = slow

        async def neighbour() -> None:
            prepared = h.prepare(PROMPTS[0], max_tokens=600, ignore_eos=True)
            async for event in h.runtime.generate(prepared):
                got.extend(event.token_ids)

        stream = asyncio.create_task(neighbour())
        while not got:
            await asyncio.sleep(0.001)
        await echo(h)
        assert len(told) == PIECES
        assert not stream.done(), "no neighbour any more"
        gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
        assert sum(gap > 2 for gap in gaps) > len(gaps) / 2, gaps  # as long as a piece took
        await stream
        assert got == alone
        await until_dropped(h, pieces)

    run(tiny_checkpoint, image, scenario)


def test_client_that_leaves_ends_it_with_the_piece_at_work(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces
) -> None:
    async def scenario(h: Harness) -> None:
        for count in (1, 3):
            pieces.begun = 0
            task = asyncio.create_task(echo(h))
            await pieces.until(count)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left_at = pieces.begun
            await until_dropped(h, pieces)
            assert pieces.begun <= left_at + 1 < PIECES
        assert len(h.runtime._streams) == 0
        assert await echo(h)

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_in_the_middle_takes_the_cache_and_changes_no_number(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces, level: int
) -> None:
    async def scenario(h: Harness) -> None:
        expected = await echo(h)
        for count in (1, 5):
            pieces.begun = 0
            task = asyncio.create_task(echo(h))
            await pieces.until(count)
            await h.runtime.sleep(level)
            assert pieces.on_device == 0
            assert h.worker.memory.mapped_bytes == 0
            slept_at = pieces.begun
            await asyncio.sleep(0.05)
            assert not task.done()
            assert pieces.begun == slept_at
            await h.runtime.wake()
            assert await task == expected
            assert pieces.begun == slept_at + PIECES
        await until_dropped(h, pieces)

    run(tiny_checkpoint, image, scenario)


def test_abort_and_failure_end_it(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces
) -> None:
    async def scenario(h: Harness) -> None:
        ways: list[tuple[Callable[[], None], str]] = [
            (h.runtime.abort_in_flight, "aborted"),
            (lambda: h.runtime.fail_in_flight(Unavailable("frozen")), "frozen"),
        ]
        for end, message in ways:
            pieces.begun = 0
            first, second = (asyncio.create_task(echo(h)) for _ in range(2))
            await pieces.until(2)
            await asyncio.sleep(0)
            end()
            for task in (first, second):  # also the one that waits for its turn
                with pytest.raises(Unavailable, match=message):
                    await task
            await until_dropped(h, pieces)
            assert pieces.begun < PIECES

    run(tiny_checkpoint, image, scenario)


def test_frozen_one_ends_without_a_wake(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces
) -> None:
    async def scenario(h: Harness) -> None:
        task = asyncio.create_task(echo(h))
        await pieces.until(2)
        await h.runtime.sleep(1)
        h.runtime.fail_in_flight(Unavailable("frozen too long"))
        with pytest.raises(Unavailable, match="too long"):
            await task
        await h.runtime.wake()
        await until_dropped(h, pieces)

    run(tiny_checkpoint, image, scenario)


def test_one_at_a_time(tiny_checkpoint: Path, image: WeightImage, pieces: Pieces) -> None:
    async def scenario(h: Harness) -> None:
        first, *others = await asyncio.gather(*(echo(h) for _ in range(3)))
        assert all(other[0].logprobs == first[0].logprobs for other in others)
        assert pieces.at_once == 1

    run(tiny_checkpoint, image, scenario)


def test_prompt_without_room_is_refused_with_the_longest_that_has(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        # Enough for some of it, besides the logits of a piece.
        free_bytes = next(
            size
            for size in itertools.count(2**20, 2**16)
            if longest_prompt(h.worker._module, size) > len(LONG) // 2
        )
        monkeypatch.setattr(h.worker._scoring, "_spare_bytes", lambda: free_bytes)
        with pytest.raises(
            DeviceMemoryShort, match=r"1000 tokens \(echo\).*enough for \d+"
        ) as told:
            await echo(h)
        longest = int(str(told.value).split()[-1])
        assert 0 < longest < len(LONG)
        asked = {"echo": True, "logprobs": 1, "max_tokens": 1}
        assert await h.events(LONG[:longest], **asked)
        assert 0.1 * free_bytes < pieces.most_bytes < free_bytes
        with pytest.raises(DeviceMemoryShort):
            await h.events(LONG[: longest + 1], **asked)
        await until_dropped(h, pieces)

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("where", ["a piece", "the pause before it", "the look for room"])
def test_device_that_fails_fails_the_replica_and_everybody_on_it(
    tiny_checkpoint: Path,
    image: WeightImage,
    pieces: Pieces,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    def explode() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def refuse() -> int:
        raise DeviceMemoryError("cuMemGetInfo failed")

    async def scenario(h: Harness) -> None:
        neighbour = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
        await anext(neighbour)
        if where == "a piece":
            pieces.before = explode
        elif where == "the pause before it":
            monkeypatch.setattr(h.worker._residency, "_pause", explode)
        else:
            monkeypatch.setattr(h.worker._scoring, "_spare_bytes", refuse)
        with pytest.raises(ReplicaFailed):
            await echo(h)
        with pytest.raises(ReplicaFailed):
            h.runtime.check_health()
        with pytest.raises(ReplicaFailed):
            async for _ in neighbour:
                pass

    run(tiny_checkpoint, image, scenario)


HASTY = WatchdogConfig(step_timeout_s=0.5, copy_timeout_s=30, memory_timeout_s=30)


@pytest.mark.alone  # its limit is fractions of a second
def test_long_one_is_no_hang_but_a_piece_that_hangs_is(
    tiny_checkpoint: Path, image: WeightImage, pieces: Pieces
) -> None:
    async def scenario(h: Harness) -> None:
        pieces.before = lambda: time.sleep(0.08)
        begun_s = time.monotonic()
        await echo(h)
        assert time.monotonic() - begun_s > 2 * HASTY.step_timeout_s
        h.runtime.check_health()
        pieces.before = lambda: time.sleep(3)
        with pytest.raises(ReplicaFailed, match="a piece of a prompt's log-probabilities"):
            await echo(h)
        with pytest.raises(EngineDied, match="has not ended after"):
            h.runtime.check_health()

    run(tiny_checkpoint, image, scenario, watchdog=HASTY)
