"""Who is in a step; the tokens are a rule's instead of a model's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batching.costs import StepCosts
from actors.engine.batching.scheduling import MAX_PROMPTS
from tests.unit.actors.engine.batching.steps_on_cpu import PAGE, Steps

ROWS = 6


def prompt(count: int, first: int = 1) -> list[int]:
    return [first] * count


def test_prompts_join_those_that_decode() -> None:
    loop = Steps()
    loop.submit(prompt(20), 12)
    names, seen = 1, []
    for step in loop.each():
        seen.append(step)
        if names < 6:
            names += 1
            loop.submit(prompt(12))
    assert seen[1:4] == [
        {"s1": 1, "s2": 12},
        {"s1": 1, "s2": 1, "s3": 12},
        {"s1": 1, "s2": 1, "s3": 1, "s4": 12},
    ]
    assert len(seen) == 12, "nobody waits for another's prompt"
    assert len(loop.tokens("s1")) == 12


def test_rows_of_one_token_come_first() -> None:
    loop = Steps(max_tokens=33)
    loop.submit(prompt(5), 9)
    for _ in loop.each():
        if len(loop.steps) == 1:
            loop.submit(prompt(33))  # its last token is left over by the second step
            loop.submit(prompt(7))
    counts = [[count for _, _, count in step] for step in loop.steps]
    assert counts[1:3] == [[1, 32], [1, 1, 7]]


def test_long_prompt_is_computed_in_parts_and_others_wait_for_it() -> None:
    loop = Steps()
    loop.submit(prompt(4), 10)
    for _ in loop.each():
        if len(loop.steps) == 1:
            loop.submit(prompt(100))
            loop.submit(prompt(5))
    assert loop.steps[1:5] == [
        [("s1", 4, 1), ("s2", 0, 31)],
        [("s1", 5, 1), ("s2", 31, 31)],
        [("s1", 6, 1), ("s2", 62, 31)],
        [("s1", 7, 1), ("s2", 93, 7), ("s3", 0, 5)],
    ]


def test_beside_those_that_decode_prompts_get_what_the_target_leaves() -> None:
    costs = StepCosts(0.015, (16, 32, 64))
    costs.note(0.010, 1, [])
    costs.note(0.010 + 16e-4, 1, [(16, 0)])
    loop = Steps(max_tokens=64, costs=costs)
    loop.submit(prompt(60), 30)
    for _ in loop.each():
        if len(loop.steps) == 1:
            loop.submit(prompt(120))
    parts = [count for step in loop.steps[1:] for name, _, count in step if name == "s2"]
    # Alone a prompt may have the whole step; a size full beside others.
    assert loop.steps[0] == [("s1", 0, 60)]
    assert parts[:4] == [63, 57, 1, 1]
    slow = StepCosts(0.015, (16, 32, 64))
    slow.note(0.010, 1, [])
    slow.note(0.010 + 16e-3, 1, [(16, 0)])
    loop = Steps(max_tokens=64, costs=slow)
    loop.submit(prompt(60), 30)
    for _ in loop.each():
        if len(loop.steps) == 1:
            loop.submit(prompt(40))
    parts = [count for step in loop.steps[1:] for name, _, count in step if name == "s2"]
    assert parts[:3] == [15, 15, 10]


def test_no_more_run_than_a_step_has_rows_for_nor_more_prompts_than_its_grid() -> None:
    loop = Steps()
    for _ in range(4 * ROWS):
        loop.submit(prompt(3), 5)
    for _ in loop.each():
        assert len(loop.scheduler.running) <= ROWS
    assert len({output.sequence_id for output in loop.outputs}) == 4 * ROWS
    wide = Steps(200, max_tokens=1000, max_sequences=100)
    for _ in range(80):
        wide.submit(prompt(2), 3)
    for step in wide.each():
        assert sum(count > 1 for count in step.values()) <= MAX_PROMPTS


@pytest.mark.parametrize("overlaps", [False, True])
def test_nobody_is_computed_beyond_its_end(overlaps: bool) -> None:
    loop = Steps(overlaps=overlaps)
    for n in range(1, 6):
        loop.submit(prompt(5), n)
    loop.finish()
    for n in range(1, 6):
        assert loop.tokens(f"s{n}") == list(range(5, 5 + n))
        assert sum(name == f"s{n}" for step in loop.steps for name, _, _ in step) == n


def test_prompt_without_room_does_not_stop_those_that_decode() -> None:
    loop = Steps(num_blocks=7)
    loop.submit(prompt(4 * PAGE - 6), 6)
    seen = []
    for step in loop.each():
        if len(loop.steps) == 1:
            loop.submit(prompt(4 * PAGE), 2)
        seen.append(sorted(step))
    assert seen == [["s1"]] * 6 + [["s2"]] * 2


def test_newest_gives_up_its_blocks_and_nobody_new_comes_before_somebody_ends() -> None:
    loop = Steps(num_blocks=5, max_tokens=64)
    loop.submit(prompt(PAGE - 1), 3 * PAGE)
    loop.submit(prompt(PAGE - 1), 3 * PAGE)
    was_full = False
    for step in loop.each():
        if loop.scheduler.is_full:
            if not was_full:
                loop.submit(prompt(1), 1)
            was_full = True
            assert list(step) == ["s1"]
    assert was_full
    for name in ("s1", "s2"):
        assert loop.tokens(name) == list(range(PAGE - 1, 4 * PAGE - 1))
    ended = [output.sequence_id for output in loop.outputs if output.finish]
    assert ended[0] == "s1"


def test_nobody_waits_for_a_sequence_that_gave_up_its_blocks_and_was_cancelled() -> None:
    loop = Steps(num_blocks=16, max_tokens=256)
    loop.submit(prompt(3), 100)
    loop.submit(prompt(13 * PAGE, 2), 10)
    was_full, short = False, 0
    for _ in loop.each():
        if not was_full and loop.scheduler.is_full:
            was_full = True
            loop.scheduler.remove("s2")
            loop.submit(prompt(5, 3), 4)
        elif was_full:
            short += loop.scheduler.is_short
        if len(loop.tokens("s1")) == 20:
            assert len(loop.tokens("s3")) == 4
    assert was_full
    assert short == 0
    assert len(loop.tokens("s1")) == 100


def test_room_of_a_cancelled_sequence_is_for_those_that_wait() -> None:
    loop = Steps(num_blocks=4)
    loop.submit(prompt(20), 10)
    loop.submit(prompt(20), 3)
    for _ in loop.each():
        if len(loop.steps) == 3:
            loop.scheduler.remove("s1")
            loop.scheduler.remove("of nobody")
    assert len(loop.tokens("s1")) == 3
    assert len(loop.tokens("s2")) == 3
    assert loop.cache.used_blocks == 0


sequences = st.lists(
    st.tuples(st.integers(1, 5 * PAGE), st.integers(1, 3 * PAGE), st.integers(0, 2)), max_size=12
)


@settings(max_examples=150)
@given(
    wanted=sequences,
    num_blocks=st.integers(8, 20),
    overlaps=st.booleans(),
    least=st.sampled_from([None, 1, 2 * PAGE]),
    max_tokens=st.sampled_from([6, 17, 64]),
    events=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(["cancel", "sleep"])), max_size=4
    ),
)
def test_whoever_is_not_cancelled_gets_each_token_once(
    wanted: list[tuple[int, int, int]],
    num_blocks: int,
    overlaps: bool,
    least: int | None,
    max_tokens: int,
    events: list[tuple[int, str]],
) -> None:
    loop = Steps(num_blocks, overlaps=overlaps, least=least, max_tokens=max_tokens)
    names = [loop.submit(prompt(count, first), more) for count, more, first in wanted]
    cancelled = set()
    planned = dict(events)
    for _ in loop.each():
        held = [b for s in loop.scheduler.running.values() for b in s.blocks[0]]
        assert loop.cache.used_blocks == len(set(held))
        assert least is not None or len(held) == len(set(held)), "two have one block"
        assert all(len(s.blocks[0]) * PAGE >= s.computed for s in loop.scheduler.running.values())
        for rows in loop.steps[-1:]:
            assert sum(count for _, _, count in rows) <= max_tokens
        match planned.get(len(loop.steps)):
            case "cancel" if names:
                cancelled.add(names[0])
                loop.scheduler.remove(names[0])
            case "sleep":
                loop.pipeline.read_newest()
                loop.scheduler.start_over()
    for name, (count, more, _) in zip(names, wanted, strict=True):
        expected = list(range(count, count + more))
        got = loop.tokens(name)
        assert got == expected[: len(got)]
        assert name in cancelled or got == expected
    assert loop.scheduler.is_empty
    assert loop.cache.used_blocks == 0
