"""What the documents show is typed, against the demo model or a hub on loopback.

Each `sleepserve ...` once, wherever it is shown; and the blocks of a shell in README.md, docs/benchmarks.md and
docs/security.md as they are printed, but for the port. docs/quickstart.md is test_quickstart's, docs/deploy.md that of
tests/unit/docs/test_deploy_commands.py, `make` that of whoever runs these tests.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.bench.many.trace import SAMPLE
from tests.documents import block_with
from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, WITH_A_GPU, ServeProcess
from tests.fake_hub import FakeHub, files_in
from tests.unit.docs.test_commands import shown

pytestmark = pytest.mark.slow

_SCRIPTS = Path(sys.executable).parent
_LIMIT_S = 240
_HUB_ID = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
_ELSEWHERE = "docs/quickstart.md"
# Of a word that stands for something, and of what forms leave out.
_FILLED = {
    "MODEL": "demo",
    "NAME": "demo",
    "FILE": "serve_config.yaml",
    "FILE_OR_DIR": "tiny",
    "CHECKPOINT": "tiny",
    "DIR": "made",
    "VARIANT": "variant",
    "BASE": "tiny",
    "SHAPE": "tiny",
    "RECIPE": "ct-int8",
    "agents.csv": str(SAMPLE),  # which a block writes
}
# Behind a command, so that it ends, is short, and asks our server: `URL` is that.
_SHORT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("serve",): ("--print-config",),
    ("status",): ("--url", "URL"),
    ("sleep",): ("--url", "URL"),
    ("wake",): ("--url", "URL"),
    ("bench", "http"): ("--url", "URL", "--requests", "4", "--max-tokens", "4"),
    ("bench", "many"): (
        "--memory-budget",
        "60MiB",
        "--limit-s",
        "0",
    ),  # test_bench_many has servers
    ("bench", "wake"): ("--variants", "pipelined", "--cycles", "1", "--requests", "0"),
    ("bench", "load"): ("--replicas", "1"),
    ("bench", "soak"): ("--cycles", "2"),
    ("eval",): ("--cycles", "1", "--max-tokens", "8"),
}
# An argument without which it is not a whole command; inline text names commands without.
_NEEDED = {
    ("check",): "serve_config.yaml",
    ("bench", "many"): "configs/many.yaml",
    ("download",): _HUB_ID,
    ("eval",): "tiny",
    ("serve", "--host"): "0.0.0.0",
}
_MAY_BE_1 = "doctor"  # this machine may lack something; it says what


def commands() -> list[tuple[str, ...]]:
    """Each that is shown somewhere, filled in."""
    found = {each.words for each in shown() if each.page != _ELSEWHERE}
    return sorted({whole(words) for words in found})


def whole(words: tuple[str, ...]) -> tuple[str, ...]:
    if words[0] == "download":
        words = ("download", *(_HUB_ID if word == "MODEL" else word for word in words[1:]))
    elif words[:2] == ("serve", "MODEL"):
        words = ("serve", _HUB_ID, *words[2:])
    filled = tuple(_FILLED.get(word, word) for word in words)
    filled = tuple("URL" if word.startswith("http://") else word for word in filled)
    if words in _NEEDED:
        filled = (*filled, _NEEDED[words])
    for command, more in _SHORT.items():
        if filled[: len(command)] == command:
            given = set(filled)
            pairs = zip(more[::2], more[1::2], strict=True) if len(more) > 1 else [more]
            filled += tuple(word for pair in pairs if pair[0] not in given for word in pair)
    return filled


def test_what_is_shown_in_part_is_filled_in() -> None:
    assert whole(("status",)) == ("status", "--url", "URL")
    assert whole(("sleep", "MODEL", "--hold")) == ("sleep", "demo", "--hold", "--url", "URL")
    assert ("eval", "--url", "URL", "--model", "demo", "--cycles", "1", "--max-tokens", "8") in (
        commands()
    )
    assert len(commands()) > 20


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    """Has the demo model under the name of the README's."""
    folder = PROJECT / "configs" / "demo" / "model"
    with FakeHub(files_in(folder), model_id=_HUB_ID) as hub:
        yield hub


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """A folder to type in: what a new clone has, as far as commands name it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PROJECT / "configs", folder / "configs")
    shutil.copy(PROJECT / "serve_config.yaml", folder)
    (folder / "tiny").symlink_to(tiny_checkpoint)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(_SCRIPTS)
    programs = folder / "programs"
    programs.mkdir()
    make = programs / "make"  # which runs this test, sets up what is set up, and serves below
    make.write_text("#!/bin/sh\n")
    make.chmod(0o755)
    return folder


def typed(text: str, folder: Path, hub: FakeHub) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/bash", "-ec", text],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'programs'}:{_SCRIPTS}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "HOME": str(folder / "home"),
            "SLEEPSERVE_HOME": str(folder / "home"),
            **hub.environment,
        },
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_command_does_what_it_says(
    servers: Servers, checkout: Path, hub: FakeHub, words: tuple[str, ...]
) -> None:
    server = servers.get("own") if "URL" in words else None
    line = " ".join(server.url if server is not None and word == "URL" else word for word in words)
    shutil.rmtree(checkout / _FILLED["DIR"], ignore_errors=True)  # of another command
    # Not its only command, or bash would become it; and `--install-completion` asks who called.
    done = typed(f"sleepserve {line}\n:", checkout, hub)
    if server is not None:
        server.wake_up()  # also out of a sleep that is held
    assert done.returncode in ((0, 1) if words[0] == _MAY_BE_1 else (0,)), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert done.stdout or words[0] in ("check", "make-checkpoint", "--install-completion")


# --- whole blocks ---


def block(page: str, part: str) -> str:
    return block_with(part, (PROJECT / page).read_text(encoding="utf-8"))


def asks(server: ServeProcess, text: str, folder: Path, hub: FakeHub) -> str:
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace("curl ", "curl -fsS ")
    done = typed(text, folder, hub)
    assert done.returncode == 0, f"{text}\n{done.stderr}\n{server.log_tail()}"
    return done.stdout


def test_the_demo_answers_as_the_readme_asks(
    servers: Servers, checkout: Path, hub: FakeHub
) -> None:
    told = asks(servers.get("own"), block("README.md", '"model": "demo"'), checkout, hub)
    answer = json.loads(told)
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["choices"][0]["text"].strip()


def test_the_benchmark_that_is_shown_writes_what_it_says(
    servers: Servers, checkout: Path, hub: FakeHub
) -> None:
    asks(servers.get("own"), block("docs/benchmarks.md", "bench http"), checkout, hub)
    result = json.loads((checkout / "result.json").read_text(encoding="utf-8"))
    assert result["rounds"]
    assert (checkout / "result.db").stat().st_size


def test_keys_are_nobody_elses(checkout: Path, hub: FakeHub) -> None:
    done = typed(block("docs/security.md", "umask"), checkout, hub)
    assert done.returncode == 0, done.stderr
    for name in ("inference", "admin"):
        file = checkout / "home" / ".config" / "sleepserve" / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert re.fullmatch(r"\w+:[0-9a-f]{64}\n", file.read_text(encoding="utf-8"))


class InCheckout(ServeProcess):
    """What `make serve` runs, in another folder than the project."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        self._own_folder = folder
        super().__init__(
            (folder / "serve_config.yaml").read_text(encoding="utf-8"),
            **WITH_A_GPU,
            **hub.environment,
            SLEEPSERVE_HOME=str(folder / "home"),
            PYTHONPATH=str(PROJECT),
        )

    def _folder(self) -> Path:
        return self._own_folder


def test_a_real_model_is_served_as_the_readme_says(
    servers: Servers, checkout: Path, hub: FakeHub
) -> None:
    servers.stop()
    text = block("README.md", "deepseek-7b.yaml").replace(
        "sleepserve doctor serve_config.yaml", "sleepserve check serve_config.yaml"
    )  # which says that this machine has no card
    done = typed(text, checkout, hub)
    assert done.returncode == 0, done.stderr
    server = InCheckout(checkout, hub)
    try:
        server.wait_until_ready()
        told = asks(server, block("README.md", "Why is the sky blue?"), checkout, hub)
        assert server.is_sleeping()
    finally:
        leftovers = server.interrupt()
        server.remove_files()
    leftovers.check()
    assert '"role":"assistant"' in told.replace(" ", "")
