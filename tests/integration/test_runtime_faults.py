"""What may go wrong in a runtime, and that nothing else is harmed by it."""

import asyncio
import ctypes
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.checkpoints.making import write_checkpoint
from actors.engine.engine import TransformersEngine
from actors.errors import (
    ContextLengthExceeded,
    DeviceMemoryError,
    DeviceMemoryShort,
    EngineDied,
    FrozenTooLong,
    InvalidRequest,
    LayoutMismatch,
    ReplicaFailed,
    WeightsCorrupted,
)
from actors.image.checksum import Checksums
from actors.image.image import WeightImage
from actors.image.layout import Checksum
from actors.memory import workspaces
from actors.memory.cpu import CpuDriver, CpuLink
from actors.memory.transfer import Transfer
from actors.protocol import FinishReason, ReplicaState, SleepCommand, SleepMode, TokenEvent
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from actors.worker import model_worker
from actors.worker.lull import Lull
from actors.worker.messages import Failed
from actors.worker.model_worker import ModelWorker, build_module
from actors.worker.watchdog import WatchdogConfig
from tests.integration.runtime_harness import ENGINE, PROMPTS, Harness, LastWorker, load, run

pytestmark = pytest.mark.alone  # steps have limits of fractions of a second


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ("", {}, InvalidRequest, "no tokens"),
        ((1, 2, 10**9), {}, InvalidRequest, "1000000000"),
        ((1, -1), {}, InvalidRequest, "-1"),
        ("hi", {"temperature": -1.0}, InvalidRequest, "temperature"),
        ("hi", {"temperature": float("nan")}, InvalidRequest, "temperature"),
        ("hi", {"temperature": 1e39}, InvalidRequest, "temperature"),
        ("hi", {"repetition_penalty": 1e39}, InvalidRequest, "repetition_penalty"),
        ("hi", {"repetition_penalty": float("inf")}, InvalidRequest, "repetition_penalty"),
        ("hi", {"presence_penalty": 1e39}, InvalidRequest, "presence_penalty"),
        ("hi", {"logit_bias": {1: 1e39}}, InvalidRequest, "logit_bias"),
        ("hi", {"top_p": 0.0}, InvalidRequest, "top_p"),
        ("hi", {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ("hi", {"logit_bias": {10**9: 1.0}}, InvalidRequest, "logit_bias"),
        ("hi", {"max_tokens": 10**6}, ContextLengthExceeded, "max_model_len"),
        (tuple([5] * 5000), {}, ContextLengthExceeded, "5000"),
    ],
)
def test_bad_request_is_refused_before_it_enters(
    tiny_checkpoint: Path,
    image: WeightImage,
    prompt: str | tuple[int, ...],
    sampling: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(error, match=message):
            h.prepare(prompt, **sampling)
        assert h.worker.memory.mapped_bytes == 0  # refusing needed no weights
        await h.runtime.wake()
        assert await h.tokens("good")

    run(tiny_checkpoint, image, scenario, awake=False)


@pytest.mark.parametrize("how", ["its client leaves", "stop string"])
def test_sequence_that_was_put_off_goes_on_when_the_other_is_cancelled(
    tiny_checkpoint: Path, image: WeightImage, how: str
) -> None:
    async def scenario(h: Harness) -> None:
        scheduler = h.worker._engine._loop._scheduler  # type: ignore[attr-defined]
        first, second = (5,) * 20, (6,) * 20
        text = "".join(e.text for e in await h.events(first, max_tokens=100, ignore_eos=True))
        parts = (
            text[i : i + size]
            for size in range(3, 30)
            for i in range(len(text) * 6 // 10, len(text) * 8 // 10)
        )
        late = next(part for part in parts if text.find(part) >= len(text) * 6 // 10)
        stop = () if how == "its client leaves" else (late,)
        was_full = False

        async def ask_first() -> None:
            nonlocal was_full
            stream = h.runtime.generate(
                h.prepare(first, max_tokens=100, ignore_eos=True, stop=stop)
            )
            async for _ in stream:
                was_full = was_full or scheduler.is_full
                if was_full and not stop:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

        ended = asyncio.create_task(ask_first())
        put_off = asyncio.create_task(h.tokens(second, max_tokens=100, ignore_eos=True))
        await ended
        assert was_full
        assert len(await put_off) == 100
        assert await h.tokens(second, max_tokens=5)

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": 8}))


def test_more_sequences_than_the_cache_holds_all_finish_right(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """The engine evicts and recomputes; nobody may notice."""

    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "ignore_eos": True}
        expected = [await h.tokens(p, **sampled) for p in PROMPTS]
        assert await asyncio.gather(*(h.tokens(p, **sampled) for p in PROMPTS)) == expected
        await h.until_free()

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": 20}))


def test_wake_that_fails_half_way_leaves_nothing_mapped(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        expected = await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        copy, calls = CpuLink.copy, 0

        def fail_third(link: CpuLink, address: int, host: memoryview) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise DeviceMemoryError("copy failed")
            copy(link, address, host)

        with monkeypatch.context() as patch:
            patch.setattr(CpuLink, "copy", fail_third)
            with pytest.raises(DeviceMemoryError, match="copy failed"):
                await h.runtime.wake()
        assert h.worker.memory.mapped_bytes == 0
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == expected

    run(tiny_checkpoint, image, scenario)


def test_frozen_request_is_aborted_after_a_wake_that_was_refused(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise DeviceMemoryShort("a neighbour has it")

    async def scenario(h: Harness) -> None:
        lifecycle = Lifecycle(LastWorker(h.runtime), SleepConfig(), time.monotonic)
        begun, events = asyncio.Event(), list[TokenEvent]()

        async def ask() -> None:
            async with lifecycle.serving("r"):
                prepared = h.prepare(PROMPTS[0], max_tokens=900, ignore_eos=True)
                async for event in h.runtime.generate(prepared):
                    events.append(event)
                    begun.set()

        request = asyncio.create_task(ask())
        await begun.wait()
        await lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        with monkeypatch.context() as patch:
            patch.setattr(CpuDriver, "map", refuse)
            with pytest.raises(DeviceMemoryShort):
                await lifecycle.wake_up()
        await lifecycle.sleep(SleepCommand(mode=SleepMode.ABORT))
        await request
        assert events[-1].finish_reason is FinishReason.ABORT
        assert lifecycle.state is ReplicaState.ASLEEP

    run(tiny_checkpoint, image, scenario, awake=False)


def test_request_that_a_sleep_froze_for_too_long_ends_with_the_error(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        lifecycle = Lifecycle(
            LastWorker(h.runtime), SleepConfig(frozen_timeout_s=0.2), time.monotonic
        )
        begun = asyncio.Event()

        async def ask(max_tokens: int) -> list[int]:
            found = []
            async with lifecycle.serving("r"):
                prepared = h.prepare(PROMPTS[0], max_tokens=max_tokens, ignore_eos=True)
                async for event in h.runtime.generate(prepared):
                    found += event.token_ids
                    begun.set()
            return found

        expected = await ask(20)
        begun.clear()
        request = asyncio.create_task(ask(900))
        await begun.wait()
        await lifecycle.sleep(SleepCommand(mode=SleepMode.KEEP))
        with pytest.raises(FrozenTooLong, match=r"within 0.2 s \(sleep.frozen_timeout_s\)"):
            await request
        assert lifecycle.idle.in_flight == 0
        assert lifecycle.state is ReplicaState.ASLEEP
        assert await ask(20) == expected, "a new request wakes it"
        await h.until_free()

    run(tiny_checkpoint, image, scenario, awake=False)


def test_byte_that_changed_on_the_way_fails_the_replica_and_its_requests(
    tiny_checkpoint: Path,
) -> None:
    """Not of the image that others share: this one's memory is written to."""
    image = load(tiny_checkpoint)

    async def scenario(h: Harness) -> None:
        await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        payload = np.frombuffer(image.segment(2), np.uint8)
        address = payload.__array_interface__["data"][0]
        ctypes.memset(address + 1000, payload[1000] ^ 1, 1)
        await h.wake_that_fails()
        with pytest.raises(WeightsCorrupted, match=r"layer\.1 is not what was packed"):
            await h.tokens(PROMPTS[0], max_tokens=300, ignore_eos=True)
        with pytest.raises(WeightsCorrupted):
            h.runtime.check_health()
        with pytest.raises(WeightsCorrupted):
            await h.tokens(PROMPTS[0])
        report = h.worker.memory.last_wake
        assert report is not None
        assert not report.intact

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("intact", [True, False], ids=["intact", "corrupted"])
def test_no_event_leaves_before_the_weights_of_its_wake_are_checked(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, intact: bool
) -> None:
    image = load(tiny_checkpoint)
    checking, may_end = threading.Event(), threading.Event()
    read = Checksums.read

    def read_late(sums: Checksums) -> list[Checksum]:
        checking.set()
        assert may_end.wait(20)
        return read(sums)

    async def scenario(h: Harness) -> None:
        expected = await h.tokens(PROMPTS[0])
        long = {"max_tokens": 200, "ignore_eos": True}
        expected_frozen = await h.tokens(PROMPTS[1], **long)
        frozen = h.runtime.generate(h.prepare(PROMPTS[1], **long))
        first = await anext(frozen)
        await h.runtime.sleep(1)  # with a request in flight, as in mode keep
        if not intact:
            payload = np.frombuffer(image.segment(2), np.uint8)
            address = payload.__array_interface__["data"][0]
            ctypes.memset(address + 1000, payload[1000] ^ 1, 1)
        monkeypatch.setattr(Checksums, "read", read_late)
        await h.runtime.wake()
        seen: list[TokenEvent] = []

        async def watch(events: AsyncIterator[TokenEvent]) -> list[int]:
            tokens = []
            async for event in events:
                seen.append(event)
                tokens += event.token_ids
            return tokens

        asked = h.runtime.generate(h.prepare(PROMPTS[0], stream=stream))
        watched = [asyncio.create_task(watch(each)) for each in (asked, frozen)]
        assert await asyncio.to_thread(checking.wait, 20)
        await h.until_free()  # everything has been computed
        assert seen == []
        may_end.set()
        outcomes = await asyncio.gather(*watched, return_exceptions=True)
        if intact:
            assert outcomes == [expected, expected_frozen[len(first.token_ids) :]]
        else:
            assert [type(outcome) for outcome in outcomes] == [WeightsCorrupted] * 2
            assert seen == []

    try:
        run(tiny_checkpoint, image, scenario)
    finally:
        may_end.set()


def test_paused_engine_that_is_stopped_computes_nothing(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """Its memory is unmapped: a client left whose request a sleep had frozen, then comes a redeploy."""

    async def scenario(h: Harness) -> None:
        streams = [
            h.runtime.generate(h.prepare(p, max_tokens=500, ignore_eos=True)) for p in PROMPTS[:2]
        ]
        for stream in streams:
            await anext(stream)
        await h.runtime.sleep(1)
        await streams[0].aclose()  # type: ignore[attr-defined]
        forwards = []
        model = h.worker._engine._model  # type: ignore[attr-defined]
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        await h.worker._on_control(h.worker._engine.stop)
        assert forwards == []
        with pytest.raises(EngineDied):
            async for _ in streams[1]:
                pass

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("what", ["a sleep", "log-probabilities", "compiled layers"])
def test_engine_whose_device_fails_in_a_pause_ends_without_another_step(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As on a card, where it waits for the device once the loop stands still."""
    forwards, paused_after = [0], []

    def refuse(*_: object) -> None:
        paused_after.append(forwards[0])
        raise RuntimeError("CUDA error: unspecified launch failure")

    async def scenario(h: Harness) -> None:
        engine = h.worker._engine
        monkeypatch.setattr(
            engine, "_runner", SimpleNamespace(compiles=False, end_gates=lambda: None)
        )
        users = workspaces._users
        workspaces.begin_use()  # as by a start on a card

        def count(*_: object) -> None:
            forwards[0] += 1

        engine._model.register_forward_pre_hook(count)  # type: ignore[attr-defined]
        stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=900, ignore_eos=True))
        await anext(stream)
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        if what == "a sleep":
            with pytest.raises(EngineDied):
                await h.runtime.sleep(1)
        elif what == "log-probabilities":
            with pytest.raises(EngineDied):
                await h.events(PROMPTS[1], echo=True, logprobs=1)
        else:
            await h.worker._on_control(h.worker._residency._use_compiled)
        assert "went wrong: RuntimeError" in str(await h.runtime.worker.failed)
        await h.worker._on_control(lambda: None)  # behind what has failed
        assert not engine.paused
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        with pytest.raises(EngineDied):
            engine.check_health()
        await h.worker._on_control(engine.stop)
        assert [forwards[0]] == paused_after
        assert workspaces._users == users
        monkeypatch.undo()

    run(tiny_checkpoint, image, scenario)


def test_pages_are_unpinned_though_the_engine_does_not_stop(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        stop = h.worker._engine.stop

        def stop_and_fail() -> None:
            stop()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(h.worker._engine, "stop", stop_and_fail)
        with pytest.raises(RuntimeError, match="illegal"):
            await h.worker.close()
        assert h.worker.memory.host.link is None
        monkeypatch.undo()

    run(tiny_checkpoint, image, scenario)


@contextmanager
def leaving_no_threads() -> Iterator[None]:
    """What begins meanwhile ends, or the process would not."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("tqdm"):  # transformers keeps one for its progress bars
            thread.join(20)
            assert not thread.is_alive(), thread


HASTY = WatchdogConfig(step_timeout_s=0.3, copy_timeout_s=0.3, memory_timeout_s=0.3)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("step", "a step of the engine has not ended after"),
        ("prepare", "a step of the engine has not ended after"),
        ("room", "a piece of a prompt's log-probabilities has not ended after"),
        ("map", "mapping memory has not ended after"),
        ("copy", "copying the weights has not ended after"),
        ("unmap", "unmapping memory has not ended after"),
        ("unpin", "unpinning the image has not ended after"),
        ("collect", "taking back what the device has cleared has not ended after"),
        ("pause", "pausing the engine has not ended after"),
        ("drop", "work on the control thread has not ended after"),
        ("compile", "compiling the layers has not ended after"),
        ("capture", "capturing the engine's graphs has not ended after"),
        ("resume after capture", "mapping memory has not ended after"),
    ],
)
def test_device_that_never_answers_fails_the_replica_and_its_requests(
    tiny_checkpoint: Path,
    image: WeightImage,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    what: str,
) -> None:
    released, may_compile = threading.Event(), threading.Event()

    def hang(*args: object, **keywords: object) -> None:
        assert released.wait(30)

    if where in ("compile", "capture", "resume after capture"):
        monkeypatch.setattr(Lull, "wait", lambda self: True)
        monkeypatch.setattr(TransformersEngine, "compiles", True)
        monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: None)
        compiling = hang if where == "compile" else lambda engine: may_compile.wait(30)
        monkeypatch.setattr(TransformersEngine, "compile", compiling)

    async def scenario(h: Harness) -> None:
        lifecycle = Lifecycle(LastWorker(h.runtime), SleepConfig(), time.monotonic)
        told = asyncio.Event()

        def tell(failed: asyncio.Future[ReplicaFailed]) -> None:
            lifecycle.restart(failed.result())
            told.set()

        h.runtime.worker.failed.add_done_callback(tell)

        async def ask(**sampling: object) -> None:
            async with lifecycle.serving("r"):
                await h.tokens(PROMPTS[0], **sampling)

        async def healthy_once_settled() -> None:
            await h.runtime.settled()  # behind what hangs, if that is the control thread
            h.runtime.check_health()

        await ask()
        await healthy_once_settled()
        if where in ("map", "copy"):
            await lifecycle.sleep(SleepCommand())
        targets: dict[str, tuple[object, str]] = {
            "step": (h.worker._engine._loop.runner, "launch"),
            "prepare": (h.worker._engine._loop._scheduler, "next_step"),
            "room": (h.worker._scoring, "_spare_bytes"),
            "map": (CpuDriver, "map"),
            "copy": (Transfer, "wait"),
            "unmap": (CpuDriver, "unmap"),
            "unpin": (CpuLink, "close"),
            "collect": (CpuDriver, "collect_cleared"),
            "pause": (h.worker._engine, "pause"),
            "drop": (h.worker._engine, "drop_kv"),
            "capture": (TransformersEngine, "use_compiled"),
            "resume after capture": (TransformersEngine, "prepare_wake"),
        }
        if where in targets:
            monkeypatch.setattr(*targets[where], hang)
        for watch in h.worker._watchdog._watches:
            watch.limit_s = 0.3  # also what a start needs more for
        may_compile.set()
        if where == "collect":
            await lifecycle.sleep(SleepCommand())
            await told.wait()
        elif where in ("unmap", "pause", "unpin", "drop"):
            with pytest.raises(ReplicaFailed, match=what):
                await lifecycle.sleep(SleepCommand(level=2))
        else:
            asking = {"echo": True, "logprobs": 1} if where in ("room", "compile") else {}
            with pytest.raises(ReplicaFailed, match=what):
                await ask(max_tokens=900, ignore_eos=True, **asking)
        with pytest.raises(EngineDied, match=f"{what} .* s .its limit is 0.3 s"):
            h.runtime.check_health()
        with pytest.raises(ReplicaFailed):
            await ask()
        assert lifecycle.state is ReplicaState.FAILED
        with pytest.raises(ReplicaFailed, match=what):
            await healthy_once_settled()
        await h.worker.close()  # likewise
        monkeypatch.undo()
        released.set()

    try:
        run(tiny_checkpoint, image, scenario, awake=False, watchdog=HASTY)
    finally:
        released.set()


def test_idle_or_sleeping_engine_is_no_hang(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        for watch in h.worker._watchdog._watches:
            watch.limit_s = 0.3
        for is_asleep in (False, True):
            assert await h.tokens(PROMPTS[0])
            if is_asleep:
                await h.runtime.sleep(2)
            # Longer than the limit and the watchdog's time between two looks.
            await asyncio.sleep(1)
            h.runtime.check_health()
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0])

    run(tiny_checkpoint, image, scenario, watchdog=HASTY)


def test_hung_start_is_told_instead_of_waited_for(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(TransformersEngine, "warm_up", lambda engine: released.wait(30))
    hasty = HASTY.model_copy(update={"other_timeout_s": 3.0})

    async def scenario(h: Harness) -> None: ...

    with leaving_no_threads():
        begun_s = time.monotonic()
        with pytest.raises(EngineDied, match="capturing the engine's graphs has not ended"):
            run(tiny_checkpoint, image, scenario, watchdog=hasty)
        assert time.monotonic() - begun_s < 25
        released.set()


def test_device_that_hangs_as_it_is_opened_is_told(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that looks; the one that starts comes back only here."""
    released, told = threading.Event(), list[object]()

    def hang(*_: object) -> None:
        released.wait(30)
        raise DeviceMemoryError("the driver has come back")

    def send(message: object) -> None:
        told.append(message)
        released.set()

    monkeypatch.setattr(model_worker, "ModelMemory", hang)
    hasty = HASTY.model_copy(update={"other_timeout_s": 0.1})
    module = build_module(tiny_checkpoint, "auto", "cpu")

    async def nothing(*_: object) -> WeightImage:
        return image

    with leaving_no_threads(), pytest.raises(DeviceMemoryError, match="has come back"):
        ModelWorker(
            module,
            tiny_checkpoint,
            image,
            nothing,
            nothing,
            ENGINE,
            0,
            send,
            hasty,  # type: ignore[arg-type]
        )
    (failed,) = told
    assert isinstance(failed, Failed)
    assert "opening the device has not ended after" in str(failed.error)


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not yet noticed"])
def test_close_behind_a_hung_control_thread_is_bounded(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    released = threading.Event()
    monkeypatch.setattr("actors.worker.model_worker._CLOSE_TIMEOUT_S", 30.0 if noticed else 0.3)

    async def scenario(h: Harness) -> None:
        if noticed:
            h.worker._watchdog.control.limit_s = 0.3
        h.worker._control.submit(released.wait)
        if noticed:
            await h.runtime.worker.failed
        async with asyncio.timeout(5):
            await h.worker.close()
        for _ in range(20):  # the thread comes back late, not at once
            await asyncio.sleep(0)
        released.set()

    try:
        with leaving_no_threads():
            run(tiny_checkpoint, image, scenario)
    finally:
        released.set()


def test_worker_that_fails_while_it_is_closed_is_closed_all_the_same(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """Nobody waits for its answer any more then, but for its end."""
    workers = []

    async def scenario(h: Harness) -> None:
        workers.append(h.worker)
        has_failed = h.runtime.worker.failed

        def fail_in_the_middle() -> None:
            while not h.worker._closed:
                time.sleep(0.001)
            h.worker._something_went_wrong(WeightsCorrupted("a segment differs"), "a wake")
            while not has_failed.done():
                time.sleep(0.001)
            time.sleep(0.2)

        h.worker._control.submit(fail_in_the_middle)

    with leaving_no_threads():
        run(tiny_checkpoint, image, scenario)
    (worker,) = workers
    assert worker.is_stopped


def test_device_that_fails_after_a_sleep_fails_the_replica(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        def refuse(driver: CpuDriver) -> None:
            raise DeviceMemoryError("cuMemCreate failed")

        monkeypatch.setattr(CpuDriver, "collect_cleared", refuse)
        await h.runtime.sleep(1)
        h.worker._residency.collect_cleared()
        with pytest.raises(ReplicaFailed, match="cuMemCreate failed"):
            await h.runtime.settled()

    run(tiny_checkpoint, image, scenario)


def test_checkpoint_that_changed_during_a_level_2_sleep_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "tiny")

    async def scenario(h: Harness) -> None:
        await h.runtime.sleep(2)
        write_checkpoint(checkpoint, "tiny", seed=1, force=True)
        with pytest.raises(LayoutMismatch, match="changed"):
            await h.runtime.wake()
        assert h.runtime.worker.state.image_origin == ""

    run(checkpoint, load(checkpoint), scenario)


@contextmanager
def memory_missing_at(h: Harness, *steps: int) -> Iterator[None]:
    """The model's n-th forward from now on finds no memory, for each n in steps."""
    count = itertools.count()

    def fail(*_: object) -> None:
        if next(count) in steps:
            raise torch.OutOfMemoryError("another process has it all")

    handle = h.worker._engine._model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("step", [0, 1, 7])
def test_step_without_memory_is_tried_again(
    tiny_checkpoint: Path, image: WeightImage, step: int
) -> None:
    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "presence_penalty": 0.5}
        expected = [await h.tokens(p, **sampled) for p in PROMPTS]
        with memory_missing_at(h, step, step + 9):
            assert await asyncio.gather(*(h.tokens(p, **sampled) for p in PROMPTS)) == expected
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_step_that_never_finds_memory_is_refused_and_the_engine_lives(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        expected = [await h.tokens(p) for p in PROMPTS]
        with memory_missing_at(h, *range(5, 1000)):
            found = await asyncio.gather(*(h.tokens(p) for p in PROMPTS), return_exceptions=True)
        assert all(isinstance(refusal, DeviceMemoryShort) for refusal in found), found
        await h.until_free()
        h.runtime.check_health()
        assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == expected

    run(tiny_checkpoint, image, scenario)


def test_stream_that_fails_between_two_events_tells_so(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """Everything that had come was taken, and nothing more comes: that is not the end of an answer."""

    async def scenario(h: Harness) -> None:
        stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
        assert (await anext(stream)).finish_reason is None
        h.runtime._streams.fail_all(ReplicaFailed("the device is gone"))
        with pytest.raises(ReplicaFailed, match="the device is gone"):
            async for _ in stream:
                pass

    run(tiny_checkpoint, image, scenario)


def test_engine_that_dies_fails_its_requests_and_the_health_check(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        h.runtime.check_health()

        def explode(*args: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
        await anext(stream)
        monkeypatch.setattr(h.worker._engine._loop.runner, "launch", explode)
        with pytest.raises(EngineDied, match="RuntimeError"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDied):
            await h.tokens(PROMPTS[0])
        with pytest.raises(EngineDied):
            h.runtime.check_health()

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_model_len": 10**6}, "max_position_embeddings|KV cache"),
        ({"max_model_len": 330, "num_blocks": 20}, "KV cache of 20 blocks of 16 tokens holds 320"),
        ({"device": "cuda"}, "finds no CUDA device"),
    ],
)
def test_limits_that_cannot_work_are_refused_with_the_numbers(
    tiny_checkpoint: Path, image: WeightImage, limits: dict[str, object], message: str
) -> None:
    async def scenario(h: Harness) -> None: ...

    with leaving_no_threads(), pytest.raises(ValueError, match=message):
        run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update=limits))
