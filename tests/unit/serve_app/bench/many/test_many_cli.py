"""`sleepserve bench many`: what it refuses, and a server that does not come."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.bench.many import run
from serve_app.bench.serve_process import Leftovers
from serve_app.cli.main import app

PROJECT = Path(__file__).parents[5]
MANY = str(PROJECT / "configs" / "many.yaml")
DEMO = str(PROJECT / "configs" / "demo.yaml")


class NoServer:
    """Stands for a `serve run` that has ended at once."""

    configs: list[str] = []  # noqa: RUF012  # a new one for each test

    def __init__(self, config: str, port: int, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.configs.append(config)

    def alive(self) -> bool:
        return False

    def log_tail(self) -> str:
        return "the end of the log"

    def interrupt(self) -> Leftovers:
        return Leftovers((), (), (), 0.0)

    def remove_files(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoServer, "configs", [])
    monkeypatch.setattr(run, "_Served", NoServer)


def many(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "many", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((DEMO,), "no card.memory_budget there; name it with --memory-budget"),
        ((MANY, "--variants", "shared,best"), "--variants takes shared, static, one-at-a-time"),
        ((MANY, "--memory-budget", "many"), "write a share of the card"),
        ((MANY, "--trace", "nowhere.csv"), "nowhere.csv"),
        ((MANY, "--trace", MANY), "no column arrival_s"),
        ((MANY, "--duration", "0.1", "--time-scale", "1000"), "nothing arrives within"),
        (("nowhere.yaml",), "nowhere.yaml: no such file"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(arguments: tuple[str, ...], told: str) -> None:
    code, _, stderr = many(*arguments)
    assert code == 2
    assert told in stderr
    assert not NoServer.configs


def test_server_that_does_not_come_is_told_with_its_log(tmp_path: Path) -> None:
    file = tmp_path / "many.json"
    code, stdout, _ = many(MANY, "--variants", "lru", "--json", file)
    assert code == 1
    assert "shared FAILED  serve run has ended:\nthe end of the log" in stdout
    assert len(NoServer.configs) == 1
    result = json.loads(file.read_text())
    assert not result["complete"]
    assert result["skipped"] == {"lru": "shared failed, which tells what fits"}
    assert result["commit"]


def test_model_files_need_only_a_budget(tmp_path: Path) -> None:
    code, _, _ = many(DEMO, "--memory-budget", "60 MiB", "--variants", "shared")
    assert code == 1  # nothing serves
    assert "memory_budget: 60 MiB" in NoServer.configs[0]
    assert NoServer.configs[0].count("port: 8000") == 1


def test_no_variant_begins_once_the_time_is_up() -> None:
    code, stdout, _ = many(MANY, "--variants", "static", "--limit-s", "0")
    assert code == 0
    assert "shared  skipped, the time was up" in stdout
    assert not NoServer.configs
