"""What the KV cache remembers and what it gives up for others, without a model."""

from collections.abc import Sequence
from typing import Any

import pytest

from actors.engine.batching import prefixes
from tests.unit.actors.engine.batching.steps_on_cpu import PAGE, Steps


class Loop(Steps):
    """Steps of a cache that remembers."""

    def __init__(self, num_blocks: int = 64, least: int | None = 1, **limits: Any) -> None:
        super().__init__(
            num_blocks, least=least, **({"max_tokens": 256, "max_sequences": 4} | limits)
        )

    def submit(self, prompt: Sequence[int], max_tokens: int = 1, **sampling: Any) -> str:
        return super().submit(prompt, max_tokens, **sampling)

    def ask(self, prompt: range, max_new_tokens: int = 1) -> int | None:
        """Alone, to its end; how many of its tokens were found."""
        before, name = len(self.outputs), self.submit(prompt, max_new_tokens)
        self.finish()
        told = [each.cached_tokens for each in self.outputs[before:]]
        assert {each.sequence_id for each in self.outputs[before:]} == {name}
        assert told[1:] == [None] * (max_new_tokens - 1), "told once, with the first token"
        return told[0]

    @property
    def remembered(self) -> int:
        """Blocks; each is either known by its digest and unused, or free."""
        (pool,), sectors = self.cache._pools, self.cache._sectors
        known = self.cache._prefixes
        unused = 0 if known is None else known.unused
        assert known is None or len(known._block_of) == len(known._digest_of) == unused
        assert pool.used == 0
        assert unused + pool._num_free + sectors.free * pool.per_sector == self.cache.total_blocks
        return unused


def prompt(pages: int, first: int = 0, more: int = 1) -> range:
    """Tokens that begin with `first`, in so many full pages and some more."""
    return range(first, first + pages * PAGE + more)


@pytest.mark.parametrize("answer", [1, 2, 10])
def test_a_prompt_is_remembered_however_short_its_answer(answer: int) -> None:
    loop = Loop()
    assert loop.ask(prompt(5), answer) == 0
    assert loop.remembered == (5 * PAGE + 1 + answer - 1) // PAGE
    assert loop.ask(prompt(5)) == 5 * PAGE
    assert loop.ask(prompt(3)) == 3 * PAGE
    assert loop.ask(prompt(3, more=0)) == 2 * PAGE, "never all of it"
    assert loop.ask(prompt(3, first=1)) == 0


@pytest.mark.parametrize("more", range(PAGE))
def test_only_blocks_that_were_computed_are_remembered(more: int) -> None:
    """The token that was chosen last has no keys and values."""
    for answer in (1, 2):
        loop = Loop()
        for _ in range(2):
            loop.ask(prompt(2, more=more), answer)
            assert loop.remembered == (2 * PAGE + more + answer - 1) // PAGE


def test_prompts_of_several_batches_are_remembered_whole() -> None:
    loop = Loop(max_tokens=3 * PAGE + 2)
    assert loop.ask(prompt(10)) == 0
    assert loop.remembered == 10
    assert loop.ask(prompt(10)) == 10 * PAGE


@pytest.mark.parametrize("last", [1, PAGE + 1])
def test_steps_that_are_prepared_ahead_leave_no_gap(last: int) -> None:
    loop = Loop(max_tokens=4 * PAGE, overlaps=True)
    loop.ask(range(4 * PAGE + last))
    assert loop.remembered == (4 * PAGE + last) // PAGE


def test_short_beginnings_are_computed() -> None:
    loop = Loop(least=3 * PAGE)
    loop.ask(prompt(5))
    assert [loop.ask(prompt(pages)) for pages in (2, 3, 4)] == [0, 3 * PAGE, 4 * PAGE]


def test_switched_off_nothing_is_looked_up_or_remembered() -> None:
    loop = Loop(least=None)
    assert [loop.ask(prompt(5), 20) for _ in range(2)] == [None, None]
    assert loop.remembered == 0


def test_blocks_that_sequences_share_are_in_use_once() -> None:
    loop = Loop()
    loop.ask(prompt(9))
    for _ in range(3):
        loop.submit(prompt(9), 3)
    loop.pipeline.advance()
    assert (len(loop.scheduler.running), loop.cache.used_blocks) == (3, 9 + 3)
    loop.finish()
    assert loop.cache.used_blocks == 0


def test_equal_prompts_that_come_together_are_remembered_once() -> None:
    loop = Loop()
    for _ in range(3):
        loop.submit(prompt(5), 2)
    loop.finish()
    assert loop.remembered == 5


# --- room for others ---


