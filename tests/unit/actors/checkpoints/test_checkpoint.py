"""Random checkpoints: complete, readable, the same every time."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from actors.checkpoints import making as checkpoint
from actors.checkpoints.making import SHAPES, write_checkpoint
from actors.checkpoints.recipes import RECIPE_FILE, DtypeName, ShapeName
from actors.checkpoints.writing import whole_directory, write_shard
from actors.quantization.formats import QUANTIZE_NAMES
from serve_app.cli.main import QuantizeName, app

TEXT = 'Hello, wörld!\n  你好 🙂 안녕, 3.14\tdef main(): return "x"'
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def _digests(directory: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", "tiny")


def test_files_have_the_mode_of_any_new_file(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    assert {file.stat().st_mode for file in tiny.iterdir()} == {other.stat().st_mode}


def test_transformers_reads_every_parameter(tiny: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_tokenizer_has_a_token_for_every_id_and_merges(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == AutoConfig.from_pretrained(tiny).vocab_size
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode()) / 1.5


def test_chat_template_is_chatml(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2
    assert (
        tokenizer.decode(ids, skip_special_tokens=True)
        == "system\nBe brief.\nuser\nHi\nassistant\n"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_output_goes_on_varies_and_depends_on_the_prompt(tmp_path: Path, tied: bool) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    outputs = []
    for prompt in ("Hello", "Who are you?"):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        outputs.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    assert [len(output) for output in outputs] == [48, 48]  # no end of sequence
    assert min(len(set(output)) for output in outputs) > 16
    assert outputs[0] != outputs[1]


def test_same_recipe_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert _digests(write_checkpoint(tmp_path / "again", "tiny")) == _digests(tiny)


def test_bytes_are_those_of_every_machine(tiny: Path) -> None:
    """Changes only together with RECIPE_VERSION."""
    assert checkpoint.RECIPE_VERSION == 1
    assert _digests(tiny)["model.safetensors"].startswith("5f27a3bd5296986d")


def test_bytes_do_not_depend_on_the_size_of_a_chunk(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoint._CHUNK_ELEMENTS, "cpu", 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _digests(write_checkpoint(tmp_path / "again", "tiny")) == _digests(tiny)


@pytest.mark.gpu
def test_cuda_gives_the_bytes_of_the_cpu(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _digests(write_checkpoint(tmp_path / "again", "tiny")) == _digests(tiny)


def test_another_seed_gives_other_weights(tiny: Path, tmp_path: Path) -> None:
    other = _digests(write_checkpoint(tmp_path / "other", "tiny", seed=1))
    assert other["model.safetensors"] != _digests(tiny)["model.safetensors"]
    assert other["tokenizer.json"] == _digests(tiny)["tokenizer.json"]


def test_weights_are_normally_distributed_and_uncorrelated(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    weights = model.model.layers[0].mlp.up_proj.weight.detach().flatten()
    assert weights.mean().abs() < 0.02 * weights.std()
    assert ((weights / weights.std()) ** 4).mean() == pytest.approx(2.7, abs=0.1)
    assert torch.corrcoef(torch.stack([weights[:-1], weights[1:]]))[0, 1].abs() < 0.02


def test_shards_split_the_weights_evenly_and_have_an_index(tiny: Path, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", "tiny", shards=3)
    sizes = [file.stat().st_size for file in sharded.glob("model-*-of-00003.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 2 * min(sizes)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    }
    whole, parts = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny, sharded))
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True)
    )


def test_tied_head_is_not_stored_twice(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tied", "tiny", tied=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_dtype_is_that_of_config_and_weights(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "half", "tiny", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.bfloat16


def test_complete_directory_is_left_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny")
    written = (directory / RECIPE_FILE).stat().st_mtime_ns
    time.sleep(0.01)
    write_checkpoint(directory, "tiny")
    assert (directory / RECIPE_FILE).stat().st_mtime_ns == written
    write_checkpoint(directory, "tiny", force=True)
    assert (directory / RECIPE_FILE).stat().st_mtime_ns > written


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "tokenizer.json").unlink(),
        lambda directory: (directory / "model.safetensors").write_bytes(b"short"),
    ],
    ids=["file missing", "file cut"],
)
def test_incomplete_directory_is_written_again(
    tiny: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny")
    damage(directory)
    write_checkpoint(directory, "tiny")
    assert _digests(directory) == _digests(tiny)


def test_other_recipe_replaces_the_directory(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny", shards=2)
    write_checkpoint(directory, "tiny")
    assert not list(directory.glob("model-*"))


def test_somebody_elses_files_are_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("theirs")
    with pytest.raises(ValueError, match=r"not ours, as config\.json; --force replaces them"):
        write_checkpoint(tmp_path, "tiny")
    assert (tmp_path / "config.json").read_text() == "theirs"


@pytest.mark.parametrize("name", ["NOTES.md", "eval-results/scores.json"])
def test_files_that_somebody_put_beside_ours_are_kept_without_force(
    tmp_path: Path, name: str
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny")
    file = directory / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("theirs")
    assert write_checkpoint(directory, "tiny") == directory, "it is the same one"
    first = Path(name).parts[0]
    with pytest.raises(ValueError, match=rf"not ours, as {first}; --force replaces them"):
        write_checkpoint(directory, "tiny", seed=1)
    assert file.read_text() == "theirs"
    write_checkpoint(directory, "tiny", seed=1, force=True)
    assert not file.exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"recipe": {}, "files": 3}'])
def test_directory_with_an_unreadable_record_is_kept_without_force(
    tmp_path: Path, text: str
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny")
    (directory / RECIPE_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"not ours, as .*; --force replaces them"):
        write_checkpoint(directory, "tiny")


def test_directory_that_one_is_in_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", "tiny")
    monkeypatch.chdir(directory)
    write_checkpoint(Path(), "tiny", seed=1)
    assert json.loads((directory / RECIPE_FILE).read_text())["recipe"]["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "disk" / "checkpoint", "tiny")
    link = tmp_path / "link"
    link.symlink_to(directory)
    write_checkpoint(link, "tiny", seed=1)
    assert link.is_symlink()
    assert json.loads((directory / RECIPE_FILE).read_text())["recipe"]["seed"] == 1


def test_what_an_earlier_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / f".checkpoint.{os.getpid()}.partial").mkdir()
    assert (write_checkpoint(tmp_path / "checkpoint", "tiny") / "config.json").is_file()


def test_directory_is_put_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "old").touch()
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("not now")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="not now"), whole_directory(directory):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint", "old"]


def test_full_disk_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match=r"^/.*/x\.safetensors cannot be written: No space left"):
        write_shard({}, tmp_path / "x.safetensors")


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "write_shard", fail)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path / "checkpoint", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_7b_shape_is_deepseeks(tmp_path: Path) -> None:
    config = checkpoint._config(SHAPES["deepseek-r1-distill-qwen-7b"], "bfloat16", tied=False)
    tensors = checkpoint._tensor_shapes(config)
    assert checkpoint._total_bytes(tensors, "bfloat16") == 15_231_233_024  # as its index says
    assert len(tensors) == 339
    checkpoint._write_tokenizer(tmp_path, config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == config.vocab_size == 152064
    assert tokenizer.decode([60_000]).strip().isalpha()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_command_prints_the_directory_alone_and_tells_progress_apart(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    result = CliRunner().invoke(app, ["make-checkpoint", str(directory), "--shape", "tiny"])
    assert (result.exit_code, result.stdout) == (0, f"{directory}\n")
    assert (directory / "model.safetensors").is_file()


def test_command_knows_every_shape_dtype_and_recipe() -> None:
    assert list(get_args(ShapeName)) == list(SHAPES)
    assert list(get_args(DtypeName)) == ["float32", "bfloat16", "float16"]
    assert get_args(QuantizeName) == QUANTIZE_NAMES
