"""What an operator wants reaches replicas that were not there, and outages change nothing."""

import asyncio
import json

import pytest

from actors.protocol import SleepCommand
from serve_app.signals import hold as wanted
from serve_app.signals.hold import ClusterStore, Follower, Wanted, hold, release


class Store:
    """A WantedStore that can be away."""

    def __init__(self) -> None:
        self.kept: Wanted | None = None
        self.away = False

    async def read(self) -> Wanted | None:
        if self.away:
            raise ConnectionError("away")
        return self.kept

    async def write(self, wanted: Wanted) -> None:
        self.kept = wanted


class Replica:
    """What was applied to it; refuses when told to."""

    def __init__(self) -> None:
        self.heard: list[bool] = []
        self.refuses = False

    async def apply(self, wanted: Wanted) -> None:
        if self.refuses:
            raise TimeoutError("still busy")
        self.heard.append(wanted.held)


def test_a_new_replica_begins_with_what_was_said_before_it_came() -> None:
    async def scenario() -> None:
        store, replica = Store(), Replica()
        assert await Follower(store).at_start() is None
        await store.write(hold(2))
        follower = Follower(store)
        found = await follower.at_start()
        assert found is not None
        assert found.sleep == SleepCommand(level=2, hold=True)
        await follower.step(replica.apply)
        assert replica.heard == [], "it has begun with that"

    asyncio.run(scenario())


def test_what_is_said_later_is_applied_once_each() -> None:
    async def scenario() -> None:
        store, replica = Store(), Replica()
        follower = Follower(store)
        await follower.at_start()
        for command in (hold(1), release(), hold(1)):
            await store.write(command)
            for _ in range(2):
                await follower.step(replica.apply)
        assert replica.heard == [True, False, True]

    asyncio.run(scenario())


def test_what_could_not_be_applied_is_tried_again() -> None:
    async def scenario() -> None:
        store, replica = Store(), Replica()
        follower = Follower(store)
        await store.write(hold(1))
        replica.refuses = True
        await follower.step(replica.apply)
        assert replica.heard == []
        replica.refuses = False
        await follower.step(replica.apply)
        assert replica.heard == [True]

    asyncio.run(scenario())


def test_while_nobody_can_tell_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store, replica = Store(), Replica()
        await store.write(hold(1))
        store.away = True
        follower = Follower(store)
        assert await follower.at_start() is None
        for _ in range(3):
            await follower.step(replica.apply)
        assert replica.heard == []
        store.away = False
        await follower.step(replica.apply)
        assert replica.heard == [True]
        store.away = True
        await follower.step(replica.apply)
        assert replica.heard == [True]

    asyncio.run(scenario())
    outages = [r for r in caplog.records if "cannot look up" in r.getMessage()]
    assert len(outages) == 2, "one line an outage"


def test_following_goes_on_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted, "_LOOK_INTERVAL_S", 0.0)

    async def scenario() -> None:
        store, replica = Store(), Replica()
        task = asyncio.create_task(Follower(store).follow(replica.apply))
        async with asyncio.timeout(10):
            for count, command in enumerate((hold(1), release()), 1):
                await store.write(command)
                while len(replica.heard) < count:
                    await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replica.heard == [True, False]

    asyncio.run(scenario())


def test_the_cluster_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[str, str], bytes] = {}

    def put(key: str, value: str, *, namespace: str) -> None:
        kept[namespace, key] = value.encode()

    def get(key: str, *, namespace: str) -> bytes | None:
        return kept.get((namespace, key))

    monkeypatch.setattr(wanted, "_internal_kv_put", put)
    monkeypatch.setattr(wanted, "_internal_kv_get", get)

    async def scenario() -> None:
        one, same, other = (ClusterStore("llm", m) for m in ("a", "a", "b"))
        assert await one.read() is None
        command = hold(2, deep=True)
        await one.write(command)
        assert await same.read() == command
        assert await other.read() is None

    asyncio.run(scenario())


def test_a_hold_says_how_to_sleep_and_its_end_says_nothing_of_it() -> None:
    assert hold(1, deep=True).sleep == SleepCommand(level=1, hold=True, deep=True)
    assert release().sleep is None
    kept_by_an_older_version = Wanted(**json.loads('{"held": true, "level": 2, "given_ns": 1}'))
    assert kept_by_an_older_version.sleep == SleepCommand(level=2, hold=True)
