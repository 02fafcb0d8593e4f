"""Servers of their own: a wake that cannot work, and a model that has to be fetched first."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.weights.checkpoint import write_checkpoint
from tests.e2e.conftest import config_with
from tests.e2e.serve_process import ServeProcess, running, wait_until
from tests.fake_hub import FakeHub

ASK = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}


@contextmanager
def serving(config: str, **environment: str) -> Iterator[ServeProcess]:
    with running(config, **environment) as server:
        server.wait_until_ready()
        yield server


def text_of(server: ServeProcess, **changes: Any) -> str:
    response = server.post("/v1/completions", **(ASK | changes))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_failed_wake_fails_its_requests_and_serve_replaces_the_replica(
    servers: Any, tmp_path: Path
) -> None:
    servers.stop()
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "tiny", seed=1)
    with serving(config_with("tiny_cpu.yaml", source={"id": str(checkpoint)})) as server:
        before = text_of(server)
        asleep = server.sleep(level=2)
        write_checkpoint(checkpoint, "tiny", tied=True, force=True)  # another layout
        response = server.post("/v1/completions", **ASK)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "layout_mismatch"
        assert "changed while the model slept" in error["message"]

        def replaced() -> bool:
            response = server.post("/v1/completions", **ASK)
            return response.status_code == 200

        wait_until(replaced, 60, "a new replica answers", pause_s=0.2)
        assert text_of(server) != before  # it serves what is there now
        assert server.sleep()["replica_id"] != asleep["replica_id"]


def test_missing_model_is_fetched_when_the_server_starts(
    servers: Any, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    servers.stop()
    files = {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir() if path.is_file()}
    with FakeHub(files, model_id="Owner/Tiny") as hub:
        source = {"hub": "modelscope", "id": "Owner/Tiny", "models_dir": str(tmp_path)}
        config = config_with("tiny_cpu.yaml", source=source)
        with serving(config, MODELSCOPE_ENDPOINT=hub.endpoint) as server:
            assert text_of(server)
            assert (
                len(hub.content_requests("model.safetensors")) == 1
            )  # holder and replica share it
            assert server.sleep()["weights_from"] == "image"
    manifests = list(tmp_path.rglob(".sleepserve-manifest.json"))
    assert len(manifests) == 1
    assert json.loads(manifests[0].read_text())["id"] == "Owner/Tiny"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"sleep": {"idle_timeout": 3}},
            "sleep.idle_timeout: unknown key; did you mean",
            marks=pytest.mark.slow,
        ),
        ({"engine": {"max_model_len": 10**7}}, "engine.max_model_len is 10000000, but"),
    ],
)
def test_configuration_that_cannot_work_is_told_in_the_log(
    servers: Any, tiny_checkpoint: Path, change: dict[str, Any], message: str
) -> None:
    """`sleepserve check` tells before anything starts; this is for who did not ask it."""
    servers.stop()
    with running(config_with("tiny_cpu.yaml", **change)) as server:
        wait_until(lambda: message in server.log(), 60, message, pause_s=0.2)
