"""Packed weights come back bit by bit, whatever they are."""

import math
from contextlib import suppress

import pytest
import torch

from actors.errors import WeightsCorrupted
from actors.image.cascade import BLOCK, ROW, compress, decompress
from actors.image.layout import Compressed

COUNT = 20 * BLOCK


def _gauss(count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def _special() -> torch.Tensor:
    x = _gauss()
    x[::7], x[1::97], x[2::101], x[3::103] = 0, math.inf, math.nan, -math.inf
    x[5::11] *= 1e-39  # denormal
    x[6::13] *= -0.0
    return x


def _any_bits(count: int = COUNT) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 15), 1 << 15, (count,), generator=source)
    return bits.to(torch.int16).view(torch.bfloat16)


def _wide() -> torch.Tensor:
    """Every exponent, the common ones more often."""
    exponents = (4 * _gauss() + 120).clamp(0, 255).to(torch.int16)
    return ((_any_bits().view(torch.int16) & 0x7F) | exponents << 7).view(torch.bfloat16)


WEIGHTS = {
    "gauss": _gauss() * 0.02,
    "rows of other scales": _gauss()
    * torch.exp(0.35 * _gauss(20))[:, None].expand(20, BLOCK).reshape(-1),
    "special": _special(),
    "wide": _wide(),
    "constant": torch.ones(COUNT),
    "zeros": torch.zeros(COUNT),
    "a tenth any bits": torch.where(_gauss() > 1.28, _any_bits().float(), _gauss()),
}


def laid_out(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """A segment with gaps between the tensors, in which anything lies, and the places of those that are bfloat16."""
    places: list[tuple[int, int]] = []
    parts: list[torch.Tensor] = []
    end = 0
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if tensor.dtype == torch.bfloat16:
            places.append((end, len(data)))
        gap = torch.full((-len(data) % 256,), 0x5A, dtype=torch.uint8)
        parts += [data, gap]
        end += len(data) + len(gap)
    return torch.cat(parts), places


def round_trip(tensors: list[torch.Tensor]) -> Compressed:
    segment, places = laid_out(tensors)
    data, about = compress(segment, places)
    assert len(data) == about.stored_size
    out = torch.full_like(segment, 0xA5)
    decompress(data, about, out)
    assert torch.equal(out, segment)
    return about


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_come_back_bit_by_bit(name: str) -> None:
    about = round_trip([WEIGHTS[name].bfloat16()])
    assert about.coded_blocks == about.blocks == 20


def test_trained_weights_distribution_packs_to_two_thirds() -> None:
    about = round_trip([WEIGHTS["gauss"].bfloat16()])
    assert about.stored_size / (2 * COUNT) == pytest.approx(0.668, abs=0.003)


def test_what_does_not_shrink_is_kept() -> None:
    about = round_trip([_any_bits()])
    assert about.coded_blocks == 0
    assert about.stored_size < 1.01 * 2 * COUNT


@pytest.mark.parametrize(
    "more", [0, 1, ROW - 1, ROW, ROW + 1, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
)
def test_tensors_of_any_length(more: int) -> None:
    about = round_trip([(_gauss(16 * BLOCK + more) * 0.02).bfloat16()])
    assert about.coded_blocks == 16 + math.ceil(more // ROW * ROW / BLOCK)


def test_several_tensors_of_several_types() -> None:
    tensors = [
        (_gauss(16 * BLOCK + 9) * 0.02).bfloat16(),
        _gauss(100).bfloat16(),
        _any_bits(5000),
        _gauss(17 * BLOCK),  # float32
        torch.empty(0, dtype=torch.bfloat16),
        torch.arange(33, dtype=torch.uint8),
        (_gauss(18 * BLOCK) * 5).bfloat16(),
    ]
    about = round_trip(tensors)
    assert about.coded_blocks == 17 + 18  # of the first and the last


def test_an_empty_segment_packs_to_nothing() -> None:
    about = round_trip([torch.empty(0, dtype=torch.bfloat16)])
    assert about.blocks == 0


def test_every_level_comes_up() -> None:
    """All 256 exponents, each in every place of a row."""
    exponents = torch.arange(256).repeat_interleave(ROW)
    rows = [exponents.roll(step) for step in range(ROW)]
    bits = torch.cat(rows * (COUNT // sum(map(len, rows)) + 1)).to(torch.int16) << 7
    # A table needs a favourite, or nothing is saved.
    favourite = torch.full((8 * len(bits),), 126 << 7, dtype=torch.int16)
    round_trip([torch.cat([bits, favourite]).view(torch.bfloat16)])


def test_the_same_bytes_for_the_same_weights() -> None:
    weights = WEIGHTS["gauss"].bfloat16().view(torch.uint8)
    (first, one), (second, two) = (compress(weights, [(0, len(weights))]) for _ in range(2))
    assert one == two
    assert torch.equal(first, second)


def test_changed_bytes_are_noticed_or_give_other_weights() -> None:
    """Never anything else: nothing outside of both is reached."""
    segment, places = laid_out(
        [WEIGHTS["wide"].bfloat16(), WEIGHTS["gauss"].bfloat16()[: 17 * BLOCK + 7]]
    )
    data, about = compress(segment, places)
    source = torch.Generator().manual_seed(2)
    anywhere = torch.randint(about.stored_size, (40,), generator=source).tolist()
    for at in [*range(20), *range(about.heads_at, about.heads_at + 20), *anywhere]:
        spoilt = data.clone()
        spoilt[at] ^= 0xFF
        with suppress(WeightsCorrupted):
            decompress(spoilt, about, torch.zeros_like(segment))
