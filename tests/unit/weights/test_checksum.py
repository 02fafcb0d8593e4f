"""The checksum that CPU and GPU share."""

import pytest
import torch

from actors.weights import checksum as module
from actors.weights.checksum import checksum
from actors.weights.layout import Checksum


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


def test_short_memory_is_made_do_with(monkeypatch: pytest.MonkeyPatch) -> None:
    data, steps = content(8 << 20), []
    whole = checksum(data)
    compute, least = module._checksum, module._LEAST_WORDS

    def short(words: torch.Tensor, step: int) -> Checksum:
        steps.append(step)
        if step > least:
            raise torch.OutOfMemoryError
        return compute(words, step)

    monkeypatch.setattr(module, "_CHUNK_WORDS", 1 << 22)
    monkeypatch.setattr(module, "_checksum", short)
    assert checksum(data) == whole
    assert steps == [1 << 22, 1 << 18, 1 << 17]
    monkeypatch.setattr(module, "_LEAST_WORDS", 1 << 30)
    with pytest.raises(torch.OutOfMemoryError):
        checksum(data)


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


@pytest.mark.gpu
def test_gpu_gives_what_the_cpu_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    data = content((1 << 22) + 8)
    whole = checksum(data)
    assert checksum(data.cuda()) == whole
    monkeypatch.setattr(module, "_CUDA_CHUNK_WORDS", 12345)
    assert checksum(data.cuda()) == whole
