"""A card's used memory, told by another process, with a pynvml of our own there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.memory import nvml_outside

PYNVML = """
from types import SimpleNamespace

class NVMLError(Exception): pass

def nvmlInit(): pass

def nvmlDeviceGetHandleByUUID(name):
    if name != {known!r}:
        raise NVMLError(f"no {{name}}")
    return name

def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=12345)
"""


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(known: str) -> None:
        (tmp_path / "pynvml.py").write_text(PYNVML.format(known=known))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


@pytest.mark.parametrize("prefix", ["GPU", "MIG"])
def test_another_process_tells_what_is_used(card: Callable[[str], None], prefix: str) -> None:
    card(f"{prefix}-1-2-3")
    assert nvml_outside.used_bytes("1-2-3") == 12345


def test_none_where_nvml_knows_no_such_card(card: Callable[[str], None]) -> None:
    card("GPU-1-2-3")
    assert nvml_outside.used_bytes("4-5-6") is None


def test_none_where_nobody_answers(
    card: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card("GPU-1-2-3")
    monkeypatch.setattr(nvml_outside, "_LIMIT_S", 0.0)
    assert nvml_outside.used_bytes("1-2-3") is None
