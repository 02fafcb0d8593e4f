"""The documents say what the code says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from serve_app.process.environment import CHEAP_STREAMS
from serve_app.process.haproxy import SETTINGS

KB = 1000
DECISION = ("Question", "Choice", "Reason", "Cost", "Limits", "Measured", "Rejected", "Remaining")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def documents(project: Path) -> list[Path]:
    return [project / "README.md", project / "ARCHITECTURE.md", *project.glob("docs/**/*.md")]


@pytest.mark.parametrize(("name", "most"), [("README.md", 8 * KB), ("ARCHITECTURE.md", 15 * KB)])
def test_first_documents_stay_short(project: Path, name: str, most: int) -> None:
    size = (project / name).stat().st_size
    assert size <= most, f"{name} has {size} bytes; move something to docs/"


def test_links_lead_somewhere(project: Path) -> None:
    broken = []
    for file in documents(project):
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", read(file)):
            path, _, anchor = target.partition("#")
            to = file.parent / path if path else file
            if not to.exists() or (anchor and anchor not in anchors(to)):
                broken.append(f"{file.relative_to(project)}: {target}")
    assert not broken


def anchors(file: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", read(file), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


def test_settings_are_those_of_the_code(project: Path) -> None:
    result = CliRunner().invoke(app, ["settings"])
    assert result.exit_code == 0
    text = read(project / "docs" / "configuration.md")
    found = re.search(r"<!-- settings: .*? -->\n(.*?)<!-- /settings -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == result.stdout, "paste what `sleepserve settings` prints"


def test_variables_of_the_environment_are_those_of_the_code(project: Path) -> None:
    text = read(project / "docs" / "operations.md")
    exported = " ".join(re.findall(r"^export (.*?)(?: +#.*)?$", text, re.MULTILINE)).split()
    told = dict(each.split("=", 1) for each in exported)
    ours = {**CHEAP_STREAMS, **SETTINGS}
    assert {name: told.get(name) for name in ours} == ours


def test_every_route_is_described(project: Path) -> None:
    routes = {route.path for route in build_asgi({}, HttpSettings()).routes}  # type: ignore[attr-defined]
    text = read(project / "docs" / "api.md")
    endpoints = text[: text.index("\n## ")]
    missing = {
        path for path in routes - {"/"} if path.replace("{model_id:path}", "{id}") not in endpoints
    }
    assert not missing


def test_commands_are_those_of_the_code(project: Path) -> None:
    text = read(project / "docs" / "cli.md")
    told = set(re.findall(r"`sleepserve ((?:bench )?[a-z][a-z-]*)", text))
    assert told == set(commands())


def commands() -> Iterator[str]:
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in top.items():
        if name == "bench":
            yield from (f"bench {each}" for each in command.commands)
        else:
            yield name


def test_example_of_the_readme_is_a_valid_configuration(project: Path, tmp_path: Path) -> None:
    text = read(project / "README.md")
    found = re.search(
        r"cat > (configs/\S+) <<'EOF'\n(.*?)EOF\nsed -i 's#(.*?)#(.*?)#'", text, re.DOTALL
    )
    assert found is not None
    file, yaml, before, after = found.groups()
    served = read(project / "serve_config.yaml")
    assert served.count(before) == 1
    assert after == file
    (tmp_path / "configs").mkdir()
    (tmp_path / file).write_text(yaml, encoding="utf-8")
    (tmp_path / "serve_config.yaml").write_text(served.replace(before, after), encoding="utf-8")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "serve_config.yaml")])
    assert result.exit_code == 0, result.output
    model = re.search(r"^model_id: (\S+)", yaml, re.MULTILINE)
    assert model is not None
    assert f'"model": "{model[1]}"' in text[found.end() :]


def test_every_decision_is_in_the_index(project: Path) -> None:
    folder = project / "docs" / "decisions"
    index = re.findall(r"^- \[(\d+)\]\((\S+)\)\. (.*)$", read(folder / "README.md"), re.MULTILINE)
    told = {name: f"# {int(number)}. {title}" for number, name, title in index}
    files = {file.name: read(file) for file in folder.glob("[0-9]*.md")}
    assert told == {name: text.splitlines()[0] for name, text in files.items()}
    numbers = [name.partition("-")[0] for name in files]
    assert len(set(numbers)) == len(numbers), "two decisions have one number"
    for name, text in files.items():
        fields = re.findall(r"^\*\*(.*?)\.\*\* ", text, re.MULTILINE)
        assert fields[:1] == ["Question"], name
        assert set(fields) <= {*DECISION, "Look again"}, name


def test_tree_of_the_architecture_is_that_of_the_folders(project: Path) -> None:
    text = read(project / "ARCHITECTURE.md")
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


def test_measured_tables_are_those_of_the_results(project: Path) -> None:
    command = [sys.executable, str(project / "docs" / "results" / "table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run docs/results/table.py"
