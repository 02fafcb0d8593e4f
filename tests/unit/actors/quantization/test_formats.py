"""What the configuration of a quantised checkpoint says beside how its weights are stored."""

import time
from typing import Any

import pytest

from actors.quantization.formats import StoredTensor, Unserved, read_format

NAME = "model.layers.0.mlp.down_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSORS = {"quant_method": "fp8"}


def of_compressed_tensors(inputs: dict[str, Any] | None, kind: str = "float") -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    form = "float-quantized" if kind == "float" else "int-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"0": group}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BLOCKS, True),
        (BLOCKS | {"activation_scheme": "dynamic"}, True),
        (BLOCKS | {"activation_scheme": None}, False),
        (TENSORS | {"activation_scheme": "static"}, True),
        (of_compressed_tensors({"num_bits": 8, "type": "float", "dynamic": True}), True),
        (of_compressed_tensors(None), False),
        (of_compressed_tensors({"num_bits": 8, "type": "int"}), False),
        (of_compressed_tensors({"num_bits": 8, "type": "int"}, "int"), False),
        (of_compressed_tensors({"num_bits": 8, "type": "float"}, "int"), False),
    ],
)
def test_whether_it_was_made_for_quantised_inputs(config: dict[str, Any], expected: bool) -> None:
    is_int = config.get("format") == "int-quantized"
    scales = (2, 2) if "weight_block_size" in config else (256, 1)
    parts = {
        "weight": StoredTensor("I8" if is_int else "F8_E4M3", (256, 256)),
        "weight_scale": StoredTensor("F32", scales),
    }
    assert read_format(config).describe(NAME, parts).quantised_inputs is expected


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
GPTQ_PARTS = {
    "qweight": StoredTensor("I32", (32, 256)),
    "qzeros": StoredTensor("I32", (2, 32)),
    "scales": StoredTensor("F16", (2, 256)),
}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_PARTS = {
    "weight": StoredTensor("F8_E4M3", (256, 256)),
    "weight_scale": StoredTensor("F32", (256, 1)),
}


def of_groups(**group: Any) -> dict[str, Any]:
    groups = {"0": {"targets": ["Linear"], "weights": CHANNELS} | group}
    form = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return form | {"config_groups": groups}


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"bits": "four"},
        GPTQ | {"bits": float("inf")},
        GPTQ | {"bits": None},
        GPTQ | {"group_size": None},
        GPTQ | {"dynamic": {"(": {}}},
        GPTQ | {"dynamic": {"(" * 4000: {}}},
        GPTQ | {"dynamic": {"a" * 5000: {}}},
        GPTQ | {"dynamic": {"a{1000000000}": {}}},
        GPTQ | {"dynamic": {"(a{1000}){1000}": {}}},
        GPTQ | {"dynamic": {".*": {"group_size": None}}},
        GPTQ | {"dynamic": {".*": {"group_size": "a\nb"}}},
        GPTQ | {"dynamic": {".*": 3}},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, None]},
        of_groups(weights=CHANNELS | {"strategy": "block", "block_structure": [1]}),
        of_groups(weights=CHANNELS | {"num_bits": "eight"}),
        of_groups(targets=[1]),
        of_groups(targets=["re:("]),
    ],
    ids=lambda config: str(config)[:100],
)
def test_wrong_values_are_refused_in_a_line(config: dict[str, Any]) -> None:
    parts = GPTQ_PARTS if config["quant_method"] == "gptq" else FP8_PARTS
    tensors = {f"{NAME}.{leaf}": tensor for leaf, tensor in parts.items()}
    with pytest.raises(Unserved) as told:
        read_format(config).projections(tensors)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 250


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"dynamic": {"(([a-z]|[a-z0-9._])+)+[#!]": {"bits": 8}}},
        GPTQ | {"dynamic": {"-:(([a-z]|[a-z0-9._])+)+[#!]": {}}},
        of_groups(targets=["re:(([a-z]|[a-z0-9._])+)+[#!]"]),
    ],
    ids=["dynamic", "dynamic, left out", "targets"],
)
def test_pattern_that_would_take_for_ever_is_refused(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.quantization.formats._PATTERNS_S", 0.05)
    parts = GPTQ_PARTS if config["quant_method"] == "gptq" else FP8_PARTS
    tensors = {f"{NAME}.{leaf}": tensor for leaf, tensor in parts.items()}
    started_s = time.monotonic()
    with pytest.raises(Unserved, match="takes too long to match"):
        read_format(config).projections(tensors)
    assert time.monotonic() - started_s < 5.0


def test_usual_patterns_are_obeyed() -> None:
    config = GPTQ | {
        "dynamic": {r"+:.*\.\d{1,2}\..*up_proj": {"bits": 8}, r".*\.down_proj": {"sym": False}}
    }
    tensors = {f"{NAME}.{leaf}": tensor for leaf, tensor in GPTQ_PARTS.items()}
    assert read_format(config).projections(tensors)[NAME].scheme.zeros
