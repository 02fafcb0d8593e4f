"""The kernels give what the reference gives, both ways: on a card, or interpreted where Triton is installed (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from actors.image import cascade
from actors.image.cascade import BLOCK, PIECE_BYTES, WORDS
from actors.image.layout import FLOAT_TYPES, Compressed, FloatType
from tests.conftest import cuda_available
from tests.unit.actors.image.test_cascade import NAMES, laid_out, weights_of

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not cuda_available(), reason="neither a card nor TRITON_INTERPRET=1"
    ),
    *([pytest.mark.gpu] if cuda_available() else []),
]
BLOCKS = 5  # enough for all that differs between blocks, and the interpreter is slow
DEVICE = "cuda" if cuda_available() else "cpu"


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "LEAST_WEIGHTS", 2 * BLOCK)


def compare(tensors: list[torch.Tensor], dtype: FloatType) -> None:
    from actors.image.cascade_kernel import InTriton, decompress

    segment, places = laid_out(tensors, dtype)
    reference = cascade.compress(segment, places, dtype)
    data, about = cascade.compress(segment.to(DEVICE), places, dtype, coder=InTriton())
    assert about == reference[1]
    assert torch.equal(data.cpu(), reference[0])
    expected, found = (torch.full_like(segment, 0xA5) for _ in range(2))
    cascade.decompress(data.cpu(), about, expected)
    on_device = found.to(DEVICE)
    decompress(data, about, on_device)
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_come_back_bit_by_bit(name: str, dtype: FloatType) -> None:
    compare([weights_of(name, dtype)[: BLOCKS * BLOCK]], dtype)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_several_pieces_of_any_length(dtype: FloatType) -> None:
    gauss = weights_of("gauss", dtype)
    lengths = 3 * BLOCK - 87, 100, 4 * BLOCK - 7, 5, 2 * BLOCK
    compare([gauss[:length] for length in lengths], dtype)


SPOILT_AT = {  # of the regions of the compressed bytes
    "a piece's base": lambda about: range(8),
    "a piece's end": lambda about: range(8, 16),
    "a table": lambda about: range(16, 144, 40),
    "heads": lambda about: range(about.heads_at, about.heads_at + 24),
    "the last head": lambda about: range(
        about.heads_at + 8 * about.blocks - 8, about.heads_at + 8 * about.blocks + 8
    ),
    "codes": lambda about: range(about.codes_at, about.mantissas_at, 3001),
    "mantissas": lambda about: range(about.mantissas_at, about.rests_at, 20011),
    "rests": lambda about: range(about.rests_at, about.tails_at, 5003),
    "tails": lambda about: range(about.tails_at, about.stored_size - 64, 1009),
}


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("region", SPOILT_AT)
def test_changed_bytes_reach_nothing_outside(region: str, dtype: FloatType) -> None:
    """Nothing around the bytes is read, and nothing around the part is written."""
    weights = weights_of("wide", dtype)
    segment, places = laid_out([weights[: BLOCKS * BLOCK - 7]], dtype)
    data, about = cascade.compress(segment, places, dtype)
    assert about.blocks > about.coded_blocks  # some are raw
    anywhere = SPOILT_AT[region](about)
    assert bool(anywhere) == (region != "rests" or dtype == "float16")
    if not anywhere:
        return
    for at in anywhere if DEVICE == "cuda" else (anywhere[0], anywhere[-1]):
        spoilt = data.clone()
        spoilt[at] ^= 0xFF
        first, second = (decompressed_among(spoilt, about, len(segment), b) for b in (0, 0xFF))
        sure = written_once_at_most(spoilt, about, len(segment))
        assert torch.equal(first[sure], second[sure])


def written_once_at_most(data: torch.Tensor, about: Compressed, size: int) -> torch.Tensor:
    """Which bytes have one value whatever the order of the blocks: a head that names another piece may have its
    block write into the place of the next one."""
    weights = size // WORDS[about.dtype].itemsize
    writers = torch.zeros(weights, dtype=torch.int32)
    heads = data[about.heads_at :][: 8 * about.blocks].view(torch.int32).view(-1, 2)
    for block, (_, where) in enumerate(heads.tolist()):
        piece = min(max(where >> 16, 0), about.heads_at // PIECE_BYTES - 1) * PIECE_BYTES
        base, end = data[piece : piece + 16].view(torch.int64).tolist()
        first = base + block * BLOCK
        if first >= 0:
            writers[first : min(max(end, 0), weights, first + BLOCK)] += 1
    return (writers < 2).repeat_interleave(WORDS[about.dtype].itemsize)


def decompressed_among(
    data: torch.Tensor, about: Compressed, size: int, around: int
) -> torch.Tensor:
    """What comes of the bytes where those around them are all the same."""
    from actors.image.cascade_kernel import decompress

    margin = 1 << 16
    whole = torch.full((len(data) + 2 * margin,), around, dtype=torch.uint8)
    whole[margin:-margin] = data
    out = torch.full((size + 2 * margin,), 0x5A, dtype=torch.uint8)
    whole, out = whole.to(DEVICE), out.to(DEVICE)
    decompress(whole[margin:-margin], about, out[margin:-margin])
    assert torch.all(out[:margin] == 0x5A)
    assert torch.all(out[-margin:] == 0x5A)
    return out[margin:-margin].cpu()
