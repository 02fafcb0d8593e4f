"""What counts as growth, of processes whose memory is made up."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.process_memory import MIB, Growth

PID = 2**22 + 1  # above all that Linux gives
STEADY = [97.0, 95.2, 101.3, 93.4, 99.1, 96.0, 102.0, 94.8, 100.2, 98.3]


class MadeUp(psutil.Process):  # type: ignore[misc]
    """What it has after each round."""

    pid = PID

    def __init__(self, mib: Sequence[float], handles: Sequence[int] | None = None) -> None:
        # Not the real one's, which looks for the process.
        self._mib = iter(mib)
        self._handles = iter(handles or [60] * len(mib))

    def cmdline(self) -> list[str]:
        return ["ray::ProxyActor"]

    def memory_maps(self, grouped: bool) -> list[Any]:
        held = round(next(self._mib) * MIB)
        return [SimpleNamespace(addr="1000-2000", path="[heap]", anonymous=held)]

    def num_fds(self) -> int:
        return next(self._handles)


def check(mib: Sequence[float], handles: Sequence[int] | None = None) -> None:
    growth, process = Growth(), MadeUp(mib, handles)
    for _ in mib:
        growth.count([process])
    growth.check()


def step(at: int, height: float) -> list[float]:
    """Ten rounds with some noise, and so much more from one of them on."""
    noise = (0.3, -0.2, 0.0, 0.4, -0.3, 0.1, -0.1, 0.2, -0.4, 0.0)
    return [90 + each + (height if round_ >= at else 0) for round_, each in enumerate(noise)]


@pytest.mark.parametrize(
    "mib",
    [
        pytest.param([90.0] * 10, id="none at all"),
        pytest.param(STEADY, id="noise"),
        pytest.param([*STEADY[:4], 83.4, *STEADY[5:]], id="a round in the middle 10 MiB below all"),
        pytest.param([*STEADY[:5], 120.0, *STEADY[6:]], id="a round in the middle far above"),
        pytest.param(step(9, 40.0), id="the last round far above"),
        pytest.param(
            [91.1, 97.4, 93.5, 102.7, 97.5, 102.5, 104.0, 99.5, 97.9, 92.0], id="seen of a proxy"
        ),
        pytest.param(step(1, 30.0), id="warm-up in the first round"),
        pytest.param(step(3, 30.0), id="warm-up in three rounds"),
        pytest.param([60, 75, 85, *[90 + each / 10 for each in range(7)]], id="caches fill"),
        pytest.param([140.0 - each for each in range(10)], id="less and less"),
    ],
)
def test_noise_and_warm_up_are_no_growth(mib: Sequence[float]) -> None:
    check(mib)


@pytest.mark.parametrize(
    "mib",
    [
        pytest.param([90 + 0.8 * each for each in range(10)], id="a slow leak"),
        pytest.param(
            [each + 0.9 * round_ for round_, each in enumerate(step(99, 0.0))],
            id="a slow leak in noise",
        ),
        pytest.param(
            [each + 1.5 * round_ for round_, each in enumerate(STEADY)], id="a leak in much noise"
        ),
        pytest.param(
            [90 + 0.8 * each - (30 if each == 8 else 0) for each in range(10)],
            id="a slow leak with one round far below",
        ),
        pytest.param(step(5, 6.0), id="a step in the middle"),
        pytest.param(step(7, 6.0), id="a step at the end"),
    ],
)
def test_leaks_are_growth(mib: Sequence[float]) -> None:
    with pytest.raises(AssertionError, match="ray::ProxyActor: 9"):
        check(mib)


def test_leaks_of_handles_are_growth_and_one_that_is_open_by_chance_is_none() -> None:
    check([90.0] * 10, [60, 64, 66, 66, 66, 72, 66, 66, 66, 71])
    with pytest.raises(AssertionError):
        check([90.0] * 10, [60 + each // 2 for each in range(10)])


def test_process_that_has_ended_since_is_not_looked_at() -> None:
    growth = Growth()
    growth.count([MadeUp([90.0])])
    growth.count([])
    growth.check()
