"""What sequences that a sleep freezes find again of their keys and values behind the wake."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest

from actors.engine.batching.scheduling import Step
from actors.image.image import WeightImage
from actors.protocol import TokenEvent
from tests.integration.runtime_harness import ENGINE, Harness, run

PAGE = ENGINE.page_size
FROM = ENGINE.model_copy(update={"max_batch_tokens": 64, "min_shared_prefix_tokens": 2 * PAGE})
BEGINNING = tuple(5 + i % 200 for i in range(100))
PROMPTS = [(*BEGINNING, *range(10 + n, 40 * n)) for n in range(1, 4)]
PROMPTS.append(tuple(7 + i * i % 230 for i in range(260)))
LONG = {"max_tokens": 100, "ignore_eos": True}
SAMPLED = LONG | {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5}
SAMPLINGS: dict[str, dict[str, object]] = {"greedy": LONG, "seeded": SAMPLED}


class Frozen:
    """Answers under way, and what of them is computed behind the next step."""

    def __init__(self, h: Harness) -> None:
        self.h = h
        self.saved = h.worker._engine._loop.cache.saved
        self.tokens: list[list[int]] = []
        self.streams: list[AsyncGenerator[TokenEvent]] = []
        self.computed: list[tuple[str, int, int]] = []
        self.full: dict[
            str, int
        ] = {}  # pages of each that a sleep has frozen, all but the last token
        runner = h.worker._engine._loop.runner
        launch = runner.launch

        def noted(step: Step) -> None:
            self.computed += [(row.sequence.name, row.start, row.count) for row in step.rows]
            launch(step)

        runner.launch = noted  # type: ignore[method-assign]

    async def begin(self, **sampling: object) -> None:
        for prompt in PROMPTS:
            stream = self.h.runtime.generate(self.h.prepare(prompt, **sampling))
            self.streams.append(cast("AsyncGenerator[TokenEvent]", stream))
        first = await asyncio.gather(*(anext(stream) for stream in self.streams))
        self.tokens = [list(event.token_ids) for event in first]

    async def sleep(self, level: int = 1) -> None:
        await self.h.runtime.sleep(level)
        waiting = self.h.worker._engine._loop._scheduler.waiting
        self.full = {name: (len(each.tokens) - 1) // PAGE for name, each in waiting.items()}
        self.computed.clear()

    async def rest(self) -> list[list[int]]:
        async def rest_of(number: int) -> list[int]:
            events = [event async for event in self.streams[number]]
            return self.tokens[number] + [i for event in events for i in event.token_ids]

        return await asyncio.gather(*(rest_of(n) for n in range(len(self.streams))))

    def starts(self) -> dict[str, int]:
        """Where each sequence began to be computed."""
        found: dict[str, int] = {}
        for name, start, _ in self.computed:
            found.setdefault(name, start)
        return found


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, image: WeightImage) -> dict[str, list[list[int]]]:
    """What each prompt gives alone, where nothing sleeps."""
    found = {}

    async def scenario(h: Harness) -> None:
        for name, sampling in SAMPLINGS.items():
            found[name] = [await h.tokens(prompt, **sampling) for prompt in PROMPTS]

    run(tiny_checkpoint, image, scenario, FROM)
    return found


async def remember_prompts(h: Harness) -> None:
    """The beginning that some share is found by all of them."""
    for prompt in PROMPTS:
        await h.tokens(prompt, max_tokens=1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("sleeps", [(1,), (1, 1)], ids=["once", "twice"])
def test_they_go_on_from_their_last_full_page(
    sampling: str,
    sleeps: tuple[int, ...],
    tiny_checkpoint: Path,
    image: WeightImage,
    expected: dict[str, list[list[int]]],
) -> None:
    async def scenario(h: Harness) -> None:
        await remember_prompts(h)
        frozen = Frozen(h)
        await frozen.begin(**SAMPLINGS[sampling])
        for level in sleeps:
            await frozen.sleep(level)
        assert len(frozen.full) == len(PROMPTS)
        shared = 2 * (len(BEGINNING) // PAGE)  # by the first three
        assert frozen.saved.blocks == sum(frozen.full.values()) - shared
        await h.runtime.wake()
        assert await frozen.rest() == expected[sampling]
        assert frozen.starts() == {name: pages * PAGE for name, pages in frozen.full.items()}
        assert frozen.saved.blocks == 0
        await h.until_free()

    run(tiny_checkpoint, image, scenario, FROM)


@pytest.mark.parametrize("sleeps", [(2,), (1, 2)], ids=["at once", "behind level 1"])
def test_level_2_keeps_nothing_in_host_memory(
    sleeps: tuple[int, ...],
    tiny_checkpoint: Path,
    image: WeightImage,
    expected: dict[str, list[list[int]]],
) -> None:
    async def scenario(h: Harness) -> None:
        await remember_prompts(h)
        frozen = Frozen(h)
        await frozen.begin(**LONG)
        for level in sleeps:
            await frozen.sleep(level)
        assert (frozen.saved.blocks, frozen.saved.room) == (0, 0)
        await h.runtime.wake()
        assert await frozen.rest() == expected["greedy"]
        assert min(frozen.starts().values()) == 0

    run(tiny_checkpoint, image, scenario, FROM)


def test_nothing_is_saved_of_who_was_aborted_just_before(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        frozen = Frozen(h)
        await frozen.begin(**LONG)
        h.runtime.abort_in_flight()
        await frozen.rest()
        await frozen.sleep()
        assert (frozen.full, frozen.saved.blocks) == ({}, 0)

    run(tiny_checkpoint, image, scenario, FROM)


def test_who_leaves_while_frozen_frees_what_was_saved(
    tiny_checkpoint: Path, image: WeightImage, expected: dict[str, list[list[int]]]
) -> None:
    async def scenario(h: Harness) -> None:
        await h.tokens(PROMPTS[-1], max_tokens=1)
        frozen = Frozen(h)
        await frozen.begin(**LONG)
        await frozen.sleep()
        before = frozen.saved.blocks
        for stream in frozen.streams[:-1]:
            await stream.aclose()
        await h.runtime.settled()  # behind the cancels
        left = frozen.saved.blocks
        assert len(PROMPTS[-1]) // PAGE <= left < before
        await h.runtime.wake()
        frozen.streams, frozen.tokens = frozen.streams[-1:], frozen.tokens[-1:]
        assert await frozen.rest() == expected["greedy"][-1:]
        assert frozen.saved.blocks == 0

    run(tiny_checkpoint, image, scenario, FROM)


def test_host_memory_goes_with_a_sleep_that_freezes_nobody_and_with_the_engine(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    found: list[Frozen] = []

    async def scenario(h: Harness) -> None:
        frozen = Frozen(h)
        found.append(frozen)
        await frozen.begin(**LONG)
        await frozen.sleep()
        assert frozen.saved.room > 0
        await h.runtime.wake()
        await frozen.rest()
        await h.until_free()
        await frozen.sleep()
        while frozen.saved.room:  # a moment later
            await asyncio.sleep(0.01)
        await h.runtime.wake()
        frozen.streams.clear()
        await frozen.begin(**LONG)
        await frozen.sleep()
        assert frozen.saved.blocks > 0

    run(tiny_checkpoint, image, scenario, FROM)
    assert (found[0].saved.blocks, found[0].saved.room) == (0, 0)


def test_without_a_prefix_cache_they_compute_theirs_again(
    tiny_checkpoint: Path, image: WeightImage, expected: dict[str, list[list[int]]]
) -> None:
    async def scenario(h: Harness) -> None:
        frozen = Frozen(h)
        await frozen.begin(**LONG)
        await frozen.sleep()
        assert frozen.saved.blocks == 0
        await h.runtime.wake()
        assert await frozen.rest() == expected["greedy"]

    run(tiny_checkpoint, image, scenario, FROM.model_copy(update={"prefix_caching": False}))
