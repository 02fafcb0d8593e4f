"""What `sleepserve make-checkpoint` refuses; what it makes is in tests/unit/actors/checkpoints."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        (["--variant-of", "base", "--seed", "1"], ["--shape", "tiny"]),
        (["--variant-of", "base", "--seed", "1"], ["--weights-of", "other"]),
        (["--variant-of", "base", "--seed", "1"], ["--quantize", "awq-4-128"]),
        (["--variant-of", "base", "--seed", "1"], ["--dtype", "float32"]),
        (["--variant-of", "base", "--seed", "1"], ["--shards", "2"]),
        (["--variant-of", "base", "--seed", "1"], ["--tied"]),
        (["--variant-of", "base", "--seed", "1"], ["--force"]),
        (["--weights-of", "base", "--quantize", "awq-4-128"], ["--shape", "tiny"]),
        (["--weights-of", "base", "--quantize", "awq-4-128"], ["--dtype", "float32"]),
        (["--weights-of", "base", "--quantize", "awq-4-128"], ["--shards", "2"]),
        (["--weights-of", "base", "--quantize", "awq-4-128"], ["--tied"]),
        (["--weights-of", "base", "--quantize", "awq-4-128"], ["--seed", "0"]),
    ],
)
def test_option_that_would_do_nothing_is_refused(
    tmp_path: Path, mode: list[str], option: list[str]
) -> None:
    made = tmp_path / "made"
    refused = CliRunner().invoke(app, ["make-checkpoint", str(made), *mode, *option])
    assert refused.exit_code == 2
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert f"{mode[0]} does not take {option[0]}" in told
    assert not made.exists()


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_file_is_left_as_it_is(tmp_path: Path, options: list[str]) -> None:
    file = tmp_path / "theirs"
    file.write_text("theirs")
    words = ["make-checkpoint", str(file), "--shape", "tiny", *options]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "is a file." in " ".join(refused.stderr.replace("│", " ").split())
    assert file.read_text() == "theirs"


def test_damaged_weights_are_told_in_one_line(tmp_path: Path, tiny_checkpoint: Path) -> None:
    base = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"no header")
    made = tmp_path / "made"
    words = ["make-checkpoint", str(made), "--weights-of", str(base), "--quantize", "awq-4-128"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    told = refused.stderr.strip()  # after the end of the bar
    assert told.startswith("safetensors: ")
    assert "\n" not in told
    assert not made.exists()
