"""When layers are compiled and graphs captured: not while somebody is served."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from actors.engine.engine import TransformersEngine
from actors.errors import DeviceMemoryShort, ReplicaFailed
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.memory.cpu import CpuDriver
from actors.protocol import TokenEvent
from actors.worker.lull import Lull
from tests.integration.runtime_harness import PROMPTS, Harness, run


@pytest.fixture
def may_compile(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set, it lets an engine that has something to compile end that; every moment is quiet enough."""
    event = threading.Event()
    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", lambda engine: event.wait())
    return event


def captures(h: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is still to be mapped at each capture of compiled layers from now on, in bytes."""
    found: list[int] = []

    def use(engine: TransformersEngine) -> None:
        found.append(h.worker.memory.wake_bytes)

    monkeypatch.setattr(TransformersEngine, "use_compiled", use)
    return found


def test_nothing_is_compiled_or_captured_while_somebody_is_served(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_starting = True
    compiling, may_end, captured = (threading.Event() for _ in range(3))

    def compile_slowly(engine: TransformersEngine) -> None:
        compiling.set()
        may_end.wait()

    def lull(is_busy: Callable[[], bool]) -> Lull:
        return Lull(lambda: is_starting or is_busy(), quiet_s=0.0, latest_s=600.0)

    monkeypatch.setattr("actors.worker.compilation.Lull", lull)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_slowly)
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: captured.set())

    async def scenario(h: Harness) -> None:
        nonlocal is_starting

        async def first_event() -> AsyncIterator[TokenEvent]:
            stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=400, ignore_eos=True))
            await anext(stream)
            return stream

        async def stays_unset(event: threading.Event) -> bool:
            return not await asyncio.to_thread(event.wait, 0.2)

        stream = await first_event()
        is_starting = False
        assert await stays_unset(compiling)
        await stream.aclose()
        assert await asyncio.to_thread(compiling.wait, 20)
        stream = await first_event()
        may_end.set()
        assert await stays_unset(captured)
        await stream.aclose()
        await h.runtime.compiled()
        assert captured.is_set()

    run(tiny_checkpoint, image, scenario)


def test_images_are_not_compressed_while_layers_are_compiled(
    tiny_checkpoint: Path,
    image: WeightImage,
    may_compile: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever traces keeps the interpreter to itself: it would be measured as far too slow."""
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: None)
    monkeypatch.setattr("actors.worker.compression.QUIET_S", 0.0)
    asked = asyncio.Event()

    async def compress(key: ImageKey) -> bool:
        asked.set()
        return False

    async def scenario(h: Harness) -> None:
        h.worker.memory.host.image = WeightImage(image.manifest, image.segments, "image")
        running = asyncio.create_task(h.worker.compress_image("on", compress))
        await asyncio.sleep(0.3)
        assert not asked.is_set()
        may_compile.set()
        await asyncio.wait_for(asked.wait(), 20)
        running.cancel()

    try:
        run(tiny_checkpoint, image, scenario)
    finally:
        may_compile.set()


def test_graphs_that_find_no_memory_are_for_another_time(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    may_compile = threading.Event()

    def no_memory(engine: TransformersEngine) -> None:
        tries.append(engine.paused)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", lambda engine: may_compile.wait())
    monkeypatch.setattr(TransformersEngine, "use_compiled", no_memory)

    async def scenario(h: Harness) -> None:
        may_compile.set()
        await h.runtime.compiled()
        tokens = await h.tokens(PROMPTS[0])
        for _ in range(2):
            await h.runtime.sleep(1)
            assert h.worker.memory.mapped_bytes == 0
            await h.runtime.wake()
            assert await h.tokens(PROMPTS[0]) == tokens
        h.runtime.check_health()
        assert tries == [True] * 3

    run(tiny_checkpoint, image, scenario)


def test_plain_forward_waits_for_the_compiler_and_keeps_nobody_from_sleeping(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, may_end = threading.Event(), threading.Event()

    def compile_slowly(engine: TransformersEngine) -> None:
        compiling.set()
        may_end.wait()

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_slowly)
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: None)

    async def scenario(h: Harness) -> None:
        assert await asyncio.to_thread(compiling.wait, 20)
        asking = {"max_tokens": 1, "echo": True, "logprobs": 1}
        echo = asyncio.create_task(h.events(PROMPTS[0], **asking))
        assert await h.tokens(PROMPTS[1])
        await h.runtime.sleep(1)
        await h.runtime.wake()
        assert not echo.done()
        may_end.set()
        assert (await echo)[0].logprobs

    try:
        run(tiny_checkpoint, image, scenario)
    finally:
        may_end.set()


