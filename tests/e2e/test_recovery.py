"""A server of their own: a wake that cannot work, an engine that dies, a model that has to be fetched first."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from tests.e2e.conftest import Servers, config_with
from tests.e2e.serve_process import ServeProcess, running, wait_until
from tests.fake_hub import FakeHub

# Servers of their own. Of workers that fail, test_workers.py is in `make test`.
pytestmark = pytest.mark.slow

CHANGED = "changed"  # its checkpoint is replaced while it sleeps
ASK = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
SAME = ("process_id", "replica_id")  # whatever becomes of a worker


@contextmanager
def serving(config: str, **environment: str) -> Iterator[ServeProcess]:
    with running(config, **environment) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.parametrize(
    ("change", "message", "answer"),
    [
        (  # no application could be built, so HAProxy has none to ask
            {"sleep": {"idle_timeout": 3}},
            "sleep.idle_timeout: unknown key; did you mean",
            (503, None),
        ),
        (  # the first replica was never ready, so neither is the server
            {"engine": {"max_model_len": 10**7}},
            "engine.max_model_len is 10000000, but",
            (503, "starting"),
        ),
    ],
)
def test_configuration_that_cannot_work_is_told_in_the_log(
    servers: Any,
    tiny_checkpoint: Path,
    change: dict[str, Any],
    message: str,
    answer: tuple[int, str | None],
) -> None:
    """`sleepserve check` tells before anything starts; this is for who did not ask it."""
    servers.stop()
    with running(config_with("tiny_cpu.yaml", **change)) as server:
        wait_until(lambda: message in server.log(), 60, message, pause_s=0.2)
        wait_until(lambda: readiness(server) == answer, 60, "readiness", pause_s=0.2)


def test_request_that_waits_for_a_model_that_cannot_start_is_told(
    servers: Servers, tiny_checkpoint: Path
) -> None:
    """Serve tries three times, and leaves those who wait in the queue."""
    servers.stop()
    with running(config_with("tiny_cpu.yaml", engine={"max_model_len": 10**7})) as server:
        wait_until(lambda: readiness(server) == (503, "starting"), 60, "an ingress", pause_s=0.2)
        began_s = time.monotonic()
        answer = server.post("/v1/completions", **ASK)
        assert time.monotonic() - began_s < 90
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith("tiny could not be started")


def readiness(server: ServeProcess) -> tuple[int, str | None]:
    """Of the server as a whole; without an ingress, the proxy answers in words of its own."""
    try:
        answer = server.http.get("/health")
    except httpx.TransportError:
        return 0, None
    is_ours = answer.headers.get("content-type") == "application/json"
    return answer.status_code, answer.json().get("status") if is_ours else None


# --- all others share one ---


@dataclass(frozen=True, slots=True)
class Site:
    """The server, and where its models come from.

    `tiny` has two replicas and was missing when the server started; the hub had it.
    """

    server: ServeProcess
    hub: FakeHub
    models_dir: Path
    checkpoint: Path  # of CHANGED


@pytest.fixture(scope="module")
def site(
    servers: Servers, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    servers.stop()
    models_dir = tmp_path_factory.mktemp("models")
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("changed") / "it", "tiny", seed=1)
    files = {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir() if path.is_file()}
    with FakeHub(files, model_id="Owner/Tiny") as hub:
        source = {"hub": "modelscope", "id": "Owner/Tiny", "models_dir": str(models_dir)}
        engine = {"max_model_len": 4096, "num_blocks": 600}
        config = yaml.safe_load(
            config_with("tiny_cpu.yaml", source=source, num_replicas=2, num_cpus=0.1, engine=engine)
        )
        for application in config["applications"]:
            (pair,) = application["args"]["models"]
            other = pair | {
                "model_id": CHANGED,
                "num_replicas": 1,
                "source": {"id": str(checkpoint)},
            }
            application["args"]["models"] = [pair, other]
        with serving(yaml.safe_dump(config), MODELSCOPE_ENDPOINT=hub.endpoint) as server:
            wait_until(lambda: len(replicas_of(server)) == 2, 60, "both replicas are there", 0.2)
            assert readiness(server) == (200, "healthy")
            yield Site(server, hub, models_dir, checkpoint)


def text_of(server: ServeProcess, **changes: Any) -> str:
    response = server.post("/v1/completions", **(ASK | changes))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_missing_model_is_fetched_when_the_server_starts(site: Site) -> None:
    assert text_of(site.server)
    # The holder and both replicas share it.
    assert len(site.hub.content_requests("model.safetensors")) == 1
    assert {replica["weights_from"] for replica in replicas_of(site.server)} == {"image"}
    (manifest,) = site.models_dir.rglob(".sleepserve-manifest.json")
    assert json.loads(manifest.read_text())["id"] == "Owner/Tiny"


def test_request_whose_wake_fails_is_answered_by_the_worker_that_comes_instead(site: Site) -> None:
    server = site.server
    before = text_of(server, model=CHANGED)
    asleep = server.sleep(level=2, model=CHANGED)
    write_checkpoint(site.checkpoint, "tiny", tied=True, force=True)  # another layout
    assert text_of(server, model=CHANGED) != before  # it serves what is there now
    assert "changed while the model slept" in server.log()
    after = server.sleep(model=CHANGED)
    assert [after[name] for name in SAME] == [asleep[name] for name in SAME]
    assert after["worker_process_id"] != asleep["worker_process_id"]


# Run in a process of its own, so that this one stays out of the server's cluster. It joins before the
# streams start: joining takes seconds on a busy machine, and they would be over.
BREAK_ENGINE = """
def worker_of(replica):
    model = replica._replica_impl._user_callable_wrapper._callable
    return model._supervisor._worker._actor

