"""Beginnings that prompts share, for pages of every size: whole pages, from so many tokens on, same tokens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the model of the benches needs it")
from actors.engine.batching.sequence import LoopSequence
from serve_app.bench.local import LocalModel, build_model, load_of, subject_of

KEYS = {
    "device": "cpu",
    "max_batch_tokens": 512,
    "max_requests_per_batch": 4,
    "cpu_threads": 1,
}
BEGINNING = tuple(5 + i % 200 for i in range(300))
PROMPTS = ((*BEGINNING, 11, 12, 13), (*BEGINNING, 21, 22), (*BEGINNING[:100], 31, 32))


@contextmanager
def noted_matches(model: LocalModel) -> Iterator[list[int]]:
    cache = model.worker._engine._loop.cache
    admit, matches = cache.admit, []

    def noted(sequence: LoopSequence, spare: int) -> bool:
        admitted: bool = admit(sequence, spare)
        matches.append(sequence.computed)
        return admitted

    cache.admit = noted
    yield matches


def answers(
    checkpoint: Path, page_size: int, least: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """One after the other: the tokens, and how many each prompt shared."""
    keys = {"page_size": page_size, "num_blocks": -(-2048 // page_size)}
    keys |= {"min_shared_prefix_tokens": least}

    async def scenario() -> tuple[list[tuple[int, ...]], list[int]]:
        subject = subject_of(checkpoint, KEYS, keys)
        model = await build_model(subject, load_of(subject, None))
        try:
            await model.runtime.wake()
            with noted_matches(model) as matches:
                found = [(await model.ask(prompt, 12)).token_ids for prompt in PROMPTS]
            return found, matches
        finally:
            await model.close()

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> list[tuple[int, ...]]:
    """The answers where nothing is shared."""
    found, matches = answers(tiny_checkpoint, 256, least=4096)
    assert matches == [0, 0, 0]
    return found


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 256])
def test_full_pages_are_shared_and_answers_stay(
    page_size: int, tiny_checkpoint: Path, alone: list[tuple[int, ...]]
) -> None:
    found, matches = answers(tiny_checkpoint, page_size, least=1)
    assert matches == [0, 300 // page_size * page_size, 100 // page_size * page_size]
    assert found == alone


@pytest.mark.parametrize(
    ("least", "shared"),
    [(256, [0, 288, 0]), (288, [0, 288, 0]), (289, [0, 0, 0]), (96, [0, 288, 96])],
)
def test_short_beginnings_are_computed(
    least: int, shared: list[int], tiny_checkpoint: Path, alone: list[tuple[int, ...]]
) -> None:
    found, matches = answers(tiny_checkpoint, 32, least)
    assert matches == shared
    assert found == alone
