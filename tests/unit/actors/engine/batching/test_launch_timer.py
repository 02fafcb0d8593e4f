"""How long launching may wait, on a device that is played here."""

import random
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from actors.engine.batching.inputs import StepSize
from actors.engine.batching.launch_timer import LaunchTimer

DECODE, MIXED = StepSize(64, 64, False), StepSize(256, 64, True)


def played(
    step_s: Callable[[], tuple[StepSize, float]], launch_s: Callable[[], float]
) -> Iterator[tuple[float, float]]:
    """Of each step: seconds that its launch waited for, and seconds that the device had nothing to do."""
    timer = LaunchTimer()
    now_s = free_s = 0.0
    running: list[tuple[float, float]] = []  # end of each, and what it took
    while True:
        spare_s = timer.spare_s(now_s)
        now_s += spare_s + launch_s()
        size, seconds = step_s()
        idle_s = max(0.0, now_s - free_s)
        free_s = max(free_s, now_s) + seconds
        timer.launched(size, now_s)
        running.append((free_s, seconds))
        if len(running) == 2:
            end_s, took_s = running.pop(0)
            now_s = max(now_s, end_s)
            timer.done(took_s, now_s)
        yield spare_s, idle_s


def test_launching_waits_nearly_as_long_as_a_step_takes() -> None:
    steps = played(lambda: (DECODE, 0.006), lambda: 0.0004)
    waited, idle = zip(*islice(steps, 40, 60), strict=True)
    assert 0.0045 < min(waited) <= max(waited) < 0.0056
    assert max(idle) == 0


def test_nothing_is_waited_for_before_a_size_is_known() -> None:
    timer = LaunchTimer()
    assert timer.spare_s(0.0) == 0
    timer.launched(DECODE, 1.0)
    assert timer.spare_s(1.0) == 0
    timer.done(0.5, 1.5)
    timer.launched(MIXED, 1.5)
    assert timer.spare_s(1.5) == 0


def test_nothing_is_waited_for_behind_two_steps() -> None:
    timer = LaunchTimer()
    for _ in range(30):
        timer.launched(DECODE, 0.0)
        timer.done(0.5, 0.5)
    timer.launched(DECODE, 1.0)
    assert timer.spare_s(1.0) > 0
    timer.launched(DECODE, 1.0)
    assert timer.spare_s(1.0) == 0


@pytest.mark.parametrize("jitter", [0.02, 0.1, 0.3])
def test_a_device_with_moods_is_hardly_ever_idle(jitter: float) -> None:
    chance = random.Random(0)

    def step() -> tuple[StepSize, float]:
        size, seconds = chance.choice([(DECODE, 0.006), (MIXED, 0.011)])
        return size, seconds * (1 + jitter * chance.uniform(-1, 1))

    steps = played(step, lambda: chance.uniform(0.0003, 0.0008))
    idle = [idle_s for _, idle_s in islice(steps, 30, 5000)]
    assert sum(idle) < 0.002 * 0.008 * len(idle)


def test_hosts_that_are_late_launch_earlier_from_then_on() -> None:
    late_s = 0.0004
    steps = played(lambda: (DECODE, 0.006), lambda: late_s)
    before, _ = list(islice(steps, 50))[-1]
    late_s = 0.003
    seen = list(islice(steps, 30))
    assert sum(idle_s > 0 for _, idle_s in seen) <= 3
    assert before - 0.0035 < seen[-1][0] < before - 0.0022


def test_what_took_another_time_says_nothing_of_its_size() -> None:
    timer = LaunchTimer()
    timer.launched(DECODE, 0.0)
    timer.done(None, 0.3)
    timer.launched(DECODE, 0.3)
    assert timer.spare_s(0.3) == 0
