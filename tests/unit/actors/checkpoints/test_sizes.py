"""Bytes of an image told by the headers of its checkpoint: those that the packed image has."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.sizes import image_sizes
from actors.image.layout import Layout
from actors.image.packer import checkpoint_dtype, load_reference, plan
from actors.quantization.formats import QUANTIZE_NAMES, QuantizeName, Unserved


def layout_of(checkpoint: Path, dtype: str) -> Layout:
    return plan(load_reference(checkpoint, checkpoint_dtype(checkpoint, dtype)))


def packed_sizes(layout: Layout) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for slot in layout.stored():
        if slot.kind == "parameter":
            sizes[slot.dtype] += slot.size
    return dict(sizes)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("recipe", QUANTIZE_NAMES)
def test_sizes_of_a_quantised_checkpoint_are_those_of_its_image(
    recipe: QuantizeName, dtype: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / recipe, "tiny", quantize=recipe)
    sizes, layout = image_sizes(checkpoint, dtype), layout_of(checkpoint, dtype)
    assert sizes == packed_sizes(layout)
    # Gaps and rotary frequencies are little beside them.
    assert 0 <= layout.total_bytes - sum(sizes.values()) < 0.01 * layout.total_bytes


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_sizes_of_a_plain_checkpoint_follow_the_type_that_it_is_served_in(
    dtype: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "plain", "tiny", dtype="bfloat16", shards=2)
    sizes = image_sizes(checkpoint, dtype)
    assert sizes == packed_sizes(layout_of(checkpoint, dtype))
    assert list(sizes) == ["bfloat16" if dtype == "auto" else dtype]


def test_files_that_have_no_readable_header_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(Unserved, match=r"^model\.safetensors is cut short or damaged"):
        image_sizes(tmp_path, "auto")
    save_file({"w": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with pytest.raises(Unserved, match="of type C64"):
        image_sizes(tmp_path, "auto")


@pytest.mark.parametrize("dtype", ["half", "torch.float16"])
def test_type_of_a_checkpoint_may_have_another_name(dtype: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "plain", "tiny", dtype="float16")
    expected = image_sizes(checkpoint, "auto")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    assert image_sizes(checkpoint, "auto") == expected


@pytest.mark.parametrize("dtype", ["int8", "floaty", 5, ["float16"]])
def test_type_that_there_is_not_is_told(dtype: object, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "plain", "tiny")
    (checkpoint / "config.json").write_text(json.dumps({"dtype": dtype}))
    with pytest.raises(ValueError, match=r"^config\.json has dtype .*; known are float64, "):
        image_sizes(checkpoint, "auto")
