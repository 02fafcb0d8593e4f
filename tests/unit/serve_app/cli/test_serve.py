"""What `sleepserve serve` makes of its command line, and what it tells who mistyped. Nothing is started."""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from serve_app.cli.main import app
from serve_app.config.files import check_file
from serve_app.config.model import ModelConfig
from serve_app.process import haproxy
from serve_app.process.environment import (
    CHEAP_STREAMS,
    LOOPBACK,
    OWN_PRIORITY,
    PROXY_LOOKS,
    serve_environment,
)

KEY = "user-key-1234567890"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a checkpoint, a model's file, a serve_config.yaml of two models; no card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("actors.engine.model.cards.has_nvidia_driver", lambda: False)
    for variable in ("SLEEPSERVE_HOME", "SLEEPSERVE_API_KEYS", "SLEEPSERVE_ADMIN_KEYS"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    save_file({}, tmp_path / "mine" / "model.safetensors")
    (tmp_path / "m.yaml").write_text(
        "model_id: m\nsource: {id: mine}\nengine: {num_blocks: 7, max_model_len: 99}\n"
    )
    (tmp_path / "two.yaml").write_text(
        "http_options: {host: 127.0.0.1, port: 8001}\n"
        "applications:\n"
        "  - {name: w, route_prefix: null, import_path: 'serve_app.app:build_weights', args: {models: &models "
        "[m.yaml, {model_id: n, source: {hub: huggingface, id: a/n}}]}}\n"
        "  - {name: l, route_prefix: /, import_path: 'serve_app.app:build_app', args: "
        "{models: *models, http: {api_keys_file: keys}}}\n"
        "  - {name: theirs, route_prefix: /theirs, import_path: 'somebody:app', args: {models: 3}}\n"
    )
    (tmp_path / "same.yaml").write_text("model_id: m\nsource: {id: mine}\n")
    shutil.copytree(tmp_path / "mine", tmp_path / "My Model")
    (tmp_path / "x.yaml").write_text("model_id: x\nsource: {id: mine}\n")
    for name in ("also", "alias"):
        text = f"model_id: {name}\naliases: [x]\nsource: {{id: mine}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "one.yaml").write_text(
        "http_options: {host: 127.0.0.1}\n"
        "applications: [{name: l, route_prefix: /, import_path: 'serve_app.app:build_app', args: {models: "
        "[{model_id: y, source: {id: mine}}]}}]\n"
    )
    (tmp_path / "none.yaml").write_text("model_id: x\nsource: {id: absent}\n")
    (tmp_path / "wrong.yaml").write_text(
        "model_id: x\nsource: {id: mine}\nengine: {num_blocks: -1}\n"
    )
    (tmp_path / "in_place.yaml").write_text(
        "http_options: {host: 127.0.0.1}\n"
        "applications: [{name: l, route_prefix: /, import_path: 'serve_app.app:build_app', args: {models: "
        "[{model_id: x, source: {id: mine}, engine: {num_blocks: -1}}]}}]\n"
    )
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o600)
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args])


@pytest.fixture(autouse=True)
def _not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is not found must not turn the tests into a server."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it was started"))


def printed(*args: str) -> dict[str, Any]:
    result = run(*args, "--print-config")
    assert result.exit_code == 0, result.output
    config: dict[str, Any] = yaml.safe_load(result.stdout)
    return config


def models(*args: str) -> list[dict[str, Any]]:
    weights, llm = printed(*args)["applications"]
    found: list[dict[str, Any]] = llm["args"]["models"]
    assert weights["args"]["models"] == found
    return found


# --- kinds of models ---


def test_without_a_model_it_is_the_demo_as_in_serve_config(project: Path) -> None:
    told = printed()
    ours = yaml.safe_load((project / "serve_config.yaml").read_text())
    for application in (*told["applications"], *ours["applications"]):
        (model,) = application["args"].pop("models")
        if isinstance(model, dict):
            demo = model
    assert told == ours
    assert demo["source"] == {"id": str(project / "configs" / "demo" / "model")}
    assert demo["model_id"] == "demo"


