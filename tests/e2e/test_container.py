"""The Dockerfile's steps for CPU, run in clean roots of Debian, and the server that starts from the last one.

Not docker: a chroot with processes and mounts of its own, as root. It needs debootstrap, and Debian's and Python's
package indexes; CONTAINER_BASE names a base that was made before.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.bench.serve_process import (
    OBJECT_STORE_BYTES,
    STOP_DEADLINE_S,
    listening_to_sigint,
)
from serve_app.process.ports import free_port
from tests.dockerfile import CleanRoot, Step, make_base, prepare_base, read_steps, stages
from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot is root's"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here"),
    pytest.mark.skipif(
        not (shutil.which("debootstrap") or os.environ.get("CONTAINER_BASE")),
        reason="no debootstrap here, and no CONTAINER_BASE",
    ),
]

KEY = "k" * 32
INDEX = "https://pypi.org/simple"  # PyTorch's own is not everywhere


@dataclass(slots=True)
class Container:
    """A server in the root that the Dockerfile made."""

    root: CleanRoot
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = self.root.command(
            *self.root.entrypoint,
            *("--host", "127.0.0.1", "--port", str(self.port)),
            SLEEPSERVE_API_KEYS=f"me:{KEY}",
            RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=str(OBJECT_STORE_BYTES),
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                listening_to_sigint(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """The first process inside takes all others with it; it does not go with ours, having changed its user."""
        assert self.process is not None
        if self.process.poll() is None:
            for process in self.inside()[:1]:
                process.kill()
            self.process.wait(10)

    def inside(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, url, timeout=60, **options)

    def is_healthy(self, health: Step) -> bool:
        """As docker asks."""
        words = health.text.split("CMD ")[1].replace(":8000/", f":{self.port}/")
        command = self.root.command(*json.loads(words))
        return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CleanRoot]:
    folder = tmp_path_factory.mktemp("roots")
    made = os.environ.get("CONTAINER_BASE")
    base = Path(made) if made else folder / "base"
    if made:
        prepare_base(base)
    else:
        make_base(base)
    roots = []
    for name in ("build", "image"):
        subprocess.run(["cp", "-a", str(base), str(folder / name)], check=True)
        roots.append(CleanRoot(folder / name, {"TORCH": "cpu", "TORCH_INDEX": INDEX}))
    first, last = stages(read_steps(PROJECT / "Dockerfile"))
    roots[0].build(first, PROJECT)
    roots[1].build(last, PROJECT, roots[0].folder)
    try:
        yield roots[1]
    finally:
        for name in ("build", "image", "base"):
            shutil.rmtree(folder / name, ignore_errors=True)


def test_image_serves_as_its_user_and_stops_by_its_signal(
    servers: Servers, image: CleanRoot, tmp_path: Path
) -> None:
    servers.stop()
    (health,) = (s for s in read_steps(PROJECT / "Dockerfile") if s.name == "HEALTHCHECK")
    container = Container(image, free_port(), tmp_path / "log")
    assert not container.is_healthy(health)
    subprocess.run(image.command("bash", "-lc", "command -v ray && command -v wget"), check=True)
    container.start()
    assert container.process is not None
    try:
        wait_until(lambda: is_up(container), 120, "it serves", pause_s=0.5)
        assert container.is_healthy(health)
        body = {"model": "demo", "prompt": "Once", "max_tokens": 8}
        assert container.ask("POST", "/v1/completions", json=body).status_code == 401
        header = {"Authorization": f"Bearer {KEY}"}
        answer = container.ask("POST", "/v1/completions", json=body, headers=header)
        assert answer.status_code == 200, answer.text
        there = container.inside()
        assert {process.uids().real for process in there} == {10001}
        (first,) = (process for process in there if process.name() == "tini")
        first.send_signal(signal.SIGINT)
        assert container.process.wait(STOP_DEADLINE_S) == 0, container.log.read_text()[-3000:]
    finally:
        container.kill()


def is_up(container: Container) -> bool:
    assert container.process is not None
    assert container.process.poll() is None, container.log.read_text()[-3000:]
    try:
        return container.ask("GET", "/health").status_code == 200
    except httpx.TransportError:
        return False
