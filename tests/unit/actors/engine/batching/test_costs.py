"""How long a step is thought to take, and what that leaves for prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.batching.costs import StepCosts
from actors.engine.sizing import STEP_SIZES


def learned(
    per_token_s: float = 30e-6, per_pair_s: float = 1e-9, target_s: float = 0.015
) -> StepCosts:
    """Of a device that decodes 64 rows in 6 ms and 256 in 14, and is asked for prompts of many kinds."""
    costs = StepCosts(target_s, STEP_SIZES)
    for rows, seconds in ((1, 0.005), (64, 0.006), (256, 0.014)):
        costs.note(seconds, rows, [])
    for tokens, ahead in ((128, 0), (500, 0), (400, 4000), (300, 30000), (100, 10000)) * 3:
        pairs = tokens * (ahead + tokens / 2)
        costs.note(0.006 + per_token_s * tokens + per_pair_s * pairs, 64, [(tokens, ahead)])
    return costs


def test_both_costs_of_a_prompt_are_told_apart() -> None:
    found = learned().predict(64, 256, 2000)
    expected = 0.006 + 30e-6 * 256 + 1e-9 * 256 * 2128
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "ahead", "tokens"), [(1, 0, 319), (64, 0, 256), (64, 30_000, 128), (256, 0, 384)]
)
def test_a_step_is_filled_up_to_the_target(rows: int, ahead: int, tokens: int) -> None:
    assert learned().prompt_tokens(rows, ahead, num_waiting=0) == tokens


@pytest.mark.parametrize(
    ("waiting", "tokens"), [(0, 256), (1, 256), (33, 448), (65, 704), (193, 1472)]
)
def test_many_that_wait_have_larger_steps_beside_a_few_that_decode(
    waiting: int, tokens: int
) -> None:
    assert learned().prompt_tokens(64, 0, waiting) == tokens


def test_prompts_get_on_however_slow_the_device() -> None:
    assert learned(per_token_s=1.0).prompt_tokens(64, 0, 0) == 64
    assert StepCosts(1e-9, STEP_SIZES).prompt_tokens(8, 0, 0) > 0


def test_before_anything_was_measured_a_step_is_small() -> None:
    assert StepCosts(0.015, STEP_SIZES).prompt_tokens(4, 0, 0) == 252


def test_steps_that_are_all_alike_say_something_all_the_same() -> None:
    costs = StepCosts(0.015, STEP_SIZES)
    for _ in range(50):
        costs.note(0.006, 64, [])
        costs.note(0.012, 64, [(128, 0)])
    assert costs.predict(64, 128, 0) == pytest.approx(0.012, rel=0.01)
    assert 64 <= costs.prompt_tokens(64, 0, 0) <= 256


measurement = st.tuples(
    st.floats(0, 1),
    st.integers(0, 256),
    st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 131072)), max_size=4),
)


@given(
    st.lists(measurement, max_size=30),
    st.integers(1, 256),
    st.integers(0, 131072),
    st.integers(0, 256),
)
def test_whatever_was_measured_there_is_an_answer(
    measured: list[tuple[float, int, list[tuple[int, int]]]], rows: int, ahead: int, waiting: int
) -> None:
    costs = StepCosts(0.015, STEP_SIZES)
    for each in measured:
        costs.note(*each)
    tokens = costs.prompt_tokens(rows, ahead, waiting)
    assert 1 <= tokens <= STEP_SIZES[-1]
    assert tokens >= min(rows, STEP_SIZES[-1] - rows), "starved by those that decode"
    found = [costs.predict(rows, n, ahead) for n in (1, 10, 1000)]
    assert found == [None] * 3 or found == sorted(f for f in found if f is not None)