def break_engine(worker):
    def fail(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    worker._service._worker._engine._loop.runner.launch = fail

replicas = {
    name: ray.get_actor(name, namespace="serve")
    for name in (each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
    if name.startswith("SERVE_REPLICA::")
}
print("joined", flush=True)
replica_id = sys.stdin.readline().strip()
(replica,) = [replica for name, replica in replicas.items() if replica_id in name]
worker = ray.get(replica.__ray_call__.remote(worker_of))
ray.get(worker.__ray_call__.remote(break_engine))
"""


@contextmanager
def engine_breaker(server: ServeProcess) -> Iterator[Callable[[str], None]]:
    """Yield a function that breaks the engine of the replica it is told."""
    with server.driver(BREAK_ENGINE, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"

        def break_engine_of(replica_id: str) -> None:
            process.communicate(replica_id + "\n", timeout=30)
            assert process.returncode == 0

        try:
            yield break_engine_of
        finally:
            process.kill()


def test_engine_that_dies_under_streams_fails_these_and_nobody_else(site: Site) -> None:
    server = site.server
    right = text_of(server)
    body = ASK | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    with ExitStack() as streams:
        break_engine_of = streams.enter_context(engine_breaker(server))
        lines = []
        for _ in range(8):
            stream = server.http.stream("POST", "/v1/completions", json=body)
            response = streams.enter_context(stream)
            assert response.status_code == 200
            lines.append(response.iter_lines())
            assert next(lines[-1]).startswith("data: ")
        there = replicas_of(server)
        ids = {replica["replica_id"] for replica in there}
        doomed = max(there, key=lambda replica: replica["in_flight"])
        broken = doomed["in_flight"]  # half, or more if the router had not heard of the other
        assert broken >= 4
        break_engine_of(doomed["replica_id"])
        with ThreadPoolExecutor(8) as clients:
            later = [clients.submit(half_a_second_later, server) for _ in range(8)]
            endings = [
                [json.loads(line[6:]) for line in each if line[:7] == "data: {"][-1]
                for each in lines
            ]
            assert [each.result() for each in later] == [right] * 8
    failed = [ending["error"]["code"] for ending in endings if "error" in ending]
    assert failed == ["engine_dead"] * broken
    whole = [e for e in endings if e.get("choices", [{}])[0].get("finish_reason") == "length"]
    assert len(whole) == 8 - broken

    def back() -> dict[str, Any] | None:
        found = {r["replica_id"]: r for r in replicas_of(server)}
        assert found.keys() == ids, "Serve replaces nobody"
        replica: dict[str, Any] = found[doomed["replica_id"]]
        return replica if replica["worker_restarts"] > doomed["worker_restarts"] else None

    after = wait_until(back, 60, "the replica has another worker")
    assert after is not None
    assert after["process_id"] == doomed["process_id"]
    assert after["worker_process_id"] != doomed["worker_process_id"]
    assert after["worker_restarts"] == doomed["worker_restarts"] + 1  # by then maybe asleep
    assert {text_of(server) for _ in range(8)} == {right}


def half_a_second_later(server: ServeProcess) -> str:
    """An answer to a client that comes while the replica has no worker that serves."""
    time.sleep(0.5)  # what the goal speaks of
    return text_of(server)


def replicas_of(server: ServeProcess) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = server.get("/replicas")["models"]["tiny"]["replicas"]
    return replicas


def test_http_is_back_soon_after_its_proxy_was_killed(site: Site) -> None:
    """With HAProxy, which would go on with replicas that are gone beside the next one."""
    server = site.server
    right = text_of(server)
    (manager,) = server.titled("ray::HAProxyManager")
    before = {process.pid for process in server.named("haproxy")}
    assert before
    manager.kill()

    def again() -> bool:
        try:
            answer = server.post("/v1/completions", **ASK)
        except httpx.TransportError:
            return False
        # 503 as long as HAProxy knows of no application.
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == right

    wait_until(lambda: not before & {each.pid for each in server.named("haproxy")}, 10, "its end")
    wait_until(again, 20, "an answer", pause_s=0.2)
    assert server.titled("ray::HAProxyManager") != [manager]
