"""A result says of which code it is, also where that code is a copy without git and not installed."""

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import serve_app
from docs.results.report.page import as_markdown, sections_of
from docs.results.source import source_of
from serve_app.bench.eval.verdict import About, Plan, Report
from serve_app.bench.figures import environment
from serve_app.bench.provenance import COMMIT_VARIABLE, provenance
from serve_app.cli.main import app
from tests.simulation.systems import as_json
from tests.unit.docs.results import fake_results
from tests.unit.serve_app.bench.fake_openai import FakeOpenAI

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)


def git(tree: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.devnull}
    who |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    found = subprocess.run(
        ["git", "-C", str(tree), *arguments],
        env=os.environ | who,
        check=True,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tree = tmp_path / "checkout"
    tree.mkdir()
    git(tree, "init", "--quiet")
    (tree / "file.py").write_text("x = 1\n")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "first")
    return tree


def test_checkout_tells_commit_and_changes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv(COMMIT_VARIABLE, HASH)  # git knows better
    assert provenance(checkout) == {
        "sleepserve": serve_app.__version__,
        "commit": commit,
        "clean": True,
    }
    git(checkout, "tag", "v9")
    (checkout / "result.json").write_text("{}")  # untracked: of no effect on what is measured
    assert provenance(checkout)["commit"] == commit
    assert provenance(checkout)["clean"] is True
    (checkout / "file.py").write_text("x = 2\n")
    assert provenance(checkout)["clean"] is False
    assert provenance(checkout)["commit"] == commit


def test_copy_is_told_its_commit_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, HASH)
    assert (provenance(tmp_path)["commit"], provenance(tmp_path)["clean"]) == (HASH, True)
    monkeypatch.setenv(COMMIT_VARIABLE, f"{HASH[:10]}-dirty\n")
    assert (provenance(tmp_path)["commit"], provenance(tmp_path)["clean"]) == (HASH[:10], False)


def test_unknown_commit_is_told_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = provenance(tmp_path)
    assert found == {"sleepserve": serve_app.__version__, "commit": "unknown", "clean": None}
    assert COMMIT_VARIABLE in caplog.text
    assert "git describe --always" in caplog.text


def test_package_inside_another_checkout_is_not_of_that_commit(checkout: Path) -> None:
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert provenance(inside)["commit"] == "unknown"


def test_checkout_that_git_cannot_read_falls_back_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    monkeypatch.setenv(COMMIT_VARIABLE, HASH)
    assert provenance(tmp_path)["commit"] == HASH
    assert "git tells nothing of" in caplog.text


@pytest.mark.parametrize("given", ["main", "HEAD", HASH[:6], f"{HASH}-changed"])
def test_variable_that_holds_no_commit_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, given)
    with pytest.raises(ValueError, match=f"{COMMIT_VARIABLE} must be a commit's hash"):
        provenance(tmp_path)


def test_version_is_right_from_a_copy_that_is_not_installed(project: Path, tmp_path: Path) -> None:
    """As on a measuring machine: the packages beside each other, no metadata, no git."""
    for package in ("serve_app", "actors"):
        shutil.copytree(
            project / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "serve_app" / "__init__.py").write_text('__version__ = "9.8.7"\n')
    code = (
        "import json; from serve_app.bench.figures import environment as e; print(json.dumps(e()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), COMMIT_VARIABLE: HASH},
        check=True,
        capture_output=True,
        text=True,
    )
    told = json.loads(found.stdout)
    assert (told["sleepserve"], told["commit"], told["clean"]) == ("9.8.7", HASH, True)
    version = CliRunner().invoke(app, ["version"])
    assert version.output.strip() == serve_app.__version__


def test_results_of_simulation_and_eval_name_them_too() -> None:
    found = environment()
    assert found["sleepserve"] == serve_app.__version__
    assert {"commit", "clean", "command"} <= found.keys()
    assert as_json([], seed=0).keys() >= found.keys()
    report = Report(
        environment=found | {"clean": True}, about=About(model="m", where=""), plan=Plan(prompt="")
    )
    assert json.loads(report.model_dump_json())["environment"]["clean"] is True


@pytest.mark.parametrize("version", ["7.6", None])
def test_load_test_tells_both_ends_in_both_files(version: str | None, tmp_path: Path) -> None:
    json_file, database = tmp_path / "r.json", tmp_path / "r.db"
    told = ["--json", str(json_file), "--sqlite", str(database)]
    with FakeOpenAI(version=version) as server:
        arguments = ["bench", "http", "--url", server.url, "--quiet", "--requests", "2", *told]
        run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    result = json.loads(json_file.read_text())
    assert result["client"]["sleepserve"] == serve_app.__version__
    assert result["server_version"] == version
    with closing(sqlite3.connect(database)) as opened:
        rows = opened.execute(
            "SELECT sleepserve, commit_hash, clean, server_version FROM result"
        ).fetchall()
    client = result["client"]
    clean = None if client["clean"] is None else int(client["clean"])
    assert rows == [(serve_app.__version__, client["commit"], clean, version)] * 2


@pytest.mark.parametrize("kind", ["wake", "throughput", "load", "soak"])
def test_page_and_each_plot_name_the_commit(kind: str) -> None:
    result: dict[str, Any] = getattr(fake_results, kind)()
    assert source_of(result) == "sleepserve 0.1.0, commit 0123456789ab"
    from docs.results.report.plots import draw

    sections = sections_of([result], draw)
    assert "commit 0123456789ab" in as_markdown(sections)
    for plot in sections[0].plots:
        assert b"Source\x00sleepserve 0.1.0, commit 0123456789ab" in plot.png


def test_page_of_a_result_of_unknown_code_says_so() -> None:
    result = fake_results.wake() | {"sleepserve": "", "clean": False}
    assert source_of(result).endswith("commit 0123456789ab, with changes")
    del result["commit"], result["clean"]
    page = as_markdown(sections_of([result], lambda name, result: b""))
    assert "sleepserve unknown, commit unknown" in page
