"""A process that hangs ends; no other does."""

import threading
from concurrent.futures import Future

import pytest

from actors.errors import EngineDied, ReplicaFailed
from actors.worker.last_resort import end_process_after


class Exit:
    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()


def test_process_ends_a_while_after_something_hung(caplog: pytest.LogCaptureFixture) -> None:
    hung: Future[ReplicaFailed] = Future()
    leave = Exit()
    end_process_after(hung, 0.2, leave)
    assert not leave.called.wait(0.4), "nothing has hung"
    hung.set_result(EngineDied("a step of the engine has not ended"))
    assert not leave.called.is_set(), "requests are told first"
    assert leave.called.wait(5)
    assert leave.codes == [1]
    assert "still there after 0.2 s" in caplog.text
