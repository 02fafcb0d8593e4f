"""The README says what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.front.app import HttpSettings, build_asgi


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


def test_architecture_has_a_line_for_every_module(project: Path) -> None:
    text = (project / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text[text.index("## Modules") : text.index("## Rules")]
    modules = [*project.glob("actors/**/*.py"), *project.glob("serve_app/**/*.py")]
    missing = {
        str(path.relative_to(project))
        for path in modules
        if path.name != "__init__.py"
        and f"{path.name}`" not in table
        and f"{path.parent.relative_to(project)}/`" not in table
    }
    assert not missing


def test_measured_table_is_that_of_the_result(project: Path) -> None:
    command = [sys.executable, str(project / "docs" / "results" / "table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run docs/results/table.py"
