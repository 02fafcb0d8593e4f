"""Module -> layout -> packed bytes -> module on an arena, for several architectures."""

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.model_config import own_dtype, read_config
from actors.engine.model.merged_projections import merge_projections
from actors.errors import LayoutMismatch, WeightsCorrupted
from actors.image import packer
from actors.image.attach import attach, build_on_meta
from actors.image.image import WeightImage
from actors.image.layout import TENSOR_ALIGNMENT, Layout, Manifest
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.text.codec import TextCodec

DRIVER = CpuDriver()
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen2 tied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=16),
    "phi3": lambda: Phi3Config(**SMALL),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=8),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


@pytest.fixture(params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[request.param](), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return tmp_path


def packed(checkpoint: Path) -> tuple[PreTrainedModel, WeightImage]:
    dtype = packer.checkpoint_dtype(checkpoint, "auto")
    reference = packer.load_reference(checkpoint, dtype)
    layout = packer.plan(reference)
    # Dirty buffers: the packer must zero the gaps, or digests would differ from run to run.
    buffers = [memoryview(bytearray(b"\xaa" * segment.size)) for segment in layout.segments]
    digests, checksums = packer.pack(reference, layout, buffers)
    key = packer.image_key(checkpoint, dtype)
    manifest = Manifest(key, layout, digests, checksums)
    return reference, WeightImage(manifest, buffers, "disk")


def on_arena(checkpoint: Path, image: WeightImage) -> tuple[PreTrainedModel, DeviceArena]:
    model = build_on_meta(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))
    arena = DeviceArena(DRIVER, [segment.size for segment in image.layout.segments])
    attach(model, image.layout, arena)
    return model, arena


def fill(arena: DeviceArena, image: WeightImage) -> None:
    arena.map()
    payloads = {i: image.segment(i) for i in range(len(arena.spans))}
    arena.restore(DRIVER.open_link(list(payloads.values())), payloads).finish()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def test_projections_of_one_input_are_neighbours_in_an_image(tmp_path: Path) -> None:
    config = Qwen2Config(**SMALL | {"hidden_size": 512, "intermediate_size": 640})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model, _ = on_arena(tmp_path, packed(tmp_path)[1])
    assert merge_projections(model) == 2 * config.num_hidden_layers


def test_module_on_an_arena_computes_the_same_bits_over_sleep_and_wake(checkpoint: Path) -> None:
    reference, image = packed(checkpoint)
    image.verify()
    model, arena = on_arena(checkpoint, image)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    expected = logits(reference)
    for _ in range(2):
        fill(arena, image)
        assert torch.equal(logits(model), expected)
        arena.unmap()
        assert all(not bool(p.any()) for p in model.parameters())  # nothing was left behind
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses


def test_every_parameter_and_buffer_is_a_view_of_the_arena(checkpoint: Path) -> None:
    reference, image = packed(checkpoint)
    model, arena = on_arena(checkpoint, image)
    inside = range(arena.address, arena.address + arena.size)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, name
        assert tensor.data_ptr() in inside, name
        assert tensor.data_ptr() % TENSOR_ALIGNMENT == 0, name
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in reference.named_buffers()]
    assert set(model.state_dict()) == set(reference.state_dict())  # persistence flags are kept


def test_ties_stay_ties(checkpoint: Path) -> None:
    reference, image = packed(checkpoint)
    model, _ = on_arena(checkpoint, image)
    tied = reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    aliases = [slot for slot in image.layout.tensors if slot.alias_of is not None]
    assert bool(aliases) is tied


def test_segments_are_in_forward_order_and_do_not_overlap(checkpoint: Path) -> None:
    _, image = packed(checkpoint)
    names = [segment.name for segment in image.layout.segments]
    assert names == ["embedding", "layer.0", "layer.1", "layer.2", "head"]
    ends = dict.fromkeys(range(len(names)), 0)
    for slot in sorted(image.layout.stored(), key=lambda slot: (slot.segment, slot.offset)):
        assert slot.offset >= ends[slot.segment]
        ends[slot.segment] = slot.offset + slot.size
        assert ends[slot.segment] <= image.layout.segments[slot.segment].size


