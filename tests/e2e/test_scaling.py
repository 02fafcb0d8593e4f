"""Replicas that come and go, and who of them is asked."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, wait_until

pytestmark = pytest.mark.slow

_REPLICA = "ray::ServeReplica:llm:model"
ROOM = 2  # of a replica of `pair`
DOWNSCALE_DELAY_S = 4.0


@pytest.fixture(scope="module")
def server(servers: Any) -> ServeProcess:
    server: ServeProcess = servers.start("scaling")
    ready = {"pair": "loaded", "zero": "unloaded"}
    wait_until(lambda: _states(server) == ready, 120, "it runs", pause_s=0.2)
    wait_until(lambda: len(_asleep(server)) == 2, 60, "two replicas of pair", pause_s=0.2)
    return server


def _states(server: ServeProcess) -> dict[str, str]:
    try:
        return server.model_states()
    except (httpx.TransportError, httpx.HTTPStatusError):
        return {}


def _asleep(server: ServeProcess) -> dict[str, dict[str, Any]]:
    """The replicas of `pair` after they were told to sleep: id -> status."""
    response = server.http.post("/sleep", params={"model": "pair"})
    assert response.status_code == 200, response.text
    return {replica["replica_id"]: replica for replica in response.json()["models"]["pair"]}


def _wakes(server: ServeProcess) -> dict[str, int]:
    return {replica_id: status["wakes"] for replica_id, status in _asleep(server).items()}


def _processes(server: ServeProcess, model: str) -> set[int]:
    return {p.pid for p in server.processes() if _title(p).startswith(f"{_REPLICA}:{model}")}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie, which is one
        return ""


def _ask(server: ServeProcess, model: str = "pair", max_tokens: int = 1) -> None:
    asked = {"model": model, "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    response = server.post("/v1/completions", **asked)
    assert response.status_code == 200, response.text


@contextmanager
def _in_flight(server: ServeProcess, count: int) -> Iterator[None]:
    """So many requests at any time: each is followed by the next."""
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            _ask(server, max_tokens=200)

    with ThreadPoolExecutor(count) as pool:
        clients = [pool.submit(ask) for _ in range(count)]
        try:
            yield
        finally:
            enough.set()
    for client in clients:
        client.result()


def _decisions(server: ServeProcess, kind: str) -> list[str]:
    """What the policy said of `pair`."""
    return re.findall(rf"model:pair: (\d -> \d: .*) \({kind}\)", server.log())


def _started(server: ServeProcess) -> int:
    return len(re.findall(r"pair/\w+: waking -> awake \(start\)", server.log()))


def test_one_after_the_other_goes_to_the_awake_replica_and_the_other_sleeps_on(
    server: ServeProcess,
) -> None:
    before = _wakes(server)
    for _ in range(200):
        _ask(server)
    after = _wakes(server)
    assert after.keys() == before.keys()
    assert sorted(after[name] > before[name] for name in before) == [False, True]


def test_more_than_it_has_room_for_wakes_the_other_and_creates_none(server: ServeProcess) -> None:
    before = _wakes(server)

    def all_awake() -> bool:
        replicas = server.get("/replicas?model=pair")["models"]["pair"]["replicas"]
        return {replica["state"] for replica in replicas} == {"awake"}

    with _in_flight(server, ROOM + 1):  # the policy looks once in a while only
        wait_until(all_awake, 30, "the other wakes")
    after = _wakes(server)
    assert after.keys() == before.keys()
    assert all(after[name] > before[name] for name in before)
    assert not _decisions(server, "create")


def test_third_is_created_when_both_are_full_and_goes_after_the_delay(server: ServeProcess) -> None:
    first = _processes(server, "pair")
    with _in_flight(server, 3 * ROOM):
        wait_until(lambda: _started(server) == 3, 90, "a third replica")
        stopped_s = time.monotonic()
    (decision,) = _decisions(server, "create")
    assert decision.startswith("2 -> 3: ")
    wait_until(lambda: server.get("/is_sleeping?model=pair")["is_sleeping"], 30, "they sleep")
    wait_until(lambda: len(_processes(server, "pair")) < 3, 60, "the third goes")
    assert time.monotonic() - stopped_s >= DOWNSCALE_DELAY_S
    assert _processes(server, "pair") == first


def test_operator_s_number_holds_until_the_policy_s_delay_is_over(server: ServeProcess) -> None:
    before = _processes(server, "pair")
    assert server.post("/scaleout", model="pair", replicas=4).status_code == 400
    asked_s = time.monotonic()
    answer = server.post("/scaleout", model="pair", replicas=3)
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"] == "2 -> 3: 1 will start"
    wait_until(lambda: len(_processes(server, "pair")) == 3, 60, "a third replica")
    wait_until(lambda: len(_processes(server, "pair")) < 3, 90, "the third goes")
    assert time.monotonic() - asked_s >= DOWNSCALE_DELAY_S
    assert _processes(server, "pair") == before


def test_to_zero_and_back_for_a_request(server: ServeProcess) -> None:
    _ask(server, "zero")
    assert len(_processes(server, "zero")) == 1
    wait_until(lambda: not _processes(server, "zero"), 30, "it goes")
    assert "(to_zero)" in server.log()
    assert server.model_states()["zero"] == "unloaded"
