"""What the keeper's process itself can tell of a card."""

import asyncio
from pathlib import Path

import pytest

from actors.card.config import CardConfig
from actors.memory import nvml_outside
from actors.memory.cpu_card import CpuCard
from serve_app.replica import card_keeper
from serve_app.replica.card_keeper import cpu_card_of, free_now


def test_of_what_stands_for_a_card_it_reads_the_account_that_workers_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_keeper, "_session_folder", lambda: tmp_path)
    of_workers = cpu_card_of(CardConfig(memory_budget="1 GiB"), "node")
    assert of_workers is not None
    stranger = CpuCard(*of_workers)
    stranger.take(100)
    assert asyncio.run(free_now("node", "cpu", stranger.total)) == stranger.total - 100


@pytest.mark.parametrize(("used", "free"), [(300, 700), (0, 1000), (None, None)])
def test_of_a_gpu_it_asks_nvml(
    monkeypatch: pytest.MonkeyPatch, used: int | None, free: int | None
) -> None:
    asked: list[str] = []

    def used_bytes(uuid: str) -> int | None:
        asked.append(uuid)
        return used

    monkeypatch.setattr(nvml_outside, "used_bytes", used_bytes)
    assert asyncio.run(free_now("node", "GPU-1-2-3", 1000)) == free
    assert asked == ["1-2-3"]
