"""What every bench has: how far it is, hardware, versions, command, and how its numbers are told. No torch here."""

import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from serve_app.bench.provenance import provenance

_PACKAGES = ("torch", "transformers", "accelerate", "ray", "triton")
_ADDITIONS = 1_000_000
_SECRETS = ("--api-key", "--admin-key")  # options of the benches and of eval
_HIDDEN = "***"

# What is being done; how much of how much: 0 of 0 where that is not known.
Progress = Callable[[str, int, int], None]


class TimeLimit:
    """From now on. What has begun when it is up is finished.

    Attributes:
        was_up: whether somebody was told so.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._began_s = time.monotonic()
        self.was_up = False

    def is_up(self, reserve: float = 0.0) -> bool:
        """Whether to begin nothing more.

        Args:
            reserve: the share of the limit that others are to have.
        """
        is_up = time.monotonic() - self._began_s > (1 - reserve) * self._limit_s
        self.was_up |= is_up
        return is_up


def environment() -> dict[str, str | int | float | bool | None]:
    """Hardware, versions, commit and command."""
    device, _, driver = _card().partition(", ")
    return {
        "device": device,
        "driver": driver,
        "cpus": os.cpu_count(),
        "cpu_ms": _cpu_ms(),
        "python": platform.python_version(),
        **provenance(),
        **{name: _version(name) for name in _PACKAGES},
        "command": _command(),
    }


def _cpu_ms() -> float:
    """Of a million additions in Python, the quickest of five times.

    Hosts of one card were seen whose CPUs differ by a factor of two, and what is served over HTTP with them.
    """
    took = []
    for _ in range(5):
        began_s, total = time.perf_counter(), 0
        for i in range(_ADDITIONS):
            total += i
        took.append(time.perf_counter() - began_s)
    return 1e3 * min(took)


def _command() -> str:
    if Path(sys.argv[0]).name == "__main__.py":  # a script of docs/results or tests
        return _joined("python", sys.orig_argv[1:])
    return _joined("sleepserve", sys.argv[1:])


def _joined(program: str, args: Sequence[str]) -> str:
    """As a shell takes it, without what would let a reader of results into a server.

    The fields of --extra-body are part of what was measured, and stay.
    """
    told = [program]
    hides = False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if hides:
            told.append(_HIDDEN)
        elif equals and name in _SECRETS:
            told.append(f"{name}={_HIDDEN}")
        else:
            told.append(without_password(arg))
        hides = not hides and arg in _SECRETS
    return shlex.join(told)


def without_password(text: str) -> str:
    """A text whose URLs do not tell by which name and password one gets in."""
    return re.sub(r"(?<=://)[^/?#\s]*@", f"{_HIDDEN}@", text)


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
    """Smallest, largest, and what half, 90 and 99 of 100 do not exceed."""
    return {
        "min": min(values),
        "median": statistics.median(values),
        "p90": quantile(values, 0.90),
        "p99": quantile(values, 0.99),
        "max": max(values),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, on the line that joins them."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def ms(found: dict[str, float]) -> str:
    """A spread of seconds."""
    return f"{1e3 * found['median']:.1f} ms ({1e3 * found['min']:.1f}-{1e3 * found['max']:.1f})"


def unit_of(name: str) -> int:
    """What a watched figure is divided by to be shown: bytes become MiB."""
    return 2**20 if name.endswith("_bytes") else 1


def shown(name: str) -> str:
    """A watched figure's name for people: "device_bytes" is "device, MiB"."""
    text = name.removesuffix("_bytes").replace("_", " ")
    return f"{text}, MiB" if name.endswith("_bytes") else text


def gib(size: float) -> str:
    return f"{size / 2**30:.3f} GiB"


def trend(xs: Sequence[float], values: Sequence[float], per: str) -> dict[str, float]:
    """First, largest, last; and by how much one more x raises it, in its second half.

    Args:
        per: what the last one is called.
    """
    half = len(values) // 2
    later, slope = xs[half:], 0.0
    if len(set(later)) > 1:  # else there is no line through them
        slope = statistics.linear_regression(later, values[half:]).slope
    return {"first": values[0], "max": max(values), "last": values[-1], per: slope}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a head; without a head, names and values."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    return Table((), rows)


def as_text(tables: Iterable[Table]) -> list[str]:
    """One below the other, with an empty line in between; those without rows are left out."""
    found: list[str] = []
    for each in tables:
        if not each.rows:
            continue
        found += [""] if found else []
        found += table(each.head, each.rows) if each.head else lines(each.rows)
    return found


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
