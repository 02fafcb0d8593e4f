"""What a sample says of an image, before all of it is compressed."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.checkpoints.making import write_checkpoint
from actors.errors import WeightsCorrupted
from actors.holder.obtain import load_from_disk
from actors.image import cascade, compressing
from actors.image.compressing import compress_segment, try_parts
from actors.image.layout import FLOAT_TYPES, Compressed
from actors.image.packer import image_key


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [(torch.bfloat16, 0.6, 0.7), (torch.float16, 0.8, 0.9), (torch.float32, 1.0, 1.0)],
)
def test_sample_says_what_is_left(
    dtype: torch.dtype, least: float, most: float, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "demo", "demo", dtype="bfloat16")
    image = load_from_disk(checkpoint, image_key(checkpoint, dtype))
    sample = try_parts(image, torch.device("cpu"))
    of_type = [slot.size for slot in image.layout.stored() if slot.dtype in FLOAT_TYPES]
    assert sample.size == sum(of_type)
    assert least * sample.size <= sample.stored <= most * sample.size
    assert (sample.seconds > 0) == bool(of_type)


def test_sample_of_a_quantised_image_is_of_both_types(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "demo", "demo", quantize="fp8-block")
    image = load_from_disk(checkpoint, image_key(checkpoint, torch.bfloat16))
    sizes = Counter[str]()
    for slot in image.layout.stored():
        sizes[slot.dtype] += slot.size
    sample = try_parts(image, torch.device("cpu"))
    assert sample.size == sizes["bfloat16"] + sizes["float8_e4m3fn"]
    expected = 0.69 * sizes["bfloat16"] + 0.85 * sizes["float8_e4m3fn"]
    assert sample.stored == pytest.approx(expected, rel=0.05)


def test_weights_that_do_not_come_back_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_but_the_last(data: torch.Tensor, about: Compressed, out: torch.Tensor) -> None:
        cascade.decompress(data, about, out)
        out[-1] ^= 1

    checkpoint = write_checkpoint(tmp_path / "demo", "demo", dtype="bfloat16")
    image = load_from_disk(checkpoint, image_key(checkpoint, torch.bfloat16))
    payload = image.segment(1)
    out = np.empty(len(payload), np.uint8)
    for decompress, expected in (
        (cascade.decompress, nullcontext()),
        (all_but_the_last, pytest.raises(WeightsCorrupted, match="do not come back")),
    ):
        coding = cascade.IN_TORCH, decompress
        monkeypatch.setattr(compressing, "_coding", lambda device, coding=coding: coding)
        with expected:
            found = compress_segment(image.layout, 1, payload, torch.device("cpu"), out)
            assert found is not None
