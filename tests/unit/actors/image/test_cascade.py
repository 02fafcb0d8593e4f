"""Packed weights come back bit by bit, whatever they are."""

import math
from contextlib import suppress
from itertools import permutations

import pytest
import torch

from actors.errors import WeightsCorrupted
from actors.image import cascade
from actors.image.cascade import BLOCK, ROW, WORDS, compress, decompress
from actors.image.layout import FLOAT_TYPES, Compressed, FloatType

COUNT = 20 * BLOCK
EXPONENTS: dict[FloatType, tuple[int, int]] = {  # the lowest bit, and how many
    "bfloat16": (7, 8),
    "float16": (10, 5),
    "float8_e4m3fn": (3, 4),
}
_MOST_OF_FLOAT8 = 448.0


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


def _wide(dtype: FloatType, middle: int, deviation: float) -> torch.Tensor:
    """Many exponents, the common ones more often."""
    at, bits = EXPONENTS[dtype]
    most = (1 << bits) - 1
    exponents = (deviation * _gauss() + middle).clamp(0, most).to(torch.int16)
    found = (_any_bits().view(torch.int16) & ~(most << at)) | exponents << at
    return (found & 0xFF if dtype == "float8_e4m3fn" else found).to(WORDS[dtype])


WEIGHTS = {
    "gauss": _gauss() * 0.02,
    "rows of other scales": _gauss()
    * torch.exp(0.35 * _gauss(20))[:, None].expand(20, BLOCK).reshape(-1),
    "special": _special(),
    "constant": torch.ones(COUNT),
    "zeros": torch.zeros(COUNT),
    "a tenth any bits": torch.where(_gauss() > 1.28, _any_bits().float(), _gauss()),
}


WIDE: dict[FloatType, torch.Tensor] = {
    "bfloat16": _wide("bfloat16", 120, 4.0),
    "float16": _wide("float16", 15, 1.0),
    "float8_e4m3fn": _wide("float8_e4m3fn", 8, 1.7),
}
NAMES = [*WEIGHTS, "wide"]


def as_type(weights: torch.Tensor, dtype: FloatType) -> torch.Tensor:
    """Float8 as quantisers make it: by a scale that gives the largest weight the largest number."""
    if dtype == "float8_e4m3fn" and len(weights):
        largest = weights[weights.isfinite()].abs().max().clamp(min=1.0e-30)
        weights = weights / largest * _MOST_OF_FLOAT8
    return weights.to(getattr(torch, dtype))


def weights_of(name: str, dtype: FloatType) -> torch.Tensor:
    """Of `NAMES`."""
    if name == "wide":
        return WIDE[dtype].view(getattr(torch, dtype))
    return as_type(WEIGHTS[name], dtype)


