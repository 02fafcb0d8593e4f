"""`python -m docs.results.serve`, which has a server of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serve_process import PROJECT

pytestmark = pytest.mark.slow


def test_every_phase_is_measured_and_nothing_is_left(
    servers: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    servers.stop()
    file, log = tmp_path / "serve.json", tmp_path / "serve.log"
    command = [sys.executable, "-m", "docs.results.serve"]
    command += [str(tiny_checkpoint), "--config", str(PROJECT / "configs" / "tiny_cpu.yaml")]
    command += ["--cycles", "3", "--pause-s", "0", "--concurrency", "1", "2"]
    command += ["--prompt-tokens", "16", "--answer-tokens", "8"]
    command += ["--json", str(file), "--log", str(log)]
    run = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr + run.stdout
    result = json.loads(file.read_text())
    assert result["complete"]
    assert (result["left_processes"], result["skipped"]) == ([], {})

    start, redeploy = result["start"], result["redeploy"]
    steps = list(start["steps"])
    assert steps.index("Ray runs") < steps.index("image published") < steps.index("awake")
    for found in (start, redeploy):
        assert found["weights_from"] == "image"
        assert list(found["steps"].values()) == sorted(found["steps"].values())
        assert found["steps"]["awake"] < found["seconds_to_first_token"]
    assert "image published" not in redeploy["steps"]  # the holder kept it
    assert start["weights_bytes"] > 3_000_000

    latency = result["latency"]
    assert (latency["cycles"], latency["wrong"]) == (3, 0)
    assert 0 < latency["link_s"] < latency["ttft_asleep_s"]["median"]
    assert log.read_text().count("awake -> draining") >= 3
    assert list(result["throughput"]) == ["1", "2"]
    assert all(found["tokens_per_s"]["min"] > 0 for found in result["throughput"].values())
    assert result["memory"] == {"skipped": "no CUDA device"} or "none" in result["memory"]
    for told in ("TTFT asleep", "requests at once", "0 in 3 cycles"):
        assert told in run.stdout
