"""The unit of systemd, as its own verifier reads it."""

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from serve_app.bench.serve_process import STOP_DEADLINE_S


def test_systemd_takes_the_unit(project: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    text = (project / "configs" / "systemd" / "sleepserve.service").read_text()
    unit = tmp_path / "sleepserve.service"
    # It wants the program to be there.
    unit.write_text(text.replace("/opt/sleepserve/bin/sleepserve", shutil.which("true") or ""))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "sleepserve" in line]
    assert not ours
    assert done.returncode == 0, done.stderr


def test_it_stops_as_ctrl_c_does(project: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.read(project / "configs" / "systemd" / "sleepserve.service")
    service = unit["Service"]
    assert service["KillSignal"] == "SIGINT"
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > STOP_DEADLINE_S
