"""`generation_config: auto` and `none` of two models with one checkpoint, as clients meet them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import Servers, config_with
from tests.e2e.serve_process import ServeProcess, running

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {
    "prompt": "The quick brown fox",
    "max_tokens": 24,
    "seed": 11,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server(
    servers: Servers, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    servers.stop()
    checkpoint = tmp_path_factory.mktemp("defaults") / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"top_k": 1, "max_new_tokens": 5}))
    changes = {"source": {"id": str(checkpoint)}, "sleep": {"idle_timeout_s": None}}
    config = yaml.safe_load(config_with("tiny_cpu.yaml", **changes))
    for application in config["applications"]:
        (model,) = application["args"]["models"]
        application["args"]["models"] = [
            {**model, "model_id": choice, "generation_config": choice}
            for choice in ("auto", "none")
        ]
    with running(yaml.safe_dump(config)) as server:
        server.wait_until_ready()
        yield server


def text(server: ServeProcess, model: str, **fields: Any) -> str:
    response = server.post("/v1/completions", model=model, **ASK, **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return str(choice["text"])


def test_checkpoint_s_default_holds_unless_turned_off(server: ServeProcess) -> None:
    greedy = text(server, "none", temperature=0)
    sampled = text(server, "none", temperature=1, top_k=-1)
    assert sampled != greedy
    assert text(server, "auto") == greedy
    assert text(server, "none") == sampled
    assert text(server, "auto", top_k=-1) == sampled
    assert text(server, "auto", top_k=None) == greedy


def test_max_new_tokens_is_a_default_of_chats(server: ServeProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "model": "auto"}
    for fields, expected in (({}, 5), ({"max_tokens": 8}, 8)):
        response = server.post("/v1/chat/completions", **chat, **fields)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == expected


def test_log_tells_the_defaults(server: ServeProcess) -> None:
    told = {  # a log has two paths, one of them by session_latest
        line
        for path, log in server.logs().items()
        if "/serve/replica_llm_model_" in path
        for line in log.splitlines()
        if "sampling defaults" in line
    }
    (line,) = told  # one of the two models takes them
    assert "model:auto" in line
    assert line.endswith("generation_config.json: top_k 1, max_new_tokens 5")
