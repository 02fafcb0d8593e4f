"""What the tests' own probe reckons."""

import pytest

from tests.e2e.lateness import Wait, Waits, watched_machine


def test_only_time_in_which_the_machine_ran_counts() -> None:
    waits = Waits()
    waits.add(0.0, 0.6)
    waits.add(1.0, 1.4)
    assert waits.longest_s() == pytest.approx(0.6)
    standstills = [Wait(-0.1, 0.1), Wait(0.2, 0.3), Wait(0.5, 1.1), Wait(5.0, 9.0)]
    assert waits.longest_s(standstills) == pytest.approx(0.3)  # of both
    assert Waits().longest_s() == 0.0


def test_machine_is_watched_from_the_body_on() -> None:
    with watched_machine() as lateness:
        assert lateness == []
    assert all(0 < late.ended_s - late.began_s < 10 for late in lateness)
