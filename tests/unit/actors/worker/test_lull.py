"""Waiting for a time without requests, and not for ever."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from actors.worker.lull import Lull

LONG_S = 60.0  # longer than any test


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


class Load:
    """Whether anything is in flight; `asked` is set whenever somebody has looked."""

    def __init__(self, is_busy: bool = False) -> None:
        self.is_busy = is_busy
        self.asked = threading.Event()

    def __call__(self) -> bool:
        self.asked.set()
        return self.is_busy

    def until_seen(self) -> None:
        """Return once a look has begun and ended since."""
        for _ in range(2):
            self.asked.clear()
            assert self.asked.wait(5)


def waiting(pool: ThreadPoolExecutor, lull: Lull, load: Load) -> Future[bool]:
    """A call of `wait` that has looked."""
    future = pool.submit(lull.wait)
    assert load.asked.wait(5)
    return future


def test_quiet_has_to_last(pool: ThreadPoolExecutor) -> None:
    now_s, load = 100.0, Load()
    lull = Lull(load, quiet_s=2.0, latest_s=LONG_S, now=lambda: now_s)
    future = waiting(pool, lull, load)
    now_s = 101.9
    load.until_seen()
    assert not future.done()
    now_s = 102.0
    assert future.result(5)


def test_what_is_in_flight_is_waited_for_and_the_quiet_behind_it_begins_anew(
    pool: ThreadPoolExecutor,
) -> None:
    now_s, load = 100.0, Load(is_busy=True)
    lull = Lull(load, quiet_s=0.5, latest_s=1000.0, now=lambda: now_s)
    future = waiting(pool, lull, load)
    now_s = 200.0
    load.until_seen()
    load.is_busy = False
    load.until_seen()
    assert not future.done()
    now_s = 200.5
    assert future.result(5)


def test_replica_that_is_never_quiet_is_not_waited_for_longer_than_so() -> None:
    assert Lull(Load(is_busy=True), quiet_s=LONG_S, latest_s=0.05).wait()


def test_close_lets_go_whoever_waits_and_whoever_comes_later(pool: ThreadPoolExecutor) -> None:
    load = Load()
    lull = Lull(load, quiet_s=LONG_S, latest_s=LONG_S)
    future = waiting(pool, lull, load)
    lull.close()
    assert not future.result(5)
    assert not lull.wait()


def test_rest_lasts_whatever_there_is_and_ends_with_the_close(pool: ThreadPoolExecutor) -> None:
    lull = Lull(Load(is_busy=True), quiet_s=2.0, latest_s=LONG_S)
    assert lull.rest(0.01)
    resting = pool.submit(lull.rest, LONG_S)
    lull.close()
    assert not resting.result(5)
