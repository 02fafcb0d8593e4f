"""Spare processes of a real Ray: one is kept, and the next actor of its environment is in it."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from serve_app.process import spares
from serve_app.process.node_actor import find_or_make
from serve_app.replica.card_keeper import KeeperActor

pytestmark = pytest.mark.alone


class Taker:
    """What a process becomes."""

    def __init__(self) -> None:
        spares.taken()

    def process(self) -> int:
        return os.getpid()

    async def imported(self) -> bool:
        await spares.imported()
        return "actors.worker.model_worker" in sys.modules

    async def keep_one_more(self) -> None:
        await spares.keep_one_more()


class Parent:
    """As a replica, whose environment the worker's comes on top of. Its workers live as long as it does."""

    def take(self) -> Any:
        environment = spares.environment_of_worker()
        return ray.remote(Taker).options(num_cpus=0, runtime_env=environment).remote()


@pytest.fixture(scope="module")
def parents(local_ray: None) -> list[Any]:
    """Those that there are."""
    return []


def take(parents: list[Any], code: str) -> Any:
    """A new replica's worker."""
    own = {"env_vars": {"SLEEPSERVE_SPARE": f"replica:{code}"}}
    parents.append(ray.remote(Parent).options(num_cpus=0, runtime_env=own).remote())
    return ray.get(parents[-1].take.remote())


def spare_processes(code: str, kind: str = "worker") -> list[int]:
    """By the names of their sockets, which they close when they are taken."""
    words = Path("/proc/net/unix").read_text().split()
    ours = [word for word in words if word.startswith(f"@sleepserve-spare:{kind}:{code}:")]
    return [int(word.rpartition(":")[2]) for word in ours]


def wait_for_spare(code: str) -> int:
    ends_s = time.monotonic() + 60
    while not (found := spare_processes(code)):
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    (process,) = found
    return process


CODE = f"this-{os.getpid()}"


@pytest.fixture(scope="module")
def first(parents: list[Any]) -> Any:
    """A worker of this code."""
    worker = take(parents, CODE)
    assert ray.get(worker.imported.remote())
    assert not spare_processes(CODE), "it is in use"
    return worker


def test_next_one_is_there_already_with_its_imports_done(parents: list[Any], first: Any) -> None:
    ray.get(first.keep_one_more.remote())
    spare = wait_for_spare(CODE)
    ray.get(first.keep_one_more.remote())
    second = take(parents, CODE)
    assert ray.get(second.process.remote()) == spare
    assert ray.get(second.imported.remote())
    ray.get(second.keep_one_more.remote())
    assert wait_for_spare(CODE) != spare, "a third one, and no fourth"


def test_code_that_has_changed_gets_no_process_of_older_code(
    parents: list[Any], first: Any
) -> None:
    ray.get(first.keep_one_more.remote())
    spare = wait_for_spare(CODE)
    assert ray.get(take(parents, f"newer-{os.getpid()}").process.remote()) != spare
    assert spare_processes(CODE) == [spare]


class Replica:
    """As a replica that is the first on its node to want a keeper of cards."""

    def __init__(self) -> None:
        spares.taken()

    async def have_keeper(self) -> int:
        node = ray.get_runtime_context().get_node_id()
        keeper = await asyncio.to_thread(find_or_make, KeeperActor, "keeper", node)
        socket = Path(await keeper.address.remote())
        return int(socket.name.removeprefix("keeper-"))


@pytest.mark.slow  # imports of a replica, twice
def test_keeper_that_a_replica_makes_is_no_spare_one(parents: list[Any]) -> None:
    """It has the replica's environment, as all that an actor makes."""
    code = f"keeper-{os.getpid()}"
    environment = spares._environment(spares.Kind.REPLICA, code)
    replica = ray.remote(Replica).options(num_cpus=0, runtime_env=environment).remote()
    keeper = ray.get(replica.have_keeper.remote())
    environ = Path(f"/proc/{keeper}/environ").read_text()
    assert f"SLEEPSERVE_SPARE=replica:{code}" in environ, (
        "Ray gives it no such environment any more"
    )
    assert spare_processes(code, "replica") == []


def test_where_no_spare_can_be_had_a_line_says_so_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise ConnectionError("no raylet")

    monkeypatch.setenv("SLEEPSERVE_SPARE", "worker:refused")
    monkeypatch.setattr(spares, "_start_one", refuse)
    asyncio.run(spares.keep_one_more())
    assert "no spare process: the next start imports for itself" in caplog.text


def test_environment_changes_with_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spares, "_ROOT", tmp_path)
    file = tmp_path / "actors" / "engine.py"
    file.parent.mkdir()
    file.touch()
    before = spares.environment_of_replicas()
    assert spares.environment_of_replicas() == before
    os.utime(file, ns=(1, 1))
    assert spares.environment_of_replicas() != before


def test_without_an_environment_of_its_own_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLEEPSERVE_SPARE", raising=False)
    monkeypatch.setattr(spares, "_start_one", lambda: pytest.fail("asked"))
    assert spares.environment_of_worker() is None
    asyncio.run(spares.keep_one_more())
