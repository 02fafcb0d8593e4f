"""What a user who mistyped is told, and that every file we ship is right."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from safetensors.numpy import save_file
from typer.testing import CliRunner

from actors.card.config import CardConfig, budget_bytes
from actors.checkpoints.directory import longest_sequence
from actors.checkpoints.source import Hub
from serve_app.cli.main import app
from serve_app.config.cards import notes_on_cards
from serve_app.config.errors import ConfigError
from serve_app.config.files import (
    AppArgs,
    WeightsArgs,
    as_written,
    check_file,
    checkpoint_problem,
    load_model_config,
)
from serve_app.config.model import ModelConfig

PROJECT = Path(__file__).parents[4]
MODEL = "model_id: demo\nsource: {id: checkpoints/demo}\n"
SERVE = """\
http_options: {host: 127.0.0.1}
applications:
  - name: weights
    route_prefix: null
    import_path: serve_app.app:build_weights
    args: {models: &models [configs/demo.yaml]}
  - name: llm
    route_prefix: /
    import_path: serve_app.app:build_app
    args: {models: *models}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that is all right, and the working directory."""
    _write(tmp_path / "serve_config.yaml", SERVE)
    _write(tmp_path / "configs" / "demo.yaml", MODEL)
    _write(tmp_path / "checkpoints" / "demo" / "config.json", "{}")
    save_file({}, tmp_path / "checkpoints" / "demo" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _complaint(file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_file(file)
    return str(caught.value)


# --- what we ship ---


MANY = PROJECT / "configs" / "many.yaml"  # a serve_config.yaml
FILES = sorted(set(PROJECT.glob("configs/*.yaml")) - {MANY})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_shipped_model_config_loads(file: Path) -> None:
    config = load_model_config(file)
    assert config.source.hub is not Hub.PATH or Path(config.source.id).is_relative_to(PROJECT)


def test_shipped_serve_config_is_valid_as_it_is() -> None:
    (model,) = check_file(PROJECT / "serve_config.yaml").models
    assert model.model_id == "demo"
    assert checkpoint_problem(model) is None


def test_shipped_config_of_many_models_is_valid_as_it_is() -> None:
    models = check_file(MANY).models
    assert len({model.model_id for model in models}) == 8
    assert all(checkpoint_problem(model) is None for model in models)


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ("60 GB", "write a share of the card, as 0.9, or a size, as 60 GiB or 512 MiB"),
        ("0 GiB", "write a share"),
        (60, "a size has its unit: 60 GiB"),
        (0, "a share of the card is above 0"),
    ],
)
def test_budget_of_a_card_is_a_share_or_a_size(budget: object, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CardConfig.model_validate({"memory_budget": budget})


def test_budget_of_a_card_in_bytes() -> None:
    assert budget_bytes("1.5 GiB", 0) == 3 * 2**29
    assert budget_bytes("512MiB", 0) == 2**29
    assert budget_bytes(0.5, 100) == 50


def test_shipped_serve_config_listens_on_this_machine_only() -> None:
    assert "host: 127.0.0.1" in (PROJECT / "serve_config.yaml").read_text()


@pytest.mark.parametrize("model", [ModelConfig, WeightsArgs, AppArgs])
def test_every_field_has_a_description(model: type[BaseModel]) -> None:
    def bare(schema: object) -> list[object]:
        if isinstance(schema, list):
            return [found for item in schema for found in bare(item)]
        if not isinstance(schema, dict):
            return []
        here = [
            name
            for name, field in schema.get("properties", {}).items()
            if "description" not in field
        ]
        return here + [found for item in schema.values() for found in bare(item)]

    assert bare(model.model_json_schema()) == []


# --- where paths start ---


def test_checkpoint_path_starts_from_the_project_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    config = load_model_config(folder / "configs" / "demo.yaml")
    assert config.source.id == str(folder / "checkpoints" / "demo")


def test_file_outside_any_project_starts_from_its_own_folder(tmp_path: Path) -> None:
    _write(tmp_path / "demo.yaml", MODEL)
    assert load_model_config(tmp_path / "demo.yaml").source.id == str(
        tmp_path / "checkpoints" / "demo"
    )


def test_args_without_a_file_start_from_the_project_of_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "configs")
    args = AppArgs.model_validate({"models": ["configs/demo.yaml"]})
    assert args.models[0].source.id == str(folder / "checkpoints" / "demo")


def test_args_far_from_any_project_start_from_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = WeightsArgs.model_validate({"models": ["configs/demo.yaml"]})
    assert args.models[0].source.id == str(PROJECT / "configs" / "demo" / "model")


# --- the memory of a host ---


def _with_host(folder: Path, host: str) -> str:
    models = "args: {models: &models [configs/demo.yaml]"
    _write(folder / "serve_config.yaml", SERVE.replace(models, f"{models}, host: {host}"))
    return "serve_config.yaml"


def test_budget_and_folder_of_images_are_read(folder: Path) -> None:
    (folder / "images").mkdir()
    file = _with_host(folder, "{memory_budget_gib: 1.5, disk_dir: images}")
    config = check_file(file)
    host = config.host
    assert host.budget_bytes == 3 * 2**29
    assert host.disk_dir == str(folder / "images")
    weights = config.data["applications"][0]["args"]
    assert WeightsArgs.model_validate(weights).host == host
    assert check_file(folder / "configs" / "demo.yaml").host.budget_bytes is None


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("{memory_budget_gib: 0}", "host.memory_budget_gib: should be greater than 0, found 0"),
        ("{memory_budget_gib: much}", "host.memory_budget_gib: expected a number, found 'much'"),
        (
            "{memory_budget_gib: .inf}",
            "host.memory_budget_gib: should be a finite number, found inf",
        ),
        ("{memory_budget_gib: 1e30}", "host.memory_budget_gib: should be less than or equal to"),
        (
            "{memory_budget_gib: 1, disk_dir: ~nobody-here/x}",
            "host.disk_dir: ~nobody-here/x: no home directory is known of that name here; write the whole path",
        ),
        ("{memory_budget: 1}", "host.memory_budget: "),
        ("{disk_dir: images}", "disk_dir keeps images that memory_budget_gib has no room for"),
        ("{memory_budget_gib: 1, disk_dir: images}", "host.disk_dir: no directory "),
        ("{memory_budget_gib: 1, disk_dir: configs/demo.yaml}", "host.disk_dir: no directory "),
    ],
)
def test_what_is_wrong_with_the_memory_of_a_host_is_told(
    folder: Path, host: str, told: str
) -> None:
    complaint = _complaint(_with_host(folder, host))
    assert told in complaint
    assert complaint.startswith("serve_config.yaml")


def test_folder_of_images_that_cannot_be_written_to_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    complaint = _complaint(_with_host(folder, "{memory_budget_gib: 1, disk_dir: configs}"))
    assert f"host.disk_dir: {folder}/configs cannot be written to" in complaint


@pytest.mark.parametrize("written", ["models", "~/models"])
def test_folder_of_downloads_starts_from_the_project_or_from_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    source = f"source: {{hub: modelscope, id: a/b, models_dir: {written}}}\n"
    _write(folder / "configs" / "demo.yaml", f"model_id: demo\n{source}")
    monkeypatch.chdir("/")
    (model,) = check_file(folder / "configs" / "demo.yaml").models
    assert model.source.models_dir == str(folder / "models")


def test_hub_id_is_no_path(folder: Path) -> None:
    entry = {"model_id": "big", "source": {"hub": "modelscope", "id": "owner/name"}}
    args = AppArgs.model_validate({"models": [entry]})
    assert args.models[0].source.id == "owner/name"
    assert checkpoint_problem(args.models[0]) is None


def test_model_in_place_is_the_same_as_in_a_file(folder: Path) -> None:
    entry = {"model_id": "demo", "source": {"id": "checkpoints/demo"}}
    args = AppArgs.model_validate({"models": [entry]})
    assert args.models == (load_model_config("configs/demo.yaml"),)


# --- mistakes in a model's file ---


@pytest.mark.parametrize(
    ("window", "complaint"),
    [
        ('cron: "0 8 * *", duration: 1h', "cron: expected five fields: minute, hour, "),
        (
            'cron: "0 25 * * *", duration: 1h',
            "cron: no cron expression: Bad hour, found '0 25 * * *'",
        ),
        ("cron: 8, duration: 1h", "cron: expected text, found 8"),
        (
            'cron: "0 8 * * *", timezone: Berlin, duration: 1h',
            "timezone: no time zone of IANA's that is known here, found 'Berlin'; ",
        ),
        ('cron: "0 8 * * *", timezone: ../x, duration: 1h', "timezone: no time zone"),
        ('cron: "0 8 * * *", duration: soon', "duration: must be a duration"),
        ('cron: "0 8 * * *", duration: -1h', "duration: should be greater than 0, found -3600"),
        ('cron: "0 8 * * *", duration: 8d', "duration: must be a duration"),
        ('cron: "0 8 * * *", duration: 169h', "duration: should be less than or equal to 604800"),
        ('cron: "0 8 * * *"', "duration: required, but missing"),
    ],
)
def test_mistake_in_a_schedule(folder: Path, window: str, complaint: str) -> None:
    text = MODEL + "sleep: {schedule: {asleep: [{" + window + "}]}}"
    _write(folder / "configs" / "demo.yaml", text)
    expected = f"configs/demo.yaml: sleep.schedule.asleep.0.{complaint}"
    assert _complaint("configs/demo.yaml").startswith(expected)


def test_schedule_is_read_as_it_was_written(folder: Path) -> None:
    window = 'cron: "0 8 * * MON-FRI", timezone: Europe/Berlin, duration: 1h30m'
    _write(
        folder / "configs" / "demo.yaml", MODEL + "sleep: {schedule: {awake: [{" + window + "}]}}"
    )
    config = load_model_config(folder / "configs" / "demo.yaml")
    assert config.sleep.schedule.awake[0].duration == 5400
    assert ModelConfig.model_validate(as_written(config)) == config  # what Serve is handed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            MODEL + "sleep: {idle_timeout: 5}",
            "sleep.idle_timeout: unknown key; did you mean idle_timeout_s?",
        ),
        (
            MODEL + "source: {id: x}",
            "line 3: source is here twice",
        ),
        (
            MODEL + "sleep: {idle_timeout_s: 5m}",
            "sleep.idle_timeout_s: expected a number of seconds, found '5m'",
        ),
        (
            MODEL + "sleep: {idle_timeout_s: on}",
            "sleep.idle_timeout_s: expected a number of seconds, found True",
        ),
        (
            MODEL + "num_replicas: yes",
            "num_replicas: expected a number, found True",
        ),
        (
            MODEL + "sleep: {schedule: {awake: [{cron: 0 8 * * *, duration: off}]}}",
            "sleep.schedule.awake.0.duration: expected a number, found False",
        ),
        (
            MODEL + "sleep: {schedule: {awake: [{cron: 0 8 * * *, duration: 10:00}]}}",
            "line 3: 10:00 is a number in base sixty here; write a unit, as 10h, or quotes",
        ),
        (
            MODEL + "sleep: {idle_timeout_s: 1:30.5}",
            "line 3: 1:30.5 is a number in base sixty here; write a unit, as 10h, or quotes",
        ),
        (
            MODEL + "dtype: 2024-13-45",
            "dtype: expected 'auto', 'float32', 'bfloat16' or 'float16', found '2024-13-45'",
        ),
        (
            MODEL + "dtype: \x07",
            'no YAML: unacceptable character #x0007: special characters are not allowed in "<unicode string>", '
            "position 53",
        ),
        (
            MODEL + "sleep: {idle_timeout_s: -1}",
            "sleep.idle_timeout_s: should be greater than 0, found -1",
        ),
        (MODEL + "sleep: 5", "sleep: expected a mapping, found 5"),
        (MODEL + "sleep: {8: 5}", "sleep.8: Keys should be strings, found 8"),
        (
            MODEL + f"dtype: {'x' * 1000}",
            f"dtype: expected 'auto', 'float32', 'bfloat16' or 'float16', found '{'x' * 76}...",
        ),
        (MODEL + "num_cpus: .inf", "num_cpus: should be a finite number, found inf"),
        (
            MODEL + "num_cpus: 1e6",
            "num_cpus: should be less than or equal to 10000, found '1e6'",
        ),
        (
            MODEL + f"num_replicas: {10**30}",
            f"num_replicas: should be less than or equal to 2147483647, found {10**30}",
        ),
        (
            MODEL + f"autoscaling: {{max_replicas: {10**30}}}",
            f"autoscaling.max_replicas: should be less than or equal to 2147483647, found {10**30}",
        ),
        (MODEL + f"num_replicas: {'9' * 5000}", "line 3: a number of 5000 characters"),
        (MODEL + "num_replicas: !!int x", "no YAML: invalid literal for int() with base 10: 'x'"),
        (MODEL + "num_replicas: !!bool x", "no YAML: 'x'"),
        (MODEL + "aliases: [x, x]", "aliases: x is the name of this model already"),
        (MODEL + "aliases: [demo]", "aliases: demo is the name of this model already"),
        (
            MODEL + f"sleep: {'[' * 2000}{']' * 2000}",
            "too many lists or mappings inside of each other",
        ),
        (MODEL + "sleep: &a [*a]", "line 3: an alias is here inside of what it stands for"),
        (MODEL + "sleep: &a {level: *a}", "line 3: an alias is here inside of what it stands for"),
        (
            "a0: &a0 [x, x]\n"
            + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40)),
            "line 16: more than 100000 values from here on, its aliases written out",
        ),
        (
            "model_id: demo\nsource: {id: ~nobody-here/x}",
            "source.id: ~nobody-here/x: no home directory is known of that name here; write the whole path",
        ),
        (
            MODEL + "chat: {template: ~nobody-here/x.jinja}",
            "chat.template: ~nobody-here/x.jinja: no home directory is known of that name here; write the whole "
            "path",
        ),
        (
            "model_id: demo\nsource: {hub: modelscope, id: 'https://huggingface.co/Qwen/Qwen3-0.6B'}",
            "source.id: 'https://huggingface.co/Qwen/Qwen3-0.6B' is not a model id: give OWNER/NAME without the "
            "address: Qwen/Qwen3-0.6B",
        ),
        (
            "model_id: demo\nsource: {hub: modelscope, id: Qwen3}",
            "source.id: 'Qwen3' is not a model id: give OWNER/NAME, such as Qwen/Qwen3",
        ),
        (
            "model_id: demo\nsource: {hub: modelscope, id: ~nobody-here/x}",
            "source.id: '~nobody-here/x' is not a model id: give OWNER/NAME of letters, digits, '.', '_' and '-'",
        ),
        (
            MODEL + "sleep: {max_keep_alive_s: -1}",
            "sleep.max_keep_alive_s: should be greater than or equal to 0, found -1",
        ),
        (
            MODEL + "engine: {num_blocks: 1.5}",
            "engine.num_blocks: expected a whole number, found 1.5",
        ),
        (
            MODEL + f"engine: {{page_size: {2**62}}}",
            f"engine.page_size: should be less than or equal to 65536, found {2**62}",
        ),
        (
            MODEL + f"engine: {{num_blocks: {10**30}}}",
            f"engine.num_blocks: should be less than or equal to 2147483647, found {10**30}",
        ),
        (
            MODEL + f"engine: {{max_batch_tokens: {2**62}}}",
            f"engine.max_batch_tokens: should be less than or equal to 1048576, found {2**62}",
        ),
        (
            MODEL + f"engine: {{max_requests_per_batch: {2**62}}}",
            f"engine.max_requests_per_batch: should be less than or equal to 65536, found {2**62}",
        ),
        (
            MODEL + f"engine: {{cpu_threads: {2**40}}}",
            f"engine.cpu_threads: should be less than or equal to 1024, found {2**40}",
        ),
        (
            MODEL + f"sharing: {{priority: {10**30}}}",
            f"sharing.priority: should be less than or equal to 2147483647, found {10**30}",
        ),
        (
            MODEL + f"sleep: {{keep_layers: {10**30}}}",
            f"sleep.keep_layers: should be less than or equal to 65536, found {10**30}",
        ),
        (
            MODEL + "engine: {gpu_memory_utilization: 90}",
            "engine.gpu_memory_utilization: should be less than or equal to 1, found 90",
        ),
        (
            MODEL + "engine: {max_requests_per_batch: 64, max_batch_tokens: 32}",
            "engine: max_requests_per_batch is 64, but max_batch_tokens 32: a step computes a token of "
            "each sequence, so lower the one or raise the other",
        ),
        (
            MODEL + "engine: {xyz: 1}",
            "engine.xyz: unknown key; known here: cpu_threads, device, ",
        ),
        (
            MODEL + "dtype: bf16",
            "dtype: expected 'auto', 'float32', 'bfloat16' or 'float16', found 'bf16'",
        ),
        (
            "model_id: demo\nsource: {hub: hf, id: a/b}",
            "source.hub: expected 'path', 'modelscope' or 'huggingface', found 'hf'",
        ),
        ("model_id: demo\nsource: {}", "source.id: required, but missing"),
        ("model_id: demo", "source: required, but missing"),
        (
            MODEL + "autoscaling: {max_replica: 2}",
            "autoscaling.max_replica: unknown key; did you mean max_replicas?",
        ),
        (
            MODEL + "autoscaling: {min_replicas: 3, max_replicas: 2}",
            "autoscaling.max_replicas: 2, but min_replicas 3 and standby_replicas 0 need 3 or more",
        ),
        (
            MODEL + "autoscaling: {max_replicas: many}",
            "autoscaling.max_replicas: expected a whole number, found 'many'",
        ),
        (
            MODEL + "autoscaling: {max_replicas: 2, upscaling_factor: 2}",
            "autoscaling.upscaling_factor: a key of Ray Serve's own policy, which is not used; remove it",
        ),
        (
            MODEL + "max_ongoing_requests: 8\nautoscaling: {target_ongoing_requests: 9}",
            "autoscaling.target_ongoing_requests: 9, but max_ongoing_requests is 8: a replica never has "
            "so many, so none would be created while requests queue",
        ),
        (
            MODEL + "num_replicas: 1\nautoscaling: {max_replicas: 2}",
            "num_replicas: not together with autoscaling",
        ),
        (
            MODEL + "engine: {device: cuda}\nnum_gpus: 0",
            "num_gpus: 0, but engine.device is cuda; set num_gpus: 1",
        ),
        (
            MODEL + "sharing: {pin: true}\nsleep: {start_asleep: true}",
            "sleep.start_asleep: true, but sharing.pin keeps the model awake from its start on",
        ),
        (
            MODEL + "num_gpus: 2",
            "num_gpus: 2, but a replica computes on one GPU; set 1, and more replicas",
        ),
        (MODEL + "engine: [", "line 3: expected the node content, but found '<stream end>'"),
        ("- model_id", "expected a mapping, found ['model_id']"),
        (
            "model_id: demo\nsource: {id: checkpoints/tiny}",
            "source.id: no checkpoint in checkpoints/tiny; "
            "`sleepserve make-checkpoint checkpoints/tiny --shape tiny` makes it",
        ),
        (
            "model_id: demo\nsource: {id: models/big}",
            "source.id: no checkpoint in models/big; "
            "name a directory with config.json and *.safetensors, or a hub in source.hub",
        ),
    ],
)
def test_mistake_in_a_model_file(folder: Path, text: str, complaint: str) -> None:
    _write(folder / "configs" / "demo.yaml", text)
    if complaint.endswith(" "):  # a list of every known key
        assert _complaint("configs/demo.yaml").startswith(f"configs/demo.yaml: {complaint}")
    else:
        assert _complaint("configs/demo.yaml") == f"configs/demo.yaml: {complaint}"


@pytest.mark.parametrize("template", ["{{ messages }}", "{% generation %}x{% endgeneration %}"])
@pytest.mark.parametrize("is_file", [True, False])
def test_chat_template_in_place_or_from_a_file_of_the_project(
    folder: Path, template: str, is_file: bool
) -> None:
    _write(folder / "chats" / "mine.jinja", template)
    named = "chats/mine.jinja" if is_file else template
    _write(folder / "configs" / "demo.yaml", f"{MODEL}chat: {{template: {json.dumps(named)}}}\n")
    (model,) = check_file("serve_config.yaml").models
    assert model.chat.template == template


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("a\n{% if x %}", "no chat template: line 2: Unexpected end of template."),
        ("{{ messages }", "no chat template: line 1: unexpected '}'"),
        ("nowhere.jinja", "nowhere.jinja: No such file or directory"),
        ("wrong.jinja", "wrong.jinja: no chat template: line 2: unexpected '}'"),
    ],
)
def test_wrong_chat_template_is_told_in_one_line(
    folder: Path, template: str, complaint: str
) -> None:
    _write(folder / "wrong.jinja", "\n{{ messages }")
    text = f"{MODEL}chat: {{template: {json.dumps(template)}}}\n"
    _write(folder / "configs" / "demo.yaml", text)
    found = _complaint("serve_config.yaml").splitlines()[0]
    assert found.startswith(f"configs/demo.yaml: chat.template: {complaint}")


def test_name_is_taken_once(folder: Path) -> None:
    alias = {"model_id": "b", "source": {"id": "checkpoints/demo"}, "aliases": ["c", "a"]}
    with pytest.raises(ConfigError) as caught:
        AppArgs.model_validate({"models": [alias | {"model_id": "a", "aliases": []}, alias]})
    assert str(caught.value) == "models.1.aliases: a is the name of models.0 already (model b)"


def test_names_that_serve_could_not_tell_apart_are_refused(folder: Path) -> None:
    models = [{"model_id": name, "source": {"id": "x"}} for name in ("a/b", "a--b")]
    with pytest.raises(ConfigError) as caught:
        AppArgs.model_validate({"models": models})
    assert str(caught.value) == (
        "models.1.model_id: a--b and a/b are one name to Ray Serve, model:a--b"
    )


def test_image_that_the_replicas_could_not_use_is_refused(folder: Path) -> None:
    model = "[{model_id: demo, source: {id: checkpoints/demo}, dtype: float16}]"
    _write(folder / "serve_config.yaml", SERVE.replace("*models", model))
    assert _complaint("serve_config.yaml") == (
        "serve_config.yaml: applications.llm.args.models.0: another source or dtype than in the application "
        "before: its image would be of no use (model demo)"
    )


def test_default_target_is_no_higher_than_what_a_replica_takes(folder: Path) -> None:
    file = folder / "configs" / "demo.yaml"
    _write(file, MODEL + "max_ongoing_requests: 8\nautoscaling: {max_replicas: 2}")
    scaling = load_model_config(file).scaling
    assert scaling is not None
    assert scaling.target_ongoing_requests == 8
    assert scaling.max_replicas == 2


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ("", 64),  # the 32 that a CPU computes, and as many that wait
        ("num_gpus: 1", 256),
        ("num_gpus: 0.5\nengine: {max_requests_per_batch: 512}", 512),
        ("engine: {device: cuda, max_requests_per_batch: 8}", 64),
        ("engine: {device: cpu, max_requests_per_batch: 100}", 100),
        ("num_gpus: 1\nmax_ongoing_requests: 5", 5),
    ],
)
def test_a_replica_takes_what_its_engine_computes_at_once(
    folder: Path, keys: str, most: int
) -> None:
    file = folder / "configs" / "demo.yaml"
    _write(file, MODEL + keys)
    assert load_model_config(file).most_ongoing == most


def test_every_mistake_has_its_line(folder: Path) -> None:
    _write(folder / "configs" / "demo.yaml", MODEL + "num_cpu: 1\nsleep: {level: 3}")
    assert _complaint("configs/demo.yaml").splitlines() == [
        "configs/demo.yaml: sleep.level: expected 1 or 2, found 3",
        "configs/demo.yaml: num_cpu: unknown key; did you mean num_cpus?",
    ]


# --- mistakes in serve_config.yaml ---


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "configs/demo.yaml",
            "configs/dmo.yaml",
            "serve_config.yaml: applications.weights.args.models.0: "
            "no file configs/dmo.yaml in {folder}; did you mean configs/demo.yaml?",
        ),
        (
            "[configs/demo.yaml]",
            "[configs/demo.yaml, configs/demo.yaml]",
            "serve_config.yaml: applications.weights.args.models.1.model_id: "
            "demo is the name of models.0 already",
        ),
        (
            "[configs/demo.yaml]",
            "[]",
            "serve_config.yaml: applications.weights.args.models: names no model",
        ),
        (
            "[configs/demo.yaml]",
            "[{model_id: a, source: {id: checkpoints/demo}, sleep: {levl: 1}}]",
            "serve_config.yaml: applications.weights.args.models.0.sleep.levl: "
            "unknown key; did you mean level? (model a)",
        ),
        (
            "[configs/demo.yaml]",
            "[{model_id: a, source: {id: checkpoints/demo}, sleep: {schedule: {awake: "
            '[{cron: "61 8 * * *", duration: 1h}]}}}]',
            "serve_config.yaml: applications.weights.args.models.0.sleep.schedule.awake.0.cron: "
            "no cron expression: Bad minute, found '61 8 * * *' (model a)",
        ),
        (
            "[configs/demo.yaml]",
            "[{model_id: a, source: {id: nowhere}}]",
            "serve_config.yaml: applications.weights.args.models.0.source.id: "
            "no checkpoint in nowhere; "
            "name a directory with config.json and *.safetensors, or a hub in source.hub",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, htp: {}}",
            "serve_config.yaml: applications.llm.args.htp: unknown key; did you mean http?",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, http: {max_body_byte: 1}}",
            "serve_config.yaml: applications.llm.args.http.max_body_byte: "
            "unknown key; did you mean max_body_bytes?",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, http: {max_body_bytes: 8M}}",
            "serve_config.yaml: applications.llm.args.http.max_body_bytes: "
            "expected a whole number of bytes, found '8M'",
        ),
        (
            "args: {models: *models}",
            "args: {}",
            "serve_config.yaml: applications.llm.args.models: required, but missing",
        ),
        (
            "build_app",
            "bild_app",
            "serve_config.yaml: applications.llm.import_path: "
            "nothing to build at serve_app.app:bild_app; did you mean serve_app.app:build_app?",
        ),
        (
            "http_options: {host: 127.0.0.1}",
            "http_options: {host: 127.0.0.1}\ngrpc_options: {prt: 9000}",
            "serve_config.yaml: grpc_options.prt: unknown key; did you mean port?",
        ),
        (
            "    import_path: serve_app.app:build_app\n",
            "    import_path: serve_app.app:build_app\n"
            "    deployments: [{name: Ingress, num_replicass: 2}, {name: 'model:demo', max_ongoing_requests: 8}]\n",
            "serve_config.yaml: applications.llm.deployments.Ingress.num_replicass: unknown key; did you "
            "mean num_replicas?\n"
            "serve_config.yaml: applications.llm.deployments.model:demo.max_ongoing_requests: write it in the "
            "model's own file, where all that it decides is",
        ),
        (
            "http_options: {host: 127.0.0.1}",
            "http_options: {port: 8000}",
            "serve_config.yaml: http_options.host: "
            "missing, and Ray would listen on every interface; write host: 127.0.0.1",
        ),
        (
            "host: 127.0.0.1",
            "host: 127.0.0.1, 8000: x",
            "serve_config.yaml: http_options.8000: unknown key; known here: host, keep_alive_timeout_s, port, "
            "request_timeout_s, root_path, ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_keyfile_password",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models}\n    deployments: [x]",
            "serve_config.yaml: applications.1.deployments.0: expected a mapping, found 'x'",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, http: {request_timeout_s: .inf}}",
            "serve_config.yaml: applications.llm.args.http.request_timeout_s: should be a finite number, found inf",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, http: {max_body_bytes: 1" + "0" * 30 + "}}",
            "serve_config.yaml: applications.llm.args.http.max_body_bytes: should be less than or equal to "
            "1099511627776, found 1" + "0" * 30,
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, http: {api_keys_file: ~nobody-here/x}}",
            "serve_config.yaml: applications.llm.args.http.api_keys_file: ~nobody-here/x: no home directory is "
            "known of that name here; write the whole path",
        ),
        (
            "args: {models: *models}",
            "args: {models: *models, card: {memory_budget: " + "9" * 400 + " GiB}}",
            "serve_config.yaml: applications.llm.args.card.memory_budget: write a share of the card, as 0.9, or a "
            f"size, as 60 GiB; found '{'9' * 76}...",
        ),
        (
            "host: 127.0.0.1",
            "host: 127.0.0.1, prot: 8000",
            "serve_config.yaml: http_options.prot: unknown key; did you mean port?",
        ),
        (
            "host: 127.0.0.1",
            "host: 127.0.0.1, port: http",
            "serve_config.yaml: http_options.port: expected a whole number, found 'http'",
        ),
        (
            "host: 127.0.0.1",
            "host: 127.0.0.1, port: 99999",
            "serve_config.yaml: http_options.port: expected 1 to 65535, found 99999",
        ),
        (
            "host: 127.0.0.1",
            "host: 127.0.0.1, port: '0'",
            "serve_config.yaml: http_options.port: expected 1 to 65535, found 0",
        ),
        (
            "http_options: {host: 127.0.0.1}",
            "http_options: {host: 127.0.0.1}\ngrpc_options: {port: 99999}",
            "serve_config.yaml: grpc_options.port: expected 1 to 65535, found 99999",
        ),
        (
            "http_options",
            "http_option",
            "serve_config.yaml: http_option: unknown key; did you mean http_options?\n"
            "serve_config.yaml: http_options.host: "
            "missing, and Ray would listen on every interface; write host: 127.0.0.1",
        ),
        (
            "route_prefix: /",
            "route_prefx: /",
            "serve_config.yaml: applications.llm.route_prefx: "
            "unknown key; did you mean route_prefix?",
        ),
        ("applications:", "aplications:", "serve_config.yaml: applications: required, but missing"),
    ],
)
def test_mistake_in_serve_config(folder: Path, old: str, new: str, complaint: str) -> None:
    assert old in SERVE
    _write(folder / "serve_config.yaml", SERVE.replace(old, new, 1))
    assert _complaint("serve_config.yaml") == complaint.format(folder=folder)


def test_port_that_is_left_out_is_that_of_ray(folder: Path) -> None:
    assert check_file("serve_config.yaml").data["http_options"] == {
        "host": "127.0.0.1",
        "port": 8000,
    }


def test_port_that_is_written_as_text_is_a_number(folder: Path) -> None:
    text = SERVE.replace("host: 127.0.0.1", "host: 127.0.0.1, port: '8765'")
    _write(folder / "serve_config.yaml", text)
    assert check_file("serve_config.yaml").data["http_options"]["port"] == 8765


def test_mistake_in_a_named_file_is_told_once_with_that_file(folder: Path) -> None:
    _write(folder / "configs" / "demo.yaml", MODEL + "num_cpu: 1")
    assert _complaint("serve_config.yaml") == (
        "configs/demo.yaml: num_cpu: unknown key; did you mean num_cpus?"
    )


def test_somebody_elses_application_may_stand_beside_ours(folder: Path) -> None:
    theirs = "  - {name: theirs, route_prefix: /theirs, import_path: 'theirs:app'}\n"
    _write(folder / "serve_config.yaml", SERVE + theirs)
    assert [model.model_id for model in check_file("serve_config.yaml").models] == ["demo"]


# --- sleepserve check ---


def test_check_says_one_line_and_exits_0(folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", "serve_config.yaml"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "serve_config.yaml: ok, models: demo\n"


@pytest.mark.parametrize("hub", ["path", "modelscope"])
def test_check_refuses_quantised_weights_that_are_there(
    tmp_path: Path, tiny_checkpoint: Path, hub: str
) -> None:
    source = {"hub": hub, "id": "a/b" if hub != "path" else str(tmp_path / "a--b" / "default")}
    if hub != "path":
        source["models_dir"] = str(tmp_path)
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "a--b" / "default")
    file = tmp_path / "model.yaml"
    file.write_text(json.dumps({"model_id": "a", "source": source}))
    assert CliRunner().invoke(app, ["check", str(file)]).exit_code == 0
    (checkpoint / "quantize_config.json").write_text('{"bits": 4}')
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 2
    assert "source.id: the weights are quantised (gptq, by quantize_config.json)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_check_refuses_weights_that_are_cut_short(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """As a download that was broken off leaves them."""
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    file = tmp_path / "model.yaml"
    file.write_text(json.dumps({"model_id": "a", "source": {"id": str(checkpoint)}}))
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 2
    assert "source.id: model.safetensors is cut short or damaged" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "there is no model.safetensors"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}'},
            "1 of 1 shards are missing, 1.safetensors first",
        ),
        ({"model.safetensors.index.json": ""}, "model.safetensors.index.json is unreadable"),
    ],
)
def test_check_refuses_checkpoints_that_are_not_complete(
    folder: Path, files: dict[str, str], told: str
) -> None:
    (folder / "checkpoints" / "demo" / "model.safetensors").unlink()
    for name, text in files.items():
        _write(folder / "checkpoints" / "demo" / name, text)
    where = "configs/demo.yaml: source.id: no complete checkpoint in checkpoints/demo: "
    complaint = _complaint("configs/demo.yaml")
    assert complaint.startswith(where + told)
    assert complaint.endswith("; fetch it again")
    assert "\n" not in complaint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_check_names_a_file_that_may_not_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened = Path.open

    def refused(self: Path, *args: Any, **options: Any) -> Any:  # root may read everything
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    assert _complaint("configs/demo.yaml") == (
        f"configs/demo.yaml: source.id: {folder}/checkpoints/demo/{name} cannot be read: Permission denied"
    )


def test_check_refuses_sequences_that_the_checkpoint_has_no_positions_for(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    model = {"model_id": "a", "source": {"id": str(tiny_checkpoint)}}
    file = tmp_path / "model.yaml"
    for wanted, code in ((4096, 0), (4097, 2)):
        file.write_text(json.dumps(model | {"engine": {"max_model_len": wanted}}))
        result = CliRunner().invoke(app, ["check", str(file)])
        assert result.exit_code == code
    told = "engine.max_model_len: 4097, but the checkpoint's max_position_embeddings is 4096"
    assert told in result.stderr


def test_positions_of_a_model_of_several_parts_are_those_of_its_text(tmp_path: Path) -> None:
    for text, longest in (
        ('{"text_config": {"max_position_embeddings": 7}}', 7),
        ('{"max_position_embeddings": 9, "text_config": {}}', 9),
        ('{"max_position_embeddings": null}', None),
    ):
        (tmp_path / "config.json").write_text(text)
        assert longest_sequence(tmp_path) == longest


def test_check_of_missing_file_says_so_and_exits_2(folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", "serve.yaml"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "serve.yaml: no such file\n"


@pytest.mark.parametrize(
    ("device", "num_gpus", "decided"),
    [
        ("auto", 0, "cpu"),
        ("auto", 0.5, "auto"),
        ("auto", 1, "auto"),
        ("cuda", 1, "cuda"),
        ("cpu", 0, "cpu"),
    ],
)
def test_card_that_ray_has_not_reserved_is_not_taken(
    device: str, num_gpus: float, decided: str
) -> None:
    model = ModelConfig.model_validate(
        {
            "model_id": "m",
            "source": {"id": "/m"},
            "engine": {"device": device},
            "num_gpus": num_gpus,
        }
    )
    assert model.engine_of_replica.device == decided


@pytest.mark.parametrize(
    ("engine", "num_gpus", "has_driver", "told"),
    [
        ({}, 0, True, "m computes on the CPU although there is an NVIDIA GPU: num_gpus is 0"),
        ({"device": "cpu"}, 0, True, None),
        ({}, 1, True, None),
        ({}, 0, False, None),
    ],
)
def test_card_that_nobody_asked_for_is_told_in_one_line(
    engine: dict[str, str], num_gpus: float, has_driver: bool, told: str | None
) -> None:
    fields = {"model_id": "m", "source": {"id": "/m"}, "engine": engine, "num_gpus": num_gpus}
    line = ModelConfig.model_validate(fields).unused_card(has_driver)
    assert line is None if told is None else line is not None and line.startswith(told)


BUDGET = CardConfig(memory_budget=0.9)


def on_a_gpu(name: str, **settings: object) -> ModelConfig:
    fields = {"model_id": name, "source": {"id": "/m"}, "engine": {"device": "cuda"}} | settings
    return ModelConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("device", "num_gpus", "card", "expected"),
    [
        ("cuda", None, CardConfig(), 1),
        ("cuda", None, BUDGET, 0.01),
        ("cuda", 0.25, BUDGET, 0.25),
        ("cuda", 1, BUDGET, 1),
        ("cpu", None, BUDGET, 0),
        ("auto", None, BUDGET, 0),
        ("auto", 0.5, CardConfig(), 0.5),
    ],
)
def test_share_of_a_gpu_follows_the_budget_unless_it_is_given(
    device: str, num_gpus: float | None, card: CardConfig, expected: float
) -> None:
    given = {} if num_gpus is None else {"num_gpus": num_gpus}
    assert on_a_gpu("m", engine={"device": device}, **given).gpus(card) == expected


@pytest.mark.parametrize(
    ("shares", "card", "devices", "told"),
    [
        ([None, None], BUDGET, 1, []),
        ([1, None], BUDGET, 1, ["a has num_gpus: 1, so Ray places no other model on its card"]),
        ([1, 1], BUDGET, 1, ["a has num_gpus: 1", "b has num_gpus: 1"]),
        ([1], BUDGET, 1, []),  # nobody to share it with
        ([1, 1], CardConfig(), 1, []),
        ([0.7, 0.3], BUDGET, 1, []),
        ([None] * 5, BUDGET, 2, ["all 5 replicas come to one of 2 cards: Ray fills a card before"]),
        ([0.33] * 5, BUDGET, 2, []),
    ],
)
def test_what_keeps_models_from_sharing_their_card_is_told(
    shares: list[float | None], card: CardConfig, devices: int, told: list[str]
) -> None:
    models = [
        on_a_gpu(name, **({} if share is None else {"num_gpus": share}))
        for name, share in zip("abcde", shares, strict=False)
    ]
    notes = notes_on_cards(models, card, devices)
    assert len(notes) == len(told)
    assert all(note.startswith(begin) for note, begin in zip(notes, told, strict=True))
    if devices == 2 and told:
        assert notes[0].endswith("num_gpus: 0.33 has 3 on each")


def test_check_tells_of_a_model_that_keeps_its_card_to_itself(
    folder: Path, tiny_checkpoint: Path
) -> None:
    model = {"source": {"id": str(tiny_checkpoint)}, "engine": {"device": "cuda"}}
    models = [{"model_id": "a", "num_gpus": 1} | model, {"model_id": "b"} | model]
    llm = {"models": models, "card": {"memory_budget": 0.9}}
    config = {
        "http_options": {"host": "127.0.0.1"},
        "applications": [{"name": "llm", "import_path": "serve_app.app:build_app", "args": llm}],
    }
    Path("shared.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(app, ["check", "shared.yaml"])
    assert result.exit_code == 0, result.stderr
    first, *_ = result.stderr.splitlines()
    assert first.startswith("a has num_gpus: 1, so Ray places no other model on its card")
