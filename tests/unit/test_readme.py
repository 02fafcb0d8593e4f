"""The README says what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi


@pytest.fixture(scope="module")
def readme(project: Path) -> str:
    return (project / "README.md").read_text(encoding="utf-8")


def test_settings_are_those_of_the_code(readme: str) -> None:
    result = CliRunner().invoke(app, ["settings"])
    assert result.exit_code == 0
    found = re.search(r"<!-- settings: .*? -->\n(.*?)<!-- /settings -->", readme, re.DOTALL)
    assert found is not None
    assert found[1] == result.stdout, "paste what `sleepserve settings` prints"


def test_every_route_is_described(readme: str) -> None:
    routes = {route.path for route in build_asgi({}, HttpSettings()).routes}  # type: ignore[attr-defined]
    endpoints = readme[readme.index("## Endpoints") : readme.index("## How sleep works")]
    missing = {
        path for path in routes - {"/"} if path.replace("{model_id:path}", "{id}") not in endpoints
    }
    assert not missing


def test_linked_files_exist(readme: str, project: Path) -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)\)", readme):
        assert (project / target).exists(), target


def test_tree_of_the_architecture_is_that_of_the_folders(project: Path) -> None:
    text = (project / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = text[text.index("## The house") :].split("```")[1].strip().splitlines()
    told, root = [], ""
    for line in lines:
        name = line.split()[0]
        root = root if line.startswith(" ") else name
        told.append(root + name if line.startswith(" ") else name)
    folders = {
        f"{path.parent.relative_to(project)}/"
        for top in ("serve_app", "actors")
        for path in project.glob(f"{top}/**/__init__.py")
    }
    files = {
        str(path.relative_to(project))
        for top in ("serve_app", "actors")
        for path in project.glob(f"{top}/*.py")
        if path.name != "__init__.py"
    }
    assert sorted(told) == sorted(folders | files)


def test_measured_table_is_that_of_the_result(project: Path) -> None:
    command = [sys.executable, str(project / "docs" / "results" / "table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run docs/results/table.py"
