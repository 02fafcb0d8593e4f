"""Whose image leaves: the longest unused first, nobody who needs it, nobody in vain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.holder.host_memory import Need, Resident, may_come, who_goes


def image(name: str, size: int, idle_s: float, need: Need = Need.NONE) -> Resident[str]:
    return Resident(name, size, need, idle_s)


def test_longest_unused_goes_first() -> None:
    images = [image("new", 5, 1), image("old", 5, 30), image("older", 5, 60)]
    assert who_goes(images, 5) == ["older"]
    assert who_goes(images, 6) == ["older", "old"]
    assert who_goes(images, 15) == ["older", "old", "new"]


@pytest.mark.parametrize("need", [Need.AWAKE, Need.CHANGING])
def test_what_is_needed_stays(need: Need) -> None:
    images = [image("needed", 5, 90, need), image("asleep", 5, 1)]
    assert who_goes(images, 5) == ["asleep"]


def test_nobody_goes_in_vain() -> None:
    images = [image("asleep", 5, 9), image("awake", 5, 9, Need.AWAKE)]
    assert who_goes(images, 6) is None
    assert who_goes([], 1) is None


def test_nobody_goes_whose_room_another_makes_up_for() -> None:
    images = [image("small", 1, 90), image("large", 10, 50), image("new", 10, 1)]
    assert who_goes(images, 8) == ["large"]
    assert who_goes(images, 11) == ["small", "large"]


def test_waiting_is_worth_it_for_those_that_change_but_not_for_the_awake() -> None:
    images = [image("a", 5, 0, Need.CHANGING), image("b", 5, 0), image("c", 5, 0, Need.AWAKE)]
    assert may_come(images, 10)
    assert not may_come(images, 11)


RESIDENTS = st.lists(
    st.builds(Resident, st.integers(), st.integers(1, 9), st.sampled_from(Need), st.floats(0, 99)),
    max_size=8,
    unique_by=lambda resident: resident.key,
)


@given(RESIDENTS, st.integers(1, 40))
def test_whoever_goes_is_enough_and_none_of_them_too_much(
    images: list[Resident[int]], missing: int
) -> None:
    going = who_goes(images, missing)
    by_key = {each.key: each for each in images}
    free = [each for each in images if each.need is Need.NONE]
    if going is None:
        assert sum(each.size for each in free) < missing
        return
    sizes = [by_key[key].size for key in going]
    assert all(by_key[key].need is Need.NONE for key in going)
    assert sum(sizes) >= missing
    assert all(sum(sizes) - size < missing for size in sizes)
