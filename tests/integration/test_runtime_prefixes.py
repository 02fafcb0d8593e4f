"""What a model remembers of prompts and answers in its KV cache: the same tokens, and how many were found."""

import asyncio
import time
from pathlib import Path

import pytest

from actors.image.image import WeightImage
from serve_app.metrics import catalogue as metrics
from serve_app.metrics.instruments import Instruments
from serve_app.metrics.tally import Tally
from tests.integration.runtime_harness import ENGINE, Harness, harness, run

PAGE = ENGINE.page_size
ON = ENGINE.model_copy(update={"min_shared_prefix_tokens": 2 * PAGE})
OFF = ENGINE.model_copy(update={"prefix_caching": False})
SYSTEM = tuple(5 + i % 200 for i in range(150))
PROMPTS = [(*SYSTEM[:length], *range(10 + number, 40)) for number, length in enumerate(
    [150, 150, 90, 40, 20, 150, 128, 144]
)]  # fmt: skip
LONG = tuple(7 + i * i % 230 for i in range(600))  # of several batches


async def answered(
    h: Harness, prompt: tuple[int, ...], **sampling: object
) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's were found."""
    events = await h.events(prompt, ignore_eos=True, **sampling)
    found = {event.cached_tokens for event in events if event.token_ids}
    assert len(found) == 1, "the same in every event"
    return [token for event in events for token in event.token_ids], found.pop()


def pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


def test_tokens_are_the_same_with_and_without(tiny_checkpoint: Path, image: WeightImage) -> None:
    expected: list[list[int]] = []

    async def without(h: Harness) -> None:
        for prompt in [*PROMPTS, LONG]:
            tokens, found = await answered(h, prompt)
            assert (len(tokens), found) == (20, 0)
            expected.append(tokens)
        assert [await answered(h, prompt) for prompt in [*PROMPTS, LONG]] == [
            (tokens, 0) for tokens in expected
        ]

    async def with_it(h: Harness) -> None:
        for _ in range(2):
            told = [await answered(h, prompt) for prompt in [*PROMPTS, LONG]]
            assert [tokens for tokens, _ in told] == expected
        assert [found for _, found in told] == [
            *(pages(len(p) - 1) for p in PROMPTS),
            pages(len(LONG) - 1),
        ]
        told = await asyncio.gather(*(answered(h, prompt) for prompt in [*PROMPTS, LONG]))
        assert [tokens for tokens, _ in told] == expected
        assert min(found for _, found in told) > 0
        await h.until_free()

    run(tiny_checkpoint, image, without, OFF)
    run(tiny_checkpoint, image, with_it, ON)


@pytest.mark.parametrize("answer", [1, 2, 20, 33])
def test_second_turn_of_a_chat_finds_prompt_and_answer(
    answer: int, tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        first, found = await answered(h, SYSTEM, max_tokens=answer)
        assert found == 0
        second = (*SYSTEM, *first, 11, 12, 13)
        # The last token of an answer is never computed.
        answer_2, found = await answered(h, second)
        assert found == pages(len(SYSTEM) + answer - 1)
        _, found = await answered(h, (*second, *answer_2, 21))
        assert found == pages(len(second) + len(answer_2) - 1)

    run(tiny_checkpoint, image, scenario, ON)


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_remembered_over_a_sleep(
    level: int, tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        expected, _ = await answered(h, LONG)
        for _ in range(2):
            assert await answered(h, LONG) == (expected, pages(len(LONG) - 1))
            await h.runtime.sleep(level)
            await h.runtime.wake()
            assert await answered(h, LONG) == (expected, 0)

    run(tiny_checkpoint, image, scenario, ON)


def test_a_full_cache_gives_all_of_it_to_who_needs_it(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """First to a prompt that needs every block, then to more sequences than there is room for."""
    few = {"num_blocks": 24}
    fillers = [tuple(range(50 * n, 50 * n + 100)) for n in range(1, 8)]
    expected: list[list[int]] = []

    async def asked(h: Harness) -> None:
        longest = LONG[: 24 * PAGE - 20]
        told = [await answered(h, prompt, max_tokens=20) for prompt in fillers]
        told.append(await answered(h, longest, max_tokens=20))
        told += [await answered(h, prompt, max_tokens=20) for prompt in fillers]
        told += await asyncio.gather(*(answered(h, p, max_tokens=60) for p in fillers))
        await h.until_free()
        tokens = [tokens for tokens, _ in told]
        expected[:] = expected or tokens
        assert tokens == expected

    run(tiny_checkpoint, image, asked, OFF.model_copy(update=few))
    run(tiny_checkpoint, image, asked, ON.model_copy(update=few))


# --- counted ---


def test_queries_and_hits_are_tokens_of_prompts_each_counted_once(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario() -> None:
        instruments = Instruments(Tally(), time.monotonic)
        async with (
            asyncio.timeout(60),
            harness(tiny_checkpoint, image, ON, observer=instruments) as h,
        ):
            assert counts(instruments) == (0, 0)
            await answered(h, SYSTEM)
            assert counts(instruments) == (len(SYSTEM), 0)
            queries, hits = 2 * len(SYSTEM), pages(len(SYSTEM) - 1)
            await answered(h, SYSTEM)
            assert counts(instruments) == (queries, hits)
            await h.events((1, 2, 3), n=3)
            queries += 9
            assert counts(instruments) == (queries, hits)

            # Frozen by sleeps they start over; what they find then is their own.
            asked = [asyncio.create_task(answered(h, p, max_tokens=60)) for p in PROMPTS]
            for _ in range(3):
                while not h.worker.engine_stats().running and not all(t.done() for t in asked):
                    await asyncio.sleep(0)
                await h.runtime.sleep(1)
                await h.runtime.wake()
            hits += sum(found for _, found in await asyncio.gather(*asked))
            queries += sum(map(len, PROMPTS))
            assert counts(instruments) == (queries, hits)

    asyncio.run(scenario())


def test_switched_off_there_are_neither(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario() -> None:
        instruments = Instruments(Tally(), time.monotonic)
        async with (
            asyncio.timeout(60),
            harness(tiny_checkpoint, image, OFF, observer=instruments) as h,
        ):
            for _ in range(2):
                assert (await answered(h, LONG))[1] == 0
            assert counts(instruments) == (0, 0)

    asyncio.run(scenario())


def counts(instruments: Instruments) -> tuple[float, float]:
    counters = instruments._tally.sums().counters
    queries, hits = (metrics.PREFIX_QUERIES.name, ()), (metrics.PREFIX_HITS.name, ())
    return counters.get(queries, 0), counters.get(hits, 0)
