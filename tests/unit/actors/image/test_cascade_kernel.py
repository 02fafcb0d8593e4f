"""The kernel gives what the reference gives: on a card, or interpreted where Triton is installed (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from actors.image import cascade
from actors.image.cascade import BLOCK
from tests.conftest import cuda_available
from tests.unit.actors.image.test_cascade import WEIGHTS, laid_out

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not cuda_available(), reason="neither a card nor TRITON_INTERPRET=1"
)
DEVICE = "cuda" if cuda_available() else "cpu"


def compare(tensors: list[torch.Tensor]) -> None:
    from actors.image.cascade_kernel import decompress

    segment, places = laid_out(tensors)
    data, about = cascade.compress(segment.to(DEVICE), places)
    expected, found = (torch.full_like(segment, 0xA5) for _ in range(2))
    cascade.decompress(data.cpu(), about, expected)
    on_device = found.to(DEVICE)
    decompress(data, about, on_device)
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_come_back_bit_by_bit(name: str) -> None:
    compare([WEIGHTS[name].bfloat16()])


def test_several_pieces_of_any_length() -> None:
    gauss = WEIGHTS["gauss"].bfloat16()
    compare(
        [
            gauss[: 16 * BLOCK + 9],
            gauss[:100],
            gauss[: 17 * BLOCK + 7],
            gauss[:5],
            gauss[: 18 * BLOCK],
        ]
    )