def test_packing_twice_gives_the_same_digests(checkpoint: Path) -> None:
    assert packed(checkpoint)[1].manifest == packed(checkpoint)[1].manifest


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(ARCHITECTURES["qwen2"]()).save_pretrained(tmp_path)
    return tmp_path


def test_one_changed_byte_is_found_and_named(qwen2: Path) -> None:
    _, image = packed(qwen2)
    buffers = [memoryview(bytearray(image.segment(i))) for i in range(5)]
    buffers[2][17] ^= 1
    with pytest.raises(WeightsCorrupted, match=r"segment layer\.1 "):
        WeightImage(image.manifest, buffers, "image").verify()


def test_image_of_another_size_is_refused(qwen2: Path) -> None:
    _, image = packed(qwen2)
    buffers = [image.segment(i) for i in range(4)] + [image.segment(4)[:-256]]
    with pytest.raises(LayoutMismatch, match="manifest"):
        WeightImage(image.manifest, buffers, "image")


def test_layout_of_another_architecture_is_refused(qwen2: Path, tmp_path: Path) -> None:
    _, image = packed(qwen2)
    slots = [replace(slot) for slot in image.layout.tensors]
    slots[3] = replace(slots[3], name="model.layers.0.unheard_of")
    wrong = Layout(image.layout.segments, tuple(slots))
    model = build_on_meta(qwen2, torch.float32)
    arena = DeviceArena(CpuDriver(), [segment.size for segment in wrong.segments])
    with pytest.raises(LayoutMismatch, match="unheard_of"):
        attach(model, wrong, arena)


def test_tensor_that_is_no_parameter_and_no_buffer_is_refused(qwen2: Path) -> None:
    model = packer.load_reference(qwen2, torch.float32)
    model.model.layers[1].secret = torch.ones(3)
    with pytest.raises(LayoutMismatch, match=r"model\.layers\.1\.secret"):
        packer.plan(model)


def test_model_without_a_list_of_layers_is_refused(qwen2: Path) -> None:
    model = packer.load_reference(qwen2, torch.float32)
    model.model.layers = nn.Identity()
    with pytest.raises(LayoutMismatch, match="no list of 3 decoder layers"):
        packer.plan(model)


def test_checkpoint_of_no_language_model_is_refused_in_a_line(tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="no causal language model of type qwen2_vl: not supp"
    ) as told:
        build_on_meta(tmp_path, torch.float32)
    assert len(str(told.value)) < 100


