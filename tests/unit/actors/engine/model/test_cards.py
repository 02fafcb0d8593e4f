"""Cards that the engine does not compute on are refused before anything is loaded."""

from pathlib import Path

import pytest
import torch

from actors.engine.model.cards import card_problem
from actors.worker.model_worker import build_module


@pytest.mark.parametrize(
    ("capability", "serves"),
    [
        ((6, 1), False),
        ((7, 5), False),
        ((8, 0), True),
        ((8, 9), True),
        ((9, 0), True),
        ((12, 0), True),
    ],
)
def test_cards_from_ampere_on_serve(capability: tuple[int, int], serves: bool) -> None:
    problem = card_problem(capability)
    assert (problem is None) == serves
    if problem is not None:
        assert f"compute capability {capability[0]}.{capability[1]};" in problem
        assert "\n" not in problem


@pytest.mark.parametrize(("device", "refused"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_replica_is_refused_on_an_old_card(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device: str, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    if not refused:
        assert build_module(tiny_checkpoint, "auto", device).device.type == "meta"
        return
    with pytest.raises(ValueError, match=r"compute capability 7\.5.*engine\.device: cpu"):
        build_module(Path("/nowhere"), "auto", device)


@pytest.mark.gpu
def test_card_of_this_machine_serves(tiny_checkpoint: Path) -> None:
    assert build_module(tiny_checkpoint, "auto", "cuda").device.type == "meta"
