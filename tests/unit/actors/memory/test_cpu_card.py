"""What stands for a card on a CPU: several takers, one number of bytes, and takers that have died."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.errors import DeviceMemoryShort
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.memory.cpu_card import CpuCard

PAGE = CpuDriver.granularity


def test_takers_share_what_there_is(tmp_path: Path) -> None:
    a, b = (CpuCard(tmp_path / "card", 100) for _ in range(2))
    a.take(60)
    with pytest.raises(DeviceMemoryShort, match="50 bytes do not fit: 40 of 100 are free"):
        b.take(50)
    b.take(40)
    assert a.free() == 0
    a.give(60)
    assert b.free() == 60


def test_memory_of_a_process_that_has_ended_is_free(tmp_path: Path) -> None:
    file = tmp_path / "card"
    text = f"from actors.memory.cpu_card import CpuCard; from pathlib import Path; CpuCard(Path({str(file)!r}), 100).take(70)"
    subprocess.run([sys.executable, "-c", text], check=True)
    assert list(json.loads(file.read_text()).values()) == [70]
    assert CpuCard(file, 100).free() == 100


def test_account_is_for_its_owner_alone(tmp_path: Path) -> None:
    CpuCard(tmp_path / "card", 100).take(1)
    assert (tmp_path / "card").stat().st_mode & 0o777 == 0o600


def test_arena_on_a_card_that_is_full_maps_nothing(tmp_path: Path) -> None:
    card = CpuCard(tmp_path / "card", 3 * PAGE)
    one, two = (DeviceArena(CpuDriver(card), [PAGE, PAGE]) for _ in range(2))
    one.map()
    with pytest.raises(DeviceMemoryShort, match="do not fit on cpu"):
        two.map()
    assert two.mapped_bytes == 0
    assert card.free() == PAGE  # all or nothing
    one.unmap([0])
    two.map()
    assert CpuDriver(card).memory().free == 0
    assert CpuDriver(card).memory().total == 3 * PAGE
