"""A model that serves while its KV cache still gets its memory, part by part."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.engine.batching import kv_growth
from actors.errors import DeviceMemoryError, DeviceMemoryShort, ReplicaFailed
from actors.worker import growth
from actors.worker.model_memory import ModelMemory
from tests.integration.runtime_harness import ENGINE, Harness, load, run

PROMPTS = [f"Prompt {i}: " + "the quick brown fox " * (20 + i) for i in range(8)]


LIMITS = ENGINE.model_copy(update={"max_model_len": 640, "num_blocks": 200})


class Gate:
    """Lets parts after the first be mapped, or has them fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = False  # a part has stood before it
        self.failure: Exception | None = None
        self.mapped = 0

    def pass_through(self) -> None:
        self.reached = True
        assert self.open.wait(30)
        if self.failure is not None:
            raise self.failure
        self.mapped += 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Caches of parts as large as the longest sequence, then of 512 KiB."""
    monkeypatch.setattr(kv_growth, "_FIRST_BYTES", 1)
    monkeypatch.setattr(kv_growth, "_NEXT_BYTES", 2**19)
    monkeypatch.setattr(kv_growth, "_ALIGNMENT", 2**12)
    gate = Gate()
    gate.open.set()
    map_more = ModelMemory.map_more

    def map_through_gate(memory: ModelMemory) -> bool:
        if memory.next_part_bytes():
            gate.pass_through()
        return map_more(memory)

    monkeypatch.setattr(ModelMemory, "map_more", map_through_gate)
    yield gate
    gate.open.set()


def untouched(h: Harness) -> bool:
    """Nothing was ever written behind the first part of the cache."""
    arena = h.worker._engine.kv_arena
    first = arena.spans[0].size
    return not arena.first_bytes(arena.size)[first:].any()


def test_answers_are_the_same_while_it_grows(tiny_checkpoint: Path, gate: Gate) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        expected = await asyncio.gather(*(h.tokens(p) for p in PROMPTS))
        parts = len(h.worker._engine.kv_arena.spans) - 1
        assert parts > 3
        for _ in range(3):
            await h.runtime.sleep(1)
            assert h.worker.memory.mapped_bytes == 0
            gate.mapped = 0
            asked = [asyncio.create_task(h.tokens(p)) for p in PROMPTS]
            await h.runtime.wake()
            assert await asyncio.gather(*asked) == expected
            await h.runtime.settled()
            assert gate.mapped == parts
            assert h.worker.memory.wake_bytes == 0
            assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == expected

    run(tiny_checkpoint, load(tiny_checkpoint), scenario, LIMITS)


def test_more_than_the_first_part_holds_is_served_in_turns(
    tiny_checkpoint: Path, gate: Gate
) -> None:
    """And what is not mapped is not touched: on a card, that would be the end of the process."""

    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        expected = [await h.tokens(p) for p in PROMPTS]
        await h.runtime.sleep(1)
        assert untouched(h)
        gate.open.clear()
        await h.runtime.wake()
        assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == expected
        longest = tuple(range(20, 20 + h.worker._engine.max_model_len - 20))
        assert len(await h.tokens(longest)) == 20
        assert untouched(h)
        gate.open.set()

    run(tiny_checkpoint, load(tiny_checkpoint), scenario, LIMITS)


def test_sleep_need_not_wait_for_all_parts(tiny_checkpoint: Path, gate: Gate) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        for _ in range(3):
            await h.runtime.sleep(1)
            gate.open.clear()
            gate.reached, gate.mapped = False, 0
            await h.runtime.wake()
            while not gate.reached:
                await asyncio.sleep(0.001)
            sleep = asyncio.create_task(h.runtime.sleep(1))
            while h.worker._control._thread._work_queue.empty():  # until it stands behind that part
                await asyncio.sleep(0.001)
            gate.open.set()
            await sleep
            assert gate.mapped <= 1
            assert h.worker.memory.mapped_bytes == 0
            await h.runtime.wake()
            await h.runtime.settled()
            assert h.worker.memory.wake_bytes == 0

    run(tiny_checkpoint, load(tiny_checkpoint), scenario, LIMITS)


def test_memory_that_others_have_is_asked_for_again(
    tiny_checkpoint: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(growth, "RETRY_SHORT_AFTER_S", 0.01)

    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        expected = [await h.tokens(p) for p in PROMPTS]
        await h.runtime.sleep(1)
        gate.failure = DeviceMemoryShort("a neighbour has it")
        await h.runtime.wake()
        await h.runtime.settled()
        assert h.worker.memory.wake_bytes > 0
        assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == expected
        h.runtime.check_health()
        gate.failure = None
        while h.worker.memory.wake_bytes:
            await asyncio.sleep(0.001)

    run(tiny_checkpoint, load(tiny_checkpoint), scenario, LIMITS)
    told = [r for r in caplog.records if "smaller than planned" in r.message]
    assert len(told) == 1
    assert "a neighbour has it" in told[0].message


def test_driver_that_refuses_fails_the_replica(tiny_checkpoint: Path, gate: Gate) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        await h.runtime.sleep(1)
        gate.failure = DeviceMemoryError("the card fell off")
        await h.wake_that_fails()
        with pytest.raises(ReplicaFailed, match="fell off"):
            await h.runtime.settled()
        with pytest.raises(ReplicaFailed, match="fell off"):
            h.runtime.check_health()

    run(tiny_checkpoint, load(tiny_checkpoint), scenario, LIMITS)


def test_one_part_is_there_with_the_wake(tiny_checkpoint: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.sleep(1)
        await h.runtime.wake()
        assert h.worker.memory.wake_bytes == 0

    run(tiny_checkpoint, load(tiny_checkpoint), scenario)
