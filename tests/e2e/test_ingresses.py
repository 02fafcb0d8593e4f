"""Several processes of the ingress behind one proxy: all of them tell the same."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import INGRESSES
from tests.e2e.serve_process import ServeProcess, wait_until

LOOKS = 30  # the proxy takes one of two at random; all three are hit


def tokens(server: ServeProcess) -> float:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return sum(each.value for each in samples if each.name == "vllm:generation_tokens_total")


def replicas(server: ServeProcess) -> set[int]:
    """The process ids of those that answer, of all models."""
    answer = server.http.get("/replicas")
    shown = answer.json()["models"].values() if answer.is_success else ()
    return {one["process_id"] for model in shown for one in model["replicas"]}


def ingresses(server: ServeProcess) -> set[int]:
    return {process.pid for process in server.titled("ray::ServeReplica:llm:Ingress")}


# Nothing asks an ingress, so none can learn by the way. Joined once: that takes seconds.
_UNTIL_ALL_RUN = f"""
import time
from ray import serve

def states():
    return serve.status().applications["llm"].deployments["Ingress"].replica_states

for asked in sys.stdin:
    while states() != {{"RUNNING": {INGRESSES}}}:
        time.sleep(0.05)
    print("all run", flush=True)
"""


@contextmanager
def all_run(server: ServeProcess) -> Iterator[Callable[[], None]]:
    """Yield a function that returns when Serve has all of the ingress."""
    with server.driver(_UNTIL_ALL_RUN, stdin=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None

        def wait() -> None:
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "all run\n"

        yield wait
        driver.stdin.close()
        assert driver.wait(60) == 0


def replace_one(server: ServeProcess, process_id: int, until_all_run: Callable[[], None]) -> None:
    """Kill one of the ingress, and return when another one can be asked in its place."""
    others = ingresses(server) - {process_id}
    os.kill(process_id, signal.SIGKILL)

    def another() -> bool:
        now = ingresses(server)
        return now > others and process_id not in now

    wait_until(another, what="another process of the ingress")
    until_all_run()


@pytest.mark.slow  # each of four processes is replaced, one after the other
def test_all_processes_tell_the_same_also_after_a_replica_and_all_of_them_have_died(
    crowded: ServeProcess,
) -> None:
    server = crowded
    (model,) = server.model_states()

    def generate(count: int) -> int:
        body = {"model": model, "prompt": "Once", "max_tokens": count, "ignore_eos": True}
        answer = server.post("/v1/completions", **body).json()
        return int(answer["usage"]["completion_tokens"])

    server.sleep()  # its worker has told all that it has counted before it says that it sleeps
    told = tokens(server) + generate(20)
    wait_until(lambda: tokens(server) == told, what="the first tokens are counted")
    assert {tokens(server) for _ in range(LOOKS)} == {told}

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(generate, 200)
        wait_until(lambda: server.get("/load")["server_load"] == 1, what="a request in flight")
        told += long.result()
    wait_until(lambda: tokens(server) == told, what="all tokens are counted")
    assert {server.get("/load")["server_load"] for _ in range(LOOKS)} == {0}

    (before,) = replicas(server)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: replicas(server) - {before}, what="a new replica")
    assert all(tokens(server) >= told for _ in range(LOOKS))
    told += generate(5)
    wait_until(lambda: tokens(server) == told, what="both replicas' tokens are counted")
    assert {tokens(server) for _ in range(LOOKS)} == {told}

    with all_run(server) as until_all_run:
        for process_id in ingresses(server):
            replace_one(server, process_id, until_all_run)
    assert {tokens(server) for _ in range(LOOKS)} == {told}
