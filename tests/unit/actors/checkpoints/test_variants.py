"""Models that share one file of weights and are told apart all the same."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.variants import VARIANT_FILE, steps, variant_of, write_variant
from actors.holder.obtain import load_from_disk
from actors.image.packer import checkpoint_dtype, image_key, load_reference
from serve_app.cli.main import app


def packed(checkpoint: Path) -> dict[str, bytes]:
    image = load_from_disk(checkpoint, image_key(checkpoint, checkpoint_dtype(checkpoint, "auto")))
    names = (segment.name for segment in image.layout.segments)
    return {name: bytes(image.segment(i)) for i, name in enumerate(names)}


def test_every_segment_of_every_variant_is_another_and_the_files_are_one(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    before = (tiny_checkpoint / "model.safetensors").read_bytes()
    variants = [write_variant(tmp_path / str(i), tiny_checkpoint, i) for i in (1, 2, 3)]
    images = [packed(each) for each in (tiny_checkpoint, *variants)]
    for name in images[0]:
        assert len({image[name] for image in images}) == len(images), name
    assert packed(write_variant(tmp_path / "again", tiny_checkpoint, 2)) == images[2]
    assert (tiny_checkpoint / "model.safetensors").read_bytes() == before
    assert all((each / "model.safetensors").is_symlink() for each in variants)


def test_rows_are_rotated_and_what_is_tied_stays_so(tiny_checkpoint: Path, tmp_path: Path) -> None:
    base = load_reference(tiny_checkpoint, torch.float32).state_dict()
    rotated = load_reference(
        write_variant(tmp_path / "v", tiny_checkpoint, 5), torch.float32
    ).state_dict()
    for name, tensor in base.items():
        expected = torch.roll(tensor, steps(5, tensor.shape[-1]), -1)
        assert torch.equal(rotated[name], expected), name


def test_steps_of_small_numbers_differ() -> None:
    assert len({steps(number, 1536) for number in range(1, 65)}) == 64
    assert steps(3, 1) == 0
    assert 0 < steps(10**9, 2) < 2


def test_another_number_is_another_image(tiny_checkpoint: Path, tmp_path: Path) -> None:
    dtype = torch.float32
    directory = write_variant(tmp_path / "v", tiny_checkpoint, 1)
    first = image_key(directory, dtype)
    (directory / VARIANT_FILE).write_text(json.dumps({"number": 1000}))
    assert image_key(directory, dtype) != first
    assert first != image_key(tiny_checkpoint, dtype)


def test_a_variant_is_written_again_and_nothing_else_is_overwritten(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    directory = write_variant(tmp_path / "v", tiny_checkpoint, 1)
    write_variant(directory, tiny_checkpoint, 2)
    assert variant_of(directory) == 2
    assert variant_of(tiny_checkpoint) is None
    with pytest.raises(ValueError, match="exists and is not a variant"):
        write_variant(tiny_checkpoint, tiny_checkpoint, 1)
    with pytest.raises(ValueError, match="is a variant itself"):
        write_variant(tmp_path / "w", directory, 1)
    with pytest.raises(ValueError, match="1 or more, not 0"):
        write_variant(tmp_path / "w", tiny_checkpoint, 0)
    with pytest.raises(ValueError, match="is not a checkpoint: the directory does not exist"):
        write_variant(tmp_path / "w", tmp_path / "nowhere", 1)


@pytest.mark.parametrize("text", ["{}", "[]", '{"number": null}', '{"number": 1e999}', "x"])
def test_variant_whose_number_cannot_be_read_is_refused_in_a_line(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / VARIANT_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"^.*/{VARIANT_FILE} is unreadable \(\w+: .*\)$"):
        variant_of(tmp_path)


def test_variant_of_another_base_has_no_file_of_the_first(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", "tiny", seed=9, shards=2)
    directory = write_variant(tmp_path / "v", tiny_checkpoint, 1)
    write_variant(directory, sharded, 1)
    assert not (directory / "model.safetensors").exists()
    assert packed(directory) == packed(write_variant(tmp_path / "fresh", sharded, 1))


def test_the_command_makes_one_or_says_what_it_needs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ["make-checkpoint", str(tmp_path / "v"), "--variant-of", str(tiny_checkpoint)]
    made = CliRunner().invoke(app, [*words, "--seed", "4"])
    assert (made.exit_code, made.stdout) == (0, f"{tmp_path / 'v'}\n")
    assert variant_of(tmp_path / "v") == 4
    neither = CliRunner().invoke(app, ["make-checkpoint", str(tmp_path / "w")])
    assert neither.exit_code == 2
    assert "--shape, --weights-of or --variant-of" in neither.output
