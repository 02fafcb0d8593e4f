"""What the KV cache remembers and what it gives up for others, in transformers' own scheduler on a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest

from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.sequence import SequenceState
from actors.engine.batching.upstream import FutureRequestState, PagedAttentionCache
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import SequenceSampling
from actors.text.sampling_defaults import ResolvedSampling
from tests.unit.actors.engine.batching.manager_on_cpu import manager_on_cpu

PAGE = 8


class Loop:
    """Steps of one processor; the tokens are a rule's instead of a model's."""

    def __init__(self, num_blocks: int = 64, least: int = 1, **limits: Any) -> None:
        manager = manager_on_cpu(
            page_size=PAGE,
            num_blocks=num_blocks,
            max_requests_per_batch=4,
            **({"max_batch_tokens": 256} | limits),
        )
        self.processor = manager._create_batch_processor()
        self.cache = KvCache(self.processor.cache, least)
        self.paged: PagedAttentionCache = self.cache.paged
        self.cache._place(self.paged.cache_tensor)  # as a move into an arena does
        (self.allocator,) = self.paged.cache_allocators.values()
        self.outputs: list[EngineOutput] = []
        manager.output_router.deliver_batch = self.outputs.extend  # type: ignore[method-assign]
        self.number = 0

    def submit(self, prompt: range, max_new_tokens: int = 1) -> str:
        self.number += 1
        state = SequenceState(
            request_id=f"s{self.number}",
            initial_tokens=list(prompt),
            max_new_tokens=max_new_tokens,
            streaming=True,
            sampling=SequenceSampling(ResolvedSampling(temperature=0.0), tuple(prompt), 0),
        )
        self.processor.scheduler.add_waiting_request(state)
        return state.request_id

    def batches(self) -> Iterator[dict[str, FutureRequestState]]:
        """Each batch by sequence, until none is left."""
        for _ in range(500):
            if not self.processor.prepare_next_batch():
                return
            batch = self.processor.inputs_and_outputs.requests_in_batch
            yield {future.state.request_id: future for future in batch}
            self.processor.update_batch()
        raise AssertionError("it does not end")

    def finish(self) -> None:
        for _ in self.batches():
            pass

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
        """Blocks; each is either known by its hash and unused, or free."""
        ledger, pool = self.allocator.ledger, self.paged.pool
        unused = len(ledger.cached_blocks)
        assert len(ledger.hash_to_block) == len(ledger.block_to_hash) == unused
        assert not self.allocator.block_table
        assert not ledger.shared_ref_counts
        free = pool.count_free_blocks(self.allocator.index)
        free += pool.num_free_sectors * self.allocator.blocks_per_sector
        assert unused + free == self.allocator.num_blocks
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
    loop = Loop(max_batch_tokens=3 * PAGE + 2)
    assert loop.ask(prompt(10)) == 0
    assert loop.remembered == 10
    assert loop.ask(prompt(10)) == 10 * PAGE


@pytest.mark.parametrize("last", [1, PAGE + 1])
def test_batches_that_are_prepared_ahead_leave_no_gap(last: int) -> None:
    """As asynchronous batching has it: the end of a prompt is scheduled before its beginning was read."""
    loop = Loop(max_batch_tokens=4 * PAGE)
    loop.submit(range(4 * PAGE + last), 1)
    scheduler, found = loop.processor.scheduler, []
    for tokens in (4 * PAGE, last):
        (batch,), *_ = scheduler.schedule_batch(4 * PAGE, loop.paged.max_tokens_read)
        assert batch.query_length == tokens
        batch.state.position_offset += tokens  # as preparing its tensors does
        found.append(batch)
    state = found[-1].state
    assert not found[0].has_new_token  # and as its sequence decodes by now, nothing is done with it
    state.update_and_check_completion(1, None)
    loop.paged.mark_complete_blocks(state, found[-1].complete_blocks)
    scheduler.finish_request(state.request_id)
    assert loop.remembered == (4 * PAGE + last) // PAGE


def test_short_beginnings_are_computed() -> None:
    loop = Loop(least=3 * PAGE)
    loop.ask(prompt(5))
    assert [loop.ask(prompt(pages)) for pages in (2, 3, 4)] == [0, 3 * PAGE, 4 * PAGE]


def test_switched_off_nothing_is_looked_up_or_remembered() -> None:
    loop = Loop(allow_block_sharing=False)
    assert [loop.ask(prompt(5), 20) for _ in range(2)] == [None, None]
    assert loop.remembered == 0


def test_blocks_that_sequences_share_are_in_use_once() -> None:
    loop = Loop()
    loop.ask(prompt(9))
    for _ in range(3):
        loop.submit(prompt(9), 3)
    seen = [(len(batch), loop.cache.used_blocks) for batch in loop.batches()]
    assert seen == [(3, 9 + 3)] * 3
    assert loop.cache.used_blocks == 0


# --- room for others ---


def test_a_cache_full_of_prefixes_has_room_for_a_prompt_that_needs_all_of_it() -> None:
    loop = Loop(num_blocks=16)
    for number in range(6):
        loop.ask(prompt(3, first=100 * number, more=0))
    assert loop.remembered == 16
    loop.submit(prompt(16, first=1000, more=0))
    (first, *later) = list(loop.batches())
    assert list(first) == ["s7"]
    assert first["s7"].query_length == 16 * PAGE
    assert not later
    assert loop.remembered == 16


def test_no_prompt_waits_for_what_is_only_remembered() -> None:
    """Beside one that runs, with more than transformers' margin empty, but less than the prompt needs."""
    loop = Loop(num_blocks=20)
    loop.ask(prompt(12))
    running = loop.submit(prompt(2, first=500), 6)
    for number, batch in enumerate(loop.batches()):
        if number == 1:
            late = loop.submit(prompt(10, first=1000))
        if number == 2:
            assert set(batch) == {running, late}
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
    found = [loop.allocator.match_prefix_blocks(list(prompt(4, 100 * n))) for n in range(3)]
    assert [len(blocks) for blocks in found] == [0, 2, 4]


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
    loop.cache._pool.use(8)
    loop.paged.num_sectors = 8
    for number in range(2):
        loop.ask(prompt(4, first=100 * number, more=0))
    assert len(loop.allocator.ledger.cached_blocks) == 8
    assert loop.paged.compute_free_capacity() == 1
    loop.cache._pool.use(12)
    loop.paged.num_sectors = 12
    loop.ask(prompt(5, first=200, more=0))  # four that came, and the end of the oldest
    assert loop.ask(prompt(4)) == 3 * PAGE
    loop.paged.reset()
    assert not loop.allocator.ledger.cached_blocks
    assert loop.paged.pool.num_free_sectors == 12
    assert loop.ask(prompt(4)) == 0
