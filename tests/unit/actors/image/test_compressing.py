"""What a sample says of an image, before all of it is compressed."""

from pathlib import Path

import pytest
import torch

from actors.checkpoints.making import write_checkpoint
from actors.image.compressing import try_a_part
from actors.image.config import MOST_STORED
from actors.image.layout import FLOAT_TYPES
from actors.image.obtain import load_from_disk
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
    sample = try_a_part(image, torch.device("cpu"))
    assert least <= sample.stored <= most
    assert (sample.seconds > 0) == (sample.stored < MOST_STORED)
    of_type = [slot.size for slot in image.layout.stored() if slot.dtype in FLOAT_TYPES]
    assert sample.size == sum(of_type)


def test_sample_of_a_quantised_image_is_of_what_is_not(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "demo", "demo", quantize="fp8-block")
    image = load_from_disk(checkpoint, image_key(checkpoint, torch.bfloat16))
    sample = try_a_part(image, torch.device("cpu"))
    assert 0.6 <= sample.stored <= 0.7
    assert 0 < sample.size < image.layout.total_bytes / 2
