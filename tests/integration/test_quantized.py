"""Quantised checkpoints: read, slept, woken and shared as others are, with the tokens of the dequantised model."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import save_file

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.quantizing import quantize_checkpoint
from actors.errors import WeightsCorrupted
from actors.holder.obtain import load_from_disk
from actors.image.attach import build_on_meta
from actors.image.image import WeightImage, private_buffers
from actors.image.packer import checkpoint_dtype, image_key
from actors.quantization.experts import QuantizedExperts
from actors.quantization.formats import QUANTIZE_NAMES, QuantizeName
from actors.quantization.linear import QuantizedLinear
from actors.quantization.summary import summary
from actors.worker.model_memory import ModelMemory
from serve_app import LLM, SamplingParams
from serve_app.llm import RequestOutput

PROMPTS = ([11, 22, 33], list(range(40, 80)))
GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=12, logprobs=3)
ENGINE = {"device": "cpu", "max_model_len": 256, "num_blocks": 32}

Array = npt.NDArray[np.int64]
Parts = Mapping[str, torch.Tensor]


# --- an independent reading of the files ---


def bits_of(words: torch.Tensor, bits: int, axis: int) -> Array:
    """The values in 32-bit words, the first in the lowest bits, along an axis."""
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    places = [(unsigned >> at) & (2**bits - 1) for at in range(0, 32, bits)]
    stacked = np.stack(places, axis + 1)
    shape = list(unsigned.shape)
    shape[axis] *= 32 // bits
    return stacked.reshape(shape)


def of_gptq(parts: Parts, config: dict[str, object]) -> Array | torch.Tensor:
    bits = int(str(config["bits"]))
    q_KN = bits_of(parts["qweight"], bits, 0)
    zero_GN = bits_of(parts["qzeros"], bits, 1)
    if config["checkpoint_format"] == "gptq":
        # One was taken from the whole word, so that a zero point of 0 borrows from the next.
        ones = sum(1 << at for at in range(0, 32, bits))
        words = (parts["qzeros"].numpy().astype(np.int64) + ones) & 0xFFFFFFFF
        zero_GN = bits_of(torch.from_numpy(words), bits, 1)
    group_K = parts["g_idx"].numpy()
    return scaled((q_KN - zero_GN[group_K]).T, parts["scales"][torch.from_numpy(group_K).long()].T)


def of_awq(parts: Parts, config: dict[str, object]) -> torch.Tensor:
    def columns(words: torch.Tensor) -> Array:
        nibbles = bits_of(words, 4, 1)
        order = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of eight columns is in its word
        return nibbles.reshape(len(nibbles), -1, 8)[:, :, order].reshape(nibbles.shape)

    q_KN, zero_GN = columns(parts["qweight"]), columns(parts["qzeros"])
    group_K = np.arange(len(q_KN)) // int(str(config["group_size"]))
    return scaled((q_KN - zero_GN[group_K]).T, parts["scales"][torch.from_numpy(group_K)].T)


def of_packed(parts: Parts, bits: int) -> torch.Tensor:
    q_NK = bits_of(parts["weight_packed"], bits, 1)
    N, K = q_NK.shape
    assert parts["weight_shape"].tolist() == [N, K]
    scale_NG = parts["weight_scale"]
    G = scale_NG.shape[1]
    in_files = parts.get("weight_g_idx")
    group_K = np.arange(K) // (K // G) if in_files is None else in_files.numpy()
    zeros = parts.get("weight_zero_point")
    zero_NG = np.full((N, G), 2 ** (bits - 1)) if zeros is None else bits_of(zeros, bits, 0)[:N]
    return scaled(q_NK - zero_NG[:, group_K], scale_NG[:, torch.from_numpy(group_K).long()])


def of_plain(parts: Parts) -> torch.Tensor:
    values = parts["weight"].float()
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert scale is not None
    if scale.dim() == 2 and "weight_scale_inv" in parts:
        blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values * blocks[: values.shape[0], : values.shape[1]].float()
    return values * scale.float()


def scaled(q_NK: Array, scale_NK: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(q_NK).float() * scale_NK.float()


def dequantise(source: Path, target: Path) -> Path:
    """The same checkpoint with plain weights."""
    config = json.loads((source / "config.json").read_text())
    how = config.pop("quantization_config")
    with safe_open(source / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        by_module.setdefault(module, {})[leaf] = tensor
    methods: dict[str, Callable[[Parts], torch.Tensor]] = {
        "qweight": lambda parts: (of_awq if how["quant_method"] == "awq" else of_gptq)(parts, how),
        "weight_packed": lambda parts: of_packed(
            parts, how["config_groups"]["group_0"]["weights"]["num_bits"]
        ),
        "weight_scale": of_plain,
        "weight_scale_inv": of_plain,
    }
    plain: dict[str, torch.Tensor] = {}
    quantised = 0
    for module, parts in by_module.items():
        found = next((method for leaf, method in methods.items() if leaf in parts), None)
        if found is None:
            plain.update({f"{module}.{leaf}": tensor for leaf, tensor in parts.items()})
            continue
        quantised += 1
        dtype = getattr(torch, config["dtype"])
        plain[f"{module}.weight"] = found(parts).to(dtype).contiguous()
        if "bias" in parts:
            plain[f"{module}.bias"] = parts["bias"]
    assert quantised % config["num_hidden_layers"] == 0
    assert quantised >= 7 * config["num_hidden_layers"]
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (target / path.name).write_bytes(path.read_bytes())
    (target / "config.json").write_text(json.dumps(config))
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    return target


# --- the tests ---


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[QuantizeName], Path]:
    root = tmp_path_factory.mktemp("quantised")
    return lambda recipe: write_checkpoint(root / recipe, "tiny", quantize=recipe)


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **SIZES, head_dim=32, intermediate_size=256, num_experts=4, moe_intermediate_size=256
    ),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=4),
}


@pytest.fixture(scope="module")
def mixture_of(
    checkpoint_of: Callable[[QuantizeName], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Mixture models of random weights, as transformers writes them."""
    root = tmp_path_factory.mktemp("mixtures")

    def make(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            torch.manual_seed(0)
            model = tf.AutoModelForCausalLM.from_config(MIXTURES[name](), dtype=torch.float32)
            for parameter in model.parameters():  # so that experts have their say
                parameter.data.normal_(0 if parameter.dim() > 1 else 1, 0.1)
            model.save_pretrained(directory)
            for file in checkpoint_of("fp8-block").glob("*token*"):
                shutil.copy(file, directory)
        return directory

    return make


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    return [told(output) for output in llm.generate([list(p) for p in PROMPTS], GREEDY)]


def told(output: RequestOutput) -> tuple[list[int], list[float]]:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    each = [logprob.logprob for step in completion.logprobs for logprob in step.values()]
    return list(completion.token_ids), each


@pytest.mark.parametrize("recipe", QUANTIZE_NAMES)
def test_answers_are_those_of_the_dequantised_model_also_behind_a_sleep(
    recipe: QuantizeName, checkpoint_of: Callable[[QuantizeName], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(recipe)
    check_answers(checkpoint, dequantise(checkpoint, tmp_path / "plain"))


def check_answers(checkpoint: Path, dequantised: Path) -> None:
    """Those of the dequantised model, and the same to the last bit behind sleeps at both levels."""
    with LLM(dequantised, engine=ENGINE) as plain:
        expected = answers(plain)
    with LLM(checkpoint, engine=ENGINE) as llm:
        first = answers(llm)
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in expected]
        for (_, logprobs), (_, wanted) in zip(first, expected, strict=True):
            assert logprobs == pytest.approx(wanted, abs=2**-6)  # merged projections sum otherwise
        for level in (1, 2):
            llm.sleep(level)
            assert llm.is_sleeping
            llm.wake_up()
            assert answers(llm) == first  # to the last bit


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    "recipe", ["gptq-4-128", "gptq-4-128-order", "awq-4-128", "ct-int8", "fp8-block", "fp8-tensor"]
)
def test_experts_are_quantised_too(
    name: str, recipe: QuantizeName, mixture_of: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = quantize_checkpoint(tmp_path / "quantised", mixture_of(name), recipe)
    check_answers(checkpoint, dequantise(checkpoint, tmp_path / "plain"))
    model = build_on_meta(checkpoint, checkpoint_dtype(checkpoint, "auto"))
    experts = [each for each in model.modules() if isinstance(each, QuantizedExperts)]
    assert len(experts) == SIZES["num_hidden_layers"]
    stacks = 2 if recipe.endswith("order") else 1  # each of gate and up has an order of its own
    assert {len(each.gate_up_proj) for each in experts} == {stacks}
    linear = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    assert {each.made_for_quantised for each in linear} == {recipe.startswith("fp8")}


def test_the_log_tells_how_weights_are_multiplied(
    mixture_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = quantize_checkpoint(tmp_path / "q", mixture_of("qwen3_moe"), "gptq-4-32-asym")
    model = build_on_meta(checkpoint, torch.float16)
    kind = "int4 in groups of 32 with zero points"
    assert summary(model, torch.device("cpu")) == (
        f"quantised weights: 4 of {kind}, 4 of {kind} for experts; written out for each product"
    )
    assert summary(torch.nn.Linear(1, 1), torch.device("cpu")) is None
    pytest.importorskip("triton")
    for on_hopper, rows in ((False, 256), (True, 1024)):
        monkeypatch.setattr("actors.quantization.kernels.is_hopper", lambda _, on=on_hopper: on)
        on_a_card = summary(model, torch.device("cuda"))
        assert on_a_card is not None
        end = f"fused products up to {rows} rows (int4), written out for more"
        assert on_a_card.endswith(end)


@pytest.mark.parametrize(("recipe", "is_made_for_it"), [("fp8-block", True), ("ct-int8", False)])
def test_quantised_activations_change_nothing_on_a_cpu_and_are_told_to_be_of_no_effect(
    recipe: QuantizeName,
    is_made_for_it: bool,
    checkpoint_of: Callable[[QuantizeName], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = checkpoint_of(recipe)
    with LLM(checkpoint, engine=ENGINE) as llm:
        expected = answers(llm)
    assert "quantize_activations" not in caplog.text  # nobody has asked for it
    caplog.clear()
    with LLM(checkpoint, engine=ENGINE | {"quantize_activations": True}) as llm:
        assert answers(llm) == expected
    told = [r for r in caplog.records if "quantize_activations is of no effect" in r.getMessage()]
    assert len(told) == (not is_made_for_it)


def test_experts_that_are_quantised_in_part_are_refused(
    mixture_of: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = quantize_checkpoint(tmp_path / "quantised", mixture_of("qwen3_moe"), "ct-int8")
    file = checkpoint / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    one = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[one] = tensors[one].float() * tensors.pop(f"{one}_scale").float()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts of Qwen3MoeForCausalLM has"):
        build_on_meta(checkpoint, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["gptq-4-128", "awq-4-128", "ct-int8", "fp8-block"])
def test_a_zeroed_scale_fails_the_wake_and_a_replica_has_the_bytes_of_the_image(
    recipe: QuantizeName, checkpoint_of: Callable[[QuantizeName], Path]
) -> None:
    checkpoint = checkpoint_of(recipe)
    dtype = checkpoint_dtype(checkpoint, "auto")
    image = load_from_disk(checkpoint, image_key(checkpoint, dtype))
    assert recipe.partition("-")[0] in str(image.manifest.key) or recipe.startswith("ct-")
    assert woken(checkpoint, image) == [bytes(segment) for segment in image.segments]

    slot = next(each for each in image.layout.tensors if each.name.endswith(".scales"))
    payloads = private_buffers([len(segment) for segment in image.segments])
    for payload, segment in zip(payloads, image.segments, strict=True):
        payload[:] = segment
    payloads[slot.segment][slot.offset : slot.offset + 2] = bytes(2)
    assert payloads[slot.segment] != image.segments[slot.segment]
    with pytest.raises(WeightsCorrupted):
        woken(checkpoint, WeightImage(image.manifest, payloads, "disk"))


def woken(checkpoint: Path, image: WeightImage) -> list[bytes]:
    """What another replica has in memory after a wake."""
    model = build_on_meta(checkpoint, checkpoint_dtype(checkpoint, "auto"))
    memory = ModelMemory(model, image, 0, "cpu")
    try:
        memory.map()
        memory.unmap(1)
        memory.begin_wake()
        memory.check()
        sizes = [segment.size for segment in image.layout.segments]
        return [bytes(memory._weights.bytes_of(i, n).numpy()) for i, n in enumerate(sizes)]
    finally:
        memory.unmap(2)
        memory.host.close_link()


def test_a_quantised_image_is_smaller_and_no_other_s(
    checkpoint_of: Callable[[QuantizeName], Path],
) -> None:
    checkpoint = checkpoint_of("gptq-4-128")
    key = image_key(checkpoint, torch.float16)
    assert "gptq-int4-128:v2" in str(key)
    layout = load_from_disk(checkpoint, key).layout
    names = {slot.name.removeprefix("model.layers.0."): slot.dtype for slot in layout.tensors}
    for name in ("self_attn.q_proj.product", "self_attn.o_proj", "mlp.gate_proj.product"):
        assert names[f"{name}.weight"] == "uint8"
    assert "self_attn.k_proj.weight" not in names  # computed with the queries
    stored = sum(slot.size for slot in layout.stored() if "_proj." in slot.name)
    shape = next(s.shape for s in layout.tensors if s.name.endswith("down_proj.weight"))
    assert shape == (128, 256 // 2)
    plain = sum(
        2 * 2 * slot.shape[0] * slot.shape[1]
        for slot in layout.tensors
        if slot.name.endswith(("_proj.weight", "_proj.product.weight"))
    )
    assert stored < 0.3 * plain
