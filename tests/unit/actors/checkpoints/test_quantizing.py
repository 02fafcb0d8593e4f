"""Checkpoints quantised from given weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from actors.checkpoints.directory import missing_from_checkpoint, quantized
from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.quantizing import quantize_checkpoint
from actors.checkpoints.recipes import RECIPE_FILE
from actors.checkpoints.variants import write_variant
from serve_app.cli.main import app


def tensors_of(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part, tensor = file.get_slice(name), file.get_tensor(name)
                data = tensor.flatten().view(torch.uint8).numpy().tobytes()
                found[name] = part.get_dtype(), part.get_shape(), data
    return found


def test_it_is_what_random_weights_give_quantised(tmp_path: Path) -> None:
    """Of several files."""
    plain = write_checkpoint(tmp_path / "plain", "tiny", dtype="float32", shards=3)
    expected = write_checkpoint(tmp_path / "made", "tiny", dtype="float32", quantize="ct-w4a16")
    made = quantize_checkpoint(tmp_path / "of", plain, "ct-w4a16")
    quantised = {name: each for name, each in tensors_of(expected).items() if "_proj." in name}
    found = tensors_of(made)
    for name, each in quantised.items():
        if name.endswith(".bias"):
            continue
        assert found[name] == each, name
    assert {kind for kind, _, _ in found.values()} == {"I32", "I64", "BF16"}
    assert missing_from_checkpoint(made) is None
    assert len({file.stat().st_mode for file in made.iterdir()}) == 1
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert not (made / RECIPE_FILE).exists()  # it tells of the plain one
    checkpoint = quantized(made)
    assert checkpoint is not None
    assert len(checkpoint.projections) == 4 * 7


def test_what_it_does_not_take(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "tiny")
    made = quantize_checkpoint(tmp_path / "made", plain, "ct-int8")
    with pytest.raises(ValueError, match="made is quantised already"):
        quantize_checkpoint(tmp_path / "again", made, "ct-int8")
    variant = write_variant(tmp_path / "variant", plain, 1)
    with pytest.raises(ValueError, match="is a variant; name the checkpoint"):
        quantize_checkpoint(tmp_path / "again", variant, "ct-int8")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        quantize_checkpoint(tmp_path / "again", tmp_path, "ct-int8")
    assert not (tmp_path / "again").exists()
    with pytest.raises(ValueError, match="has files in it; --force replaces them"):
        quantize_checkpoint(made, plain, "awq-4-128")
    quantize_checkpoint(made, plain, "awq-4-128", force=True)
    assert "awq" in (made / "config.json").read_text()


def test_one_file_that_an_index_names_stays_so_and_others_are_left_out(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "tiny")
    shard = plain / "model-00001-of-00001.safetensors"
    names = list(tensors_of(plain))
    (plain / "model.safetensors").rename(shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard.name)}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(shard, plain / "consolidated.safetensors")
    made = quantize_checkpoint(tmp_path / "made", plain, "ct-w4a16")
    assert missing_from_checkpoint(made) is None
    assert [file.name for file in made.glob("*.safetensors")] == [shard.name]
    checkpoint = quantized(made)
    assert checkpoint is not None
    assert len(checkpoint.projections) == 4 * 7


def test_source_whose_index_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "tiny")
    (plain / "model.safetensors").rename(tmp_path / "w.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "../w.safetensors"}}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names '\.\./w\.safetensors': not supported"):
        quantize_checkpoint(tmp_path / "made", plain, "ct-w4a16")


def test_the_command(tmp_path: Path) -> None:
    plain = str(write_checkpoint(tmp_path / "plain", "tiny"))
    words = ["make-checkpoint", str(tmp_path / "made"), "--weights-of", plain]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "--weights-of needs --quantize" in " ".join(refused.output.split())
    made = CliRunner().invoke(app, [*words, "--quantize", "fp8-block"])
    assert (made.exit_code, made.stdout) == (0, f"{tmp_path / 'made'}\n")