@pytest.mark.parametrize("card", [False, True])
def test_hub_id_is_the_model_s_name(card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.engine.model.cards.has_nvidia_driver", lambda: card)
    assert models("Qwen/Qwen2.5-7B-Instruct") == [
        {
            "model_id": "Qwen/Qwen2.5-7B-Instruct",
            "source": {"hub": "modelscope", "id": "Qwen/Qwen2.5-7B-Instruct"},
            "num_gpus": int(card),
        }
    ]


def test_directory_gives_the_model_its_name(folder: Path) -> None:
    expected = {"model_id": "mine", "source": {"id": str(folder / "mine")}, "num_gpus": 0}
    assert models("mine") == models(str(folder / "mine")) == models("./mine/") == [expected]


def test_file_of_a_model_is_as_it_says(folder: Path) -> None:
    (model,) = models("m.yaml")
    assert model == {
        "model_id": "m",
        "source": {"id": str(folder / "mine")},
        "engine": {"num_blocks": 7, "max_model_len": 99},
    }


def test_several_are_served_together() -> None:
    assert [model["model_id"] for model in models("m.yaml", "a/b", "mine")] == ["m", "a/b", "mine"]


def test_serve_config_is_as_it_says_in_every_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = printed("../two.yaml", "--host", "0.0.0.0")
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8001}
    weights, llm, theirs = config["applications"]
    assert weights["args"]["models"] == llm["args"]["models"]
    mine, of_a_hub = (model["source"]["id"] for model in llm["args"]["models"])
    assert Path(mine).is_absolute()
    assert Path(mine).samefile(folder / "mine")
    assert of_a_hub == "a/n"
    assert Path(llm["args"]["http"]["api_keys_file"]).samefile(folder / "keys")
    assert theirs["args"] == {"models": 3}


def test_what_is_printed_can_be_served(folder: Path) -> None:
    result = run("a/b", "m.yaml", "--print-config")
    (folder / "printed.yaml").write_text(result.stdout)
    assert [model.model_id for model in check_file("printed.yaml").models] == ["a/b", "m"]
    assert run("printed.yaml", "--print-config").exit_code == 0


# --- options ---


@pytest.mark.parametrize("dash", ["-", "_"])
def test_options_go_before_files(dash: str) -> None:
    (model,) = models(
        "m.yaml",
        f"--max{dash}model{dash}len=64",
        f"--gpu{dash}memory{dash}utilization",
        "0.5",
        f"--served{dash}model{dash}name",
        "with_underscore",
        "--dtype",
        "float16",
    )
    assert model["model_id"] == "with_underscore"
    assert model["dtype"] == "float16"
    assert model["engine"] == {
        "num_blocks": 7,
        "max_model_len": 64,
        "gpu_memory_utilization": 0.5,
    }


def test_hub_and_revision() -> None:
    (model,) = models("a/b", "--hub", "huggingface", "--revision", "v1")
    assert model["source"] == {"hub": "huggingface", "id": "a/b", "revision": "v1"}


def test_host_and_port() -> None:
    config = printed("--host", "::1", "--port", "9")
    assert config["http_options"] == {"host": "::1", "port": 9}


def test_key_is_not_printed() -> None:
    assert KEY not in run("--api-key", KEY, "--print-config").stdout


def test_chat_template_and_other_names(folder: Path) -> None:
    (folder / "chat.jinja").write_text("{{ messages }}")
    names = ("--served-model-name", "gpt", "--served-model-name", "gpt-mini")
    (model,) = models("a/b", "--chat-template", "chat.jinja", *names)
    assert model["chat"] == {"template": "{{ messages }}"}
    assert (model["model_id"], model["aliases"]) == ("gpt", ["gpt-mini"])


