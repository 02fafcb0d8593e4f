"""Waiting for a time without requests, and not for ever."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from actors.worker.lull import Lull

LONG_S = 60.0  # longer than any test


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def waiting(pool: ThreadPoolExecutor, lull: Lull) -> Future[bool]:
    """A call of `wait` that has begun."""
    begun = threading.Event()

    def wait() -> bool:
        begun.set()
        return lull.wait()

    future = pool.submit(wait)
    assert begun.wait(5)
    return future


def test_quiet_has_to_last(pool: ThreadPoolExecutor) -> None:
    now_s = 100.0
    lull = Lull(quiet_s=2.0, latest_s=LONG_S, now=lambda: now_s)
    now_s = 101.0
    future = waiting(pool, lull)
    with pytest.raises(TimeoutError):
        future.result(0.1)
    now_s = 102.0
    assert future.result(5)
    assert lull.wait()  # and it lasts


def test_request_in_flight_is_waited_for_and_the_quiet_behind_it_begins_anew(
    pool: ThreadPoolExecutor,
) -> None:
    now_s = 100.0
    lull = Lull(quiet_s=0.5, latest_s=1000.0, now=lambda: now_s)
    with lull.interrupted():
        with lull.interrupted():
            future = waiting(pool, lull)
        now_s = 200.0
        with pytest.raises(TimeoutError):
            future.result(0.1)
    with pytest.raises(TimeoutError):
        future.result(0.1)
    now_s = 200.5
    assert future.result(5)


def test_replica_that_is_never_quiet_is_not_waited_for_longer_than_so() -> None:
    lull = Lull(quiet_s=LONG_S, latest_s=0.05)
    with lull.interrupted():
        assert lull.wait()


def test_close_lets_go_whoever_waits_and_whoever_comes_later(pool: ThreadPoolExecutor) -> None:
    lull = Lull(quiet_s=LONG_S, latest_s=LONG_S)
    future = waiting(pool, lull)
    lull.close()
    assert not future.result(5)
    assert not lull.wait()


def test_rest_lasts_whatever_there_is_and_ends_with_the_close(pool: ThreadPoolExecutor) -> None:
    lull = Lull(quiet_s=2.0, latest_s=LONG_S)
    with lull.interrupted():
        assert lull.rest(0.01)
    resting = pool.submit(lull.rest, LONG_S)
    lull.close()
    assert not resting.result(5)
