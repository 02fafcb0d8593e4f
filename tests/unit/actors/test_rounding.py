"""Whole numbers, rounded up."""

import math

from hypothesis import given
from hypothesis import strategies as st

from actors.rounding import cdiv, next_power_of_2, round_up


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_so_many_parts_hold_all_and_one_less_does_not(n, parts_of):
    count = cdiv(n, parts_of)
    assert count * parts_of >= n > (count - 1) * parts_of


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_multiple_is_the_least_that_is_as_large(n, multiple):
    found = round_up(n, multiple)
    assert found % multiple == 0
    assert found >= n > found - multiple


@given(st.integers(1, 2**40))
def test_power_of_2_is_the_least_that_is_as_large(n):
    power = next_power_of_2(n)
    assert math.log2(power).is_integer()
    assert power >= n > power // 2