def test_a_cache_full_of_prefixes_has_room_for_a_prompt_that_needs_all_of_it() -> None:
    loop = Loop(num_blocks=16)
    for number in range(6):
        loop.ask(prompt(3, first=100 * number, more=0))
    assert loop.remembered == 16
    loop.submit(prompt(16, first=1000, more=0))
    assert list(loop.each()) == [{"s7": 16 * PAGE}]
    assert loop.remembered == 16


def test_no_prompt_waits_for_what_is_only_remembered() -> None:
    """Beside one that runs, with less empty than the prompt needs."""
    loop = Loop(num_blocks=20)
    loop.ask(prompt(12))
    running = loop.submit(prompt(2, first=500), 6)
    for number, step in enumerate(loop.each()):
        if number == 1:
            late = loop.submit(prompt(10, first=1000))
        if number == 2:
            assert set(step) == {running, late}
    assert loop.ask(prompt(12)) == 6 * PAGE, "as much as there was no need for is still known"


def test_what_was_used_last_is_given_up_last_and_ends_before_beginnings() -> None:
    loop = Loop(num_blocks=16)
    for number in range(3):
        loop.ask(prompt(4, first=100 * number))
    loop.ask(prompt(1, first=100))  # uses the first page of the second again
    assert loop.remembered == 12
    loop.ask(prompt(8, first=500, more=0))  # four are free, four are taken from the first
    assert loop.remembered == 16
    loop.ask(prompt(2, first=900, more=0))  # and two from the end of the second
    known = loop.cache._prefixes
    assert known is not None
    found = [len(known.match(known.digests([], prompt(4, 100 * n), 4))) for n in range(3)]
    assert found == [0, 2, 4]


def test_what_a_sequence_had_computed_itself_is_not_told_as_found() -> None:
    loop = Loop(num_blocks=16, least=PAGE, max_tokens=3)
    loop.submit([5 + i % 50 for i in range(5 * PAGE)], 60)
    for _ in range(16):
        loop.pipeline.advance()
    late = loop.submit([60 + i % 30 for i in range(8 * PAGE + 2)], 3)
    loop.finish()
    begun = [start for step in loop.steps for name, start, _ in step if name == late]
    assert len({*begun}) < len(begun), "it was put off"
    assert {each.cached_tokens for each in loop.outputs} == {0, None}


def test_prompt_that_waits_is_hashed_once_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = 0
    hash_page = prefixes.blake2b

    def counted(data: bytes, *, digest_size: int) -> Any:
        nonlocal hashed
        hashed += 1
        return hash_page(data, digest_size=digest_size)

    monkeypatch.setattr(prefixes, "blake2b", counted)
    loop = Loop(num_blocks=16)
    beginning = prompt(8, more=0)
    loop.submit(beginning, 40)
    for _ in range(4):
        loop.pipeline.advance()
    loop.submit([*beginning, *prompt(6, first=500)], 1)
    before = hashed
    for _ in range(2 * PAGE):
        loop.pipeline.advance()
    assert loop.scheduler.waiting
    assert hashed - before <= 8 + 6 + 2, "and the two pages that the other fills meanwhile"
    loop.finish()


def test_under_pressure_all_end_and_no_block_is_lost() -> None:
    loop = Loop(num_blocks=20)
    for number in range(40):
        loop.submit(prompt(1 + number % 7, first=100 * (number % 3)), 1 + 5 * (number % 4))
    loop.finish()
    assert {each.sequence_id for each in loop.outputs} == {f"s{n}" for n in range(1, 41)}
    first = {each.sequence_id: each for each in reversed(loop.outputs)}
    assert all(each.cached_tokens is not None for each in first.values())
    assert sum(each.cached_tokens is not None for each in loop.outputs) == 40
    assert loop.remembered > 0


def test_a_cache_that_grows_gives_up_only_what_it_has() -> None:
    loop = Loop(num_blocks=16)
    per_sector = loop.cache._pools[0].per_sector
    assert per_sector == 1
    loop.cache._sectors.use(8)
    for number in range(2):
        loop.ask(prompt(4, first=100 * number, more=0))
    assert loop.cache._prefixes is not None
    assert loop.cache._prefixes.unused == 8
    loop.cache._sectors.use(12)
    loop.ask(prompt(5, first=200, more=0))  # four that came, and the end of the oldest
    assert loop.ask(prompt(4)) == 3 * PAGE
    loop.scheduler.start_over()
    assert loop.cache._prefixes.unused == 0
    assert loop.cache._sectors.free == 12
    assert loop.ask(prompt(4)) == 0
