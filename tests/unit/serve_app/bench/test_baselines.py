"""What the baselines do with a model's tensors."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("ray", reason="the benches need it")
from serve_app.bench.baselines import BASELINES, ToHost, ToPinnedHost, why_not

CPU = torch.device("cpu")
PROMPT = (11, 22, 33)


def names_and_owners(baseline: ToPinnedHost) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in baseline._model.named_parameters()}


def test_pinned_copies_are_made_in_every_sleep_and_parameters_stay(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a card nothing can be pinned: who asks for it gets a copy here."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    baseline = ToPinnedHost(tiny_checkpoint, torch.float32, CPU)
    before, token = names_and_owners(baseline), baseline.first_token(PROMPT)
    count = len(before) + len(list(baseline._model.buffers()))
    for cycle in (1, 2):
        baseline.sleep()
        assert len(pinned) == cycle * count
        held = {t.data_ptr() for t in baseline._model.parameters()}
        assert held <= {t.data_ptr() for t in pinned[-count:]}, "what sleeps is the pinned copy"
        baseline.wake()
        assert baseline.first_token(PROMPT) == token
    assert names_and_owners(baseline) == before
    baseline.close()


def test_without_a_card_there_is_a_reason() -> None:
    assert why_not("to-pinned", CPU) == "no CUDA device: the weights would go nowhere"
    assert why_not("to-pinned", torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["to", "to-pinned"])
def test_weights_leave_the_card_and_come_back(name: str, tiny_checkpoint: Path) -> None:
    card = torch.device("cuda", 0)
    baseline = BASELINES[name](tiny_checkpoint, torch.bfloat16, card)
    assert isinstance(baseline, ToHost)
    token = baseline.first_token(PROMPT)
    for _ in range(2):
        baseline.sleep()
        tensors = [*baseline._model.parameters(), *baseline._model.buffers()]
        assert all(t.device == CPU and t.is_pinned() == (name == "to-pinned") for t in tensors)
        baseline.wake()
        assert all(t.is_cuda for t in (*baseline._model.parameters(), *baseline._model.buffers()))
        assert baseline.first_token(PROMPT) == token
    baseline.close()