@pytest.mark.parametrize("kind", ["frobnicate", None])
def test_checkpoint_of_an_unknown_architecture_is_refused_in_a_line(
    qwen2: Path, kind: str | None
) -> None:
    config = json.loads((qwen2 / "config.json").read_text())
    (qwen2 / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(ValueError, match=f"^transformers has no model of type {kind}: not supp"):
        build_on_meta(qwen2, torch.float32)


def _configure(checkpoint: Path, **values: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_configuration_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    """But for what is left out, see below."""
    ARCHITECTURES[kind]().save_pretrained(tmp_path)
    assert read_config(tmp_path) == AutoConfig.from_pretrained(tmp_path)


def test_mistral_with_kinds_of_layers_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    MistralConfig(**SMALL, sliding_window=16).save_pretrained(tmp_path)
    _configure(tmp_path, layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert read_config(tmp_path) == AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("read", [packer.load_reference, build_on_meta])
@pytest.mark.parametrize(
    "values",
    [
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "somebody/their-kernels"},
        {"attn_implementation": {"": "somebody/their-kernels"}},
        {"_attn_implementation_internal": "somebody/their-kernels"},
        {"attribute_map": {"used": "_attn_implementation"}, "used": "somebody/their-kernels"},
        {"_experts_implementation": "somebody/their-kernels"},
        {"experts_implementation": "somebody/their-kernels"},
    ],
    ids=str,
)
def test_what_computes_a_model_is_not_for_its_checkpoint_to_say(
    qwen2: Path, read: Callable[[Path, torch.dtype], PreTrainedModel], values: dict[str, object]
) -> None:
    """transformers would fetch the kernels of a repository and run them."""
    expected = read(qwen2, torch.float32).config
    _configure(qwen2, **values)
    config = read(qwen2, torch.float32).config
    assert config._attn_implementation == expected._attn_implementation
    assert config._experts_implementation == expected._experts_implementation


def test_nor_in_its_parts(tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    kernels = {"_attn_implementation": "somebody/their-kernels"}
    parts = {name: written[name] | kernels for name in ("text_config", "vision_config")}
    _configure(tmp_path, **parts)
    config = read_config(tmp_path)
    for each in (config, config.text_config, config.vision_config):
        assert each._attn_implementation is None


@pytest.mark.parametrize("read", [packer.load_reference, build_on_meta])
@pytest.mark.parametrize(
    "values",
    [
        {"hidden_act": "nope"},
        {"hidden_size": "abc"},
        {"hidden_size": -1},
        {"num_attention_heads": 0},
        {"num_hidden_layers": None},
        {"num_hidden_layers": 10**9},
        {"pad_token_id": 10**9},
        {"rope_parameters": {"rope_type": "unheard of"}},
        {"dtype": 5},
        {"dtype": "int3"},
    ],
    ids=str,
)
def test_wrong_values_of_a_configuration_are_told_in_a_line(
    qwen2: Path, read: Callable[[Path, torch.dtype], object], values: dict[str, object]
) -> None:
    _configure(qwen2, **values)
    with pytest.raises(ValueError, match=r"^/.*/config\.json: no model can be made of it") as told:
        read(qwen2, torch.float32)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_configuration_that_cannot_be_read_is_named(qwen2: Path, text: str) -> None:
    (qwen2 / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^/.*/config\.json is unreadable \("):
        packer.checkpoint_dtype(qwen2, "auto")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("half", torch.float16),
        ("float", torch.float32),
        ("torch.bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("double", torch.float64),
        (None, torch.float32),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_type_of_a_checkpoint_has_several_names(
    qwen2: Path, key: str, name: str | None, expected: torch.dtype
) -> None:
    _configure(qwen2, **{"dtype": None, key: name})
    assert packer.checkpoint_dtype(qwen2, "auto") is expected
    assert own_dtype(qwen2) == str(expected).removeprefix("torch.")


def test_model_that_is_far_larger_than_its_files_is_refused_before_it_has_memory(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(packer.AutoModelForCausalLM, "from_pretrained", allocate)
    _configure(qwen2, vocab_size=40_000_000)
    with pytest.raises(
        ValueError,
        match=r"/config\.json is of a model of \d+ million numbers, and the files have 0 m",
    ):
        packer.load_reference(qwen2, torch.float32)


def test_labels_of_classifiers_are_not_counted_out(qwen2: Path) -> None:
    _configure(qwen2, num_labels=10**10)
    assert read_config(qwen2).num_labels == 2


def test_key_changes_with_the_checkpoint_and_the_dtype(qwen2: Path) -> None:
    key = packer.image_key(qwen2, torch.float32)
    assert key == packer.image_key(qwen2, torch.float32)
    assert key != packer.image_key(qwen2, torch.bfloat16)
    weights = qwen2 / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert key != packer.image_key(qwen2, torch.float32)


def _rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda weights: weights.pop(UP), f"the files have no {UP}, which Qwen2ForCausalLM has"),
        (
            lambda weights: [weights.pop(f"model.layers.{n}.mlp.up_proj.weight") for n in range(3)],
            "the files have no model.layers.0.mlp.up_proj.weight and 2 more, which",
        ),
        (
            lambda weights: weights.update({UP: torch.zeros(4, 8)}),
            f"{UP} is [4, 8] in the files, and [48, 32] in Qwen2ForCausalLM",
        ),
    ],
)
def test_weights_that_the_files_do_not_have_are_not_made_up(
    qwen2: Path, change: Callable[[dict[str, torch.Tensor]], object], told: str
) -> None:
    """transformers would draw random ones, and say so on 10 lines."""
    _rewrite(qwen2, change)
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        packer.load_reference(qwen2, torch.float32)
    assert "\n" not in str(error.value)


def test_weights_that_nobody_wants_are_no_mistake(qwen2: Path) -> None:
    """Of parts that only training needs, for example."""
    before = packer.load_reference(qwen2, torch.float32).state_dict()
    _rewrite(qwen2, lambda weights: weights.update({"model.layers.9.extra": torch.zeros(2)}))
    after = packer.load_reference(qwen2, torch.float32).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_file_that_is_cut_short_is_named(qwen2: Path) -> None:
    file = qwen2 / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(
        ValueError, match=r": model\.safetensors is cut short or damaged \(.*\); fetch"
    ):
        packer.load_reference(qwen2, torch.float32)


def test_pickled_weights_are_never_read(qwen2: Path) -> None:
    """Whatever safetensors files lie beside them."""
    state = packer.load_reference(qwen2, torch.float32).state_dict()
    torch.save(state, qwen2 / "pytorch_model.bin")
    (qwen2 / "model.safetensors").rename(qwen2 / "x.safetensors")
    with pytest.raises(ValueError, match=r"is not a checkpoint: there is no model\.safetensors"):
        packer.load_reference(qwen2, torch.float32)


@pytest.mark.parametrize("name", ["w.bin", "../model.safetensors", "parts/model.safetensors"])
def test_index_that_names_anything_but_safetensors_files_beside_it_is_refused(
    qwen2: Path, name: str
) -> None:
    state = packer.load_reference(qwen2, torch.float32).state_dict()
    torch.save(state, qwen2 / "w.bin")
    (qwen2 / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, name)}
    (qwen2 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"names '{name}': not supported"):
        packer.load_reference(qwen2, torch.float32)


def test_image_of_a_checkpoint_with_another_index_is_another(qwen2: Path) -> None:
    key = packer.image_key(qwen2, torch.float32)
    (qwen2 / "model.safetensors.index.json").write_text("{}")
    assert key != packer.image_key(qwen2, torch.float32)


@pytest.mark.parametrize("read", [packer.load_reference, build_on_meta])
def test_quantised_weights_are_refused_before_they_are_read(
    qwen2: Path, read: Callable[[Path, torch.dtype], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers ignores fp8 over plain weights, and wants a package for others."""
    config = json.loads((qwen2 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (qwen2 / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"quantised \(fp8, by config\.json\): no weight of the files is"
    ):
        read(qwen2, torch.bfloat16)


def read_text(checkpoint: Path, _: torch.dtype) -> TextCodec:
    return TextCodec.load(checkpoint)


@pytest.mark.parametrize("read", [packer.load_reference, build_on_meta, read_text])
def test_code_of_a_checkpoint_is_never_run(
    tmp_path: Path,
    read: Callable[[Path, torch.dtype], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor is anybody asked whether it may be."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    config_file = write_checkpoint(tmp_path, "tiny") / "config.json"
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"model_type": "theirs", "auto_map": classes}))
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match=r"contains custom code|own code is never run: not supp"):
        read(tmp_path, torch.float32)
    assert "Do you wish" not in capsys.readouterr().out


def test_dtype_conversion_happens_before_packing(qwen2: Path) -> None:
    reference = packer.load_reference(qwen2, torch.bfloat16)
    layout = packer.plan(reference)
    kinds = {(slot.kind, slot.dtype) for slot in layout.tensors}
    assert kinds == {("parameter", "bfloat16"), ("buffer", "float32")}  # inv_freq is never rounded


def test_models_that_are_loaded_at_the_same_time_come_out_right(tmp_path: Path) -> None:
    """transformers builds with a default dtype that is everybody's."""
    paths = {}
    for dtype in (torch.bfloat16, torch.float32):
        config = Qwen2Config(**SMALL)
        paths[dtype] = tmp_path / str(dtype)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(paths[dtype])

    def digests(dtype: torch.dtype) -> list[bytes]:
        packer.load_reference(paths[dtype], dtype)
        build_on_meta(paths[dtype], dtype)
        model = packer.load_reference(paths[dtype], dtype)
        return [bytes(t.contiguous().view(torch.uint8).numpy()) for t in model.buffers()]

    alone = {dtype: digests(dtype) for dtype in paths}
    with ThreadPoolExecutor(6) as pool:
        together = [(dtype, pool.submit(digests, dtype)) for dtype in list(paths) * 12]
        for dtype, found in together:
            assert found.result() == alone[dtype]
    assert torch.get_default_dtype() is torch.float32
