"""docs/quickstart.md as it is printed, but for the port: the hub is one on loopback, and its models are tiny."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, ServeProcess
from tests.fake_hub import FakeHub

pytestmark = pytest.mark.slow

_PAGE = (PROJECT / "docs" / "quickstart.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)
_PORT = "8000"
_LIMIT_S = 120


def blocks(section: str) -> list[tuple[str, str]]:
    """Language and text of each block; the first starts the server."""
    found = [part for part in _PAGE.split("\n## ") if part.startswith(f"{section}\n")]
    return _BLOCK.findall(found[0])


class Printed(ServeProcess):
    """What the first block of a section starts."""

    def __init__(self, text: str, folder: Path, environment: dict[str, str]) -> None:
        self._text = text
        self._own_folder = folder
        self._own_environment = environment
        super().__init__(f"port: {_PORT}", **environment)

    def _command(self, config_file: Path) -> list[str]:
        return ["/bin/bash", "-ec", f"{self._text.rstrip()} --port {self.port}"]

    def _folder(self) -> Path:
        return self._own_folder

    def type(self, language: str, text: str) -> str:
        """In another terminal."""
        text = text.replace(f":{_PORT}", f":{self.port}")  # which our commands have by default
        text = re.sub(r"(?m)^(sleepserve .*)$", rf"\1 --url {self.url}", text)
        program = ["/bin/bash", "-ec"] if language == "sh" else [sys.executable, "-c"]
        scripts = str(Path(sys.executable).parent)
        done = subprocess.run(
            [*program, text],
            cwd=self._own_folder,
            env={
                **os.environ,
                **self._own_environment,
                "PATH": f"{scripts}:{os.environ['PATH']}",
                "PYTHONPATH": str(PROJECT),
            },
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}\n{self.log_tail()}"
        return done.stdout


@pytest.fixture
def hub(tiny_checkpoint: Path) -> Iterator[FakeHub]:
    files = {
        str(file.relative_to(tiny_checkpoint)): file.read_bytes()
        for file in tiny_checkpoint.rglob("*")
        if file.is_file()
    }
    names = set(re.findall(r"Qwen/Qwen[\w.-]+", _PAGE))
    with FakeHub(files, model_id="Qwen/Qwen2.5-7B-Instruct", also=frozenset(names)) as hub:
        yield hub


@pytest.mark.parametrize("section", ["One model", "Several models on one card"])
def test_page_does_what_it_says(
    servers: Servers, hub: FakeHub, tmp_path: Path, section: str
) -> None:
    servers.stop()
    (_, start), *others = blocks(section)
    environment = {
        "MODELSCOPE_ENDPOINT": hub.endpoint,
        "SLEEPSERVE_HOME": str(tmp_path / "home"),
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1}),  # none is asked for what it computes with
    }
    server = Printed(start, tmp_path, environment)
    try:
        server.wait_until_ready()
        told = "".join(server.type(language, text) for language, text in others)
    finally:
        leftovers = server.interrupt()
        server.remove_files()
    leftovers.check()
    assert "asleep" in told
    assert hub.requests
