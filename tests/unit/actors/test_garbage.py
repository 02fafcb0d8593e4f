"""Python's garbage collector, kept off by several threads at once."""

import gc
from collections.abc import Iterator

import pytest

from actors.garbage import without_collections


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_before_the_last_has_left() -> None:
    """They are on threads of their own, and leave in any order."""
    first, second = without_collections(), without_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
