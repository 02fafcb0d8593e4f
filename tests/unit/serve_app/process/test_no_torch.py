"""A process that reads tokenizers without torch."""

import subprocess
import sys
from pathlib import Path

READ = """
import sys
from serve_app.process.no_torch import leave_torch_out
leave_torch_out()
from actors.text.codec import TextCodec
codec = TextCodec.load(sys.argv[1])
print(codec.decode(codec.encode_prompt("Once upon a time")))
assert sys.modules["torch"] is None
"""
THERE = """
import torch
from serve_app.process.no_torch import leave_torch_out
leave_torch_out()
import torch.nn
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tokenizers_work_and_nothing_is_said(project: Path) -> None:
    done = run(READ, str(project / "configs" / "demo" / "model"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Once upon a time\n"


def test_torch_that_is_there_stays() -> None:
    assert run(THERE).returncode == 0
