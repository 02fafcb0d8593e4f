"""New replicas: from memory instead of from disk, on this node and on another; and a queue that is full."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray._private.utils import get_num_cpus

from actors.holder.obtain import load_from_disk
from actors.image import packer
from tests.e2e.conftest import config_with
from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import PROJECT, ServeProcess, running, wait_until, wait_until_gone
from tests.e2e.test_faults import LONG, MODEL, REPLICA, question, solve
from tests.e2e.test_recovery import SAME, replicas_of, serving

pytestmark = pytest.mark.slow

# What each node's holder has done; the deployment's is called "".
COUNTS = """
import dataclasses, json
from ray import serve
from ray.util import list_named_actors

told = {"": serve.get_deployment_handle("WeightHolder", "weights").counts.remote().result(timeout_s=20)}
for actor in list_named_actors(all_namespaces=True):
    if actor["namespace"] == "sleepserve":
        told[actor["name"]] = ray.get(ray.get_actor(**actor).counts.remote(), timeout=20)
print(json.dumps({name: dataclasses.asdict(counts) for name, counts in told.items()}))
"""

# Every client of a Ray store may write to all of it; the views that Ray hands out only do not.
FLIP_A_BYTE = """
import ctypes
from pathlib import Path
from ray import serve
from actors.holder.held import ImageRequest
from actors.image import packer
from actors.checkpoints.source import ModelSource

checkpoint = Path(sys.argv[1])
key = packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))
request = ImageRequest("tiny", ModelSource(id=str(checkpoint)), "auto")
holder = serve.get_deployment_handle("WeightHolder", "weights")
grant = holder.acquire.remote(request, key, "somebody").result(timeout_s=20)
start = ray.get(grant.refs[1]).__array_interface__["data"][0] + grant.offsets[1]
ctypes.c_uint8.from_address(start).value ^= 0xFF
"""

# What Prometheus would read of this node.
METRICS = """
import urllib.request
(node,) = ray.nodes()
address = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
print(urllib.request.urlopen(address, timeout=20).read().decode())
"""

# As ray.cluster_utils does it; `ray start` joins no Ray that listens on loopback alone.
NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

gcs, cpus = sys.argv[1:]
free = dict.fromkeys(("node_manager_port", "min_worker_port", "max_worker_port"), 0)
Node(
    RayParams(
        gcs_address=gcs,
        num_cpus=int(cpus),
        num_gpus=0,
        node_ip_address="127.0.0.1",
        object_store_memory=100_000_000,
        dashboard_agent_listen_port=None,
        include_log_monitor=False,
        **free,
    ),
    head=False,
    shutdown_at_exit=True,
    spawn_reaper=False,
)
sys.stdin.read()
"""


def told_by(server: ServeProcess, script: str, *args: str) -> str:
    with server.driver(script, *args) as driver:
        try:
            text, _ = driver.communicate(timeout=60)
        finally:
            driver.kill()
    assert driver.returncode == 0, text
    return text


def counts(server: ServeProcess) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(told_by(server, COUNTS).splitlines()[-1])
    return found


