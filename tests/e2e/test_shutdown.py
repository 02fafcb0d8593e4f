"""A replica that is told to stop finishes its streams; Ctrl-C leaves nothing behind."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Servers, config_with
from tests.e2e.serve_process import PROJECT, ServeProcess, wait_until, wait_until_gone
from tests.e2e.test_recovery import serving, text_of
from tests.e2e.test_redeploy import changed, deploy

LONG = {"model": "tiny", "prompt": "on and on", "max_tokens": 900, "ignore_eos": True}
STREAMS = 2
CONTINUATIONS = 8  # together they take a replica for many seconds


# --- replicas that are told to stop ---


@dataclass(frozen=True, slots=True)
class Heard:
    """A stream, from its first event to its last."""

    events: list[dict[str, Any]]
    done: bool
    ended_s: float


def listen(server: ServeProcess, begun: threading.Semaphore) -> Heard:
    asked = LONG | {"n": CONTINUATIONS, "stream": True, "stream_options": {"include_usage": True}}
    events: list[dict[str, Any]] = []
    done = False
    with server.http.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                if not events:
                    begun.release()
                events.append(json.loads(line.removeprefix("data: ")))
    return Heard(events, done, time.monotonic())


@contextmanager
def streaming(server: ServeProcess, count: int = STREAMS) -> Iterator[list[Future[Heard]]]:
    """Long streams, of which as many as run at once have begun."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(listen, server, begun) for _ in range(count)]
        for _ in range(STREAMS):
            assert begun.acquire(timeout=60)
        yield streams


def in_flight(server: ServeProcess) -> dict[int, int]:
    """Process of each running replica -> requests."""
    replicas = server.get("/replicas")["models"]["tiny"]["replicas"]
    return {replica["process_id"]: replica["in_flight"] for replica in replicas}


def worker_of(server: ServeProcess, replica: int) -> int:
    """Process of a replica -> process of its worker."""
    replicas = server.get("/replicas")["models"]["tiny"]["replicas"]
    return {each["process_id"]: int(each["worker_process_id"]) for each in replicas}[replica]


def both_are_asked(server: ServeProcess) -> bool:
    """Whether two requests at a time go to two replicas: the router hears of a new one after a while."""
    with ExitStack() as streams:
        for _ in range(2):
            asked = server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True})
            streams.enter_context(asked)
        return sorted(in_flight(server).values()) == [1, 1]


def check_finished(streams: list[Future[Heard]], told_s: float) -> None:
    """Every stream came whole, and the replica was told to stop in the middle of one at least."""
    heard = [stream.result(timeout=180) for stream in streams]
    for stream in heard:
        assert stream.done
        assert not [event for event in stream.events if "error" in event]
        assert stream.events[-1]["usage"]["completion_tokens"] == CONTINUATIONS * 900
        reasons = [c["finish_reason"] for event in stream.events for c in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"] * CONTINUATIONS
    assert max(stream.ended_s for stream in heard) > told_s


@pytest.mark.slow
def test_replica_too_many_finishes_its_stream(tiny: ServeProcess) -> None:
    tiny.post("/scaleout", replicas=2)
    wait_until(lambda: len(in_flight(tiny)) == 2, what="two replicas", pause_s=0.2)
    tiny.http.post("/wake_up")
    wait_until(lambda: both_are_asked(tiny), what="the router knows both", pause_s=0.2)
    wait_until(lambda: not any(in_flight(tiny).values()), what="they are free", pause_s=0.2)
    with streaming(tiny) as streams:
        before = in_flight(tiny)
        assert sorted(before.values()) == [1, 1]
        workers = {replica: worker_of(tiny, replica) for replica in before}
        tiny.post("/scalein", replicas=1)
        wait_until(lambda: len(in_flight(tiny)) == 1, what="one replica", pause_s=0.2)
        told_s = time.monotonic()
        (leaving,) = before.keys() - in_flight(tiny).keys()
        for pid in (leaving, workers[leaving]):
            assert psutil.pid_exists(pid)
        check_finished(streams, told_s)
    wait_until_gone(leaving, workers.pop(leaving))
    assert tiny.workers() == set(workers.values())


@pytest.mark.slow
def test_replica_of_an_older_version_finishes_its_streams(tiny: ServeProcess) -> None:
    """And so does the ingress in front of it."""
    tiny.wake_up()
    (old,) = in_flight(tiny)
    worker = worker_of(tiny, old)
    front = tiny.actor_pid("llm:Ingress")
    assert front is not None
    # Two end before a busy machine has read the new configuration, which takes it 20 s.
    with streaming(tiny, count=3 * STREAMS) as streams:
        # Not what test_redeploy.py deploys: the server is the same, and that would change nothing.
        deploy(tiny, changed(tiny.config, max_requests_per_batch=5))
        wait_until(lambda: old not in in_flight(tiny), what="it is told to stop", pause_s=0.2)
        told_s = time.monotonic()
        for pid in (old, worker):
            assert psutil.pid_exists(pid)
        check_finished(streams, told_s)
    wait_until_gone(old, worker, front)
    tiny.wait_until_ready()
    assert tiny.workers() == {tiny.wake_up()["worker_process_id"]}


# --- Ctrl-C ---


def test_interrupt_of_a_sleeper_leaves_nothing(servers: Servers, own: ServeProcess) -> None:
    own.sleep()
    assert own.is_sleeping()
    leaves_nothing(servers, own, "demo")


def test_interrupt_in_mid_stream_leaves_nothing(servers: Servers, tiny: ServeProcess) -> None:
    tiny.wake_up()
    request = tiny.http.build_request("POST", "/v1/completions", json=LONG | {"stream": True})
    response = tiny.http.send(request, stream=True)
    assert response.status_code == 200
    assert tiny.wake_up()["in_flight"] == 1
    leaves_nothing(servers, tiny, "tiny")


@pytest.mark.slow
def test_two_servers_of_a_machine_do_not_know_each_other(tiny: ServeProcess) -> None:
    expected = text_of(tiny)
    with serving(config_with("tiny_cpu.yaml")) as second:
        assert text_of(second) == expected
        assert text_of(tiny) == expected
        # Of one that both listened on, each would be given requests of the other.
        assert not second.listening().keys() & tiny.listening().keys()
    assert text_of(tiny) == expected


def leaves_nothing(servers: Servers, server: ServeProcess, model: str) -> None:
    there = server.processes()
    for pid in (server.actor_pid(f"llm:model:{model}"), *server.workers()):
        assert pid in {process.pid for process in there}
    assert len(server.workers()) == 1
    assert server.port in server.listening()
    servers.stop()  # checks processes, shared memory, sockets and the time
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_make_serve_runs_it_in_the_foreground() -> None:
    make = shutil.which("make")
    assert make, "make is not installed"
    # `make test` runs this, and a make inside make says more.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(
        [make, "--dry-run", "serve"],
        cwd=PROJECT,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    )
    command = plan.stdout.strip().splitlines()[-1]
    assert re.search(r"\bexec \S*sleepserve serve serve_config\.yaml$", command)
