"""`serve_app.asgi`: the front over a replica in its own process, without Ray."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from serve_app import asgi
from serve_app.asgi import make_app
from serve_app.config.compose import shipped
from serve_app.config.errors import ConfigError
from serve_app.config.files import load_model_config
from serve_app.config.model import ModelConfig
from serve_app.tracing.tracer import tracer_to
from tests.unit.asgi_client import client_of

KEY = "a-key-of-more-than-16-characters"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(project: Path, tiny_checkpoint: Path) -> ModelConfig:
    config = load_model_config(project / "configs" / "tiny_cpu.yaml")
    sleep = config.sleep.model_copy(update={"idle_timeout_s": None})
    return config.model_copy(update={"sleep": sleep})


@pytest.fixture(scope="module")
def client(tiny: ModelConfig) -> Iterator[TestClient]:
    """Of two models in one process."""
    threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()
    other = tiny.model_copy(update={"model_id": "other"})
    tracer = tracer_to(SimpleSpanProcessor(EXPORTER), {})
    with client_of(make_app([tiny, other], {}, tracer)) as client:
        yield client
    # A worker sets these for its process.
    torch.set_num_threads(threads)
    sys.setswitchinterval(switch_interval_s)


EXPORTER = InMemorySpanExporter()


def answer(client: TestClient, model: str = "tiny") -> str:
    response = client.post("/v1/chat/completions", json={**HI, "model": model})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def sleeping(client: TestClient) -> dict[str, bool]:
    models: dict[str, bool] = client.get("/is_sleeping").json()["models"]
    return models


def test_models_sleep_and_wake_by_the_usual_routes(client: TestClient) -> None:
    before = answer(client)
    assert client.post("/sleep?model=tiny").status_code == 200
    assert sleeping(client) == {"tiny": True, "other": False}
    assert answer(client, "other") == before
    assert answer(client) == before
    assert sleeping(client) == {"tiny": False, "other": False}
    assert client.post("/sleep?level=2").status_code == 200
    assert client.post("/wake_up").status_code == 200
    assert sleeping(client) == {"tiny": False, "other": False}
    assert answer(client) == before


def test_spans_lead_from_the_ingress_to_the_wake_and_the_worker(client: TestClient) -> None:
    assert client.post("/sleep?model=tiny").status_code == 200
    asked = {**HI, "model": "tiny"}
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    response = client.post("/v1/chat/completions", json=asked, headers={"traceparent": parent})
    assert response.status_code == 200
    http = "POST /v1/chat/completions"
    spans: dict[str, ReadableSpan] = {}
    limit_s = time.monotonic() + 60
    while not spans.keys() >= {"wake.copy", http}:  # which end a moment behind the answer
        assert time.monotonic() < limit_s, sorted(spans)
        time.sleep(0.01)
        spans = spans_of(int("ab" * 16, 16))
    above = {name: span.parent.span_id for name, span in spans.items() if span.parent is not None}
    ids = {name: span.context.span_id for name, span in spans.items()}
    assert above == {
        http: int("cd" * 8, 16),
        "replica": ids[http],
        "wake": ids["replica"],
        "wake.map": ids["wake"],
        "wake.copy": ids["wake"],
        "worker": ids["replica"],
    }
    assert spans["wake"].attributes["sleepserve.wake.cause"] == "request"
    assert spans["worker"].attributes["gen_ai.usage.output_tokens"] == 5
    assert [event.name for event in spans["worker"].events] == ["started", "first token"]
    assert spans[http].attributes["http.response.status_code"] == 200
    within(spans["replica"], spans[http])
    within(spans["wake"], spans["replica"])
    within(spans["worker"], spans["replica"])
    assert spans["wake"].end_time <= spans["worker"].events[-1].timestamp


def spans_of(trace_id: int) -> dict[str, ReadableSpan]:
    found = EXPORTER.get_finished_spans()
    return {span.name: span for span in found if span.context.trace_id == trace_id}


def within(inner: ReadableSpan, outer: ReadableSpan) -> None:
    """Give or take a millisecond: times of the past come from another clock."""
    assert outer.start_time - 10**6 <= inner.start_time
    assert inner.end_time <= outer.end_time + 10**6


def test_operators_find_what_they_know(client: TestClient) -> None:
    assert client.get("/health").json()["status"] == "healthy"
    (replica,) = client.get("/replicas?model=tiny").json()["models"]["tiny"]["replicas"]
    assert replica["process_id"] == replica["worker_process_id"] == os.getpid()
    assert 'vllm:num_requests_running{engine="in-process",model_name="tiny"}' in (
        client.get("/metrics").text
    )
    refused = client.post("/scaleout?model=tiny")
    assert refused.status_code == 400
    assert "2 is more than 1" in refused.text


def test_bad_request_is_refused_and_counted(client: TestClient) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5000}
    assert client.post("/v1/completions", json=body).status_code == 400
    counted = r'sleepserve_requests_refused_total{.*error="ContextLengthExceeded".*} 1.0'
    assert re.search(counted, client.get("/metrics").text)


@pytest.mark.parametrize(
    ("path", "body", "param", "limit"),
    [
        ("chat/completions", {**HI, "max_tokens": 5000}, "messages", "max_tokens is 5000"),
        (
            "chat/completions",
            {"messages": HI["messages"], "max_completion_tokens": 5000},
            "messages",
            "max_completion_tokens is 5000",
        ),
        ("responses", {"input": "hi", "max_output_tokens": 5000}, "input", "max_output_tokens is"),
        ("responses", {"input": "a " * 5000}, "input", "the answer needs one at least;"),
        ("completions", {"prompt": "x", "max_tokens": 5000}, "prompt", "max_tokens is 5000"),
    ],
)
def test_too_many_tokens_are_told_in_the_client_s_words(
    client: TestClient, path: str, body: dict[str, Any], param: str, limit: str
) -> None:
    response = client.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert re.match(rf"the prompt has \d+ tokens and {limit}", error["message"])


def test_held_model_refuses(client: TestClient) -> None:
    assert client.post("/sleep?model=tiny&hold=true").status_code == 200
    response = client.post("/v1/chat/completions", json={**HI, "model": "tiny"})
    assert response.status_code == 503
    assert client.post("/wake_up?model=tiny").status_code == 200
    assert answer(client)


def test_requests_beyond_what_the_configuration_allows_are_refused(tiny: ModelConfig) -> None:
    full = tiny.model_copy(update={"max_ongoing_requests": 0, "max_queued_requests": 0})
    # No model is loaded for it: the application is not started.
    response = client_of(make_app([full], {})).post(
        "/v1/chat/completions", json={**HI, "model": "tiny"}
    )
    assert response.status_code == 429
    assert "retry-after" in response.headers


def test_keys_of_the_environment_are_asked_for(tiny: ModelConfig) -> None:
    client = client_of(make_app([tiny], {"SLEEPSERVE_API_KEYS": KEY}))
    assert client.get("/v1/models").status_code == 401


def test_models_that_cannot_be_told_apart_are_refused(tiny: ModelConfig) -> None:
    other = tiny.model_copy(update={"model_id": "other", "aliases": ("tiny",)})
    with pytest.raises(ConfigError) as caught:
        make_app([tiny, other], {}, files=["a.yaml", "b.yaml"])
    assert str(caught.value) == "b.yaml: aliases: tiny is the name of a.yaml already"
    with pytest.raises(ConfigError) as caught:
        make_app([tiny, tiny], {})
    assert str(caught.value) == "models.1: model_id: tiny is the name of models.0 already"


@pytest.mark.parametrize(
    ("named", "files"),
    [
        ("a.yaml:b.yaml", ["a.yaml", "b.yaml"]),
        ("a.yaml:", ["a.yaml"]),
        (":a.yaml:: :b.yaml", ["a.yaml", "b.yaml"]),
        ("", [str(shipped("configs/demo.yaml"))]),
        (":", [str(shipped("configs/demo.yaml"))]),
    ],
)
def test_names_of_files_that_are_empty_name_none(named: str, files: list[str]) -> None:
    assert asgi._named(named) == files


@pytest.mark.slow
def test_same_file_twice_ends_the_start_in_a_line(project: Path, tiny_checkpoint: Path) -> None:
    name = "configs/tiny_cpu.yaml"
    done = subprocess.run(
        [sys.executable, "-c", "import serve_app.asgi"],
        cwd=project,
        env={**os.environ, "SLEEPSERVE_MODELS": f"{name}:{name}:"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"{name}: model_id: tiny is the name of {name} already" in done.stderr


def test_uvicorn_serves_it_and_ends_at_ctrl_c(project: Path, tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "uvicorn", "serve_app.asgi:app", "--port", "0"]
    environment = {**os.environ, "SLEEPSERVE_MODELS": "configs/tiny_cpu.yaml"}
    with subprocess.Popen(
        command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            told = (re.search(r"running on (http://\S+)", line) for line in lines)
            url = next(found[1] for found in told if found)
            with urllib.request.urlopen(f"{url}/health", timeout=20) as response:
                assert response.status == 200
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


# --- how long a model stays awake ---


def status_of(client: TestClient, model: str) -> dict[str, Any]:
    (replica,) = client.get("/status").json()["models"][model]["replicas"].values()
    return dict(replica)


def asleep_by_itself(client: TestClient, model: str) -> dict[str, Any]:
    """The status once it sleeps."""
    ends_s = time.monotonic() + 20
    while (status := status_of(client, model))["state"] != "asleep":
        assert time.monotonic() < ends_s, status
        time.sleep(0.01)
    return status


def test_keep_alive_of_a_request_is_its_model_s_idle_timeout(client: TestClient) -> None:
    told = {}
    for keep_alive in ("5m", -1, 0):
        response = client.post(
            "/v1/chat/completions", json={**HI, "model": "tiny", "keep_alive": keep_alive}
        )
        assert response.status_code == 200, response.text
        told[keep_alive] = status_of(client, "tiny")
    assert (told["5m"]["idle_timeout_s"], told["5m"]["idle_timeout_from"]) == (300, "keep_alive")
    assert (told[-1]["idle_timeout_s"], told[-1]["idle_timeout_from"]) == (None, "keep_alive")
    slept = asleep_by_itself(client, "tiny")
    assert slept["reason"].endswith(">= 0 s, by keep_alive")
    assert (slept["idle_timeout_s"], slept["idle_timeout_from"]) == (None, "idle_timeout_s")
    assert sleeping(client)["other"] is False  # whose timeout nobody changed


def test_schedule_decides_where_nobody_asks(tiny: ModelConfig) -> None:
    """Every minute a window of an hour: whenever this runs, it is in one."""
    always = [{"cron": "* * * * *", "duration": "1h"}]

    def scheduled(name: str, start_asleep: bool, **schedule: Any) -> ModelConfig:
        sleep = {
            "idle_check_interval_s": 0.05,
            "schedule": schedule,
            "start_asleep": start_asleep,
        }
        settings = tiny.model_dump() | {"model_id": name, "sleep": sleep}
        return ModelConfig.model_validate(settings)

    threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()
    models = [scheduled("day", True, awake=always), scheduled("night", False, asleep=always)]
    with client_of(make_app(models, {})) as client:
        ends_s = time.monotonic() + 20
        while (day := status_of(client, "day"))["state"] != "awake":
            assert time.monotonic() < ends_s, day
            time.sleep(0.01)
        assert day["reason"] == "schedule"
        assert day["schedule"]["wanted"] == "awake"
        assert status_of(client, "night")["wakes"] == 0  # not even at the start
        for _ in range(2):  # a request wakes it, and it sleeps behind it
            assert answer(client, "night") == answer(client, "day")
            assert asleep_by_itself(client, "night")["reason"].endswith("by schedule")
        assert status_of(client, "day")["sleeps"] == 0
    torch.set_num_threads(threads)
    sys.setswitchinterval(switch_interval_s)