def blank(file: Path) -> None:
    """Nothing but zeros, which its name, size and time do not show."""
    stat, zeros = file.stat(), file.with_suffix(".zeros")
    zeros.touch()
    os.truncate(zeros, stat.st_size)
    os.utime(zeros, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    zeros.replace(file)


def ways(server: ServeProcess) -> dict[str, float]:
    """How often a replica got its image in which way."""
    lines = [
        line
        for line in told_by(server, METRICS).splitlines()
        if line.startswith("ray_sleepserve_images_obtained")
    ]
    found: dict[str, float] = {}
    for line in lines:
        way = line.partition('way="')[2].partition('"')[0]
        found[way] = found.get(way, 0) + float(line.rpartition(" ")[2])
    return {way: times for way, times in found.items() if times}


def test_cold_start_from_zero_reads_no_disk(
    servers: Any, tmp_path: Path, tiny_checkpoint: Path, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    scaling = {"min_replicas": 0, "look_back_period_s": 1.5, "downscale_delay_s": 1}
    scaling |= {"downscale_to_zero_delay_s": 1}
    config = config_with("tiny_cpu.yaml", source={"id": str(checkpoint)}, autoscaling=scaling)
    with serving_from_zero(config) as server:
        assert solve(server, puzzles[0]) == puzzles[0].answer
        first = server.actor_pid(REPLICA)
        wait_until(lambda: server.actor_pid(REPLICA) is None, 60, "it goes", pause_s=0.2)
        wait_until(lambda: not server.workers(), 60, "its worker goes", pause_s=0.2)
        before = counts(server)[""]
        assert before["disk_loads"] == 1

        for file in checkpoint.glob("*.safetensors"):
            blank(file)
        key = packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))
        with pytest.raises(Exception, match=r"[Hh]eader"):  # who reads it now gets nowhere
            load_from_disk(checkpoint, key)

        assert [solve(server, puzzle) for puzzle in puzzles] == [p.answer for p in puzzles]
        second = server.actor_pid(REPLICA)
        assert second is not None
        assert second != first
        server.wait_for_log("from the object store", pid=second)
        assert counts(server)[""] == before
        wait_until(lambda: ways(server) == {"image": 2.0}, 60, "the metric", pause_s=2.0)


def test_image_that_was_corrupted_is_dropped_by_the_next_worker_which_has_a_good_one(
    servers: Any, tiny_checkpoint: Path, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    with serving(config_with("tiny_cpu.yaml", sleep={"idle_timeout_s": None})) as server:
        asleep = server.sleep()
        told_by(server, FLIP_A_BYTE, str(tiny_checkpoint))
        # It tells of the check that failed, or of the worker that has come meanwhile.
        assert server.http.post("/wake_up").status_code in (200, 500)

        def replaced() -> bool:
            answer = server.http.post("/wake_up")
            if answer.status_code != 200 or not (models := answer.json()["models"][MODEL]):
                return False
            return bool(models[0]["worker_process_id"] != asleep["worker_process_id"])

        wait_until(replaced, 90, "a new worker", pause_s=0.2)
        after = server.sleep()
        assert [after[name] for name in SAME] == [asleep[name] for name in SAME]
        assert after["weights_from"] == "image"
        assert [solve(server, puzzle) for puzzle in puzzles] == [p.answer for p in puzzles]
        found = counts(server)[""]
        assert (found["corrupted"], found["disk_loads"]) == (1, 2)


@contextmanager
def serving_from_zero(config: str) -> Iterator[ServeProcess]:
    """There is no replica that could be ready."""
    with running(config) as server:
        wait_until(lambda: state_of(server) == "unloaded", 120, "it runs", pause_s=0.2)
        yield server


def state_of(server: ServeProcess) -> str | None:
    try:
        return server.model_states().get(MODEL)
    except (httpx.TransportError, httpx.HTTPStatusError):
        return None


def test_full_queue_refuses_with_a_time_and_answers_whom_it_took(
    servers: Any, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    room, waiting, crowd = 2, 3, 12
    limits = {"max_ongoing_requests": room, "max_queued_requests": waiting}
    with (
        serving(config_with("tiny_cpu.yaml", **limits)) as server,
        ThreadPoolExecutor(crowd) as pool,
        ExitStack() as streams,
    ):

        def ask(number: int) -> tuple[Puzzle, httpx.Response]:
            puzzle = puzzles[number % len(puzzles)]
            return puzzle, server.post("/v1/completions", **question(puzzle))

        busy = []
        for _ in range(room):
            stream = server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True})
            busy.append(streams.enter_context(stream).iter_lines())
            assert "choices" in next(busy[-1])
        # It is full of requests, and still tells how it is.
        (replica,) = server.get("/replicas")["models"][MODEL]["replicas"]
        assert replica["in_flight"] == room
        answers = [future.result() for future in [pool.submit(ask, i) for i in range(crowd)]]
        taken = [(puzzle, answer) for puzzle, answer in answers if answer.status_code == 200]
        refused = [answer for _, answer in answers if answer.status_code != 200]

        assert len(taken) >= waiting
        for puzzle, answer in taken:
            assert answer.json()["choices"][0]["text"] == puzzle.answer
        assert len(refused) >= 1
        for answer in refused:
            assert answer.status_code == 429, answer.text
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "queue_full"
        for lines in busy:
            *_, last, done = filter(None, lines)
            assert "choices" in last
            assert done == "data: [DONE]"
        assert solve(server, puzzles[0]) == puzzles[0].answer


