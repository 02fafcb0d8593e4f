"""Quantised weights that are not served right: one line with format, file and reason, before any weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.checkpoints.directory import unsupported_weights
from actors.checkpoints.making import write_checkpoint
from actors.image import packer
from actors.image.attach import build_on_meta
from actors.quantization.formats import QuantizeName, StoredTensor, read_format
from actors.quantization.making import quantizer

NAME = "model.layers.0.mlp.up_proj"


def gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, **changes}


def awq(**changes: Any) -> dict[str, Any]:
    own = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    return {**own, "zero_point": True, **changes}


def ct(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {**own, **(weights or {})}, **(group or {})}
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        **changes,
    }


BY_CONFIG: dict[str, tuple[dict[str, Any], str, str]] = {
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes",
        "only bitsandbytes' own kernels",
    ),
    "int8 of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes",
        "only bitsandbytes' own kernels",
    ),
    "awq gemv": (awq(version="gemv"), "awq", "version gemv; gemm is"),
    "awq gemv_fast": (awq(version="gemv_fast"), "awq", "version gemv_fast"),
    "awq marlin": (awq(version="marlin"), "awq", "version marlin"),
    "awq of 8 bits": (awq(bits=8), "awq", "8 bits; 4 are"),
    "awq without zero points": (awq(zero_point=False), "awq", "without zero points"),
    "gptq of 3 bits": (gptq(bits=3), "gptq", "3 bits; 4 and 8 are"),
    "gptq of 2 bits": (gptq(bits=2), "gptq", "2 bits; 4 and 8 are"),
    "gptq of 3 bits in part": (
        gptq(dynamic={r"+:.*\.down_proj": {"bits": 3}}),
        "gptq",
        "3 bits; 4 and 8 are",
    ),
    "gptq marlin": (gptq(checkpoint_format="marlin"), "gptq", "checkpoint_format marlin"),
    "gptq marlin, older": (gptq(is_marlin_format=True), "gptq", "checkpoint_format marlin"),
    "gptq in words of 16 bits": (gptq(pack_dtype="int16"), "gptq", "packed in int16"),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4", "MXFP4"),
    "modelopt": ({"quant_method": "modelopt"}, "modelopt", "choose the compressed-tensors"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", "choose the compressed-tensors"),
    "a method that nobody knows": ({"quant_method": "aqlm"}, "aqlm", "gptq, awq, compressed-"),
    "W4A8": (
        ct(group={"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}),
        "compressed-tensors",
        "quantised activations (W4A8)",
    ),
    "3 bits": (ct({"num_bits": 3}), "compressed-tensors", "weights of 3 bits, int"),
    "nvfp4": (
        ct({"type": "float"}, format="nvfp4-pack-quantized"),
        "compressed-tensors",
        "format nvfp4-pack-quantized",
    ),
    "marlin-24": (ct(format="marlin-24"), "compressed-tensors", "format marlin-24"),
    "mixed forms": (
        ct(group={"format": "mxfp4-pack-quantized"}, format="mixed-precision"),
        "compressed-tensors",
        "format mxfp4-pack-quantized",
    ),
    "sparse": (
        ct(sparsity_config={"format": "sparse-24-bitmask"}),
        "compressed-tensors",
        "sparse weights",
    ),
    "rotated": (
        ct(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
        "compressed-tensors",
        "rotated (transform_config)",
    ),
    "quantised outputs": (
        ct(group={"output_activations": {"num_bits": 8}}),
        "compressed-tensors",
        "quantised outputs",
    ),
    "fp8 with zero points": (
        ct({"num_bits": 8, "type": "float", "symmetric": False}, format="float-quantized"),
        "compressed-tensors",
        "FP8 with zero points",
    ),
    "int8 in blocks": (
        ct({"num_bits": 8, "strategy": "block"}, format="int-quantized"),
        "compressed-tensors",
        "strategy block",
    ),
    "fp8 e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8", "FP8 in e5m2"),
    "fp8 whose scales divide": (
        {"quant_method": "fp8", "weight_scale_semantics": "inverse"},
        "fp8",
        "scales that divide (weight_scale_semantics inverse)",
    ),
}


@pytest.mark.parametrize("first", ["Linear", "named"])
def test_groups_of_compressed_tensors_may_come_in_any_order(first: str) -> None:
    own: dict[str, Any] = {"type": "int", "symmetric": True}
    groups = {
        "Linear": {"targets": ["Linear"], "weights": own | {"num_bits": 4, "strategy": "channel"}},
        "named": {
            "targets": ["re:.*down_proj"],
            "weights": own | {"num_bits": 8, "strategy": "channel"},
        },
    }
    order = sorted(groups, key=lambda name: name != first)
    config = ct(config_groups={f"group_{i}": groups[name] for i, name in enumerate(order)})
    describe = read_format(config).describe
    for name, bits in (("model.layers.0.self_attn.q_proj", 4), ("model.layers.0.mlp.down_proj", 8)):
        parts = {
            "weight_packed": StoredTensor("I32", (256, 256 * bits // 32)),
            "weight_scale": StoredTensor("BF16", (256, 1)),
            "weight_shape": StoredTensor("I64", (2,)),
        }
        assert describe(name, parts).scheme.kind == f"int{bits}"


def refusal(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What all ways to a checkpoint tell, none of which gets to its weights."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(packer, "load_quantized", read)
    monkeypatch.setattr(packer.AutoModelForCausalLM, "from_pretrained", read)
    why = unsupported_weights(directory)
    assert why is not None
    assert "\n" not in why
    for way in (packer.load_reference, build_on_meta):
        with pytest.raises(ValueError, match=r"^/") as told:
            way(directory, torch.float16)
        assert str(told.value) == f"{directory}: {why}"
    return why


@pytest.mark.parametrize("case", BY_CONFIG)
def test_configuration_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, method, reason = BY_CONFIG[case]
    written = {"model_type": "qwen2", "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (tmp_path / "model.safetensors").write_bytes(b"never opened")
    why = refusal(tmp_path, monkeypatch)
    assert why.startswith(f"the weights are quantised ({method}, by config.json): not supported: ")
    assert reason in why
    assert len(why) < 250


def stored(recipe: QuantizeName, N: int, K: int) -> dict[str, torch.Tensor]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    return quantizer(recipe).quantize(NAME, weight)


def in_groups_of_16() -> dict[str, torch.Tensor]:
    tensors = stored("gptq-4-32-asym", 64, 128)
    for leaf in ("scales", "qzeros"):
        tensors[leaf] = tensors[leaf].repeat_interleave(2, 0)
    return tensors


def without(tensors: dict[str, torch.Tensor], leaf: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != leaf}


BY_HEADERS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "groups of 16": (
        gptq(group_size=16),
        in_groups_of_16(),
        f"{NAME} has 128 input channels in gr",
    ),
    "channels that are no multiple of 32": (
        ct({"strategy": "channel", "num_bits": 8, "group_size": None}),
        stored("ct-w8a16", 64, 48),
        f"{NAME} has 48 input channels",
    ),
    "tensors of another format": (
        gptq(),
        stored("ct-w4a16", 64, 128),
        f"{NAME} has tensors of another format",
    ),
    "no order of channels": (
        gptq(desc_act=True),
        without(stored("gptq-4-128-order", 64, 256), "g_idx"),
        f"desc_act is set, but {NAME}.g_idx is missing",
    ),
    "no scales": (awq(), without(stored("awq-4-128", 64, 128), "scales"), "scales is missing"),
    "scales of other groups": (
        awq(group_size=64),
        stored("awq-4-128", 64, 128),
        "scales is F16, 1 x 64: not as its format has it",
    ),
    "scales of another type": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {
            "weight": torch.zeros(128, 128).to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8),
        },
        "weight_scale_inv is U8, 1 x 1: not as its format has it",
    ),
    "one zero point for all": (
        ct({"strategy": "tensor", "symmetric": False}),
        {
            **stored("ct-w4a16-asym", 64, 128),
            "weight_scale": torch.ones(1),
        },
        "has one zero point for all its values",
    ),
    "plain weights": (gptq(), {"weight": torch.ones(64, 64)}, "no weight of the files is"),
}


@pytest.mark.parametrize("case", BY_HEADERS)
def test_tensors_are_refused_in_one_line_by_their_headers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors, reason = BY_HEADERS[case]
    written = {"model_type": "qwen2", "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(written))
    named = {f"{NAME}.{leaf}": tensor for leaf, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    why = refusal(tmp_path, monkeypatch)
    method = config["quant_method"]
    assert why.startswith(f"the weights are quantised ({method}, by config.json): ")
    assert reason in why
    assert len(why) < 250


def test_configuration_beside_the_model_s_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "quantize_config.json").write_text(json.dumps(gptq(group_size=16)))
    named = {f"{NAME}.{leaf}": tensor for leaf, tensor in in_groups_of_16().items()}
    save_file(named, tmp_path / "model.safetensors")
    assert "(gptq, by quantize_config.json): " in refusal(tmp_path, monkeypatch)


@pytest.mark.parametrize("recipe", ["gptq-4-128", "gptq-8-128"])
def test_symmetric_weights_of_the_other_gptq_format_are_refused(
    recipe: QuantizeName, tmp_path: Path
) -> None:
    """Only values tell them apart, so that loading does."""
    checkpoint = write_checkpoint(tmp_path / "gptq", "tiny", quantize=recipe)
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq"
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is its checkpoint_format gptq\?$"):
        packer.load_reference(checkpoint, torch.float16)
