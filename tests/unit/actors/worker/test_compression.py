"""Who decides that an image is compressed, when it is done, and what it waits for."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from actors.errors import Unavailable
from actors.image.compressing import Sample
from actors.image.config import Compression
from actors.image.layout import ImageKey
from actors.worker import compression as module
from actors.worker.compression import ImageCompression

KEY = cast("ImageKey", "key")
OUT = np.empty(0, np.uint8)


class Image(SimpleNamespace):
    """As far as it is looked at; one whose end is seen."""


@dataclass
class Bench:
    """An ImageCompression among fakes."""

    device: str = "cuda"
    gb_per_s: float | None = 50.0
    stored: float = 0.668
    seconds_per_gb: float = 0.1
    gb: float = 15.0  # that can be compressed, of 15
    busy: bool = False
    done: bool = True  # what the holder says
    renewed: bool = True
    asked: list[ImageKey] = field(default_factory=list)
    trimmed: int = 0
    error: Exception | None = None  # of a sample

    def __post_init__(self) -> None:
        self.compressed = asyncio.Event()
        layout = SimpleNamespace(total_bytes=int(15e9))
        manifest = SimpleNamespace(key=KEY, compressed=())
        self.image: Any = Image(origin="image", manifest=manifest, layout=layout)
        self.image.segment = lambda index: memoryview(bytes(index))

    @property
    def last_transfer(self) -> Any:
        return None if self.gb_per_s is None else SimpleNamespace(gb_per_s=self.gb_per_s)

    async def renew(self) -> bool:
        if self.renewed:
            self.image.manifest.compressed = ((),)
            self.compressed.set()
        return self.renewed

    async def compress(self, key: ImageKey) -> bool:
        self.asked.append(key)
        return self.done

    def trim(self) -> None:
        self.trimmed += 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bench], ImageCompression]:
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(module, "_LOOK_FIRST_S", 0.01)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)

    def build(bench: Bench) -> ImageCompression:
        def sample(image: object, device: object, around: object) -> Sample:
            if bench.error is not None:
                raise bench.error
            size = int(1e9 * bench.gb)
            return Sample(size, bench.stored * size, bench.seconds_per_gb * bench.gb)

        monkeypatch.setattr(module, "try_parts", sample)
        memory: Any = bench
        memory.device = torch.device(bench.device)
        return ImageCompression(memory, memory, bench.trim, lambda: bench.busy)

    return build


def run(compression: ImageCompression, how: Compression, bench: Bench) -> None:
    """Until the image is compressed, or nothing more happens."""

    async def scenario() -> None:
        running = asyncio.create_task(compression.run(how, bench.compress))
        done = asyncio.create_task(bench.compressed.wait())
        await asyncio.wait({running, done}, timeout=10, return_when="FIRST_COMPLETED")
        assert running.done() or done.done()
        if not running.done():
            await asyncio.sleep(0.05)  # it would do it again by now
        running.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("device", "how", "asks"),
    [
        ("cuda", "auto", True),
        ("cuda", "off", False),
        ("cpu", "auto", False),
        ("cpu", "on", True),
        ("cpu", "off", False),
    ],
)
def test_who_is_compressed(make: Any, device: str, how: Compression, asks: bool) -> None:
    bench = Bench(device=device)
    run(make(bench), how, bench)
    assert bench.asked == ([KEY] if asks else [])
    assert bool(bench.image.manifest.compressed) == asks
    assert bench.trimmed == asks


@pytest.mark.parametrize("bench", [Bench(stored=0.97), Bench(seconds_per_gb=10.0), Bench(gb=0.0)])
def test_what_does_not_pay_is_left_and_told(
    make: Any, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run(make(bench), "auto", bench)
    assert bench.asked == []
    assert "kept as it is" in caplog.text


def test_what_pays_is_told(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Bench()
    run(make(bench), "auto", bench)
    assert "compressed to 67 % of its bytes, which spares each wake 100 ms and takes 1.5 s" in (
        caplog.text
    )


def test_quantised_weights_are_not_counted(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Bench(gb=3.0)
    run(make(bench), "auto", bench)
    assert "compressed to 93 % of its bytes, which spares each wake 20 ms and takes 0.3 s" in (
        caplog.text
    )


def test_nothing_is_asked_for_twice(make: Any) -> None:
    bench = Bench()
    bench.image.manifest.compressed = ((),)
    bench.compressed.set()
    run(make(bench), "on", bench)
    assert bench.asked == []


@pytest.mark.parametrize(
    "wrong", ["holder", "exchange", "private", "gone", "no wake yet", "no memory"]
)
def test_what_cannot_be_now_is_tried_again(make: Any, wrong: str) -> None:
    bench = Bench(
        done=wrong != "holder",
        renewed=wrong != "exchange",
        gb_per_s=None if wrong == "no wake yet" else 50.0,
    )
    image = bench.image
    if wrong == "private":
        image.origin = "disk"
    if wrong == "gone":
        bench.image = None
    bench.error = torch.OutOfMemoryError() if wrong == "no memory" else None
    compression = make(bench)

    async def scenario() -> None:
        running = asyncio.create_task(compression.run("auto", bench.compress))
        await asyncio.sleep(0.1)
        assert not running.done()
        assert not bench.compressed.is_set()
        bench.done, bench.renewed, bench.gb_per_s, bench.image = True, True, 50.0, image
        bench.error = None
        image.origin = "image"
        await asyncio.wait_for(bench.compressed.wait(), 10)
        running.cancel()

    asyncio.run(scenario())


def test_it_waits_for_a_quiet_time(make: Any) -> None:
    bench = Bench(busy=True)
    compression = make(bench)

    async def scenario() -> None:
        running = asyncio.create_task(compression.run("on", bench.compress))
        await asyncio.sleep(0.1)
        assert bench.asked == []
        bench.busy = False
        await asyncio.wait_for(bench.compressed.wait(), 10)
        running.cancel()

    asyncio.run(scenario())


def test_what_the_worker_gets_instead_is_compressed_as_well(make: Any) -> None:
    bench = Bench(device="cpu")
    compression = make(bench)

    async def scenario() -> None:
        running = asyncio.create_task(compression.run("on", bench.compress))
        await asyncio.wait_for(bench.compressed.wait(), 10)
        bench.compressed.clear()
        bench.image.manifest.compressed = ()  # after a level 2 sleep
        await asyncio.wait_for(bench.compressed.wait(), 10)
        running.cancel()

    asyncio.run(scenario())
    assert bench.asked == [KEY, KEY]


def test_a_process_that_is_suspended_gets_no_new_image_and_is_not_suspended_meanwhile(
    make: Any,
) -> None:
    bench = Bench()
    compression = make(bench)
    kept_off = []
    renew = bench.renew

    async def renewing() -> bool:
        kept_off.append(compression.keep_off())
        return await renew()

    bench.renew = renewing  # type: ignore[method-assign]

    async def scenario() -> None:
        assert compression.keep_off()
        running = asyncio.create_task(compression.run("on", bench.compress))
        await asyncio.sleep(0.1)
        assert bench.asked
        assert not kept_off
        compression.let_go_on()
        await asyncio.wait_for(bench.compressed.wait(), 10)
        running.cancel()

    asyncio.run(scenario())
    assert kept_off == [False]
    assert compression.keep_off()


@pytest.mark.parametrize("answers", [True, False])
def test_nothing_keeps_an_image_that_the_worker_has_let_go_of(make: Any, answers: bool) -> None:
    bench = Bench(device="cpu")
    compression = make(bench)
    asked = asyncio.Event()

    async def compress(key: ImageKey) -> bool:
        asked.set()
        if not answers:
            await asyncio.Event().wait()
        return False

    async def scenario() -> None:
        running = asyncio.create_task(compression.run("on", compress))
        await asked.wait()
        await asyncio.sleep(0)  # by now it waits, for the holder or until it looks again
        image = weakref.ref(bench.image)
        bench.image = None
        assert image() is None
        running.cancel()

    asyncio.run(scenario())


def test_a_segment_waits_for_requests_but_not_for_good(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device="cpu", busy=True)
    compression = make(bench)
    computed = threading.Event()

    def compress_segment(
        layout: object, index: int, payload: object, device: object, out: object, around: Any
    ):  # type: ignore[no-untyped-def]
        with around():
            computed.set()

    monkeypatch.setattr(module, "compress_segment", compress_segment)
    with pytest.raises(Unavailable, match="had other work"):
        compression.segment(KEY, 0, OUT)
    monkeypatch.setattr(module, "_PATIENCE_S", 10.0)
    waiting = threading.Thread(target=compression.segment, args=(KEY, 0, OUT))
    waiting.start()
    assert not computed.wait(0.1)
    bench.busy = False
    waiting.join()
    assert computed.is_set()


def test_segments_that_wait_for_each_other_give_up_together(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device="cpu", busy=True)
    compression = make(bench)

    def compress_segment(
        layout: object, index: int, payload: object, device: object, out: object, around: Any
    ):  # type: ignore[no-untyped-def]
        with around():
            pytest.fail("it was busy")

    monkeypatch.setattr(module, "compress_segment", compress_segment)
    monkeypatch.setattr(module, "_PATIENCE_S", 1.0)
    began_s = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(compression.segment, KEY, 0, OUT) for _ in range(4)]
        for each in waiting:
            with pytest.raises(Unavailable, match="had other work"):
                each.result()
    assert time.monotonic() < began_s + 3


def test_device_is_left_alone_while_the_process_is_suspended(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device="cpu")
    compression = make(bench)
    inside, go_on = threading.Event(), threading.Event()

    def compress_segment(
        layout: object, index: int, payload: object, device: object, out: object, around: Any
    ):  # type: ignore[no-untyped-def]
        with around():
            inside.set()
            go_on.wait()

    monkeypatch.setattr(module, "compress_segment", compress_segment)
    assert compression.keep_off()
    with pytest.raises(Unavailable, match="suspended"):
        compression.segment(KEY, 0, OUT)
    compression.let_go_on()
    computing = threading.Thread(target=compression.segment, args=(KEY, 0, OUT))
    computing.start()
    inside.wait()
    assert not compression.keep_off()
    go_on.set()
    computing.join()
    assert compression.keep_off()


def test_event_loop_does_not_wait_for_a_segment_when_it_is_cancelled(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device="cpu")
    compression = make(bench)
    go_on = threading.Event()
    computing: list[threading.Thread] = []

    def compress_segment(
        layout: object, index: int, payload: object, device: object, out: object, around: Any
    ):  # type: ignore[no-untyped-def]
        go_on.wait(10)

    async def compress(key: ImageKey) -> bool:
        computing.append(threading.Thread(target=compression.segment, args=(KEY, 0, OUT)))
        computing[0].start()
        bench.compressed.set()
        await asyncio.Event().wait()
        return True

    async def scenario() -> None:
        running = asyncio.create_task(compression.run("on", compress))
        await asyncio.wait_for(bench.compressed.wait(), 10)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        assert running.cancelled()
        assert computing[0].is_alive()

    monkeypatch.setattr(module, "compress_segment", compress_segment)
    asyncio.run(scenario())
    go_on.set()
    computing[0].join()


def test_segments_of_another_image_are_not_computed(make: Any) -> None:
    bench = Bench(device="cpu")
    compression = make(bench)
    with pytest.raises(Unavailable):
        compression.segment(cast("ImageKey", "other"), 0, OUT)
    bench.image.manifest.compressed = ((),)
    with pytest.raises(Unavailable):
        compression.segment(KEY, 0, OUT)