def test_sleeping_model_takes_no_memory_for_what_was_compiled(
    tiny_checkpoint: Path,
    image: WeightImage,
    may_compile: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its neighbours' wakes want it. The graphs are captured at its own next sleep."""

    async def scenario(h: Harness) -> None:
        captured = captures(h, monkeypatch)
        map_all, mapped = h.worker.memory.map, []
        monkeypatch.setattr(h.worker.memory, "map", lambda: (mapped.append(1), map_all()))
        may_compile.set()
        await h.runtime.compiled()
        assert (mapped, captured) == ([], [])
        await h.runtime.wake()
        tokens = await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        assert captured == [0], "with everything mapped"
        assert h.worker.memory.mapped_bytes == 0
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == tokens

    run(tiny_checkpoint, image, scenario, awake=False)


def test_what_was_compiled_asleep_is_used_behind_the_next_wake(
    tiny_checkpoint: Path,
    image: WeightImage,
    may_compile: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that is busy from its first wake on would else never run it: it need not sleep again."""

    async def scenario(h: Harness) -> None:
        captured = captures(h, monkeypatch)
        await h.runtime.sleep(1)
        may_compile.set()
        await h.runtime.compiled()
        assert captured == []
        await h.runtime.wake()
        tokens = await h.tokens(PROMPTS[0])
        await h.runtime.compiled()
        assert captured == [0], "with everything mapped, and no sleep in between"
        assert await h.tokens(PROMPTS[0]) == tokens
        for _ in range(2):
            await h.runtime.sleep(1)
            await h.runtime.wake()
            await h.runtime.compiled()
        assert captured == [0], "once is enough"

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize(
    ("asleep", "succeeds"),
    [(True, True), (True, False), (False, False)],  # awake, capturing would do it
)
def test_sleeping_model_gives_back_what_its_compilation_took(
    tiny_checkpoint: Path,
    image: WeightImage,
    monkeypatch: pytest.MonkeyPatch,
    asleep: bool,
    succeeds: bool,
) -> None:
    may_compile = threading.Event()
    reserved: list[str] = []  # in the hands of a torch on a card

    def compile_layers(engine: TransformersEngine) -> None:
        may_compile.wait()
        reserved.append("a copy of a layer")
        if not succeeds:
            raise RuntimeError("of any kind")

    def trim(driver: CpuDriver) -> None:
        reserved.clear()

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_layers)
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: None)

    async def scenario(h: Harness) -> None:
        monkeypatch.setattr(CpuDriver, "trim", trim)
        if asleep:
            await h.runtime.sleep(1)  # while the layers are compiled
        may_compile.set()
        await h.runtime.compiled()
        assert bool(reserved) is not asleep
        if not asleep:
            await h.runtime.sleep(1)
        assert reserved == []
        h.runtime.check_health()

    run(tiny_checkpoint, image, scenario)


def test_compiling_that_finds_no_memory_is_tried_again(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, rests = [], []
    may_compile = threading.Event()

    def find_no_memory_at_first(engine: TransformersEngine) -> None:
        may_compile.wait()
        tries.append(1)
        if len(tries) < 3:
            raise DeviceMemoryShort("a neighbour has it")

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(Lull, "rest", lambda self, seconds: bool(rests.append(seconds)) or True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", find_no_memory_at_first)
    used = threading.Event()
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: used.set())

    async def scenario(h: Harness) -> None:
        may_compile.set()
        await h.runtime.compiled()
        assert used.is_set()
        assert (len(tries), len(rests)) == (3, 2)
        asking = {"max_tokens": 1, "echo": True, "logprobs": 1}
        assert (await h.events(PROMPTS[0], **asking))[0].logprobs

    run(tiny_checkpoint, image, scenario)


def test_capture_that_fails_in_the_background_fails_the_replica(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compile = threading.Event()

    def compile_later(engine: TransformersEngine) -> None:
        may_compile.wait()

    def explode(engine: TransformersEngine) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_later)
    monkeypatch.setattr(TransformersEngine, "use_compiled", explode)

    async def scenario(h: Harness) -> None:
        pending = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
        await anext(pending)
        may_compile.set()
        with pytest.raises(ReplicaFailed, match="capturing the compiled layers"):
            await h.runtime.compiled()
        with pytest.raises(ReplicaFailed, match="capturing the compiled layers"):
            h.runtime.check_health()
        with pytest.raises(ReplicaFailed, match="capturing"):
            async for _ in pending:
                pass

    run(tiny_checkpoint, image, scenario)
