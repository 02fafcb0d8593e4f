"""A server with keys, one kind from a file and one from the environment; nothing secret in its logs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app
from tests.e2e.conftest import Servers, config_with
from tests.e2e.serve_process import ServeProcess, running, wait_until

pytestmark = pytest.mark.slow

USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"
OTHER = "later-key-1234567890"
MARK = "zanzibar-prompt-marker"


@pytest.fixture(scope="module")
def admins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "admins"
    file.write_text(f"ops:{ADMIN}\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def server(servers: Servers, admins: Path) -> Iterator[ServeProcess]:
    servers.stop()
    config = yaml.safe_load(config_with("tiny_cpu.yaml", sleep={"idle_timeout_s": None}))
    (llm,) = (each for each in config["applications"] if each["name"] == "llm")
    llm["args"]["http"] = {"admin_keys_file": str(admins)}
    with running(yaml.safe_dump(config), SLEEPSERVE_API_KEYS=f"ann:{USER}") as server:
        server.http.headers["Authorization"] = f"Bearer {USER}"
        server.wait_until_ready()
        yield server


def test_openai_client_needs_the_key(server: ServeProcess) -> None:
    asked: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=USER) as client:
        assert client.completions.create(**asked).usage
        assert list(client.completions.create(**asked, stream=True))
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.completions.create(**asked)
    assert caught.value.code == "invalid_api_key"


def test_controls_need_the_admin_key(server: ServeProcess) -> None:
    assert server.post("/sleep").status_code == 403
    assert server.http.get("/status", headers={"Authorization": ""}).status_code == 401
    options = ["--url", server.url, "--api-key", ADMIN]
    slept = CliRunner().invoke(app, ["sleep", "tiny", *options])
    assert slept.exit_code == 0, slept.output
    assert "asleep" in slept.stdout
    assert "asleep" in CliRunner().invoke(app, ["status", *options]).stdout
    assert CliRunner().invoke(app, ["wake", "tiny", *options]).exit_code == 0
    assert server.model_states() == {"tiny": "loaded"}


def test_file_of_keys_changes_while_the_server_runs(server: ServeProcess, admins: Path) -> None:
    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return server.http.get("/is_sleeping", headers=headers).status_code

    before = admins.read_text()
    assert (status(ADMIN), status(OTHER)) == (200, 401)
    admins.write_text(f"later:{OTHER}\n")
    try:
        wait_until(lambda: status(OTHER) == 200, 10, "the new key counts", pause_s=0.2)
        assert status(ADMIN) == 401
    finally:
        admins.write_text(before)
    wait_until(lambda: status(ADMIN) == 200, 10, "the old key counts again", pause_s=0.2)


@pytest.mark.parametrize("command", [["eval"], ["bench", "http", "--sleep-every", "2"]])
def test_commands_of_ours_take_keys(server: ServeProcess, command: list[str]) -> None:
    keys = {"OPENAI_API_KEY": USER, "SLEEPSERVE_ADMIN_KEY": ADMIN}
    few = ["--max-tokens", "8"] + (["--requests", "4", "--quiet"] if "bench" in command else [])
    result = CliRunner().invoke(app, [*command, "--url", server.url, *few], env=keys)
    assert result.exit_code == 0, result.output


def test_no_prompt_and_no_key_in_any_log(server: ServeProcess) -> None:
    """Of requests that succeed, that are refused, and that are cut off."""
    body: dict[str, Any] = {"model": "tiny", "prompt": MARK, "max_tokens": 4}
    chat = [{"role": "user", "content": MARK}]
    for path, fields, status in (
        ("/v1/completions", body, 200),
        ("/v1/completions", body | {"echo": True, "logprobs": 1}, 200),
        ("/v1/completions", body | {"temperature": MARK}, 400),
        ("/v1/completions", body | {"prompt": MARK * 1000}, 400),
        ("/v1/completions", body | {"model": "none"}, 404),
        ("/v1/chat/completions", {"model": "tiny", "messages": chat, "max_tokens": 4}, 200),
        ("/v1/chat/completions", {"model": "tiny", "messages": MARK}, 400),
        ("/completions", {"prompt": MARK, "max_tokens": 4}, 200),
        ("/tokenize", {"model": "tiny", "prompt": MARK}, 200),
    ):
        answer = server.post(path, **fields)
        assert answer.status_code == status, (path, answer.text)
    with server.http.stream(
        "POST", "/v1/completions", json=body | {"max_tokens": 400, "stream": True}
    ):
        pass  # gone with the first bytes
    server.http.get("/health", headers={"x-request-id": "the-last-one"})
    wait_until(lambda: "the-last-one" in server.log(), what="the last request in the log")

    logs = server.logs()
    for part in (
        "/logs/serve/proxy_",
        "/logs/serve/replica_llm_Ingress_",
        "/logs/serve/replica_llm_model_",
    ):
        assert any(part in path for path in logs), f"no log {part} among {list(logs)}"
    assert any("/v1/completions" in text for text in logs.values()), "requests are logged"
    for path, text in logs.items():
        for secret in (MARK, USER, ADMIN, OTHER):
            assert secret not in text, f"{secret} in {path}"


def test_status_is_json_on_request(server: ServeProcess, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["status", "--url", server.url, "--json"], env={"SLEEPSERVE_ADMIN_KEY": ADMIN}
    )
    assert result.exit_code == 0, result.output
    assert '"tiny"' in result.stdout