# --- mistakes ---


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["nothing"], "nothing: no such file or directory, and no OWNER/NAME of a hub"),
        (["nothing.yaml"], "nothing.yaml: no such file"),
        (["."], ".: source.id: no checkpoint in .; name a directory with config.json"),
        (["keys"], "keys: expected a mapping"),
        (["a/b", "a/b"], "a/b: model_id: a/b is the name of a/b already"),
        (["a/b", "a--b/c", "a/b--c"], "a/b--c: model_id: a/b--c and a--b/c are one name to Ray"),
        (["also.yaml", "alias.yaml"], "alias.yaml: aliases: x is the name of also.yaml already"),
        (["x.yaml", "also.yaml"], "also.yaml: aliases: x is the name of x.yaml already"),
        (
            ["a/b", "--served-model-name", "x", "--served-model-name", "x"],
            "a/b: aliases: x is the name of a/b already",
        ),
        (
            ["one.yaml", "--served-model-name", "x", "--served-model-name", "x"],
            "one.yaml: aliases: x is the name of one.yaml already",
        ),
        (
            ["My Model"],
            "My Model: model_id: 'My Model', the directory's name, cannot be a model's; give one with "
            "--served-model-name",
        ),
        (
            ["mine", "m.yaml", "same.yaml"],
            "same.yaml: model_id: m is the name of m.yaml already",
        ),
        (
            ["two.yaml", "--gpu-memory-utilization", "2"],
            "two.yaml: engine.gpu_memory_utilization: ",
        ),
        (["none.yaml", "--max-model-len", "9"], "none.yaml: source.id: no checkpoint in "),
        (["wrong.yaml"], "wrong.yaml: engine.num_blocks: "),
        (["in_place.yaml"], "in_place.yaml: applications.l.args.models.0.engine.num_blocks: "),
        (["two.yaml", "a/b"], "two.yaml: names its own models; serve it alone"),
        (["a/b", "a/c", "--served-model-name", "x"], "--served-model-name: is for one model"),
        (["two.yaml", "--served-model-name", "x"], "--served-model-name: is for one model"),
        (["a/b", "--served-model-name", "?"], "a/b: model_id: "),
        (["m.yaml", "--revision", "v1"], "m.yaml: source.revision: m is a directory"),
        (["a/b", "--gpu-memory-utilization", "2"], "a/b: engine.gpu_memory_utilization: should"),
        (["a/b", "--chat-template", "no.jinja"], "a/b: chat.template: no.jinja: No such file"),
        (["a/b", "--chat-template", "{{ a }"], "a/b: chat.template: no chat template: line 1"),
        (["--api-key", "short"], "a key has 16 characters or more"),
    ],
)
def test_mistake_is_told_in_one_line(args: list[str], complaint: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_each_model_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    validated: list[str] = []

    def note(self: ModelConfig, context: object) -> None:
        validated.append(self.model_id)

    # Pydantic calls it at the end of each validation, if the class has it when it is made.
    class Noting(ModelConfig):
        model_post_init = note

    for module in ("files", "compose"):
        monkeypatch.setattr(f"serve_app.config.{module}.ModelConfig", Noting)
    models("m.yaml", "a/b", "mine")
    assert validated == ["m", "a/b", "mine"]


# --- what is started ---


class Started:
    """What this process would have become."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.config: Any = None
        self.tidied: list[Mapping[str, str]] = []

    def __call__(self, program: str, command: list[str], environment: dict[str, str]) -> None:
        self.command, self.environment = command, environment
        file = Path(command[-1])
        self.config = yaml.safe_load(file.read_text())
        os.close(int(file.name))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr("os.execve", started)
    monkeypatch.setattr("serve_app.cli.serve.remove_ended", started.tidied.append)
    monkeypatch.setattr("serve_app.cli.serve.listen_error", lambda host, port: None)
    return started


def test_serve_run_is_started_with_the_configuration_and_the_key(started: Started) -> None:
    result = run("a/b", "--api-key", KEY)
    assert result.exit_code == 0
    assert started.command[1:4] == ["-m", "ray.serve.scripts", "run"]
    assert started.config == printed("a/b")
    assert started.environment["SLEEPSERVE_API_KEYS"] == KEY
    assert started.tidied == [started.environment]
    assert (
        LOOPBACK | CHEAP_STREAMS | PROXY_LOOKS | OWN_PRIORITY
    ).items() <= started.environment.items()
    assert "Bearer $KEY" in result.stderr
    assert KEY not in result.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], False),
        (["--host", "localhost"], False),
        (["--host", "::1"], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "gpu-box"], True),
        (["--host", "0.0.0.0", "--api-key", KEY], False),
    ],
)
def test_open_server_is_told_of(args: list[str], told: bool, started: Started) -> None:
    assert ("every client that reaches" in run(*args).stderr) == told
    assert started.command


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr("os.execve", started)
    monkeypatch.setattr("serve_app.cli.serve.remove_ended", started.tidied.append)
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return started


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use_is_told_before_anything_starts(
    never_started: Started, taken: int, host: str
) -> None:
    result = run("a/b", "--host", host, "--port", str(taken))
    assert result.exit_code == 2
    assert result.stderr == (
        f"somebody listens on {host}:{taken} already, which is for HTTP; "
        "is a server running already? Else choose another --port\n"
    )
    assert not never_started.command
    assert run("a/b", "--port", str(taken), "--print-config").exit_code == 0


def test_address_of_another_machine_is_told_before_anything_starts(never_started: Started) -> None:
    result = run("a/b", "--host", "192.0.2.1")  # of no machine (RFC 5737)
    assert result.exit_code == 2
    assert "the host must be an address of this machine" in result.stderr
    assert not never_started.command


def test_port_of_a_ray_that_is_joined_may_be_its_own_serve_s(
    never_started: Started, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: "127.0.0.1:6379")
    assert run("a/b", "--port", str(taken)).exit_code == 0
    assert never_started.command


def test_variable_of_the_user_wins() -> None:
    own = {"RAY_SERVE_PROXY_USE_GRPC": "0", "RAY_worker_niceness": "5"}
    environment = serve_environment({**own, "PATH": "/bin"})
    assert own.items() <= environment.items()
    assert environment["PATH"].endswith(f"{os.pathsep}/bin")
    of_haproxy = haproxy.environment(environment["PATH"])
    ours = {*LOOPBACK, *CHEAP_STREAMS, *of_haproxy, *PROXY_LOOKS, *OWN_PRIORITY}
    assert environment.keys() == {*ours, "PATH"}
