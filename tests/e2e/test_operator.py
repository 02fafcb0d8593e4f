"""Operator's commands reach every replica, those that come later among them."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, wait_until, wait_until_gone
from tests.e2e.test_faults import PROCESSES

pytestmark = pytest.mark.slow

MODEL = "tiny"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def server(tiny: ServeProcess) -> Iterator[ServeProcess]:
    """One replica, awake; left as it came."""
    yield tiny
    tiny.http.post("/wake_up")
    tiny.http.post("/scalein", json={"replicas": 1})
    wait_until(lambda: len(told(tiny)["replicas"]) == 1, what="one replica")


def told(server: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/replicas")["models"][MODEL]
    return found


def states(server: ServeProcess) -> list[tuple[str, bool]]:
    """Of each replica: its state, and whether it is held there."""
    return sorted((replica["state"], replica["held"]) for replica in told(server)["replicas"])


def processes(server: ServeProcess) -> set[int]:
    """Of all replicas."""
    return {replica[name] for replica in told(server)["replicas"] for name in PROCESSES}


def scale(server: ServeProcess, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ask(server: ServeProcess) -> str:
    response = server.post("/v1/completions", **ASK)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def refused(server: ServeProcess) -> bool:
    response = server.post("/v1/completions", **ASK)
    if response.status_code == 200:
        return False
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "model_asleep"
    return True


def test_hold_reaches_replicas_that_come_later(server: ServeProcess) -> None:
    expected = ask(server)
    server.sleep(hold=True)
    assert refused(server)
    assert scale(server, "/scaleout", replicas=2) == {
        "code": 200,
        "model": MODEL,
        "before": 1,
        "target": 2,
        "message": "1 -> 2: 1 will start",
    }
    wait_until(lambda: len(told(server)["replicas"]) == 2, what="a second replica")
    assert states(server) == [("asleep", True)] * 2
    assert told(server)["target"] == 2
    assert scale(server, "/scaleout", replicas=2)["before"] == 2, "saying it twice changes nothing"
    assert refused(server)

    # One that dies is replaced by one that is held, too.
    first, second = told(server)["replicas"]
    psutil.Process(first["process_id"]).kill()

    def replaced() -> bool:
        there = {replica["process_id"] for replica in told(server)["replicas"]}
        return len(there) == 2 and first["process_id"] not in there

    wait_until(replaced, what="another replica in its place")
    wait_until_gone(first["worker_process_id"])
    assert states(server) == [("asleep", True)] * 2
    assert refused(server)

    assert server.http.post("/wake_up").status_code == 200
    assert states(server) == [("awake", False)] * 2
    assert {ask(server) for _ in range(8)} == {expected}
    there = processes(server)
    assert {second[name] for name in PROCESSES} < there
    assert len(there) == 4

    assert scale(server, "/scalein")["target"] == 1
    wait_until(lambda: len(told(server)["replicas"]) == 1, what="one replica")
    stays = processes(server)
    assert len(stays) == 2
    wait_until_gone(*there - stays)
    assert len(server.workers()) == 1
    assert ask(server) == expected


def test_fewer_than_one_is_refused(server: ServeProcess) -> None:
    response = server.post("/scalein", replicas=0)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "replicas"
    assert told(server)["target"] == 1
    ask(server)