def laid_out(
    tensors: list[torch.Tensor], dtype: FloatType = "bfloat16"
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """A segment with gaps between the tensors, in which anything lies, and the places of those of that type."""
    places: list[tuple[int, int]] = []
    parts: list[torch.Tensor] = []
    end = 0
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if tensor.dtype == getattr(torch, dtype):
            places.append((end, len(data)))
        gap = torch.full((-len(data) % 256,), 0x5A, dtype=torch.uint8)
        parts += [data, gap]
        end += len(data) + len(gap)
    return torch.cat(parts), places


def round_trip(tensors: list[torch.Tensor], dtype: FloatType = "bfloat16") -> Compressed:
    segment, places = laid_out(tensors, dtype)
    data, about = compress(segment, places, dtype)
    assert len(data) == about.stored_size
    out = torch.full_like(segment, 0xA5)
    decompress(data, about, out)
    assert torch.equal(out, segment)
    return about


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_come_back_bit_by_bit(name: str, dtype: FloatType) -> None:
    about = round_trip([weights_of(name, dtype)], dtype)
    assert about.coded_blocks == about.blocks == 20


@pytest.mark.parametrize(
    ("dtype", "share"), [("bfloat16", 0.668), ("float16", 0.855), ("float8_e4m3fn", 0.84)]
)
def test_trained_weights_distribution_packs_to_this_share(dtype: FloatType, share: float) -> None:
    about = round_trip([weights_of("gauss", dtype)], dtype)
    assert about.stored_size / (WORDS[dtype].itemsize * COUNT) == pytest.approx(share, abs=0.004)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_what_does_not_shrink_is_kept(dtype: FloatType) -> None:
    about = round_trip([_any_bits().view(getattr(torch, dtype))], dtype)
    assert about.coded_blocks == 0
    assert about.stored_size < 1.01 * 2 * COUNT


@pytest.mark.parametrize(
    "more", [0, 1, ROW - 1, ROW, ROW + 1, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_tensors_of_any_length(dtype: FloatType, more: int) -> None:
    about = round_trip([as_type(_gauss(16 * BLOCK + more) * 0.02, dtype)], dtype)
    assert about.coded_blocks == 16 + math.ceil(more // ROW * ROW / BLOCK)


@pytest.mark.parametrize(("dtype", "other"), list(permutations(FLOAT_TYPES, 2)))
def test_several_tensors_of_several_types(dtype: FloatType, other: FloatType) -> None:
    tensors = [
        as_type(_gauss(16 * BLOCK + 9) * 0.02, dtype),
        as_type(_gauss(100), dtype),
        as_type(_any_bits(5000), dtype),
        _gauss(17 * BLOCK),  # float32
        as_type(_gauss(17 * BLOCK), other),
        torch.empty(0, dtype=getattr(torch, dtype)),
        torch.arange(33, dtype=torch.uint8),
        as_type(_gauss(18 * BLOCK) * 5, dtype),
    ]
    about = round_trip(tensors, dtype)
    assert about.coded_blocks == 17 + 18  # of the first and the last


def test_an_empty_segment_packs_to_nothing() -> None:
    about = round_trip([torch.empty(0, dtype=torch.bfloat16)])
    assert about.blocks == 0


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_every_level_comes_up(dtype: FloatType) -> None:
    """All exponents, each in every place of a row."""
    at, bits_of = EXPONENTS[dtype]
    exponents = torch.arange(1 << bits_of).repeat_interleave(ROW)
    rows = [exponents.roll(step) for step in range(ROW)]
    bits = torch.cat(rows * (COUNT // sum(map(len, rows)) + 1)).to(WORDS[dtype]) << at
    # A table needs a favourite, or nothing is saved.
    favourite = torch.full((8 * len(bits),), 14 << at, dtype=WORDS[dtype])
    about = round_trip([torch.cat([bits, favourite]).view(getattr(torch, dtype))], dtype)
    assert about.coded_blocks


def test_the_same_bytes_for_the_same_weights() -> None:
    weights = weights_of("gauss", "bfloat16").view(torch.uint8)
    (first, one), (second, two) = (compress(weights, [(0, len(weights))]) for _ in range(2))
    assert one == two
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_changed_bytes_are_noticed_or_give_other_weights(dtype: FloatType) -> None:
    """Never anything else: nothing outside of both is reached."""
    wide, gauss = weights_of("wide", dtype), weights_of("gauss", dtype)
    segment, places = laid_out([wide, gauss[: 17 * BLOCK + 7]], dtype)
    data, about = compress(segment, places, dtype)
    source = torch.Generator().manual_seed(2)
    anywhere = torch.randint(about.stored_size, (40,), generator=source).tolist()
    for at in [*range(20), *range(about.heads_at, about.heads_at + 20), *anywhere]:
        spoilt = data.clone()
        spoilt[at] ^= 0xFF
        with suppress(WeightsCorrupted):
            decompress(spoilt, about, torch.zeros_like(segment))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_the_same_bytes_however_many_blocks_are_made_at_once(
    dtype: FloatType, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of("special", dtype)[: 19 * BLOCK + 3 * ROW].view(torch.uint8)
    expected, about = compress(weights, [(0, len(weights))], dtype)
    monkeypatch.setattr(cascade, "_AT_ONCE", 4)
    found, again = compress(weights, [(0, len(weights))], dtype)
    assert about == again
    assert torch.equal(found, expected)
    out = torch.zeros_like(weights)
    decompress(found, again, out)
    assert torch.equal(out, weights)
