"""Processes without a GPU import no torch, and ruff keeps it that source."""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from actors.errors import EngineDied
from actors.holder.sources import ImageSource
from actors.observer import SleepCause, WakeCause, WakePhase, WakeResult
from actors.protocol import HeldImage, MemoryChange, Refusal, ReplicaState, TokenEvent
from serve_app.metrics.instruments import Instruments
from serve_app.metrics.tally import Tally
from tests.fakes import FakeModel

HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    "module",
    [
        "serve_app.config.files",
        "serve_app.front.app",
        "serve_app.cli.main",
        "serve_app.app",
        "serve_app.asgi",
        "serve_app.llm",
        "serve_app.scaling.serve_policy",
        "serve_app.scaling.decide",
        "serve_app.routing.router",
        "actors.protocol",
        "actors.replica.lifecycle",
    ],
)
def test_importing_module_loads_no_torch(module: str, project: Path) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def counted() -> object:
    instruments = Instruments(Tally(), lambda: 0.0)
    for source in ImageSource:
        instruments.obtained(source)
    instruments.woke(WakeCause.START, WakeResult.OK, 1.0)
    instruments.slept(SleepCause.IDLE, 1, 1.0, MemoryChange(0, 0, 0, released_bytes=5))
    instruments.wake_phase(WakePhase.MAP, 1.0)
    return instruments.snapshot("r", ReplicaState.AWAKE, {})


@pytest.mark.parametrize(
    "message",
    [
        counted(),
        asyncio.run(FakeModel("m").status()),
        TokenEvent(0, "text", (1,), 3),
        Refusal(EngineDied("hung"), "r"),
        HeldImage("m@1", 5, 3, 0.5, 1, False, "disk"),
    ],
    ids=["metrics", "status", "event", "refusal", "image"],
)
def test_reading_what_other_processes_send_loads_no_torch(message: object, project: Path) -> None:
    """An ingress that imported it with the first scrape or status page routed nothing for seconds."""
    pickled = pickle.dumps(message)
    code = f"import pickle, sys; pickle.loads({pickled!r}); print([n for n in {HEAVY} if n in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("file", "code", "rule"),
    [
        ("actors/replica/lifecycle.py", "import serve_app.config.files", "TID251"),
        ("actors/holder/holder.py", "from ray import serve", "TID251"),
        ("actors/engine/engine.py", "import ray.serve", "TID251"),
        ("actors/protocol.py", "from starlette.requests import Request", "TID251"),
        ("actors/protocol.py", "import fastapi", "TID251"),
        ("actors/replica/lifecycle.py", "import torch", "TID253"),
        ("actors/replica/runtime.py", "import transformers", "TID253"),
        ("actors/image/layout.py", "from torch import Tensor", "TID253"),
        ("serve_app/replica/replica.py", "import transformers", "TID253"),
    ],
)
def test_ruff_refuses_import(file: str, code: str, rule: str, project: Path) -> None:
    assert rule in _ruff(file, code, project)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("actors/engine/engine.py", "import torch"),
        ("actors/memory/cuda.py", "import torch"),
        ("actors/worker/model_worker.py", "import transformers"),
        ("serve_app/app.py", "from ray import serve"),
        ("serve_app/replica/replica.py", "def start() -> None:\n    import torch"),
    ],
)
def test_ruff_allows_import(file: str, code: str, project: Path) -> None:
    assert "TID" not in _ruff(file, code, project)


def _ruff(file: str, code: str, project: Path) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    return subprocess.run(
        [*command, "--stdin-filename", file, "-"],
        input=code + "\n",
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
