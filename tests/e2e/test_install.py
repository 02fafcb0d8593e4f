"""The wheel, installed outside the checkout: `sleepserve serve` in an empty folder, and the other commands."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, ServeProcess

pytestmark = pytest.mark.slow

HELLO: Any = {
    "max_tokens": 16,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Hello"}],
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sleepserve` in an environment with the wheel and the packages that these tests run with."""
    folder = tmp_path_factory.mktemp("installed")
    # Without a network, too, where what builds it is there.
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    wheels = folder / "wheels"
    _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(wheels), str(PROJECT))
    (wheel,) = wheels.iterdir()

    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # As lines of a .pth, so that those of their own, as of a checkout installed with -e, do not count.
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(packages))
    return environment / "bin" / "sleepserve"


def _pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    subprocess.run(command, check=True)


class Installed(ServeProcess):
    """`sleepserve serve` without a MODEL."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._empty = folder
        super().__init__(
            self.output("serve", "--print-config"),
            PYTHONPATH="",
            RAY_SERVE_HAPROXY_BINARY_PATH=str(program.with_name("sleepserve-haproxy")),
        )

    def output(self, *args: str) -> str:
        """Of another command."""
        without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self._program), *args],
            cwd=self._empty,
            env=without,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def _command(self, config_file: Path) -> list[str]:
        return [str(self._program), "serve", "--port", str(self.port)]

    def _folder(self) -> Path:
        return self._empty

    def told(self, *args: str) -> dict[str, Any]:
        """The only replica, as a command shows it."""
        models = json.loads(self.output(*args, "--url", self.url, "--json"))["models"]
        replicas = models["demo"]
        found = replicas if isinstance(replicas, list) else list(replicas["replicas"].values())
        (replica,) = found
        return dict(replica)

    def chat(self) -> str:
        answer = self.post("/v1/chat/completions", model="demo", **HELLO)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture
def server(servers: Servers, program: Path, tmp_path: Path) -> Iterator[Installed]:
    servers.stop()
    server = Installed(program, tmp_path)
    try:
        yield server
    finally:
        server.interrupt()
        server.remove_files()


def test_wheel_serves_the_demo_from_an_empty_folder(server: Installed, tmp_path: Path) -> None:
    assert str(PROJECT) not in server.config
    server.wait_until_ready()
    assert str(PROJECT) not in server.log()

    text = server.chat()
    assert text
    assert server.told("status")["state"] == "awake"
    assert server.told("sleep", "demo")["state"] == "asleep"
    assert server.told("status")["state"] == "asleep"
    assert server.chat() == text
    assert server.told("sleep", "demo", "--level", "2")["state"] == "asleep"
    assert server.told("wake", "demo")["state"] == "awake"
    assert server.chat() == text
    many = str(PROJECT / "configs" / "many.yaml")
    assert "servegen_16_apps" in server.output("bench", "many", many, "--limit-s", "0")
    page = server.http.get("/", headers={"accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html")

    server.interrupt().check()
    assert list(tmp_path.iterdir()) == []
