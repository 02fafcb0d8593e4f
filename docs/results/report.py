"""How results are told, and where they come from. No torch and no Ray here."""

import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "ray", "triton")


def environment() -> dict[str, str]:
    """Hardware, versions and command."""
    device, _, driver = _card().partition(", ")
    return {
        "device": device,
        "driver": driver,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "command": " ".join(sys.argv),
    }


def _card() -> str:
    """Name and driver of the first card, without a CUDA context of ours on it."""
    if shutil.which("nvidia-smi") is None:
        return "CPU"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.splitlines()[0] if found.returncode == 0 else "CPU"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ms(found: dict[str, float]) -> str:
    """A spread of seconds."""
    return f"{1e3 * found['median']:.1f} ms ({1e3 * found['min']:.1f}-{1e3 * found['max']:.1f})"


def gib(size: float) -> str:
    return f"{size / 2**30:.3f} GiB"


def say(text: str) -> None:
    """To the terminal; standard output belongs to the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def tell(result: dict[str, Any], file: Path | None, rows: Sequence[tuple[str, str]]) -> None:
    """Write the result, and show the rows."""
    text = json.dumps(result, indent=2) + "\n"
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        file.write_text(text, encoding="utf-8")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")
