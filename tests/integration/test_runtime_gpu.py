"""Sleep and wake as the device itself sees them: what is released, what is left, what is moved.

On CUDA, and on CPU what makes sense there, where the device's figure is this process' resident set.
"""

import asyncio
import ctypes
import logging
import multiprocessing
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.checkpoints.making import write_checkpoint
from actors.engine.batching import kv_growth
from actors.engine.config import EngineConfig
from actors.engine.engine import TransformersEngine
from actors.errors import DeviceMemoryShort, Unavailable, WeightsCorrupted
from actors.image.image import WeightImage
from actors.memory.cpu import CpuDriver
from actors.protocol import ReplicaState, SleepCommand
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from actors.worker import growth
from actors.worker.lull import Lull
from actors.worker.model_memory import ModelMemory
from tests.card import full_card
from tests.conftest import cuda_available
from tests.integration.runtime_harness import Harness, LastWorker, harness, load

MIB = 2**20
TIMEOUT_S = 180  # the first engine of a process compiles its kernels
PROMPTS = tuple(tuple((131 * i + 17 * j) % 900 + 20 for i in range(5 + 9 * j)) for j in range(4))

# A page is larger than a prompt: nothing is shared over prefixes, so each run rounds alike.
ENGINES = {
    "cpu": EngineConfig(
        device="cpu", page_size=256, num_blocks=32, max_requests_per_batch=4, cpu_threads=1
    ),
    # Compiled layers round in their own way, so answers are compared without.
    "cuda": EngineConfig(
        device="cuda",
        page_size=256,
        num_blocks=640,
        max_batch_tokens=512,
        max_requests_per_batch=4,
        use_torch_compile=False,
    ),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Half precision for CUDA, whose decode kernel and graphs want it."""

    def of(device: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"checkpoint_{device}"
        return write_checkpoint(
            directory, "demo", dtype="bfloat16" if device == "cuda" else "float32"
        )

    return of


@pytest.fixture
def checkpoint(device: str, checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints(device)


@pytest.fixture
def quick(device: str, checkpoints: Callable[[str], Path], tiny_checkpoint: Path) -> Path:
    """Where bytes are not looked at; on a CPU, steps of it take a third of the time."""
    return tiny_checkpoint if device == "cpu" else checkpoints(device)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(bounded())


async def answers(h: Harness) -> list[list[int]]:
    """One prompt after the other, so that every step is the same each time."""
    return [await h.tokens(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS]


async def settled(h: Harness) -> None:
    await h.runtime.settled()
    h.runtime.check_health()


# --- forwards beside the engine ---


def exact_logprobs(
    checkpoint: Path, device: str, ids: Sequence[int], start: int
) -> tuple[list[float], float]:
    """Of the tokens from `start` on, in float32; and the most that the checkpoint's type costs there.

    That is what transformers' own forward is off by. Kernels that sum in another order are granted twice it.
    """
    found = []
    for dtype in (torch.float32, "auto"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device)
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0, :-1]
        chosen = torch.tensor(ids[1:], device=device)[:, None]
        found.append(logits.float().log_softmax(-1).gather(1, chosen)[start - 1 :, 0])
    return found[0].tolist(), float((found[1] - found[0]).abs().max())


def test_prompt_logprobs_agree_with_the_engine_and_leave_nothing_behind(
    device: str, checkpoint: Path
) -> None:
    found: list[tuple[tuple[int, ...], int, list[float | None], list[float | None]]] = []

    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), ENGINES[device]) as h:
            expected = await answers(h)
            left = []
            # On a card, the first forward of a length loads kernels, which stay.
            for prompt in PROMPTS * (2 if device == "cuda" else 1):
                *_, sampled = await h.events(
                    prompt, max_tokens=12, ignore_eos=True, logprobs=0, stream=False
                )
                whole = (*prompt, *sampled.token_ids)
                echo, *_ = await h.events(whole, echo=True, logprobs=0, max_tokens=1)
                assert sampled.logprobs is not None
                assert echo.logprobs is not None
                told = [entry.logprob for entry in echo.logprobs[len(prompt) :]]
                found.append((whole, len(prompt), told, [e.logprob for e in sampled.logprobs]))
                assert await answers(h) == expected
                await h.runtime.sleep(1)
                assert h.worker.memory.residue.left is not None
                left.append(h.worker.memory.residue.left.total)
                await h.runtime.wake()
            if device == "cuda":
                assert max(left[len(PROMPTS) :]) <= left[len(PROMPTS) - 1] + 16 * MIB

    run(scenario)
    for whole, start, told, sampled in found[: len(PROMPTS)]:  # the others say the same
        exact, rounding = exact_logprobs(checkpoint, device, whole, start)
        within = 2 * rounding + 1e-4
        assert told == pytest.approx(exact, abs=within)
        assert sampled == pytest.approx(exact, abs=within)


# --- what the device says ---


@pytest.mark.parametrize("level", [1, 2])
def test_device_gets_back_what_was_mapped_and_the_rest_is_accounted_for(
    device: str, checkpoint: Path, level: int
) -> None:
    if device == "cpu":
        sleep_and_account(device, checkpoint, level)
        return
    # Alone in its process: what graphs take is measured, and the driver gives what others had left.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        alone.submit(sleep_and_account, device, checkpoint, level).result(TIMEOUT_S)


def sleep_and_account(device: str, checkpoint: Path, level: int) -> None:
    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), ENGINES[device]) as h:
            expected = await answers(h)
            memory = h.worker.memory
            for _ in range(3):
                await settled(h)
                assert memory.residue.left is None
                slept = await h.runtime.sleep(level)
                assert slept.released_bytes is not None
                if device == "cpu":  # of the KV cache only what was written ever was resident
                    released = 0.95 * h.worker.memory.weights_bytes
                else:
                    released = 0.95 * slept.mapped_before_bytes
                assert (
                    slept.mapped_before_bytes
                    >= h.worker.memory.weights_bytes + h.worker.memory.kv_bytes
                )
                assert slept.released_bytes >= released
                if slept.own_released_bytes is not None:  # NVML can be blind in a container
                    assert slept.own_released_bytes >= released
                assert memory.residue.last_reading.free <= memory.residue.last_reading.total

                left = slept.left
                assert left is not None
                assert left == memory.residue.left
                assert left.total == memory.residue.last_reading.held
                if memory.residue.last_reading.own is not None:
                    assert left.total == memory.residue.last_reading.own
                assert left.kept_layers == 0
                assert left.context == memory._driver.context_bytes > 0
                if device == "cuda":
                    print(f"level {level}: {slept}")
                    assert left.graphs > 0
                    assert left.torch_reserve >= 0
                    assert abs(left.other) < 512 * MIB
                await h.runtime.wake()
                assert await answers(h) == expected
            assert h.asked == ["release", "reload"] * (3 if level == 2 else 0)

    run(scenario)


@pytest.mark.gpu
def test_a_first_step_after_a_wake_is_replayed_and_waits_for_its_weights(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints("cuda")

    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), ENGINES["cuda"]) as h:
            expected = await answers(h)  # and captures what sizes have no graph yet
            await settled(h)
            gates = h.worker.memory.gates
            install = gates.install
            for keep in (frozenset[int](), h.worker.memory.kept):
                h.worker.memory.kept = keep
                for _ in range(5):
                    await h.runtime.sleep(1)
                    with monkeypatch.context() as patch:
                        patch.setattr(gates, "install", lambda gate: install(_never))
                        await h.runtime.wake()
                        assert await answers(h) == expected
                        await settled(h)

    run(scenario)


def _never(segment: int) -> None:
    raise AssertionError(f"segment {segment} was waited for by a hook")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_deep_sleeper_answers_for_its_device_and_wakes_with_the_same_tokens(
    checkpoints: Callable[[str], Path],
) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        alone.submit(deep_sleeps, checkpoints("cuda")).result(TIMEOUT_S)


def deep_sleeps(checkpoint: Path) -> None:
    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), ENGINES["cuda"]) as h:
            expected = await answers(h)
            memory = h.worker.memory
            for _ in range(3):
                await settled(h)
                await h.runtime.sleep(1)
                assert memory.residue.bytes > 0
                slept = await h.runtime.sleep(1, deep=True)
                assert slept.deep
                assert slept.left is not None
                assert slept.left.total == memory.residue.bytes == 0
                assert slept.released_bytes is not None
                assert slept.released_bytes > 0
                async with asyncio.timeout(10):  # whoever asked the driver would wait for the wake
                    device = await h.runtime.worker.read_device("node")
                assert 0 < device.free < device.total
                await h.runtime.wake()
                assert memory.residue.bytes > 0
                assert await answers(h) == expected

    run(scenario)


def test_sleeping_again_and_again_leaves_no_more_each_time(device: str, checkpoint: Path) -> None:
    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), ENGINES[device]) as h:
            left = []
            rounds = 12 if device == "cuda" else 6
            for _ in range(rounds):
                await answers(h)
                await settled(h)
                slept = await h.runtime.sleep(1)
                assert slept.left is not None
                left.append(slept.left.total)
                await h.runtime.wake()
            assert max(left[rounds // 2 :]) - min(left[2:]) < 16 * MIB, left

    run(scenario)


def test_lifecycle_keeps_and_logs_the_figures_of_a_sleep(
    device: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), ENGINES[device], awake=False) as h:
            lifecycle = Lifecycle(LastWorker(h.runtime), SleepConfig(), lambda: 0.0, "test")
            await lifecycle.wake_up()
            await answers(h)
            with caplog.at_level(logging.INFO, "actors.replica.lifecycle"):
                await lifecycle.sleep(SleepCommand())
            slept = lifecycle.last_sleep
            assert slept is not None
            assert slept.released_bytes is not None
            assert slept.released_bytes >= 0.95 * h.worker.memory.weights_bytes
            assert f"the device got {slept.released_bytes}" in caplog.messages[-1]
            assert "left are" in caplog.messages[-1]

    run(scenario)


# --- kept layers ---


@pytest.mark.parametrize("count", [2, 6])
def test_kept_layers_are_neither_unmapped_nor_moved(
    device: str, checkpoint: Path, count: int
) -> None:
    async def scenario() -> None:
        image = load(checkpoint)
        segments = image.layout.segments
        engine, sleep = ENGINES[device], SleepConfig(keep_layers=count)
        async with harness(checkpoint, image, engine, sleep) as h:
            expected = await answers(h)
            names = {f"layer.{i}" for i in range(count)}
            kept = [i for i, segment in enumerate(segments) if segment.name in names]
            payload = sum(segments[i].size for i in kept)
            for _ in range(3):
                await settled(h)
                slept = await h.runtime.sleep(1)
                assert slept.left is not None
                assert slept.left.kept_layers == slept.mapped_after_bytes >= payload
                gone = slept.mapped_before_bytes - slept.mapped_after_bytes
                assert slept.released_bytes is not None
                if device == "cuda":
                    assert slept.released_bytes >= 0.95 * gone
                woke = await h.runtime.wake()
                assert woke.copied_bytes == h.worker.memory.weights_bytes - payload
                assert await answers(h) == expected
                await settled(h)
                report, transfer = h.worker.memory.last_wake, h.worker.memory.last_transfer
                assert report is not None
                assert transfer is not None
                assert report.copied_bytes == report.checked_bytes == woke.copied_bytes
                assert not {copied.segment for copied in transfer.segments} & set(kept)

    run(scenario)


# --- compiled in the background ---


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("state", ["generating", "asleep", "full"])
def test_compiled_layers_take_over_in_any_state(
    checkpoints: Callable[[str], Path], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ENGINES["cuda"].model_copy(update={"use_torch_compile": True})
    captures: list[int] = []
    may_compile = threading.Event()
    compile_layers, use_compiled = TransformersEngine.compile, TransformersEngine.use_compiled

    def compile_later(self: TransformersEngine) -> None:
        may_compile.wait()
        compile_layers(self)

    def count(self: TransformersEngine) -> None:
        use_compiled(self)
        captures.append(1)

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_later)
    monkeypatch.setattr(TransformersEngine, "use_compiled", count)
    map_all = ModelMemory.map

    def no_room(self: ModelMemory) -> None:
        raise DeviceMemoryShort("the neighbour has it all")

    async def scenario() -> None:
        sleep, checkpoint = SleepConfig(keep_layers=2), checkpoints("cuda")
        async with harness(checkpoint, load(checkpoint), engine, sleep, awake=False) as h:
            if state != "asleep":
                await h.runtime.wake()
            if state == "full":
                monkeypatch.setattr(ModelMemory, "map", no_room)
            if state == "generating":
                prepared = h.prepare(PROMPTS[0], max_tokens=1500, ignore_eos=True)
                tokens = 0
                async for event in h.runtime.generate(prepared):
                    tokens += len(event.token_ids)
                    may_compile.set()
                assert tokens == 1500
            may_compile.set()
            await h.runtime.compiled()
            monkeypatch.setattr(ModelMemory, "map", map_all)
            assert len(captures) == (state == "generating")
            if state == "asleep":
                assert h.worker.memory.mapped_bytes == 0, "it takes nothing from its neighbours"
                await h.runtime.wake()
            found = [await answers(h)]
            for _ in range(3):
                await settled(h)
                await h.runtime.sleep(1)
                assert len(captures) == 1
                await h.runtime.wake()
                found.append(await answers(h))
            assert found[1] == found[2] == found[3]
            assert state != "generating" or found[0] == found[1]
            await settled(h)

    run(scenario)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_model_that_cannot_be_compiled_is_served_all_the_same(
    checkpoints: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(self: TransformersEngine) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(TransformersEngine, "compile", fail)
    engine = ENGINES["cuda"].model_copy(update={"use_torch_compile": True})

    async def scenario() -> None:
        checkpoint = checkpoints("cuda")
        async with harness(checkpoint, load(checkpoint), engine) as h:
            await h.runtime.compiled()
            assert len(await h.tokens(PROMPTS[0], ignore_eos=True)) == 20
            assert "compiling failed" in caplog.text

    run(scenario)


# --- what may go wrong ---


def flip_bit(image: WeightImage, segment: int, offset: int) -> None:
    """In the bytes that the next wake copies, past the view that says they are read-only."""
    payload = np.frombuffer(image.segment(segment), np.uint8)
    address = payload.__array_interface__["data"][0]
    ctypes.memset(address + offset, int(payload[offset]) ^ 1, 1)


@pytest.mark.parametrize("segment", [0, 3, -1], ids=["embedding", "layer", "head"])
def test_byte_that_changed_in_the_image_fails_the_replica(
    device: str, checkpoint: Path, segment: int
) -> None:
    async def scenario() -> None:
        image = load(checkpoint)
        index = segment % len(image.layout.segments)
        async with harness(checkpoint, image, ENGINES[device]) as h:
            await answers(h)
            await settled(h)  # that wake is right
            await h.runtime.sleep(1)
            flip_bit(image, index, image.layout.segments[index].size - 3)
            await h.runtime.wake()
            with pytest.raises(WeightsCorrupted, match=image.layout.segments[index].name):
                await h.runtime.settled()
            with pytest.raises(WeightsCorrupted):
                await h.tokens(PROMPTS[0])
            report = h.worker.memory.last_wake
            assert report is not None
            assert not report.intact

    run(scenario)


def test_two_models_on_one_device_wake_at_the_same_time(device: str, quick: Path) -> None:
    async def scenario() -> None:
        # An image each: one process registers a page only once.
        engine = ENGINES[device]
        async with (
            harness(quick, load(quick), engine, awake=False) as one,
            harness(quick, load(quick), engine, awake=False) as two,
        ):
            both = (one, two)
            await asyncio.gather(*(h.runtime.wake() for h in both))
            expected = await answers(one)
            assert await answers(two) == expected
            for level in (1, 1, 2):
                await asyncio.gather(*(settled(h) for h in both))
                await asyncio.gather(*(h.runtime.sleep(level) for h in both))
                assert [h.worker.memory.mapped_bytes for h in both] == [0, 0]
                await asyncio.gather(*(h.runtime.wake() for h in both))
                assert await asyncio.gather(*(answers(h) for h in both)) == [expected] * 2
                await asyncio.gather(*(settled(h) for h in both))

    run(scenario)


def test_one_sleeps_and_wakes_while_its_neighbour_generates(device: str, quick: Path) -> None:
    async def scenario() -> None:
        engine = ENGINES[device]
        async with (
            harness(quick, load(quick), engine) as busy,
            harness(quick, load(quick), engine) as drowsy,
        ):
            expected = await answers(drowsy)
            long = {"max_tokens": 100, "ignore_eos": True}
            undisturbed = await busy.tokens(PROMPTS[0], **long)
            for _ in range(3):
                generating = asyncio.create_task(busy.tokens(PROMPTS[0], **long))
                await drowsy.runtime.sleep(1)
                await drowsy.runtime.wake()
                assert await answers(drowsy) == expected
                assert await generating == undisturbed
                await settled(drowsy)

    run(scenario)


def test_wake_without_room_is_refused_and_works_once_there_is_some(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU, where memory is made short by decree."""

    async def scenario() -> None:
        checkpoint = checkpoints("cpu")
        async with harness(checkpoint, load(checkpoint), ENGINES["cpu"], awake=False) as h:
            lifecycle = Lifecycle(LastWorker(h.runtime), SleepConfig(), lambda: 0.0, "test")

            def refuse(driver: CpuDriver, address: int, size: int) -> None:
                raise DeviceMemoryShort("out of memory")

            with monkeypatch.context() as patch:
                patch.setattr(CpuDriver, "map", refuse)
                for _ in range(2):
                    with pytest.raises(Unavailable, match="do not fit on cpu"):
                        await lifecycle.wake_up()
                    assert lifecycle.state is ReplicaState.ASLEEP
                    assert h.worker.memory.mapped_bytes == 0
            await lifecycle.wake_up()
            assert len(await h.tokens(PROMPTS[0], ignore_eos=True)) == 20

    run(scenario)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("others_have_the_rest", [False, True])
def test_kv_cache_in_parts(
    checkpoints: Callable[[str], Path],
    others_have_the_rest: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in test_kv_growth.py; on a card, to touch a part that is not mapped is an illegal address, and the end of the engine."""
    monkeypatch.setattr(kv_growth, "_FIRST_BYTES", 1)
    monkeypatch.setattr(kv_growth, "_NEXT_BYTES", 32 * MIB)
    monkeypatch.setattr(growth, "RETRY_SHORT_AFTER_S", 3600.0)
    checkpoint = checkpoints("cuda")
    limits = ENGINES["cuda"].model_copy(update={"max_model_len": 1024})

    def map_no_more(memory: ModelMemory) -> bool:
        raise DeviceMemoryShort("others have it")

    async def scenario() -> None:
        async with harness(checkpoint, load(checkpoint), limits) as h:
            await settled(h)
            expected = await answers(h)
            assert len(h.worker._engine.kv_arena.spans) > 2  # type: ignore[attr-defined]
            if others_have_the_rest:
                monkeypatch.setattr(ModelMemory, "map_more", map_no_more)
            for _ in range(3):
                await h.runtime.sleep(1)
                await h.runtime.wake()
                assert await answers(h) == expected
                # More than the first part holds: some wait, some are started over.
                crowd = [tuple(range(20 + i, 720 + i)) for i in range(12)]
                asked = (h.tokens(prompt, max_tokens=40, ignore_eos=True) for prompt in crowd)
                assert [len(answer) for answer in await asyncio.gather(*asked)] == [40] * 12
                await settled(h)
                assert bool(h.worker.memory.wake_bytes) == others_have_the_rest

    run(scenario)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("keep_layers", [0, 2])
def test_wake_on_a_full_card_is_refused_and_works_once_the_other_process_is_gone(
    checkpoints: Callable[[str], Path], keep_layers: int
) -> None:
    assert cuda_available()

    async def scenario() -> None:
        checkpoint, sleep = checkpoints("cuda"), SleepConfig(keep_layers=keep_layers)
        async with harness(checkpoint, load(checkpoint), ENGINES["cuda"], sleep, awake=False) as h:
            lifecycle = Lifecycle(LastWorker(h.runtime), sleep, lambda: 0.0, "test")
            await lifecycle.wake_up()
            expected = await answers(h)
            await settled(h)
            await lifecycle.sleep(SleepCommand())
            kept = h.worker.memory.mapped_bytes
            assert (kept > 0) == (keep_layers > 0)
            needed = h.worker.memory.weights_bytes + h.worker.memory.kv_bytes - kept
            with full_card(spare_bytes=needed // 2) as free:
                assert free < needed, "the other process did not fill the card"
                for _ in range(2):
                    with pytest.raises(Unavailable) as caught:
                        await lifecycle.wake_up()
                    assert isinstance(caught.value, DeviceMemoryShort)
                    assert caught.value.retry_after_s > 0
                    assert "do not fit on cuda:0" in str(caught.value)
                    assert lifecycle.state is ReplicaState.ASLEEP
                    assert h.worker.memory.mapped_bytes == kept
            # The other process is dead; its memory comes back when the driver has cleaned up.
            while h.worker.memory._driver.memory().free < needed + 256 * MIB:
                await asyncio.sleep(0.01)
            await lifecycle.wake_up()
            assert await answers(h) == expected
            await settled(h)

    run(scenario)
