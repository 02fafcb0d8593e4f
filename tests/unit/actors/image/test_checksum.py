"""The checksum that CPU and GPU share."""

import pytest
import torch

from actors.image import checksum as module
from actors.image.checksum import Checksums, checksum
from actors.image.layout import Checksum
from tests.unit.hopper import run_with_compiler


def content(size: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def by_definition(data: torch.Tensor) -> tuple[int, int]:
    words = [int.from_bytes(bytes(w), "little") for w in data.view(-1, 8).tolist()]
    plain, weighted = sum(words), sum((i + 1) * word for i, word in enumerate(words))
    return plain % 2**64, weighted % 2**64


@pytest.mark.parametrize("size", [0, 8, 4096, 8 * 1000])
def test_equals_its_definition_whatever_the_chunks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(size)
    whole = checksum(data)
    assert (whole.plain % 2**64, whole.weighted % 2**64) == by_definition(data)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 7)
    assert checksum(data) == whole


def test_one_changed_bit_and_two_swapped_words_are_seen() -> None:
    data = content(1 << 16)
    whole = checksum(data)
    for position in (0, 777, (1 << 16) - 1):
        changed = data.clone()
        changed[position] ^= 1
        assert checksum(changed) != whole
    swapped = data.clone()
    swapped[:8], swapped[80:88] = data[80:88], data[:8]
    assert checksum(swapped) != whole


def test_several_are_begun_and_read_together() -> None:
    pieces = [content(8 * n) for n in (1, 1000, 17)]
    sums = Checksums(torch.device("cpu"), len(pieces))
    for _ in range(2):  # used again
        for piece in pieces:
            sums.begin(piece)
        assert sums.read() == [checksum(piece) for piece in pieces]


@pytest.mark.parametrize("words", [1, 100, 2048, 5000, 2048 * 2048 + 3])
def test_kernel_gives_what_the_cpu_gives(words: int) -> None:
    kernel = pytest.importorskip("actors.image.checksum_kernel")
    data = content(8 * words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    kernel.sum_words(data.to(device).view(torch.int64), sums)
    assert Checksum(*sums.tolist()) == checksum(data)


def test_kernel_compiles_for_hopper_without_one() -> None:
    pytest.importorskip("triton")
    run_with_compiler("""
from actors.image.checksum_kernel import _sum_words

for count in ("i32", "i64"):
    compiled(_sum_words, {"words": "*i64", "sums": "*i64", "count": count}, {"BLOCK": 2048})
""")


@pytest.mark.gpu
def test_card_checks_pieces_that_are_not_there_yet() -> None:
    pieces = [content(8 * n) for n in (10**6, 3 * 10**6 + 1)]
    sums = Checksums(torch.device("cuda"), len(pieces))
    on_card = [torch.zeros_like(piece, device="cuda") for piece in pieces]
    copying = torch.cuda.Stream()
    marks = []
    with torch.cuda.stream(copying):
        torch.cuda._sleep(10**9)
        for target, piece in zip(on_card, pieces, strict=True):
            target.copy_(piece.pin_memory(), non_blocking=True)
            marks.append(torch.cuda.Event())
            marks[-1].record()
    for target, mark in zip(on_card, marks, strict=True):
        sums.begin(target, lambda mark=mark: torch.cuda.current_stream().wait_event(mark))  # type: ignore[misc]
    assert not marks[0].query()
    assert sums.read() == [checksum(piece) for piece in pieces]


@pytest.mark.gpu
def test_card_checks_pieces_beside_later_copies_in_no_memory_of_its_own() -> None:
    pieces = [content(8 * n) for n in (1, 10**6, 3 * 10**6 + 1)]
    sums = Checksums(torch.device("cuda"), len(pieces))
    on_card = [torch.zeros_like(piece, device="cuda") for piece in pieces]
    copying = torch.cuda.Stream()
    before = torch.cuda.memory_reserved()
    marks = []
    with torch.cuda.stream(copying):
        torch.cuda._sleep(10**8)  # the bytes come late
        for target, piece in zip(on_card, pieces, strict=True):
            target.copy_(piece.pin_memory(), non_blocking=True)
            marks.append(torch.cuda.Event(blocking=True))
            marks[-1].record()
    for target, mark in zip(on_card, marks, strict=True):
        mark.synchronize()
        sums.begin(target)
    assert sums.read() == [checksum(piece) for piece in pieces]
    assert torch.cuda.memory_reserved() == before
