"""How `sleepserve` begins."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from serve_app.bench.serve_process import listening_to_sigint

# Ctrl-C in the moment in which a module is looked for.
BEGIN = """
import os, signal, sys

class Interrupts:
    @staticmethod
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
sys.argv = ["sleepserve", "settings"]
{before}
from {entry} import main
main()
"""
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def begin(project: Path, module: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """As its script does."""
    scripts = tomllib.loads((project / "pyproject.toml").read_text())["project"]["scripts"]
    entry, _ = scripts["sleepserve"].split(":")
    code = BEGIN.format(module=module, before=before, entry=entry)
    command = listening_to_sigint([sys.executable, "-c", code])
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    ["typer", "serve_app.cli.main", "serve_app.cli.serve", "serve_app.config.table"],
)
def test_interrupted_import_ends_it_without_a_word(project: Path, module: str) -> None:
    done = begin(project, module)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_interrupt_that_is_ignored_stays_so(project: Path) -> None:
    done = begin(project, "serve_app.cli.serve", IGNORED)
    assert done.returncode == 0
    assert "`model_id`" in done.stdout
