"""Work that others can have left alone."""

import pytest

from actors.worker.kept_off import KeptOff


def test_who_finds_it_kept_off_or_at_work_leaves_that_as_it_is() -> None:
    work = KeptOff()
    with work.kept_off() as first, work.kept_off() as second:
        assert (first, second) == (True, False)
        assert not work.keep_off()
    assert work.keep_off()
    with work.kept_off() as third:
        assert not third
    assert not work.keep_off()
    work.let_go_on()
    assert work.keep_off()


def test_it_goes_on_after_a_failure() -> None:
    work = KeptOff()
    with pytest.raises(ValueError, match="no"), work.kept_off():
        raise ValueError("no")
    assert work.keep_off()
