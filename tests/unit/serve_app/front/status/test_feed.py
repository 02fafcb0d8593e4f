"""The poller: runs while somebody watches, once for all, and nobody waits for the slow."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from actors.errors import ReplicaFailed
from actors.protocol import ReplicaState
from serve_app.front.status import feed as feed_module
from serve_app.front.status.feed import StatusFeed
from serve_app.front.status.snapshot import View
from serve_app.models.registry import ServedModels
from tests.fakes import FakeModel
from tests.on_loop import on_loop

Watch = AsyncGenerator[bytes, None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_INTERVAL_S", "_MOVING_INTERVAL_S", "_HOST_INTERVAL_S", "_SCALE_INTERVAL_S"):
        monkeypatch.setattr(feed_module, name, 0.002)


class Counting(FakeModel):
    """Counts how often it is asked."""

    asked = 0

    async def status(self) -> Any:
        self.asked += 1
        return await super().status()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def feed_of(*models: FakeModel, timeout_s: float = 0.05, **options: Any) -> StatusFeed:
    served = ServedModels({model.info.model_id: model for model in models}, timeout_s)
    return StatusFeed(served, {"sleepserve": "test"}, options.pop("read_images", None), **options)


async def event(watch: Watch) -> tuple[str, dict[str, Any]]:
    """The next one with something in it."""
    while True:
        lines = (await anext(watch)).decode().splitlines()
        if lines[0].startswith("event: "):
            return lines[0][7:], json.loads(lines[1][6:])


async def until(watch: Watch, reached: Callable[[View], bool]) -> View:
    """What a page knows once `reached` is true of it."""
    kind, state = await event(watch)
    assert kind == "snapshot"
    while not reached(state):
        kind, patch = await event(watch)
        assert kind == "change"
        _apply(state, patch)
    return state


def _apply(target: dict[str, Any], patch: dict[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _apply(target[key], value)
        else:
            target[key] = value


def states(view: View, model: str = "fake") -> list[str]:
    return [replica["state"] for replica in view["models"][model]["replicas"].values()]


@on_loop
async def test_snapshot_without_watchers_asks_once_and_keeps_no_history() -> None:
    model = Counting()
    feed = feed_of(model)
    shown = await feed.snapshot()
    assert model.asked == 1
    assert states(shown) == ["awake"]
    assert shown["models"]["fake"]["scale"] == {
        "target": 1,
        "least": 1,
        "most": 4,
        "most_setting": "autoscaling.max_replicas",
        "gave_up": False,
        "why": "",
    }
    assert shown["history"] == {}
    assert shown["watched_since"] is None
    assert json.loads(json.dumps(shown)) == shown


@on_loop
async def test_snapshot_asks_for_itself_while_the_first_watcher_knows_nothing_yet() -> None:
    feed = feed_of(FakeModel())
    watch = feed.watch()
    kind, seen = await event(watch)
    assert (kind, states(seen), seen["host"]) == ("snapshot", [], {})
    shown = await feed.snapshot()
    assert states(shown) == ["awake"]
    assert shown["models"]["fake"]["asked"]
    assert shown["host"]["total"] > 0
    await watch.aclose()


@on_loop
async def test_watchers_share_one_poller_which_ends_with_the_last() -> None:
    model = Counting()
    feed = feed_of(model)
    before = asyncio.all_tasks()
    one, two = feed.watch(), feed.watch()
    await until(one, lambda view: states(view) == ["awake"])
    await until(two, lambda view: states(view) == ["awake"])
    pollers = [task for task in asyncio.all_tasks() if task.get_name() == "status poller"]
    assert len(pollers) == 1
    await one.aclose()
    assert not pollers[0].done()
    await two.aclose()
    assert pollers[0].cancelled()
    assert asyncio.all_tasks() == before
    asked = model.asked
    await asyncio.sleep(0.02)
    assert model.asked == asked


@on_loop
async def test_watcher_sees_a_sleep_and_its_place_in_history() -> None:
    model = FakeModel()
    feed = feed_of(model)
    watch = feed.watch()
    state = await until(watch, lambda view: states(view) == ["awake"])
    model.states = [ReplicaState.ASLEEP]
    while states(state) != ["asleep"]:
        _apply(state, (await event(watch))[1])
    assert [entry["state"] for entry in state["history"].values()] == ["awake", "asleep"]
    await watch.aclose()


@on_loop
async def test_nothing_wakes() -> None:
    model = FakeModel(states=[ReplicaState.ASLEEP])
    watch = feed_of(model).watch()
    await until(watch, lambda view: states(view) == ["asleep"])
    await watch.aclose()
    assert model.orders == []
    assert model.requests == []


@pytest.mark.parametrize("way", ["hangs", "raises", "raises ours"])
@on_loop
async def test_silent_model_holds_up_nobody(way: str) -> None:
    silent, lively = FakeModel("silent"), FakeModel("lively")
    feed = feed_of(silent, lively, timeout_s=0.3)
    watch = feed.watch()
    state = await until(watch, lambda v: states(v, "silent") == states(v, "lively") == ["awake"])
    if way == "hangs":
        silent.hang_status = True
    else:
        silent.fail_control = ReplicaFailed("gone") if "ours" in way else KeyError("secret")
    for wanted in (ReplicaState.ASLEEP, ReplicaState.AWAKE, ReplicaState.ASLEEP):
        lively.states = [wanted]
        while states(state, "lively") != [wanted]:
            _apply(state, (await event(watch))[1])
    while state["models"]["silent"].get("silent_since") is None:
        _apply(state, (await event(watch))[1])
    why = {
        "hangs": "the replicas of 'silent' did not tell their state in time",
        "raises": "the replicas cannot be asked",
        "raises ours": "gone",
    }
    assert state["models"]["silent"]["why_silent"] == why[way]
    assert states(state, "silent") == ["awake"]  # as it was last
    silent.hang_status, silent.fail_control = False, None
    while "silent_since" in state["models"]["silent"]:
        _apply(state, (await event(watch))[1])
    await watch.aclose()


@on_loop
async def test_snapshot_in_time_though_one_model_is_silent() -> None:
    silent, lively = FakeModel("silent"), FakeModel("lively")
    silent.hang_status = True
    shown = await feed_of(silent, lively).snapshot()
    assert states(shown, "lively") == ["awake"]
    assert shown["models"]["silent"]["silent_since"] is not None


@pytest.mark.parametrize(
    ("pause_s", "expected"), [(1, ["awake"]), (9, ["awake", "unseen", "awake"])]
)
@on_loop
async def test_pauses_are_gaps_unless_short(pause_s: float, expected: list[str]) -> None:
    clock = Clock()
    feed = feed_of(FakeModel(), now=clock)
    for _ in range(2):
        watch = feed.watch()
        state = await until(watch, lambda view: states(view) == ["awake"])
        while len(state["history"]) < 1:
            _apply(state, (await event(watch))[1])
        await watch.aclose()
        clock.now += pause_s
    assert [entry["state"] for entry in state["history"].values()] == expected


@on_loop
async def test_quiet_stream_has_heartbeats_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(feed_module, "_STREAM_S", 0.2)
    for name in ("_LOOK_INTERVAL_S", "_HOST_INTERVAL_S", "_SCALE_INTERVAL_S"):
        monkeypatch.setattr(feed_module, name, 60)
    frames = [frame async for frame in feed_of(FakeModel()).watch()]
    assert frames[0].startswith(b"retry: ")
    assert json.loads(frames[-1].splitlines()[1][6:]).keys() == {"time"}


@on_loop
async def test_images_are_shown_while_the_holder_tells_them() -> None:
    async def none() -> list[Any]:
        raise ConnectionError("no holder")

    shown = await feed_of(FakeModel(), read_images=none).snapshot()
    assert shown["host"]["images"] is None