@contextmanager
def another_node(server: ServeProcess, cpus: int) -> Iterator[subprocess.Popen[bytes]]:
    """A second raylet on this machine, joined to the server's Ray, in a session of its own."""
    (raylet,) = server.named("raylet")
    option = "--gcs-address="
    gcs = next(a.removeprefix(option) for a in raylet.cmdline() if a.startswith(option))
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, gcs, str(cpus)],
        cwd=PROJECT,
        env=raylet.environ() | {"RAY_AUTH_MODE": "token"},
        stdin=subprocess.PIPE,  # it stays until this ends
        start_new_session=True,
    )
    try:
        yield node
    finally:
        kill_session(node)


def kill_session(leader: "subprocess.Popen[bytes]") -> None:
    """As when the machine loses power."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader.pid:
                os.kill(pid, signal.SIGKILL)
    with leader:
        leader.wait(10)


def test_other_node_copies_the_image_once_and_may_go(
    servers: Any, puzzles: tuple[Puzzle, ...]
) -> None:
    """Replicas that each take most of a node: the second has no place until there is another node."""
    servers.stop()
    cpus = int(get_num_cpus())  # of the first node, as Ray finds them
    config = config_with("tiny_cpu.yaml", num_replicas=2, num_cpus=0.75 * cpus)
    with serving(config) as server, another_node(server, cpus) as node:

        def replicas() -> dict[str, Any]:
            """By the state they are in now: id -> status."""
            answer = server.http.post("/wake_up", params={"model": MODEL})
            assert answer.status_code == 200, answer.text
            return {r["replica_id"]: r for r in answer.json()["models"][MODEL]}

        first = replicas()
        wait_until(lambda: len(replicas()) == 2, 120, "a replica there", pause_s=0.2)
        (there,) = (r for name, r in replicas().items() if name not in first)
        assert there["weights_from"] == "image"
        found = counts(server)
        (name,) = (name for name in found if name)
        size = there["weights_bytes"]
        assert (found[""]["disk_loads"], found[""]["lent_bytes"]) == (1, size)
        assert (found[name]["disk_loads"], found[name]["pulled_bytes"]) == (0, size)

        os.kill(there["process_id"], signal.SIGKILL)
        wait_until(lambda: len(replicas().keys() - {there["replica_id"]}) == 2, 120, "another")
        (later,) = (r for name, r in replicas().items() if name not in first)
        assert later["weights_from"] == "image"
        assert counts(server) == found  # neither disk nor wire
        wait_until_gone(there["worker_process_id"])

        # A worker, too, has its node's image, and the lease is its replica's.
        def restarted() -> bool:
            told = {r["replica_id"]: r for r in replicas_of(server)}
            return bool(told[later["replica_id"]]["worker_restarts"] == 1)

        os.kill(later["worker_process_id"], signal.SIGKILL)
        wait_until(restarted, 120, "another worker")
        assert counts(server) == found

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(solve, server, puzzle) for puzzle in puzzles * 4]
            kill_session(node)
            assert [each.result() for each in asked] == [p.answer for p in puzzles * 4]
        assert [solve(server, puzzle) for puzzle in puzzles] == [p.answer for p in puzzles]
