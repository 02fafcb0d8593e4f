"""The budget of a node: promises, who is asked, and whose word is last."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.checkpoints.source import ModelSource
from actors.errors import HostMemoryFull
from actors.holder.config import HostConfig
from actors.holder.held import Held, HeldImages, ImageGrant, ImageRequest
from actors.holder.host_memory import ImageUse, Need
from actors.holder.room import HostRoom
from actors.image.layout import ImageKey
from tests.unit.actors.image.packed import packed

PAGE = 4096
GIB = 2**30


class Clock:
    """Time passes when somebody pauses."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


class Workers:
    """Lookers: each lessee's worker is its own use, or a function that says it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refuse: set[str] = set()
        self.when_asked = lambda: None

    def uses(self, lessees: Mapping[ImageKey, Mapping[str, Any]]) -> dict[ImageKey, list[ImageUse]]:
        return {
            key: [use() if callable(use) else use for use in workers.values()]
            for key, workers in lessees.items()
        }

    def let_go(self, key: ImageKey, workers: Mapping[str, Any]) -> bool:
        self.asked.append(key.model)
        self.when_asked()
        return key.model not in self.refuse


class Bench:
    """A room for images of one page each."""

    def __init__(self, pages: float | None, disk_dir: Path | None = None) -> None:
        self.clock, self.workers, self.images = Clock(), Workers(), HeldImages()
        self.evicted: list[bool] = []
        self.free = 0
        self.room = HostRoom(
            self.images,
            self.workers,
            lambda: self.free,
            self.clock,
            self.evicted.append,
            patience_s=10.0,
            pause=self.clock.pause,
        )
        gib = None if pages is None else pages * PAGE / GIB
        folder = None if disk_dir is None else str(disk_dir)
        self.room.configure(HostConfig(memory_budget_gib=gib, disk_dir=folder))

    def hold(self, name: str, use: Any = None, pages: int = 1) -> ImageKey:
        """An image in memory, and who looks at it."""
        made = packed(name, (pages * PAGE,))
        segments: Any = [
            SimpleNamespace(payload=np.frombuffer(payload, np.uint8)) for payload in made.payloads
        ]
        request = ImageRequest(name, ModelSource(id=f"/models/{name}"), "auto")
        held = Held(ImageGrant(made.manifest, (), (), 1.0), segments, "disk", request, 0.0)
        held.leased_s = self.clock()
        self.images.put(made.manifest.key, held)
        if use is not None:
            self.images.lease(held, request, f"replica of {name}", use, 0.0)
        return made.manifest.key

    def load(self, name: str, pages: int = 1, evicts: bool = True) -> None:
        key = packed(name, (pages * PAGE,)).manifest.key
        with self.room.for_a_load(key, evicts) as make_room:
            make_room(pages * PAGE)
            self.hold(name, pages=pages)

    @property
    def there(self) -> list[str]:
        return [key.model.removeprefix("/models/") for key, _ in self.images.snapshot()]


def asleep(idle_s: float) -> ImageUse:
    return ImageUse(Need.NONE, idle_s)


AWAKE = ImageUse(Need.AWAKE)


def test_without_a_budget_nobody_goes_and_nobody_is_asked() -> None:
    bench = Bench(None)
    bench.hold("a", asleep(1))
    bench.load("b", pages=1000)
    assert (bench.there, bench.workers.asked) == (["a", "b"], [])


def test_longest_unused_goes_and_only_as_many_as_needed() -> None:
    bench = Bench(3)
    for name, idle_s in (("a", 10.0), ("b", 30.0), ("c", 20.0)):
        bench.hold(name, asleep(idle_s))
    bench.load("d")
    assert bench.there == ["a", "c", "d"]
    bench.load("e", pages=2)
    assert bench.there == ["d", "e"]
    assert (bench.room.evictions, bench.evicted) == (3, [False] * 3)


def test_image_of_which_one_replica_is_awake_stays() -> None:
    bench = Bench(2)
    key = bench.hold("a", asleep(100))
    held = bench.images.get(key)
    assert held is not None
    bench.images.lease(held, held.request, "another replica", AWAKE, 0.0)
    bench.hold("b", asleep(1))
    bench.load("c")
    assert bench.there == ["a", "c"]


def test_worker_has_the_last_word_and_the_next_one_is_asked() -> None:
    bench = Bench(2)
    use = [asleep(100)]
    bench.hold("a", lambda: use[0])
    bench.hold("b", asleep(1))
    bench.workers.refuse.add("/models/a")
    bench.workers.when_asked = lambda: use.__setitem__(0, AWAKE)  # a wake was quicker
    bench.load("c")
    assert bench.workers.asked == ["/models/a", "/models/b"]
    assert bench.there == ["a", "c"]


def test_image_that_is_leased_while_its_workers_let_go_stays() -> None:
    bench = Bench(2)
    key = bench.hold("a", asleep(100))
    bench.hold("b", asleep(1))
    held = bench.images.get(key)
    assert held is not None

    def another_replica_comes() -> None:
        bench.workers.when_asked = lambda: None
        bench.images.lease(held, held.request, "another", AWAKE, bench.clock())

    bench.workers.when_asked = another_replica_comes
    bench.load("c")
    assert bench.there == ["a", "c"]


def test_image_that_somebody_is_about_to_lease_stays() -> None:
    bench = Bench(1)
    key = bench.hold("a")
    with (
        bench.images.awaited(key, "another", None),
        pytest.raises(HostMemoryFull, match="none of the others let go"),
    ):
        bench.load("b")
    bench.load("b")
    assert bench.there == ["b"]


def test_those_that_change_are_waited_for() -> None:
    bench = Bench(1)

    def use() -> ImageUse:
        return asleep(0) if bench.clock() > 1004 else ImageUse(Need.CHANGING)

    bench.hold("a", use)
    bench.load("b")
    assert bench.there == ["b"]
    assert 1004 < bench.clock() < 1020


def test_those_that_never_stop_changing_are_waited_for_no_longer_than_patience() -> None:
    bench = Bench(1)
    bench.hold("a", ImageUse(Need.CHANGING))
    with pytest.raises(HostMemoryFull, match="in 10 s none of the others let go"):
        bench.load("b")
    assert 1010 <= bench.clock() < 1011


def test_worker_that_says_it_sleeps_and_never_lets_go_is_asked_no_longer_than_patience() -> None:
    bench = Bench(1)
    bench.hold("a", asleep(9))
    bench.workers.refuse.add("/models/a")
    with pytest.raises(HostMemoryFull, match="none of the others let go"):
        bench.load("b")
    assert bench.there == ["a"]


def test_awake_models_are_not_waited_for() -> None:
    bench = Bench(1)
    bench.hold("a", AWAKE)
    with pytest.raises(HostMemoryFull, match="models that have the rest are awake"):
        bench.load("b")
    assert bench.clock() == 1000


def test_image_larger_than_the_budget_has_nobody_go_and_is_told_the_sizes() -> None:
    bench = Bench(2)
    bench.hold("a", asleep(1))
    with pytest.raises(HostMemoryFull, match=r"needs .* GiB of a budget of .* GiB \(host\.memory"):
        bench.load("b", pages=3)
    assert (bench.there, bench.workers.asked) == (["a"], [])


def test_preload_has_nobody_go() -> None:
    bench = Bench(2)
    bench.load("a", evicts=False)
    bench.load("b", evicts=False)
    with pytest.raises(HostMemoryFull, match="nobody has asked for"):
        bench.load("c", evicts=False)
    assert bench.there == ["a", "b"]


def test_two_loads_at_once_do_not_count_the_same_room() -> None:
    bench = Bench(2)
    bench.hold("old", asleep(50))
    here, go_on = threading.Barrier(2), threading.Event()
    outcomes: dict[str, str] = {}

    def load(name: str) -> None:
        key = packed(name).manifest.key
        with bench.room.for_a_load(key, evicts=False) as make_room:
            here.wait(10)
            try:
                make_room(PAGE)
            except HostMemoryFull:
                outcomes[name] = "refused"
                go_on.set()
            else:
                outcomes[name] = "room"
                go_on.wait(10)

    threads = [threading.Thread(target=load, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes.values()) == ["refused", "room"]
    bench.load("c", evicts=False)  # what was promised is free again


def test_load_that_asks_again_is_promised_once() -> None:
    """A file that turns out to be torn, and then the checkpoint."""
    bench = Bench(1)
    with bench.room.for_a_load(packed("a").manifest.key, evicts=False) as make_room:
        make_room(PAGE)
        make_room(PAGE)


def test_who_goes_is_on_disk_and_is_written_once(tmp_path: Path) -> None:
    bench = Bench(1, tmp_path)
    key = bench.hold("a", asleep(1))
    bench.load("b")
    assert bench.room.files is not None
    assert bench.room.files.has(key)
    written = bench.room.files.path(key).stat()
    assert bench.evicted == [True]
    with pytest.raises(HostMemoryFull) as full:
        bench.load("a", evicts=False)
    assert full.value.file == str(bench.room.files.path(key))
    bench.load("a")
    bench.load("b")
    assert bench.room.files.path(key).stat() == written
    assert len(bench.room.files.sizes()) == 2


def test_who_goes_with_no_room_on_disk_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(1, tmp_path)
    bench.hold("a", asleep(1))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwritev", full)
    bench.load("b")
    assert (bench.there, bench.evicted) == (["b"], [False])
    assert "is not kept on disk" in caplog.text


def test_store_is_waited_for_until_it_has_what_left() -> None:
    bench = Bench(1)
    bench.hold("a", asleep(1))

    def frees(seconds: float) -> None:
        bench.clock.pause(seconds)
        bench.free = PAGE if bench.clock() > 1001 else 0

    bench.room._pause = frees
    bench.load("b")
    assert 1001 < bench.clock() < 1002
