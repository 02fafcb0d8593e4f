"""`/metrics` of a served model, and what Ray exports of it."""

import os
import signal
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Servers
from tests.e2e.serve_process import ServeProcess, wait_until
from tests.e2e.test_faults import stopped
from tests.e2e.test_scale_out import METRICS, told_by

pytestmark = pytest.mark.slow

Samples = list[tuple[str, dict[str, str], float]]

RAY_REPORTS_S = 60.0  # every 10 s, by way of the node's agent


@pytest.fixture(scope="module")
def server(servers: Servers) -> ServeProcess:
    """A new one, whose ingress has seen every replica that there ever was."""
    servers.stop()
    return servers.get("tiny")


def samples(text: str) -> Samples:
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(
        value for other, its, value in found if other == name and labels.items() <= its.items()
    )


def scrape(server: ServeProcess) -> Samples:
    started_s = time.monotonic()
    answer = server.http.get("/metrics")
    assert time.monotonic() - started_s < 2, "a second, and a slow machine's own"
    assert answer.status_code == 200, answer.text
    return samples(answer.text)


def ask(server: ServeProcess, tokens: int) -> None:
    answer = server.post(
        "/v1/completions", model="tiny", prompt="Hello", max_tokens=tokens, ignore_eos=True
    )
    assert answer.status_code == 200, answer.text


def gained(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


def test_what_was_done_is_counted_here_and_in_ray(server: ServeProcess) -> None:
    before = scrape(server)
    for tokens in (2, 3, 5):
        ask(server, tokens)
    server.sleep()
    asleep = scrape(server)
    assert total(asleep, "vllm:engine_sleep_state", sleep_state="weights_offloaded") == 1
    assert server.is_sleeping(), "a scrape wakes nobody"
    ask(server, 7)
    after = scrape(server)
    assert gained(before, after, "vllm:generation_tokens_total") == 17
    assert gained(before, after, "vllm:request_success_total", finished_reason="length") == 4
    assert gained(before, after, "vllm:time_to_first_token_seconds_count") == 4
    assert gained(before, after, "sleepserve_wakes_total", cause="request", result="ok") >= 1
    assert gained(before, after, "sleepserve_device_saved_byte_seconds_total") > 0
    assert total(after, "sleepserve_fastload_total") >= 1

    def in_ray() -> Samples | None:
        found = samples(told_by(server, METRICS))
        generated = total(found, "ray_vllm_generation_tokens_total", model_name="tiny")
        return found if generated == total(after, "vllm:generation_tokens_total") else None

    found = wait_until(in_ray, RAY_REPORTS_S, "Ray exports the same", pause_s=1)
    assert found is not None
    for name in (
        "ray_vllm_time_to_first_token_seconds_count",
        "ray_vllm_request_time_per_output_token_seconds_count",
        "ray_vllm_request_success_total",
        "ray_sleepserve_wakes_total",
    ):
        assert total(found, name, model_name="tiny") == total(
            after, name.removeprefix("ray_").replace("vllm_", "vllm:")
        ), name
    # What the panels of Ray's "Serve LLM" dashboard join on.
    workers = {its["WorkerId"] for name, its, _ in found if name == "ray_vllm_num_requests_running"}
    requests = "ray_serve_deployment_request_counter_total"
    assert workers <= {its["WorkerId"] for name, its, _ in found if name == requests}
    assert len(workers) == 1


def test_a_replica_that_is_stuck_holds_no_scrape_up(server: ServeProcess) -> None:
    before = scrape(server)
    (replica,) = server.get("/replicas")["models"]["tiny"]["replicas"]
    with stopped(replica["process_id"]):
        stuck = scrape(server)
    assert total(stuck, "sleepserve_silent_replicas") == 1
    assert total(stuck, "sleepserve_replicas") == 0
    for name in ("vllm:generation_tokens_total", "vllm:request_success_total"):
        assert total(stuck, name) == total(before, name) > 0


def test_a_worker_that_is_stuck_leaves_all_counts_to_be_read(server: ServeProcess) -> None:
    """They are the replica's."""
    before = scrape(server)
    (replica,) = server.get("/replicas")["models"]["tiny"]["replicas"]
    with stopped(replica["worker_process_id"]):
        stuck = scrape(server)
    assert total(stuck, "sleepserve_silent_replicas") == 0
    assert total(stuck, "sleepserve_replicas") == 1
    for name in ("vllm:generation_tokens_total", "vllm:request_success_total"):
        assert total(stuck, name) == total(before, name) > 0


@pytest.mark.parametrize("dies", ["worker_process_id", "process_id"])
def test_no_count_falls_when_a_process_dies(server: ServeProcess, dies: str) -> None:
    ask(server, 5)
    before = scrape(server)
    (replica,) = server.get("/replicas")["models"]["tiny"]["replicas"]
    os.kill(replica[dies], signal.SIGKILL)

    def replaced() -> bool:
        new = server.get("/replicas")["models"]["tiny"]["replicas"]
        return [each["state"] for each in new] == ["awake"] and all(
            each[dies] != replica[dies] for each in new
        )

    wait_until(replaced, what="another one in its place")
    ask(server, 4)
    after = scrape(server)
    assert gained(before, after, "vllm:generation_tokens_total") == 4
    falling = [
        name
        for name, labels, value in before
        if name.endswith(("_total", "_count", "_sum", "_bucket"))
        and total(after, name, **labels) < value
    ]
    assert falling == []
