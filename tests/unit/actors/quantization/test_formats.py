"""What the configuration of a quantised checkpoint says beside how its weights are stored."""

from typing import Any

import pytest

from actors.quantization.formats import StoredTensor, read_format

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
