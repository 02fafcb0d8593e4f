"""The commands of docs/deploy.md, typed in a shell in which docker, kubectl, systemctl and the like only say what they were asked.

What they would do is tried elsewhere: the steps of the Dockerfile and the RayService's configuration by the
end-to-end tests, the unit by tests/unit/configs.
"""

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from serve_app.config.keys import ADMIN_KEYS_VARIABLE, API_KEYS_VARIABLE, read_keys
from tests.documents import StandIns, block_with, values

_PROGRAMS = ("docker", "kubectl", "useradd", "systemctl", "python3", "pip")
_OF_ROOT = re.compile(r"(?<![\w/])/(?=(?:opt|etc)/)")


class Shell:
    """In a copy of what the commands name of a checkout, `/opt` and `/etc` in a folder of the test's."""

    def __init__(self, project: Path, folder: Path) -> None:
        self._page = (project / "docs" / "deploy.md").read_text(encoding="utf-8")
        self.root = folder / "root"
        self._checkout = folder / "checkout"
        self._checkout.mkdir()
        for name in ("configs", "serve_config.yaml", "Dockerfile"):
            (self._checkout / name).symlink_to(project / name)
        scripts = self.root / "opt/sleepserve/bin"
        for directory in (scripts, self.root / "etc/systemd/system"):
            directory.mkdir(parents=True)
        self._programs = StandIns(folder / "programs", _PROGRAMS)
        self._programs.add(scripts / "pip")

    def type(self, part: str) -> list[list[str]]:
        """The block that has it; what the programs were asked, in order."""
        text = _OF_ROOT.sub(f"{self.root}/", block_with(part, self._page))
        done = subprocess.run(
            ["/bin/bash", "-euc", text],
            cwd=self._checkout,
            env={**os.environ, "PATH": f"{self._programs.folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return self._programs.told()


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    return Shell(project, tmp_path)


def test_images_are_built_with_arguments_that_the_dockerfile_has(
    shell: Shell, project: Path
) -> None:
    builds = shell.type("docker build")
    declared = set(re.findall(r"^ARG (\w+)", (project / "Dockerfile").read_text(), re.MULTILINE))
    given = [value.partition("=")[0] for words in builds for value in values(words, "--build-arg")]
    assert given
    assert set(given) <= declared
    assert [values(words, "-t") for words in builds] == [["sleepserve:cpu"], ["sleepserve:cuda"]]
    assert all(words[:2] == ["docker", "build"] and words[-1] == "." for words in builds)


def test_container_gets_keys_that_the_server_takes(shell: Shell, project: Path) -> None:
    (words,) = shell.type("docker run -d")
    assert values(words, "-e") == [API_KEYS_VARIABLE, ADMIN_KEYS_VARIABLE]
    assert words[-2:] == ["sleepserve:cuda", "/models/DeepSeek-R1-Distill-Qwen-7B"]
    mounts = dict(value.split(":")[:2] for value in values(words, "-v"))
    dockerfile = (project / "Dockerfile").read_text()
    assert mounts["sleepserve"] in dockerfile  # the volume is where the image keeps things
    assert words[-1].startswith(mounts["/srv/models"])
    assert int(values(words, "--stop-timeout")[0]) == 60


def test_cluster_gets_files_that_are_there_and_the_secret_that_they_name(
    shell: Shell, project: Path
) -> None:
    secret, applied, asked = shell.type("kubectl create secret")
    files = values(applied, "-f")
    documents = [
        document
        for file in files
        for document in yaml.safe_load_all((project / file).read_text(encoding="utf-8"))
    ]
    kinds = {document["kind"] for document in documents}
    assert {"NetworkPolicy", "RayService"} <= kinds
    (service,) = (document for document in documents if document["kind"] == "RayService")
    assert asked[1:] == ["get", "rayservice", service["metadata"]["name"]]
    name = secret[secret.index("generic") + 1]
    manifest = json.dumps(service)
    assert f'"{name}"' in manifest
    for word in secret:
        if word.startswith("--from-literal="):
            key = word.removeprefix("--from-literal=").partition("=")[0]
            assert f"/{key}" in manifest, key  # the file that it becomes


def test_service_finds_its_program_its_configuration_and_keys(shell: Shell, project: Path) -> None:
    asked = shell.type("systemctl enable")
    assert asked[0][:2] == ["useradd", "--system"]
    assert asked[-2:] == [
        ["systemctl", "daemon-reload"],
        ["systemctl", "enable", "--now", "sleepserve"],
    ]
    unit = shell.root / "etc/systemd/system/sleepserve.service"
    text = unit.read_text(encoding="utf-8")
    assert text == (project / "configs/systemd/sleepserve.service").read_text(encoding="utf-8")
    for path in (
        "/opt/sleepserve/bin/",
        "/etc/sleepserve/environment",
        "/etc/sleepserve/serve_config.yaml",
    ):
        assert path in text
    assert f"User={asked[0][-1]}" in text
    environment = shell.root / "etc/sleepserve/environment"
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    keys = dict(line.split("=", 1) for line in environment.read_text().splitlines())
    assert read_keys(None, None, keys).keys
    assert (shell.root / "etc/sleepserve/serve_config.yaml").is_file()
