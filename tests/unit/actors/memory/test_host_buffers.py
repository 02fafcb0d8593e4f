"""Two buffers in turn: who waits, what is used again, and when each is given back."""

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest
import torch

from actors.errors import DeviceMemoryError
from actors.memory.host_buffers import HostBuffers


@dataclass
class Host:
    refuses: bool = False
    taken: list[torch.Tensor] = field(default_factory=list)
    given: SimpleQueue[torch.Tensor] = field(default_factory=SimpleQueue)

    def take(self, size: int) -> torch.Tensor:
        if self.refuses:
            raise DeviceMemoryError("no more may be pinned")
        self.taken.append(torch.empty(size, dtype=torch.uint8))
        return self.taken[-1]

    def give(self, memory: torch.Tensor) -> None:
        self.given.put(memory)


def test_kept_ones_are_used_again_until_they_are_let_go() -> None:
    host = Host()
    buffers = HostBuffers(host.take, host.give)
    buffers.keep()
    for _ in range(3):
        with buffers.one(10) as first, buffers.one(8) as second:
            assert (len(first), len(second)) == (10, 8)
            assert first.data_ptr() != second.data_ptr()
    assert len(host.taken) == 2
    assert host.given.empty()
    with buffers.one(5):
        buffers.let_go()
        given = [host.given.get(timeout=10)]
        assert host.given.empty()
    given.append(host.given.get(timeout=10))
    assert {id(each) for each in given} == {id(each) for each in host.taken}


def test_one_that_is_too_small_is_given_back() -> None:
    host = Host()
    buffers = HostBuffers(host.take, host.give)
    buffers.keep()
    for size in (10, 11):
        with buffers.one(size) as buffer:
            assert len(buffer) == size
    assert host.given.get(timeout=10) is host.taken[0]
    assert host.given.empty()


def test_a_third_waits_for_a_turn() -> None:
    host = Host()
    buffers = HostBuffers(host.take, host.give)
    has_it = threading.Event()

    def third() -> None:
        with buffers.one(1):
            has_it.set()

    with buffers.one(1):
        with buffers.one(1):
            waiting = threading.Thread(target=third)
            waiting.start()
            assert not has_it.wait(0.1)
        assert has_it.wait(10)
    waiting.join()


def test_what_may_not_be_pinned_is_ordinary_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    host = Host(refuses=True)
    buffers = HostBuffers(host.take, host.give)
    with buffers.one(7) as buffer:
        assert len(buffer) == 7
    assert "no more may be pinned" in caplog.text
    assert host.given.empty()
