"""Which source a replica came to its image: each is told once, and whatever happens it has one."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, OwnerDiedError, RayTaskError

from actors.checkpoints.source import ModelSource
from actors.errors import (
    HolderLost,
    HostMemoryFull,
    ImageMissing,
    LayoutMismatch,
    ServingError,
    StoreFull,
)
from actors.holder import obtain
from actors.holder.files import ImageFiles
from actors.holder.held import ImageGrant, ImageRequest
from actors.holder.obtain import FastLoad, load_from_disk
from actors.holder.sources import ImageSource
from actors.image import packer
from actors.image.image import WeightImage
from actors.image.layout import ImageKey


class FakeHolder:
    """Answers `acquire` with what it was given."""

    def __init__(self, answer: Exception | ImageGrant) -> None:
        self.answer = answer
        self.rechecked: list[ImageKey] = []
        self.has_lease = False

    async def wait_while_starting(self) -> None: ...

    async def ping(self) -> None: ...

    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.has_lease = True
        return self.answer

    async def release(self, key: ImageKey, lessee: str) -> bool:
        self.has_lease = False
        return True

    async def recheck(self, key: ImageKey) -> bool:
        self.rechecked.append(key)
        return True


def load_with(holder: FakeHolder | None, checkpoint: Path, sources: list[ImageSource]) -> FastLoad:
    request = ImageRequest("tiny", ModelSource(id=str(checkpoint)), "auto")
    return FastLoad(holder, request, checkpoint, "me", on_obtained=sources.append)


def from_another_process(error: ServingError) -> Exception:
    """As Ray raises it here."""
    return RayTaskError("acquire", "its traceback", error).as_instanceof_cause()


FAILURES: dict[str, tuple[Exception, ImageSource]] = {
    "missing key": (from_another_process(ImageMissing("x")), ImageSource.MISSING_KEY),
    "layout mismatch": (from_another_process(LayoutMismatch("x")), ImageSource.LAYOUT_MISMATCH),
    "store full": (from_another_process(StoreFull("x")), ImageSource.STORE_FULL),
    "over budget": (from_another_process(HostMemoryFull("x")), ImageSource.OVER_BUDGET),
    "holder timeout": (GetTimeoutError("x"), ImageSource.TIMEOUT),
    "timeout": (TimeoutError("x"), ImageSource.TIMEOUT),
    "holder died": (ActorDiedError(), ImageSource.HOLDER_GONE),
    "holder lost": (HolderLost("x"), ImageSource.HOLDER_GONE),
    "bytes died with it": (OwnerDiedError("0" * 56, None, ""), ImageSource.HOLDER_GONE),
    "anything": (RuntimeError("x"), ImageSource.ERROR),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_is_told_once_with_its_reason_and_disk_is_read(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    failure, source = FAILURES[case]
    holder, sources = FakeHolder(failure), []
    image = asyncio.run(load_with(holder, tiny_checkpoint, sources).obtain())
    assert image.origin == "disk"
    image.verify()
    assert sources == [source]
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert warning.getMessage().startswith("Fallback to load from disk. error:")
    assert warning.getMessage().endswith(f"({source.value})")
    assert holder.rechecked == []


@pytest.mark.parametrize("flips", [False, True])
def test_image_beyond_the_budget_comes_from_the_holder_s_file_and_goes_with_the_sleep(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flips: bool
) -> None:
    key = packer.image_key(tiny_checkpoint, packer.checkpoint_dtype(tiny_checkpoint, "auto"))
    packed, files = load_from_disk(tiny_checkpoint, key), ImageFiles(tmp_path)
    assert files.write(packed.manifest, packed.segments)
    file = files.path(key)
    packs: list[Path] = []
    if flips:
        data = bytearray(file.read_bytes())
        data[-5000] ^= 1
        file.write_bytes(data)

    def pack(checkpoint: Path, key: ImageKey) -> WeightImage:
        packs.append(checkpoint)
        return load_from_disk(checkpoint, key)

    monkeypatch.setattr(obtain, "load_from_disk", pack)
    holder = FakeHolder(from_another_process(HostMemoryFull("x", str(file))))
    image = asyncio.run(load_with(holder, tiny_checkpoint, []).obtain())
    assert (image.origin, image.is_kept_asleep) == ("disk", False)
    assert image.manifest == packed.manifest
    image.verify()
    assert packs == ([tiny_checkpoint] if flips else [])


def test_private_copies_are_kept_asleep_where_there_is_no_budget(tiny_checkpoint: Path) -> None:
    holder = FakeHolder(from_another_process(StoreFull("x")))
    assert asyncio.run(load_with(holder, tiny_checkpoint, []).obtain()).is_kept_asleep


def test_no_holder_is_told_and_is_no_failure(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources: list[ImageSource] = []
    image = asyncio.run(load_with(None, tiny_checkpoint, sources).obtain())
    assert (image.origin, sources) == ("disk", [ImageSource.NO_HOLDER])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def store(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ImageGrant]:
    """Objects by reference, and a grant of an image in them."""
    dtype = packer.checkpoint_dtype(tiny_checkpoint, "auto")
    image = load_from_disk(tiny_checkpoint, packer.image_key(tiny_checkpoint, dtype))
    count = len(image.layout.segments)
    objects = [np.frombuffer(image.segment(i), np.uint8).copy() for i in range(count)]
    monkeypatch.setattr(ray, "get", lambda refs, timeout: [objects[ref] for ref in refs])
    return objects, ImageGrant(image.manifest, tuple(range(count)), (0,) * count, 1.0)  # type: ignore[arg-type]


def test_image_from_the_store_is_told(tiny_checkpoint: Path, store: tuple[Any, ImageGrant]) -> None:
    holder, sources = FakeHolder(store[1]), []
    image = asyncio.run(load_with(holder, tiny_checkpoint, sources).obtain())
    assert (image.origin, sources, holder.rechecked) == ("image", [ImageSource.IMAGE], [])
    assert holder.has_lease


class FaultyHolder(FakeHolder):
    """Has a byte of the image wrong until it is made to look; or always, or only the replica has."""

    def __init__(self, answer: ImageGrant, byte: Any, drops: bool, repairs: bool) -> None:
        super().__init__(answer)
        self._byte, self._drops, self._repairs = byte, drops, repairs
        self._byte ^= 1

    async def recheck(self, key: ImageKey) -> bool:
        await super().recheck(key)
        if self._repairs:
            self._byte ^= 1
        return self._drops


@pytest.mark.parametrize(
    ("drops", "repairs", "source"),
    [
        (True, True, ImageSource.IMAGE),
        (True, False, ImageSource.DIGEST_MISMATCH),  # wrong once more
        (False, False, ImageSource.DIGEST_MISMATCH),  # only here
    ],
)
def test_image_with_a_changed_byte_is_dropped_and_loaded_once_more(
    tiny_checkpoint: Path,
    store: tuple[Any, ImageGrant],
    drops: bool,
    repairs: bool,
    source: ImageSource,
) -> None:
    objects, grant = store
    holder, sources = FaultyHolder(grant, objects[-1][-1:], drops, repairs), []
    image = asyncio.run(load_with(holder, tiny_checkpoint, sources).obtain())
    assert image.origin == ("image" if source is ImageSource.IMAGE else "disk")
    assert holder.has_lease == (image.origin == "image")
    image.verify()
    assert sources == [source]
    assert holder.rechecked == [grant.manifest.key]


def test_image_that_does_not_come_in_time_leaves_no_lease_should_it_ever_come(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, sources = FakeHolder(ImageMissing("it was not in time")), []
    released: list[str] = []

    async def never(*_: Any) -> ImageGrant:
        return await asyncio.get_running_loop().create_future()

    async def release(key: ImageKey, lessee: str) -> bool:
        released.append(lessee)
        return False

    monkeypatch.setattr(holder, "acquire", never)
    monkeypatch.setattr(holder, "release", release)
    load = replace(load_with(holder, tiny_checkpoint, sources), load_timeout_s=0.0)
    assert asyncio.run(load.obtain()).origin == "disk"
    assert (sources, released) == ([ImageSource.TIMEOUT], ["me"])


def test_every_way_is_covered_here() -> None:
    told = {source for _, source in FAILURES.values()}
    assert told | {ImageSource.NO_HOLDER, ImageSource.IMAGE, ImageSource.DIGEST_MISMATCH} == set(
        ImageSource
    )


@pytest.mark.parametrize("hangs", ["looking at the files", "reading them"])
def test_file_system_that_never_answers_is_waited_for_no_longer_and_blocks_nothing(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    never, reading = threading.Event(), threading.Event()

    def hang(*args: object) -> None:
        reading.set()
        never.wait()

    if hangs == "reading them":
        monkeypatch.setattr(obtain, "load_from_disk", hang)
    else:
        monkeypatch.setattr(packer, "image_key", hang)
    monkeypatch.setattr(obtain, "LOAD_TIMEOUT_S", 0.2)
    load = load_with(None, tiny_checkpoint, [])

    async def scenario() -> None:
        async with asyncio.timeout(10):
            loading = asyncio.create_task(load.obtain())
            await asyncio.to_thread(reading.wait)
            assert not loading.done()  # and this event loop goes on
            with pytest.raises(ImageMissing) as caught:
                await loading
            assert str(caught.value) == (
                f"reading {tiny_checkpoint} has not ended after 0.2 s; its file system does not answer"
            )

    asyncio.run(scenario())  # does not wait for that thread either
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("apart-")]
    assert thread.daemon
    never.set()
    thread.join()
